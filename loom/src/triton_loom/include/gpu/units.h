// Asynchronous units: their pending operations, and their accesses to shared memory.
//
// A bulk copy of a tile, or a product of a warp group, is issued by a thread and proceeds on its own. In the vector clocks it
// is an agent of its own: the loads that one mbarrier counts, the stores of a warp, the products of a warp. When it begins,
// all earlier accesses to its bytes must be known to the issuing thread. Whoever waits for it learns the agent's time. So a
// hazard is found in whichever order things happen to run here.
//
// The units access memory through the asynchronous proxy, threads through the generic one. A unit sees a thread's write only
// after a fence.proxy.async, by the writer or by somebody who knows of the write and passes that on.
#pragma once
#include "global_shadow.h"
#include "memory.h"
#include "tensor_map.h"

namespace gpu {

// A barrier in shared memory that counts arrivals of threads and bytes of copies: mbarrier.h.
struct MBarrier {
  u32 address;
  bool live;
  u32 count;      // arrivals per phase
  u32 pending;    // arrivals that are still missing
  i64 bytes;      // expected from copies, less those that have arrived
  u32 phase;      // number of completed phases
  u32 under_way;  // copies that were issued and have not arrived
  u32 agent;      // of its copies
  Stamp made;     // of the write that initialized it
  bool fenced;    // by a fence.mbarrier_init of the thread that did
  Stamp copied;   // of the last copy that it counts; 0 if there is none
  u32 copied_by;  // the warp that issued it
  Time known[KNOWLEDGE];  // to those that have arrived
  Time over[KNOWLEDGE];   // `known` at the end of the last phase: whoever has waited knows it
};

// A copy of a tile between global and shared memory: bulk.h.
struct BulkCopy {
  TensorMap map;
  i32 at[5];    // coordinates; of a gather the column, then four rows
  u32 address;  // in shared memory
  u32 mbarrier;
  u32 warp, lane;
  const Instruction *instruction;
  u32 group;  // of a store: of its thread's groups, from 1; 0 until it is committed
  Time time;
  bool scattered;  // its rows are named one by one
};

// A tensor map that the kernel made: maps.h.
struct MadeMap {
  u64 address;
  u32 warp, instruction;
  Time made;
  Time acquired[WARPS];  // when a warp has fenced it; 0: it has not
};

// A product of matrices that has not been waited for: wgmma.h.
struct OpenProduct {
  const Instruction *instruction;
  Time group;
};

constexpr u32 GROUP = 4;  // warps that issue a product together

// The products that the warps of a group have issued: the same ones, with the same descriptors, one after another.
struct ProductStep {
  const Instruction *instruction;
  u64 left, right;
};
struct WarpGroup {
  Vec<ProductStep> steps;  // those that not all warps have reached
  u32 first;               // the number of the first of them
  u32 done[GROUP];         // by each warp
};

// The barrier of a one-block cluster: arrivals and waits of all threads.
struct ClusterBarrier {
  u32 arrived, phase;
  u32 came[WARPS];  // the phase in which a warp arrived
  Time known[KNOWLEDGE];
};

struct Units {
  Vec<MBarrier *> mbarriers;
  MBarrier *found[64];  // by address, as far as there is room
  Vec<MadeMap> maps;
  WarpGroup groups[WARPS / GROUP];
  ClusterBarrier cluster;
  struct {
    Vec<BulkCopy *> stores;
    u32 committed[LANES];  // groups
    Vec<OpenProduct> products;
  } of[WARPS];
};

// ---- what a lane alone hands on -------------------------------------------------------------------------

// The lanes of the current instruction publish their knowledge and accesses. If the first lane is alone, these are its own
// only, not what other lanes did since they last waited for each other.
LOOM_INLINE void hand_on_by_lanes(Warp &w, Time *to) {
  Clocks &c = *w.clocks;
  if (w.mask != 1 || w.live == 1) return hand_on(w, to);
  learn(to, c.known);
  Time &leader = to[LEADERS + w.number];
  leader = c.own > leader ? c.own : leader;
  ++c.own;
}

// ---- the two proxies ------------------------------------------------------------------------------------

// fence.proxy.async: units see the writes that the threads know of.
static void fence_proxies(Warp &w, const Instruction &) {
  Clocks &c = *w.clocks;
  for (u32 agent = 0; agent < MATRIX_UNITS; ++agent) know(w, FENCED + agent, c.known[agent]);
  if (w.mask == w.live) {
    know(w, FENCED + w.number, c.own);
    know(w, FENCED + COPIES + w.number, c.copies_waited);
  } else {
    GPU_EACH_LANE(w.mask, lane) c.fenced[lane] = c.own;
  }
  ++c.own;
}
LOOM_INLINE bool is_fenced(const Warp &w, u32 lane, Stamp s) {
  const Clocks &c = *w.clocks;
  const u32 agent = agent_of(s);
  if (agent >= MATRIX_UNITS || time_of(s) <= c.known[FENCED + agent]) return true;
  return agent == w.number && lane_of(s) == lane && time_of(s) <= c.fenced[lane];
}

// ---- how units reach shared memory ----------------------------------------------------------------------

constexpr u32 CHUNK = 16;  // bytes: the smallest amount that units move, which no swizzle splits

// Reads of a unit, chunk by chunk, under an agent and a time. The operation was issued by a lane, or (`whole_warp`) by the
// lanes of a warp together.
struct UnitReads {
  Warp &w;
  const u32 lane;
  const bool whole_warp;
  const Stamp as;
  Stamp *plane;
  Stamp good = ~0ull;  // a write that is known to come before

  UnitReads(Warp &w, const Instruction &i, u32 lane, u32 agent, Time time, bool whole_warp)
      : w(w), lane(lane), whole_warp(whole_warp), as(stamp(time, i.number, whole_warp ? SEVERAL_LANES : lane, agent)),
        plane(w.block->checks ? plane_of(*w.block->shadow, agent, time) : nullptr) {}

  // The first BYTES of a chunk.
  template <u32 BYTES = CHUNK> LOOM_ALWAYS void chunk(u32 address) {
    const u32 at = address - SHARED_BASE;
    const Stamp *writes = w.block->shadow->writes + at;
    const Stamp first = writes[0];
    Stamp differs = 0;
    for (u32 k = 1; k < BYTES; ++k) differs |= writes[k] ^ first;
    if (__builtin_expect(differs || (first != good && !is_fine(first)), 0)) look_closely(address, BYTES);
    else good = first;
    for (u32 k = 0; k < BYTES / GRANULE; ++k) plane[at / GRANULE + k] = as;
  }
  LOOM_ALWAYS bool is_fine(Stamp s) const {
    const bool after = (whole_warp && agent_of(s) == w.number) || comes_after(w, lane, s);
    return time_of(s) >= w.block->began && after && is_fenced(w, lane, s);
  }
  __attribute__((noinline)) void look_closely(u32 address, u32 bytes) {
    const Stamp *writes = w.block->shadow->writes + (address - SHARED_BASE);
    for (u32 k = 0; k < bytes; ++k) {
      const Stamp s = writes[k];
      const u32 agent = agent_of(s);
      if (k && s == writes[k - 1]) continue;
      if (time_of(s) < w.block->began) return found(w, SHARED_UNINITIALIZED, instruction_of(as), lane, address + k);
      if (!(whole_warp && agent == w.number) && !comes_after(w, lane, s))
        return report_race(w, instruction_of(as), lane, s, address + k);
      if (!is_fenced(w, lane, s)) {
        const u32 thread = lane_of(s) < LANES ? agent % WARPS * LANES + lane_of(s) : NOBODY;
        const Kind kind = agent < COPIES ? NO_PROXY_FENCE : NO_PROXY_FENCE_AFTER_COPY;
        return found(w, kind, instruction_of(as), lane, address + k, instruction_of(s), thread);
      }
    }
  }
};

// Writes of a unit for a lane's operation, chunk by chunk, within two addresses.
struct UnitWrites {
  Warp &w;
  const u32 lane;
  const Stamp as;
  u32 doubtful[AGENTS], doubtful_count = 0;  // agents that may have read there since the lane last heard of them

  UnitWrites(Warp &w, const Instruction &i, u32 lane, u32 agent, Time time, u32 begin, u32 end)
      : w(w), lane(lane), as(stamp(time, i.number, lane, agent)) {
    const Shadow &shadow = *w.block->shadow;
    for (u32 r = 0; r < shadow.reader_count; ++r) {
      const u32 reader = shadow.readers[r];
      if (shadow.latest_read[reader] <= w.clocks->known[reader]) continue;
      const bool copies = reader >= FURTHER && reader < FURTHER + MBARRIER_AGENTS;
      if (copies && !has_mbarrier(reader, begin, end)) continue;
      doubtful[doubtful_count++] = reader;
    }
  }
  // Copies read nothing in shared memory except their mbarrier.
  bool has_mbarrier(u32 agent, u32 begin, u32 end) const {
    for (const MBarrier *m : w.block->units->mbarriers)
      if (m->agent == agent && m->address >= begin && m->address < end) return true;
    return false;
  }
  LOOM_ALWAYS void chunk(u32 address) {
    Shadow &shadow = *w.block->shadow;
    const u32 at = address - SHARED_BASE;
    Stamp *writes = shadow.writes + at;
    Stamp differs = 0;
    for (u32 k = 1; k < CHUNK; ++k) differs |= writes[k] ^ writes[0];
    bool fine = !differs && comes_after(w, lane, writes[0]);
    for (u32 r = 0; r < doubtful_count; ++r) {
      const u32 granule = granule_of(doubtful[r]), count = CHUNK / granule;
      const Stamp *reads = shadow.reads[doubtful[r]] + at / granule;
      Stamp latest = 0;
      for (u32 k = 0; k < count; ++k) latest = reads[k] > latest ? reads[k] : latest;
      fine &= time_of(latest) <= w.clocks->known[doubtful[r]];
    }
    if (__builtin_expect(!fine, 0)) return shadow_write_slowly(w, lane, address, nullptr, CHUNK, as);
    for (u32 k = 0; k < CHUNK; ++k) writes[k] = as;
  }
};

// One lane writes bytes of shared memory, which must exist.
LOOM_INLINE void write_one(Warp &w, const Instruction &i, u32 lane, u64 address, const void *data, u32 bytes) {
  u64 addresses[LANES];
  addresses[lane] = address;
  if (w.block->checks) write_shared(w, i, addresses, (const u8 *)data, 0, bytes, 1u << lane);
  else __builtin_memcpy(w.block->shared + (address - SHARED_BASE), data, bytes);
}

// The location of a chunk under a swizzle: bits of its absolute address are exchanged.
LOOM_INLINE u32 swizzled(u32 address, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::bytes32: return address ^ (address >> 7 & 1) << 4;
    case Swizzle::bytes64: return address ^ (address >> 7 & 3) << 4;
    case Swizzle::bytes128: return address ^ (address >> 7 & 7) << 4;
    default: return address;
  }
}

}  // namespace gpu
