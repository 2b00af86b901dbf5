// The machine as a shared library: CPU threads take the blocks of a grid one after another.
#include "async.h"
#include "atomics.h"
#include "barriers.h"
#include "control.h"
#include "counters.h"
#include "lanes.h"
#include "memory.h"
#include "scalar.h"
#include "global_shadow.h"
#include "shadow.h"

namespace gpu {

// ---- a block --------------------------------------------------------------------------------------------

static u64 special_value(const Special &s, const Block &b, u32 warp, u32 lane) {
  const u32 thread = warp * LANES + lane;
  switch (s.kind) {
    case TID_X: return thread;
    case TID_Y: case TID_Z: return 0;
    case NTID_X: return b.thread_count;
    case NTID_Y: case NTID_Z: return 1;
    case CTAID_X: case CTAID_Y: case CTAID_Z: return b.id[s.kind - CTAID_X];
    case NCTAID_X: case NCTAID_Y: case NCTAID_Z: return b.launch->grid[s.kind - NCTAID_X];
    case LANEID: return lane;
    case WARPID: return warp;
    case NWARPID: return b.warp_count;
    case PARAMETERS: return (u64)b.launch->parameters + s.addend;
    case DYNAMIC_SHARED: return SHARED_BASE + s.addend;
    case CLUSTER_CTAID: return 0;
    case CLUSTER_NCTAID: return 1;
    case LANEMASK_EQ: return 1u << lane;
    case LANEMASK_LT: return (1u << lane) - 1;
    case LANEMASK_LE: return (2u << lane) - 1;
    case LANEMASK_GE: return ~((1u << lane) - 1);
    case LANEMASK_GT: return ~((2u << lane) - 1);
    case CLOCK: case GRIDID: case SMID: return 0;
    case NSMID: return 1;
  }
  return 0;
}

static void fill_specials(Block &b) {
  const Launch &launch = *b.launch;
  for (u32 k = 0; k < launch.special_count; ++k) {
    const Special &s = launch.specials[k];
    const bool wide = s.kind == PARAMETERS;
    for (u32 warp = 0; warp < b.warp_count; ++warp)
      for (u32 lane = 0; lane < LANES; ++lane) {
        const u64 value = special_value(s, b, warp, lane);
        u8 *registers = b.warps[warp].registers + s.offset;
        if (wide) ((u64 *)registers)[lane] = value;
        else ((u32 *)registers)[lane] = (u32)value;
      }
  }
}

static void enter(Block &b, u64 linear) {
  const Launch &launch = *b.launch;
  b.linear = linear;
  b.id[0] = (u32)(linear % launch.grid[0]);
  b.id[1] = (u32)(linear / launch.grid[0] % launch.grid[1]);
  b.id[2] = (u32)(linear / launch.grid[0] / launch.grid[1]);
  b.live_threads = b.thread_count;
  begin_closures(b);
  begin_clocks(b);
  b.pending.clear();
  for (Barrier &barrier : b.barriers)
    if (barrier.arrived) barrier = {};
  for (u32 k = 0; k < b.warp_count; ++k) {
    Warp &w = b.warps[k];
    w.number = k;
    w.live = w.active = FULL;
    w.pc = 0, w.reconverge = NOWHERE, w.current = 0, w.fragments_used = 1, w.turns = 0, w.polls = 0;
    w.fragments[0] = {0, NOWHERE, FULL, READY, NOWHERE, 0, 0};
  }
  fill_specials(b);
}

// ---- running --------------------------------------------------------------------------------------------

template <bool COUNTS> LOOM_NOINLINE void run(Warp &w) {
  const Instruction *program = w.block->launch->instructions;
  u64 *executed = w.block->worker->executed;
  w.running = 1, w.turns = 0;
  resume(w, w.current);
  do {
    if (__builtin_expect(w.pc == w.reconverge, 0)) {
      suspend(w);
      finish(w);
      continue;
    }
    const Instruction &i = program[w.pc];
    ++executed[w.pc];
    ++w.pc;
    w.mask = w.active & (*(const u32 *)(w.registers + i.guard) ^ i.flip);
    if (__builtin_expect(w.mask != 0, 1)) {
      if constexpr (COUNTS) count(w, i);
      i.handler(w, i);
    }
  } while (w.running);
  if (w.fragments[w.current].state == READY) suspend(w);
}

static bool is_over(const Warp &w) { return w.fragments[0].state == FREE; }
// Something has happened in the block since the warp began to poll: perhaps what it waits for.
static void wake(Warp &w) {
  for (u32 k = 0; k < w.fragments_used; ++k)
    if (w.fragments[k].state == POLLING) w.fragments[k].state = READY;
  w.polls = 0;
}
static bool can_run(Warp &w) {
  if (w.polls && w.polled != w.block->events) wake(w);
  if (w.fragments[w.current].state == READY) return true;
  for (u32 k = 0; k < w.fragments_used; ++k)
    if (w.fragments[k].state == READY) return w.current = k, true;
  return false;
}

static bool deliver_one(Block &b) {
  if (!b.pending.count) return false;
  Pending first = b.pending[0];
  b.pending.remove(0);
  first.deliver(b, first);
  b.happened();
  return true;
}

// Nobody can continue. Threads that have left the kernel count as having arrived at barriers of the whole block, but that
// is reported: hardware may behave differently.
static bool open_abandoned_barrier(Block &b) {
  for (u32 number = 0; number < BARRIERS; ++number) {
    Barrier &barrier = b.barriers[number];
    if (!barrier.waiting || barrier.expected || barrier.arrived < b.live_threads) continue;
    Warp &w = b.warps[first_lane(barrier.waiting)];
    for (u32 k = 0; k < w.fragments_used; ++k) {
      const Fragment &f = w.fragments[k];
      if (f.state == AT_BARRIER && f.barrier == number)
        found(w, BARRIER_NOT_REACHED, f.pc - 1, first_lane(f.lanes));
    }
    open_barrier(b, number);
    return true;
  }
  return false;
}

// The threads that are left in the block, and where they are.
static void report_where_it_is(Block &b, Kind kind) {
  for (u32 k = 0; k < b.warp_count; ++k) {
    Warp &w = b.warps[k];
    for (u32 n = 0; n < w.fragments_used && !is_over(w); ++n) {
      const Fragment &f = w.fragments[n];
      if (f.state == AT_BARRIER && kind == DEADLOCK) found(w, kind, f.pc - 1, first_lane(f.lanes));
      if (f.state == READY || f.state == POLLING) found(w, kind, f.pc, first_lane(f.lanes));
    }
  }
}

// A digest of a warp's registers and position.
static u64 state_of(const Warp &w) {
  const u64 *words = (const u64 *)w.registers;
  u64 digest = w.pc;
  for (u32 k = 0; k < w.block->launch->register_bytes / 8; ++k) digest = (digest ^ words[k]) * 0x9E3779B97F4A7C15ull;
  return digest;
}

// Whether any warp does something other than wait at a barrier, or for an event.
static bool anybody_goes_on(const Block &b) {
  for (u32 k = 0; k < b.warp_count; ++k)
    for (u32 n = 0; n < b.warps[k].fragments_used; ++n)
      if (b.warps[k].fragments[n].state == READY) return true;
  return false;
}

// Whether all warps are where they were, with the same registers: they wait in loops for memory to change.
static bool nothing_changed(Block &b) {
  bool same = true;
  for (u32 k = 0; k < b.warp_count; ++k) {
    Warp &w = b.warps[k];
    if (is_over(w)) continue;
    const u64 state = state_of(w);
    same &= state == w.state;
    w.state = state;
  }
  return same;
}

// Other blocks may do what this one waits for, as long as not all of them are waiting themselves.
static bool others_may_help(Launch &launch, bool &waits) {
  if (!waits) __atomic_fetch_add(&launch.waiting, 1, __ATOMIC_ACQ_REL);
  waits = true;
  sched_yield();
  return __atomic_load_n(&launch.waiting, __ATOMIC_ACQUIRE) < launch.workers;
}
static void go_on(Launch &launch, bool &waits) {
  if (waits) __atomic_fetch_sub(&launch.waiting, 1, __ATOMIC_ACQ_REL);
  waits = false;
}

// ---- when to stop ---------------------------------------------------------------------------------------

constexpr u64 LOOK = 50000000;  // nanoseconds

static void look_for_interrupt(Launch &launch) {
  const Interpreter &python = launch.interpreter;
  if (!python.enter) return;
  const int state = python.enter();
  if (python.is_interrupted()) __atomic_store_n(&launch.stopped, BY_INTERRUPT, __ATOMIC_RELAXED);
  python.leave(state);
}
LOOM_NOINLINE void look_at_clock(Block &b) {
  Launch &launch = *b.launch;
  const u64 time = now();
  if (time >= b.worker->next_look) {
    b.worker->next_look = time + LOOK;
    if (b.worker->launches) look_for_interrupt(launch);
  }
  if (time < b.deadline || launch.stopped) return;
  report_where_it_is(b, TIME_LIMIT);
  __atomic_store_n(&launch.stopped, BY_LIMIT, __ATOMIC_RELAXED);
}
// Checked whenever a warp has stopped; reads the clock after many of these, or after one that looped for long.
LOOM_INLINE bool is_stopped(Block &b, const Warp &w) {
  if (__builtin_expect(w.turns >= TURN || (++b.worker->stops & 1023) == 0, 0)) look_at_clock(b);
  return __builtin_expect(__atomic_load_n(&b.launch->stopped, __ATOMIC_RELAXED), 0);
}

static void run_block(Block &b) {
  u64 seen = b.events;
  bool waits = false;
  b.deadline = b.launch->limit ? now() + b.launch->limit : ~0ull;
  for (u32 idle = 0;;) {
    bool over = true, ran = false;
    for (u32 k = 0; k < b.warp_count; ++k) {
      Warp &w = b.warps[k];
      if (is_over(w)) continue;
      over = false;
      if (!can_run(w)) continue;
      b.worker->counts ? run<true>(w) : run<false>(w);
      ran = true;
      if (is_stopped(b, w)) return go_on(*b.launch, waits);
    }
    if (over) break;
    if (b.events != seen) {
      seen = b.events, idle = 0;
      go_on(*b.launch, waits);
    } else if (ran && anybody_goes_on(b) && !nothing_changed(b)) {
      idle = 0;
      go_on(*b.launch, waits);
    } else if (deliver_one(b) || open_abandoned_barrier(b)) {
      continue;
    } else if (!ran || (!others_may_help(*b.launch, waits) && ++idle >= 4)) {
      report_where_it_is(b, DEADLOCK);
      break;
    }
  }
  go_on(*b.launch, waits);
}

// The launching thread responds to Ctrl-C until all others are done.
static void wait_for_others(Launch &launch) {
  const u64 began = now();
  for (u64 looked = began; __atomic_load_n(&launch.over, __ATOMIC_ACQUIRE) < launch.started;) {
    const u64 time = now();
    if (time < began + LOOK) sched_yield();
    else usleep(1000);
    if (time >= looked + LOOK) looked = time, look_for_interrupt(launch);
  }
}

static void work(void *data) {
  Launch &launch = *(Launch *)data;
  Worker &worker = *(Worker *)allocate(sizeof(Worker));
  worker.launches = gettid() == launch.thread;
  __atomic_fetch_add(&launch.started, 1, __ATOMIC_ACQ_REL);
  Block &b = worker.block;
  worker.launch = b.launch = &launch;
  b.worker = &worker;
  b.thread_count = launch.threads, b.warp_count = (launch.threads + LANES - 1) / LANES;
  b.shared_bytes = launch.shared_bytes;
  b.checks = launch.options & HAZARDS;
  const u64 register_bytes = (launch.register_bytes + 63) / 64 * 64;
  worker.registers = (u8 *)allocate(register_bytes * b.warp_count);
  b.shared = worker.shared_memory = (u8 *)allocate(launch.shared_bytes + 64);
  worker.executed = (u64 *)allocate(sizeof(u64) * launch.instruction_count);
  if (launch.counts) worker.counts = (Counts *)allocate(sizeof(Counts) * launch.instruction_count);
  Clocks *clocks = (Clocks *)allocate(sizeof(Clocks) * b.warp_count);
  for (u32 k = 0; k < b.warp_count; ++k) {
    Warp &w = b.warps[k];
    w.block = &b;
    w.registers = worker.registers + k * register_bytes;
    w.clocks = &clocks[k];
    for (u32 n = 0; n < launch.constant_count; ++n) {
      const Constant &c = launch.constants[n];
      for (u32 lane = 0; lane < (c.bytes ? LANES : 1); ++lane)
        if (c.bytes == 8) ((u64 *)(w.registers + c.offset))[lane] = c.value;
        else ((u32 *)(w.registers + c.offset))[lane] = (u32)c.value;
    }
  }
  if (b.checks) b.shadow = new_shadow(launch.shared_bytes), b.synchronization = &launch.global_shadow->synchronization;
  const u64 blocks = (u64)launch.grid[0] * launch.grid[1] * launch.grid[2];
  for (;;) {
    const u64 linear = __atomic_fetch_add(&launch.next_block, 1, __ATOMIC_RELAXED);
    if (linear >= blocks || launch.stopped) break;
    enter(b, linear);
    run_block(b);
    if (b.end_tensor_memory) b.end_tensor_memory(b);
    if (b.end) b.end(b);
  }
  __atomic_fetch_add(&launch.waiting, 1, __ATOMIC_ACQ_REL);  // this one will help nobody any more
  if (worker.counts) add_counts(launch, worker.counts);
  for (u32 k = 0; k < launch.instruction_count; ++k)
    if (worker.executed[k]) __atomic_fetch_add(&launch.executed[k], worker.executed[k], __ATOMIC_RELAXED);
  if (b.release_tensor_memory) b.release_tensor_memory(b);
  if (b.release) b.release(b);
  b.pending.release();
  free_shadow(b.shadow);
  release_closures(b);
  free(clocks), free(worker.executed), free(worker.counts), free(worker.shared_memory), free(worker.registers);
  const bool launches = worker.launches;
  free(&worker);
  __atomic_fetch_add(&launch.over, 1, __ATOMIC_ACQ_REL);
  if (launches) wait_for_others(launch);
}

}  // namespace gpu

GPU_LIBRARY(GPU_TABLE(gpu::SCALAR_TABLE), GPU_TABLE(gpu::CONTROL_TABLE), GPU_TABLE(gpu::MEMORY_TABLE),
            GPU_TABLE(gpu::ATOMICS_TABLE), GPU_TABLE(gpu::LANES_TABLE), GPU_TABLE(gpu::BARRIERS_TABLE),
            GPU_TABLE(gpu::ASYNC_TABLE))

// The sizes of the structures that Python mirrors: a test compares them.
GPU_EXPORT u32 gpu_size(u32 which) {
  const u32 sizes[] = {sizeof(gpu::Instruction), sizeof(gpu::Finding), sizeof(gpu::Launch), sizeof(gpu::Range),
                       sizeof(gpu::Constant), sizeof(gpu::Special), sizeof(gpu::Counting), sizeof(gpu::Counts)};
  return which < sizeof sizes / sizeof sizes[0] ? sizes[which] : 0;
}

GPU_EXPORT void gpu_launch(gpu::Launch *launch, void *gomp_parallel) {
  launch->thread = gettid();
  if (launch->options & gpu::HAZARDS) gpu::begin_global_shadow(*launch);
  if (launch->workers > 1 && gomp_parallel)
    ((void (*)(void (*)(void *), void *, unsigned, unsigned))gomp_parallel)(gpu::work, launch, launch->workers, 0);
  else gpu::work(launch);
  if (launch->options & gpu::HAZARDS) gpu::end_global_shadow(*launch);
}
