// Positional reads on threads of their own: requests in, bytes in the given buffers, one ticket for each group of requests.
//
// Knows files by descriptor and memory by address, nothing of experts. A request that ends short, or fails, marks its ticket
// as failed with the numbers; the bytes in its buffer are then worthless.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace spile {

struct ReadRequest {
  int fd;            // -1: no read; make the mapped pages at `to` present instead (EFAULT: their file became shorter)
  uint64_t offset;
  uint64_t wanted;   // bytes that must arrive
  uint64_t room;     // bytes that may be asked for (a direct read asks for whole pages)
  uint8_t* to;
};

struct ReadFailure {
  int index = -1;  // of the request in its group; -1: no failure
  uint64_t offset = 0, wanted = 0, got = 0;
  int error = 0;   // errno, or 0 for an early end of the file
};

struct ReadCounters {
  uint64_t bytes = 0, reads = 0;
  double seconds = 0;  // spent inside reads, summed over threads
};

// What a test makes the system's read do: at most max_bytes a call, EINTR on every nth call, an error (0: an end of the
// file) from the nth call on, EINVAL for a call that does not begin on a multiple of `page`.
struct ReadFaults {
  uint64_t max_bytes = 0;
  uint64_t interrupt_every = 0;
  uint64_t fail_at = 0;
  int fail_with = 0;
  uint64_t page = 0;
};

// Reads a request at once, on this thread, if the page cache holds all of it; else returns false, with any part of the buffer
// written. Never waits for a disk. Linux only: elsewhere always false.
bool read_cached(const ReadRequest& request);

class Reader {
 public:
  explicit Reader(int num_threads);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  uint64_t submit(std::vector<ReadRequest> requests);
  bool is_done(uint64_t ticket);
  ReadFailure wait(uint64_t ticket);  // blocks until the ticket's last request ended; forgets the ticket
  void cancel();                      // drops what has not been started; its tickets end as they are
  void drain();                       // blocks until nothing is in flight
  ReadCounters counters();
  void set_faults(const ReadFaults& faults);

 private:
  struct Job {
    ReadRequest request;
    uint64_t ticket;
    int index;
  };
  struct Ticket {
    int left = 0;
    ReadFailure failure;
  };
  void work();
  ReadFailure read(const ReadRequest& request, uint64_t* calls);

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job> queue_;
  std::unordered_map<uint64_t, Ticket> tickets_;
  uint64_t next_ticket_ = 1;
  int in_flight_ = 0;
  bool stop_ = false;
  ReadCounters counters_;
  ReadFaults faults_;
  std::atomic<uint64_t> num_calls_{0};
  std::vector<std::thread> threads_;
};

}  // namespace spile
