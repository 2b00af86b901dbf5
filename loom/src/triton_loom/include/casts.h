// Conversions to and from the float formats that C++ lacks, and from floats to integers with a GPU's semantics.
//
//   f32_from_bf16(bits)  bf16_from_f32(x)  bf16_from_f32_rtz(x)  likewise f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz
//
// take a scalar or a vector of any width; raw bits are u16 or u8 lanes. Rounding is to nearest even, or
// toward zero for _rtz; subnormals are exact both ways; NaN stays NaN. bf16 and f16 overflow to infinity, the
// 8-bit formats saturate at their largest finite value, even for infinity, like cvt.rn.satfinite. f64 is converted
// to a narrow type with a single rounding through f32_odd_from_f64.
#pragma once
#include "simd.h"

// ---- f16 and FP8 on any machine ---------------------------------------------------------------------

// OVERFLOW is the code of values that are too large, INFINITE that of infinity (0 if there is none). An FNUZ
// format has no negative zero: the code of that zero is its NaN.
template <class Code, int MANTISSA, int BIAS, u32 OVERFLOW, u32 NOT_A_NUMBER, u32 INFINITE = 0>
struct float_format {
  typedef Code code;
  static constexpr u32 overflow = OVERFLOW, nan = NOT_A_NUMBER, infinite = INFINITE;
  static constexpr u32 sign = 1u << (sizeof(Code) * 8 - 1);
  static constexpr int mantissa = MANTISSA, dropped = 23 - MANTISSA, to_sign = 32 - sizeof(Code) * 8;
  static constexpr u32 rebias = (u32)(127 - BIAS) << 23;
  static constexpr u32 smallest_normal = (u32)(128 - BIAS) << 23;  // as bits of an f32, like `limit`
  static constexpr u32 limit = (OVERFLOW << dropped) + rebias;
};
typedef float_format<u16, 10, 15, 0x7C00, 0x7E00, 0x7C00> format_f16;
typedef float_format<u8, 3, 7, 0x7E, 0x7F> format_e4m3;
typedef float_format<u8, 2, 15, 0x7B, 0x7F, 0x7C> format_e5m2;
typedef float_format<u8, 3, 8, 0x7F, 0x80> format_e4m3fnuz;
typedef float_format<u8, 2, 16, 0x7F, 0x80> format_e5m2fnuz;

// The adder rounds: added to `magic`, a power of two, only those bits of |x| survive that the format has at
// this exponent, so the low end of the sum counts |x| in units of its last place. The high end is the
// exponent, which the shift moves in front of the count: their sum is the code, including a carry out of the
// count. The constant that remains to be added is in the low bits of `magic`; it is even, so that ties still
// go to even codes.
template <class F, bool TOWARD_ZERO, class V> LOOM_INLINE like<V, typename F::code> encode(V x) {
  typedef like<V, u32> U;
  constexpr u32 inf = 0x7F800000, code_mask = 2 * F::sign - 1;
  constexpr bool overflows_to_infinity = F::overflow == F::infinite;
  constexpr u32 limit = TOWARD_ZERO && overflows_to_infinity ? F::limit - 1 : F::limit;
  constexpr u32 raise = (u32)F::dropped << 23;
  constexpr u32 rest = (0u - ((F::smallest_normal + raise) >> F::dropped)) & code_mask;

  U u = bits<U>(x), a = u & 0x7FFFFFFF;
  V clamped = lesser(splat<V>(bits<f32>(limit)), bits<V>(a));
  V exponent = greater(splat<V>(bits<f32>(F::smallest_normal)), bits<V>(bits<U>(clamped) & inf));
  V magic = bits<V>(bits<U>(exponent) + (raise + rest)), sum = clamped + magic;
  U code = bits<U>(sum) + (bits<U>(sum) >> F::dropped);
  if constexpr (TOWARD_ZERO) code = sum - magic > clamped ? code - 1 : code;
  if constexpr (TOWARD_ZERO && overflows_to_infinity) code = a == inf ? splat<U>(F::infinite) : code;

  U sign = u >> F::to_sign & F::sign;
  if constexpr (F::nan == F::sign) code = (code & code_mask) == 0 ? splat<U>(0) : code | sign;
  else code |= sign;
  return convert<like<V, typename F::code>>(a > inf ? splat<U>(F::nan) : code);
}

// A subnormal m is decoded as (1 + m) 2^e - 2^e: exact, and the adder sees no subnormal operand, which costs
// some machines a hundred cycles.
template <class F, class C> LOOM_INLINE like<C, f32> decode(C code) {
  typedef like<C, u32> U;
  typedef like<C, f32> V;
  U c = convert<U>(code), magnitude = c & (F::sign - 1), shifted = magnitude << F::dropped;
  V subnormal = bits<V>(shifted + F::smallest_normal) - bits<f32>(F::smallest_normal);
  U u = magnitude < (1u << F::mantissa) ? bits<U>(subnormal) : shifted + F::rebias;
  if constexpr (F::infinite) u = magnitude >= F::infinite ? shifted | 0x7F800000 : u;
  else u = (F::nan == F::sign ? c : magnitude) == F::nan ? splat<U>(0x7FC00000) : u;
  return bits<V>(u | (c & F::sign) << F::to_sign);
}

// ---- FP8 with AVX-512 -------------------------------------------------------------------------------

#if defined __AVX512DQ__ && defined __AVX512BW__ && defined __AVX512VL__
#define LOOM_AVX512
template <class F> struct magic_table {
  static constexpr u32 first = F::smallest_normal >> 23, last = F::limit >> 23;
  static constexpr u32 entries = last - first < 16 ? 16 : 32;
  alignas(64) u32 of[32];
  constexpr magic_table() : of() {
    for (u32 e = first; e <= last; e++)
      of[e % entries] = ((e + F::dropped) << 23) + ((e - first) << F::mantissa);
  }
};
template <class F> static constexpr magic_table<F> MAGIC;

#ifdef __clang__
#define LOOM_LOOK_UP(TABLE, INDEX) __builtin_ia32_permvarsf512(TABLE, INDEX)
#define LOOM_LOOK_UP2(TABLE, MORE, INDEX) __builtin_ia32_vpermi2varps512(TABLE, INDEX, MORE)
#define LOOM_CHOOSE(K, A, B) __builtin_ia32_selectd_512(K, A, B)
#define LOOM_CHOOSE_BY_BIT(U, BIT, A, B) (((U) & (BIT)) != 0 ? (A) : (B))
#else
#define LOOM_LOOK_UP(TABLE, INDEX) __builtin_ia32_permvarsf512_mask(TABLE, INDEX, TABLE, -1)
#define LOOM_LOOK_UP2(TABLE, MORE, INDEX) __builtin_ia32_vpermt2varps512_mask(INDEX, TABLE, MORE, -1)
#define LOOM_CHOOSE(K, A, B) __builtin_ia32_blendmd_512_mask(B, A, K)
#define LOOM_CHOOSE_BY_BIT(U, BIT, A, B) \
  LOOM_CHOOSE(__builtin_ia32_ptestmd512(U, splat<i32x16>(BIT), -1), A, B)
#endif

// The addition of `encode` in nine instructions for 16 lanes and half the time: `magic` comes from a table by
// exponent, with the exponent's share of the code already in its low bits.
template <class F> LOOM_INLINE u8x16 encode_by_table(f32x16 x) {
  constexpr int smaller_magnitude = 0x0A;     // vrangeps: min(|a|, |b|) with a clear sign; NaN gives b
  constexpr int nan_to_largest_float = 0xEE;  // vfixupimmps: a number whose low byte is 0xFF
  constexpr int negative_or_nan = 0xD5;       // vfpclassps: every class with a set sign, and both NaNs
  f32x16 limit = splat<f32x16>(bits<f32>(F::limit));
  f32x16 a = __builtin_ia32_rangeps512_mask(x, limit, smaller_magnitude, x, -1, 4);
  i32x16 exponent = bits<i32x16>(greater(a, splat<f32x16>(bits<f32>(F::smallest_normal)))) >> 23;
  f32x16 table = load<f32x16>(MAGIC<F>.of), magic;
  if constexpr (magic_table<F>::entries == 16) magic = LOOM_LOOK_UP(table, exponent);
  else magic = LOOM_LOOK_UP2(table, load<f32x16>(MAGIC<F>.of + 16), exponent);
  f32x16 sum = __builtin_ia32_fixupimmps512_mask(a + magic, x, splat<i32x16>(nan_to_largest_float), 0, -1, 4);
  i32x16 code = bits<i32x16>(sum);
  code = LOOM_CHOOSE(__builtin_ia32_fpclassps512_mask(x, negative_or_nan, -1), code ^ 0x80, code);
  return convert<u8x16>(bits<u32x16>(code));
}
#endif

// ---- f16 with F16C ----------------------------------------------------------------------------------

#ifdef __F16C__
LOOM_INLINE f32x4 widen_f16(u16x4 x) { return __builtin_ia32_vcvtph2ps((i16x8)resize<8>(x)); }
LOOM_INLINE f32x8 widen_f16(u16x8 x) { return __builtin_ia32_vcvtph2ps256((i16x8)x); }
template <int MODE> LOOM_INLINE u16x4 narrow_f16(f32x4 x) {
  return resize<4>((u16x8)__builtin_ia32_vcvtps2ph(x, MODE));
}
template <int MODE> LOOM_INLINE u16x8 narrow_f16(f32x8 x) {
  return (u16x8)__builtin_ia32_vcvtps2ph256(x, MODE);
}
#ifdef __AVX512BW__
LOOM_INLINE f32x16 widen_f16(u16x16 x) {
  return __builtin_ia32_vcvtph2ps512_mask((i16x16)x, f32x16{}, -1, 4);
}
template <int MODE> LOOM_INLINE u16x16 narrow_f16(f32x16 x) {
  return (u16x16)__builtin_ia32_vcvtps2ph512_mask(x, MODE, i16x16{}, -1);
}
#endif
#endif

// ---- a register at a time: the best way for each format ----------------------------------------------

template <class V> LOOM_INLINE like<V, u16> round_to_bf16(V x) {
#ifdef LOOM_AVX512
  if constexpr (lane<V>::count > 1)
    return in_pieces<16>([](f32x16 y) LOOM_LAMBDA {
      constexpr int nan_to_quiet_nan = 0x22;
      i32x16 u = bits<i32x16>(y), sum = u + 0x7FFF, fixes = splat<i32x16>(nan_to_quiet_nan);
      sum = LOOM_CHOOSE_BY_BIT(u, 0x10000, sum + 1, sum);
      f32x16 number = __builtin_ia32_fixupimmps512_mask(bits<f32x16>(sum), y, fixes, 0, -1, 4);
      return strided<1, 2, 16>(bits<u16x32>(number));
    }, x);
#endif
  typedef like<V, u32> U;
  U u = bits<U>(x), sum = u + 0x7FFF + (u >> 16 & 1);
  return convert<like<V, u16>>(((u & 0x7FFFFFFF) > 0x7F800000 ? u | 0x400000 : sum) >> 16);
}
template <class V> LOOM_INLINE like<V, u16> truncate_to_bf16(V x) {
  typedef like<V, u32> U;
  U u = bits<U>(x);
  return convert<like<V, u16>>(((u & 0x7FFFFFFF) > 0x7F800000 ? u | 0x400000 : u) >> 16);
}

template <bool TOWARD_ZERO, class V> LOOM_INLINE like<V, u16> narrow_to_f16(V x) {
#ifdef __F16C__
  return in_registers([](auto y) LOOM_LAMBDA { return narrow_f16<TOWARD_ZERO ? 3 : 0>(y); }, x);
#else
  return encode<format_f16, TOWARD_ZERO>(x);
#endif
}
template <class C> LOOM_INLINE like<C, f32> widen_from_f16(C x) {
#ifdef __F16C__
  constexpr int n = lane<C>::count < 4 ? 4 : lane<C>::count;
  return in_pieces<n>([](auto y) LOOM_LAMBDA { return widen_f16(y); }, x);
#else
  return decode<format_f16>(x);
#endif
}

template <class F, class V> LOOM_INLINE like<V, u8> narrow_to_fp8(V x) {
#ifdef LOOM_AVX512
  if constexpr (lane<V>::count > 1 && F::nan != F::sign)
    return in_pieces<16>([](f32x16 y) LOOM_LAMBDA { return encode_by_table<F>(y); }, x);
#endif
  return encode<F, false>(x);
}
// The code of an FP8 value fits into the fields of an f16, whose subnormals the machine converts at full speed.
// What remains is a power of two, and the NaN in formats where it is not a NaN of f16 already.
template <class F, class C> LOOM_INLINE like<C, f32> widen_from_fp8(C x) {
#ifdef __F16C__
  typedef like<C, u16> H;
  if constexpr (F::infinite != 0) return widen_from_f16((H)(convert<H>(x) << 8));
  else if constexpr (lane<C>::count > 1 && F::mantissa == 3) {
    H h = (H)(convert<like<C, i16>>((like<C, i8>)x) << 7) & 0xBFFF;
    if constexpr (F::nan == F::sign) h = h == 0x8000 ? splat<H>(0x7E00) : h;
    else h = (h & 0x3F80) == 0x3F80 ? splat<H>(0x7E00) : h;
    return widen_from_f16(h) * bits<f32>(F::rebias - format_f16::rebias + (127u << 23));
  }
#endif
  return decode<F>(x);
}

template <class C> LOOM_INLINE like<C, f32> widen_from_e2m1(C x) {
  typedef like<C, u32> U;
  U c = convert<U>(x), magnitude = c & 7, normal = (magnitude << 22) + (126u << 23);
  U u = magnitude > 1 ? normal : (0 - magnitude) & bits<u32>(0.5f);
  return bits<like<C, f32>>(u | (c & 8) << 28);
}
template <class C> LOOM_INLINE like<C, f32> widen_from_e8m0(C x) {
  typedef like<C, u32> U;
  U c = convert<U>(x), u = c == 0 ? splat<U>(0x400000) : c << 23;
  return bits<like<C, f32>>(c == 255 ? splat<U>(0x7FC00000) : u);
}

// Rounding toward zero, or to odd: a value that f32 cannot hold goes to the neighbor with an odd mantissa, which
// no narrower type holds and which lies on the same side of all their midpoints, so that rounding twice equals
// rounding once.
template <bool ODD, class V> LOOM_INLINE like<V, f32> round_inward(V x) {
  typedef like<V, i64> L;
  typedef like<V, i32> I;
  like<V, f32> nearest = convert<like<V, f32>>(x);
  V back = convert<V>(nearest);
  L beyond = x > 0 ? (back > x ? splat<L>(1) : splat<L>(0)) : (back < x ? splat<L>(1) : splat<L>(0));
  I toward_zero = bits<I>(nearest) - convert<I>(beyond);
  if constexpr (!ODD) return bits<like<V, f32>>(toward_zero);
  L inexact = back == x ? splat<L>(0) : splat<L>(1);
  return bits<like<V, f32>>(toward_zero | convert<I>(inexact));
}
// Rounding to odd of a 64-bit integer on its way to f64: beyond 2^53, the lowest bit that f64 keeps is the OR of
// all bits below.
template <class L> LOOM_INLINE L keep_53_bits(L x) {
  typedef like<L, u64> U;
  constexpr u64 below = is_signed<typename lane<L>::type> ? 1ull << 53 : 0;
  L odd = ((x >> 11) | ((x & 0x7FF) != 0 ? splat<L>(1) : splat<L>(0))) << 11;
  return (U)x + below <= below + (1ull << 53) ? x : odd;
}

template <class T> constexpr T lowest_of = is_signed<T> ? (T)((T)1 << (sizeof(T) * 8 - 1)) : (T)0;
template <class T> constexpr T highest_of = (T)~lowest_of<T>;

// The integer for NaN: 0, or only the highest bit set if the source or the target has 64 bits, like PTX's cvt.
template <class T, class V>
constexpr T of_nan = sizeof(T) == 8 || sizeof(typename lane<V>::type) == 8 ? (T)((u64)1 << (sizeof(T) * 8 - 1)) : (T)0;

// To an integer as wide as the float: its highest value is not a float, but the next one is.
template <class T, class V> LOOM_INLINE like<V, T> saturate(V x) {
  typedef like<V, T> I;
  constexpr f64 half_range = (T)1 << (sizeof(T) * 8 - 1 - is_signed<T>);
  V low = splat<V>(lowest_of<T>), end = splat<V>(2 * half_range), zero = splat<V>(0);
  I whole = convert<I>(x >= low ? (x < end ? x : zero) : zero);
  whole = x >= end ? splat<I>(highest_of<T>) : whole;
  if constexpr (of_nan<T, V> == lowest_of<T>) return x >= low ? whole : splat<I>(lowest_of<T>);
  whole = x < low ? splat<I>(lowest_of<T>) : whole;
  return of_nan<T, V> == 0 ? whole : x == x ? whole : splat<I>(of_nan<T, V>);
}
// To a narrower integer: all its values are floats.
template <class T, class V> LOOM_INLINE like<V, T> clamp(V x) {
  V y = lesser(splat<V>(highest_of<T>), greater(splat<V>(lowest_of<T>), x));
  y = x == x ? y : splat<V>(of_nan<T, V>);
  if constexpr (sizeof(T) < 4) return convert<like<V, T>>(convert<like<V, i32>>(y));
  else return convert<like<V, T>>(y);
}

// ---- the conversions by name ------------------------------------------------------------------------

#define LOOM_CONVERSION(NAME, WIDEST, ...)                                                                 \
  template <class V> LOOM_INLINE auto NAME(V v) {                                                          \
    return by_registers<WIDEST>([](auto x) LOOM_LAMBDA { return __VA_ARGS__; }, v);                        \
  }
LOOM_CONVERSION(bf16_from_f32, f32, round_to_bf16(x))
LOOM_CONVERSION(f16_from_f32, f32, narrow_to_f16<false>(x))
LOOM_CONVERSION(e4m3_from_f32, f32, narrow_to_fp8<format_e4m3>(x))
LOOM_CONVERSION(e5m2_from_f32, f32, narrow_to_fp8<format_e5m2>(x))
LOOM_CONVERSION(e4m3fnuz_from_f32, f32, narrow_to_fp8<format_e4m3fnuz>(x))
LOOM_CONVERSION(e5m2fnuz_from_f32, f32, narrow_to_fp8<format_e5m2fnuz>(x))

LOOM_CONVERSION(bf16_from_f32_rtz, f32, truncate_to_bf16(x))
LOOM_CONVERSION(f16_from_f32_rtz, f32, narrow_to_f16<true>(x))
LOOM_CONVERSION(e4m3_from_f32_rtz, f32, encode<format_e4m3, true>(x))
LOOM_CONVERSION(e5m2_from_f32_rtz, f32, encode<format_e5m2, true>(x))
LOOM_CONVERSION(e4m3fnuz_from_f32_rtz, f32, encode<format_e4m3fnuz, true>(x))
LOOM_CONVERSION(e5m2fnuz_from_f32_rtz, f32, encode<format_e5m2fnuz, true>(x))

LOOM_CONVERSION(f32_from_bf16, f32, bits<like<decltype(x), f32>>(convert<like<decltype(x), u32>>(x) << 16))
LOOM_CONVERSION(f32_from_f16, f32, widen_from_f16(x))
LOOM_CONVERSION(f32_from_e4m3, f32, widen_from_fp8<format_e4m3>(x))
LOOM_CONVERSION(f32_from_e5m2, f32, widen_from_fp8<format_e5m2>(x))
LOOM_CONVERSION(f32_from_e4m3fnuz, f32, widen_from_fp8<format_e4m3fnuz>(x))
LOOM_CONVERSION(f32_from_e5m2fnuz, f32, widen_from_fp8<format_e5m2fnuz>(x))
LOOM_CONVERSION(f32_from_e2m1, f32, widen_from_e2m1(x))  // a code in the low four bits
LOOM_CONVERSION(f32_from_e8m0, f32, widen_from_e8m0(x))

LOOM_CONVERSION(f32_from_f64_rtz, f64, round_inward<false>(x))
LOOM_CONVERSION(f32_odd_from_f64, f64, round_inward<true>(x))
LOOM_CONVERSION(f64_odd_from_i64, i64, convert<like<decltype(x), f64>>(keep_53_bits(x)))

LOOM_CONVERSION(i16_from_f32, f32, clamp<i16>(x))
LOOM_CONVERSION(u16_from_f32, f32, clamp<u16>(x))
LOOM_CONVERSION(i16_from_f64, f64, clamp<i16>(x))
LOOM_CONVERSION(u16_from_f64, f64, clamp<u16>(x))
LOOM_CONVERSION(i32_from_f32, f32, saturate<i32>(x))
LOOM_CONVERSION(u32_from_f32, f32, saturate<u32>(x))
LOOM_CONVERSION(i64_from_f32, f64, saturate<i64>(convert<like<decltype(x), f64>>(x)))
LOOM_CONVERSION(u64_from_f32, f64, saturate<u64>(convert<like<decltype(x), f64>>(x)))
LOOM_CONVERSION(i32_from_f64, f64, clamp<i32>(x))
LOOM_CONVERSION(u32_from_f64, f64, clamp<u32>(x))
LOOM_CONVERSION(i64_from_f64, f64, saturate<i64>(x))
LOOM_CONVERSION(u64_from_f64, f64, saturate<u64>(x))
#undef LOOM_CONVERSION
