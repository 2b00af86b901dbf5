// The vocabulary of generated kernels: element types, their vectors, and loads and stores.
//
// A tile is processed in chunks of W lanes along its last dimension; W is 1, 2, 4, ... 64. A chunk is a
// plain GCC/Clang vector, so `a + b`, `a < b` and `m ? a : b` are the language's own operators, and the
// functions here and in casts.h / math.h work alike on a scalar and on a vector of any width.
//
//   f32x16 x = load<f32x16>(p);     mask m = x < y   (an i32x16 of 0 / -1; for scalars a bool)
//
// Float types that C++ lacks are carried as raw bits: bf16 and f16 as u16, the four FP8 types as u8.
// Compiled with -fwrapv, -fno-strict-aliasing, -ffp-contract=off: integers wrap, floats round once per step.
#pragma once

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

#define LOOM_INLINE static inline __attribute__((always_inline))
#define LOOM_ALWAYS __attribute__((always_inline))
#define LOOM_NOINLINE static __attribute__((noinline))

// vec<T, W>: W lanes of T; vec<T, 1> is T itself.
template <class T, int W> struct vec_of { typedef T type __attribute__((vector_size(sizeof(T) * W))); };
template <class T> struct vec_of<T, 1> { typedef T type; };
template <class T, int W> using vec = typename vec_of<T, W>::type;

#define LOOM_VECTORS(W)                                                                                    \
  typedef vec<i8, W> i8x##W; typedef vec<i16, W> i16x##W; typedef vec<i32, W> i32x##W;                     \
  typedef vec<i64, W> i64x##W; typedef vec<u8, W> u8x##W; typedef vec<u16, W> u16x##W;                     \
  typedef vec<u32, W> u32x##W; typedef vec<u64, W> u64x##W; typedef vec<f32, W> f32x##W;                   \
  typedef vec<f64, W> f64x##W;
LOOM_VECTORS(2) LOOM_VECTORS(4) LOOM_VECTORS(8) LOOM_VECTORS(16) LOOM_VECTORS(32) LOOM_VECTORS(64)
#undef LOOM_VECTORS

// lane<V>::type is the element type, lane<V>::count the number of lanes; same for scalars (count 1).
template <class V> struct lane {
  template <class T> struct bare { typedef T type; };
  template <class T> struct bare<T &> { typedef T type; };
  template <class T> struct bare<const T &> { typedef T type; };
  typedef typename bare<decltype((*(V *)0)[0])>::type type;
  static constexpr int count = sizeof(V) / sizeof(type);
};
#define LOOM_SCALAR(T) template <> struct lane<T> { typedef T type; static constexpr int count = 1; };
LOOM_SCALAR(bool) LOOM_SCALAR(i8) LOOM_SCALAR(i16) LOOM_SCALAR(i32) LOOM_SCALAR(i64) LOOM_SCALAR(u8)
LOOM_SCALAR(u16) LOOM_SCALAR(u32) LOOM_SCALAR(u64) LOOM_SCALAR(f32) LOOM_SCALAR(f64)
#undef LOOM_SCALAR

// like<V, T>: as many lanes as V has, of T.
template <class V, class T> using like = vec<T, lane<V>::count>;

// ---- from one to many, and between types ------------------------------------------------------------

// x - 0 is x for every x (0 + x would turn -0.0 into +0.0), and compiles to a plain broadcast.
template <class V> LOOM_INLINE V splat(typename lane<V>::type x) {
  if constexpr (lane<V>::count == 1) return x;
  else return x - V{};
}

template <class To, class From> LOOM_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "bits<> keeps the size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

// ---- vectors of other widths ------------------------------------------------------------------------

// Bytes of the widest vector register. The compiler lowers a wider vector to several registers; GCC does that well
// for arithmetic and memory but sends shuffles through the stack, hence the two ways below.
#if defined __AVX512BW__
#define LOOM_REGISTER 64
#elif defined __AVX2__
#define LOOM_REGISTER 32
#else
#define LOOM_REGISTER 16
#endif

template <class T, T...> struct sequence {};
#ifdef __clang__
template <int N> using lanes_up_to = __make_integer_seq<sequence, int, N>;
#else
template <int N> using lanes_up_to = sequence<int, __integer_pack(N)...>;
#endif

// strided<FROM, STEP, COUNT>(x): lanes FROM, FROM + STEP, ... of x; those past its end are unspecified.
template <int FROM, int STEP, class V, int... I> LOOM_INLINE auto strided(V x, sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (FROM + STEP * I < lane<V>::count ? FROM + STEP * I : -1)...);
}
template <int FROM, int STEP, int COUNT, class V>
LOOM_INLINE vec<typename lane<V>::type, COUNT> strided(V x) {
  if constexpr (COUNT == 1) return x[FROM];
  else return strided<FROM, STEP>(x, lanes_up_to<COUNT>());
}

template <int PART, class V> LOOM_INLINE auto half_of(V x) {
  constexpr int n = lane<V>::count / 2;
  if constexpr (sizeof(V) <= LOOM_REGISTER) return strided<PART * n, 1, n>(x);
  else return ((const vec<typename lane<V>::type, n> *)&x)[PART];
}
template <class V> LOOM_INLINE auto low_half(V x) { return half_of<0>(x); }
template <class V> LOOM_INLINE auto high_half(V x) { return half_of<1>(x); }

template <class V, int... I> LOOM_INLINE auto join(V lo, V hi, sequence<int, I...>) {
  return __builtin_shufflevector(lo, hi, I...);
}
template <class V> LOOM_INLINE auto join(V lo, V hi) {
  constexpr int n = 2 * lane<V>::count;
  typedef vec<typename lane<V>::type, n> Both;
  if constexpr (n == 2) return Both{lo, hi};
  else if constexpr (sizeof(Both) <= LOOM_REGISTER) return (Both)join(lo, hi, lanes_up_to<n>());
  else {
    Both y;
    ((V *)&y)[0] = lo;
    ((V *)&y)[1] = hi;
    return y;
  }
}

// resize<N>(x): the first N lanes of x; lanes that x does not have are unspecified.
template <int N, class V> LOOM_INLINE vec<typename lane<V>::type, N> resize(V x) {
  typedef typename lane<V>::type T;
  constexpr int n = lane<V>::count;
  if constexpr (N == n) return x;
  else if constexpr (n == 1) return vec<T, N>{x};
  else if constexpr (N == 1) return x[0];
  else if constexpr (N < n) return resize<N>(low_half(x));
  else return resize<N>((vec<T, 2 * n>)strided<0, 1, 2 * n>(x));
}

#define LOOM_LAMBDA __attribute__((always_inline))

// by_registers<T>(f, x, ...): f on as many lanes at a time as a register holds Ts. Without it, GCC 12 compares and
// selects vectors wider than a register lane by lane.
template <class T, class F, class V, class... Vs> LOOM_INLINE auto by_registers(F f, V x, Vs... more) {
  if constexpr (lane<V>::count * sizeof(T) <= LOOM_REGISTER) return f(x, more...);
  else
    return join(by_registers<T>(f, low_half(x), low_half(more)...),
                by_registers<T>(f, high_half(x), high_half(more)...));
}
// in_pieces<N>(f, x, ...): f on exactly N lanes at a time, with narrower vectors padded.
// in_registers(f, x, ...): f on full registers, or on 16 or 32 bytes if x is that small.
template <int N, class F, class V, class... Vs> LOOM_INLINE auto in_pieces(F f, V x, Vs... more) {
  constexpr int n = lane<V>::count;
  if constexpr (n == N) return f(x, more...);
  else if constexpr (n < N) return resize<n>(f(resize<N>(x), resize<N>(more)...));
  else
    return join(in_pieces<N>(f, low_half(x), low_half(more)...),
                in_pieces<N>(f, high_half(x), high_half(more)...));
}
template <class F, class V, class... Vs> LOOM_INLINE auto in_registers(F f, V x, Vs... more) {
  constexpr int bytes = sizeof(V) < 16 ? 16 : sizeof(V) > LOOM_REGISTER ? LOOM_REGISTER : sizeof(V);
  return in_pieces<bytes / sizeof(typename lane<V>::type)>(f, x, more...);
}

// by_lane(f, x, ...): f on each lane in turn.
template <class F, class V, class... Vs> LOOM_INLINE auto by_lane(F f, V x, Vs... more) {
  if constexpr (lane<V>::count == 1) return f(x, more...);
  else {
    like<V, decltype(f(x[0], more[0]...))> y;
    for (int i = 0; i < lane<V>::count; i++) y[i] = f(x[i], more[i]...);
    return y;
  }
}

// ---- the smaller and the larger of two --------------------------------------------------------------

// lesser(a, b) is a < b ? a : b and greater(a, b) is a > b ? a : b, hence b if either is NaN.
template <class V> LOOM_INLINE V lesser_lanes(V a, V b) { return a < b ? a : b; }
template <class V> LOOM_INLINE V greater_lanes(V a, V b) { return a > b ? a : b; }
#if defined __SSE2__ && !defined __clang__  // GCC 12 makes two instructions of each
#define LOOM_EXTREMES(V, SUFFIX, ...)                                                                      \
  LOOM_INLINE V lesser_lanes(V a, V b) { return __builtin_ia32_min##SUFFIX(a, b __VA_ARGS__); }            \
  LOOM_INLINE V greater_lanes(V a, V b) { return __builtin_ia32_max##SUFFIX(a, b __VA_ARGS__); }
LOOM_EXTREMES(f32x4, ps) LOOM_EXTREMES(f64x2, pd)
#ifdef __AVX2__
LOOM_EXTREMES(f32x8, ps256) LOOM_EXTREMES(f64x4, pd256)
#endif
#ifdef __AVX512BW__
LOOM_EXTREMES(f32x16, ps512_mask, , a, -1, 4) LOOM_EXTREMES(f64x8, pd512_mask, , a, -1, 4)
#endif
#undef LOOM_EXTREMES
#endif
template <class V> LOOM_INLINE V lesser(V a, V b) {
  if constexpr (lane<V>::count == 1) return a < b ? a : b;
  else return in_registers([](auto p, auto q) LOOM_LAMBDA { return lesser_lanes(p, q); }, a, b);
}
template <class V> LOOM_INLINE V greater(V a, V b) {
  if constexpr (lane<V>::count == 1) return a > b ? a : b;
  else return in_registers([](auto p, auto q) LOOM_LAMBDA { return greater_lanes(p, q); }, a, b);
}

// ---- between element types --------------------------------------------------------------------------

template <int BYTES, bool SIGNED> struct integer_of;
template <> struct integer_of<1, true> { typedef i8 type; };
template <> struct integer_of<2, true> { typedef i16 type; };
template <> struct integer_of<4, true> { typedef i32 type; };
template <> struct integer_of<8, true> { typedef i64 type; };
template <> struct integer_of<1, false> { typedef u8 type; };
template <> struct integer_of<2, false> { typedef u16 type; };
template <> struct integer_of<4, false> { typedef u32 type; };
template <> struct integer_of<8, false> { typedef u64 type; };
template <int BYTES, bool SIGNED> using integer = typename integer_of<BYTES, SIGNED>::type;
template <class V> using signed_of = like<V, integer<sizeof(typename lane<V>::type), true>>;
template <class V> using unsigned_of = like<V, integer<sizeof(typename lane<V>::type), false>>;

template <int BYTES> struct float_of_size { typedef f32 type; };
template <> struct float_of_size<8> { typedef f64 type; };
template <int BYTES> using float_of = typename float_of_size<BYTES>::type;

template <class T> constexpr bool is_float = (T)0.5 != 0;
template <class T> constexpr bool is_signed = (T)-1 < (T)0;

#if defined __clang__ || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
template <class To, class From> LOOM_INLINE To convert_lanes(From x) {
  return __builtin_convertvector(x, To);
}
#else
// GCC 12 widens bytes to words one lane at a time and splits every other widening in two halves, so the widening
// instructions are named here; narrowing inside a register is a shuffle, which GCC does well.
template <class To, class From> struct widening { static constexpr bool native = false; };
#define LOOM_WIDENING(FROM, TO, N, OPERAND, ...)                                                           \
  template <> struct widening<vec<TO, N>, vec<FROM, N>> {                                                  \
    static constexpr bool native = true;                                                                   \
    LOOM_INLINE vec<TO, N> of(vec<FROM, N> y) {                                                            \
      auto x = (OPERAND)resize<lane<OPERAND>::count>(y);                                                   \
      return (vec<TO, N>)__VA_ARGS__;                                                                      \
    }                                                                                                      \
  };
#define LOOM_EXTENSION(FROM, TO, N, OPERAND, ...)                                                          \
  LOOM_WIDENING(i##FROM, i##TO, N, OPERAND, __builtin_ia32_pmovsx##__VA_ARGS__)                            \
  LOOM_WIDENING(u##FROM, u##TO, N, OPERAND, __builtin_ia32_pmovzx##__VA_ARGS__)
typedef vec<char, 16> charx16;
typedef vec<char, 32> charx32;
#ifdef __AVX512BW__
LOOM_EXTENSION(8, 16, 32, charx32, bw512_mask(x, i16x32{}, -1))
LOOM_EXTENSION(8, 32, 16, charx16, bd512_mask(x, i32x16{}, -1))
LOOM_EXTENSION(16, 32, 16, i16x16, wd512_mask(x, i32x16{}, -1))
LOOM_EXTENSION(32, 64, 8, i32x8, dq512_mask(x, i64x8{}, -1))
LOOM_WIDENING(f32, f64, 8, f32x8, __builtin_ia32_cvtps2pd512_mask(x, f64x8{}, -1, 4))
LOOM_WIDENING(i32, f64, 8, i32x8, __builtin_ia32_cvtdq2pd512_mask(x, f64x8{}, -1))
LOOM_WIDENING(u32, f64, 8, i32x8, __builtin_ia32_cvtudq2pd512_mask(x, f64x8{}, -1))
#endif
#ifdef __AVX2__
LOOM_EXTENSION(8, 16, 16, charx16, bw256(x))
LOOM_EXTENSION(8, 32, 8, charx16, bd256(x))
LOOM_EXTENSION(16, 32, 8, i16x8, wd256(x))
LOOM_EXTENSION(32, 64, 4, i32x4, dq256(x))
LOOM_WIDENING(f32, f64, 4, f32x4, __builtin_ia32_cvtps2pd256(x))
LOOM_WIDENING(i32, f64, 4, i32x4, __builtin_ia32_cvtdq2pd256(x))
#endif
#ifdef __SSE4_1__
LOOM_EXTENSION(8, 16, 8, charx16, bw128(x))
LOOM_EXTENSION(8, 32, 4, charx16, bd128(x))
LOOM_EXTENSION(16, 32, 4, i16x8, wd128(x))
LOOM_EXTENSION(32, 64, 2, i32x4, dq128(x))
#endif
#undef LOOM_EXTENSION
#undef LOOM_WIDENING

template <class To, class From> LOOM_INLINE To convert_lanes(From x) {
  typedef typename lane<To>::type T;
  typedef typename lane<From>::type F;
  constexpr int n = lane<From>::count, from = sizeof(F), to = sizeof(T), wide = from > to ? from : to;
  constexpr bool integers = !is_float<T> && !is_float<F>;
  if constexpr (!integers && (from < 4 || to < 4)) return convert_lanes<To>(convert_lanes<vec<i32, n>>(x));
  else if constexpr (from == to || (!integers && from > to) || (from == 2 * to && n * from > LOOM_REGISTER))
    return __builtin_convertvector(x, To);
  else if constexpr (n * wide > LOOM_REGISTER)
    return join(convert_lanes<vec<T, n / 2>>(low_half(x)), convert_lanes<vec<T, n / 2>>(high_half(x)));
  else if constexpr (n * wide < 16) return resize<n>(convert_lanes<vec<T, 16 / wide>>(resize<16 / wide>(x)));
  else if constexpr (from > to) return strided<0, from / to, n>(bits<vec<T, n * from / to>>(x));
  else if constexpr (integers) {
    typedef vec<integer<to, is_signed<F>>, n> Extended;
    if constexpr (widening<Extended, From>::native) return (To)widening<Extended, From>::of(x);
    else if constexpr (to > 2 * from)
      return convert_lanes<To>(convert_lanes<vec<integer<to / 2, is_signed<F>>, n>>(x));
    else return __builtin_convertvector(x, To);
  } else if constexpr (widening<To, From>::native) return widening<To, From>::of(x);
  else return __builtin_convertvector(x, To);
}
#endif

// convert<V>(x): C's conversion of each lane (exact widening, integer truncation, int <-> float).
template <class To, class From> LOOM_INLINE To convert(From x) {
  if constexpr (lane<From>::count == 1) return (To)x;
  else if constexpr (__is_same(To, From)) return x;
  else return convert_lanes<To>(x);
}

// ---- memory -----------------------------------------------------------------------------------------

template <class V> LOOM_INLINE V load(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V> LOOM_INLINE void store(void *p, V v) {
  if constexpr (sizeof v <= LOOM_REGISTER) __builtin_memcpy(p, &v, sizeof v);
  else {
    store(p, low_half(v));
    store((char *)p + sizeof v / 2, high_half(v));
  }
}

// ---- transposition ----------------------------------------------------------------------------------

template <class V> LOOM_INLINE V interleave_low(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V> LOOM_INLINE V interleave_high(V a, V b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
// Transposition: interleaving halves four times transposes a 16 x 16 block.
template <class V> LOOM_INLINE void turn(V (&a)[16]) {
  V b[16];
#pragma GCC unroll 4
  for (int round = 0; round < 2; ++round) {
#pragma GCC unroll 8
    for (int l = 0; l < 8; ++l) {
      b[2 * l] = interleave_low(a[l], a[l + 8]);
      b[2 * l + 1] = interleave_high(a[l], a[l + 8]);
    }
#pragma GCC unroll 8
    for (int l = 0; l < 8; ++l) {
      a[2 * l] = interleave_low(b[l], b[l + 8]);
      a[2 * l + 1] = interleave_high(b[l], b[l + 8]);
    }
  }
}
