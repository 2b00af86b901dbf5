// tl.dot: C[M,N] += A[M,K] * B[K,N] on row-major tiles in cache.
//
//   dot<f32, 64, 128, 32>(a, b, c)      f32, f64, i32; integers wrap
//   dot_i8<64, 128, 32>(tiles, a, b, c)        i8 operands, i32 sums, exact; wraps
//   dot_i8<64, 128, 64, true>(tiles, a, b, c)      with B transposed, [N,K]: N >= 16, K >= 64
//   dot_bf16<64, 128, 32>(tiles, a, b, c)      bf16 operands as raw bits, f32 sums
//   dot_bf16<64, 128, 32, true>(tiles, a, b, c)    with B transposed, [N,K]: N, K >= 16
//
// An element of C accumulates its products in the order k = 0, 1, ... K-1, starting from the C given, by one
// fused multiply-add each. Blocking and vector width only decide which elements are computed together, so a
// result has the same bits for every tile shape and on every machine. Integer sums do not depend on their order:
// i8 dots use the widest instruction of the processor.
//
// M, N and K are powers of two. Rows of A and B have strides (lda, ldb). Loops take their extents at run time:
// all shapes of a kernel share the code of a register block.
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

// Lanes for a row of n elements: a full register, or the whole row.
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

// A step takes as many elements along K per lane as fit into it as the `element` given: A as `left` makes it,
// B widened. `excess`: the amount by which sums are too large, per column of B, is stored after B.

// One step along K per lane.
struct Single {
  template <class T> using element = T;
  static constexpr bool excess = false;
  template <class To, class From> LOOM_INLINE To left(From x) { return widen<To>(x); }
  template <class V> LOOM_INLINE V step(V a, V b, V c) {
    if constexpr (__is_same(typename lane<V>::type, i32)) return a * b + c;
    else return fma(a, b, c);
  }
};

// Two steps along K per 32-bit lane, as i16. Clang turns the first form into vpdpwssd by itself.
struct Pair {
  template <class T> using element = i16;
  static constexpr bool excess = false;
  template <class To, class From> LOOM_INLINE To left(From x) { return widen<To>(x); }
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

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LOOM_DOT_QUAD
// Four steps along K per 32-bit lane, as i8. The instruction takes A unsigned, so it gets A + 128; the excess is 128
// times the sum of B's column.
struct Quad {
  template <class T> using element = i8;
  static constexpr bool excess = true;
  template <class To, class From> LOOM_INLINE To left(From x) { return x ^ -128; }
  template <class V> LOOM_INLINE V step(V a, V b, V c) {
#if defined(__AVX512VNNI__) && defined(__clang__)
    return __builtin_ia32_vpdpbusd512(c, a, b);
#elif defined(__AVX512VNNI__)
    return __builtin_ia32_vpdpbusd_v16si(c, a, b);
#elif defined(__clang__)
    return __builtin_ia32_vpdpbusd256(c, a, b);
#else
    return __builtin_ia32_vpdpbusd_v8si(c, a, b);
#endif
  }
};
#endif

// ---- the block: ROWS x COLS vectors of C stay in registers while K runs -----------------------------------

template <class Step, int LANES, int ROWS, int COLS, class Element, class T>
LOOM_NOINLINE void run(const Element *A, const Element *B, T *C, i64 M, i64 N, i64 K, i64 lda, i64 ldb,
                       i64 ldc, [[maybe_unused]] const T *excess) {
  typedef vec<T, LANES> V;
  for (i64 n = 0; n < N; n += COLS * LANES)
    for (i64 m = 0; m < M; m += ROWS) {
      const Element *a = A + m * lda, *b = B + n;
      T *c = C + m * ldc + n;
      V sum[ROWS][COLS], right[COLS];
      LOOM_UNROLL for (int i = 0; i < ROWS; i++)
        LOOM_UNROLL for (int j = 0; j < COLS; j++) {
          sum[i][j] = load<V>(c + i * ldc + j * LANES);
          if constexpr (Step::excess) sum[i][j] -= load<V>(excess + n + j * LANES);
        }
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

// The block is as close to square as M and N allow, because a square needs the fewest loads per step: with 16
// accumulators 4x4, or 2x8 for two rows, or 8x2 for two vectors of columns.
template <class Step, int M, int N, class Element, class T>
LOOM_INLINE void run_blocked(const Element *A, const Element *B, T *C, i64 K, i64 lda, i64 ldb, i64 ldc,
                             const T *excess = nullptr) {
  static_assert((M & (M - 1)) == 0 && (N & (N - 1)) == 0, "tiles have powers of two for sides");
  constexpr int lanes = lanes_for<T>(N), across = N / lanes, side = accumulators == 16 ? 4 : 2;
  constexpr int rows = least(M, accumulators / least(across, side));
  constexpr int cols = least(across, accumulators / rows);
  run<Step, lanes, rows, cols>(A, B, C, M, N, K, lda, ldb, ldc, excess);
}

// ---- operands worth converting once for many uses --------------------------------------------------------

// A as a step takes it: rows of elements, each converted by Step::left.
template <class Step, int LANES, class From, class To>
LOOM_NOINLINE void convert_left(const From *from, i64 stride, To *to, i64 rows, i64 cols) {
  for (i64 i = 0; i < rows; i++, from += stride)
    for (i64 j = 0; j < cols; j += LANES, to += LANES)
      store(to, Step::template left<vec<To, LANES>>(load<vec<From, LANES>>(from + j)));
}

// Transpose 4 x 4 elements within every 16.
template <class V, int... I> LOOM_INLINE V turn_fours(V x, sequence<int, I...>) {
  return __builtin_shufflevector(x, x, ((I & ~15) | (I & 3) << 2 | (I >> 2 & 3))...);
}
// Interleave four rows of 16 bytes into 16 words with a byte of each row.
template <class V> LOOM_INLINE auto interleave(V a, V b, V c, V d) {
  const auto words = turn_fours(bits<i32x16>(join(join(a, b), join(c, d))), lanes_up_to<16>());
  return bits<i32x16>(turn_fours(bits<i8x64>(words), lanes_up_to<64>()));
}

// B[K,N] as a step takes it: rows of words, each with as many elements along K as fit.
template <class Element, int LANES, class From, class Word>
LOOM_NOINLINE void convert_rows(const From *from, i64 stride, Word *to, i64 rows, i64 cols) {
  constexpr int fold = sizeof(Word) / sizeof(Element);
  for (i64 i = 0; i < rows; i += fold, from += fold * stride)
    for (i64 j = 0; j < cols; j += LANES, to += LANES)
      if constexpr (fold == 1) store(to, widen<vec<Word, LANES>>(load<vec<From, LANES>>(from + j)));
      else if constexpr (fold == 4 && LOOM_REGISTER == 64 && LANES == 16) {
        const auto row = [&](int k) LOOM_LAMBDA { return load<i64x2>(from + k * stride + j); };
        store(to, interleave(row(0), row(1), row(2), row(3)));
      } else {
        constexpr int width = 32 / fold;
        vec<i32, LANES> word = {};
        LOOM_UNROLL for (int k = 0; k < fold; k++) {
          auto one = convert<vec<i32, LANES>>(load<vec<From, LANES>>(from + k * stride + j));
          word |= (k < fold - 1 ? one & ((1 << width) - 1) : one) << k * width;
        }
        store(to, word);
      }
}

// B[N,K] as a step takes it, transposed 16 x 16 words at a time if a register holds 16.
template <class Element, class From, class Word>
LOOM_NOINLINE void convert_turned(const From *from, i64 stride, Word *to, i64 rows, i64 cols) {
  constexpr int fold = sizeof(Word) / sizeof(Element);
  if constexpr (lanes_for<Word>(16) == 16) {
    for (i64 i = 0; i < rows; i += 16, from += 16 * stride)
      for (i64 j = 0; j < cols; j += 16 * fold) {
        vec<Word, 16> block[16];
        LOOM_UNROLL for (int l = 0; l < 16; l++)
          block[l] = bits<vec<Word, 16>>(
              widen<vec<Element, 16 * fold>>(load<vec<From, 16 * fold>>(from + l * stride + j)));
        turn(block);
        LOOM_UNROLL for (int l = 0; l < 16; l++) store(to + (j / fold + l) * rows + i, block[l]);
      }
  } else {
    for (i64 i = 0; i < rows; i++)
      for (i64 j = 0; j < cols; j++)
        ((Element *)to)[(j / fold * rows + i) * fold + j % fold] = widen<Element>(from[i * stride + j]);
  }
}

// The amount by which a column's sums are too large: the step's product of B with an A of zeros.
template <class Step, int LANES, class Word>
LOOM_NOINLINE void sum_excess(const Word *from, Word *to, i64 rows, i64 cols) {
  typedef vec<Word, LANES> V;
  const V nothing = bits<V>(Step::template left<vec<i8, 4 * LANES>>(vec<i8, 4 * LANES>{}));
  for (i64 j = 0; j < cols; j += LANES) {
    V sum = {};
    for (i64 i = 0; i < rows; i++) sum = Step::step(nothing, load<V>(from + i * cols + j), sum);
    store(to + j, sum);
  }
}

// In parts that stay in the L1 cache: at most 32 KB of A and 16 KB of B.
template <class Step, int M, int N, int K, bool TURNED, class Element, class T>
LOOM_NOINLINE void run_converted(const Element *A, const Element *B, T *C, i64 lda, i64 ldb) {
  typedef typename Step::template element<T> Wide;
  constexpr int fold = sizeof(T) / sizeof(Wide);
  constexpr int rows = least(M, 128), cols = least(N, 64), depth = least(K, 64), steps = depth / fold;
  alignas(64) T left[rows * steps], right[steps * cols];
  [[maybe_unused]] alignas(64) T excess[cols];
  for (i64 k = 0; k < K; k += depth)
    for (i64 m = 0; m < M; m += rows) {
      convert_left<Step, lanes_for<Wide>(depth)>(A + m * lda + k, lda, (Wide *)left, rows, depth);
      for (i64 n = 0; n < N; n += cols) {
        const Element *b = TURNED ? B + n * ldb + k : B + k * ldb + n;
        if constexpr (TURNED) convert_turned<Wide>(b, ldb, right, cols, depth);
        else convert_rows<Wide, lanes_for<T>(cols)>(b, ldb, right, depth, cols);
        if constexpr (Step::excess) sum_excess<Step, lanes_for<T>(cols)>(right, excess, steps, cols);
        run_blocked<Step, rows, cols>(left, right, C + m * N + n, steps, steps, cols, N, excess);
      }
    }
}

}  // namespace loom_dot

// ---- i8 and bf16 by AMX tiles ------------------------------------------------------------------------------

// The processor's tile registers, configured for the dots of one function. A PyTorch thread may have configured them
// for its own library, which expects to find that configuration again: a function restores it at its end.
#if defined(__AMX_TILE__)
class Tiles {
  // All eight have 16 rows of 64 bytes, except that A's (4 and 5) and B's (6 and 7) extend as far as K.
  struct alignas(64) Shapes {
    u8 palette = 1, start_row = 0, reserved[14] = {};
    u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  Shapes before;
  int k_bytes = 0;

 public:
  Tiles() {}
  Tiles(const Tiles &) = delete;
  ~Tiles() {
    if (!k_bytes) return;
    if (before.palette) asm volatile("ldtilecfg %0" ::"m"(before));
    else asm volatile("tilerelease");
  }

  // Linux enables the tile registers for a process that requests them.
  static bool granted() {
    static int answer = -1;
    if (answer < 0) {
      const long arch_prctl = 158, request_permission = 0x1023, tile_data = 18;
      long failed;
      asm volatile("syscall"
                   : "=a"(failed)
                   : "0"(arch_prctl), "D"(request_permission), "S"(tile_data)
                   : "rcx", "r11", "memory");
      answer = !failed;
    }
    return answer;
  }

  // Configures them for rows of A of so many bytes, if they are available.
  LOOM_ALWAYS bool shape(int bytes) {
    if (k_bytes == bytes) return true;
    if (!granted()) return false;
    if (!k_bytes) asm volatile("sttilecfg %0" : "=m"(before));
    Shapes shapes;
    shapes.row_bytes[4] = shapes.row_bytes[5] = bytes;
    shapes.rows[6] = shapes.rows[7] = bytes / 4;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    k_bytes = bytes;
    return true;
  }
};

namespace loom_dot {

template <int TILE, class T> LOOM_INLINE void tile_load(const T *p, i64 row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row * (i64)sizeof *p), "i"(TILE) : "memory");
}
template <int TILE, class T> LOOM_INLINE void tile_store(T *p, i64 row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row * (i64)sizeof *p), "i"(TILE) : "memory");
}
// For bf16, one instruction takes 32 steps along K. It is about four times as fast as the arithmetic promised above,
// and different: it sums the even and the odd products separately, each from zero by fused multiply-adds, adds the
// two sums, then adds that to C; denormals are treated as zero on input and output. M and N still do not affect the
// bits. For i8 it takes 64 steps, exactly.
template <class T, int C, int A, int B> LOOM_INLINE void tile_dot() {
  if constexpr (__is_same(T, i32)) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int TILE> struct Tile { static constexpr int tile = TILE; };

// C is computed in strips of 16 rows and one or two tiles of columns. Loads and products of one strip overlap with
// the store of the previous one, which has tiles of its own. B is in words, strip by strip.
template <bool WIDE, class Element, class T>
LOOM_NOINLINE void run_tiles(const Element *A, const i32 *B, T *C, i64 M, i64 N, i64 words, i64 lda) {
  constexpr int cols = WIDE ? 32 : 16, fold = 4 / sizeof(Element);
  const i64 across = N / cols, strips = M / 16 * across;
  const int shift = __builtin_ctzll(across);
  const auto place = [&](i64 i) LOOM_LAMBDA { return C + (i >> shift) * 16 * N + (i & (across - 1)) * cols; };
  const auto begin = [&](auto first, auto left, i64 i) LOOM_LAMBDA {
    constexpr int c = decltype(first)::tile, a = decltype(left)::tile;
    const Element *row = A + (i >> shift) * 16 * lda;
    const i32 *b = B + (i & (across - 1)) * cols * words;
    tile_load<c>(place(i), N);
    if constexpr (WIDE) tile_load<c + 1>(place(i) + 16, N);
    for (i64 k = 0; k < words; k += 16, b += 16 * cols) {
      tile_load<a>(row + k * fold, lda);
      tile_load<6>(b, cols);
      tile_dot<T, c, a, 6>();
      if constexpr (WIDE) {
        tile_load<7>(b + 16, cols);
        tile_dot<T, c + 1, a, 7>();
      }
    }
  };
  const auto end = [&](auto first, i64 i) LOOM_LAMBDA {
    constexpr int c = decltype(first)::tile;
    tile_store<c>(place(i), N);
    if constexpr (WIDE) tile_store<c + 1>(place(i) + 16, N);
  };
  begin(Tile<0>(), Tile<4>(), 0);
  for (i64 i = 0; i < strips; i += 2) {
    if (i + 1 < strips) begin(Tile<2>(), Tile<5>(), i + 1);
    end(Tile<0>(), i);
    if (i + 2 < strips) begin(Tile<0>(), Tile<4>(), i + 2);
    if (i + 1 < strips) end(Tile<2>(), i + 1);
  }
}

template <int M, int N, int K, bool TURNED, class Element, class T>
LOOM_NOINLINE void run_on_tiles(const Element *A, const Element *B, T *C, i64 lda, i64 ldb) {
  constexpr int size = sizeof(Element), cols = least(N, 32), depth = least(K, least(512, 32768 / N) / size);
  constexpr int words = depth * size / 4;
  alignas(64) i32 right[words * N];
  for (i64 k = 0; k < K; k += depth) {
    for (i64 n = 0; n < N; n += cols) {
      i32 *to = right + n * words;
      if constexpr (TURNED) convert_turned<Element>(B + n * ldb + k, ldb, to, cols, depth);
      else convert_rows<Element, lanes_for<i32>(cols)>(B + k * ldb + n, ldb, to, depth, cols);
    }
    run_tiles<(N > 16)>(A + k, right, C, M, N, words, lda);
  }
}

template <int M, int N, int K> constexpr bool fits_tiles = M >= 16 && N >= 16 && N <= 512 && K >= 32;

}  // namespace loom_dot
#else
class Tiles {};
#endif
#undef LOOM_UNROLL

// ---- what kernels call ---------------------------------------------------------------------------------------

template <class T, int M, int N, int K>
LOOM_INLINE void dot(const T *A, const T *B, T *C, i64 lda = K, i64 ldb = N) {
  loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
}

template <int M, int N, int K, bool TURNED = false>
LOOM_INLINE void dot_i8([[maybe_unused]] Tiles &tiles, const i8 *A, const i8 *B, i32 *C, i64 lda = K,
                        i64 ldb = TURNED ? K : N) {
  static_assert(!TURNED || (N >= 16 && K >= 64), "a turned operand is turned by 16 words of four");
#if defined(__AMX_INT8__)
  if constexpr (loom_dot::fits_tiles<M, N, K>)
    if (tiles.shape(loom_dot::least(K, 64)))
      return loom_dot::run_on_tiles<M, N, K, TURNED>(A, B, C, lda, ldb);
#endif
#if defined(LOOM_DOT_QUAD)
  if constexpr (N >= loom_dot::lanes_for<i32>(16) && K >= 4)
    loom_dot::run_converted<loom_dot::Quad, M, N, K, TURNED>(A, B, C, lda, ldb);
  else
#endif
  if constexpr (K == 1) loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
  else loom_dot::run_converted<loom_dot::Pair, M, N, K, TURNED>(A, B, C, lda, ldb);
}

// Up to four rows of A use an element of B only once, so it is converted on the fly.
template <int M, int N, int K, bool TURNED = false>
LOOM_INLINE void dot_bf16([[maybe_unused]] Tiles &tiles, const u16 *A, const u16 *B, f32 *C, i64 lda = K,
                          i64 ldb = TURNED ? K : N) {
  static_assert(!TURNED || (N >= 16 && K >= 16), "a turned operand is turned 16 by 16");
#if defined(LOOM_DOT_BF16_HARDWARE) && defined(__AMX_BF16__)
  if constexpr (loom_dot::fits_tiles<M, N, K>)
    if (tiles.shape(64)) return loom_dot::run_on_tiles<M, N, K, TURNED>(A, B, C, lda, ldb);
#endif
  if constexpr (M <= 4 && !TURNED) loom_dot::run_blocked<loom_dot::Single, M, N>(A, B, C, K, lda, ldb, N);
  else loom_dot::run_converted<loom_dot::Single, M, N, K, TURNED>(A, B, C, lda, ldb);
}
