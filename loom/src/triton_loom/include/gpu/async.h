// cp.async: copies from global to shared memory that run while the thread continues.
//
// The copies of a warp are one agent. Its time counts groups: uncommitted copies have the time of the group that the next
// commit closes. Groups complete in order, so waiting for one means knowing all times up to its own.
#pragma once
#include "memory.h"

namespace gpu {

struct Copy {
  u32 to[LANES];
  u64 from[LANES];
  u8 given[LANES];  // bytes read from global memory; the rest is zero
  u32 lanes, bytes;
};

static void deliver_copy(Block &b, Pending &p) {
  Copy &copy = *(Copy *)p.operation;
  GPU_EACH_LANE(copy.lanes, lane) {
    u8 *to = b.shared + (copy.to[lane] - SHARED_BASE);
    __builtin_memcpy(to, (const u8 *)copy.from[lane], copy.given[lane]);
    __builtin_memset(to + copy.given[lane], 0, copy.bytes - copy.given[lane]);
  }
  free(&copy);
}

// Operands: destination, source, how many bytes are given. The immediate has two 32-bit offsets: of `to` and of `from`.
template <u32 BYTES> static void copy(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  const u32 *to = w.words(i, 0), *given = w.words(i, 2);
  const u64 *from = w.longs(i, 1);
  const i32 to_offset = (i32)i.immediate, from_offset = (i32)(i.immediate >> 32);
  u64 target[LANES], source[LANES];
  u32 reads = 0;
  for (u32 lane = 0; lane < LANES; ++lane) {
    target[lane] = (u32)(to[lane] + (u32)to_offset);
    source[lane] = from[lane] + (u64)(i64)from_offset;
    reads |= (given[lane] != 0 ? 1u : 0u) << lane;
    if (__builtin_expect(w.mask >> lane & 1 && given[lane] > BYTES, 0)) found(w, COPY_MISUSE, i.number, lane);
  }
  u32 lanes = reachable_shared(w, i, target, BYTES, w.mask);
  reads &= lanes;
  if (reads) {
    const u32 there = reachable_global<false>(w, i, source, BYTES, reads);
    lanes &= ~(reads & ~there), reads = there;
  }
  if (!lanes) return;
  Copy *copy = (Copy *)malloc(sizeof(Copy));
  copy->lanes = lanes, copy->bytes = BYTES;
  for (u32 lane = 0; lane < LANES; ++lane) {
    copy->to[lane] = (u32)target[lane], copy->from[lane] = source[lane];
    copy->given[lane] = (u8)(given[lane] < BYTES ? given[lane] : BYTES);
  }
  const u32 agent = COPIES + w.number;
  if (b.checks) {
    if (reads) read_global(w, i, source, BYTES, reads);
    GPU_EACH_LANE(lanes, lane) {
      shadow_write(w, lane, copy->to[lane], nullptr, BYTES, stamp(b.agent_time[agent], i.number, lane, agent));
      // A read before the copy has arrived must not see anything useful.
      __builtin_memset(b.shared + (copy->to[lane] - SHARED_BASE), 0xA5, BYTES);
    }
  }
  Pending pending = {deliver_copy, copy, w.number, b.agent_time[agent]};
  if (b.launch->options & EARLY) deliver_copy(b, pending);
  else b.pending.push(pending);
}

static void commit_copies(Warp &w, const Instruction &) { ++w.block->agent_time[COPIES + w.number]; }

// Marks all copies of the warp up to a time as arrived.
static void copies_arrive(Warp &w, Time time) {
  Block &b = *w.block;
  u32 left = 0;
  for (u32 k = 0; k < b.pending.count; ++k) {
    Pending p = b.pending[k];
    if (p.deliver == deliver_copy && p.warp == w.number && p.ticket <= time) deliver_copy(b, p);
    else b.pending[left++] = p;
  }
  b.pending.count = left;
  if (w.clocks->copies_waited < time) w.clocks->copies_waited = time;
}

// The immediate is the number of latest groups that may still be pending.
static void wait_for_groups(Warp &w, const Instruction &i) {
  const Time open = w.block->agent_time[COPIES + w.number];
  if (open > w.block->began + i.immediate) copies_arrive(w, open - 1 - (Time)i.immediate);
}
static void wait_for_all(Warp &w, const Instruction &i) {
  commit_copies(w, i);
  copies_arrive(w, w.block->agent_time[COPIES + w.number] - 1);
}

static const Named ASYNC_TABLE[] = {
  GPU_HANDLER("cp.async.4", copy<4>)
  GPU_HANDLER("cp.async.8", copy<8>)
  GPU_HANDLER("cp.async.16", copy<16>)
  GPU_HANDLER("cp.async.commit_group", commit_copies)
  GPU_HANDLER("cp.async.wait_group", wait_for_groups)
  GPU_HANDLER("cp.async.wait_all", wait_for_all)
};

}  // namespace gpu
