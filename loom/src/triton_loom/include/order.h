// The order of the steps of a launch's programs, and so whether two accesses collide.
//
// If nothing orders the programs, a cell holds a program's number, or the last of several with a flag. If atomics do,
// releases cut a program's steps into segments. What a program has acquired is a list of the segments that are over,
// newest first; a cell of readers or updaters holds a set of segments. Lists share their tails.
#pragma once
#include "witness.h"

extern "C" void *calloc(unsigned long, unsigned long);
extern "C" void free(void *);

namespace loom {

LOOM_INLINE void lock(i32 &taken) {
  while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
LOOM_INLINE void unlock(i32 &taken) { __atomic_store_n(&taken, 0, __ATOMIC_RELEASE); }

struct Guard {
  i32 &taken;
  Guard(Witness &w) : Guard(w.lock) {}
  Guard(i32 &l) : taken(l) { lock(l); }
  ~Guard() { unlock(taken); }
};

}  // namespace loom

struct Clock {
  u32 program, segment;
  i64 length;
  Clock *rest, *made_before;
};
struct Release {  // what an atomic on this address publishes
  u64 address;
  Clock *clock;
};
struct Actor {  // the meaning of a number: a segment of a program, or a set of segments
  u32 program;        // of a segment
  u32 segment, rest;  // of a set: its newest segment, and the set of the others (0: none)
  u32 larger;         // of a set: the last one that was made of it by adding a segment
};

namespace loom {

constexpr u32 SEVERAL = 1u << 31;  // flag of a cell if nothing is ordered: this program and others

static bool holds(const Clock *clock, u32 program, u32 segment) {
  for (; clock; clock = clock->rest)
    if (clock->program == program && clock->segment >= segment) return true;
  return false;
}
static Clock *with(Witness &w, Clock *clock, u32 program, u32 segment) {
  if (clock && clock->program == program && clock->segment == segment) return clock;
  Clock *made = (Clock *)calloc(1, sizeof(Clock));
  *made = {program, segment, clock ? clock->length + 1 : 1, clock, w.clocks};
  return w.clocks = made;
}
static Clock *merged(Witness &w, Clock *a, Clock *b) {
  if ((a ? a->length : 0) > (b ? b->length : 0)) { Clock *c = a; a = b, b = c; }
  if (!a) return b;
  Clock *tail = b;
  while (tail->length > a->length) tail = tail->rest;
  if (tail == a) return b;
  for (Clock *c = a; c; c = c->rest)
    if (!holds(b, c->program, c->segment)) b = with(w, b, c->program, c->segment);
  return b;
}
static void *larger(void *old, u64 used, u64 size) {
  void *made = calloc(size, 1);
  __builtin_memcpy(made, old, used);
  free(old);
  return made;
}
static u32 new_actor(Witness &w, Actor actor) {
  const u64 place = ++w.number - w.base;
  if (place >= w.actor_capacity) {
    const u64 capacity = 2 * place + 1024;
    w.actors = (Actor *)larger(w.actors, w.actor_capacity * sizeof(Actor), capacity * sizeof(Actor));
    w.actor_capacity = capacity;
  }
  w.actors[place] = actor;
  return w.number;
}
LOOM_INLINE Actor &actor(const Witness &w, u32 number) { return w.actors[number - w.base]; }

static void new_segment(Worker &own) {
  Witness &w = *own.witness;
  own.released = false;
  own.segment = new_actor(w, {own.number, 0, 0, 0});
  own.self = new_actor(w, {0, own.segment, 0, 0});
}
static Clock **release_at(Witness &w, u64 address) {
  if (2 * w.release_count >= w.release_capacity) {
    Release *old = w.releases;
    const u64 count = w.release_capacity, capacity = count ? 4 * count : 64;
    w.releases = (Release *)calloc(capacity, sizeof(Release)), w.release_capacity = capacity, w.release_count = 0;
    for (u64 i = 0; i < count; ++i)
      if (old[i].address) *release_at(w, old[i].address) = old[i].clock;
    free(old);
  }
  u64 i = address / 4 * 0x9E3779B97F4A7C15ull >> 20;
  while (w.releases[i %= w.release_capacity].address && w.releases[i].address != address) ++i;
  w.release_count += !w.releases[i].address;
  w.releases[i].address = address;
  return &w.releases[i].clock;
}

// Whether everything that a segment did happened before the running program's next step.
static bool segment_is_over(const Worker &own, u32 segment) {
  if (segment <= own.witness->base || segment == own.segment) return true;
  const u32 program = actor(*own.witness, segment).program;
  return program == own.number || holds(own.clock, program, segment);
}
// The same question for everything that a cell names. Returns the number of a program for which it is false, or 0.
static u32 still_going(Worker &own, u32 cell, bool is_set) {
  const Witness &w = *own.witness;
  if ((cell & ~SEVERAL) <= w.base) return 0;
  if (!w.ordered) return cell == own.number ? 0 : cell;
  if (!is_set) return segment_is_over(own, cell) ? 0 : actor(w, cell).program;
  if (cell == own.known_set) return 0;
  for (u32 set = cell; set; set = actor(w, set).rest)
    if (!segment_is_over(own, actor(w, set).segment)) return actor(w, actor(w, set).segment).program;
  own.known_set = cell;
  return 0;
}
// A cell of readers or updaters, with the running program added. Those that are over are dropped: whatever comes
// after this program also comes after them.
static u32 with_me(Worker &own, u32 cell, bool over) {
  Witness &w = *own.witness;
  if (over) return own.self;
  if (!w.ordered) return own.number | SEVERAL;
  if (actor(w, cell).segment == own.segment) return cell;
  const u32 made_before = actor(w, cell).larger;
  if (made_before && actor(w, made_before).segment == own.segment) return made_before;
  const u32 made = new_actor(w, {0, own.segment, cell, 0});
  return actor(w, cell).larger = made;
}

// Records an access in cells g to h of a region; returns the program that it collides with, or 0.
template <Access ACCESS> static u32 collide_slowly(Worker &own, Region &r, u64 g, u64 h, u64 &where) {
  u32 other = 0;
  for (; g < h; ++g) {
    const u32 writer = still_going(own, r.writer[g], false);
    const u32 reader = r.loaded ? still_going(own, r.reader[g], true) : 0;
    const u32 updater = r.updated ? still_going(own, r.updater[g], true) : 0;
    const u32 hit = writer ? writer : ACCESS != LOAD && reader ? reader : ACCESS != UPDATE ? updater : 0;
    if (hit && !other) other = hit, where = g;
    if (ACCESS == LOAD) r.reader[g] = with_me(own, r.reader[g], !reader);
    if (ACCESS == STORE) r.writer[g] = own.segment;
    if (ACCESS == UPDATE) r.updater[g] = with_me(own, r.updater[g], !updater);
  }
  return other;
}
// Whether n cells hold nothing of this launch but accesses of `self`.
LOOM_INLINE bool untouched(const u32 *cells, u64 n, u32 base, u32 self) {
  bool strange = false;
  for (; n >= 16; n -= 16, cells += 16) {
    const u32x16 c = load<u32x16>(cells);
    strange |= any(mask((c > splat<u32x16>(base)) & (c != splat<u32x16>(self))));
  }
  for (; n; --n, ++cells) strange |= (*cells > base) & (*cells != self);
  return !strange;
}
template <Access ACCESS> static u32 collide(Worker &own, Region &r, u64 g, u64 h, u64 &where) {
  const u32 base = own.witness->base;
  if (ACCESS != UPDATE && untouched(r.writer + g, h - g, base, own.segment) &&
      (!r.loaded || untouched(r.reader + g, h - g, base, own.self)) &&
      (!r.updated || untouched(r.updater + g, h - g, base, own.self))) {
    u32 *cells = (ACCESS == LOAD ? r.reader : r.writer) + g;
    const u32 mine = ACCESS == LOAD ? own.self : own.segment;
    for (; h - g >= 16; g += 16, cells += 16) store(cells, splat<u32x16>(mine));
    for (; g < h; ++g, ++cells) *cells = mine;
    return 0;
  }
  if (own.witness->ordered) {
    Guard guard(*own.witness);
    return collide_slowly<ACCESS>(own, r, g, h, where);
  }
  return collide_slowly<ACCESS>(own, r, g, h, where);
}

}  // namespace loom
