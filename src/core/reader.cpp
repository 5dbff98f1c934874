#include "reader.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <chrono>

namespace spile {
namespace {

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22  // Linux 5.14; the headers of older C libraries lack it
#endif

constexpr uint64_t kLargestCall = 1u << 30;  // Linux stops a read at 2 GiB less a page, macOS refuses more than INT_MAX
constexpr uint64_t kPage = 4096;             // where a direct read may begin, as in store.py

// Returns 0, or errno: EFAULT where the file under the mapping has become shorter.
int make_present(uint8_t* at, uint64_t nbytes) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t start = (uintptr_t)at / page * page, end = ((uintptr_t)at + nbytes + page - 1) / page * page;
#if defined(__linux__)
  if (madvise(reinterpret_cast<void*>(start), end - start, MADV_POPULATE_READ) == 0) return 0;
  if (errno == EFAULT) return errno;  // touching the pages would kill the process
#endif
  for (uintptr_t p = start; p < end; p += page) (void)*reinterpret_cast<volatile const uint8_t*>(p < (uintptr_t)at ? (uintptr_t)at : p);
  return 0;
}

}  // namespace

bool read_cached(const ReadRequest& r) {
#if defined(__linux__) && defined(RWF_NOWAIT)
  uint64_t got = 0;
  while (got < r.wanted) {
    const uint64_t left = r.wanted - got;
    struct iovec part = {r.to + got, static_cast<size_t>(left < kLargestCall ? left : kLargestCall)};
    const ssize_t n = preadv2(r.fd, &part, 1, static_cast<off_t>(r.offset + got), RWF_NOWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;  // not cached, or a file system that cannot say: the reader threads find out
    got += static_cast<uint64_t>(n);
  }
  return true;
#else
  (void)r;
  return false;
#endif
}

Reader::Reader(int num_threads) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

Reader::~Reader() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    queue_.clear();  // nobody can wait for these any more, and their buffers may be gone
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

uint64_t Reader::submit(std::vector<ReadRequest> requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t ticket = next_ticket_++;
  tickets_[ticket].left = static_cast<int>(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    queue_.push_back({requests[i], ticket, static_cast<int>(i)});
    wake_.notify_one();
  }
  return ticket;
}

bool Reader::is_done(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = tickets_.find(ticket);
  return found == tickets_.end() || found->second.left == 0;
}

ReadFailure Reader::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end()) return {};
  done_.wait(lock, [&] { return tickets_[ticket].left == 0; });
  const ReadFailure failure = tickets_[ticket].failure;
  tickets_.erase(ticket);
  return failure;
}

void Reader::cancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Job& job : queue_) --tickets_[job.ticket].left;
  queue_.clear();
  done_.notify_all();
}

void Reader::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return queue_.empty() && in_flight_ == 0; });
}

ReadCounters Reader::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void Reader::set_faults(const ReadFaults& faults) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_ = faults;
  num_calls_ = 0;
}

ReadFailure Reader::read(const ReadRequest& r, uint64_t* calls) {
  if (r.fd < 0) {
    const int error = make_present(r.to, r.wanted);
    return error ? ReadFailure{0, 0, r.wanted, 0, error} : ReadFailure{};
  }
  ReadFaults faults;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    faults = faults_;
  }
  uint64_t got = 0, stuck = 0;
  while (got < r.wanted) {
    uint64_t ask = r.room - got < kLargestCall ? r.room - got : kLargestCall;
    ssize_t n;
    const uint64_t call = ++num_calls_;
    ++*calls;
    if (faults.max_bytes && ask > faults.max_bytes) ask = faults.max_bytes;
    if (faults.interrupt_every && call % faults.interrupt_every == 0) {
      n = -1;
      errno = EINTR;
    } else if (faults.fail_at && call >= faults.fail_at) {
      n = faults.fail_with ? -1 : 0;
      errno = faults.fail_with;
    } else if (faults.page && (r.offset + got) % faults.page != 0) {
      n = -1;
      errno = EINVAL;
    } else {
      n = pread(r.fd, r.to + got, ask, static_cast<off_t>(r.offset + got));
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && got % kPage != 0 && r.offset % kPage == 0) {
      // A direct read that stopped inside a page goes on from the page's start. Where it stops again, the file ends.
      if (got != stuck) {
        stuck = got;
        got = got / kPage * kPage;
        continue;
      }
      n = 0;
    }
    if (n <= 0) {
      ReadFailure failure;
      failure.index = 0;
      failure.offset = r.offset;
      failure.wanted = r.wanted;
      failure.got = got;
      failure.error = n < 0 ? errno : 0;
      return failure;
    }
    got += static_cast<uint64_t>(n);
  }
  return {};
}

void Reader::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Job job = queue_.front();
    queue_.pop_front();
    ++in_flight_;
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    uint64_t calls = 0;
    ReadFailure failure = read(job.request, &calls);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    lock.lock();
    --in_flight_;
    if (job.request.fd >= 0) {
      counters_.bytes += failure.index < 0 ? job.request.wanted : failure.got;
      counters_.reads += calls;
      counters_.seconds += seconds;
    }
    Ticket& ticket = tickets_[job.ticket];
    if (failure.index >= 0 && ticket.failure.index < 0) {
      failure.index = job.index;
      ticket.failure = failure;
    }
    if (--ticket.left == 0 || (queue_.empty() && in_flight_ == 0)) done_.notify_all();
  }
}

}  // namespace spile
