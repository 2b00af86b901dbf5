// Layout of a product's matrices in shared memory, given by a 64-bit descriptor, for wgmma.h and tcgen05.h.
//
// Units read them in chunks of 16 bytes. A step of k is 32 bytes: two chunks of a row, or a chunk of neighboring rows for
// each k. A descriptor has the address of the matrix, the strides of its tiles and their swizzle; the instruction says
// which of the two dimensions is contiguous.
#pragma once
#include "../dot.h"
#include "matrix.h"
#include "units.h"

namespace gpu {

// ---- where a matrix lies --------------------------------------------------------------------------------

// K-major: eight rows of `span` bytes, one after another, are a tile; the next eight rows follow at `stride`. Without a
// swizzle a row has 16 bytes, and the next 16 of k follow at `leading`. MN-major: eight steps of k, each with `span` bytes
// of rows, are a tile; the next eight steps of k follow at `stride`, further rows at `leading`, and without a swizzle the
// other way round.
struct Matrix {
  u32 start, leading, stride, span;
  Swizzle swizzle;

  explicit Matrix(u64 descriptor)
      : start((u32)(descriptor & 0x3FFF) << 4), leading((u32)(descriptor >> 16 & 0x3FFF) << 4),
        stride((u32)(descriptor >> 32 & 0x3FFF) << 4) {
    constexpr Swizzle SWIZZLES[] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64, Swizzle::bytes32};
    swizzle = SWIZZLES[descriptor >> 62];
    span = swizzle == Swizzle::none ? CHUNK : (u32)swizzle_bytes(swizzle);
  }
  // A chunk of a row's k: the first or the second 16 bytes.
  u32 k_major(u32 row, u32 half) const {
    const u32 along = swizzle == Swizzle::none ? leading : CHUNK;
    return swizzled(start + row / 8 * stride + row % 8 * span + half * along, swizzle);
  }
  // A chunk of neighboring rows at one k, by its number.
  u32 mn_major(u32 rows, u32 k) const {
    if (swizzle == Swizzle::none) return start + rows * stride + k / 8 * leading + k % 8 * CHUNK;
    const u32 chunks = span / CHUNK;
    return swizzled(start + rows / chunks * leading + k / 8 * stride + k % 8 * span + rows % chunks * CHUNK, swizzle);
  }
};
// Bits of a descriptor that mean nothing, and those of the offset into the swizzle's pattern. From sm_100 on bit 46 is the
// version, and bit 61 (another kind of swizzle) and bit 52 (absolute offsets) have a meaning that is not emulated.
constexpr u64 UNUSED_BITS = 0x3FFFC000C000C000ull, VERSION_BIT = 1ull << 46, BASE_OFFSET = 7ull << 49;

// Whether a descriptor has exactly the bits that it must have. Without a swizzle an offset has no meaning, but Triton writes
// one all the same.
LOOM_INLINE bool is_usable(u64 descriptor, u64 must) {
  const u64 ignored = must && descriptor >> 61 == 0 ? BASE_OFFSET : 0;
  return (descriptor & UNUSED_BITS & ~ignored) == must;
}

// ---- reading it -----------------------------------------------------------------------------------------

struct Reader {
  Warp &w;
  const Instruction &i;
  const u32 lane;
  UnitReads reads;
  bool inside = true;  // everything read is in shared memory

  // As the matrix unit of a warp. The product was issued by a lane, or by all lanes of the warp together.
  Reader(Warp &w, const Instruction &i, u32 lane, bool whole_warp = false)
      : w(w), i(i), lane(lane),
        reads(w, i, lane, MATRIX_UNITS + w.number, w.block->agent_time[MATRIX_UNITS + w.number], whole_warp) {}

  template <u32 BYTES = CHUNK> LOOM_ALWAYS void chunk(u32 address, u8 *to) {
    Block &b = *w.block;
    if (__builtin_expect(address < SHARED_BASE || address + CHUNK > SHARED_BASE + b.shared_bytes, 0)) {
      __builtin_memset(to, 0, CHUNK);
      inside = false;
      return;
    }
    if (b.checks) reads.template chunk<BYTES>(address);
    __builtin_memcpy(to, b.shared + (address - SHARED_BASE), CHUNK);
  }
};

template <class E> LOOM_INLINE typename E::number element_at(const u8 *chunk, u32 k) {
  if constexpr (E::bits == 4) return E::of(chunk[k / 2] >> k % 2 * 4 & 15);
  else if constexpr (E::bits == 8) return E::of(chunk[k]);
  else if constexpr (E::bits == 16) return E::of(((const u16 *)chunk)[k]);
  else return E::of(((const u32 *)chunk)[k]);
}
// Elements per chunk: 4-bit elements are packed, or fill only the first half of the chunk (`padded`).
template <class E> constexpr u32 per_chunk(bool padded) { return CHUNK * 8 / E::bits / (E::bits == 4 && padded ? 2 : 1); }

// Reads `rows` rows from `first` on into `put(row, k, number)`. The descriptor must have the bits `must`.
template <class E, bool PADDED = false, class F>
LOOM_INLINE void read_matrix(Reader &reader, u64 descriptor, u64 must, bool mn_major, u32 first, u32 rows, F put) {
  constexpr u32 PER_CHUNK = per_chunk<E>(PADDED), BYTES = PER_CHUNK * E::bits / 8;
  const Matrix matrix(descriptor);
  alignas(16) u8 chunk[CHUNK];
  reader.inside = true;
  if (!is_usable(descriptor, must)) found(reader.w, MATRIX_OPERAND, reader.i.number, reader.lane, matrix.start);
  if (!mn_major) {
    for (u32 row = 0; row < rows; ++row)
      for (u32 half = 0; half < 2; ++half) {
        reader.template chunk<BYTES>(matrix.k_major(first + row, half), chunk);
        for (u32 k = 0; k < PER_CHUNK; ++k) put(row, half * PER_CHUNK + k, element_at<E>(chunk, k));
      }
  } else {
    for (u32 k = 0; k < 2 * PER_CHUNK; ++k)
      for (u32 begin = 0; begin < rows; begin += PER_CHUNK) {
        reader.template chunk<BYTES>(matrix.mn_major((first + begin) / PER_CHUNK, k), chunk);
        for (u32 row = 0; row < PER_CHUNK && begin + row < rows; ++row) put(begin + row, k, element_at<E>(chunk, row));
      }
  }
  if (!reader.inside) found(reader.w, SHARED_BOUNDS, reader.i.number, reader.lane, matrix.start);
}

// ---- products of numbers --------------------------------------------------------------------------------

#ifdef __clang__
#define GPU_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GPU_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr u32 MOST_COLUMNS = 256;

// Rows by columns, in the order of k, sixteen columns at a time. Values beyond the last column are unused.
template <u32 K>
static void multiply_columns(const f32 (*left)[K], const f32 (*right)[MOST_COLUMNS], f32 (*sums)[MOST_COLUMNS],
                             u32 columns) {
  constexpr u32 ROWS = 8, WIDTH = 16;
  for (u32 column = 0; column < columns; column += WIDTH)
    for (u32 row = 0; row < 16; row += ROWS) {
      f32x16 sum[ROWS];
      GPU_UNROLL for (u32 r = 0; r < ROWS; ++r) sum[r] = ::load<f32x16>(&sums[row + r][column]);
      for (u32 k = 0; k < K; ++k) {
        const f32x16 b = ::load<f32x16>(&right[k][column]);
        GPU_UNROLL for (u32 r = 0; r < ROWS; ++r) sum[r] = loom_dot::fma(splat<f32x16>(left[row + r][k]), b, sum[r]);
      }
      GPU_UNROLL for (u32 r = 0; r < ROWS; ++r) ::store(&sums[row + r][column], sum[r]);
    }
}
template <u32 K>
static void multiply_columns(const i32 (*left)[K], const i32 (*right)[MOST_COLUMNS], i64 (*sums)[MOST_COLUMNS],
                             u32 columns) {
  for (u32 row = 0; row < 16; ++row)
    for (u32 k = 0; k < K; ++k)
      for (u32 column = 0; column < columns; ++column) sums[row][column] += (i64)left[row][k] * right[k][column];
}

}  // namespace gpu
