// Who has got to know of what: vector clocks.
//
// An agent is a warp (0 to 31) or something that works on its own beside them (32 and up). It has a clock that counts up
// whenever it hands knowledge on; what it does between two counts has the same time. A warp keeps the time up to which
// it knows each agent's deeds. A barrier makes all that come to it know what any of them knows. Two accesses of different
// agents are ordered if the later one's warp knows the time of the earlier one; else the order in which they happened to
// run here is an accident.
//
// Clocks go on from block to block of a worker, so that nothing has to be cleared: what was done before `began` belongs to
// blocks that are over.
#pragma once
#include "machine.h"

namespace gpu {

// Agents beside the warps; those with a warp's number are WHICH + number.
constexpr u32 COPIES = 32, MATRIX_READS = 64, BULK_READS = 96, BY_BARRIER = 128;

struct Clocks {
  Time known[AGENTS];
  Time own;     // the warp's clock; also in `known`
  Time synced;  // the time before which all lanes of the warp know what each of them did
  Time copies_synced;  // of its own copies, the time that all lanes know
};

LOOM_INLINE void know(Clocks &c, u32 agent, Time time) {
  if (c.known[agent] < time) c.known[agent] = time;
}
// What one knows, the other knows as well from now on.
LOOM_INLINE void learn(Time *to, const Time *from) {
  for (u32 k = 0; k < AGENTS; ++k) to[k] = to[k] > from[k] ? to[k] : from[k];
}
// The warp has handed on what it knows: whatever it does from here on is later.
LOOM_INLINE void tick(Warp &w) {
  Clocks &c = *w.clocks;
  c.known[w.number] = c.own++;
}
// The lanes of a warp have waited for each other.
LOOM_INLINE void sync_lanes(Warp &w) {
  Clocks &c = *w.clocks;
  c.synced = c.own;
  c.copies_synced = c.known[COPIES + w.number];
  tick(w);
}

}  // namespace gpu
