// The common part of instrumented kernels: compiled once for each LOOM_WITNESS and linked to them, or part of a
// kernel's own text if LOOM_WITNESS_INSIDE is defined.
#pragma once
#include "witness.h"
#include "order.h"

namespace loom {

LOOM_INLINE u64 sector_base(const Argument &a) { return a.low & ~31ull; }
static u64 sectors(const Argument &a) { return a.high > a.low ? (a.high - sector_base(a) + 31) / 32 : 0; }

LOOM_SHARED void found(const Program &p, i32 site, Kind kind, i32 argument, u64 address, i64 value, i64 other) {
  Finding &finding = p.worker->witness->findings[site * KINDS + kind];
  if (__atomic_fetch_add(&finding.count, 1, __ATOMIC_RELAXED)) return;
  __builtin_memcpy(finding.program, p.id, sizeof p.id);
  finding.argument = argument, finding.address = address, finding.value = value, finding.other = other;
}

// ---- is it an element of the argument? -------------------------------------------------------------------

// Whether n bytes from `offset` on are in one run of dimensions d, d + 1, ...
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
// A byte of the shadow stands for 8 bytes of memory. Fresh memory holds a pattern computed from its addresses; where
// the pattern is gone, something other than a kernel has written.

// Bytes from 0xA0 to 0xAF: not zero, one, or any small integer. The pattern repeats every 4096 words.
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

// ---- does another program touch it? ------------------------------------------------------------------------

LOOM_SHARED void begin_segment(Worker &own) {
  Guard guard(*own.witness);
  new_segment(own);
}

// Threads that access the same cells take turns, by stripes of memory.
constexpr u64 STRIPE = 4096, LOCKS = 256;

// ---- an access of n bytes ------------------------------------------------------------------------------------

template <Access ACCESS> LOOM_SHARED void check(const Program &p, i32 site, i32 argument, u64 address, i64 n) {
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

LOOM_SHARED void tally_sectors(Tally &t, u32 number, u64 from, u64 n) {
  for (u64 to = from + n; from < to;) {
    const u64 s = from / 32, end = s * 32 + 32 < to ? s * 32 + 32 : to;
    const u32 bytes = (end - from == 32 ? ~0u : (1u << (end - from)) - 1) << from % 32;
    if (t.program[s] != number) t.program[s] = number, ++t.sectors;
    if ((t.touched[s] & bytes) != bytes) __atomic_fetch_or(&t.touched[s], bytes, __ATOMIC_RELAXED);
    from = end;
  }
}

template <Access ACCESS, bool WHOLE>
LOOM_SHARED bool access_any(const Program &p, i32 site, i32 argument, u64 address, i64 n) {
  Witness &w = *p.worker->witness;
  if (const i32 number = argument < 0 ? number_of(p, address) : 0) {
    argument = number - 1;
    address -= (u64)number << NUMBER_BIT;
  }
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

// ---- lanes, one by one ---------------------------------------------------------------------------------------

template <class T>
LOOM_SHARED void load_lanes(const Program &p, i32 site, i32 argument, const i64 *address, const i32 *m, T *lanes,
                            i32 count) {
  for (i32 l = 0; l < count; ++l)
    if (m[l]) lanes[l] = access<LOAD, false>(p, site, argument, (T *)address[l], sizeof(T)) ? *bare(p, argument, (T *)address[l]) : T{};
}
template <class T>
LOOM_SHARED void store_lanes(const Program &p, i32 site, i32 argument, const i64 *address, const i32 *m,
                             const T *lanes, i32 count) {
  for (i32 l = 0; l < count; ++l)
    if (m[l] && access<STORE, false>(p, site, argument, (T *)address[l], sizeof(T)))
      *bare(p, argument, (T *)address[l]) = lanes[l];
}

// ---- atomics ---------------------------------------------------------------------------------------------------

LOOM_SHARED void acquire(Worker &own, u64 address, i32 order) {
  Witness &w = *own.witness;
  lock(w.lock);
  Clock *const handed = *release_at(w, address);
  if (order & ACQUIRE && handed) own.clock = merged(w, own.clock, handed), own.known_set = 0;
}
LOOM_SHARED void release(Worker &own, u64 address, i32 order) {
  Witness &w = *own.witness;
  if (order & RELEASE) {
    Clock *&handed = *release_at(w, address);
    own.clock = with(w, own.clock, own.number, own.segment);
    handed = merged(w, handed, own.clock);
    own.released = true;
  }
  unlock(w.lock);
}

// ---- a launch ----------------------------------------------------------------------------------------------

static u32 *take(char *&memory, u64 words) {
  u32 *const taken = (u32 *)memory;
  memory += (4 * words + 63) & ~63ull;
  return taken;
}

LOOM_SHARED void begin(Witness &w, i32 threads, i64 programs) {
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

LOOM_SHARED void end(Witness &w, i32 threads) {
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

LOOM_SHARED Worker *worker(Witness &w, i32 thread) { return w.workers + thread; }

// The sample of a dry launch's programs: the first, the last, and some in between along each axis of the grid.
static bool in_the_sample(const Program &p) {
  const i32 axes = (p.grid[0] > 1) + (p.grid[1] > 1) + (p.grid[2] > 1);
  const i32 most = axes <= 1 ? 4096 : axes == 2 ? 64 : 16;
  for (i32 d = 0; d < 3; ++d) {
    const i32 step = (p.grid[d] + most - 1) / most;
    if (p.id[d] % step && p.id[d] != p.grid[d] - 1) return false;
  }
  return true;
}
LOOM_SHARED bool enter(const Program &p, i64 position) {
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

#ifndef LOOM_WITNESS_INSIDE  // every function that a kernel may call

template void check<LOAD>(const Program &, i32, i32, u64, i64);
template void check<STORE>(const Program &, i32, i32, u64, i64);
template bool access_any<LOAD, true>(const Program &, i32, i32, u64, i64);
template bool access_any<LOAD, false>(const Program &, i32, i32, u64, i64);
template bool access_any<STORE, true>(const Program &, i32, i32, u64, i64);
template bool access_any<STORE, false>(const Program &, i32, i32, u64, i64);
template bool access_any<UPDATE, false>(const Program &, i32, i32, u64, i64);

#define LOOM_LANES(T)                                                                           \
  template void load_lanes(const Program &, i32, i32, const i64 *, const i32 *, T *, i32);      \
  template void store_lanes(const Program &, i32, i32, const i64 *, const i32 *, const T *, i32);
LOOM_LANES(u8)
LOOM_LANES(u16)
LOOM_LANES(u32)
LOOM_LANES(u64)

#endif

}  // namespace loom
