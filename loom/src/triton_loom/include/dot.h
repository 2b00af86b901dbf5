// tl.dot: C[M,N] += A[M,K] * B[K,N] on row-major tiles that lie in cache.
//
//   dot<f32, 64, 128, 32>(a, b, c)      f32, f64, i32; integers wrap
//   dot_i8<64, 128, 32>(a, b, c)        i8 operands, i32 sums, exact
//   dot_bf16<64, 128, 32>(a, b, c)      bf16 operands as raw bits, f32 sums
//   dot_bf16<64, 128, 32, true>(a, b, c)    the same with B[N,K], turned: N and K are 16 or more
//
// An element of C takes its products in the order k = 0, 1, ... K-1, starting from the C given, by one fused
// multiply-add each. Blocking and vector width only decide which elements are computed side by side, so a
// result has the same bits for every tile shape and on every machine.
//
// M, N and K are powers of two. Rows of A and B may lie further apart than they are long (lda, ldb). Loops
// take their extents at run time: all shapes of a kernel share one piece of code per register block.
#pragma once
#include "simd.h"

#if defined(__clang__)
#define LOOM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LOOM_UNROLL _Pragma("GCC unroll 16")
#endif

namespace loom_dot {

#if defined(__AVX512F__)
constexpr int register_bytes = 64, accumulators = 16;
#elif defined(__AVX__)
constexpr int register_bytes = 32, accumulators = 8;
#elif defined(__aarch64__)
constexpr int register_bytes = 16, accumulators = 16;
#else
constexpr int register_bytes = 16, accumulators = 8;
#endif

constexpr int least(int a, int b) { return a < b ? a : b; }

// Lanes that serve a row of n elements: a register full, or the whole row.
template <class T> constexpr int lanes_for(int n) { return least(n, register_bytes / (int)sizeof(T)); }

// ---- arithmetic: operands, and the step c + a * b -------------------------------------------------------

// An operand as the step takes it; bf16 is the upper half of f32. GCC 12 converts 16 lanes in halves, and 8
// to 32 bits lane by lane, hence its builtins.
template <class To, class From> LOOM_INLINE To widen(From x) {
  typedef typename lane<From>::type Narrow;
  typedef typename lane<To>::type Wide;
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  if constexpr (__is_same(From, u16x16) && __is_same(To, i32x16))
    return __builtin_ia32_pmovzxwd512_mask((i16x16)x, i32x16{}, -1);
  else if constexpr (__is_same(From, i8x16) && __is_same(To, i32x16))
    return __builtin_ia32_pmovsxbd512_mask((chars)x, i32x16{}, -1);
  else
#endif
  if constexpr (__is_same(To, From)) return x;
  else if constexpr (__is_same(Narrow, u16) && __is_same(Wide, f32))
    return bits<To>(widen<like<To, i32>>(x) << 16);
  else if constexpr (sizeof(Wide) == 4 * sizeof(Narrow)) return convert<To>(convert<like<To, i16>>(x));
  else return convert<To>(x);
}

template <class V> LOOM_INLINE V fma(V a, V b, V c) {
#if defined(__FMA__)
  if constexpr (__is_same(V, f32x4)) return __builtin_ia32_vfmaddps(a, b, c);
  else if constexpr (__is_same(V, f32x8)) return __builtin_ia32_vfmaddps256(a, b, c);
  else if constexpr (__is_same(V, f64x2)) return __builtin_ia32_vfmaddpd(a, b, c);
  else if constexpr (__is_same(V, f64x4)) return __builtin_ia32_vfmaddpd256(a, b, c);
  else
#endif
#if defined(__AVX512F__)
  if constexpr (__is_same(V, f32x16)) return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
  else if constexpr (__is_same(V, f64x8)) return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
  else
#endif
  if constexpr (__is_same(V, f32)) return __builtin_fmaf(a, b, c);
  else if constexpr (__is_same(V, f64)) return __builtin_fma(a, b, c);
  else {
    LOOM_UNROLL for (int i = 0; i < lane<V>::count; i++) c[i] = fma<typename lane<V>::type>(a[i], b[i], c[i]);
    return c;
  }
}

// One step along K per lane.
struct Single {
  static constexpr int fold = 1;
  template <class T> using element = T;
  template <class V> LOOM_INLINE V step(V a, V b, V c) {
    if constexpr (__is_same(typename lane<V>::type, i32)) return a * b + c;
    else return fma(a, b, c);
  }
};

// Two steps along K per 32-bit lane, as i16. Clang makes vpdpwssd of the first form by itself.
struct Pair {
  static constexpr int fold = 2;
  template <class T> using element = i16;
  template <class V> LOOM_INLINE V step(V a, V b, V c) {
#if defined(__AVX512BW__) && defined(__clang__)
    if constexpr (lane<V>::count == 16) return c + __builtin_ia32_pmaddwd512((i16x32)a, (i16x32)b);
    else
#elif defined(__AVX512VNNI__)
    if constexpr (lane<V>::count == 16) return __builtin_ia32_vpdpwssd_v16si(c, a, b);
    else
#elif defined(__AVX512BW__)
    if constexpr (lane<V>::count == 16)
      return c + __builtin_ia32_pmaddwd512_mask((i16x32)a, (i16x32)b, i32x16{}, -1);
    else
#endif
#if defined(__AVX2__)
    if constexpr (lane<V>::count == 8) return c + __builtin_ia32_pmaddwd256((i16x16)a, (i16x16)b);
    else
#endif
#if defined(__SSE2__)
    if constexpr (lane<V>::count == 4) return c + __builtin_ia32_pmaddwd128((i16x8)a, (i16x8)b);
    else
#endif
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16) + c;
  }
};

// ---- the block: ROWS x COLS vectors of C stay in registers while K runs -----------------------------------

template <class Step, int LANES, int ROWS, int COLS, class Element, class T>
LOOM_NOINLINE void run(const Element *A, const Element *B, T *C, i64 M, i64 N, i64 K, i64 lda, i64 ldb,
                       i64 ldc) {
  typedef vec<T, LANES> V;
  for (i64 n = 0; n < N; n += COLS * LANES)
    for (i64 m = 0; m < M; m += ROWS) {
      const Element *a = A + m * lda, *b = B + n;
      T *c = C + m * ldc + n;
      V sum[ROWS][COLS], right[COLS];
      LOOM_UNROLL for (int i = 0; i < ROWS; i++)
        LOOM_UNROLL for (int j = 0; j < COLS; j++) sum[i][j] = load<V>(c + i * ldc + j * LANES);
      for (i64 k = 0; k < K; k++) {
        LOOM_UNROLL for (int j = 0; j < COLS; j++)
          right[j] = widen<V>(load<vec<Element, LANES>>(b + k * ldb + j * LANES));
        LOOM_UNROLL for (int i = 0; i < ROWS; i++) {
          V left = splat<V>(widen<T>(a[i * lda + k]));
          LOOM_UNROLL for (int j = 0; j < COLS; j++) sum[i][j] = Step::step(left, right[j], sum[i][j]);
        }
      }
      LOOM_UNROLL for (int i = 0; i < ROWS; i++)
        LOOM_UNROLL for (int j = 0; j < COLS; j++) store(c + i * ldc + j * LANES, sum[i][j]);
    }
}

// The block is as near to square as M and N allow, since a square loads least per step: with 16 accumulators
// 4x4, or 2x8 for two rows, or 8x2 for two vectors of columns.
template <class Step, int M, int N, class Element, class T>
LOOM_INLINE void run_blocked(const Element *A, const Element *B, T *C, i64 K, i64 lda, i64 ldb, i64 ldc) {
  static_assert((M & (M - 1)) == 0 && (N & (N - 1)) == 0, "tiles have powers of two for sides");
  constexpr int lanes = lanes_for<T>(N), across = N / lanes, side = accumulators == 16 ? 4 : 2;
  constexpr int rows = least(M, accumulators / least(across, side));
  constexpr int cols = least(across, accumulators / rows);
  run<Step, lanes, rows, cols>(A, B, C, M, N, K, lda, ldb, ldc);
}

// ---- operands worth converting once for many uses --------------------------------------------------------

template <int LANES, class From, class To>
LOOM_NOINLINE void widen_rows(const From *from, i64 stride, To *to, i64 rows, i64 cols) {
  for (i64 i = 0; i < rows; i++, from += stride)
    for (i64 j = 0; j < cols; j += LANES, to += LANES)
      store(to, widen<vec<To, LANES>>(load<vec<From, LANES>>(from + j)));
}

// Rows 2k and 2k+1 become one row of 16-bit pairs.
template <int LANES, class From>
LOOM_NOINLINE void pair_rows(const From *from, i64 stride, i32 *to, i64 rows, i64 cols) {
  typedef vec<From, LANES> Narrow;
  typedef vec<i32, LANES> Wide;
  for (i64 i = 0; i < rows; i += 2, from += 2 * stride)
    for (i64 j = 0; j < cols; j += LANES, to += LANES) {
      Wide even = widen<Wide>(load<Narrow>(from + j)), odd = widen<Wide>(load<Narrow>(from + stride + j));
      store(to, (even & 0xffff) | odd << 16);
    }
}

// Rows of 16-bit numbers become columns of 32-bit ones: 16 by 16 where a register holds 16 of them.
template <class From, class To>
LOOM_NOINLINE void widen_turned(const From *from, i64 stride, To *to, i64 rows, i64 cols) {
  if constexpr (lanes_for<To>(16) == 16) {
    typedef vec<To, 16> Wide;
    for (i64 i = 0; i < rows; i += 16, from += 16 * stride)
      for (i64 j = 0; j < cols; j += 16) {
        Wide block[16];
        LOOM_UNROLL for (int l = 0; l < 16; l++)
          block[l] = widen<Wide>(load<vec<From, 16>>(from + l * stride + j));
        turn(block);
        LOOM_UNROLL for (int l = 0; l < 16; l++) store(to + (j + l) * rows + i, block[l]);
      }
  } else {
    for (i64 i = 0; i < rows; i++)
      for (i64 j = 0; j < cols; j++) to[j * rows + i] = widen<To>(from[i * stride + j]);
  }
}

// A part at a time, such that it stays in the first-level cache: at most 32 KB of A and 16 KB of B.
template <class Step, int M, int N, int K, bool TURNED, class Element, class T>
LOOM_NOINLINE void run_converted(const Element *A, const Element *B, T *C, i64 lda, i64 ldb) {
  typedef typename Step::template element<T> Wide;
  constexpr int rows = least(M, 128), cols = least(N, 64), depth = least(K, 64), steps = depth / Step::fold;
  alignas(64) T left[rows * steps], right[steps * cols];
  for (i64 k = 0; k < K; k += depth)
    for (i64 m = 0; m < M; m += rows) {
      widen_rows<lanes_for<Wide>(depth)>(A + m * lda + k, lda, (Wide *)left, rows, depth);
      for (i64 n = 0; n < N; n += cols) {
        const Element *b = TURNED ? B + n * ldb + k : B + k * ldb + n;
        if constexpr (TURNED) widen_turned(b, ldb, right, cols, depth);
        else if constexpr (Step::fold == 2) pair_rows<lanes_for<T>(cols)>(b, ldb, right, depth, cols);
        else widen_rows<lanes_for<T>(cols)>(b, ldb, right, depth, cols);
        run_blocked<Step, rows, cols>(left, right, C + m * N + n, steps, steps, cols, N);
      }
    }
}

#if defined(LOOM_DOT_BF16_HARDWARE) && defined(__AMX_BF16__)
// ---- bf16 by AMX tiles, on request -----------------------------------------------------------------------

// Some four times as fast, but not the arithmetic promised above: one instruction takes 32 steps along K. It
// sums the even and the odd ones apart, each from zero by fused multiply-adds, adds the two sums, then adds
// that to C; denormals count as zero on the way in and out. M and N still have no influence on the bits.

// All eight tiles are 16 rows of 64 bytes: 16x16 f32 of C, 16x32 bf16 of A, 16 rows of 16 pairs of B.
struct alignas(64) TileShapes {
  u8 palette = 1, start_row = 0, reserved[14] = {};
  u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Linux gives the tile registers to a process that asks for them.
LOOM_INLINE bool tiles_granted() {
  static int granted = -1;
  if (granted < 0) {
    const long arch_prctl = 158, request_permission = 0x1023, tile_data = 18;
    long failed;
    asm volatile("syscall"
                 : "=a"(failed)
                 : "0"(arch_prctl), "D"(request_permission), "S"(tile_data)
                 : "rcx", "r11", "memory");
    granted = !failed;
  }
  return granted;
}

#define LOOM_TILE_LOAD(tile, p, row) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"((row) * (i64)sizeof *(p)) : "memory")
#define LOOM_TILE_STORE(tile, p, row) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"((row) * (i64)sizeof *(p)) : "memory")
#define LOOM_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// A block is 2x2 tiles, or one in a direction that is 16 long.
template <bool TALL, bool WIDE>
LOOM_NOINLINE void run_tiles(const u16 *A, const i32 *B, f32 *C, i64 M, i64 K, i64 lda, i64 ldb, i64 ldc) {
  for (i64 m = 0; m < M; m += 32, A += 32 * lda, C += 32 * ldc) {
    f32 *below = C + 16 * ldc;
    LOOM_TILE_LOAD(0, C, ldc);
    if (WIDE) LOOM_TILE_LOAD(1, C + 16, ldc);
    if (TALL) LOOM_TILE_LOAD(2, below, ldc);
    if (TALL && WIDE) LOOM_TILE_LOAD(3, below + 16, ldc);
    for (i64 k = 0; k < K; k += 32) {
      const i32 *b = B + k / 2 * ldb;
      LOOM_TILE_LOAD(4, A + k, lda);
      if (TALL) LOOM_TILE_LOAD(5, A + 16 * lda + k, lda);
      LOOM_TILE_LOAD(6, b, ldb);
      if (WIDE) LOOM_TILE_LOAD(7, b + 16, ldb);
      LOOM_TILE_DOT(0, 4, 6);
      if (WIDE) LOOM_TILE_DOT(1, 4, 7);
      if (TALL) LOOM_TILE_DOT(2, 5, 6);
      if (TALL && WIDE) LOOM_TILE_DOT(3, 5, 7);
    }
    LOOM_TILE_STORE(0, C, ldc);
    if (WIDE) LOOM_TILE_STORE(1, C + 16, ldc);
    if (TALL) LOOM_TILE_STORE(2, below, ldc);
    if (TALL && WIDE) LOOM_TILE_STORE(3, below + 16, ldc);
  }
}

// Rows of [N,K] hold pairs along K side by side: 16 x 16 of them are turned at a time.
LOOM_NOINLINE void turn_pairs(const u16 *from, i64 stride, i32 *to, i64 rows, i64 cols) {
  for (i64 i = 0; i < rows; i += 16, from += 16 * stride)
    for (i64 j = 0; j < cols; j += 32) {
      i32x16 block[16];
      LOOM_UNROLL for (int l = 0; l < 16; l++) block[l] = load<i32x16>((const i32 *)(from + l * stride + j));
      turn(block);
      LOOM_UNROLL for (int l = 0; l < 16; l++) store(to + (j / 2 + l) * rows + i, block[l]);
    }
}

// A thread of PyTorch may have tiles shaped for its own library, which expects to find them so: they are shaped
// back at the end (or released, if they were not in use).
template <int M, int N, int K, bool TURNED>
LOOM_NOINLINE void run_on_tiles(const u16 *A, const u16 *B, f32 *C, i64 lda, i64 ldb) {
  constexpr int cols = least(N, 32), depth = least(K, 256);
  alignas(64) i32 right[depth / 2 * cols];
  const TileShapes shapes;
  TileShapes before;
  asm volatile("sttilecfg %0" : "=m"(before));
  asm volatile("ldtilecfg %0" ::"m"(shapes));
  for (i64 k = 0; k < K; k += depth)
    for (i64 n = 0; n < N; n += cols) {
      if constexpr (TURNED) turn_pairs(B + n * ldb + k, ldb, right, cols, depth);
      else pair_rows<lanes_for<i32>(cols)>(B + k * ldb + n, ldb, right, depth, cols);
      run_tiles<(M > 16), (N > 16)>(A + k, right, C + n, M, depth, lda, cols, N);
    }
  asm volatile("ldtilecfg %0" ::"m"(before));
}

template <int M, int N, int K> constexpr bool fits_tiles = M >= 16 && N >= 16 && K >= 32;
#undef LOOM_TILE_LOAD
#undef LOOM_TILE_STORE
#undef LOOM_TILE_DOT
#endif

}  // namespace loom_dot
#undef LOOM_UNROLL

template <class T, int M, int N, int K>
LOOM_INLINE void dot(const T *A, const T *B, T *C, i64 lda = K, i64 ldb = N) {
  loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
}

template <int M, int N, int K>
LOOM_INLINE void dot_i8(const i8 *A, const i8 *B, i32 *C, i64 lda = K, i64 ldb = N) {
  if constexpr (K == 1) loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
  else loom_dot::run_converted<loom_dot::Pair, M, N, K, false>(A, B, C, lda, ldb);
}

// Up to four rows of A use an element of B once, so that it is converted in passing.
template <int M, int N, int K, bool TURNED = false>
LOOM_INLINE void dot_bf16(const u16 *A, const u16 *B, f32 *C, i64 lda = K, i64 ldb = TURNED ? K : N) {
  static_assert(!TURNED || (N >= 16 && K >= 16), "a turned operand is turned 16 by 16");
#if defined(LOOM_DOT_BF16_HARDWARE) && defined(__AMX_BF16__)
  if constexpr (loom_dot::fits_tiles<M, N, K>)
    if (loom_dot::tiles_granted()) return loom_dot::run_on_tiles<M, N, K, TURNED>(A, B, C, lda, ldb);
#endif
  if constexpr (M <= 4 && !TURNED) loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
  else loom_dot::run_converted<loom_dot::Single, M, N, K, TURNED>(A, B, C, lda, ldb);
}
