// Ends a `while` loop of a kernel that takes too long, or that a user interrupts.
//
// A loop counts its rounds down and checks here every few milliseconds at most. Ctrl-C reaches a launch from its first
// long loop on, which installs a handler before Python's; Python's handler is still called.
#pragma once
#include <signal.h>
#include <time.h>

#include "launch.h"

// State shared by the launches of a process. Python passes a zeroed one.
struct Interrupts {
  i32 lock, loops;  // how many loops are listening
  i32 count;        // of signals while one was
  struct sigaction before;
  void (*handler)(int, siginfo_t *, void *);  // that was installed last
};

namespace loom {

static Interrupts *heard;

static void hear(int signal, siginfo_t *about, void *context) {
  __atomic_fetch_add(&heard->count, 1, __ATOMIC_RELAXED);
  if (heard->before.sa_flags & SA_SIGINFO) heard->before.sa_sigaction(signal, about, context);
  else heard->before.sa_handler(signal);
}
// The first loop to listen installs a handler. The last one removes it, unless somebody else has: LLVM's handler, which
// comes with Triton, restores its predecessor as soon as it is called.
static void listen(Interrupts &all, i32 change) {
  while (__atomic_exchange_n(&all.lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
  struct sigaction now;
  sigaction(SIGINT, nullptr, &now);
  if (all.loops == 0 && now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN) {
    heard = &all, all.before = now, all.handler = hear;
    now.sa_sigaction = hear, now.sa_flags = SA_SIGINFO | (now.sa_flags & SA_ONSTACK);
    sigaction(SIGINT, &now, nullptr);
  }
  all.loops += change;
  if (all.loops == 0 && all.handler && now.sa_sigaction == all.handler) sigaction(SIGINT, &all.before, nullptr);
  __atomic_store_n(&all.lock, 0, __ATOMIC_RELEASE);
}

LOOM_INLINE f64 now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (f64)time.tv_sec + 1e-9 * (f64)time.tv_nsec;
}

}  // namespace loom

// One run of a loop. It `only_waits` if no round does more than read memory.
struct Spin {
  const Program &p;
  const char *const line;
  const bool only_waits;
  i32 rounds = FIRST;  // until the next check
  i64 asked = 0;       // rounds so far
  f64 begun = 0, last = 0;
  bool listening = false;
  i32 interrupts = 0;

  static constexpr i32 FIRST = 4;

  Spin(const Program &p_, const char *line_, bool only_waits_) : p(p_), line(line_), only_waits(only_waits_) {}
  Spin(const Spin &) = delete;
  ~Spin() {
    if (listening) loom::listen(*p.launch->interrupts, -1);
  }

  // The number of rounds until the next check; 0 if the program must end.
  __attribute__((noinline)) i32 go_on() {
    asked += rounds;
    if (only_waits) sched_yield();
    const f64 time = loom::now();
    if (!begun) begun = last = time;
    if (p.status->code || __atomic_load_n(&p.launch->code, __ATOMIC_RELAXED)) return 0;
    if (only_waits && in_vain())
      return end(FAILED, "a program waits for memory that no program changes which has begun: launch with "
                         "launch_cooperative_grid=True if another one does");
    if (p.launch->spin_limit > 0 && time - begun > p.launch->spin_limit)
      return end(TOO_LONG, "the loop did not end within the limit");
    Interrupts &all = *p.launch->interrupts;
    if (!listening && time - begun > 0.02) {
      loom::listen(all, 1);
      listening = true, interrupts = __atomic_load_n(&all.count, __ATOMIC_RELAXED);
    }
    if (listening && interrupts != __atomic_load_n(&all.count, __ATOMIC_RELAXED)) return end(INTERRUPTED, "interrupted");
    if (time - last > 0.005) rounds = rounds > 1 ? rounds / 2 : 1;
    else if (rounds < (only_waits ? 256 : 1 << 20)) rounds *= 2;
    last = time;
    return rounds;
  }

  // Whether the loop waits forever: the program that would end the wait begins only after this one.
  bool in_vain() const {
    const i64 programs = (i64)p.grid[0] * p.grid[1] * p.grid[2];
    return p.threads < programs && asked >= (p.threads == 1 ? 1 << 20 : 1 << 28);
  }

  i32 end(i32 code, const char *why) const {
    char message[sizeof p.status->message];
    const char *const parts[] = {line, ": ", why};
    i32 n = 0;
    for (const char *part : parts)
      for (; *part && n < (i32)sizeof message - 1; ++part) message[n++] = *part;
    message[n] = 0;
    fail(p, message, code);
    return 0;
  }
};

