// The arithmetic of math.h on scalars and on vectors at most as wide as a register.
#pragma once
#include "casts.h"

extern "C" {  // from libm; not every compiler has builtins for these
f64 j0(f64) noexcept;
f64 j1(f64) noexcept;
f64 y0(f64) noexcept;
f64 y1(f64) noexcept;
f64 jn(int, f64) noexcept;
f64 yn(int, f64) noexcept;
f64 lgamma_r(f64, int *) noexcept;
}

namespace loom_lanes {

// ---- integers ---------------------------------------------------------------------------------------

// Shifts as in PTX: the distance is unsigned; a distance of the width or more shifts everything out.
template <class I> constexpr int width_of = sizeof(typename lane<I>::type) * 8;
template <class I> LOOM_INLINE I shl(I a, I distance) {
  typedef unsigned_of<I> U;
  U n = (U)distance, shifted = (U)((U)a << (n & (U)splat<U>(width_of<I> - 1)));
  return (I)(n < width_of<I> ? shifted : splat<U>(0));
}
template <class I> LOOM_INLINE I shr(I a, I distance) {
  typedef unsigned_of<I> U;
  U n = (U)distance, shifted = (U)((U)a >> (n & (U)splat<U>(width_of<I> - 1)));
  return (I)(n < width_of<I> ? shifted : splat<U>(0));
}
template <class I> LOOM_INLINE I sar(I a, I distance) {
  typedef unsigned_of<I> U;
  typedef signed_of<I> S;
  U n = (U)distance, last = splat<U>(width_of<I> - 1);
  return (I)(S)((S)a >> (S)(n < width_of<I> ? n : last));
}

// Division never traps: x / 0 is all ones, x % 0 is x, and the lowest integer / -1 is itself.
//
// Lanes up to 32 bits divide as floats, by a reciprocal that is a little too large: the product exceeds the
// exact quotient by less than 1 / divisor, so truncation gives the integer quotient. If the divisor is loop
// invariant, the compiler hoists its reciprocal out of the loop.
template <class I> LOOM_INLINE I divide(I a, I b) {
  typedef typename lane<I>::type T;
  if constexpr (lane<I>::count == 1) {
    if (b == 0) return (T)-1;
    if (is_signed<T> && b == (T)-1) return (T)(0 - a);
    return (T)(a / b);
  } else if constexpr (sizeof(T) == 8) {
    return by_lane([](T x, T y) LOOM_LAMBDA { return divide<T>(x, y); }, a, b);
  } else {
    constexpr bool small = sizeof(T) < 4;
    typedef like<I, integer<4, small || is_signed<T>>> W;
    typedef like<I, float_of<small ? 4 : 8>> F;
    I divisor = b == 0 ? splat<I>(1) : b;
    F reciprocal = splat<F>(small ? 1 + 0x1p-20 : 1 + 0x1p-50) / convert<F>(convert<W>(divisor));
    I q = convert<I>(convert<W>(convert<F>(convert<W>(a)) * reciprocal));
    if constexpr (is_signed<T>) q = b == (T)-1 ? 0 - a : q;
    return b == 0 ? splat<I>((T)-1) : q;
  }
}

// The upper half of a product.
#if defined __SSE2__ && !defined __clang__  // GCC 12 does not find vpmuludq in a product of 64-bit lanes
LOOM_INLINE u64x2 even_products(u32x4 a, u32x4 b) {
  return (u64x2)__builtin_ia32_pmuludq128((i32x4)a, (i32x4)b);
}
#ifdef __AVX2__
LOOM_INLINE u64x4 even_products(u32x8 a, u32x8 b) {
  return (u64x4)__builtin_ia32_pmuludq256((i32x8)a, (i32x8)b);
}
#endif
#ifdef __AVX512BW__
LOOM_INLINE u64x8 even_products(u32x16 a, u32x16 b) {
  return (u64x8)__builtin_ia32_pmuludq512_mask((i32x16)a, (i32x16)b, i64x8{}, -1);
}
#endif
#else
template <class U> LOOM_INLINE auto even_products(U a, U b) {
  typedef vec<u64, lane<U>::count / 2> L;
  return (bits<L>(a) & 0xFFFFFFFF) * (bits<L>(b) & 0xFFFFFFFF);
}
#endif
template <class U> LOOM_INLINE U high_products(U a, U b) {
  auto even = even_products(a, b);
  typedef decltype(even) L;
  L odd = even_products(bits<U>(bits<L>(a) >> 32), bits<U>(bits<L>(b) >> 32));
  return bits<U>(even >> 32 | (odd & 0xFFFFFFFF00000000));
}
template <class V> LOOM_INLINE V mulhi_u32(V a, V b) {
  if constexpr (lane<V>::count == 1) return (V)((u64)(u32)a * (u32)b >> 32);
  else return (V)in_registers([](auto x, auto y) LOOM_LAMBDA { return high_products(x, y); },
                              (like<V, u32>)a, (like<V, u32>)b);
}
template <class V> LOOM_INLINE V mulhi_u64(V a, V b) {
  return (V)by_lane([](u64 x, u64 y) LOOM_LAMBDA { return (u64)((unsigned __int128)x * y >> 64); },
                    (like<V, u64>)a, (like<V, u64>)b);
}
template <class V> LOOM_INLINE V mulhi_u(V a, V b) {
  if constexpr (width_of<V> == 32) return mulhi_u32(a, b);
  else return mulhi_u64(a, b);
}
template <class V> LOOM_INLINE V mulhi_s(V a, V b) {
  typedef signed_of<V> S;
  V a_negative = (V)((S)a >> (width_of<V> - 1)), b_negative = (V)((S)b >> (width_of<V> - 1));
  return mulhi_u(a, b) - (a_negative & b) - (b_negative & a);
}

template <class I> LOOM_INLINE I brev(I x) {
  typedef unsigned_of<I> U;
  typedef typename lane<U>::type T;
  U u = (U)x;
  for (int i = width_of<I> / 2; i > 0; i /= 2) {
    T ones = (T)-1 / (((T)1 << i) + 1);  // i ones, i zeros, ...
    u = (u >> i & ones) | (u & ones) << i;
  }
  return (I)u;
}
template <class I> LOOM_INLINE I sad(I a, I b, I c) { return (a > b ? a - b : b - a) + c; }

// ---- floats: exact ----------------------------------------------------------------------------------

template <class V> constexpr bool is_f32 = __is_same(typename lane<V>::type, f32);

#if __has_builtin(__builtin_elementwise_fma)
template <class V> LOOM_INLINE V fused(V a, V b, V c) { return __builtin_elementwise_fma(a, b, c); }
#elif defined __FMA__
LOOM_INLINE f32x4 fused(f32x4 a, f32x4 b, f32x4 c) { return __builtin_ia32_vfmaddps(a, b, c); }
LOOM_INLINE f64x2 fused(f64x2 a, f64x2 b, f64x2 c) { return __builtin_ia32_vfmaddpd(a, b, c); }
LOOM_INLINE f32x8 fused(f32x8 a, f32x8 b, f32x8 c) { return __builtin_ia32_vfmaddps256(a, b, c); }
LOOM_INLINE f64x4 fused(f64x4 a, f64x4 b, f64x4 c) { return __builtin_ia32_vfmaddpd256(a, b, c); }
#ifdef __AVX512BW__
LOOM_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
}
LOOM_INLINE f64x8 fused(f64x8 a, f64x8 b, f64x8 c) {
  return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
}
#endif
#else
LOOM_INLINE f32 fused_lane(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
LOOM_INLINE f64 fused_lane(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
template <class V> LOOM_INLINE V fused(V a, V b, V c) {
  return by_lane([](auto x, auto y, auto z) LOOM_LAMBDA { return fused_lane(x, y, z); }, a, b, c);
}
#endif
template <class V> LOOM_INLINE V fma(V a, V b, V c) {
  if constexpr (__is_same(V, f32)) return __builtin_fmaf(a, b, c);
  else if constexpr (__is_same(V, f64)) return __builtin_fma(a, b, c);
  else return in_registers([](auto x, auto y, auto z) LOOM_LAMBDA { return fused(x, y, z); }, a, b, c);
}
// a b + c in f64 for a, b, c of 16-bit types, rounded to odd so that rounding it again to such a type is
// correct: the product is exact, and if the sum is not, the odd one of its two neighbors is the result.
template <class V> LOOM_INLINE V fma_to_odd(V a, V b, V c) {
  typedef like<V, i64> L;
  V product = a * b, sum = product + c, part = sum - product;
  V error = (product - (sum - part)) + (c - part);
  L code = bits<L>(sum), up = (error > 0) == (sum > 0) ? splat<L>(1) : splat<L>(-1);
  L even = (code & 1) == 0 ? splat<L>(1) : splat<L>(0);
  L inexact = error < 0 ? splat<L>(1) : error > 0 ? splat<L>(1) : splat<L>(0);
  return bits<V>(code + up * (even & inexact));
}

#if __has_builtin(__builtin_elementwise_sqrt)
template <class V> LOOM_INLINE V root(V x) { return __builtin_elementwise_sqrt(x); }
#elif defined __SSE2__
LOOM_INLINE f32x4 root(f32x4 x) { return __builtin_ia32_sqrtps(x); }
LOOM_INLINE f64x2 root(f64x2 x) { return __builtin_ia32_sqrtpd(x); }
#ifdef __AVX2__
LOOM_INLINE f32x8 root(f32x8 x) { return __builtin_ia32_sqrtps256(x); }
LOOM_INLINE f64x4 root(f64x4 x) { return __builtin_ia32_sqrtpd256(x); }
#endif
#if defined __AVX512BW__ && defined __clang__
LOOM_INLINE f32x16 root(f32x16 x) { return __builtin_ia32_sqrtps512(x, 4); }
LOOM_INLINE f64x8 root(f64x8 x) { return __builtin_ia32_sqrtpd512(x, 4); }
#elif defined __AVX512BW__
LOOM_INLINE f32x16 root(f32x16 x) { return __builtin_ia32_sqrtps512_mask(x, x, -1, 4); }
LOOM_INLINE f64x8 root(f64x8 x) { return __builtin_ia32_sqrtpd512_mask(x, x, -1, 4); }
#endif
#else
template <class V> LOOM_INLINE V root(V v) {  // an f64 root rounds to the f32 root
  return by_lane([](auto x) LOOM_LAMBDA { return (decltype(x))__builtin_sqrt(x); }, v);
}
#endif
template <class V> LOOM_INLINE V sqrt(V v) {
  if constexpr (__is_same(V, f32)) return __builtin_sqrtf(v);
  else if constexpr (__is_same(V, f64)) return __builtin_sqrt(v);
  else return in_registers([](auto x) LOOM_LAMBDA { return root(x); }, v);
}

enum rounding { NEAREST = 8, DOWN = 9, UP = 10, TOWARD_ZERO = 11 };  // as the instructions encode it
template <int MODE> LOOM_INLINE f32 rounded_lane(f32 x) {
  return MODE == NEAREST ? __builtin_rintf(x) : MODE == DOWN ? __builtin_floorf(x)
       : MODE == UP ? __builtin_ceilf(x) : __builtin_truncf(x);
}
template <int MODE> LOOM_INLINE f64 rounded_lane(f64 x) {
  return MODE == NEAREST ? __builtin_rint(x) : MODE == DOWN ? __builtin_floor(x)
       : MODE == UP ? __builtin_ceil(x) : __builtin_trunc(x);
}
#ifdef __SSE4_1__
template <int MODE> LOOM_INLINE f32x4 rounded(f32x4 x) { return __builtin_ia32_roundps(x, MODE); }
template <int MODE> LOOM_INLINE f64x2 rounded(f64x2 x) { return __builtin_ia32_roundpd(x, MODE); }
#ifdef __AVX2__
template <int MODE> LOOM_INLINE f32x8 rounded(f32x8 x) { return __builtin_ia32_roundps256(x, MODE); }
template <int MODE> LOOM_INLINE f64x4 rounded(f64x4 x) { return __builtin_ia32_roundpd256(x, MODE); }
#endif
#ifdef __AVX512BW__
template <int MODE> LOOM_INLINE f32x16 rounded(f32x16 x) {
  return __builtin_ia32_rndscaleps_mask(x, MODE, x, -1, 4);
}
template <int MODE> LOOM_INLINE f64x8 rounded(f64x8 x) {
  return __builtin_ia32_rndscalepd_mask(x, MODE, x, -1, 4);
}
#endif
#else
template <int MODE, class V> LOOM_INLINE V rounded(V v) {
  return by_lane([](auto x) LOOM_LAMBDA { return rounded_lane<MODE>(x); }, v);
}
#endif
template <int MODE, class V> LOOM_INLINE V round_to_integer(V v) {
  if constexpr (lane<V>::count == 1) return rounded_lane<MODE>(v);
  else return in_registers([](auto x) LOOM_LAMBDA { return rounded<MODE>(x); }, v);
}
template <class V> LOOM_INLINE V rint(V x) { return round_to_integer<NEAREST>(x); }
template <class V> LOOM_INLINE V floor(V x) { return round_to_integer<DOWN>(x); }
template <class V> LOOM_INLINE V ceil(V x) { return round_to_integer<UP>(x); }
template <class V> LOOM_INLINE V trunc(V x) { return round_to_integer<TOWARD_ZERO>(x); }

template <class V> using bits_of = unsigned_of<typename lane<V>::type>;
template <class V> constexpr bits_of<V> sign_bit = (bits_of<V>)1 << (width_of<V> - 1);
template <class V> LOOM_INLINE V abs(V x) {
  typedef unsigned_of<V> U;
  if constexpr (is_float<typename lane<V>::type>) return bits<V>(bits<U>(x) & (U)splat<U>(~sign_bit<V>));
  else return x < 0 ? (V)(0 - x) : x;
}
template <class V> LOOM_INLINE V copysign(V x, V sign) {
  typedef unsigned_of<V> U;
  U bit = splat<U>(sign_bit<V>);
  return bits<V>((bits<U>(x) & ~bit) | (bits<U>(sign) & bit));
}
template <class V> LOOM_INLINE V round(V x) {  // halves away from zero
  V whole = trunc(x);
  return abs(x - whole) >= splat<V>(0.5f) ? whole + copysign(splat<V>(1), x) : whole;
}

template <class V> LOOM_INLINE V saturate_to_1(V x) { return lesser(greater(x, splat<V>(0)), splat<V>(1)); }

// AVX-512 has one instruction for it, after signaling NaNs, which it passes through, have been made quiet.
#ifdef LOOM_AVX512
enum { MINIMUM = 4, MAXIMUM = 5 };
#define LOOM_RANGE(V, ...) \
  template <int WHICH> LOOM_INLINE V extreme(V a, V b) { return __builtin_ia32_range##__VA_ARGS__; }
LOOM_RANGE(f32x4, ps128_mask(a, b, WHICH, a, -1))
LOOM_RANGE(f64x2, pd128_mask(a, b, WHICH, a, -1))
LOOM_RANGE(f32x8, ps256_mask(a, b, WHICH, a, -1))
LOOM_RANGE(f64x4, pd256_mask(a, b, WHICH, a, -1))
LOOM_RANGE(f32x16, ps512_mask(a, b, WHICH, a, -1, 4))
LOOM_RANGE(f64x8, pd512_mask(a, b, WHICH, a, -1, 4))
#undef LOOM_RANGE
template <int WHICH, class V> LOOM_INLINE V extreme_number(V a, V b) {
  return extreme<WHICH>(extreme<WHICH>(a, a), extreme<WHICH>(b, b));
}
template <class V> LOOM_INLINE V maxnum(V a, V b) {
  return in_registers([](auto x, auto y) LOOM_LAMBDA { return extreme_number<MAXIMUM>(x, y); }, a, b);
}
template <class V> LOOM_INLINE V minnum(V a, V b) {
  return in_registers([](auto x, auto y) LOOM_LAMBDA { return extreme_number<MINIMUM>(x, y); }, a, b);
}
#else
template <class V> LOOM_INLINE V maxnum(V a, V b) {
  typedef unsigned_of<V> U;
  V number = a == b ? bits<V>(bits<U>(a) & bits<U>(b)) : greater(a, b);  // of two zeros the positive one
  return b == b ? number : a;
}
template <class V> LOOM_INLINE V minnum(V a, V b) {
  typedef unsigned_of<V> U;
  V number = a == b ? bits<V>(bits<U>(a) | bits<U>(b)) : lesser(a, b);
  return b == b ? number : a;
}
#endif
template <class V> LOOM_INLINE V maximum(V a, V b) { return ((a == a) & (b == b)) ? maxnum(a, b) : a + b; }
template <class V> LOOM_INLINE V minimum(V a, V b) { return ((a == a) & (b == b)) ? minnum(a, b) : a + b; }

// ---- floats: polynomials ----------------------------------------------------------------------------

// c0 + c1 x + c2 x^2 + ...
template <class V, class T> LOOM_INLINE V polynomial(V, T c0) { return splat<V>(c0); }
template <class V, class T, class... Ts> LOOM_INLINE V polynomial(V x, T c0, Ts... more) {
  return fma(x, polynomial(x, more...), splat<V>(c0));
}

// x 2^n, rounded once; n is an integer from -200 to 200.
template <class V> LOOM_INLINE V scale(V x, V n) {
#ifdef LOOM_AVX512
  if constexpr (lane<V>::count > 1)
    return in_pieces<16>([](f32x16 y, f32x16 m) LOOM_LAMBDA {
      return __builtin_ia32_scalefps512_mask(y, m, y, -1, 4);
    }, x, n);
#endif
  typedef like<V, i32> I;
  I all = convert<I>(n), half = all >> 1;
  return x * bits<V>((half + 127) << 23) * bits<V>((all - half + 127) << 23);
}

constexpr f32 TO_INTEGER = 0x1.8p23f;  // x + TO_INTEGER - TO_INTEGER is x rounded to nearest, |x| < 2^22
constexpr f32 LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;  // HIGH n is exact, having 15 bits

template <class V> LOOM_INLINE V exp(V x, V correction) {  // of the sum, |correction| << 1
  V y = lesser(splat<V>(89), greater(splat<V>(-104), x));   // beyond, the result is infinite or 0; NaN passes
  V n = fma(y, splat<V>(0x1.715476p0f), splat<V>(TO_INTEGER)) - TO_INTEGER;
  V r = fma(n, splat<V>(-LN2_LOW), fma(n, splat<V>(-LN2_HIGH), y)) + correction;
  V p = polynomial(r, 1.f, 1.f, 4.9999994e-01f, 1.6666521e-01f, 4.1668255e-02f, 8.368663e-03f,
                   1.3821468e-03f);
  return scale(p, n);
}
template <class V> LOOM_INLINE V exp(V x) { return exp(x, splat<V>(-0.f)); }
template <class V> LOOM_INLINE V exp2(V x) {
  V y = lesser(splat<V>(129), greater(splat<V>(-151), x));
  V n = y + TO_INTEGER - TO_INTEGER;
  V p = polynomial(y - n, 1.f, 6.931472e-01f, 2.4022648e-01f, 5.55036e-02f, 9.618506e-03f, 1.3390806e-03f,
                   1.5326463e-04f);
  return scale(p, n);
}

// x = m 2^e with m around 1, from sqrt(1/2) to sqrt(2), for positive finite x.
template <class V> struct parts { V m, e; };
template <class V> LOOM_INLINE parts<V> split(V x) {
  constexpr f32 root_half = 0x1.6a09e6p-1f;
#ifdef LOOM_AVX512
  if constexpr (lane<V>::count > 1) {
    auto mantissa = [](f32x16 y) LOOM_LAMBDA { return __builtin_ia32_getmantps512_mask(y, 0, y, -1, 4); };
    auto exponent = [](f32x16 y) LOOM_LAMBDA { return __builtin_ia32_getexpps512_mask(y, y, -1, 4); };
    V m = in_pieces<16>(mantissa, x), e = in_pieces<16>(exponent, x);
    auto upper = m >= splat<V>(2 * root_half);
    return {upper ? m * 0.5f : m, upper ? e + 1 : e};
  }
#endif
  typedef like<V, i32> I;
  auto subnormal = x < splat<V>(0x1p-126f);
  I u = bits<I>(subnormal ? x * 0x1p23f : x), e = (u - bits<i32>(root_half)) >> 23;
  return {bits<V>(u - (e << 23)), convert<V>(e) - (subnormal ? splat<V>(23) : splat<V>(0))};
}
// A logarithm at 0, infinity, NaN and negative values.
template <class V> LOOM_INLINE V with_special_cases(V result, V x) {
#ifdef LOOM_AVX512
  if constexpr (lane<V>::count > 1)
    return in_pieces<16>([](f32x16 r, f32x16 y) LOOM_LAMBDA {
      constexpr int by_class = 0x03530422;
      return __builtin_ia32_fixupimmps512_mask(r, y, splat<i32x16>(by_class), 0, -1, 4);
    }, result, x);
#endif
  V infinity = splat<V>(__builtin_inff());
  V r = x > 0 ? result : x == 0 ? -infinity : splat<V>(__builtin_nanf(""));
  return x < infinity ? r : x;
}
// big + small + f2 q + low, where big is 0 or |big| >= |small|, and the other two are smaller still.
template <class V> LOOM_INLINE V sum_of(V big, V small, V f2, V q, V low) {
  V sum = big + small, lost = small - (sum - big);
  return sum + fma(f2, q, lost + low);
}
template <class V> LOOM_INLINE V log(V x) {
  parts<V> p = split(x);
  V f = p.m - 1;
  V q = polynomial(f, -0.5f, 3.333333e-01f, -2.500082e-01f, 2.0001242e-01f, -1.6623409e-01f, 1.420158e-01f,
                   -1.315961e-01f, 1.2762217e-01f, -7.636439e-02f);
  return with_special_cases(sum_of(p.e * LN2_HIGH, f, f * f, q, p.e * LN2_LOW), x);
}
template <class V> LOOM_INLINE V log2(V x) {
  constexpr f32 log2e_high = 0x1.715476p0f, log2e_low = 0x1.4ae0cp-26f;
  parts<V> p = split(x);
  V f = p.m - 1, high = f * log2e_high;
  V low = fma(f, splat<V>(log2e_low), fma(f, splat<V>(log2e_high), -high));
  V q = polynomial(f, -7.2134733e-01f, 4.808982e-01f, -3.6069867e-01f, 2.8857142e-01f, -2.3956735e-01f,
                   2.0448658e-01f, -1.9139083e-01f, 1.8708819e-01f, -1.102559e-01f);
  return with_special_cases(sum_of(p.e, high, f * f, q, low), x);
}

template <class V> LOOM_INLINE V tanh(V x) {
  V a = abs(x), a2 = a * a;
  V p = polynomial(a2, -3.3333328e-01f, 1.3333175e-01f, -5.3950716e-02f, 2.1774355e-02f, -8.571075e-03f,
                   3.048127e-03f, -8.212084e-04f, 1.1621051e-04f);
  V small = fma(a * a2, p, a), large = 1 - 2 / (exp(2 * lesser(splat<V>(10), a)) + 1);
  return copysign(a < splat<V>(1) ? small : large, x);
}
template <class V> LOOM_INLINE V erf(V x) {
  V a = abs(x), a2 = a * a;
  V p = polynomial(a2, 1.2837917e-01f, -3.761263e-01f, 1.1283624e-01f, -2.685556e-02f, 5.191753e-03f,
                   -8.039753e-04f, 7.9431e-05f);
  V b = lesser(splat<V>(4), a);  // 1 - erf(4) is below half a unit in the last place
  V c = polynomial(b, -1.12852e+00f, -6.3569915e-01f, -1.0528716e-01f, 2.2906234e-02f, -3.2200406e-03f,
                   2.1460291e-04f);  // log(1 - erf(b)) / b
  V y = b * c, small = fma(a, p, a), large = 1 - exp(y, fma(b, c, -y));
  return copysign(a < splat<V>(0.9f) ? small : large, x);
}

// sin(x + quarters pi / 2) in f64, where a two-step reduction is enough for all |x| < 2^31.
template <int QUARTERS, class V> LOOM_INLINE V wave(V x) {
  typedef like<V, i64> L;
  constexpr f64 to_integer = 0x1.8p52;
  V shifted = fma(x, splat<V>(0x1.45f306dc9c883p-1), splat<V>(to_integer)), n = shifted - to_integer;
  V r = fma(n, splat<V>(-6.123233995736766e-17), fma(n, splat<V>(-1.5707963267948966), x)), r2 = r * r;
  V sine = r * polynomial(r2, 1., -0.16666666639558214, 0.008333329143942894, -0.00019839256640541482,
                          2.717564505203308e-06);
  V cosine = polynomial(r2, 1., -0.4999999966846921, 0.041666617447053786, -0.0013886590548243215,
                        2.4375071738412143e-05);
  L quadrant = bits<L>(shifted) + QUARTERS;
  V value = (quadrant & 1) != 0 ? cosine : sine;
  return bits<V>(bits<L>(value) ^ (quadrant & 2) << 62);
}
template <class M> LOOM_INLINE bool any_lane(M m) {
  if constexpr (sizeof(M) > 16) return any_lane(low_half(m) | high_half(m));
  else if constexpr (sizeof(M) == 16) return (bits<u64x2>(m)[0] | bits<u64x2>(m)[1]) != 0;
  else return bits<integer<sizeof(M), false>>(m) != 0;
}
template <int QUARTERS, class V> LOOM_INLINE V circular(V x) {
  V y = by_registers<f64>([](auto part) LOOM_LAMBDA {
    typedef decltype(part) P;
    return convert<P>(wave<QUARTERS>(convert<like<P, f64>>(part)));
  }, x);
  auto far = abs(x) >= splat<V>(0x1p31f);
  if (__builtin_expect(any_lane(far), 0))
    y = far ? by_lane([](f32 e) { return (f32)(QUARTERS ? __builtin_cos(e) : __builtin_sin(e)); }, x) : y;
  return y;
}

// 1 / sqrt(x) is 1.5 units in the last place off at worst; the residual 1 - x y^2 corrects it.
template <class V> LOOM_INLINE V rsqrt(V x) {
  V y = 1 / sqrt(x), h = x * y, h_low = fma(x, y, -h);
  V residual = fma(-h_low, y, fma(-h, y, splat<V>(1)));
  V better = fma(y * splat<V>(0.5f), residual, y);
  return better == better ? better : y;  // 0 and infinity have no residual
}

// ---- what libm has no name for, in f64 --------------------------------------------------------------

// t with erf(t) = x and erfc(t) = y for x in [0, 1] and y = 1 - x, where the smaller of x and y is exact.
inline f64 inverse_erf(f64 x, f64 y) {
  constexpr f64 big = 0x1p996, log_of_big = 690.3745997645933, half_root_pi = 0.8862269254527580, a = 0.147;
  if (!(y > 0)) return y == 0 ? __builtin_inf() : __builtin_nan("");
  f64 l = __builtin_log(y * (1 + x)), b = 2 / (3.141592653589793 * a) + l / 2;
  f64 t = __builtin_sqrt(__builtin_sqrt(b * b - l / a) - b);  // within 0.4 %
  for (int i = 0; i < 4; i++) {                               // Halley's method
    f64 residual = x < 0.5 ? __builtin_erf(t) - x : y - __builtin_erfc(t);
    f64 u = residual * big * half_root_pi * __builtin_exp(t * t - log_of_big);
    t -= u / (1 + t * u);
  }
  return t;
}
inline f64 erfinv(f64 x) {
  f64 a = __builtin_fabs(x);
  return __builtin_copysign(inverse_erf(a, 1 - a), x);
}
inline f64 erfcinv(f64 y) { return y <= 1 ? inverse_erf(1 - y, y) : -inverse_erf(y - 1, 2 - y); }
inline f64 normcdf(f64 x) {
  constexpr f64 c = 0.7071067811865476, c_low = -4.833646656726457e-17;
  f64 z = -x * c, z_low = __builtin_fma(-x, c, -z) - x * c_low;
  f64 slope = 1.1283791670955126 * __builtin_exp(-z * z);
  return 0.5 * (slope > 0 ? __builtin_erfc(z) - slope * z_low : __builtin_erfc(z));
}
inline f64 erfcx(f64 x) {
  if (x < 25) {
    f64 h = x * x, h_low = __builtin_fma(x, x, -h), e = __builtin_exp(h);
    return e < __builtin_inf() ? e * __builtin_erfc(x) * (1 + h_low) : e;
  }
  f64 q = 1 / (2 * x * x), sum = 0;
  for (int k = 15; k > 0; k -= 2) sum = -q * k * (1 + sum);
  return 0.5641895835477563 / x * (1 + sum);
}
inline f64 bessel_i(int order, f64 x) {
  if (__builtin_isinf(x)) return order ? x : __builtin_inf();
  f64 term = order ? x / 2 : 1, sum = term, q = x * x / 4;
  for (int k = 1; __builtin_fabs(term) > __builtin_fabs(sum) * 0x1p-54; k++)
    sum += term *= q / ((f64)k * (k + order));
  return sum;
}
inline f64 sine_of_turns(f64 x, int quarters) {  // sin(pi x + quarters pi / 2)
  f64 whole = __builtin_fmod(x, 2), n = __builtin_rint(2 * whole), r = (whole - n / 2) * 3.141592653589793;
  int quadrant = ((int)n + quarters) & 3;
  if (!(x - x == 0)) return x - x;
  if (r == 0 && !(quadrant & 1)) return __builtin_copysign(0, x);
  f64 value = quadrant & 1 ? __builtin_cos(r) : __builtin_sin(r);
  return quadrant & 2 ? -value : value;
}
inline f64 lgamma(f64 x) {
  int sign;
  return lgamma_r(x, &sign);
}
inline i32 permute_bytes(u32 x, u32 y, u32 selectors) {
  u64 bytes = (u64)y << 32 | x;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 selector = selectors >> 4 * i, byte = (u8)(bytes >> 8 * (selector & 7));
    result |= byte << 8 * i;
  }
  return (i32)result;
}

}  // namespace loom_lanes
