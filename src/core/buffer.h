// Arrays that start on a cache line: a 64-byte load that crosses one costs two.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace spile {

template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) {
    void* p = std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return static_cast<T*>(p);
  }
  void deallocate(T* p, size_t) { std::free(p); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;

}  // namespace spile
