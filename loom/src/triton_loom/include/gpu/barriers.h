// Numbered barriers of a block, and synchronization of a warp's lanes.
#pragma once
#include "control.h"
#include "clocks.h"

namespace gpu {

// Releases all waiting warps; each then knows what all that arrived knew.
LOOM_NOINLINE void open_barrier(Block &b, u32 number) {
  Barrier &barrier = b.barriers[number];
  for (u32 waiting = barrier.waiting; waiting; waiting &= waiting - 1) {
    Warp &w = b.warps[first_lane(waiting)];
    learn(w.clocks->known, barrier.known);
    sync_lanes(w);
    for (u32 k = 0; k < w.fragments_used; ++k)
      if (w.fragments[k].state == AT_BARRIER && w.fragments[k].barrier == number) w.fragments[k].state = READY;
  }
  barrier = {};
  b.happened();
}

// The threads of a warp arrive at a barrier; false if there is no such barrier.
LOOM_INLINE bool arrive(Warp &w, const Instruction &i, u32 number, u32 threads) {
  Block &b = *w.block;
  const u32 lane = first_lane(w.mask);
  if (number >= BARRIERS || threads % LANES || threads > b.thread_count) {
    found(w, BARRIER_MISUSE, i.number, lane);
    return false;
  }
  Barrier &barrier = b.barriers[number];
  if (barrier.arrived && barrier.expected != threads) found(w, BARRIER_MISUSE, i.number, lane);
  barrier.expected = threads;
  barrier.arrived += (u32)__builtin_popcount(w.mask);
  hand_on(w, barrier.known);
  return true;
}
LOOM_INLINE void open_if_all_came(Block &b, u32 number) {
  const Barrier &barrier = b.barriers[number];
  if (barrier.arrived >= (barrier.expected ? barrier.expected : b.thread_count)) open_barrier(b, number);
}

// Operands: number of the barrier, number of threads that it expects (0: the whole block).
template <bool ALIGNED> static void barrier_sync(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  if (ALIGNED) expect_whole(w, i);
  const u32 lane = first_lane(w.mask), number = w.words(i, 0)[lane], threads = w.words(i, 1)[lane];
  if (!arrive(w, i, number, threads)) return;
  if (w.mask != w.active) {  // its guard holds in some lanes only: they wait, the others continue
    part(w, w.mask, i.number, i.number + 1, i.number + 1);
    for (u32 k = 0; k < w.fragments_used; ++k) {
      Fragment &f = w.fragments[k];
      if (f.state == READY && f.pc == i.number) f.pc = i.number + 1, f.state = AT_BARRIER, f.barrier = number;
    }
  } else {
    suspend(w);
    Fragment &f = w.fragments[w.current];
    f.state = AT_BARRIER, f.barrier = number;
  }
  b.barriers[number].waiting |= 1u << w.number;
  open_if_all_came(b, number);
  resume_any(w);
}

template <bool ALIGNED> static void barrier_arrive(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  if (ALIGNED) expect_whole(w, i);
  const u32 lane = first_lane(w.mask), number = w.words(i, 0)[lane], threads = w.words(i, 1)[lane];
  if (arrive(w, i, number, threads)) open_if_all_came(b, number);
}

static void warp_sync(Warp &w, const Instruction &i) {
  const u32 lane = first_lane(w.mask);
  if (__builtin_expect((w.words(i, 0)[lane] & w.live) != w.mask, 0)) found(w, SPLIT_WARP, i.number, lane);
  sync_lanes(w);
}

static const Named BARRIERS_TABLE[] = {
  GPU_HANDLER("barrier.sync.aligned", barrier_sync<true>)
  GPU_HANDLER("barrier.sync", barrier_sync<false>)
  GPU_HANDLER("barrier.arrive.aligned", barrier_arrive<true>)
  GPU_HANDLER("barrier.arrive", barrier_arrive<false>)
  GPU_HANDLER("bar.warp.sync", warp_sync)
};

}  // namespace gpu
