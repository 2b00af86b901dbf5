// Memory for the machine itself, which is not linked to a C++ library.
#pragma once
#include "../simd.h"

extern "C" {
void *malloc(unsigned long);
void *calloc(unsigned long, unsigned long);
void *realloc(void *, unsigned long);
void *aligned_alloc(unsigned long, unsigned long);
void free(void *);
int sched_yield();
int clock_gettime(int, void *);
int usleep(unsigned);
int gettid();
}

namespace gpu {

// An array that grows; its elements are plain data.
template <class T> struct Vec {
  T *data;
  u32 count, capacity;

  T &operator[](u32 k) { return data[k]; }
  const T &operator[](u32 k) const { return data[k]; }
  T *begin() { return data; }
  T *end() { return data + count; }
  void push(const T &x) {
    if (count == capacity) {
      capacity = capacity ? 2 * capacity : 16;
      data = (T *)realloc(data, capacity * sizeof(T));
    }
    data[count++] = x;
  }
  void remove(u32 k) {  // preserves the order of the others
    for (--count; k < count; ++k) data[k] = data[k + 1];
  }
  void clear() { count = 0; }
  void release() {
    free(data);
    data = nullptr, count = capacity = 0;
  }
};

// Nanoseconds since an arbitrary moment.
inline u64 now() {
  i64 time[2];
  clock_gettime(1, time);  // CLOCK_MONOTONIC
  return (u64)time[0] * 1000000000 + (u64)time[1];
}

// Zeroed, aligned to 64.
inline void *allocate(u64 bytes) {
  const u64 whole = (bytes + 63) / 64 * 64;
  void *memory = aligned_alloc(64, whole ? whole : 64);
  if (memory) __builtin_memset(memory, 0, whole);
  return memory;
}

}  // namespace gpu
