// Arithmetic beyond the operators of C++: the integer operations whose corner cases C++ leaves open, and in
// namespace loom_math the functions of libm and of CUDA's libdevice by their names there.
//
// Everything takes scalars and vectors alike; a vector gives the same bits as its lanes one by one.
// exp, exp2, log, log2, sin, cos, tanh and erf of f32 are vector code with an error below one unit in the
// last place over the whole range, subnormals included; rarer functions call libm lane by lane, in f64.
#pragma once
#include "lanes.h"

// ---- vectors of any width ---------------------------------------------------------------------------

#define LOOM_ANY_WIDTH(NAME, FUNCTION)                                                                     \
  template <class V, class... Vs> LOOM_INLINE V NAME(V v, Vs... more) {                                    \
    return by_registers<typename lane<V>::type>(                                                           \
        [](auto... x) LOOM_LAMBDA { return loom_lanes::FUNCTION(x...); }, v, more...);                     \
  }
LOOM_ANY_WIDTH(shl, shl)
LOOM_ANY_WIDTH(shr, shr)
LOOM_ANY_WIDTH(sar, sar)
LOOM_ANY_WIDTH(mulhi_u32, mulhi_u)
LOOM_ANY_WIDTH(mulhi_u64, mulhi_u)
LOOM_ANY_WIDTH(mulhi_i32, mulhi_s)
LOOM_ANY_WIDTH(mulhi_i64, mulhi_s)

template <class I> LOOM_INLINE I quotient(I a, I b) {
  typedef float_of<(sizeof(typename lane<I>::type) < 4 ? 4 : 8)> F;
  return by_registers<F>([](auto x, auto y) LOOM_LAMBDA { return loom_lanes::divide(x, y); }, a, b);
}
template <class V> LOOM_INLINE V divs(V a, V b) { return (V)quotient((signed_of<V>)a, (signed_of<V>)b); }
template <class V> LOOM_INLINE V divu(V a, V b) { return (V)quotient((unsigned_of<V>)a, (unsigned_of<V>)b); }
template <class V> LOOM_INLINE V rems(V a, V b) { return (V)(a - divs(a, b) * b); }
template <class V> LOOM_INLINE V remu(V a, V b) { return (V)(a - divu(a, b) * b); }

namespace loom_math {

LOOM_ANY_WIDTH(fma, fma)
LOOM_ANY_WIDTH(fma_to_odd, fma_to_odd)
LOOM_ANY_WIDTH(sqrt, sqrt)
LOOM_ANY_WIDTH(rsqrt, rsqrt)
LOOM_ANY_WIDTH(rint, rint)
LOOM_ANY_WIDTH(nearbyint, rint)
LOOM_ANY_WIDTH(floor, floor)
LOOM_ANY_WIDTH(ceil, ceil)
LOOM_ANY_WIDTH(trunc, trunc)
LOOM_ANY_WIDTH(round, round)
LOOM_ANY_WIDTH(abs, abs)
LOOM_ANY_WIDTH(copysign, copysign)
LOOM_ANY_WIDTH(maxnum, maxnum)
LOOM_ANY_WIDTH(minnum, minnum)
LOOM_ANY_WIDTH(maximum, maximum)
LOOM_ANY_WIDTH(minimum, minimum)
LOOM_ANY_WIDTH(saturatef, saturate_to_1)
LOOM_ANY_WIDTH(mulhi, mulhi_s)
LOOM_ANY_WIDTH(umulhi, mulhi_u)
LOOM_ANY_WIDTH(sad, sad)
LOOM_ANY_WIDTH(brev, brev)
#undef LOOM_ANY_WIDTH

// f32 by the polynomials above, f64 by libm.
#define LOOM_FAST(NAME, FUNCTION)                                                                          \
  template <class V> LOOM_INLINE V NAME(V v) {                                                             \
    if constexpr (loom_lanes::is_f32<V>)                                                                   \
      return by_registers<f32>([](auto x) LOOM_LAMBDA { return loom_lanes::FUNCTION(x); }, v);             \
    else return by_lane([](f64 x) { return __builtin_##NAME(x); }, v);                                     \
  }
LOOM_FAST(exp, exp)
LOOM_FAST(exp2, exp2)
LOOM_FAST(log, log)
LOOM_FAST(log2, log2)
LOOM_FAST(tanh, tanh)
LOOM_FAST(erf, erf)
LOOM_FAST(sin, circular<0>)
LOOM_FAST(cos, circular<1>)
#undef LOOM_FAST

// ---- lane by lane, in f64 ---------------------------------------------------------------------------

#define LOOM_OF_1(NAME, ...)                                                                               \
  template <class V> LOOM_INLINE V NAME(V v) {                                                             \
    return by_lane([](f64 x) { return (typename lane<V>::type)(__VA_ARGS__); }, v);                        \
  }
#define LOOM_OF_2(NAME, ...)                                                                               \
  template <class V> LOOM_INLINE V NAME(V v, V w) {                                                        \
    return by_lane([](f64 x, f64 y) { return (typename lane<V>::type)(__VA_ARGS__); }, v, w);              \
  }
LOOM_OF_1(tan, __builtin_tan(x))
LOOM_OF_1(asin, __builtin_asin(x))
LOOM_OF_1(acos, __builtin_acos(x))
LOOM_OF_1(atan, __builtin_atan(x))
LOOM_OF_1(sinh, __builtin_sinh(x))
LOOM_OF_1(cosh, __builtin_cosh(x))
LOOM_OF_1(asinh, __builtin_asinh(x))
LOOM_OF_1(acosh, __builtin_acosh(x))
LOOM_OF_1(atanh, __builtin_atanh(x))
LOOM_OF_1(sinpi, loom_lanes::sine_of_turns(x, 0))
LOOM_OF_1(cospi, loom_lanes::sine_of_turns(x, 1))
LOOM_OF_1(log10, __builtin_log10(x))
LOOM_OF_1(log1p, __builtin_log1p(x))
LOOM_OF_1(expm1, __builtin_expm1(x))
LOOM_OF_1(exp10, __builtin_pow(10, x))
LOOM_OF_1(cbrt, __builtin_cbrt(x))
LOOM_OF_1(rcbrt, 1 / __builtin_cbrt(x))
LOOM_OF_1(erfc, __builtin_erfc(x))
LOOM_OF_1(erfcx, loom_lanes::erfcx(x))
LOOM_OF_1(erfinv, loom_lanes::erfinv(x))
LOOM_OF_1(erfcinv, loom_lanes::erfcinv(x))
LOOM_OF_1(normcdf, loom_lanes::normcdf(x))
LOOM_OF_1(normcdfinv, -1.4142135623730951 * loom_lanes::erfcinv(2 * x))
LOOM_OF_1(tgamma, __builtin_tgamma(x))
LOOM_OF_1(lgamma, loom_lanes::lgamma(x))
LOOM_OF_1(j0, ::j0(x))
LOOM_OF_1(j1, ::j1(x))
LOOM_OF_1(y0, ::y0(x))
LOOM_OF_1(y1, ::y1(x))
LOOM_OF_1(cyl_bessel_i0, loom_lanes::bessel_i(0, x))
LOOM_OF_1(cyl_bessel_i1, loom_lanes::bessel_i(1, x))
LOOM_OF_1(logb, __builtin_logb(x))
LOOM_OF_2(pow, __builtin_pow(x, y))
LOOM_OF_2(atan2, __builtin_atan2(x, y))
LOOM_OF_2(hypot, __builtin_hypot(x, y))
LOOM_OF_2(rhypot, 1 / __builtin_hypot(x, y))
LOOM_OF_2(fmod, __builtin_fmod(x, y))
LOOM_OF_2(remainder, __builtin_remainder(x, y))
LOOM_OF_2(fdim, __builtin_fdim(x, y))
#undef LOOM_OF_1
#undef LOOM_OF_2

template <class V> LOOM_INLINE V nextafter(V v, V w) {
  return by_lane([](auto x, auto y) {
    if constexpr (loom_lanes::is_f32<V>) return __builtin_nextafterf(x, y);
    else return __builtin_nextafter(x, y);
  }, v, w);
}
template <class V, class N> LOOM_INLINE V ldexp(V v, N n) {
  return by_lane([](f64 x, i32 e) { return (typename lane<V>::type)__builtin_ldexp(x, e); }, v, n);
}
template <class V, class N> LOOM_INLINE V powi(V v, N n) {
  return by_lane([](f64 x, i32 e) { return (typename lane<V>::type)__builtin_pow(x, e); }, v, n);
}
template <class N, class V> LOOM_INLINE V jn(N n, V v) {
  return by_lane([](i32 order, f64 x) { return (typename lane<V>::type)::jn(order, x); }, n, v);
}
template <class N, class V> LOOM_INLINE V yn(N n, V v) {
  return by_lane([](i32 order, f64 x) { return (typename lane<V>::type)::yn(order, x); }, n, v);
}
template <class V> LOOM_INLINE V norm3d(V a, V b, V c) {
  return by_lane([](f64 x, f64 y, f64 z) {
    return (typename lane<V>::type)__builtin_hypot(__builtin_hypot(x, y), z);
  }, a, b, c);
}
template <class V> LOOM_INLINE V norm4d(V a, V b, V c, V d) { return hypot(hypot(a, b), hypot(c, d)); }
template <class V> LOOM_INLINE V rnorm3d(V a, V b, V c) { return 1 / norm3d(a, b, c); }
template <class V> LOOM_INLINE V rnorm4d(V a, V b, V c, V d) { return 1 / norm4d(a, b, c, d); }

// ---- libdevice's names for arithmetic ---------------------------------------------------------------

template <class V> LOOM_INLINE V add_rn(V x, V y) { return x + y; }
template <class V> LOOM_INLINE V sub_rn(V x, V y) { return x - y; }
template <class V> LOOM_INLINE V mul_rn(V x, V y) { return x * y; }
template <class V> LOOM_INLINE V div_rn(V x, V y) { return x / y; }
template <class V> LOOM_INLINE V rcp_rn(V x) { return 1 / x; }

#define LOOM_TEST(NAME, ...)                                                                               \
  template <class V> LOOM_INLINE like<V, i32> NAME(V v) {                                                  \
    return by_registers<typename lane<V>::type>([](auto x) LOOM_LAMBDA {                                   \
      typedef signed_of<decltype(x)> I;                                                                    \
      return convert<like<I, i32>>((__VA_ARGS__) ? splat<I>(1) : splat<I>(0));                             \
    }, v);                                                                                                 \
  }
LOOM_TEST(isnan, x != x)
LOOM_TEST(isinf, loom_lanes::abs(x) == (typename lane<V>::type)__builtin_inf())
LOOM_TEST(isfinite, x - x == 0)
LOOM_TEST(signbit, bits<I>(x) < 0)
#undef LOOM_TEST

// Floats to integers in the four rounding modes, saturated.
#define LOOM_TO_INTEGER(NAME, RESULT, CONVERSION)                                                          \
  template <class V> LOOM_INLINE auto NAME##_rn(V x) { return (like<V, RESULT>)CONVERSION(rint(x)); }      \
  template <class V> LOOM_INLINE auto NAME##_rz(V x) { return (like<V, RESULT>)CONVERSION(x); }            \
  template <class V> LOOM_INLINE auto NAME##_rd(V x) { return (like<V, RESULT>)CONVERSION(floor(x)); }     \
  template <class V> LOOM_INLINE auto NAME##_ru(V x) { return (like<V, RESULT>)CONVERSION(ceil(x)); }
LOOM_TO_INTEGER(float2int, i32, i32_from_f32)
LOOM_TO_INTEGER(float2uint, i32, u32_from_f32)
LOOM_TO_INTEGER(float2ll, i64, i64_from_f32)
LOOM_TO_INTEGER(float2ull, i64, u64_from_f32)
LOOM_TO_INTEGER(double2int, i32, i32_from_f64)
LOOM_TO_INTEGER(double2uint, i32, u32_from_f64)
LOOM_TO_INTEGER(double2ll, i64, i64_from_f64)
LOOM_TO_INTEGER(double2ull, i64, u64_from_f64)
#undef LOOM_TO_INTEGER
template <class V> LOOM_INLINE auto llrint(V x) { return i64_from_f64(convert<like<V, f64>>(rint(x))); }
template <class V> LOOM_INLINE auto llround(V x) { return i64_from_f64(convert<like<V, f64>>(round(x))); }

#define LOOM_OF_INTEGER(NAME, SIGNEDNESS, RESULT)                                                          \
  template <class I> LOOM_INLINE auto NAME(I x) { return convert<like<I, RESULT>>((SIGNEDNESS<I>)x); }
LOOM_OF_INTEGER(int2float_rn, signed_of, f32)
LOOM_OF_INTEGER(uint2float_rn, unsigned_of, f32)
LOOM_OF_INTEGER(ll2float_rn, signed_of, f32)
LOOM_OF_INTEGER(ull2float_rn, unsigned_of, f32)
LOOM_OF_INTEGER(int2double_rn, signed_of, f64)
LOOM_OF_INTEGER(uint2double_rn, unsigned_of, f64)
LOOM_OF_INTEGER(ll2double_rn, signed_of, f64)
LOOM_OF_INTEGER(ull2double_rn, unsigned_of, f64)
#undef LOOM_OF_INTEGER
template <class V> LOOM_INLINE like<V, f32> double2float_rn(V x) { return convert<like<V, f32>>(x); }

template <class V> LOOM_INLINE like<V, i32> float_as_int(V x) { return bits<like<V, i32>>(x); }
template <class I> LOOM_INLINE like<I, f32> int_as_float(I x) { return bits<like<I, f32>>(x); }
template <class V> LOOM_INLINE like<V, i64> double_as_longlong(V x) { return bits<like<V, i64>>(x); }
template <class I> LOOM_INLINE like<I, f64> longlong_as_double(I x) { return bits<like<I, f64>>(x); }
template <class V> LOOM_INLINE like<V, i32> double2loint(V x) {
  return convert<like<V, i32>>(double_as_longlong(x));
}
template <class V> LOOM_INLINE like<V, i32> double2hiint(V x) {
  return convert<like<V, i32>>(double_as_longlong(x) >> 32);
}
template <class I> LOOM_INLINE like<I, f64> hiloint2double(I high, I low) {
  typedef like<I, u64> L;
  return bits<like<I, f64>>(convert<L>((unsigned_of<I>)high) << 32 | convert<L>((unsigned_of<I>)low));
}

template <class V> LOOM_INLINE like<V, i32> ilogb(V v) {
  return by_lane([](f64 x) { return __builtin_ilogb(x); }, v);
}
template <class I> LOOM_INLINE like<I, i32> popc(I v) {
  return by_lane([](auto x) LOOM_LAMBDA { return __builtin_popcountll((unsigned_of<decltype(x)>)x); }, v);
}
template <class I> LOOM_INLINE like<I, i32> clz(I v) {
  constexpr int unused = 64 - loom_lanes::width_of<I>;
  return by_lane([](auto x) LOOM_LAMBDA {
    return x == 0 ? 64 - unused : __builtin_clzll((unsigned_of<decltype(x)>)x) - unused;
  }, v);
}
template <class I> LOOM_INLINE like<I, i32> ffs(I v) {
  return by_lane([](i64 x) LOOM_LAMBDA { return __builtin_ffsll(x); }, v);
}
template <class I> LOOM_INLINE I mul24(I a, I b) { return (a << 8 >> 8) * (b << 8 >> 8); }
template <class I> LOOM_INLINE I umul24(I a, I b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
template <class I> LOOM_INLINE I hadd(I a, I b) { return (a & b) + ((a ^ b) >> 1); }
template <class I> LOOM_INLINE I rhadd(I a, I b) { return (a | b) - ((a ^ b) >> 1); }
template <class I> LOOM_INLINE I uhadd(I a, I b) { return (I)hadd((unsigned_of<I>)a, (unsigned_of<I>)b); }
template <class I> LOOM_INLINE I urhadd(I a, I b) { return (I)rhadd((unsigned_of<I>)a, (unsigned_of<I>)b); }
template <class I> LOOM_INLINE I usad(I a, I b, I c) {
  typedef unsigned_of<I> U;
  return (I)sad((U)a, (U)b, (U)c);
}
template <class I> LOOM_INLINE I byte_perm(I a, I b, I selectors) {
  return by_lane([](u32 x, u32 y, u32 s) { return loom_lanes::permute_bytes(x, y, s); }, a, b, selectors);
}

}  // namespace loom_math
