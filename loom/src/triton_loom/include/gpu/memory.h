// Loads, stores and atomic operations: every address is checked before it is touched.
#pragma once
#include "scalar.h"
#include "global_shadow.h"

namespace gpu {

enum Space { GLOBAL, SHARED };

// ---- which lanes may do what they want to do ------------------------------------------------------------

LOOM_NOINLINE const Range *find_range(Worker &worker, u64 low, u64 end) {
  const Launch &launch = *worker.launch;
  u32 first = 0, last = launch.range_count;
  while (first < last) {  // the last range that begins at or before `low`
    const u32 middle = (first + last) / 2;
    if (launch.ranges[middle].begin <= low) first = middle + 1;
    else last = middle;
  }
  if (!first || launch.ranges[first - 1].end < end) return nullptr;
  return worker.last_range = &launch.ranges[first - 1];
}
LOOM_INLINE const Range *range_of(Worker &worker, u64 low, u64 end) {
  const Range *last = worker.last_range;
  if (last && last->begin <= low && end <= last->end) return last;
  return find_range(worker, low, end);
}

LOOM_NOINLINE void report_misaligned(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  for (; lanes; lanes &= lanes - 1) {
    const u32 lane = first_lane(lanes);
    if (address[lane] % bytes) return found(w, MISALIGNED, i.number, lane, address[lane]);
  }
}

template <bool WRITES> LOOM_NOINLINE u32 reachable_one_by_one(Warp &w, const Instruction &i, const u64 *address,
                                                             u32 bytes, u32 lanes) {
  u32 fine = 0;
  for (; lanes; lanes &= lanes - 1) {
    const u32 lane = first_lane(lanes);
    const Range *range = range_of(*w.block->worker, address[lane], address[lane] + bytes);
    if (!range) found(w, GLOBAL_BOUNDS, i.number, lane, address[lane]);
    else if (WRITES && !range->writable) found(w, GLOBAL_READ_ONLY, i.number, lane, address[lane]);
    else fine |= 1u << lane;
  }
  return fine;
}

// The lanes whose bytes exist; the others are reported and skipped.
template <bool WRITES> LOOM_INLINE u32 reachable_global(Warp &w, const Instruction &i, const u64 *address, u32 bytes,
                                                       u32 lanes) {
  const Extent e = extent_of(address, lanes);
  if (__builtin_expect(e.bits & (bytes - 1), 0)) report_misaligned(w, i, address, bytes, lanes);
  const Range *range = range_of(*w.block->worker, e.low, e.high + bytes);
  if (__builtin_expect(range && (!WRITES || range->writable), 1)) return lanes;
  return reachable_one_by_one<WRITES>(w, i, address, bytes, lanes);
}

LOOM_INLINE u32 reachable_shared(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  const Extent e = extent_of(address, lanes);
  if (__builtin_expect(e.bits & (bytes - 1), 0)) report_misaligned(w, i, address, bytes, lanes);
  const u64 end = SHARED_BASE + w.block->shared_bytes;
  if (__builtin_expect(e.low >= SHARED_BASE && e.high + bytes <= end, 1)) return lanes;
  u32 fine = 0;
  for (; lanes; lanes &= lanes - 1) {
    const u32 lane = first_lane(lanes);
    if (address[lane] >= SHARED_BASE && address[lane] + bytes <= end) fine |= 1u << lane;
    else found(w, SHARED_BOUNDS, i.number, lane, address[lane]);
  }
  return fine;
}

// ---- addresses ------------------------------------------------------------------------------------------

// Addresses are operand k plus the instruction's immediate; shared addresses have 32 bits.
template <Space SPACE> LOOM_INLINE void addresses(Warp &w, const Instruction &i, u32 k, u64 *address) {
  if constexpr (SPACE == SHARED) {
    const u32 *base = w.words(i, k);
    GPU_LANES address[lane] = (u32)(base[lane] + (u32)i.immediate);
  } else {
    const u64 *base = w.longs(i, k);
    GPU_LANES address[lane] = base[lane] + (u64)i.immediate;
  }
}
template <Space SPACE> LOOM_INLINE u8 *bytes_at(Warp &w, u64 address) {
  return SPACE == SHARED ? w.block->shared + (address - SHARED_BASE) : (u8 *)address;
}

// ---- loads and stores -----------------------------------------------------------------------------------

// Operands: results, address. A result is Of<Slot, T>: a narrow signed value is sign-extended to the register.
template <Space SPACE, class T, class Slot> static void load(Warp &w, const Instruction &i) {
  const u32 count = i.operand_count - 1, bytes = count * sizeof(T);
  u64 address[LANES];
  addresses<SPACE>(w, i, count, address);
  u32 lanes;
  if constexpr (SPACE == SHARED) lanes = reachable_shared(w, i, address, bytes, w.mask);
  else lanes = reachable_global<false>(w, i, address, bytes, w.mask);
  const Indivisible guard(w, SPACE == GLOBAL && i.flags & ATOMIC);
  if (w.block->checks) {
    if constexpr (SPACE == SHARED) read_shared(w, i, address, bytes, lanes);
    else read_global(w, i, address, bytes, lanes);
  }
  const u8 *base = SPACE == SHARED ? w.block->shared - SHARED_BASE : nullptr;
  for (u32 k = 0; k < count; ++k) {
    Slot *to = (Slot *)(w.registers + i.operands[k]);
    auto take = [&](u32 lane) LOOM_ALWAYS {
      T x;
      __builtin_memcpy(&x, base + address[lane] + k * sizeof(T), sizeof x);
      to[lane] = (Slot)x;
    };
    if (__builtin_expect(lanes == FULL, 1)) {
      for (u32 lane = 0; lane < LANES; ++lane) take(lane);
    } else {
      GPU_EACH_LANE(lanes, lane) take(lane);
    }
  }
}

// Operands: address, values.
template <Space SPACE, class T, class Slot> static void store(Warp &w, const Instruction &i) {
  const u32 count = i.operand_count - 1, bytes = count * sizeof(T);
  u64 address[LANES];
  addresses<SPACE>(w, i, 0, address);
  u32 lanes;
  if constexpr (SPACE == SHARED) lanes = reachable_shared(w, i, address, bytes, w.mask);
  else lanes = reachable_global<true>(w, i, address, bytes, w.mask);
  alignas(64) u8 data[LANES][32];
  for (u32 k = 0; k < count; ++k) {
    const Slot *from = (const Slot *)(w.registers + i.operands[1 + k]);
    for (u32 lane = 0; lane < LANES; ++lane) {
      const T x = (T)from[lane];
      __builtin_memcpy(data[lane] + k * sizeof(T), &x, sizeof x);
    }
  }
  const Indivisible guard(w, SPACE == GLOBAL && i.flags & ATOMIC);
  if (w.block->checks) {
    if constexpr (SPACE == SHARED) return write_shared(w, i, address, &data[0][0], 32, bytes, lanes);
    else return write_global(w, i, address, &data[0][0], 32, bytes, lanes);
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 lane = first_lane(rest);
    __builtin_memcpy(bytes_at<SPACE>(w, address[lane]), data[lane], bytes);
  }
}

// A thread's local memory is a part of the register file, one lane's bytes after another's: the last two operands of an
// access are its offset and the bytes per lane. No other thread can access it, so only the bounds are checked.
template <class T, class F> LOOM_INLINE void each_local(Warp &w, const Instruction &i, u32 address, F access) {
  const u32 count = i.operand_count - 3, room = w.words(i, count + 2)[0];
  const u32 *base = w.words(i, address);
  u8 *memory = w.registers + i.operands[count + 1];
  GPU_EACH_LANE(w.mask, lane) {
    const u64 at = (u32)(base[lane] + (u32)i.immediate);
    if (at + count * sizeof(T) > room) found(w, LOCAL_BOUNDS, i.number, lane, at);
    else for (u32 k = 0; k < count; ++k) access(k, lane, memory + lane * room + at + k * sizeof(T));
  }
}
// Operands: results, address, ...
template <class T, class Slot> static void load_local(Warp &w, const Instruction &i) {
  each_local<T>(w, i, i.operand_count - 3, [&](u32 k, u32 lane, const u8 *from) LOOM_ALWAYS {
    T x;
    __builtin_memcpy(&x, from, sizeof x);
    ((Slot *)(w.registers + i.operands[k]))[lane] = (Slot)x;
  });
}
// Operands: address, values, ...
template <class T, class Slot> static void store_local(Warp &w, const Instruction &i) {
  each_local<T>(w, i, 0, [&](u32 k, u32 lane, u8 *to) LOOM_ALWAYS {
    const T x = (T)((const Slot *)(w.registers + i.operands[1 + k]))[lane];
    __builtin_memcpy(to, &x, sizeof x);
  });
}

// Operands: results. The immediate is the offset in the .param space.
template <class T, class Slot> static void load_parameter(Warp &w, const Instruction &i) {
  for (u32 k = 0; k < i.operand_count; ++k) {
    T x;
    __builtin_memcpy(&x, w.block->launch->parameters + i.immediate + k * sizeof(T), sizeof x);
    Slot *to = (Slot *)(w.registers + i.operands[k]);
    const u32 mask = w.mask;
    GPU_LANES to[lane] = mask >> lane & 1 ? (Slot)x : to[lane];
  }
}

static const Named MEMORY_TABLE[] = {
  GPU_HANDLER("fence", fence)
#define GPU_BY_SIZE(NAME, FUNCTION, ...)                   \
  GPU_HANDLER(NAME ".u8.4", FUNCTION<__VA_ARGS__ u8, u32>)   \
  GPU_HANDLER(NAME ".u16.4", FUNCTION<__VA_ARGS__ u16, u32>) \
  GPU_HANDLER(NAME ".u32.4", FUNCTION<__VA_ARGS__ u32, u32>) \
  GPU_HANDLER(NAME ".u8.8", FUNCTION<__VA_ARGS__ u8, u64>)   \
  GPU_HANDLER(NAME ".u16.8", FUNCTION<__VA_ARGS__ u16, u64>) \
  GPU_HANDLER(NAME ".u32.8", FUNCTION<__VA_ARGS__ u32, u64>) \
  GPU_HANDLER(NAME ".u64.8", FUNCTION<__VA_ARGS__ u64, u64>)
#define GPU_BY_SIZE_AND_SIGN(NAME, FUNCTION, ...)          \
  GPU_BY_SIZE(NAME, FUNCTION, __VA_ARGS__)                   \
  GPU_HANDLER(NAME ".s8.4", FUNCTION<__VA_ARGS__ i8, u32>)   \
  GPU_HANDLER(NAME ".s16.4", FUNCTION<__VA_ARGS__ i16, u32>) \
  GPU_HANDLER(NAME ".s8.8", FUNCTION<__VA_ARGS__ i8, u64>)   \
  GPU_HANDLER(NAME ".s16.8", FUNCTION<__VA_ARGS__ i16, u64>) \
  GPU_HANDLER(NAME ".s32.8", FUNCTION<__VA_ARGS__ i32, u64>)
#define GPU_GLOBAL GLOBAL,
#define GPU_SHARED SHARED,
  GPU_BY_SIZE_AND_SIGN("ld.global", load, GPU_GLOBAL)
  GPU_BY_SIZE_AND_SIGN("ld.shared", load, GPU_SHARED)
  GPU_BY_SIZE_AND_SIGN("ld.local", load_local, )
  GPU_BY_SIZE_AND_SIGN("ld.param", load_parameter, )
  GPU_BY_SIZE("st.global", store, GPU_GLOBAL)
  GPU_BY_SIZE("st.shared", store, GPU_SHARED)
  GPU_BY_SIZE("st.local", store_local, )
#undef GPU_BY_SIZE
#undef GPU_BY_SIZE_AND_SIGN
#undef GPU_GLOBAL
#undef GPU_SHARED
};

}  // namespace gpu
