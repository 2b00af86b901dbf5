// Matrices in the registers of a warp: ldmatrix, stmatrix and mma.sync.
//
// In a fragment lane l has row l / 4 (of A, C and D; the column of B) and the elements of column group l % 4. A product
// adds its terms to the accumulator one at a time in the order of k, each with one rounding (a chain of FMAs in f32 or f64;
// integers are exact). Hardware sums blocks of k at once, with truncation that differs between generations: see docs.
#pragma once
#include "memory.h"

namespace gpu {

// ---- to and from shared memory --------------------------------------------------------------------------

// Lanes 8 m to 8 m + 7 provide the addresses of the eight rows of matrix m. Operands: results, address.
template <u32 COUNT, bool TRANSPOSED> static void load_matrix(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  constexpr u32 GIVE = COUNT == 4 ? FULL : (1u << 8 * COUNT) - 1;
  u64 address[LANES];
  addresses<SHARED>(w, i, COUNT, address);
  const u32 lanes = reachable_shared(w, i, address, 16, GIVE);
  if (w.block->checks) read_shared_rows(w, i, address, lanes);
  u16 rows[COUNT * 8][8] = {};
  GPU_EACH_LANE(lanes, lane) __builtin_memcpy(rows[lane], w.block->shared + (address[lane] - SHARED_BASE), 16);
  for (u32 m = 0; m < COUNT; ++m) {
    u32 *to = w.words(i, m);
    for (u32 lane = 0; lane < LANES; ++lane) {
      const u32 row = lane / 4, column = lane % 4 * 2;
      const u16 low = TRANSPOSED ? rows[8 * m + column][row] : rows[8 * m + row][column];
      const u16 high = TRANSPOSED ? rows[8 * m + column + 1][row] : rows[8 * m + row][column + 1];
      if (w.mask >> lane & 1) to[lane] = low | (u32)high << 16;
    }
  }
}

// Operands: address, values.
template <u32 COUNT, bool TRANSPOSED> static void store_matrix(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  constexpr u32 GIVE = COUNT == 4 ? FULL : (1u << 8 * COUNT) - 1;
  u64 address[LANES];
  addresses<SHARED>(w, i, 0, address);
  const u32 lanes = reachable_shared(w, i, address, 16, GIVE);
  alignas(16) u16 rows[LANES][8];
  for (u32 m = 0; m < COUNT; ++m) {
    const u32 *from = w.words(i, 1 + m);
    for (u32 lane = 0; lane < LANES; ++lane) {
      const u32 row = lane / 4, column = lane % 4 * 2;
      (TRANSPOSED ? rows[8 * m + column][row] : rows[8 * m + row][column]) = (u16)from[lane];
      (TRANSPOSED ? rows[8 * m + column + 1][row] : rows[8 * m + row][column + 1]) = (u16)(from[lane] >> 16);
    }
  }
  if (w.block->checks) return write_shared(w, i, address, (const u8 *)rows, 16, 16, lanes);
  GPU_EACH_LANE(lanes, lane) __builtin_memcpy(w.block->shared + (address[lane] - SHARED_BASE), rows[lane], 16);
}

// ---- elements -------------------------------------------------------------------------------------------

// An element of a product: how many fit in a register, and the value of its code.
template <class F> struct Bytes {  // all numbers of an 8-bit format
  f32 of[256];
  Bytes() {
    for (u32 code = 0; code < 256; ++code) of[code] = ptx::decode<F>(code);
  }
};
static const Bytes<ptx::e4m3> E4M3_NUMBERS;
static const Bytes<ptx::e5m2> E5M2_NUMBERS;

struct Bf16 {
  typedef f32 number;
  typedef u16 code;
  static constexpr u32 bits = 16;
  static f32 of(u32 code) { return ::bits<f32>(code << 16); }
};
struct F16 {
  typedef f32 number;
  typedef u16 code;
  static constexpr u32 bits = 16;
  static f32 of(u32 code) { return f32_from_f16((u16)code); }
};
struct Tf32 {  // its low 13 bits are ignored
  typedef f32 number;
  typedef u32 code;
  static constexpr u32 bits = 32;
  static f32 of(u32 code) { return ::bits<f32>(code & ~0x1FFFu); }
};
struct E4m3 {
  typedef f32 number;
  typedef u8 code;
  static constexpr u32 bits = 8;
  static f32 of(u32 code) { return E4M3_NUMBERS.of[code]; }
};
struct E5m2 {
  typedef f32 number;
  typedef u8 code;
  static constexpr u32 bits = 8;
  static f32 of(u32 code) { return E5M2_NUMBERS.of[code]; }
};
struct S8 {
  typedef i32 number;
  typedef u8 code;
  static constexpr u32 bits = 8;
  static i32 of(u32 code) { return (i8)code; }
};
struct U8 {
  typedef i32 number;
  typedef u8 code;
  static constexpr u32 bits = 8;
  static i32 of(u32 code) { return (i32)code; }
};

LOOM_INLINE f32 multiply_add(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
LOOM_INLINE f64 multiply_add(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
LOOM_INLINE i64 multiply_add(i32 a, i32 b, i64 c) { return c + (i64)a * b; }

// ---- fragments ------------------------------------------------------------------------------------------

// The 32 lanes of a register, as codes: eight rows (lane / 4) from four neighboring lanes each, in the order of k.
// Register r of A has k from (r / 2) * RUN on, and rows 8 to 15 if r is odd; register r of B has k from r * RUN on.
template <class E> struct Codes {
  static constexpr u32 RUN = 4 * 32 / E::bits;
  typename E::code of[8][RUN];
};

template <class E, u32 K> LOOM_INLINE void open_a(Warp &w, const Instruction &i, u32 first, typename E::number (*a)[K]) {
  constexpr u32 RUN = Codes<E>::RUN, registers = K / RUN * 2;
  for (u32 r = 0; r < registers; ++r) {
    const auto &codes = *(const Codes<E> *)w.words(i, first + r);
    for (u32 row = 0; row < 8; ++row)
      for (u32 k = 0; k < RUN; ++k) a[row + r % 2 * 8][k + r / 2 * RUN] = E::of(codes.of[row][k]);
  }
}
// k by columns, so that the columns of a product are contiguous.
template <class E, u32 K> LOOM_INLINE void open_b(Warp &w, const Instruction &i, u32 first, typename E::number (*b)[8]) {
  constexpr u32 RUN = Codes<E>::RUN, registers = K / RUN;
  for (u32 r = 0; r < registers; ++r) {
    const auto &codes = *(const Codes<E> *)w.words(i, first + r);
    typename E::number numbers[8][RUN];
    for (u32 column = 0; column < 8; ++column)
      for (u32 k = 0; k < RUN; ++k) numbers[column][k] = E::of(codes.of[column][k]);
    for (u32 k = 0; k < RUN; ++k)
      for (u32 column = 0; column < 8; ++column) b[k + r * RUN][column] = numbers[column][k];
  }
}

// Layout of accumulators in registers: lane l has columns 2 (l % 4) and the next one of rows l / 4 and l / 4 + 8.
template <class T, class C> LOOM_INLINE void open_words(Warp &w, const Instruction &i, u32 first, C (*c)[8]) {
  for (u32 r = 0; r < 4; ++r) {
    const T *from = (const T *)w.words(i, first + r);
    for (u32 row = 0; row < 8; ++row)
      for (u32 pair = 0; pair < 4; ++pair) c[row + r / 2 * 8][2 * pair + r % 2] = from[4 * row + pair];
  }
}
template <class T, class C, class F>
LOOM_INLINE void close_words(Warp &w, const Instruction &i, u32 first, const C (*c)[8], F result) {
  for (u32 r = 0; r < 4; ++r) {
    T *to = (T *)w.words(i, first + r);
    if (__builtin_expect(w.mask == FULL, 1)) {
      for (u32 row = 0; row < 8; ++row)
        for (u32 pair = 0; pair < 4; ++pair) to[4 * row + pair] = result(c[row + r / 2 * 8][2 * pair + r % 2]);
    } else {
      GPU_EACH_LANE(w.mask, lane) to[lane] = result(c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2]);
    }
  }
}

struct InF32 {
  typedef f32 number;
  static constexpr u32 registers = 4;
  static void open(Warp &w, const Instruction &i, u32 first, f32 (*c)[8]) { open_words<f32>(w, i, first, c); }
  static void close(Warp &w, const Instruction &i, u32 first, const f32 (*c)[8]) {
    close_words<f32>(w, i, first, c, [](f32 x) LOOM_ALWAYS { return ptx::canonical(x); });
  }
};
// The sum is accumulated in f32 and rounded once, at the end.
struct InF16 {
  typedef f32 number;
  static constexpr u32 registers = 2;
  static void open(Warp &w, const Instruction &i, u32 first, f32 (*c)[8]) {
    for (u32 r = 0; r < 2; ++r) {
      const u16 *from = (const u16 *)w.words(i, first + r);
      for (u32 row = 0; row < 8; ++row)
        for (u32 column = 0; column < 8; ++column) c[row + r * 8][column] = F16::of(from[8 * row + column]);
    }
  }
  static void close(Warp &w, const Instruction &i, u32 first, const f32 (*c)[8]) {
    for (u32 r = 0; r < 2; ++r)
      GPU_EACH_LANE(w.mask, lane) {
        const f32 *pair = &c[lane / 4 + r * 8][lane % 4 * 2];
        const u32 low = ptx::encode<ptx::f16, ptx::NEAREST, false, false>(pair[0]);
        const u32 high = ptx::encode<ptx::f16, ptx::NEAREST, false, false>(pair[1]);
        w.words(i, first + r)[lane] = low | high << 16;
      }
  }
};
template <bool SATURATES> struct InS32 {
  typedef i64 number;
  static constexpr u32 registers = 4;
  static void open(Warp &w, const Instruction &i, u32 first, i64 (*c)[8]) { open_words<i32>(w, i, first, c); }
  static void close(Warp &w, const Instruction &i, u32 first, const i64 (*c)[8]) {
    close_words<i32>(w, i, first, c, [](i64 x) LOOM_ALWAYS { return SATURATES ? ptx::clamp_to<i32>(x) : (i32)x; });
  }
};

// ---- products -------------------------------------------------------------------------------------------

template <u32 K, class A, class B, class C> LOOM_INLINE void multiply(const A (*a)[K], const B (*b)[8], C (*c)[8]) {
  for (u32 row = 0; row < 16; ++row) {
    C sum[8];
    for (u32 column = 0; column < 8; ++column) sum[column] = c[row][column];
    for (u32 k = 0; k < K; ++k)
      for (u32 column = 0; column < 8; ++column) sum[column] = multiply_add(a[row][k], b[k][column], sum[column]);
    for (u32 column = 0; column < 8; ++column) c[row][column] = sum[column];
  }
}

// D = A B + C of 16 rows and 8 columns. Operands: D, A, B, C.
template <u32 K, class D, class A, class B> static void mma(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  constexpr u32 a_registers = K * A::bits / 64, b_registers = K * B::bits / 128;
  typename A::number a[16][K];
  typename B::number b[K][8];
  typename D::number c[16][8];
  open_a<A, K>(w, i, D::registers, a);
  open_b<B, K>(w, i, D::registers + a_registers, b);
  D::open(w, i, D::registers + a_registers + b_registers, c);
  multiply<K>(a, b, c);
  D::close(w, i, 0, c);
}

// In f64. A lane has every eighth row of a column of A, every fourth row of a column of B, and pairs of C and D in every
// eighth row. Operands: D, A, B, C.
template <u32 ROWS, u32 K> static void mma_f64(Warp &w, const Instruction &i) {
  constexpr u32 PARTS = ROWS / 8, D = 2 * PARTS, A = PARTS * K / 4, B = K / 4;
  expect_whole(w, i);
  f64 a[ROWS][K], b[K][8], c[ROWS][8];
  for (u32 lane = 0; lane < LANES; ++lane) {
    const u32 group = lane / 4, member = lane % 4;
    for (u32 r = 0; r < A; ++r) a[group + r % PARTS * 8][member + r / PARTS * 4] = bits<f64>(w.longs(i, D + r)[lane]);
    for (u32 r = 0; r < B; ++r) b[member + r * 4][group] = bits<f64>(w.longs(i, D + A + r)[lane]);
    for (u32 r = 0; r < D; ++r) c[group + r / 2 * 8][member * 2 + r % 2] = bits<f64>(w.longs(i, D + A + B + r)[lane]);
  }
  for (u32 row = 0; row < ROWS; ++row)
    for (u32 k = 0; k < K; ++k)
      for (u32 column = 0; column < 8; ++column)
        c[row][column] = multiply_add(a[row][k], b[k][column], c[row][column]);
  GPU_EACH_LANE(w.mask, lane)
    for (u32 r = 0; r < D; ++r) w.longs(i, r)[lane] = bits<u64>(c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2]);
}

// ---- products with scales -------------------------------------------------------------------------------

struct E2m1 {  // two lie in a byte, the lower first
  typedef f32 number;
  static constexpr u32 bits = 4;
  static f32 of(u32 code) { return ptx::decode<ptx::e2m1>(code); }
};
struct Ue8m0 {
  static f64 of(u32 code) { return code == 255 ? __builtin_nan("") : bits<f64>((u64)(code + 1023 - 127) << 52); }
};
struct Ue4m3 {
  static f64 of(u32 code) { return ptx::decode<ptx::e4m3>(code & 0x7F); }
};
template <class E> LOOM_INLINE f32 element(const u8 *run, u32 k) {
  if constexpr (__is_same(E, E2m1)) return E::of(run[k / 2] >> k % 2 * 4 & 15);
  else return E::of(run[k]);
}

// With one rounding, through a sum in f64 that is rounded to odd; the product and its scales are exact there.
LOOM_INLINE f32 rounded_sum(f64 term, f32 sum) {
  const f64 a = sum, s = a + term, part = s - a, error = (a - (s - part)) + (term - part);
  u64 u = bits<u64>(s);
  if (!(u & 1) && (error > 0 || error < 0)) u += (error > 0) == (s > 0) ? 1 : -1;
  return (f32)bits<f64>(u);
}

// D = (A with scales) (B with scales) + C; VECTOR scales for the K elements of a row of A or a column of B. Among the four
// lanes that share two rows of A (lane / 4, and 8 more), lane 2 * thread_a has the scales of the first and the next lane
// those of the second; lane thread_b has those of a column of B. They begin at a byte of the register. Operands: D, A, B, C,
// scales of A, scales of B; the immediate has byte_a, thread_a, byte_b and thread_b in a byte each.
template <u32 K, u32 VECTOR, class A, class B, class S> static void mma_scaled(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  const u32 byte_a = i.immediate & 0xFF, thread_a = i.immediate >> 8 & 0xFF, byte_b = i.immediate >> 16 & 0xFF,
            thread_b = i.immediate >> 24 & 0xFF;
  constexpr u32 run_a = __is_same(A, E2m1) ? 32 : 16, run_b = __is_same(B, E2m1) ? 32 : 16;  // elements of four lanes
  constexpr u32 a_registers = K / run_a * 2, b_registers = K / run_b;
  f64 a[16][K], b[8][K];
  for (u32 r = 0; r < a_registers; ++r)
    for (u32 row = 0; row < 8; ++row) {
      const u8 *run = (const u8 *)w.words(i, 4 + r) + 16 * row;
      for (u32 k = 0; k < run_a; ++k) a[row + r % 2 * 8][k + r / 2 * run_a] = element<A>(run, k);
    }
  for (u32 r = 0; r < b_registers; ++r)
    for (u32 column = 0; column < 8; ++column) {
      const u8 *run = (const u8 *)w.words(i, 4 + a_registers + r) + 16 * column;
      for (u32 k = 0; k < run_b; ++k) b[column][k + r * run_b] = element<B>(run, k);
    }
  const u32 *scales_a = w.words(i, i.operand_count - 2), *scales_b = w.words(i, i.operand_count - 1);
  for (u32 row = 0; row < 16; ++row) {
    const u32 scales = scales_a[row % 8 * 4 + 2 * thread_a + row / 8] >> 8 * byte_a;
    for (u32 k = 0; k < K; ++k) a[row][k] *= S::of(scales >> 8 * (k / (K / VECTOR)) & 0xFF);
  }
  for (u32 column = 0; column < 8; ++column) {
    const u32 scales = scales_b[column * 4 + thread_b] >> 8 * byte_b;
    for (u32 k = 0; k < K; ++k) b[column][k] *= S::of(scales >> 8 * (k / (K / VECTOR)) & 0xFF);
  }
  f32 c[16][8];
  InF32::open(w, i, 4 + a_registers + b_registers, c);
  for (u32 row = 0; row < 16; ++row)
    for (u32 column = 0; column < 8; ++column)
      for (u32 k = 0; k < K; ++k) c[row][column] = rounded_sum(a[row][k] * b[column][k], c[row][column]);
  InF32::close(w, i, 0, c);
}

static const Named MATRIX_TABLE[] = {
  GPU_HANDLER("ldmatrix.x1", load_matrix<1, false>)
  GPU_HANDLER("ldmatrix.x2", load_matrix<2, false>)
  GPU_HANDLER("ldmatrix.x4", load_matrix<4, false>)
  GPU_HANDLER("ldmatrix.x1.trans", load_matrix<1, true>)
  GPU_HANDLER("ldmatrix.x2.trans", load_matrix<2, true>)
  GPU_HANDLER("ldmatrix.x4.trans", load_matrix<4, true>)
  GPU_HANDLER("stmatrix.x1", store_matrix<1, false>)
  GPU_HANDLER("stmatrix.x2", store_matrix<2, false>)
  GPU_HANDLER("stmatrix.x4", store_matrix<4, false>)
  GPU_HANDLER("stmatrix.x1.trans", store_matrix<1, true>)
  GPU_HANDLER("stmatrix.x2.trans", store_matrix<2, true>)
  GPU_HANDLER("stmatrix.x4.trans", store_matrix<4, true>)
  GPU_HANDLER("mma.m16n8k16.f32.bf16.bf16.f32", mma<16, InF32, Bf16, Bf16>)
  GPU_HANDLER("mma.m16n8k8.f32.bf16.bf16.f32", mma<8, InF32, Bf16, Bf16>)
  GPU_HANDLER("mma.m16n8k16.f32.f16.f16.f32", mma<16, InF32, F16, F16>)
  GPU_HANDLER("mma.m16n8k8.f32.f16.f16.f32", mma<8, InF32, F16, F16>)
  GPU_HANDLER("mma.m16n8k16.f16.f16.f16.f16", mma<16, InF16, F16, F16>)
  GPU_HANDLER("mma.m16n8k8.f16.f16.f16.f16", mma<8, InF16, F16, F16>)
  GPU_HANDLER("mma.m16n8k8.f32.tf32.tf32.f32", mma<8, InF32, Tf32, Tf32>)
  GPU_HANDLER("mma.m16n8k4.f32.tf32.tf32.f32", mma<4, InF32, Tf32, Tf32>)
#define GPU_FP8(D, ACCUMULATOR)                                                     \
  GPU_HANDLER("mma.m16n8k32." D ".e4m3.e4m3." D, mma<32, ACCUMULATOR, E4m3, E4m3>)    \
  GPU_HANDLER("mma.m16n8k32." D ".e4m3.e5m2." D, mma<32, ACCUMULATOR, E4m3, E5m2>)    \
  GPU_HANDLER("mma.m16n8k32." D ".e5m2.e4m3." D, mma<32, ACCUMULATOR, E5m2, E4m3>)    \
  GPU_HANDLER("mma.m16n8k32." D ".e5m2.e5m2." D, mma<32, ACCUMULATOR, E5m2, E5m2>)    \
  GPU_HANDLER("mma.m16n8k16." D ".e4m3.e4m3." D, mma<16, ACCUMULATOR, E4m3, E4m3>)    \
  GPU_HANDLER("mma.m16n8k16." D ".e5m2.e5m2." D, mma<16, ACCUMULATOR, E5m2, E5m2>)
  GPU_FP8("f32", InF32)
  GPU_FP8("f16", InF16)
#undef GPU_FP8
#define GPU_INTEGERS(A, B, TYPE_A, TYPE_B)                                                          \
  GPU_HANDLER("mma.m16n8k32.s32." A "." B ".s32", mma<32, InS32<false>, TYPE_A, TYPE_B>)              \
  GPU_HANDLER("mma.m16n8k32.satfinite.s32." A "." B ".s32", mma<32, InS32<true>, TYPE_A, TYPE_B>)     \
  GPU_HANDLER("mma.m16n8k16.s32." A "." B ".s32", mma<16, InS32<false>, TYPE_A, TYPE_B>)              \
  GPU_HANDLER("mma.m16n8k16.satfinite.s32." A "." B ".s32", mma<16, InS32<true>, TYPE_A, TYPE_B>)
  GPU_INTEGERS("s8", "s8", S8, S8)
  GPU_INTEGERS("s8", "u8", S8, U8)
  GPU_INTEGERS("u8", "s8", U8, S8)
  GPU_INTEGERS("u8", "u8", U8, U8)
#undef GPU_INTEGERS
  GPU_HANDLER("mma.m8n8k4.f64.f64.f64.f64", mma_f64<8, 4>)
  GPU_HANDLER("mma.m16n8k4.f64.f64.f64.f64", mma_f64<16, 4>)
  GPU_HANDLER("mma.m16n8k8.f64.f64.f64.f64", mma_f64<16, 8>)
  GPU_HANDLER("mma.m16n8k16.f64.f64.f64.f64", mma_f64<16, 16>)
#define GPU_MXF8(A, B, TYPE_A, TYPE_B)                                                          \
  GPU_HANDLER("mma.m16n8k32.kind::mxf8f6f4.block_scale.scale_vec::1X.f32." A "." B ".f32.ue8m0",  \
              mma_scaled<32, 1, TYPE_A, TYPE_B, Ue8m0>)
  GPU_MXF8("e4m3", "e4m3", E4m3, E4m3)
  GPU_MXF8("e4m3", "e5m2", E4m3, E5m2)
  GPU_MXF8("e5m2", "e4m3", E5m2, E4m3)
  GPU_MXF8("e5m2", "e5m2", E5m2, E5m2)
#undef GPU_MXF8
#define GPU_MXF4(KIND, VECTOR, COUNT, SCALE, TYPE)                                                \
  GPU_HANDLER("mma.m16n8k64.kind::" KIND ".block_scale.scale_vec::" VECTOR ".f32.e2m1.e2m1.f32." SCALE, \
              mma_scaled<64, COUNT, E2m1, E2m1, TYPE>)
  GPU_MXF4("mxf4", "2X", 2, "ue8m0", Ue8m0)
  GPU_MXF4("mxf4nvf4", "2X", 2, "ue8m0", Ue8m0)
  GPU_MXF4("mxf4nvf4", "4X", 4, "ue4m3", Ue4m3)
#undef GPU_MXF4
};

}  // namespace gpu
