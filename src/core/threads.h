// A pool of compute threads that runs one loop at a time.
//
// `run(n, f)` calls f(i, thread) once for each i in [0, n), on any thread, and returns when all are done. Which thread
// takes which i changes nothing: every loop body writes its own outputs. Workers spin for a short while between loops (a
// token has some 150 of them) and sleep after that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace spile {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  template <class F>
  void run(int n, const F& f) {
    if (n <= 0) return;
    if (n == 1 || num_threads_ == 1) {
      for (int i = 0; i < n; ++i) f(i, 0);
      return;
    }
    run_loop(n, [](const void* context, int i, int thread) { (*static_cast<const F*>(context))(i, thread); }, &f);
  }

 private:
  using Body = void (*)(const void*, int, int);
  void run_loop(int n, Body body, const void* context);
  void take(int thread);
  void work(int thread);

  int num_threads_;
  std::vector<std::thread> threads_;
  // Upper half: which loop. Bit 31: it can be joined. The rest: workers inside. What a loop is (n_, body_, context_) changes
  // only while nobody is inside and nobody can join.
  std::atomic<uint64_t> state_{0};
  std::atomic<int> next_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  int n_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace spile
