// Instructions across the lanes of a warp: shuffles, votes, reductions, elections.
#pragma once
#include "scalar.h"

namespace gpu {

// All lanes that an instruction names as members must execute it.
LOOM_INLINE void expect_members(Warp &w, const Instruction &i, const u32 *members) {
  const u32 lane = first_lane(w.mask);
  if (__builtin_expect((members[lane] & w.live) != w.mask, 0)) found(w, SPLIT_WARP, i.number, lane);
}

enum Shuffle { BUTTERFLY, UP, DOWN, INDEX };

// Operands: result, whether the other lane is in range, value, lane, clamp and segments, members.
template <Shuffle MODE> static void shuffle(Warp &w, const Instruction &i) {
  expect_members(w, i, w.words(i, 5));
  u32 value[LANES], result[LANES], in_range = 0;
  __builtin_memcpy(value, w.words(i, 2), sizeof value);
  const u32 *which = w.words(i, 3), *limits = w.words(i, 4);
  u32 *to = w.words(i, 0);
  if (MODE == BUTTERFLY && i.flags & UNIFORM_OPERANDS && (limits[0] & 0x1F1F) == 31 && w.mask == FULL) {
    const u32 by = which[0] & 31;  // uniform, as in every reduction
    for (u32 lane = 0; lane < LANES; ++lane) to[lane] = value[lane ^ by];
    return put_flags(w, i.operands[1], FULL);
  }
  for (u32 lane = 0; lane < LANES; ++lane) {
    const u32 by = which[lane] & 31, clamp = limits[lane] & 31, segments = limits[lane] >> 8 & 31;
    const u32 last = (lane & segments) | (clamp & ~segments), first = lane & segments;
    i32 other = MODE == BUTTERFLY ? (i32)(lane ^ by)
              : MODE == UP ? (i32)lane - (i32)by
              : MODE == DOWN ? (i32)(lane + by)
                             : (i32)(first | (by & ~segments));
    const bool there = MODE == UP ? other >= (i32)last : other <= (i32)last;
    other = there ? other : (i32)lane;
    in_range |= (u32)there << lane;
    result[lane] = value[other & 31];
    if (__builtin_expect(w.mask >> lane & 1 && !(w.mask >> (other & 31) & 1), 0))
      found(w, LANE_NOT_THERE, i.number, lane, 0, NOWHERE, w.thread((u32)other & 31));
  }
  const u32 mask = w.mask;
  GPU_LANES to[lane] = mask >> lane & 1 ? result[lane] : to[lane];
  put_flags(w, i.operands[1], in_range);
}

enum Vote { BALLOT, ALL, ANY, UNIFORM };

// Operands: result, predicate, members.
template <Vote MODE> static void vote(Warp &w, const Instruction &i) {
  expect_members(w, i, w.words(i, 2));
  const u32 bits = w.flags(i, 1) & w.mask;
  if constexpr (MODE == BALLOT) {
    u32 *to = w.words(i, 0);
    const u32 mask = w.mask;
    GPU_LANES to[lane] = mask >> lane & 1 ? bits : to[lane];
  } else {
    const bool yes = MODE == ALL ? bits == w.mask : MODE == ANY ? bits != 0 : bits == w.mask || bits == 0;
    put_flags(w, i.operands[0], yes ? FULL : 0);
  }
}

// Operands: result, value, members. Float minima and maxima: with NAN_WINS a NaN is the result; ABS takes magnitudes.
template <class T, class F> LOOM_INLINE void reduce(Warp &w, const Instruction &i, F f) {
  expect_members(w, i, w.words(i, 2));
  const u32 *value = w.words(i, 1);
  u32 lanes = w.mask;
  T total = bits<T>(value[first_lane(lanes)]);
  for (lanes &= lanes - 1; lanes; lanes &= lanes - 1) total = f(total, bits<T>(value[first_lane(lanes)]));
  const u32 result = bits<u32>(total), mask = w.mask;
  u32 *to = w.words(i, 0);
  GPU_LANES to[lane] = mask >> lane & 1 ? result : to[lane];
}
template <class T> static void reduce_add(Warp &w, const Instruction &i) {
  reduce<T>(w, i, [](T a, T b) { return (T)(a + b); });
}
template <class T> static void reduce_min(Warp &w, const Instruction &i) {
  reduce<T>(w, i, [](T a, T b) { return a < b ? a : b; });
}
template <class T> static void reduce_max(Warp &w, const Instruction &i) {
  reduce<T>(w, i, [](T a, T b) { return a > b ? a : b; });
}
static void reduce_and(Warp &w, const Instruction &i) { reduce<u32>(w, i, [](u32 a, u32 b) { return a & b; }); }
static void reduce_or(Warp &w, const Instruction &i) { reduce<u32>(w, i, [](u32 a, u32 b) { return a | b; }); }
static void reduce_xor(Warp &w, const Instruction &i) { reduce<u32>(w, i, [](u32 a, u32 b) { return a ^ b; }); }
template <bool MAX, bool NAN_WINS, bool ABS> static void reduce_float(Warp &w, const Instruction &i) {
  auto size = [](f32 x) { return ABS ? loom_math::abs(x) : x; };
  reduce<f32>(w, i, [&](f32 a, f32 b) { return ptx::extreme<MAX, NAN_WINS, false>(size(a), size(b)); });
}

// Operands: the lane that is elected, whether this lane is, members.
static void elect(Warp &w, const Instruction &i) {
  expect_members(w, i, w.words(i, 2));
  const u32 leader = first_lane(w.mask), mask = w.mask;
  u32 *to = w.words(i, 0);
  GPU_LANES to[lane] = mask >> lane & 1 ? leader : to[lane];
  put_flags(w, i.operands[1], 1u << leader);
}

static void active_mask(Warp &w, const Instruction &i) {
  u32 *to = w.words(i, 0);
  const u32 mask = w.mask;
  GPU_LANES to[lane] = mask >> lane & 1 ? mask : to[lane];
}

static const Named LANES_TABLE[] = {
  GPU_HANDLER("shfl.bfly", shuffle<BUTTERFLY>)
  GPU_HANDLER("shfl.up", shuffle<UP>)
  GPU_HANDLER("shfl.down", shuffle<DOWN>)
  GPU_HANDLER("shfl.idx", shuffle<INDEX>)
  GPU_HANDLER("vote.ballot", vote<BALLOT>)
  GPU_HANDLER("vote.all", vote<ALL>)
  GPU_HANDLER("vote.any", vote<ANY>)
  GPU_HANDLER("vote.uni", vote<UNIFORM>)
  GPU_HANDLER("redux.add.s32", reduce_add<u32>)
  GPU_HANDLER("redux.add.u32", reduce_add<u32>)
  GPU_HANDLER("redux.min.s32", reduce_min<i32>)
  GPU_HANDLER("redux.min.u32", reduce_min<u32>)
  GPU_HANDLER("redux.max.s32", reduce_max<i32>)
  GPU_HANDLER("redux.max.u32", reduce_max<u32>)
  GPU_HANDLER("redux.and.b32", reduce_and)
  GPU_HANDLER("redux.or.b32", reduce_or)
  GPU_HANDLER("redux.xor.b32", reduce_xor)
  GPU_HANDLER("redux.min.f32", reduce_float<false, false, false>)
  GPU_HANDLER("redux.max.f32", reduce_float<true, false, false>)
  GPU_HANDLER("redux.min.NaN.f32", reduce_float<false, true, false>)
  GPU_HANDLER("redux.max.NaN.f32", reduce_float<true, true, false>)
  GPU_HANDLER("redux.min.abs.f32", reduce_float<false, false, true>)
  GPU_HANDLER("redux.max.abs.f32", reduce_float<true, false, true>)
  GPU_HANDLER("redux.min.abs.NaN.f32", reduce_float<false, true, true>)
  GPU_HANDLER("redux.max.abs.NaN.f32", reduce_float<true, true, true>)
  GPU_HANDLER("elect", elect)
  GPU_HANDLER("activemask", active_mask)
};

}  // namespace gpu
