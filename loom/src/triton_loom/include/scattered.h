// Chunks whose lanes are anywhere in memory. As in tile.h, an inactive lane is never touched.
#pragma once
#include "tile.h"

// Offsets that turn out to be consecutive (the usual case of `offs % n`) are one vector access.
template <class I> LOOM_INLINE bool consecutive(I offset) {
  auto equal = [](auto a, auto b) LOOM_LAMBDA { return mask(a == b); };
  return all(by_registers<typename lane<I>::type>(equal, offset - splat<I>(offset[0]), iota<I>()));
}
#if defined __AVX512VL__ && defined __AVX512DQ__
template <class V> constexpr bool has_gather = sizeof(typename lane<V>::type) >= 4 && lane<V>::count >= 8;
LOOM_INLINE i32x8 gather_words(const i32x8 *p, i64x8 offset, i32x8 m, i32x8 other) {
  return __builtin_ia32_gatherdiv16si(other, p, offset, __builtin_ia32_cvtd2mask256(m), 4);
}
LOOM_INLINE i64x8 gather_words(const i64x8 *p, i64x8 offset, i32x8 m, i64x8 other) {
  return __builtin_ia32_gatherdiv8di(other, p, offset, __builtin_ia32_cvtd2mask256(m), 8);
}
#else
template <class V> constexpr bool has_gather = false;
template <class V> LOOM_INLINE V gather_words(const void *, i64x8, i32x8, V other) { return other; }
#endif
template <class V, class I> LOOM_NOINLINE V gather_some(pointer_to<V> p, I offset, like<V, i32> m, V other) {
  typename lane<V>::type lanes[lane<V>::count];
  typename lane<I>::type offsets[lane<V>::count];
  store(lanes, other);
  store(offsets, offset);
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) lanes[l] = p[offsets[l]];
  return load<V>(lanes);
}
template <class V, class I> LOOM_INLINE V gather_lanes(pointer_to<V> p, I offset, like<V, i32> m, V other) {
  if constexpr (has_gather<V>) {
    typedef typename int_of<sizeof(typename lane<V>::type)>::type word;
    auto words = [p](auto o, auto n, auto x) LOOM_LAMBDA { return gather_words((decltype(x) *)p, o, n, x); };
    return bits<V>(in_pieces<8>(words, convert<like<V, i64>>(offset), m, bits<like<V, word>>(other)));
  } else return gather_some<V, I>(p, offset, m, other);
}
template <class V, class I> LOOM_INLINE V gather_masked(pointer_to<V> p, I offset, like<V, i32> m, V other) {
  if (all(m) && consecutive(offset)) return load<V>(p + offset[0]);
  return gather_lanes<V, I>(p, offset, m, other);
}
template <class V, class I> LOOM_INLINE V gather(pointer_to<V> p, I offset) {
  if (consecutive(offset)) return load<V>(p + offset[0]);
  return gather_lanes<V, I>(p, offset, splat<like<V, i32>>(-1), V{});
}

// Lanes with individual addresses.
template <class V> LOOM_NOINLINE V load_at(like<V, i64> address, like<V, i32> m, V other) {
  typename lane<V>::type lanes[lane<V>::count];
  store(lanes, other);
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) lanes[l] = *(pointer_to<V>)address[l];
  return load<V>(lanes);
}

template <class V, class I> LOOM_NOINLINE void scatter_lanes(pointer_into<V> p, I offset, like<V, i32> m, V v) {
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) p[offset[l]] = v[l];
}
template <class V, class I> LOOM_INLINE void scatter(pointer_into<V> p, I offset, like<V, i32> m, V v) {
  if (all(m) && consecutive(offset)) store(p + offset[0], v);
  else scatter_lanes<V, I>(p, offset, m, v);
}
template <class V> LOOM_NOINLINE void store_at(like<V, i64> address, like<V, i32> m, V v) {
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) *(pointer_into<V>)address[l] = v[l];
}
