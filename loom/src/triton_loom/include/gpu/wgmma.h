// wgmma: products of a warp group, whose matrices are in shared memory (64-bit descriptors) or, for A, in registers.
//
// Four warps issue one product of 64 rows; each warp has 16 of them, and reads all of B. A step of k is 32 bytes. The result
// is computed when the product is issued, as a chain of FMAs in the order of k (see matrix.h). Asynchrony is checked instead:
// shared memory may be read until the group of the product is waited for, and its registers must not be touched before that
// (ptx/accumulators.py finds the instructions that might).
#pragma once
#include "block_units.h"
#include "shared_matrix.h"

namespace gpu {

// ---- accumulators ---------------------------------------------------------------------------------------

template <class D> LOOM_INLINE typename D::number number_of(u32 word) {
  if constexpr (__is_same(D, InF32)) return bits<f32>(word);
  else return (i32)word;
}
template <class D> LOOM_INLINE u32 word_of(typename D::number x) {
  if constexpr (__is_same(D, InF32)) return bits<u32>(ptx::canonical(x));
  else return (u32)(__is_same(D, InS32<true>) ? ptx::clamp_to<i32>(x) : (i32)x);
}

// Eight columns of the accumulators: lane l has columns 2 (l % 4) and the next one of rows l / 4 and l / 4 + 8.
template <class D> struct Accumulator {  // of 32 bits, four registers
  static constexpr u32 registers = 4;
  typedef typename D::number Number;
  static void open(const u32 *const *words, Number (*to)[MOST_COLUMNS]) {
    for (u32 half = 0; half < 2; ++half) {
      const u32 *first = words[2 * half], *second = words[2 * half + 1];
      for (u32 row = 0; row < 8; ++row)
        for (u32 k = 0; k < 4; ++k) {
          to[row + 8 * half][2 * k] = number_of<D>(first[4 * row + k]);
          to[row + 8 * half][2 * k + 1] = number_of<D>(second[4 * row + k]);
        }
    }
  }
  static void close(u32 *const *words, const Number (*from)[MOST_COLUMNS]) {
    for (u32 half = 0; half < 2; ++half) {
      u32 *first = words[2 * half], *second = words[2 * half + 1];
      for (u32 row = 0; row < 8; ++row)
        for (u32 k = 0; k < 4; ++k) {
          first[4 * row + k] = word_of<D>(from[row + 8 * half][2 * k]);
          second[4 * row + k] = word_of<D>(from[row + 8 * half][2 * k + 1]);
        }
    }
  }
};
template <> struct Accumulator<InF16> {  // pairs of 16 bits, two registers
  static constexpr u32 registers = 2;
  static void open(const u32 *const *words, f32 (*to)[MOST_COLUMNS]) {
    for (u32 half = 0; half < 2; ++half)
      for (u32 lane = 0; lane < LANES; ++lane)
        for (u32 k = 0; k < 2; ++k)
          to[lane / 4 + 8 * half][lane % 4 * 2 + k] = f32_from_f16((u16)(words[half][lane] >> 16 * k));
  }
  static void close(u32 *const *words, const f32 (*from)[MOST_COLUMNS]) {
    for (u32 half = 0; half < 2; ++half)
      for (u32 lane = 0; lane < LANES; ++lane) {
        const f32 *pair = &from[lane / 4 + 8 * half][lane % 4 * 2];
        words[half][lane] = ptx::encode<ptx::f16, ptx::NEAREST, false, false>(pair[0]) |
                            ptx::encode<ptx::f16, ptx::NEAREST, false, false>(pair[1]) << 16;
      }
  }
};

// ---- registers that a product may still be using --------------------------------------------------------

// The bits of the immediate, as ptx/asynchronous.py gives them.
struct ProductKind {
  u32 columns;
  bool a_in_registers, a_mn_major, b_mn_major, a_negative, b_negative;
  explicit ProductKind(i64 bits)
      : columns((u32)bits & 1023), a_in_registers(bits >> 10 & 1), a_mn_major(bits >> 11 & 1), b_mn_major(bits >> 12 & 1),
        a_negative(bits >> 13 & 1), b_negative(bits >> 14 & 1) {}
};

// Some operands of an instruction.
struct Registers {
  const u32 *offsets;
  u32 count;
  bool meets(Registers other) const {
    for (u32 k = 0; k < count; ++k)
      for (u32 n = 0; n < other.count; ++n)
        if (offsets[k] == other.offsets[n]) return true;
    return false;
  }
};
LOOM_INLINE u32 accumulator_count(const Instruction &i) {
  return i.operand_count - (ProductKind(i.immediate).a_in_registers ? 4 : 1) - 2;
}
LOOM_INLINE Registers accumulators(const Instruction &i) { return {i.operands, accumulator_count(i)}; }
LOOM_INLINE Registers left_matrix(const Instruction &i) {
  return {i.operands + accumulator_count(i), ProductKind(i.immediate).a_in_registers ? 4u : 0u};
}
static void report_touched(Warp &w, const Instruction &i, const Instruction &product) {
  const u32 lane = first_lane(w.mask);
  found(w, PRODUCT_UNDER_WAY, i.number, lane, 0, product.number, w.thread(lane));
}

// Replaces the handler of an instruction that may touch registers of pending products. The original handler follows the
// operands, in two words.
static void touch_registers(Warp &w, const Instruction &i) {
  const Registers touched = {i.operands, i.operand_count};
  for (const OpenProduct &open : units_of(*w.block).of[w.number].products)
    if (touched.meets(accumulators(*open.instruction)) || touched.meets(left_matrix(*open.instruction))) {
      report_touched(w, i, *open.instruction);
      break;
    }
  const u64 handler = i.operands[i.operand_count] | (u64)i.operands[i.operand_count + 1] << 32;
  ((Handler)handler)(w, i);
}
// Products may add to the same accumulators one after another, but not use each other's results in any other way.
static void check_registers(Warp &w, const Instruction &i) {
  for (const OpenProduct &open : units_of(*w.block).of[w.number].products)
    if (left_matrix(i).meets(accumulators(*open.instruction)) || accumulators(i).meets(left_matrix(*open.instruction)))
      report_touched(w, i, *open.instruction);
}

// ---- the product ----------------------------------------------------------------------------------------

// The warps of a group must execute the same products. Each warp is compared with the first one to arrive.
static void compare_with_group(Warp &w, const Instruction &i, u64 left, u64 right) {
  WarpGroup &group = units_of(*w.block).groups[w.number / GROUP];
  const u32 step = group.done[w.number % GROUP]++ - group.first;
  if (step == group.steps.count) group.steps.push({&i, left, right});
  const ProductStep &first = group.steps[step];
  if (first.instruction != &i || first.left != left || first.right != right)
    found(w, WARPS_DISAGREE, i.number, first_lane(w.mask), 0, first.instruction->number);
  u32 least = group.done[0];
  for (u32 done : group.done) least = done < least ? done : least;
  if (least - group.first < 64) return;
  const u32 over = least - group.first;
  for (u32 k = over; k < group.steps.count; ++k) group.steps[k - over] = group.steps[k];
  group.steps.count -= over, group.first = least;
}

// D = A B + D, or A B. Operands: D, A (four registers, or a descriptor), descriptor of B, whether D is added.
template <class D, class A, class B> static void product(Warp &w, const Instruction &i) {
  typedef Accumulator<D> Columns;
  constexpr u32 K = 256 / A::bits;
  expect_whole(w, i);
  Block &b = *w.block;
  const ProductKind kind(i.immediate);
  const u32 columns = kind.columns, registers = accumulator_count(i), after_a = registers + (kind.a_in_registers ? 4 : 1);
  const u32 lane = first_lane(w.mask);
  if (i.flags & UNFENCED) found(w, NO_PRODUCT_FENCE, i.number, lane);
  check_registers(w, i);
  const u64 described = kind.a_in_registers ? 0 : w.longs(i, registers)[lane];
  compare_with_group(w, i, described, w.longs(i, after_a)[lane]);
  units_of(b).of[w.number].products.push({&i, b.agent_time[MATRIX_UNITS + w.number]});

  alignas(64) typename A::number left[16][K];
  alignas(64) typename B::number right[K][MOST_COLUMNS];
  Reader reader(w, i, lane, true);
  if (kind.a_in_registers) open_a<A, K>(w, i, registers, left);
  else
    read_matrix<A>(reader, described, 0, kind.a_mn_major, w.number % 4 * 16, 16,
                   [&](u32 row, u32 k, typename A::number x) LOOM_ALWAYS { left[row][k] = x; });
  read_matrix<B>(reader, w.longs(i, after_a)[lane], 0, kind.b_mn_major, 0, columns,
                 [&](u32 row, u32 k, typename B::number x) LOOM_ALWAYS { right[k][row] = x; });
  if (kind.a_negative != kind.b_negative)
    for (auto &row : left)
      for (auto &x : row) x = -x;

  u32 *d[MOST_COLUMNS / 2];
  for (u32 r = 0; r < registers; ++r) d[r] = w.words(i, r);
  alignas(64) typename D::number sums[16][MOST_COLUMNS];
  const bool adds = w.flags(i, after_a + 1) >> lane & 1;
  if (!adds) __builtin_memset(sums, 0, sizeof sums);
  for (u32 eight = 0; eight < columns / 8 && adds; ++eight)
    Columns::open(d + eight * Columns::registers, (typename D::number(*)[MOST_COLUMNS]) & sums[0][eight * 8]);
  multiply_columns<K>(left, right, sums, columns);
  for (u32 eight = 0; eight < columns / 8; ++eight)
    Columns::close(d + eight * Columns::registers, (const typename D::number(*)[MOST_COLUMNS]) & sums[0][eight * 8]);
}

// ---- groups ---------------------------------------------------------------------------------------------

static void fence_registers(Warp &w, const Instruction &i) { expect_whole(w, i); }

static void commit_products(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  ++w.block->agent_time[MATRIX_UNITS + w.number];
}

// The immediate is the number of latest groups that may still be pending.
static void wait_for_products(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  Block &b = *w.block;
  const u32 agent = MATRIX_UNITS + w.number;
  const Time open = b.agent_time[agent];
  if (open <= b.began + i.immediate) return;
  const Time over = open - 1 - (Time)i.immediate;
  know(w, agent, over);
  auto &products = units_of(b).of[w.number].products;
  u32 left = 0;
  for (const OpenProduct &product : products)
    if (product.group > over) products[left++] = product;
  products.count = left;
}

static const Named WGMMA_TABLE[] = {
#define GPU_WGMMA(D, ACCUMULATOR, A, TYPE_A, B, TYPE_B) \
  GPU_HANDLER("wgmma." D "." A "." B, product<ACCUMULATOR, TYPE_A, TYPE_B>)
#define GPU_WGMMA_FP8(D, ACCUMULATOR)                                                                       \
  GPU_WGMMA(D, ACCUMULATOR, "e4m3", E4m3, "e4m3", E4m3) GPU_WGMMA(D, ACCUMULATOR, "e4m3", E4m3, "e5m2", E5m2) \
  GPU_WGMMA(D, ACCUMULATOR, "e5m2", E5m2, "e4m3", E4m3) GPU_WGMMA(D, ACCUMULATOR, "e5m2", E5m2, "e5m2", E5m2)
#define GPU_WGMMA_INTEGERS(D, ACCUMULATOR)                                                          \
  GPU_WGMMA(D, ACCUMULATOR, "s8", S8, "s8", S8) GPU_WGMMA(D, ACCUMULATOR, "s8", S8, "u8", U8)         \
  GPU_WGMMA(D, ACCUMULATOR, "u8", U8, "s8", S8) GPU_WGMMA(D, ACCUMULATOR, "u8", U8, "u8", U8)
  GPU_WGMMA("f32", InF32, "bf16", Bf16, "bf16", Bf16)
  GPU_WGMMA("f32", InF32, "f16", F16, "f16", F16)
  GPU_WGMMA("f16", InF16, "f16", F16, "f16", F16)
  GPU_WGMMA("f32", InF32, "tf32", Tf32, "tf32", Tf32)
  GPU_WGMMA_FP8("f32", InF32)
  GPU_WGMMA_FP8("f16", InF16)
  GPU_WGMMA_INTEGERS("s32", InS32<false>)
  GPU_WGMMA_INTEGERS("satfinite.s32", InS32<true>)
#undef GPU_WGMMA
#undef GPU_WGMMA_FP8
#undef GPU_WGMMA_INTEGERS
  GPU_HANDLER("wgmma.fence", fence_registers)
  GPU_HANDLER("wgmma.commit_group", commit_products)
  GPU_HANDLER("wgmma.wait_group", wait_for_products)
  GPU_HANDLER("wgmma.touched", touch_registers)
};

}  // namespace gpu
