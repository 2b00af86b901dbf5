// Instrumentation of a kernel's memory accesses. LOOM_WITNESS is a sum: 1 checks accesses, 2 counts them.
//
// A checked access must be to an element of the tensor argument that its pointer came from, must read only bytes that
// have been written, and must not touch a byte that another program of the launch writes (or write a byte that another
// one touches) unless both accesses are atomic or atomics order them. A refused access reads zeros or writes nothing,
// so a wrong kernel runs to its end and all of its mistakes are reported.
//
// The checks themselves are in witness_runtime.h. The part in a kernel's own code is here: the fast path, for an access
// that is plainly inside a tensor and needs no further check, and the call of the full check.
#pragma once
#include "tile.h"
#include "witness_data.h"

enum { RELAXED = 0, ACQUIRE = 1, RELEASE = 2, OF_ONE_PROGRAM = 4 };

namespace loom {

enum Access { LOAD, STORE, UPDATE };

// An address that was chosen at run time: the bits above it hold the number of its argument, from 1 on (ir/choices.py),
// or 0 if it was read from memory. The address may be out of bounds by up to 2^46 bytes either way.
constexpr int NUMBER_BIT = 48;

LOOM_INLINE i32 number_of(const Program &p, u64 address) {
  const u64 number = (address + (1ull << (NUMBER_BIT - 2))) >> NUMBER_BIT;
  return number <= (u64)p.worker->witness->argument_count ? number : 0;
}

__attribute__((cold))
LOOM_SHARED void found(const Program &p, i32 site, Kind kind, i32 argument, u64 address, i64 value, i64 other);

// Checks n bytes that are elements of the argument: have they been written, does another program touch them?
template <Access ACCESS> LOOM_SHARED void check(const Program &p, i32 site, i32 argument, u64 address, i64 n);

// Whether the access is allowed. A chunk (WHOLE) that is not reports nothing: its lanes are checked one by one.
template <Access ACCESS, bool WHOLE>
LOOM_SHARED bool access_any(const Program &p, i32 site, i32 argument, u64 address, i64 n);

LOOM_SHARED void tally_sectors(Tally &t, u32 number, u64 from, u64 n);
LOOM_INLINE void tally(const Program &p, Tally &t, u64 address, i64 n) {
  const u32 number = p.worker->number;
  const u64 from = address - t.sectors_low;
  t.requested += n;
  if (!t.touched) return;  // a bare address: its extent is not known
  // bits that fill a pair of bytes or a word need no care for what other threads add
  if (n == 32 && from % 32 == 0) t.touched[from / 32] = ~0u;
  else if (n == 16 && from % 16 == 0) ((u16 *)t.touched)[from / 16] = 0xFFFF;
  else return tally_sectors(t, number, from, n);
  u32 &program = t.program[from / 32];
  t.sectors += program != number;
  program = number;
}

template <Access ACCESS, bool WHOLE>
LOOM_INLINE bool access(const Program &p, i32 site, i32 argument, const void *pointer, i64 n) {
  const u64 address = (u64)pointer;
  if (ACCESS == UPDATE || argument < 0) return access_any<ACCESS, WHOLE>(p, site, argument, address, n);
  Tally &t = p.worker->tallies[2 * argument + (ACCESS == STORE)];
  const i64 from = (i64)(address - t.low);
  if (__builtin_expect(from < 0 || from + n > t.dense, 0))
    return access_any<ACCESS, WHOLE>(p, site, argument, address, n);
  if (COUNTS) tally(p, t, address, n);
  if (CHECKS && t.watched) check<ACCESS>(p, site, argument, address, n);
  return true;
}

// Lanes that m selects, one by one; T is an integer of an element's size.
template <class T>
LOOM_SHARED void load_lanes(const Program &p, i32 site, i32 argument, const i64 *address, const i32 *m, T *lanes,
                            i32 count);
template <class T>
LOOM_SHARED void store_lanes(const Program &p, i32 site, i32 argument, const i64 *address, const i32 *m,
                             const T *lanes, i32 count);

// The unsigned integer of the size of an element of V.
template <int BYTES> struct integer_of;
template <> struct integer_of<1> { typedef u8 type; };
template <> struct integer_of<2> { typedef u16 type; };
template <> struct integer_of<4> { typedef u32 type; };
template <> struct integer_of<8> { typedef u64 type; };
template <class V> using bits = typename integer_of<sizeof(typename lane<V>::type)>::type;

// The steps after a release are a new segment. The lanes of one atomic release together, so they don't check this.
LOOM_SHARED void begin_segment(Worker &own);
LOOM_INLINE void after_release(const Program &p) {
  if (__builtin_expect(p.worker->released, 0)) begin_segment(*p.worker);
}

// Begin and end of one atomic operation that orders programs. No other one takes place in between.
LOOM_SHARED void acquire(Worker &own, u64 address, i32 order);
LOOM_SHARED void release(Worker &own, u64 address, i32 order);

}  // namespace loom

// ---- what generated code calls -------------------------------------------------------------------------------
// `site` and `argument` are compile-time constants; V is a chunk of memory, or one element.

// The address itself. An argument that is unknown at compile time is -1: then a number may be in the bits above it.
template <class T> LOOM_INLINE T *bare(const Program &p, i32 argument, T *pointer) {
  return argument >= 0 ? pointer : (T *)((u64)pointer - ((u64)loom::number_of(p, (u64)pointer) << loom::NUMBER_BIT));
}

template <class V> LOOM_NOINLINE V load_each(const Program &p, i32 site, i32 argument, like<V, i64> address, like<V, i32> m, V other) {
  i64 addresses[lane<V>::count];
  i32 wanted[lane<V>::count];
  typename lane<V>::type lanes[lane<V>::count];
  store(addresses, address), store(wanted, m), store(lanes, other);
  loom::load_lanes(p, site, argument, addresses, wanted, (loom::bits<V> *)lanes, lane<V>::count);
  return load<V>(lanes);
}
template <class V> LOOM_NOINLINE V load_steps(const Program &p, i32 site, i32 argument, pointer_to<V> base, i64 step, like<V, i32> m, V other) {
  return load_each<V>(p, site, argument, ramp<like<V, i64>>((i64)base, step * (i64)sizeof *base), m, other);
}
template <class V> LOOM_INLINE V seen_load(const Program &p, i32 site, i32 argument, pointer_to<V> base, i64 step, like<V, i32> m, V other) {
  if (__builtin_expect(step == 1 && all(m), 1) && loom::access<loom::LOAD, true>(p, site, argument, base, sizeof(V)))
    return load<V>(bare(p, argument, base));
  return load_steps<V>(p, site, argument, base, step, m, other);
}
template <class T> LOOM_INLINE T seen_load_one(const Program &p, i32 site, i32 argument, const T *pointer, bool m, T other) {
  if (!m) return other;
  return loom::access<loom::LOAD, false>(p, site, argument, pointer, sizeof(T)) ? *bare(p, argument, pointer) : T{};
}

template <class V> LOOM_NOINLINE void store_each(const Program &p, i32 site, i32 argument, like<V, i64> address, like<V, i32> m, V v) {
  i64 addresses[lane<V>::count];
  i32 wanted[lane<V>::count];
  typename lane<V>::type lanes[lane<V>::count];
  store(addresses, address), store(wanted, m), store(lanes, v);
  loom::store_lanes(p, site, argument, addresses, wanted, (const loom::bits<V> *)lanes, lane<V>::count);
}
template <class V> LOOM_NOINLINE void store_steps(const Program &p, i32 site, i32 argument, pointer_into<V> base, i64 step, like<V, i32> m, V v) {
  store_each<V>(p, site, argument, ramp<like<V, i64>>((i64)base, step * (i64)sizeof *base), m, v);
}
template <class V> LOOM_INLINE void seen_store(const Program &p, i32 site, i32 argument, pointer_into<V> base, i64 step, like<V, i32> m, V v) {
  if (__builtin_expect(step == 1 && all(m), 1) && loom::access<loom::STORE, true>(p, site, argument, base, sizeof(V)))
    store(bare(p, argument, base), v);
  else
    store_steps<V>(p, site, argument, base, step, m, v);
}
template <class T> LOOM_INLINE void seen_store_one(const Program &p, i32 site, i32 argument, T *pointer, bool m, T v) {
  if (m && loom::access<loom::STORE, false>(p, site, argument, pointer, sizeof(T))) *bare(p, argument, pointer) = v;
}

LOOM_INLINE void begin_atomic(const Program &p) {
  if (loom::CHECKS) loom::after_release(p);
}

// One atomic update that acquires or releases according to its memory order. If its scope is the CTA, that is, the
// program, other programs can't rely on it: to them it is a plain load and a plain store.
template <class T, class F>
LOOM_NOINLINE T seen_atomic(const Program &p, i32 site, i32 argument, T *pointer, bool m, i32 order, F update) {
  if (order == OF_ONE_PROGRAM) {
    if (!m) return T{};
    loom::access<loom::LOAD, true>(p, site, argument, pointer, sizeof(T));  // of bounds the store speaks
    return loom::access<loom::STORE, false>(p, site, argument, pointer, sizeof(T)) ? update() : T{};
  }
  if (!m || !loom::access<loom::UPDATE, false>(p, site, argument, pointer, sizeof(T))) return T{};
  if (!loom::CHECKS || !p.worker->witness->ordered || order == RELAXED) return update();
  const u64 address = (u64)bare(p, argument, pointer);
  loom::acquire(*p.worker, address, order);
  const T old = update();
  loom::release(*p.worker, address, order);
  return old;
}

// Integers of offsets, masks and loops: the exact result must fit their type.
template <int BITS, bool SIGNED> LOOM_INLINE bool is_integer(i64 exact) {
  constexpr i64 low = SIGNED ? -(1ll << (BITS - 1)) : 0, high = low + (1ll << BITS);
  return __builtin_expect(exact >= low && exact < high, 1);
}
LOOM_INLINE bool fits(const Program &p, i32 site, i64 exact) {
  if (is_integer<32, true>(exact)) return true;
  loom::found(p, site, OVERFLOW, -1, 0, exact, 0);
  return false;
}
// The lanes whose result does not fit: if W lanes are equally spaced, the first and the last decide whether any exist.
template <int BITS, bool SIGNED, int W> LOOM_INLINE u64 lanes_outside(i64 first, i64 last) {
  if (is_integer<BITS, SIGNED>(first) && is_integer<BITS, SIGNED>(last)) return 0;
  u64 outside = 0;
  for (i32 l = 0; l < W; ++l)
    outside |= (u64)!is_integer<BITS, SIGNED>(W > 1 ? first + (last - first) / (W - 1) * l : first) << l;
  return outside;
}
template <int BITS, bool SIGNED, class V> LOOM_INLINE u64 lanes_outside(V exact) {
  u64 outside = 0;
  for (i32 l = 0; l < lane<V>::count; ++l) outside |= (u64)!is_integer<BITS, SIGNED>(exact[l]) << l;
  return outside;
}
template <class M> LOOM_NOINLINE u64 lanes_on(M m) {
  u64 on = 0;
  for (i32 l = 0; l < lane<M>::count; ++l) on |= (u64)(m[l] != 0) << l;
  return on;
}
LOOM_INLINE u64 lanes_on(bool m) { return m ? ~0ull : 0; }
template <class F> __attribute__((cold)) LOOM_NOINLINE void overflows(const Program &p, i32 site, u64 lanes, F exact) {
  for (i32 l = 0; l < 64; ++l)
    if (lanes >> l & 1) loom::found(p, site, OVERFLOW, -1, 0, exact(l), 0);
}
LOOM_INLINE void keeps_promise(const Program &p, i32 site, bool kept, i64 value) {
  if (__builtin_expect(!kept, 0)) loom::found(p, site, PROMISE, -1, 0, value, 0);
}

template <class M> LOOM_INLINE void uses_undefined(const Program &p, i32 site, M lanes) {
  if (__builtin_expect(any(lanes), 0)) loom::found(p, site, UNDEFINED, -1, 0, 0, 0);
}

#ifdef LOOM_WITNESS_INSIDE
#include "witness_runtime.h"
#endif
