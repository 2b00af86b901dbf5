// The vocabulary of generated kernels: element types, vectors of them, and how they meet memory.
//
// A tile is processed in chunks of W lanes along its last dimension; W is 1, 2, 4, ... 64. A chunk is a
// plain GCC/Clang vector, so `a + b`, `a < b` and `m ? a : b` are the language's own operators, and the
// functions here and in casts.h / math.h work alike on a scalar and on a vector of any width.
//
//   f32x16 x = load<f32x16>(p);     mask m = x < y   (an i32x16 of 0 / -1; for scalars a bool)
//
// Number types that C++ lacks are carried as raw bits: bf16, f16 as u16 and the four FP8 types as u8.
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

// convert<V>(x): C's conversion of each lane (exact widening, integer truncation, int <-> float).
template <class To, class From> LOOM_INLINE To convert(From x) {
  if constexpr (lane<From>::count == 1) return (To)x;
  else return __builtin_convertvector(x, To);
}

// ---- memory -----------------------------------------------------------------------------------------

template <class V> LOOM_INLINE V load(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V> LOOM_INLINE void store(void *p, V v) { __builtin_memcpy(p, &v, sizeof v); }
