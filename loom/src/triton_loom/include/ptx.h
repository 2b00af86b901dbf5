// Instructions of NVIDIA's PTX, one lane at a time, for `tl.inline_asm_elementwise`.
//
// A register is an unsigned integer of its width, or a bool. `as<T>` reads it as the type of an instruction and
// `raw<R>` writes it. NaN results have PTX's canonical bits: 0x7FFFFFFF in f32, 0x7FFF in f16 and bf16. The table in
// ptx.py maps instructions to functions.
#pragma once
#include "math.h"

namespace ptx {

// ---- registers ----------------------------------------------------------------------------------------

template <int BYTES> using word = integer<BYTES, false>;

template <class T, class R> LOOM_INLINE T as(R r) {
  static_assert(sizeof(T) <= sizeof(R), "an instruction reads the low bits of a register");
  if constexpr (sizeof(T) == sizeof(R)) return bits<T>(r);
  else return bits<T>((word<sizeof(T)>)r);
}
// A register wider than the result is sign-extended if the type is signed.
template <class R, class T> LOOM_INLINE R raw(T x) {
  if constexpr (sizeof(R) == sizeof(T)) return bits<R>(x);
  else if constexpr ((T)0.5 == 0) return (R)x;
  else return (R)bits<word<sizeof(T)>>(x);
}
// Neighboring elements of a tile in one register, the first in the low bits.
template <class R, int BYTES> LOOM_INLINE R take(const void *elements) {
  R r = 0;
  __builtin_memcpy(&r, elements, BYTES);
  return r;
}
template <int BYTES, class R> LOOM_INLINE void give(void *elements, R r) {
  __builtin_memcpy(elements, &r, BYTES);
}

// Applies a function of lanes of type T to the two lanes of each register.
template <class T, class F, class R, class... Rs> LOOM_INLINE R pairs(F f, R first, Rs... more) {
  typedef word<sizeof(T)> W;
  constexpr int width = sizeof(T) * 8;
  W low = bits<W>(f(bits<T>((W)first), bits<T>((W)more)...));
  W high = bits<W>(f(bits<T>((W)(first >> width)), bits<T>((W)(more >> width))...));
  return (R)high << width | low;
}

// ---- floats -------------------------------------------------------------------------------------------

LOOM_INLINE bool is_nan(f32 x) { return x != x; }
LOOM_INLINE bool is_nan(f64 x) { return x != x; }
LOOM_INLINE f32 canonical(f32 x) { return is_nan(x) ? bits<f32>(0x7FFFFFFFu) : x; }
LOOM_INLINE f64 canonical(f64 x) { return x; }

template <bool FTZ> LOOM_INLINE f32 flush(f32 x) {
  if constexpr (!FTZ) return x;
  u32 u = bits<u32>(x);
  return (u & 0x7F800000) ? x : bits<f32>(u & 0x80000000u);
}
LOOM_INLINE f32 to_unit_interval(f32 x) { return x > 0 ? (x < 1 ? x : 1.f) : 0.f; }  // NaN and -0 are +0
template <bool FTZ, bool SAT> LOOM_INLINE f32 result(f32 x) {
  x = flush<FTZ>(canonical(x));
  return SAT ? to_unit_interval(x) : x;
}

// min and max: a number wins over NaN unless NAN_WINS; -0 is less than +0. XORSIGN compares magnitudes, and the result
// has the product of the signs.
template <bool MAX, bool NAN_WINS, bool XORSIGN, class T> LOOM_INLINE T extreme(T a, T b) {
  typedef word<sizeof(T)> W;
  constexpr W sign_bit = (W)1 << (sizeof(T) * 8 - 1);
  W sign = (bits<W>(a) ^ bits<W>(b)) & sign_bit;
  if constexpr (XORSIGN) a = bits<T>((W)(bits<W>(a) & ~sign_bit)), b = bits<T>((W)(bits<W>(b) & ~sign_bit));
  T equal = bits<T>(MAX ? (W)(bits<W>(a) & bits<W>(b)) : (W)(bits<W>(a) | bits<W>(b)));
  T chosen = a == b ? equal : ((a > b) == MAX ? a : b);
  if (is_nan(a)) chosen = NAN_WINS ? a : b;
  else if (is_nan(b)) chosen = NAN_WINS ? b : a;
  if (is_nan(chosen)) return canonical(chosen);
  return XORSIGN ? bits<T>((W)(bits<W>(chosen) | sign)) : chosen;
}

// As in the manual: beyond 2^126 the reciprocal of the divisor is flushed to zero.
LOOM_INLINE f32 div_approx(f32 a, f32 b) {
  f32 size = loom_math::abs(b);
  bool flushed = (size > 0x1p126f) & (size < __builtin_inff());
  return flushed ? a * loom_math::copysign(0.f, b) : a / b;
}
LOOM_INLINE f32 rsqrt_approx(f32 x) { return (f32)(1 / __builtin_sqrt((f64)x)); }
LOOM_INLINE f32 copysign(f32 sign, f32 x) { return loom_math::copysign(x, sign); }
LOOM_INLINE f64 copysign(f64 sign, f64 x) { return loom_math::copysign(x, sign); }

// ---- f16, bf16 and what is smaller ----------------------------------------------------------------------

// LARGEST is the code of the largest finite value, INFINITE that of infinity (0 if there is none). Too large a value
// becomes infinite if the format has infinity; NaN has no sign.
template <int BITS, int MANTISSA, int BIAS, u32 LARGEST, u32 INFINITE, u32 NOT_A_NUMBER> struct format {
  static constexpr int width = BITS, mantissa = MANTISSA, bias = BIAS;
  static constexpr u32 sign = 1u << (BITS - 1), largest = LARGEST, infinite = INFINITE, nan = NOT_A_NUMBER;
};
typedef format<16, 10, 15, 0x7BFF, 0x7C00, 0x7FFF> f16;
typedef format<16, 7, 127, 0x7F7F, 0x7F80, 0x7FFF> bf16;
typedef format<8, 3, 7, 0x7E, 0, 0x7F> e4m3;
typedef format<8, 2, 15, 0x7B, 0x7C, 0x7F> e5m2;
typedef format<6, 3, 1, 0x1F, 0, 0x1F> e2m3;  // without a NaN: it becomes the largest number
typedef format<6, 2, 3, 0x1F, 0, 0x1F> e3m2;
typedef format<4, 1, 1, 0x7, 0, 0x7> e2m1;

enum rounding { NEAREST, TOWARD_ZERO, STOCHASTIC };

// The integer significand loses `dropped` bits; their value, or with STOCHASTIC the carry out of adding `random` (16
// bits) to the highest of them, decides whether the code is incremented.
template <class F, rounding MODE, bool SATURATES, bool RELU> LOOM_INLINE u32 encode(f32 x, u32 random = 0) {
  constexpr u32 infinity = 0x7F800000;
  constexpr i32 smallest_normal = 128 - F::bias;  // its exponent, as f32 counts them
  typedef integer<MODE == STOCHASTIC ? 8 : 4, false> U;
  constexpr i32 all = MODE == STOCHASTIC ? 40 : 25;  // as many bits as leave nothing, whatever is added
  u32 u = bits<u32>(x), a = u & 0x7FFFFFFF;
  i32 exponent = (i32)(a >> 23) > 0 ? (i32)(a >> 23) : 1;
  U significand = (a & 0x7FFFFF) | (a > 0x7FFFFF ? 0x800000 : 0);
  i32 scale = exponent > smallest_normal ? exponent : smallest_normal;
  i32 dropped = 23 - F::mantissa + scale - exponent;
  dropped = dropped < all ? dropped : all;
  U kept = significand >> dropped, rest = significand & (((U)1 << dropped) - 1), half = (U)1 << (dropped - 1);
  U up = 0;
  if constexpr (MODE == NEAREST) up = (U)(rest > half) | ((U)(rest == half) & kept & 1);
  if constexpr (MODE == STOCHASTIC) up = (rest + ((U)random << dropped >> 16)) >> dropped;
  u32 code = ((u32)(scale - smallest_normal) << F::mantissa) + (u32)(kept + up);
  constexpr bool finite = SATURATES || F::infinite == 0;
  u32 limit = finite || (MODE == TOWARD_ZERO && a < infinity) ? F::largest : F::infinite;
  code = code < limit ? code : limit;
  code |= u >> 31 ? F::sign : 0;
  if constexpr (RELU) code = u >> 31 ? 0 : code;
  return a > infinity ? F::nan : code;
}

constexpr f32 power_of_two(int exponent) {
  f32 x = 1;
  for (; exponent < 0; ++exponent) x *= 0.5f;
  return x;
}
template <class F> LOOM_INLINE f32 decode(u32 code) {
  constexpr f32 smallest = power_of_two(1 - F::bias - F::mantissa);
  constexpr u32 last = F::infinite != 0 ? F::infinite : F::largest;
  u32 magnitude = code & (F::sign - 1);
  u32 u = (magnitude << (23 - F::mantissa)) + ((u32)(127 - F::bias) << 23);
  u = magnitude < 1u << F::mantissa ? bits<u32>((f32)magnitude * smallest) : u;
  u = F::infinite != 0 && magnitude == F::infinite ? 0x7F800000 : u;
  u = magnitude > last ? 0x7FFFFFFF : u;
  return bits<f32>(u | (code & F::sign) << (32 - F::width));
}

template <class F, bool FTZ> LOOM_INLINE u16 flush16(u16 code) {
  return FTZ && (code & (F::sign - 1)) < 1u << F::mantissa ? code & F::sign : code;
}
template <class F, bool FTZ> LOOM_INLINE f32 open(u16 code) { return decode<F>(flush16<F, FTZ>(code)); }
template <class F, bool FTZ, bool SAT, bool RELU> LOOM_INLINE u16 close(f32 x) {
  if constexpr (SAT) x = to_unit_interval(x);
  return flush16<F, FTZ>((u16)encode<F, NEAREST, false, RELU>(x));
}
LOOM_INLINE f32 fused16(f32 a, f32 b, f32 c) {  // still to be rounded, once
  return f32_odd_from_f64(loom_math::fma_to_odd((f64)a, (f64)b, (f64)c));
}

template <class F> LOOM_INLINE u32 two(u32 high, u32 low) { return high << (F::width == 6 ? 8 : F::width) | low; }
template <class F> LOOM_INLINE u32 four(u32 a, u32 b, u32 e, u32 f) {
  constexpr int width = F::width == 6 ? 8 : F::width;
  return a << 3 * width | b << 2 * width | e << width | f;
}
// The lanes of a pair, as f32.
template <class F> LOOM_INLINE f32 high_of(u32 two) { return decode<F>(two >> (F::width == 6 ? 8 : F::width)); }
template <class F> LOOM_INLINE f32 low_of(u32 two) { return decode<F>(two & (2 * F::sign - 1)); }

// The random bits of four values: the first two and the last two share sixteen bits each; one of a pair reads the
// highest first, the other the lowest. The manual says which bits a pair shares; the order within them is taken from
// others' results on sm_100 and not verified here.
LOOM_INLINE u32 reversed16(u32 x) { return loom_math::brev((u32)x) >> 16; }
LOOM_INLINE u32 of_two_bytes(u32 random, int first) { return (random >> (16 + first) & 0xFF) << 8 | (random >> first & 0xFF); }
template <class F, bool RELU> LOOM_INLINE u32 encode_four(f32 a, f32 b, f32 e, f32 f, u32 random) {
  u32 upper = F::width == 4 ? of_two_bytes(random, 8) : random >> 16;
  u32 lower = F::width == 4 ? of_two_bytes(random, 0) : random & 0xFFFF;
  return four<F>(encode<F, STOCHASTIC, true, RELU>(a, reversed16(upper)), encode<F, STOCHASTIC, true, RELU>(b, upper),
                 encode<F, STOCHASTIC, true, RELU>(e, reversed16(lower)), encode<F, STOCHASTIC, true, RELU>(f, lower));
}
template <class F, bool SATURATES, bool RELU> LOOM_INLINE u32 encode_two(f32 a, f32 b, u32 random) {
  constexpr int unused = F::mantissa - 7;  // f16 drops 13 bits: the low 13 of its half
  u32 high = random >> 16 << unused & 0xFFFF, low = random << unused & 0xFFFF;
  return two<F>(encode<F, STOCHASTIC, SATURATES, RELU>(a, high), encode<F, STOCHASTIC, SATURATES, RELU>(b, low));
}

// A power of two by its exponent; the sign does not count.
template <bool UP, bool SATURATES> LOOM_INLINE u32 ue8m0(f32 x) {
  u32 a = bits<u32>(x) & 0x7FFFFFFF, code = a >> 23;
  if (UP && (a & 0x7FFFFF) != 0 && a > 0x400000 && a < 0x7F800000) ++code;
  return SATURATES && code == 255 && a <= 0x7F800000 ? 254 : code;
}
LOOM_INLINE u32 bf16_from_ue8m0(u32 code) { return code == 255 ? 0x7FFF : code == 0 ? 0x40 : code << 7; }

// Ten bits of mantissa; NEAREST has ties to even, TIES_AWAY away from zero.
template <int MODE> LOOM_INLINE u32 tf32(f32 x) {
  u32 u = bits<u32>(x);
  if (is_nan(x)) return 0x7FFFFFFF;
  u32 more = MODE == 0 ? 0xFFF + (u >> 13 & 1) : MODE == 1 ? 0x1000 : 0;
  return (u + ((u & 0x7F800000) == 0x7F800000 ? 0 : more)) & ~0x1FFFu;
}

// ---- between floats and integers -----------------------------------------------------------------------

// An integral value as an integer, clamped. NaN gives 0, or only the highest bit set if 64 bits are involved.
template <class I, bool WIDE> LOOM_INLINE I whole(f64 x) {
  constexpr int width = sizeof(I) * 8;
  constexpr f64 end = (f64)((u64)1 << (width - 1 - is_signed<I>)) * 2, begin = is_signed<I> ? -end : 0;
  if (x != x) return WIDE || sizeof(I) == 8 ? (I)((u64)1 << (width - 1)) : (I)0;
  return x >= end ? highest_of<I> : x < begin ? lowest_of<I> : (I)x;
}
template <class I, class From> LOOM_INLINE I clamp_to(From x) {
  __int128 wide = x, low = lowest_of<I>, high = highest_of<I>;
  return (I)(wide < low ? low : wide > high ? high : wide);
}
template <class I> LOOM_INLINE f32 odd_from(I x) {
  if constexpr (sizeof(I) == 8) return f32_odd_from_f64(f64_odd_from_i64(x));
  else return f32_odd_from_f64((f64)x);
}

// ---- integers --------------------------------------------------------------------------------------------

template <class T> LOOM_INLINE T left(T a, u32 n) { return n < sizeof(T) * 8 ? (T)(a << n) : (T)0; }
template <class T> LOOM_INLINE T right(T a, u32 n) {  // sign-extending for signed T
  constexpr u32 last = sizeof(T) * 8 - 1;
  return is_signed<T> ? (T)(a >> (n < last ? n : last)) : n <= last ? (T)(a >> n) : (T)0;
}
template <bool LEFT, bool WRAP> LOOM_INLINE u32 funnel(u32 low, u32 high, u32 n) {
  u64 both = (u64)high << 32 | low;
  n = WRAP ? n & 31 : n < 32 ? n : 32;
  return LEFT ? (u32)(both << n >> 32) : (u32)(both >> n);
}
template <class T> LOOM_INLINE T high_product(T a, T b) {
  if constexpr (is_signed<T>) return (T)((__int128)a * b >> sizeof(T) * 8);
  else return (T)((unsigned __int128)a * b >> sizeof(T) * 8);
}
// The lowest n bits set; all of them if n is the width or more.
template <class U> LOOM_INLINE U low_bits(u32 n) { return n < sizeof(U) * 8 ? (U)(((U)1 << n) - 1) : (U)~(U)0; }
template <class T> LOOM_INLINE T extract(T a, u32 position, u32 length) {
  typedef word<sizeof(T)> U;
  constexpr u32 last = sizeof(T) * 8 - 1;
  position &= 0xFF, length &= 0xFF;
  U field = right<U>((U)a, position) & low_bits<U>(length);
  u32 top = position + length - 1 < last ? position + length - 1 : last;
  bool sign = is_signed<T> && length != 0 && ((U)a >> top & 1);
  u32 taken = position > last ? 0 : length < last + 1 - position ? length : last + 1 - position;
  return (T)(sign ? field | (U)~low_bits<U>(taken) : field);
}
template <class U> LOOM_INLINE U insert(U field, U into, u32 position, u32 length) {
  position &= 0xFF, length &= 0xFF;
  U place = left<U>(low_bits<U>(length), position);
  return (into & ~place) | (left<U>(field, position) & place);
}
// One input after another: the upper half of the table applies where a is set, the lower half elsewhere.
template <u32 TABLE> LOOM_INLINE u32 lop3(u32 a, u32 b, u32 c) {
  auto by_c = [&](u32 rows) LOOM_ALWAYS { return (rows & 2 ? c : 0) | (rows & 1 ? ~c : 0); };
  auto by_b = [&](u32 rows) LOOM_ALWAYS { return (b & by_c(rows >> 2)) | (~b & by_c(rows)); };
  return (a & by_b(TABLE >> 4)) | (~a & by_b(TABLE));
}

enum permutation { BY_NIBBLES, F4E, B4E, RC8, ECL, ECR, RC16 };
template <permutation MODE> LOOM_INLINE u32 prmt(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 d = 0, n = selector & 3;
  for (u32 k = 0; k < 4; ++k) {
    u32 choice = selector >> 4 * k & 15;
    if (MODE == F4E) choice = n + k;
    if (MODE == B4E) choice = (n - k) & 7;
    if (MODE == RC8) choice = n;
    if (MODE == ECL) choice = n > k ? n : k;
    if (MODE == ECR) choice = n < k ? n : k;
    if (MODE == RC16) choice = (n & 1) * 2 + (k & 1);
    u32 byte = (u32)(bytes >> 8 * (choice & 7)) & 0xFF;
    if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;
    d |= byte << 8 * k;
  }
  return d;
}

template <class A, class B> LOOM_INLINE u32 dp4a(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 4; ++k) c += (u32)((i32)(A)(a >> 8 * k) * (i32)(B)(b >> 8 * k));
  return c;
}
template <class A, class B, bool HIGH> LOOM_INLINE u32 dp2a(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 2; ++k) c += (u32)((i32)(A)(a >> 16 * k) * (i32)(B)(b >> (8 * k + 16 * HIGH)));
  return c;
}

}  // namespace ptx
