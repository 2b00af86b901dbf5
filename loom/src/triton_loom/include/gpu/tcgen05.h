// tcgen05.mma and tcgen05.cp: products and copies that one thread issues, with results in tensor memory.
//
// A product is D = A B + D: D has 64 or 128 rows in tensor memory, A is there or in shared memory, B in shared memory. A step
// of k is 32 bytes. 32 bits (the instruction descriptor) describe the operands. The result is computed when the product is
// issued, as a chain of FMAs in the order of k (see matrix.h); asynchrony is checked instead: the matrix unit of its warp
// performs one thread's operations in order, and an operation is pending until a later tcgen05.commit has arrived at an
// mbarrier that was waited for.
//
// Row r of 128 is lane r. Row r of 64 is lane r % 16 of quarter r / 16, in its first or second half as the address says.
#pragma once
#include "shared_matrix.h"
#include "tensor_memory.h"

namespace gpu {

constexpr u32 MOST_ROWS = 128;

// ---- the instruction descriptor -------------------------------------------------------------------------

enum class ProductType : u32 { f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4 };
LOOM_INLINE constexpr bool is_scaled(ProductType type) { return type >= ProductType::mxf8f6f4; }
LOOM_INLINE constexpr bool is_packed_fp4(ProductType type) { return type >= ProductType::mxf4; }
// Elements of a step of k.
LOOM_INLINE constexpr u32 step_of(ProductType type) {
  return type == ProductType::tf32 ? 8 : type == ProductType::f16 ? 16 : is_packed_fp4(type) ? 64 : 32;
}

struct ProductDescriptor {
  u32 bits;
  u32 field(u32 first, u32 count) const { return bits >> first & ((1u << count) - 1); }
  u32 result() const { return field(4, 2); }  // 0: f16, 1: f32, 2: s32
  u32 a_type() const { return field(7, 3); }
  u32 b_type() const { return field(10, 3); }
  bool a_negative() const { return field(13, 1); }
  bool b_negative() const { return field(14, 1); }
  bool a_mn_major() const { return field(15, 1); }
  bool b_mn_major() const { return field(16, 1); }
  u32 columns() const { return field(17, 6) * 8; }
  u32 rows() const { return field(24, 5) * 16; }
  bool saturates() const { return field(3, 1); }
  // For products with scales: which byte of a cell is the first scale, and whether a scale is a power of two.
  u32 a_scale() const { return field(29, 2); }
  u32 b_scale() const { return field(4, 2); }
  bool scales_are_powers() const { return field(23, 1); }

  static bool is_fp8_or_fp4(u32 type) { return type == 0 || type == 1 || type == 5; }
  bool has_types(ProductType type) const {
    const u32 a = a_type(), b = b_type(), d = result();
    switch (type) {
      case ProductType::f16: return a <= 1 && a == b && (d == 1 || (d == 0 && a == 0));
      case ProductType::tf32: return a == 2 && b == 2 && d == 1 && !a_mn_major() && !b_mn_major();
      case ProductType::i8: return a <= 1 && b <= 1 && d == 2 && !a_negative() && !b_negative();
      case ProductType::f8f6f4: return is_fp8_or_fp4(a) && is_fp8_or_fp4(b) && d <= 1;
      case ProductType::mxf8f6f4: return is_fp8_or_fp4(a) && is_fp8_or_fp4(b) && scales_are_powers();
      default: return a == 1 && b == 1 && !a_mn_major() && !b_mn_major();
    }
  }
  // Whether it is valid and emulated: no sparse matrices, no 6-bit formats, no MN-major tf32.
  bool is_usable(ProductType type, u32 vector) const {
    const u32 m = rows(), n = columns();
    if (bits & 0x47 || !has_types(type) || n < 8 || n > MOST_COLUMNS || (m != 64 && m != 128)) return false;
    if (!is_scaled(type)) {
      if (bits & 0xE0800000u || (saturates() && type != ProductType::i8)) return false;
      return n % (m == 128 ? 16 : 8) == 0;
    }
    const bool whole = a_scale() % vector == 0 && b_scale() % vector == 0;
    const bool powers = type == ProductType::mxf4nvf4 && vector == 4 ? !scales_are_powers() : scales_are_powers();
    return m == 128 && whole && powers && !(bits >> 31) && !saturates();
  }
};

// ---- operands -------------------------------------------------------------------------------------------

template <bool INTEGERS> struct Numbers {
  typedef f32 element, sum;
};
template <> struct Numbers<true> {
  typedef i32 element;
  typedef i64 sum;
};
template <class T, u32 K> struct LeftMatrix {
  alignas(64) T of[MOST_ROWS][K];
};
template <class T, u32 K> struct RightMatrix {
  alignas(64) T of[K][MOST_COLUMNS];
};
static_assert(sizeof(LeftMatrix<f32, 64>) <= sizeof(TensorMemory::left), "room for the longest step of k");
static_assert(sizeof(RightMatrix<f32, 64>) <= sizeof(TensorMemory::right), "room for the longest step of k");

// Calls `f` with the type of the elements.
template <ProductType TYPE, class F> LOOM_INLINE void with_elements(u32 code, F f) {
  if constexpr (TYPE == ProductType::f16) code ? f(Bf16()) : f(F16());
  else if constexpr (TYPE == ProductType::tf32) f(Tf32());
  else if constexpr (TYPE == ProductType::i8) code ? f(S8()) : f(U8());
  else if constexpr (is_packed_fp4(TYPE)) f(E2m1());
  else code == 0 ? f(E4m3()) : code == 1 ? f(E5m2()) : f(E2m1());
}

LOOM_INLINE u32 lane_of_row(u32 row, u32 rows) { return rows == MOST_ROWS ? row : row / 16 * 32 + row % 16; }

// An operand in tensor memory; its rows are those of D.
struct TensorOperand {
  u32 lane, column;
  TensorOperand(u32 address) : lane(lane_of_address(address)), column(column_of_address(address)) {}
  bool is_there(const TensorMemory &t, u32 address, u32 rows, u32 columns) const {
    return (rows == MOST_ROWS ? lane == 0 : lane == 0 || lane == 16) && are_owned(t, address, columns);
  }
  template <class F> void each_group(u32 rows, u32 columns, F f) const {
    for (u32 row = 0; row < rows; row += LANE_GROUP)
      for (u32 k = 0; k < columns; ++k) f((lane + lane_of_row(row, rows)) / LANE_GROUP, column + k);
  }
};

// A from tensor memory: the eight columns have its k, packed.
template <class E, class T, u32 K>
static bool read_left(TensorUse &use, u32 address, u32 rows, LeftMatrix<T, K> &left) {
  constexpr u32 COLUMNS = 8, PER_CELL = 32 / E::bits, ELEMENT = ~0u >> (32 - E::bits);
  const TensorOperand place(address);
  if (!place.is_there(use.t, address, rows, COLUMNS))
    return found(use.w, TENSOR_BOUNDS, use.i.number, use.lane, address), false;
  if (use.w.block->checks) place.each_group(rows, COLUMNS, [&](u32 group, u32 column) { use.read(group, column); });
  for (u32 row = 0; row < rows; ++row) {
    const u32 *cells = &use.t.cells[place.lane + lane_of_row(row, rows)][place.column];
    for (u32 k = 0; k < K; ++k) left.of[row][k] = E::of(cells[k / PER_CELL] >> k % PER_CELL * E::bits & ELEMENT);
  }
  return true;
}

// ---- scales ---------------------------------------------------------------------------------------------

// The scales of 32 rows of A, or columns of B, are a column: a row is a lane, whose four bytes are scales along k. Each
// quarter of the lanes has all of them.
struct Scales {
  u8 of[MOST_COLUMNS][4];

  bool read(TensorUse &use, u32 address, u32 rows) {
    TensorMemory &t = use.t;
    const u32 columns = (rows + 31) / 32, first = column_of_address(address);
    if (lane_of_address(address) != 0 || !are_owned(t, address, columns))
      return found(use.w, TENSOR_BOUNDS, use.i.number, use.lane, address), false;
    bool same = true;
    for (u32 row = 0; row < rows; ++row) {
      const u32 cell = t.cells[row % 32][first + row / 32];
      for (u32 quarter = 1; quarter < 4; ++quarter) same &= t.cells[quarter * 32 + row % 32][first + row / 32] == cell;
      __builtin_memcpy(of[row], &cell, 4);
    }
    for (u32 k = 0; k < columns && use.w.block->checks; ++k)
      for (u32 group = 0; group < LANE_GROUPS; ++group)
        if (group % 2 * 16 < rows - k * 32) use.read(group, first + k);
    if (!same) found(use.w, TENSOR_MISUSE, use.i.number, use.lane, address);
    return true;
  }
};
LOOM_INLINE f64 scale_of(u32 code, bool power) { return power ? Ue8m0::of(code) : Ue4m3::of(code); }

// Scaled elements are exact in f32 unless they are too large for it; then sums are computed in f64, with one rounding each.
template <u32 K> struct ScaledProduct {
  f64 a[MOST_ROWS][K], b[K][MOST_COLUMNS];

  static bool fits(f64 x) { return !(x > 3e38 || x < -3e38); }
  void multiply(f32 (*sums)[MOST_COLUMNS], u32 first, u32 columns) const {
    for (u32 row = 0; row < 16; ++row)
      for (u32 column = 0; column < columns; ++column)
        for (u32 k = 0; k < K; ++k)
          sums[row][column] = rounded_sum(a[first + row][k] * b[k][column], sums[row][column]);
  }
};

// ---- the product ----------------------------------------------------------------------------------------

LOOM_INLINE void begin_operation(Warp &w, const Instruction &i, u32 lane) {
  auto &own = tensor_memory_of(*w.block).of[w.number];
  const u32 agent = MATRIX_UNITS + w.number;
  own.last = stamp(w.block->agent_time[agent], i.number, lane, agent);
  own.is_open = true;
  learn(own.unit_known, w.clocks->known);
}

template <class T> LOOM_INLINE T number_in_cell(u32 cell, u32 format) {
  if constexpr (__is_same(T, i64)) return (i32)cell;
  else return format == 0 ? f32_from_f16((u16)cell) : bits<f32>(cell);
}
template <class T> LOOM_INLINE u32 cell_of_number(T x, u32 format, bool saturates) {
  if constexpr (__is_same(T, i64)) return (u32)(saturates ? ptx::clamp_to<i32>(x) : (i32)x);
  else return format == 0 ? ptx::encode<ptx::f16, ptx::NEAREST, false, false>(x) : bits<u32>(ptx::canonical(x));
}

// One lane's product. Operands: D, A (an address in tensor memory or a descriptor), descriptor of B, instruction descriptor,
// addresses of the scales of A and B if there are any, and whether D is added. The immediate: offsets of D and of A.
template <ProductType TYPE, bool A_IN_TENSOR, u32 VECTOR>
static void multiply_in_tensor(Warp &w, const Instruction &i, u32 lane) {
  constexpr bool INTEGERS = TYPE == ProductType::i8, SCALED = is_scaled(TYPE), PADDED = !is_packed_fp4(TYPE);
  constexpr u32 K = step_of(TYPE);
  typedef typename Numbers<INTEGERS>::element Element;
  typedef typename Numbers<INTEGERS>::sum Sum;
  Block &b = *w.block;
  TensorMemory &t = tensor_memory_of(b);
  const ProductDescriptor described = {w.words(i, 3)[lane]};
  if (!described.is_usable(TYPE, VECTOR)) return found(w, MATRIX_OPERAND, i.number, lane);
  const u32 rows = described.rows(), columns = described.columns(), format = SCALED ? 1 : described.result();
  const u32 address = w.words(i, 0)[lane] + (u32)i.immediate;
  const TensorOperand place(address);
  if (!place.is_there(t, address, rows, columns)) return found(w, TENSOR_BOUNDS, i.number, lane, address);
  begin_operation(w, i, lane);

  auto &left = *(LeftMatrix<Element, K> *)t.left;
  auto &right = *(RightMatrix<Element, K> *)t.right;
  TensorUse use(w, i, lane, MATRIX_UNITS + w.number);
  Reader reader(w, i, lane);
  bool readable = true;
  with_elements<TYPE>(described.a_type(), [&](auto element) LOOM_ALWAYS {
    typedef decltype(element) E;
    if constexpr (A_IN_TENSOR) {
      if constexpr (E::bits != 4 || !PADDED)
        readable = read_left<E>(use, w.words(i, 1)[lane] + (u32)(i.immediate >> 32), rows, left);
      else readable = false, found(w, MATRIX_OPERAND, i.number, lane);  // four bits with padding, in tensor memory
    } else {
      read_matrix<E, PADDED>(reader, w.longs(i, 1)[lane], VERSION_BIT, described.a_mn_major(), 0, rows,
                             [&](u32 row, u32 k, Element x) LOOM_ALWAYS { left.of[row][k] = x; });
    }
  });
  if (!readable) return;
  with_elements<TYPE>(described.b_type(), [&](auto element) LOOM_ALWAYS {
    read_matrix<decltype(element), PADDED>(reader, w.longs(i, 2)[lane], VERSION_BIT, described.b_mn_major(), 0, columns,
                                           [&](u32 row, u32 k, Element x) LOOM_ALWAYS { right.of[k][row] = x; });
  });
  if (!INTEGERS && described.a_negative() != described.b_negative())
    for (u32 row = 0; row < rows; ++row)
      for (Element &x : left.of[row]) x = -x;

  ScaledProduct<K> *large = nullptr;
  if constexpr (SCALED) {
    Scales a, b_scales;
    if (!a.read(use, w.words(i, 4)[lane], rows) || !b_scales.read(use, w.words(i, 5)[lane], columns)) return;
    const bool powers = described.scales_are_powers();
    large = (ScaledProduct<K> *)malloc(sizeof(ScaledProduct<K>));
    bool fits = true;
    for (u32 row = 0; row < rows; ++row)
      for (u32 k = 0; k < K; ++k) {
        const f64 x = left.of[row][k] * scale_of(a.of[row][described.a_scale() + k / (K / VECTOR)], powers);
        fits &= ScaledProduct<K>::fits(x);
        large->a[row][k] = x, left.of[row][k] = (f32)x;
      }
    for (u32 column = 0; column < columns; ++column)
      for (u32 k = 0; k < K; ++k) {
        const f64 x = right.of[k][column] * scale_of(b_scales.of[column][described.b_scale() + k / (K / VECTOR)], powers);
        fits &= ScaledProduct<K>::fits(x);
        large->b[k][column] = x, right.of[k][column] = (f32)x;
      }
    if (fits) free(large), large = nullptr;
  }

  const bool adds = w.flags(i, SCALED ? 6 : 4) >> lane & 1;
  if (b.checks)
    place.each_group(rows, columns, [&](u32 group, u32 column) {
      if (adds) use.read(group, column, true);
      use.write(group, column);
    });
  for (u32 first = 0; first < rows; first += LANE_GROUP) {
    alignas(64) Sum sums[LANE_GROUP][MOST_COLUMNS] = {};
    for (u32 row = 0; row < LANE_GROUP && adds; ++row) {
      const u32 *cells = &t.cells[place.lane + lane_of_row(first + row, rows)][place.column];
      for (u32 column = 0; column < columns; ++column) sums[row][column] = number_in_cell<Sum>(cells[column], format);
    }
    if constexpr (SCALED) {
      if (large) large->multiply(sums, first, columns);
      else multiply_columns<K>(&left.of[first], right.of, sums, columns);
    } else {
      multiply_columns<K>(&left.of[first], right.of, sums, columns);
    }
    for (u32 row = 0; row < LANE_GROUP; ++row) {
      u32 *cells = &t.cells[place.lane + lane_of_row(first + row, rows)][place.column];
      for (u32 column = 0; column < columns; ++column)
        cells[column] = cell_of_number<Sum>(sums[row][column], format, INTEGERS && described.saturates());
    }
  }
  free(large);
}

template <ProductType TYPE, bool A_IN_TENSOR, u32 VECTOR = 1> static void tensor_product(Warp &w, const Instruction &i) {
  GPU_EACH_LANE(w.mask, lane) multiply_in_tensor<TYPE, A_IN_TENSOR, VECTOR>(w, i, lane);
}

// ---- copies ---------------------------------------------------------------------------------------------

// Rows of 16 or 32 bytes of shared memory (K-major) become 4 or 8 columns. If there are fewer rows than lanes, they are
// written several times: every REPEAT lanes, with rows beyond SPLIT from lane 64 on. Operands: address, descriptor.
template <u32 ROWS, u32 CHUNKS, u32 REPEAT, u32 SPLIT> static void copy_to_tensor(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  TensorMemory &t = tensor_memory_of(b);
  GPU_EACH_LANE(w.mask, lane) {
    const u32 address = w.words(i, 0)[lane] + (u32)i.immediate, column = column_of_address(address);
    const u64 descriptor = w.longs(i, 1)[lane];
    if (lane_of_address(address) != 0 || !are_owned(t, address, 4 * CHUNKS)) {
      found(w, TENSOR_BOUNDS, i.number, lane, address);
      continue;
    }
    begin_operation(w, i, lane);
    TensorUse use(w, i, lane, MATRIX_UNITS + w.number);
    for (u32 group = 0; group < LANE_GROUPS && b.checks; ++group)
      for (u32 k = 0; k < 4 * CHUNKS; ++k) use.write(group, column + k);
    Reader reader(w, i, lane);
    const Matrix matrix(descriptor);
    if (!is_usable(descriptor, VERSION_BIT)) found(w, MATRIX_OPERAND, i.number, lane, matrix.start);
    for (u32 row = 0; row < ROWS; ++row)
      for (u32 half = 0; half < CHUNKS; ++half) {
        alignas(16) u8 chunk[CHUNK];
        reader.chunk(matrix.k_major(row, half), chunk);
        const u32 begin = row % SPLIT + row / SPLIT * 64, end = SPLIT < ROWS ? begin + 64 : TENSOR_LANES;
        for (u32 to = begin; to < end; to += REPEAT) __builtin_memcpy(&t.cells[to][column + 4 * half], chunk, CHUNK);
      }
    if (!reader.inside) found(w, SHARED_BOUNDS, i.number, lane, matrix.start);
  }
}

static const Named TCGEN05_TABLE[] = {
#define GPU_TENSOR_PRODUCT(NAME, ...)                                                                     \
  GPU_HANDLER("tcgen05.mma." NAME, tensor_product<ProductType::__VA_ARGS__>)
#define GPU_TENSOR_PRODUCTS(NAME, TYPE)                \
  GPU_TENSOR_PRODUCT(NAME ".shared", TYPE, false)       \
  GPU_TENSOR_PRODUCT(NAME ".tensor", TYPE, true)
#define GPU_SCALED_PRODUCTS(NAME, TYPE, VECTOR)              \
  GPU_TENSOR_PRODUCT(NAME ".shared", TYPE, false, VECTOR)     \
  GPU_TENSOR_PRODUCT(NAME ".tensor", TYPE, true, VECTOR)
  GPU_TENSOR_PRODUCTS("f16", f16)
  GPU_TENSOR_PRODUCTS("tf32", tf32)
  GPU_TENSOR_PRODUCTS("f8f6f4", f8f6f4)
  GPU_TENSOR_PRODUCTS("i8", i8)
  GPU_SCALED_PRODUCTS("mxf8f6f4.1X", mxf8f6f4, 1)
  GPU_SCALED_PRODUCTS("mxf4.2X", mxf4, 2)
  GPU_SCALED_PRODUCTS("mxf4nvf4.2X", mxf4nvf4, 2)
  GPU_SCALED_PRODUCTS("mxf4nvf4.4X", mxf4nvf4, 4)
#undef GPU_TENSOR_PRODUCT
#undef GPU_TENSOR_PRODUCTS
#undef GPU_SCALED_PRODUCTS
  GPU_HANDLER("tcgen05.cp.128x256b", copy_to_tensor<128, 2, 128, 128>)
  GPU_HANDLER("tcgen05.cp.128x128b", copy_to_tensor<128, 1, 128, 128>)
  GPU_HANDLER("tcgen05.cp.64x128b.warpx2::02_13", copy_to_tensor<64, 1, 64, 64>)
  GPU_HANDLER("tcgen05.cp.64x128b.warpx2::01_23", copy_to_tensor<64, 1, 32, 32>)
  GPU_HANDLER("tcgen05.cp.32x128b.warpx4", copy_to_tensor<32, 1, 32, 32>)
};

}  // namespace gpu
