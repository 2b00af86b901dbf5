// Sorting networks on a tile in cache, for tl.sort and tl.topk.
//
//   static const auto f32_key = [](auto x) LOOM_LAMBDA { return x; };
//   static const Merge merges[] = {{1, 1, 2, false}, {2, 1, 0, false}};
//   sort_network<64>(tile, merges, f32_key);     sixteen runs of four
//
// A compare-and-swap of x at one position of a pair and y at the other leaves, at the position of x,
//
//   smaller(x, y) = x > y ? y : x       or       larger(x, y) = x > y ? x : y
//
// where elements are compared by their key. The two positions decide independently: if the elements are equal (+0 and
// -0) or unordered (NaN), both positions get the one from the lower position, or from the higher one if descending.
// This is Triton's definition, reproduced bit for bit.
#pragma once
#include "tile.h"

// Compare-and-swaps at the distances first, first / 2, ... last. The higher position gets the larger element unless
// exactly one of (position & flip) != 0 and `descending` holds. All are powers of two; first < flip, or flip is 0.
struct Merge {
  i32 first, last, flip;
  bool descending;
};

namespace loom_sort {

template <class V, class Key> LOOM_INLINE V smaller(V x, V y, Key key) {
  if constexpr (__is_same(decltype(key(x)), V)) return lesser(y, x);
  else return select(mask(key(x) > key(y)), y, x);
}
template <class V, class Key> LOOM_INLINE V larger(V x, V y, Key key) {
  if constexpr (__is_same(decltype(key(x)), V)) return greater(x, y);
  else return select(mask(key(x) > key(y)), x, y);
}

// The pairs of one distance of W or more in a run of elements that starts at `position` of the tile.
template <int W, class T, class Key>
LOOM_INLINE void exchange_far(T *run, i64 position, i64 count, i64 distance, const Merge &merge, Key key) {
  typedef vec<T, W> V;
  for (i64 i = 0; i < count; i += 2 * distance) {
    const bool descending = (((position + i) & merge.flip) != 0) != merge.descending;
    T *low = run + i, *high = low + distance;
    if (descending)
      for (i64 j = 0; j < distance; j += W) {
        V a = load<V>(low + j), b = load<V>(high + j);
        store(low + j, larger(a, b, key));
        store(high + j, smaller(b, a, key));
      }
    else
      for (i64 j = 0; j < distance; j += W) {
        V a = load<V>(low + j), b = load<V>(high + j);
        store(low + j, smaller(a, b, key));
        store(high + j, larger(b, a, key));
      }
  }
}

template <int DISTANCE, class V, int... I> LOOM_INLINE V swapped(V x, sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (I ^ DISTANCE)...);
}

// The distances of a merge from DISTANCE down, inside a vector. A lane takes the larger of a pair if the bit DISTANCE
// is set in its `places`: its position, or the complement of that where the merge is descending.
template <int DISTANCE, class V, class I, class Key>
LOOM_INLINE V exchange_near(V x, I places, const Merge &merge, Key key) {
  if constexpr (DISTANCE == 0) return x;
  else {
    if (merge.first >= DISTANCE && merge.last <= DISTANCE) {
      V y = swapped<DISTANCE>(x, lanes_up_to<lane<V>::count>());
      x = (places & DISTANCE) != 0 ? larger(x, y, key) : smaller(x, y, key);
    }
    return exchange_near<DISTANCE / 2>(x, places, merge, key);
  }
}

template <int W, class T, class Key>
LOOM_INLINE void merge_run(T *run, i64 position, i64 count, const Merge &merge, Key key) {
  typedef vec<T, W> V;
  typedef signed_of<V> I;
  i64 distance = merge.first;
  for (; distance >= W && distance >= merge.last; distance /= 2)
    exchange_far<W>(run, position, count, distance, merge, key);
  if (distance < merge.last) return;
  I places;
  for (int l = 0; l < W; ++l) places[l] = ((merge.flip & l) != 0) != merge.descending ? ~l : l;
  for (i64 i = 0; i < count; i += W) {
    const bool flipped = (merge.flip & (position + i)) != 0;
    store(run + i, exchange_near<W / 2>(load<V>(run + i), flipped ? ~places : places, merge, key));
  }
}

// A run that no merge reaches beyond is sorted completely before the next one, so that it stays in the L1 cache.
template <int W, class T, class Key>
LOOM_NOINLINE void merge_all(T *tile, i64 size, const Merge *merges, int count, Key key) {
  i64 run = W;
  for (int m = 0; m < count; ++m)
    if (2 * merges[m].first > run) run = 2 * merges[m].first;
  for (i64 position = 0; position < size; position += run)
    for (int m = 0; m < count; ++m) merge_run<W>(tile + position, position, run, merges[m], key);
}

}  // namespace loom_sort

// Networks of one type share their code if they have the same key.
template <int SIZE, class T, int COUNT, class Key>
LOOM_INLINE void sort_network(T *tile, const Merge (&merges)[COUNT], Key key) {
  constexpr int full = LOOM_REGISTER / sizeof(key(T())), W = full < SIZE ? full : SIZE;
  loom_sort::merge_all<W>(tile, SIZE, merges, COUNT, key);
}
