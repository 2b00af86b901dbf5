// atom and red: lane by lane, in order; in global memory atomic among blocks as well.
#pragma once
#include "memory.h"

namespace gpu {

// Registers of a kind of value, and its operations. A packed pair is added half by half.
template <class T> struct Raw { typedef T type; };
template <> struct Raw<f32> { typedef u32 type; };
template <> struct Raw<f64> { typedef u64 type; };

template <class F> struct Half {  // f16 or bf16
  u16 code;
};
template <class F> struct Pair {
  u32 codes;
};
template <class F> struct Raw<Half<F>> { typedef u16 type; };
template <class F> struct Raw<Pair<F>> { typedef u32 type; };

template <class F> LOOM_INLINE u16 sum16(u16 a, u16 b) {
  return ptx::close<F, false, false, false>(ptx::decode<F>(a) + ptx::decode<F>(b));
}
LOOM_INLINE f32 sum(f32 a, f32 b) { return ptx::canonical(a + b); }
template <class T> LOOM_INLINE T sum(T a, T b) { return (T)(a + b); }
template <class F> LOOM_INLINE Half<F> sum(Half<F> a, Half<F> b) { return {sum16<F>(a.code, b.code)}; }
template <class F> LOOM_INLINE Pair<F> sum(Pair<F> a, Pair<F> b) {
  return {ptx::pairs<u16>([](u16 x, u16 y) { return sum16<F>(x, y); }, a.codes, b.codes)};
}

// In global memory, subnormal operands and sums are flushed to zero (PTX ISA, atom).
LOOM_INLINE f32 flushed(f32 x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
struct AddFlushed { static f32 of(f32 old, f32 x, f32) { return flushed(sum(flushed(old), flushed(x))); } };
struct Add { template <class T> static T of(T old, T x, T) { return sum(old, x); } };
struct Min { template <class T> static T of(T old, T x, T) { return x < old ? x : old; } };
struct Max { template <class T> static T of(T old, T x, T) { return x > old ? x : old; } };
struct And { template <class T> static T of(T old, T x, T) { return old & x; } };
struct Or { template <class T> static T of(T old, T x, T) { return old | x; } };
struct Xor { template <class T> static T of(T old, T x, T) { return old ^ x; } };
struct Exchange { template <class T> static T of(T, T x, T) { return x; } };
struct Compare { template <class T> static T of(T old, T x, T y) { return old == x ? y : old; } };
struct Increment { template <class T> static T of(T old, T x, T) { return old >= x ? 0 : old + 1; } };
struct Decrement { template <class T> static T of(T old, T x, T) { return old == 0 || old > x ? x : old - 1; } };

template <Space SPACE, class Op, class T> LOOM_INLINE typename Raw<T>::type update(u8 *at, T x, T y) {
  typedef typename Raw<T>::type U;
  U before = __atomic_load_n((U *)at, __ATOMIC_RELAXED);
  for (;;) {
    const U after = bits<U>(Op::of(bits<T>(before), x, y));
    if constexpr (SPACE == SHARED) return *(U *)at = after, before;
    if (__atomic_compare_exchange_n((U *)at, &before, after, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return before;
  }
}

// Operands: old values, address, new values, and for cas the values to store after those. An instruction acts on
// `count` neighboring elements (.v2, .v4), each atomic by itself. `red` has sinks for the old values.
template <Space SPACE, class Op, class T> static void atomic(Warp &w, const Instruction &i) {
  typedef typename Raw<T>::type U;
  typedef integer<(sizeof(U) < 4 ? 4 : sizeof(U)), false> Slot;
  constexpr bool compares = __is_same(Op, Compare);
  const u32 count = compares ? 1 : (i.operand_count - 1) / 2, bytes = count * sizeof(U);
  u64 address[LANES];
  addresses<SPACE>(w, i, count, address);
  u32 lanes;
  if constexpr (SPACE == SHARED) lanes = reachable_shared(w, i, address, bytes, w.mask);
  else lanes = reachable_global<true>(w, i, address, bytes, w.mask);
  const bool checks = w.block->checks;
  const Indivisible guard(w, SPACE == GLOBAL);
  if (checks) {
    if constexpr (SPACE == SHARED) update_shared(w, i, address, bytes, lanes);
    else if constexpr (!compares) update_global(w, i, address, bytes, lanes);
  }
  U changed = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 lane = first_lane(rest);
    if constexpr (SPACE == GLOBAL && compares) {
      const U expected = (U)((Slot *)(w.registers + i.operands[2]))[lane];
      if (checks) compare_global(w, i, lane, address[lane], bytes, *(const U *)address[lane] == expected);
    }
    for (u32 k = 0; k < count; ++k) {
      u8 *at = bytes_at<SPACE>(w, address[lane]) + k * sizeof(U);
      const U x = (U)((Slot *)(w.registers + i.operands[count + 1 + k]))[lane];
      U y = x;
      if constexpr (compares) y = (U)((Slot *)(w.registers + i.operands[3]))[lane];
      const U before = update<SPACE, Op, T>(at, bits<T>(x), bits<T>(y));
      ((Slot *)(w.registers + i.operands[k]))[lane] = before;
      changed |= before ^ *(const U *)at;
    }
  }
  if (changed) w.block->happened();  // otherwise it may be polling for somebody else's change
}

static const Named ATOMICS_TABLE[] = {
#define GPU_ATOMIC(OP, TYPE, ...)                                            \
  GPU_HANDLER("atom.global." OP "." TYPE, atomic<GLOBAL, __VA_ARGS__>)         \
  GPU_HANDLER("atom.shared." OP "." TYPE, atomic<SHARED, __VA_ARGS__>)
  GPU_ATOMIC("add", "u32", Add, u32)
  GPU_ATOMIC("add", "s32", Add, u32)
  GPU_ATOMIC("add", "u64", Add, u64)
  GPU_ATOMIC("add", "s64", Add, u64)
  GPU_HANDLER("atom.global.add.f32", atomic<GLOBAL, AddFlushed, f32>)
  GPU_HANDLER("atom.shared.add.f32", atomic<SHARED, Add, f32>)
  GPU_ATOMIC("add", "f64", Add, f64)
  GPU_ATOMIC("add", "f16", Add, Half<ptx::f16>)
  GPU_ATOMIC("add", "bf16", Add, Half<ptx::bf16>)
  GPU_ATOMIC("add", "f16x2", Add, Pair<ptx::f16>)
  GPU_ATOMIC("add", "bf16x2", Add, Pair<ptx::bf16>)
  GPU_ATOMIC("min", "u32", Min, u32)
  GPU_ATOMIC("min", "s32", Min, i32)
  GPU_ATOMIC("min", "u64", Min, u64)
  GPU_ATOMIC("min", "s64", Min, i64)
  GPU_ATOMIC("max", "u32", Max, u32)
  GPU_ATOMIC("max", "s32", Max, i32)
  GPU_ATOMIC("max", "u64", Max, u64)
  GPU_ATOMIC("max", "s64", Max, i64)
  GPU_ATOMIC("and", "b32", And, u32)
  GPU_ATOMIC("and", "b64", And, u64)
  GPU_ATOMIC("or", "b32", Or, u32)
  GPU_ATOMIC("or", "b64", Or, u64)
  GPU_ATOMIC("xor", "b32", Xor, u32)
  GPU_ATOMIC("xor", "b64", Xor, u64)
  GPU_ATOMIC("exch", "b32", Exchange, u32)
  GPU_ATOMIC("exch", "b64", Exchange, u64)
  GPU_ATOMIC("cas", "b16", Compare, u16)
  GPU_ATOMIC("cas", "b32", Compare, u32)
  GPU_ATOMIC("cas", "b64", Compare, u64)
  GPU_ATOMIC("inc", "u32", Increment, u32)
  GPU_ATOMIC("dec", "u32", Decrement, u32)
#undef GPU_ATOMIC
};

}  // namespace gpu
