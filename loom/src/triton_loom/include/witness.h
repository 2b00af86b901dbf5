// What an instrumented kernel does at every access to memory. LOOM_WITNESS is a sum: 1 checks accesses, 2 counts them.
//
// An access that is checked must lie on an element of the tensor argument that its pointer came from, read only bytes
// that somebody has written, and touch no byte that another program of the launch writes (or writes a byte that
// another one touches) unless both do it atomically or atomics put one after the other. An access that is refused
// reads zeros or writes nothing, so a wrong kernel runs to its end and all of its mistakes are heard of.
#pragma once
#include "order.h"

namespace loom {

LOOM_INLINE u64 sector_base(const Argument &a) { return a.low & ~31ull; }
static u64 sectors(const Argument &a) { return a.high > a.low ? (a.high - sector_base(a) + 31) / 32 : 0; }

__attribute__((cold)) LOOM_NOINLINE void found(const Program &p, i32 site, Kind kind, i32 argument, u64 address,
                                               i64 value, i64 other) {
  Finding &finding = p.worker->witness->findings[site * KINDS + kind];
  if (__atomic_fetch_add(&finding.count, 1, __ATOMIC_RELAXED)) return;
  __builtin_memcpy(finding.program, p.id, sizeof p.id);
  finding.argument = argument, finding.address = address, finding.value = value, finding.other = other;
}

// ---- is it an element of the argument? -------------------------------------------------------------------

// Whether n bytes from `offset` on lie in one run of dimensions d, d + 1, ...
static bool in_a_run(const Argument &a, i32 d, i64 offset, i64 n) {
  if (d == a.rank) return offset >= 0 && offset + n <= a.run;
  i64 i = offset / a.stride[d];
  for (i = i < a.extent[d] ? i : a.extent[d] - 1; i >= 0; --i) {
    const i64 rest = offset - i * a.stride[d];
    if (rest + n > a.reach[d + 1]) return false;
    if (in_a_run(a, d + 1, rest, n)) return true;
  }
  return false;
}
LOOM_INLINE bool inside(const Argument &a, u64 address, i64 n) {
  const i64 offset = (i64)(address - a.low);
  if (offset < 0 || offset + n > (i64)(a.high - a.low)) return false;
  return a.rank == 0 || in_a_run(a, 0, offset, n);
}

// The argument that an access belongs to: known from the kernel's text, or else the one that has this address.
LOOM_INLINE i32 owner(const Witness &w, i32 argument, u64 address, i64 n) {
  if (argument >= 0) return argument;
  for (i32 i = 0; i < w.argument_count; ++i)
    if (inside(w.arguments[i], address, n)) return i;
  return -1;
}

// ---- has somebody written it? ----------------------------------------------------------------------------
// A byte of the shadow stands for 8 bytes of memory. Fresh memory holds a pattern made of its addresses; where the
// pattern is gone, something that is no kernel has written.

// Bytes from 0xA0 to 0xAF: no zero, no one, no small integer. It repeats every 4096 words.
LOOM_INLINE u64 poison(u64 address) {
  return (address >> 3 & 4095) * 0x9E3779B97F4A7C15ull >> 4 & 0x0F0F0F0F0F0F0F0Full | 0xA0A0A0A0A0A0A0A0ull;
}

static void find_writes_by_others(Shadow &s) {
  u8 *written = s.written;
  for (u64 word = s.low; word < s.high; word += 8, ++written) {
    if (*written == 0xFF) continue;
    u64 now = poison(word);
    __builtin_memcpy(&now, (void *)word, s.high - word < 8 ? s.high - word : 8);
    u64 strange = now ^ poison(word);
    for (int b = 0; *written && b < 8; ++b)
      if (*written >> b & 1) strange &= ~(0xFFull << 8 * b);
    if (s.grain == 8) *written = strange ? 0xFF : *written;
    else *written |= ((u32)strange ? 0x0F : 0) | (strange >> 32 ? 0xF0 : 0);
  }
}
LOOM_INLINE u8 bits_of_word(u64 word, u64 address, i64 n) {
  const i64 from = (i64)(address - word), to = from + n;
  return (u8)((to >= 8 ? 0xFF : (1 << to) - 1) & ~(from > 0 ? (1 << from) - 1 : 0));
}
LOOM_INLINE bool all_written(const Shadow &s, u64 address, i64 n) {
  if (address % 8 == 0 && n % 8 == 0) {
    u8 every = 0xFF;
    for (i64 i = 0; i < n / 8; ++i) every &= s.written[(address - s.low) / 8 + i];
    return every == 0xFF;
  }
  for (u64 word = address & ~7ull; word < address + n; word += 8) {
    const u8 wanted = bits_of_word(word, address, n);
    if ((s.written[(word - s.low) / 8] & wanted) != wanted) return false;
  }
  return true;
}
LOOM_INLINE void note_written(Shadow &s, u64 address, i64 n) {
  if (address % 8 == 0 && n % 8 == 0) {  // words of this access alone: no other thread's bits are in their bytes
    __builtin_memset(s.written + (address - s.low) / 8, 0xFF, n / 8);
    return;
  }
  for (u64 word = address & ~7ull; word < address + n; word += 8) {
    const u8 wanted = bits_of_word(word, address, n);
    u8 *byte = s.written + (word - s.low) / 8;
    if ((*byte & wanted) != wanted) __atomic_fetch_or(byte, wanted, __ATOMIC_RELAXED);
  }
}

// The steps after a release are a new segment. The lanes of one atomic release together, so they don't ask.
LOOM_INLINE void after_release(const Program &p) {
  if (__builtin_expect(p.worker->released, 0)) {
    Guard guard(*p.worker->witness);
    new_segment(*p.worker);
  }
}

// Threads that meet at the same cells take turns, by stripes of memory.
constexpr u64 STRIPE = 4096, LOCKS = 256;

// ---- an access of n bytes ------------------------------------------------------------------------------------

template <Access ACCESS> LOOM_NOINLINE void check(const Program &p, i32 site, i32 argument, u64 address, i64 n) {
  Witness &w = *p.worker->witness;
  const Argument &a = w.arguments[argument];
  if (a.shadow >= 0) {
    Shadow &s = w.shadows[a.shadow];
    if (ACCESS != STORE && !all_written(s, address, n)) {
      u64 first = address;
      while (all_written(s, first, 1)) ++first;
      found(p, site, UNWRITTEN, argument, first, 0, 0);
    }
    if (ACCESS != LOAD) note_written(s, address, n);
  }
  if (a.region >= 0) {
    Region &r = w.regions[a.region];
    if (ACCESS == LOAD && !r.loaded) return;
    if (ACCESS != UPDATE) after_release(p);
    for (u64 from = address, to; from < address + n; from = to) {  // the part in each stripe of memory
      to = (from / STRIPE + 1) * STRIPE < address + n ? (from / STRIPE + 1) * STRIPE : address + n;
      u64 where = 0;
      const u64 g = (from - r.low) >> r.shift, h = ((to - 1 - r.low) >> r.shift) + 1;
      Guard guard(w.locks[from / STRIPE % LOCKS]);
      if (const u32 other = collide<ACCESS>(*p.worker, r, g, h, where)) {
        const u64 at = r.low + (where << r.shift);
        found(p, site, RACE, argument, at > from ? at : from, 0, other & SEVERAL ? -1 : (i64)other - 1 - w.base);
      }
    }
  }
}

LOOM_NOINLINE void tally_sectors(Tally &t, u32 number, u64 from, u64 n) {
  for (u64 to = from + n; from < to;) {
    const u64 s = from / 32, end = s * 32 + 32 < to ? s * 32 + 32 : to;
    const u32 bytes = (end - from == 32 ? ~0u : (1u << (end - from)) - 1) << from % 32;
    if (t.program[s] != number) t.program[s] = number, ++t.sectors;
    if ((t.touched[s] & bytes) != bytes) __atomic_fetch_or(&t.touched[s], bytes, __ATOMIC_RELAXED);
    from = end;
  }
}
LOOM_INLINE void tally(const Program &p, Tally &t, u64 address, i64 n) {
  const u32 number = p.worker->number;
  const u64 from = address - t.sectors_low;
  t.requested += n;
  if (!t.touched) return;  // a bare address: nobody knows what is there
  // bits that fill a pair of bytes or a word need no care for what other threads add
  if (n == 32 && from % 32 == 0) t.touched[from / 32] = ~0u;
  else if (n == 16 && from % 16 == 0) ((u16 *)t.touched)[from / 16] = 0xFFFF;
  else return tally_sectors(t, number, from, n);
  u32 &program = t.program[from / 32];
  t.sectors += program != number;
  program = number;
}

// Whether the access may happen. A chunk (WHOLE) that may not is silent about it: its lanes ask one by one.
template <Access ACCESS, bool WHOLE>
LOOM_NOINLINE bool access_any(const Program &p, i32 site, i32 argument, u64 address, i64 n) {
  Witness &w = *p.worker->witness;
  argument = owner(w, argument, address, n);
  if (argument < 0 || !inside(w.arguments[argument], address, n)) {
    if (CHECKS && !WHOLE) found(p, site, ACCESS == LOAD ? LOAD_OUTSIDE : STORE_OUTSIDE, argument, address, 0, 0);
    return !CHECKS && !WHOLE;
  }
  Tally *t = p.worker->tallies + 2 * argument;
  if (COUNTS && ACCESS != STORE) tally(p, t[0], address, n);
  if (COUNTS && ACCESS != LOAD) tally(p, t[1], address, n);
  if (CHECKS && !w.dry) check<ACCESS>(p, site, argument, address, n);
  return !w.dry;
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

// ---- a launch ----------------------------------------------------------------------------------------------

static u32 *take(char *&memory, u64 words) {
  u32 *const taken = (u32 *)memory;
  memory += (4 * words + 63) & ~63ull;
  return taken;
}

static void begin(Witness &w, i32 threads, i64 programs) {
  const u64 tallies = 2 * w.argument_count;
  w.workers_memory = calloc(64 + threads * (sizeof(Worker) + tallies * sizeof(Tally)) + LOCKS * sizeof(i32), 1);
  w.workers = (Worker *)(((u64)w.workers_memory + 63) & ~63ull);
  for (i32 t = 0; t < threads; ++t) {
    w.workers[t].witness = &w;
    w.workers[t].tallies = (Tally *)(w.workers + threads) + t * tallies;
  }
  w.locks = (i32 *)((Tally *)(w.workers + threads) + threads * tallies);
  for (i32 i = 0; i < w.argument_count; ++i)
    for (i32 d = 0; d < 2; ++d) {
      Argument &a = w.arguments[i];
      const bool counted = COUNTS && !w.dry && (d ? a.stored : a.loaded);
      if (counted) {
        a.direction[d].touched = take(w.bits, sectors(a));
        __builtin_memset(a.direction[d].touched, 0, 4 * sectors(a));
      }
      for (i32 t = 0; t < threads; ++t) {
        Tally &tally = w.workers[t].tallies[2 * i + d];
        tally.low = a.low, tally.dense = a.rank == 0 && !w.dry ? (i64)(a.high - a.low) : 0;
        tally.watched = a.shadow >= 0 || a.region >= 0;
        tally.sectors_low = sector_base(a), tally.touched = a.direction[d].touched;
        tally.program = counted ? take(w.cells, sectors(a)) : nullptr;
      }
    }
  w.number = w.base + (u32)programs;
  if (!CHECKS || w.dry) return;
  for (i32 i = 0; i < w.region_count; ++i) {
    Region &r = w.regions[i];
    const u64 cells = ((r.high - r.low) >> r.shift) + 1;
    r.writer = take(w.cells, cells);
    r.reader = r.loaded ? take(w.cells, cells) : nullptr;
    r.updater = r.updated ? take(w.cells, cells) : nullptr;
  }
  for (i32 i = 0; i < w.shadow_count; ++i)
    if (w.shadows[i].loaded) find_writes_by_others(w.shadows[i]);
}

static void end(Witness &w, i32 threads) {
  for (i32 i = 0; i < w.argument_count; ++i)
    for (i32 d = 0; d < 2; ++d) {
      Direction &direction = w.arguments[i].direction[d];
      Traffic &total = direction.total;
      for (i32 t = 0; t < threads; ++t) {
        const Tally &tally = w.workers[t].tallies[2 * i + d];
        total.requested += tally.requested, total.program_sectors += 32 * tally.sectors;
      }
      for (u64 s = 0, n = direction.touched ? sectors(w.arguments[i]) : 0; s < n; ++s)
        if (const u32 bytes = direction.touched[s])
          total.distinct += __builtin_popcount(bytes), total.launch_sectors += 32;
    }
  for (i32 t = 0; t < threads; ++t) w.dot_flops += w.workers[t].dot_flops;
  while (Clock *clock = w.clocks) w.clocks = clock->made_before, free(clock);
  free(w.releases);
  free(w.actors);
  free(w.workers_memory);
}

static Worker *worker(Witness &w, i32 thread) { return w.workers + thread; }

// Of a dry launch's programs, the first, the last, and some spread between them along each axis of the grid.
static bool in_the_sample(const Program &p) {
  const i32 axes = (p.grid[0] > 1) + (p.grid[1] > 1) + (p.grid[2] > 1);
  const i32 most = axes <= 1 ? 4096 : axes == 2 ? 64 : 16;
  for (i32 d = 0; d < 3; ++d) {
    const i32 step = (p.grid[d] + most - 1) / most;
    if (p.id[d] % step && p.id[d] != p.grid[d] - 1) return false;
  }
  return true;
}
static bool enter(const Program &p, i64 position) {
  Worker &own = *p.worker;
  if (own.witness->dry && !in_the_sample(p)) return false;
  own.number = own.witness->base + 1 + (u32)position;
  own.clock = nullptr;
  own.segment = own.self = own.number;
  own.known_set = 0;
  if (CHECKS && own.witness->ordered) {
    Guard guard(*own.witness);
    new_segment(own);
  }
  return true;
}

}  // namespace loom

// ---- what generated code calls -------------------------------------------------------------------------------
// `site` and `argument` are numbers that the compiler knows; V is a chunk of memory, or one element.

template <class V> LOOM_NOINLINE V load_each(const Program &p, i32 site, i32 argument, like<V, i64> address, like<V, i32> m, V other) {
  typedef typename lane<V>::type T;
  T lanes[lane<V>::count];
  store(lanes, other);
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l]) lanes[l] = loom::access<loom::LOAD, false>(p, site, argument, (T *)address[l], sizeof(T)) ? *(T *)address[l] : T{};
  return load<V>(lanes);
}
template <class V> LOOM_INLINE V seen_load(const Program &p, i32 site, i32 argument, pointer_to<V> base, i64 step, like<V, i32> m, V other) {
  if (__builtin_expect(step == 1 && all(m), 1) && loom::access<loom::LOAD, true>(p, site, argument, base, sizeof(V)))
    return load<V>(base);
  return load_each<V>(p, site, argument, ramp<like<V, i64>>((i64)base, step * (i64)sizeof *base), m, other);
}
template <class T> LOOM_INLINE T seen_load_one(const Program &p, i32 site, i32 argument, const T *pointer, bool m, T other) {
  if (!m) return other;
  return loom::access<loom::LOAD, false>(p, site, argument, pointer, sizeof(T)) ? *pointer : T{};
}

template <class V> LOOM_NOINLINE void store_each(const Program &p, i32 site, i32 argument, like<V, i64> address, like<V, i32> m, V v) {
  typedef typename lane<V>::type T;
  for (int l = 0; l < lane<V>::count; ++l)
    if (m[l] && loom::access<loom::STORE, false>(p, site, argument, (T *)address[l], sizeof(T))) *(T *)address[l] = v[l];
}
template <class V> LOOM_INLINE void seen_store(const Program &p, i32 site, i32 argument, pointer_into<V> base, i64 step, like<V, i32> m, V v) {
  if (__builtin_expect(step == 1 && all(m), 1) && loom::access<loom::STORE, true>(p, site, argument, base, sizeof(V)))
    store(base, v);
  else
    store_each<V>(p, site, argument, ramp<like<V, i64>>((i64)base, step * (i64)sizeof *base), m, v);
}
template <class T> LOOM_INLINE void seen_store_one(const Program &p, i32 site, i32 argument, T *pointer, bool m, T v) {
  if (m && loom::access<loom::STORE, false>(p, site, argument, pointer, sizeof(T))) *pointer = v;
}

enum { RELAXED = 0, ACQUIRE = 1, RELEASE = 2 };

LOOM_INLINE void begin_atomic(const Program &p) {
  if (loom::CHECKS) loom::after_release(p);
}

// One indivisible update and, by its memory order, the start or the end of what other programs may rely on.
template <class T, class F>
LOOM_NOINLINE T seen_atomic(const Program &p, i32 site, i32 argument, T *pointer, bool m, i32 order, F update) {
  if (!m || !loom::access<loom::UPDATE, false>(p, site, argument, pointer, sizeof(T))) return T{};
  Witness &w = *p.worker->witness;
  if (!loom::CHECKS || !w.ordered || order == RELAXED) return update();
  loom::Guard guard(w);
  Worker &own = *p.worker;
  Clock **handed = loom::release_at(w, (u64)pointer);
  if (order & ACQUIRE && *handed) own.clock = loom::merged(w, own.clock, *handed), own.known_set = 0;
  const T old = update();
  if (order & RELEASE) {
    own.clock = loom::with(w, own.clock, own.number, own.segment);
    *handed = loom::merged(w, *handed, own.clock);
    own.released = true;
  }
  return old;
}

// Integers of 32 bits that offsets and loops are made of: the exact result must be one.
LOOM_INLINE bool fits(const Program &p, i32 site, i64 exact) {
  if (__builtin_expect(exact == (i32)exact, 1)) return true;
  loom::found(p, site, OVERFLOW, -1, 0, exact, 0);
  return false;
}
template <class V> LOOM_INLINE void fits_each(const Program &p, i32 site, V exact) {
  for (int l = 0; l < lane<V>::count; ++l) fits(p, site, exact[l]);
}
LOOM_INLINE void keeps_promise(const Program &p, i32 site, bool kept, i64 value) {
  if (__builtin_expect(!kept, 0)) loom::found(p, site, PROMISE, -1, 0, value, 0);
}
