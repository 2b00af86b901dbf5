// The function that a kernel's shared object exports: it runs the programs of a launch.
//
// A kernel is a function `program(args, p)`; the programs of a grid are independent, so any number of
// threads may share them. The threads come from the caller's own OpenMP runtime, passed as the address of its
// GOMP_parallel, so that torch's operators and Loom's kernels use one pool of threads.
#pragma once
#include "simd.h"

enum { FAILED = 1, TOO_LONG = 2, INTERRUPTED = 3 };  // codes of a failure

// A failure, and the program in which it happened. The driver raises it as an exception.
struct Status {
  i32 code;
  i32 program[3];
  char message[496];
  struct Witness *witness;  // of an instrumented kernel (witness_data.h)
  i32 poisoned;             // scratch is filled with 0xFF before every program
  f64 spin_limit;           // seconds that a `while` loop may last; 0: no limit
  struct Interrupts *interrupts;  // by the user (spin.h)
};

struct Program {
  i32 id[3];
  i32 grid[3];
  char *scratch;          // SCRATCH_BYTES of this thread's own, aligned to 64
  Status *status;         // this thread's own
  i32 threads;            // how many programs run at a time
  struct Worker *worker;  // what an instrumented kernel's thread keeps (witness_data.h)
  Status *launch;         // that of all threads
};

// Ends a launch with an error. The program itself continues; programs not yet begun are skipped.
__attribute__((cold)) LOOM_NOINLINE void fail(const Program &p, const char *message, i32 code = FAILED) {
  Status *status = p.status;
  if (status->code) return;
  status->code = code;
  int n = 0;
  for (; message[n] && n < (int)sizeof status->message - 1; ++n) status->message[n] = message[n];
  status->message[n] = 0;
}

extern "C" int sched_yield();

// Whether a `for` loop never ends: its step is not positive, or its counter passes the largest integer.
template <class T> LOOM_INLINE bool never_ends(T first, T end, T step) {
  constexpr T most = (T)(((u64)1 << (sizeof(T) * 8 - 1)) - 1);
  if (__builtin_expect(step > 0 && end <= most - step, 1)) return false;
  return first < end && (step <= 0 || first + ((__int128)end - first + step - 1) / step * step > most);
}

// A function of witness_runtime.h, which is either linked to a kernel or part of its text.
#ifdef LOOM_WITNESS_INSIDE
#define LOOM_SHARED LOOM_NOINLINE
#else
#define LOOM_SHARED
#endif

namespace loom {

#ifdef LOOM_WITNESS
LOOM_SHARED void begin(Witness &, i32 threads, i64 programs);
LOOM_SHARED void end(Witness &, i32 threads);
LOOM_SHARED Worker *worker(Witness &, i32 thread);
LOOM_SHARED bool enter(const Program &, i64 position);
#endif

struct Launch {
  const void *args;
  i32 grid[3];
  i32 threads;
  char *scratch;
  Status *status;
  i64 programs;
  alignas(64) i64 next;  // the first program nobody has taken
  i32 workers;           // how many threads have begun
};

// A thread takes a share of the remaining programs, so a million tiny programs cost a few dozen atomic operations,
// and the last ones, taken one by one, balance programs of unequal length.
LOOM_INLINE bool take(Launch &launch, i64 &begin, i64 &end) {
  begin = __atomic_load_n(&launch.next, __ATOMIC_RELAXED);
  do {
    i64 left = launch.programs - begin;
    if (left <= 0) return false;
    i64 share = left / (4 * (i64)launch.threads);
    end = begin + (share > 1 ? share : 1);
  } while (!__atomic_compare_exchange_n(&launch.next, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return true;
}

// If several threads fail, the first failure is reported.
LOOM_NOINLINE void report(Status *to, const Status &own) {
  i32 none = 0;
  if (!__atomic_compare_exchange_n(&to->code, &none, own.code, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  __builtin_memcpy(to->program, own.program, sizeof own.program);
  __builtin_memcpy(to->message, own.message, sizeof own.message);
}

template <class Args, void (*program)(const Args &, const Program &), i64 SCRATCH> static void work(void *data) {
  Launch &launch = *(Launch *)data;
  const Args &args = *(const Args *)launch.args;
  const i32 gx = launch.grid[0], gy = launch.grid[1];
  const i32 thread = __atomic_fetch_add(&launch.workers, 1, __ATOMIC_RELAXED);
  Status own;
  own.code = 0;
  Program p = {{0, 0, 0}, {gx, gy, launch.grid[2]}, launch.scratch + thread * SCRATCH, &own, launch.threads, nullptr,
               launch.status};
#ifdef LOOM_WITNESS
  p.worker = worker(*launch.status->witness, thread);
#endif
  for (i64 i, end; take(launch, i, end);) {
    p.id[0] = (i32)(i % gx), p.id[1] = (i32)(i / gx % gy), p.id[2] = (i32)(i / gx / gy);
    for (; i < end; ++i) {
      if (__atomic_load_n(&launch.status->code, __ATOMIC_RELAXED)) return;
      if (launch.status->poisoned) __builtin_memset(p.scratch, 0xFF, SCRATCH);
#ifdef LOOM_WITNESS
      if (enter(p, i))
#endif
        program(args, p);
      if (own.code) {
        __builtin_memcpy(own.program, p.id, sizeof p.id);
        return report(launch.status, own);
      }
      if (++p.id[0] == gx) {
        p.id[0] = 0;
        if (++p.id[1] == gy) p.id[1] = 0, ++p.id[2];
      }
    }
  }
}

template <class Args, void (*program)(const Args &, const Program &), i64 SCRATCH>
LOOM_INLINE i32 launch(const void *args, i32 gx, i32 gy, i32 gz, i32 threads, void *gomp_parallel, char *scratch,
                       Status *status) {
  void (*body)(void *) = work<Args, program, (SCRATCH + 63) / 64 * 64>;
  Launch launch = {args, {gx, gy, gz}, threads, scratch, status, (i64)gx * gy * gz, 0, 0};
  status->code = 0;
#ifdef LOOM_WITNESS
  begin(*status->witness, threads, launch.programs);
#endif
  if (threads > 1 && gomp_parallel)
    ((void (*)(void (*)(void *), void *, unsigned, unsigned))gomp_parallel)(body, &launch, threads, 0);
  else
    body(&launch);
#ifdef LOOM_WITNESS
  end(*status->witness, threads);
#endif
  return status->code;
}

}  // namespace loom

// Closes the file of a generated kernel.
#define LOOM_KERNEL(name, Args, program, SCRATCH_BYTES)                                                        \
  extern "C" __attribute__((visibility("default"))) const char loom_name[] = #name;                            \
  extern "C" __attribute__((visibility("default"))) i32 loom_launch(                                           \
      const void *args, i32 gx, i32 gy, i32 gz, i32 threads, void *gomp_parallel, char *scratch,               \
      Status *status) {                                                                                        \
    return loom::launch<Args, program, SCRATCH_BYTES>(args, gx, gy, gz, threads, gomp_parallel, scratch,       \
                                                      status);                                                 \
  }
