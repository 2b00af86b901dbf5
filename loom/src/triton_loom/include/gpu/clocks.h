// Vector clocks: which agent knows of which accesses.
//
// An agent is a warp (0 to 31) or an asynchronous unit (32 and up). It has a clock that advances whenever it passes
// knowledge on; its accesses between two ticks have the same time. A warp keeps the time up to which it knows each agent's
// accesses. A barrier makes all participants know what any of them knows. Two accesses of different agents are ordered if
// the later one's warp knows the time of the earlier one; otherwise the order in which they happened to run here is an
// accident.
//
// Lanes of a warp run independently as well: of its own accesses a warp "knows" those before its lanes last waited for
// each other. A lane always knows its own.
//
// Clocks continue from block to block of a worker, so that nothing has to be cleared: a time before `Block::began`
// belongs to a finished block.
#pragma once
#include "machine.h"

namespace gpu {

// Agents other than warps; those that belong to a warp have its number added. From FURTHER on come the copies that
// mbarriers count.
constexpr u32 COPIES = 32, MATRIX_UNITS = 64, BULK_COPIES = 96, FURTHER = 128, MBARRIER_AGENTS = 64;
constexpr u32 TENSOR_LOADS = FURTHER + MBARRIER_AGENTS, TENSOR_STORES = TENSOR_LOADS + 32;
static_assert(TENSOR_STORES + 32 <= AGENTS, "a stamp has room for these");
// Warps and their copies access memory through another proxy than the units after them, so their writes must be fenced
// before those units read them: FENCED + agent is the time up to which this is known. LEADERS + warp is the time up to
// which accesses of the warp's first lane are known, if that lane alone has passed its knowledge on.
constexpr u32 FENCED = AGENTS, LEADERS = FENCED + MATRIX_UNITS;
static_assert(LEADERS + WARPS == KNOWLEDGE, "machine.h knows how much it is");

struct Clocks {
  Time known[KNOWLEDGE];
  Time own;            // the time of the warp's current accesses
  Time copies_waited;  // of the warp's own copies: a lane knows those that it has waited for
  Time fenced[LANES];  // the time up to which a lane by itself has fenced what it wrote
  Time released[2][LANES];  // of a lane's last fence for all blocks, and for its own alone: synchronization.h
};

LOOM_INLINE void know(Warp &w, u32 agent, Time time) {
  if (w.clocks->known[agent] < time) w.clocks->known[agent] = time;
}
LOOM_INLINE void learn(Time *to, const Time *from) {
  for (u32 k = 0; k < KNOWLEDGE; ++k) to[k] = to[k] > from[k] ? to[k] : from[k];
}

// The warp passes on its knowledge and accesses (an arrival at a barrier, a release): its next accesses are later.
LOOM_INLINE void hand_on(Warp &w, Time *to) {
  Clocks &c = *w.clocks;
  learn(to, c.known);
  to[w.number] = c.own > to[w.number] ? c.own : to[w.number];
  const u32 copies = COPIES + w.number;
  to[copies] = c.copies_waited > to[copies] ? c.copies_waited : to[copies];
  ++c.own;
}

// The lanes of a warp have waited for each other.
LOOM_INLINE void sync_lanes(Warp &w) {
  Clocks &c = *w.clocks;
  c.known[w.number] = c.own++;
  c.known[COPIES + w.number] = c.copies_waited;
}

// A block begins: everybody knows all earlier accesses.
static void begin_clocks(Block &b) {
  Time latest = b.began;
  for (u32 k = 0; k < b.warp_count; ++k) latest = b.warps[k].clocks->own > latest ? b.warps[k].clocks->own : latest;
  for (Time time : b.agent_time) latest = time > latest ? time : latest;
  b.began = latest + 1;
  for (Time &time : b.agent_time) time = b.began;
  for (u32 k = 0; k < b.warp_count; ++k) {
    Clocks &c = *b.warps[k].clocks;
    for (Time &known : c.known) known = b.began - 1;
    c.own = b.began;
    c.copies_waited = b.began - 1;
    for (Time &fenced : c.fenced) fenced = b.began - 1;
    for (auto &lanes : c.released)
      for (Time &released : lanes) released = 0;
  }
}

}  // namespace gpu
