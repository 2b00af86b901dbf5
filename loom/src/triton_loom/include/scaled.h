// tl.dot_scaled: its operands as fp32, from codes and a scale for each group of them along K.
//
//   decode<64, 128, BY_COLUMNS>(to, from, f32_from_code)                            no scales
//   decode_rows<64, 128, 32, PLAIN>(to, from, scales, f32_from_code, f32_from_scale)      A[M,K], scales [M, K / 32]
//   decode_columns<64, 128, 32, PLAIN>(to, from, scales, f32_from_code, f32_from_scale)   B[K,N], scales [N, K / 32]
//
// The numbers are the rows, columns and group of the result; each element is its decoded code times its scale, rounded
// once.
#pragma once
#include "tile.h"

namespace loom_scaled {

// Two 4-bit codes share a byte, the first in its low half: neighbors in a row, or in a column.
enum packing { PLAIN, BY_COLUMNS, BY_ROWS };

constexpr int least(int a, int b) { return a < b ? a : b; }

// W codes of row r, from column c on.
template <int COLS, packing P, int W, class Code> LOOM_INLINE auto codes(const Code *from, i64 r, i64 c) {
  typedef vec<Code, W> V;
  if constexpr (P == PLAIN) return load<V>(from + r * COLS + c);
  else if constexpr (P == BY_ROWS) {
    const V pair = load<V>(from + r / 2 * COLS + c);
    return (V)(r % 2 ? pair >> 4 : pair & 15);
  } else {
    typedef vec<u16, W / 2> Pairs;
    const Pairs pair = convert<Pairs>(load<vec<u8, W / 2>>(from + (r * COLS + c) / 2));
    return bits<V>((Pairs)((pair | pair << 4) & 0x0f0f));
  }
}

template <int ROWS, int COLS, packing P, class Code, class Decode>
LOOM_INLINE void decode(f32 *to, const Code *from, Decode f32_from_code) {
  constexpr int W = least(COLS, 16);
  for (i64 r = 0; r < ROWS; r++)
    for (i64 c = 0; c < COLS; c += W) store(to + r * COLS + c, f32_from_code(codes<COLS, P, W>(from, r, c)));
}

template <int ROWS, int COLS, int GROUP, packing P, class Code, class Decode, class Scale>
LOOM_INLINE void decode_rows(f32 *to, const Code *from, const u8 *scales, Decode f32_from_code,
                             Scale f32_from_scale) {
  constexpr int W = least(GROUP, 16);
  for (i64 r = 0; r < ROWS; r++)
    for (i64 c = 0; c < COLS; c += GROUP) {
      const auto scale = splat<vec<f32, W>>(f32_from_scale(*scales++));
      for (i64 i = c; i < c + GROUP; i += W)
        store(to + r * COLS + i, f32_from_code(codes<COLS, P, W>(from, r, i)) * scale);
    }
}

template <int ROWS, int COLS, int GROUP, packing P, class Code, class Decode, class Scale>
LOOM_INLINE void decode_columns(f32 *to, const Code *from, const u8 *scales, Decode f32_from_code,
                                Scale f32_from_scale) {
  constexpr int W = least(COLS, 16), groups = ROWS / GROUP;
  for (i64 g = 0; g < groups; g++)
    for (i64 c = 0; c < COLS; c += W) {
      const auto scale = f32_from_scale(load_strided<vec<u8, W>>(scales + c * groups + g, groups));
      for (i64 r = g * GROUP; r < (g + 1) * GROUP; r++)
        store(to + r * COLS + c, f32_from_code(codes<COLS, P, W>(from, r, c)) * scale);
    }
}

}  // namespace loom_scaled
