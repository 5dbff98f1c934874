#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spile {
namespace {

// About 50 microseconds: longer than the gap between two loops of a layer, shorter than a scheduler's slice. On a
// machine whose cores also serve the reader threads, spinning on would take their time.
constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr int kLoopShift = 32;

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  for (int t = 1; t < num_threads_; ++t) threads_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::take(int thread) {
  for (;;) {
    const int i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_) return;
    body_(context_, i, thread);
  }
}

void ThreadPool::run_loop(int n, Body body, const void* context) {
  n_ = n;
  body_ = body;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  const uint64_t loop = (state_.load(std::memory_order_relaxed) >> kLoopShift) + 1;
  state_.store(loop << kLoopShift | kOpen, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  take(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; state_.load(std::memory_order_acquire) & kInside; ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;  // the last loop that was joined or missed
  for (int spins = 0; !stop_.load(std::memory_order_relaxed);) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (state >> kLoopShift != seen) {
      if (!(state & kOpen)) {
        seen = state >> kLoopShift;
      } else if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        seen = state >> kLoopShift;
        take(thread);
        state_.fetch_sub(1, std::memory_order_acq_rel);
      }
      spins = 0;
      continue;
    }
    if (++spins < kSpins) {
      pause();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return stop_ || state_.load(std::memory_order_seq_cst) >> kLoopShift != seen; });
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace spile
