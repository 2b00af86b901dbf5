// Time profile of a kernel: ticks of the processor's clock between one nest and the next, on every thread.
//
// LOOM_EXPLAIN is the number of nests. Nest 0 is what comes before the first and has no line of its own.
#pragma once
#include "simd.h"

extern "C" __attribute__((visibility("default"))) u64 loom_explained[2][LOOM_EXPLAIN] = {};  // ticks, times begun

namespace loom {

LOOM_INLINE u64 ticks() {
#if defined __x86_64__
  return __builtin_ia32_rdtsc();
#elif defined __aarch64__
  u64 now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return 0;
#endif
}

struct Laps {
  u64 spent[2][LOOM_EXPLAIN];
  u64 last;
  i32 nest;
};
static thread_local Laps laps;

LOOM_INLINE void lap(i32 nest) {
  u64 now = ticks();
  laps.spent[0][laps.nest] += now - laps.last;
  laps.last = now;
  laps.nest = nest;
  ++laps.spent[1][nest];
}

// The laps of one program, added to the total when it ends, wherever that is.
struct Explained {
  Explained() { laps.last = ticks(), laps.nest = 0, ++laps.spent[1][0]; }
  ~Explained() {
    lap(0), --laps.spent[1][0];
    for (int what = 0; what < 2; ++what)
      for (int nest = 0; nest < LOOM_EXPLAIN; ++nest) {
        __atomic_fetch_add(&loom_explained[what][nest], laps.spent[what][nest], __ATOMIC_RELAXED);
        laps.spent[what][nest] = 0;
      }
  }
};

}  // namespace loom
