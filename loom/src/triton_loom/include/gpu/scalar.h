// Instructions that act on each lane alike, from their meaning in one lane (defined by codegen/ptx.py; ptx/scalars.py makes
// the handlers).
#pragma once
#include "machine.h"

namespace gpu {

#ifdef __clang__
#define GPU_LANES _Pragma("clang loop vectorize(assume_safety)") for (u32 lane = 0; lane < LANES; ++lane)
#else
#define GPU_LANES _Pragma("GCC ivdep") for (u32 lane = 0; lane < LANES; ++lane)
#endif

// An operand: lanes of `Register` in the register file, which the instruction reads or writes as a `Type`.
template <class Register, class Type> struct Of {
  Register *lanes;
  Of(Warp &w, u32 offset) : lanes((Register *)(w.registers + offset)) {}
  Type get(u32 lane) const { return ptx::as<Type>(lanes[lane]); }
  void put(u32 lane, Type x) { lanes[lane] = ptx::raw<Register>(x); }
  void put(u32 lane, Type x, u32 mask) { lanes[lane] = mask >> lane & 1 ? ptx::raw<Register>(x) : lanes[lane]; }
};
// A predicate.
struct Flag {
  u32 bits;
  Flag(Warp &w, u32 offset) : bits(*(u32 *)(w.registers + offset)) {}
  bool get(u32 lane) const { return bits >> lane & 1; }
};

template <class To, class F, class... From>
LOOM_INLINE void for_all_lanes(Warp &w, const Instruction &i, F f, From... from) {
  To to(w, i.operands[0]);
  if (__builtin_expect(w.mask == FULL, 1)) {
    GPU_LANES to.put(lane, f(from.get(lane)...));
  } else {
    const u32 mask = w.mask;
    GPU_LANES to.put(lane, f(from.get(lane)...), mask);
  }
}

template <class F, class... From> LOOM_INLINE u32 true_lanes(F f, From... from) {
  u32 bits = 0;
  for (u32 lane = 0; lane < LANES; ++lane) bits |= (f(from.get(lane)...) ? 1u : 0u) << lane;
  return bits;
}
LOOM_INLINE void put_flags(Warp &w, u32 offset, u32 bits) {
  u32 &to = *(u32 *)(w.registers + offset);
  to = (to & ~w.mask) | (bits & w.mask);
}

// PTX does not define the result of a division by zero, and Triton's optimizer assumes that it never happens.
template <class Divisor> LOOM_INLINE void expect_divisor(Warp &w, const Instruction &i, Divisor divisor) {
  u32 zero = 0;
  for (u32 lane = 0; lane < LANES; ++lane) zero |= (divisor.get(lane) == 0 ? 1u : 0u) << lane;
  zero &= w.mask;
  if (__builtin_expect(zero && w.block->checks, 0)) found(w, DIVISION_BY_ZERO, i.number, first_lane(zero));
}

// ---- what codegen/ptx.py does not have ------------------------------------------------------------------

// A logical function of three registers by its truth table, which is an operand here.
LOOM_INLINE u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 d = 0;
  for (u32 row = 0; row < 8; ++row)
    d |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c) & (0u - (table >> row & 1));
  return d;
}

// ---- roundings other than to nearest: 'z' toward zero, 'm' down, 'p' up ----------------------------------

LOOM_INLINE f32 next_below(f32 x) {
  const u32 u = bits<u32>(x);
  return bits<f32>(x == 0 ? 0x80000001u : x > 0 ? u - 1 : u + 1);
}
// Rounding of x + rest, where rest is less than half a unit in the last place of x.
template <char WAY> LOOM_INLINE f32 directed(f64 x, f64 rest) {
  const f32 nearest = (f32)x;
  if (!(x - x == 0)) return nearest;  // NaN, or infinite already
  const f64 over = (f64)nearest - x;
  const bool above = over > 0 || (over == 0 && rest < 0), below = over < 0 || (over == 0 && rest > 0);
  if (above && (WAY == 'm' || (WAY == 'z' && x > 0))) return next_below(nearest);
  if (below && (WAY == 'p' || (WAY == 'z' && x < 0))) return -next_below(-nearest);
  return nearest;
}
template <char WAY> LOOM_INLINE f32 directed_product(f32 a, f32 b) { return directed<WAY>((f64)a * b, 0); }
// a * b + c. The rounding error of the sum in f64 is itself representable (Knuth's two-sum).
template <char WAY> LOOM_INLINE f32 directed_sum(f32 a, f32 b, f32 c) {
  const f64 product = (f64)a * b, added = c, sum = product + added;
  if (WAY == 'm' && sum == 0 && (product != 0 || bits<u64>(product) != bits<u64>(added))) return -0.f;
  const f64 part = sum - product, rest = (product - (sum - part)) + (added - part);
  return directed<WAY>(sum, rest);
}

LOOM_INLINE f32 f32_of_bf16(u32 code) {
  const u32 u = code << 16;
  return bits<f32>((u & 0x7FFFFFFF) > 0x7F800000 ? u | 0x7FFFFFFF : u);
}
LOOM_INLINE u32 bf16_of_f32(f32 x) {
  const u32 u = bits<u32>(x);
  return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}

// With one rounding, and without a branch, so that lanes run in parallel. The last place at an exponent is 45 bits above
// that of f64; for subnormals it is 2^-133, to which the adder rounds when it adds 1.5 * 2^-81.
LOOM_INLINE u32 bf16_of_f64(f64 x) {
  const u64 u = bits<u64>(x), rounded = (u + 0xFFFFFFFFFFFull + (u >> 45 & 1)) & ~0x1FFFFFFFFFFFull;
  const f64 small = __builtin_copysign((x + 0x1.8p-81) - 0x1.8p-81, x);
  const f32 nearest = (f32)(__builtin_fabs(x) < 0x1p-126 ? small : bits<f64>(rounded));
  return x != x ? 0x7FFF : bits<u32>(nearest) >> 16;
}
// a * b + c. The product is exact in f64. If a term is less than 2^-36 of the other, only its sign matters: replaced by
// 2^-36 of the other, it keeps the sum exact.
LOOM_INLINE u32 fused_bf16(u32 a, u32 b, u32 c) {
  const f64 product = (f64)f32_of_bf16(a) * (f64)f32_of_bf16(b), added = f32_of_bf16(c);
  const bool product_leads = __builtin_fabs(product) >= __builtin_fabs(added);
  const f64 large = product_leads ? product : added, small = product_leads ? added : product;
  const f64 scaled = __builtin_fabs(large) * 0x1p-36, least = scaled < 0x1p220 ? scaled : 0x1p220;
  const f64 side = __builtin_copysign(least, small);
  const f64 moved = __builtin_fabs(small) < least ? side : small;
  return bf16_of_f64(large + (small == 0 ? small : moved));
}

static void pred_move(Warp &w, const Instruction &i) { put_flags(w, i.operands[0], w.flags(i, 1)); }
static void pred_not(Warp &w, const Instruction &i) { put_flags(w, i.operands[0], ~w.flags(i, 1)); }
static void pred_and(Warp &w, const Instruction &i) { put_flags(w, i.operands[0], w.flags(i, 1) & w.flags(i, 2)); }
static void pred_or(Warp &w, const Instruction &i) { put_flags(w, i.operands[0], w.flags(i, 1) | w.flags(i, 2)); }
static void pred_xor(Warp &w, const Instruction &i) { put_flags(w, i.operands[0], w.flags(i, 1) ^ w.flags(i, 2)); }

// mov.b64 {low, high}, whole: parts of PART bits, the first the lowest.
template <class Whole, class Part> static void unpack(Warp &w, const Instruction &i) {
  constexpr u32 width = sizeof(Part) * 8;
  Whole whole[LANES];
  const Whole *from = (const Whole *)(w.registers + i.operands[i.operand_count - 1]);
  __builtin_memcpy(whole, from, sizeof whole);
  for (u32 k = 0; k + 1 < i.operand_count; ++k) {
    u32 *to = w.words(i, k);
    const u32 mask = w.mask;
    if (mask == FULL) {
      GPU_LANES to[lane] = (Part)(whole[lane] >> k * width);
    } else {
      GPU_LANES to[lane] = mask >> lane & 1 ? (Part)(whole[lane] >> k * width) : to[lane];
    }
  }
}
template <class Whole, class Part> static void pack(Warp &w, const Instruction &i) {
  constexpr u32 width = sizeof(Part) * 8;
  Whole whole[LANES] = {};
  for (u32 k = 1; k < i.operand_count; ++k) {
    const u32 *from = w.words(i, k);
    GPU_LANES whole[lane] |= (Whole)(Part)from[lane] << (k - 1) * width;
  }
  Whole *to = (Whole *)(w.registers + i.operands[0]);
  const u32 mask = w.mask;
  GPU_LANES to[lane] = mask >> lane & 1 ? whole[lane] : to[lane];
}

static void nothing(Warp &, const Instruction &) {}

static const Named SCALAR_TABLE[] = {
  GPU_HANDLER("nothing", nothing)
  GPU_HANDLER("pred.mov", pred_move)
  GPU_HANDLER("pred.not", pred_not)
  GPU_HANDLER("pred.and", pred_and)
  GPU_HANDLER("pred.or", pred_or)
  GPU_HANDLER("pred.xor", pred_xor)
  GPU_HANDLER("unpack.32.16", unpack<u32, u16>)
  GPU_HANDLER("unpack.64.32", unpack<u64, u32>)
  GPU_HANDLER("unpack.64.16", unpack<u64, u16>)
  GPU_HANDLER("unpack.32.8", unpack<u32, u8>)
  GPU_HANDLER("unpack.16.8", unpack<u32, u8>)
  GPU_HANDLER("pack.32.16", pack<u32, u16>)
  GPU_HANDLER("pack.64.32", pack<u64, u32>)
  GPU_HANDLER("pack.64.16", pack<u64, u16>)
  GPU_HANDLER("pack.32.8", pack<u32, u8>)
  GPU_HANDLER("pack.16.8", pack<u32, u8>)
};

}  // namespace gpu
