// Chunks of a tile: masks, strided access, reductions and transposition.
#pragma once
#include "simd.h"

// ---- masks: one i32 lane of 0 / -1 per element, a bool for scalars -------------------------------------

template <int W> struct mask_type { typedef vec<i32, W> type; };
template <> struct mask_type<1> { typedef bool type; };
template <int W> using mask_of = typename mask_type<W>::type;

template <int BYTES> struct int_of;
template <> struct int_of<1> { typedef i8 type; };
template <> struct int_of<2> { typedef i16 type; };
template <> struct int_of<4> { typedef i32 type; };
template <> struct int_of<8> { typedef i64 type; };

LOOM_INLINE bool mask(bool m) { return m; }
template <class M> LOOM_INLINE like<M, i32> mask(M m) {
  if constexpr (sizeof(typename lane<M>::type) == 4) return (like<M, i32>)m;
  else return convert<like<M, i32>>((like<M, typename int_of<sizeof(typename lane<M>::type)>::type>)m);
}
LOOM_INLINE bool invert(bool m) { return !m; }
template <class M> LOOM_INLINE M invert(M m) { return ~m; }

template <class T> LOOM_INLINE T select(bool m, T a, T b) { return m ? a : b; }
template <class M, class V> LOOM_INLINE V select(M m, V a, V b) {
  typedef typename int_of<sizeof(typename lane<V>::type)>::type word;
  return by_registers<word>(
      [](auto n, auto x, auto y) LOOM_LAMBDA { return convert<like<decltype(x), word>>(n) ? x : y; }, m, a, b);
}

LOOM_INLINE bool all(bool m) { return m; }
template <class M> LOOM_INLINE bool all(M m) {
#if defined(__AVX512DQ__) && !defined(__clang__)
  if constexpr (sizeof(M) == 64) return __builtin_ia32_cvtd2mask512((i32x16)m) == 0xFFFF;
#endif
  if constexpr (lane<M>::count == 2) return (m[0] & m[1]) != 0;
  else return all(low_half(m) & high_half(m));
}
template <class M> LOOM_INLINE bool any(M m) { return !all(invert(m)); }

// ---- ramps: base, base + step, base + 2 * step, ... -----------------------------------------------------

alignas(64) static const i32 LOOM_IOTA[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

template <class V> LOOM_INLINE V iota() { return convert<V>(load<like<V, i32>>(LOOM_IOTA)); }
template <class V> LOOM_INLINE V ramp(typename lane<V>::type base, typename lane<V>::type step) {
  return splat<V>(base) + iota<V>() * splat<V>(step);
}

LOOM_INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
// The mask of lanes 0 .. count - 1.
template <int W> LOOM_INLINE vec<i32, W> first_mask(i64 count) {
  i32 clamped = count > W ? W : count < 0 ? 0 : (i32)count;
  return iota<vec<i32, W>>() < splat<vec<i32, W>>(clamped);
}

// Whether two tiles, each given by its first and last element, are identical or disjoint in memory.
template <class A, class B> LOOM_INLINE bool same_or_apart(A *a_first, A *a_last, B *b_first, B *b_last) {
  const u64 a0 = (u64)a_first, a1 = (u64)a_last, b0 = (u64)b_first, b1 = (u64)b_last;
  const u64 a_low = a0 < a1 ? a0 : a1, a_high = a0 < a1 ? a1 : a0;
  const u64 b_low = b0 < b1 ? b0 : b1, b_high = b0 < b1 ? b1 : b0;
  if (a0 == b0 && a1 == b1 && sizeof(A) == sizeof(B)) return true;
  return a_high + sizeof(A) <= b_low || b_high + sizeof(B) <= a_low;
}

// Prefetches BYTES of memory that will be read or written soon. The address may be invalid.
enum purpose { READ, WRITE };
template <purpose P, int BYTES> LOOM_INLINE void prefetch(const void *p) {
#pragma GCC unroll 32
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch((const char *)p + i, P);
}

// ---- loads: `first` lanes of a chunk, masked lanes, strided ones -------------------------------------------
// Memory of an inactive lane is never touched. The common case (all lanes active) is one vector access; the rest is out
// of line, because it only happens at the edge of a tensor.

template <class V> using pointer_to = const typename lane<V>::type *;

template <class V> LOOM_NOINLINE V load_some(pointer_to<V> p, i64 first, V other) {
  typename lane<V>::type lanes[lane<V>::count];
  store(lanes, other);
  for (i64 l = 0; l < first; ++l) lanes[l] = p[l];
  return load<V>(lanes);
}
template <class V> LOOM_INLINE V load_first(pointer_to<V> p, i64 first, V other) {
  if (__builtin_expect(first >= lane<V>::count, 1)) return load<V>(p);
  return first <= 0 ? other : load_some<V>(p, first, other);
}
template <class V> LOOM_NOINLINE V load_lanes(pointer_to<V> p, like<V, i32> m, V other) {
  typename lane<V>::type lanes[lane<V>::count];
  store(lanes, other);
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) lanes[l] = p[l];
  return load<V>(lanes);
}
template <class V> LOOM_INLINE V load_masked(pointer_to<V> p, like<V, i32> m, V other) {
  return __builtin_expect(all(m), 1) ? load<V>(p) : load_lanes<V>(p, m, other);
}
template <class V> LOOM_INLINE V load_strided(pointer_to<V> p, i64 step) {
  V v;
#pragma GCC unroll 16
  for (int l = 0; l < lane<V>::count; ++l) v[l] = p[l * step];
  return v;
}
template <class V> LOOM_NOINLINE V load_strided_lanes(pointer_to<V> p, i64 step, like<V, i32> m, V other) {
  typename lane<V>::type lanes[lane<V>::count];
  store(lanes, other);
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) lanes[l] = p[l * step];
  return load<V>(lanes);
}
// A step that is only known at run time is often 1.
template <class V> LOOM_INLINE V load_strided(pointer_to<V> p, i64 step, like<V, i32> m, V other) {
  return step == 1 ? load_masked<V>(p, m, other) : load_strided_lanes<V>(p, step, m, other);
}

// ---- stores, likewise -----------------------------------------------------------------------------------

template <class V> using pointer_into = typename lane<V>::type *;

template <class V> LOOM_NOINLINE void store_some(pointer_into<V> p, i64 first, V v) {
  for (i64 l = 0; l < first; ++l) p[l] = v[l];
}
template <class V> LOOM_INLINE void store_first(pointer_into<V> p, i64 first, V v) {
  if (__builtin_expect(first >= lane<V>::count, 1)) store(p, v);
  else if (first > 0) store_some<V>(p, first, v);
}
template <class V> LOOM_NOINLINE void store_lanes(pointer_into<V> p, like<V, i32> m, V v) {
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) p[l] = v[l];
}
template <class V> LOOM_INLINE void store_masked(pointer_into<V> p, like<V, i32> m, V v) {
  if (__builtin_expect(all(m), 1)) store(p, v);
  else store_lanes<V>(p, m, v);
}
template <class V> LOOM_INLINE void store_strided(pointer_into<V> p, i64 step, V v) {
#pragma GCC unroll 16
  for (int l = 0; l < lane<V>::count; ++l) p[l * step] = v[l];
}
template <class V> LOOM_NOINLINE void store_strided_lanes(pointer_into<V> p, i64 step, like<V, i32> m, V v) {
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) p[l * step] = v[l];
}
template <class V> LOOM_INLINE void store_strided(pointer_into<V> p, i64 step, like<V, i32> m, V v) {
  if (step == 1) store_masked<V>(p, m, v);
  else store_strided_lanes<V>(p, step, m, v);
}
// a[0], b[0], a[1], b[1], ...
template <class V> LOOM_INLINE void store_interleaved(pointer_into<V> p, V a, V b) {
  if constexpr (lane<V>::count == 1) { p[0] = a; p[1] = b; }
  else { store_strided<V>(p, 2, a); store_strided<V>(p + 1, 2, b); }
}

// ---- reductions -------------------------------------------------------------------------------------------
// S<W> is the state of a reduction in W lanes, generated with the combining function `take`, and its halves.
// The order is fixed: chunks go round-robin to four running values (which hides the latency of an addition); these
// are combined pairwise, then the lanes by halves.

template <int STEP, int EXTENT, class Chunk> LOOM_INLINE auto reduce(Chunk chunk) {
  constexpr int TRIPS = EXTENT / STEP, ROUND = 4 * STEP;
  auto a = chunk(0);
  if constexpr (TRIPS >= 4) {
    auto b = chunk(STEP), c = chunk(2 * STEP), d = chunk(3 * STEP);
    for (i32 i = ROUND; i < EXTENT; i += ROUND) {
      a.take(chunk(i));
      b.take(chunk(i + STEP));
      c.take(chunk(i + 2 * STEP));
      d.take(chunk(i + 3 * STEP));
    }
    a.take(c);
    b.take(d);
    a.take(b);
  } else if constexpr (TRIPS == 2) {
    a.take(chunk(STEP));
  }
  return a;
}
template <template <int> class S, int W> LOOM_INLINE S<1> across_lanes(S<W> v) {
  if constexpr (W == 1) return v;
  else {
    S<W / 2> low = v.lower();
    low.take(v.upper());
    return across_lanes(low);
  }
}

// ---- transposition ----------------------------------------------------------------------------------------

// rows[r][c] = column(c)[r] for 16 rows and EXTENT columns.
template <int EXTENT, class T, class Column> LOOM_INLINE void store_columns(T *rows, i64 row_step, Column column) {
  typedef vec<T, 16> V;
  for (i32 c = 0; c < EXTENT; c += 16) {
    V a[16];
#pragma GCC unroll 16
    for (int l = 0; l < 16; ++l) a[l] = column(c + l);
    turn(a);
#pragma GCC unroll 16
    for (int l = 0; l < 16; ++l) store(rows + l * row_step + c, a[l]);
  }
}

// to[b][c][r] = from[b][r][c].
template <int BATCH, int ROWS, int COLUMNS, class T> LOOM_NOINLINE void transpose(T *to, const T *from) {
  typedef vec<T, 16> V;
  for (i32 b = 0; b < BATCH; ++b, to += ROWS * COLUMNS, from += ROWS * COLUMNS)
    for (i32 r = 0; r < ROWS; r += 16)
      for (i32 c = 0; c < COLUMNS; c += 16)
        if constexpr (sizeof(V) > 64) {  // wider than any register
          for (int l = 0; l < 16; ++l)
            for (int k = 0; k < 16; ++k) to[(c + k) * ROWS + r + l] = from[(r + l) * COLUMNS + c + k];
        } else {
          V a[16];
#pragma GCC unroll 16
          for (int l = 0; l < 16; ++l) a[l] = load<V>(from + (r + l) * COLUMNS + c);
          turn(a);
#pragma GCC unroll 16
          for (int l = 0; l < 16; ++l) store(to + (c + l) * ROWS + r, a[l]);
        }
}

// ---- atomics ------------------------------------------------------------------------------------------------

// Atomically replaces *p by f(*p) and returns the old value; compares bits, so NaN is no problem.
template <class T, class F> LOOM_INLINE T atomic_update(T *p, F f) {
  typedef typename int_of<sizeof(T)>::type word;
  word before = __atomic_load_n((word *)p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n((word *)p, &before, bits<word>((T)f(bits<T>(before))), false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
  return bits<T>(before);
}
template <class T> LOOM_INLINE T atomic_cas(T *p, T expected, T desired) {
  typedef typename int_of<sizeof(T)>::type word;
  word before = bits<word>(expected);
  __atomic_compare_exchange_n((word *)p, &before, bits<word>(desired), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return bits<T>(before);
}
