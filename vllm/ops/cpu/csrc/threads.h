// What threads keep from call to call, and how a parallel region divides its work among them.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

static inline int threads_for(long work) { return work < 8192 ? 1 : omp_get_max_threads(); }

class Buffer {  // belongs to one thread; grows, never shrinks
 public:
  ~Buffer() { std::free(memory_); }
  template <class T = float>
  T* get(long count) {
    size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
    if (bytes > bytes_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Returns an object that this thread keeps from call to call. Callers keep the reference, because the compiler looks up a
// thread-local variable at every use.
template <class T, int WHICH = 0>
static T& thread_local_object() {
  static thread_local T object;
  T* found = &object;
  asm("" : "+r"(found));
  return *found;
}

// Items divided among the threads of a parallel region. Each thread first takes its own contiguous range, which is the
// same for the same number of items, so that what it has written is in its cache; then it steals the last items of others.
class WorkQueue {
 public:
  static constexpr long EMPTY = -1;

  WorkQueue(long items, Buffer& memory) : count_(omp_get_max_threads()), ranges_(memory.get<Range>(count_)) { divide(items); }

  // Divides items anew; no thread may take one meanwhile.
  void divide(long items) {
    for (long t = 0; t < count_; ++t) (new (ranges_ + t) Range)->bounds = bounds_of(items * t / count_, items * (t + 1) / count_);
  }

  long take() {
    const long thread = omp_get_thread_num();
    for (long i = 0; i < count_; ++i) {
      std::atomic<uint64_t>& bounds = ranges_[(thread + i) % count_].bounds;
      uint64_t now = bounds.load(std::memory_order_relaxed);
      while (now >> 32 < (uint32_t)now) {
        const long begin = now >> 32, end = (uint32_t)now;
        if (bounds.compare_exchange_weak(now, i == 0 ? bounds_of(begin + 1, end) : bounds_of(begin, end - 1)))
          return i == 0 ? begin : end - 1;
      }
    }
    return EMPTY;
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> bounds;  // begin and end, 32 bits each
  };
  static uint64_t bounds_of(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  long count_;
  Range* ranges_;
};

// Prefetches memory that will be read soon.
struct MemoryRange {
  const void* begin = nullptr;
  long bytes = 0;
};
