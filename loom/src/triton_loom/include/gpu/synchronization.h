// Synchronization through global memory, by PTX's memory model (PTX ISA, "Memory Consistency Model").
//
// A release pattern on a location (st.release, atom.release, or a fence followed by a strong write) synchronizes with an
// acquire pattern (ld.acquire, atom.acquire, or a strong read followed by a fence) that reads what it wrote, directly or
// through a chain of atomic operations. Both must be morally strong: threads of different blocks need .gpu or .sys; .cta
// covers only the thread's own block. Relaxed operations order nothing. All that the releasing thread has done and knows
// by then comes before whatever the acquiring thread does next.
//
// A `Release` has the releasing thread and its clock. An acquire enters it into the history of its block; nothing is
// evaluated until an access meets one of another thread that it may race with. Then `has_acquired` walks the histories
// backward. The total order of fence.sc operations is not used: it is only decided at run time.
#pragma once
#include "clocks.h"

namespace gpu {

struct Release {
  u32 block;   // in the launch
  u32 thread;  // in the block
  Time time;   // accesses of the thread up to then are published
  u32 narrow;  // .cta: only within the block
};
// By a thread, or by `threads` neighbors in a warp, the first of which is `thread`: each acquires from the neighbor of the
// thread that its predecessor acquired from. Sums over whole tiles do that.
struct Acquire {
  Release from;
  u32 thread;
  Time time;
  u32 threads;
};

// Releases and acquires of a block's threads. A snapshot is a warp's knowledge of its block at a time: the warp, the time,
// and the time known of each warp.
struct History {
  Vec<Acquire> acquired;
  u32 entered;            // how many threads' acquires they are
  Vec<Acquire> unfenced;  // by relaxed reads, until their threads execute a fence
  Vec<Time> snapshots;
  u32 last_snapshot[WARPS];   // start of that of a warp, counted from 1
  Time last_acquired[WARPS];  // by a warp
  Acquire recent[8];          // the same is not entered again
};

// The releases of a location, if its last write does not have them all.
struct Location {
  u64 address;
  Vec<Release> releases;
};

struct Synchronization {
  History **histories;  // by block; null if there are none
  u64 blocks;
  Vec<Location> table;  // by address, a power of two of them
  u32 locations;
  struct Worker *holder;  // of the lock, see `Indivisible`
  u32 lock;
};

// ---- locks ----------------------------------------------------------------------------------------------

// A strong operation's effect on memory and its record are one atomic step if blocks run in parallel.
struct Indivisible {
  Synchronization *s = nullptr;

  LOOM_ALWAYS Indivisible(const Warp &w, bool needed) {
    if (__builtin_expect(needed && w.block->launch->workers > 1 && w.block->checks, 0)) enter(*w.block);
  }
  LOOM_ALWAYS ~Indivisible() {
    if (__builtin_expect(s != nullptr, 0)) leave();
  }
  __attribute__((noinline)) void enter(Block &b) {
    Synchronization &all = *b.synchronization;
    if (__atomic_load_n(&all.holder, __ATOMIC_RELAXED) == b.worker) return;
    while (__atomic_exchange_n(&all.lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
    __atomic_store_n(&all.holder, b.worker, __ATOMIC_RELAXED);
    s = &all;
  }
  __attribute__((noinline)) void leave() {
    __atomic_store_n(&s->holder, (Worker *)nullptr, __ATOMIC_RELAXED);
    __atomic_store_n(&s->lock, 0, __ATOMIC_RELEASE);
  }
};

// ---- histories ------------------------------------------------------------------------------------------

LOOM_NOINLINE void begin_history(Block &b) {
  Synchronization &s = *b.synchronization;
  if (!s.histories) s.histories = (History **)calloc(s.blocks, sizeof(History *));
  s.histories[b.linear] = b.history = (History *)allocate(sizeof(History));
}
LOOM_INLINE History &history_of(Block &b) {
  if (__builtin_expect(!b.history, 0)) begin_history(b);
  return *b.history;
}

static void end_synchronization(Synchronization &s) {
  for (u64 k = 0; s.histories && k < s.blocks; ++k)
    if (History *h = s.histories[k]) {
      h->acquired.release(), h->unfenced.release(), h->snapshots.release();
      free(h);
    }
  free(s.histories);
  for (Location &l : s.table) l.releases.release();
  s.table.release();
  s = {};
}

// Saves the warp's current knowledge of its block for later queries.
static void keep_snapshot(const Warp &w) {
  History &h = history_of(*w.block);
  const u32 warps = w.block->warp_count, last = h.last_snapshot[w.number];
  const Time *known = w.clocks->known;
  bool same = last != 0;
  for (u32 k = 0; same && k < warps; ++k) same = h.snapshots[last + 1 + k] == known[k];
  if (same) return;
  h.last_snapshot[w.number] = h.snapshots.count + 1;
  h.snapshots.push(w.number);
  h.snapshots.push(w.clocks->own);
  for (u32 k = 0; k < warps; ++k) h.snapshots.push(known[k]);
}
// The latest snapshot of a warp that is not later than a time: the times known of each warp.
static const Time *snapshot_at(const History &h, u32 warps, u32 warp, Time time) {
  for (u32 end = h.snapshots.count; end; end -= warps + 2) {
    const Time *s = h.snapshots.data + end - (warps + 2);
    if (s[0] == warp && s[1] <= time) return s + 2;
  }
  return nullptr;
}

LOOM_INLINE void enter_acquire(History &h, const Acquire &a) {
  if (h.acquired.count) {
    Acquire &last = h.acquired.data[h.acquired.count - 1];
    const u32 next = last.thread + last.threads;
    const bool beside = a.thread == next && next % LANES && a.time == last.time && a.from.block == last.from.block &&
                        a.from.thread == last.from.thread + last.threads && a.from.thread % LANES &&
                        a.from.time == last.from.time && a.from.narrow == last.from.narrow;
    if (beside) {
      ++last.threads, ++h.entered;
      return;
    }
  }
  Acquire &recent = h.recent[(a.from.block + a.from.thread + a.thread) % 8];
  const bool again = recent.time && recent.thread == a.thread && recent.from.block == a.from.block &&
                     recent.from.thread == a.from.thread && recent.from.time >= a.from.time;
  if (again) return;
  recent = a;
  h.acquired.push(a);
  ++h.entered;
  h.last_acquired[a.thread / LANES] = a.time;
}

// ---- locations ------------------------------------------------------------------------------------------

static Location &location_at(Synchronization &s, u64 address) {
  if (2 * s.locations >= s.table.count) {
    Vec<Location> old = s.table;
    s.table = {};
    for (u32 k = 0; k < (old.count ? 2 * old.count : 64); ++k) s.table.push({});
    s.locations = 0;
    for (Location &l : old)
      if (l.address) location_at(s, l.address).releases = l.releases;
    old.release();
  }
  for (u32 at = (u32)(address * 0x9E3779B97F4A7C15ull >> 32);; ++at) {
    Location &l = s.table[at & (s.table.count - 1)];
    if (l.address == address) return l;
    if (l.address) continue;
    l.address = address, ++s.locations;
    return l;
  }
}

// ---- what one knows -------------------------------------------------------------------------------------

// Knowledge of a warp: accesses of all of its lanes up to a time, and of some lanes up to another.
struct KnownWarp {
  Time all, some;
  u32 lanes;
};
struct KnownBlock {
  u32 block;
  bool waiting;  // to be processed: something was added
  u32 seen;      // of its acquires, when it was last processed
  KnownWarp warps[];

  bool covers(u32 thread, Time time) const {
    const KnownWarp &k = warps[thread / LANES];
    return time <= k.all || (k.lanes >> thread % LANES & 1 && time <= k.some);
  }
};

// All that a block, a warp of it or a lane has learned by acquiring, as far as it was processed.
struct Closure {
  Vec<KnownBlock *> blocks;
  Vec<u32> table;    // by block, a power of two: its place among `blocks`, counted from 1
  Vec<u32> waiting;  // positions of blocks to be processed
  KnownBlock *last;  // queried
  u32 lane;          // whose it is, if it is a lane's
};
struct Closures {
  Closure of_block, of_warp[WARPS], of_lane[WARPS];
};

static void clear(Closure &c) {
  for (KnownBlock *known : c.blocks) free(known);
  c.blocks.clear(), c.table.clear(), c.waiting.clear();
  c.last = nullptr;
}
static void release(Closure &c) {
  clear(c);
  c.blocks.release(), c.table.release(), c.waiting.release();
}
template <class F> LOOM_INLINE void each_closure(Block &b, F f) {
  if (!b.closures) return;
  f(b.closures->of_block);
  for (u32 k = 0; k < b.warp_count; ++k) f(b.closures->of_warp[k]), f(b.closures->of_lane[k]);
}
static void begin_closures(Block &b) {
  each_closure(b, clear);
  b.history = nullptr;
}
static void release_closures(Block &b) {
  each_closure(b, release);
  free(b.closures);
}

static u32 *slot_of(Closure &c, u32 block) {
  u32 at = block * 0x9E3779B9u;
  for (;; ++at) {
    u32 *slot = &c.table[at & (c.table.count - 1)];
    if (!*slot || c.blocks[*slot - 1]->block == block) return slot;
  }
}
static KnownBlock *find_known(Closure &c, u32 block) {
  if (!c.table.count) return nullptr;
  const u32 place = *slot_of(c, block);
  return place ? c.blocks[place - 1] : nullptr;
}
LOOM_INLINE bool is_known(Closure &c, u32 block, u32 thread, Time time) {
  if (!c.last || c.last->block != block) c.last = find_known(c, block);
  return c.last && (thread == NOBODY || c.last->covers(thread, time));
}
static KnownBlock &known_block(Closure &c, u32 block, u32 warps) {
  if (2 * c.blocks.count >= c.table.count) {
    const u32 count = c.table.count ? 2 * c.table.count : 16;
    c.table.clear();
    for (u32 k = 0; k < count; ++k) c.table.push(0);
    for (u32 k = 0; k < c.blocks.count; ++k) *slot_of(c, c.blocks[k]->block) = k + 1;
  }
  u32 *slot = slot_of(c, block);
  if (!*slot) {
    KnownBlock *known = (KnownBlock *)calloc(1, sizeof(KnownBlock) + warps * sizeof(KnownWarp));
    known->block = block;
    c.blocks.push(known);
    *slot = c.blocks.count;
  }
  return *c.blocks[*slot - 1];
}
static void look_at(Closure &c, KnownBlock &known) {
  if (known.waiting) return;
  known.waiting = true;
  c.waiting.push(*slot_of(c, known.block));
}

// Adds knowledge of a block: of its warps, and of a thread.
static void add_known(Closure &c, KnownBlock &known, const Time *times, u32 warps, u32 thread, Time time) {
  bool more = false;
  for (u32 k = 0; times && k < warps; ++k)
    if (times[k] > known.warps[k].all) known.warps[k].all = times[k], more = true;
  if (thread != NOBODY && !known.covers(thread, time)) {
    KnownWarp &k = known.warps[thread / LANES];
    // If there are several lanes at several times, the latest stands for all of them.
    k.lanes |= 1u << thread % LANES;
    k.some = time > k.some ? time : k.some;
    more = true;
  }
  if (more) look_at(c, known);
}

// Adds what the known threads have acquired. Ends as soon as the answer to the question is yes.
static bool spread(Synchronization &s, Closure &c, u32 warps, u32 block, u32 thread, Time time) {
  for (u32 first = 0; first < c.waiting.count; ++first) {
    KnownBlock &known = *c.blocks[c.waiting[first] - 1];
    known.waiting = false;
    const History *h = s.histories[known.block];
    for (u32 k = h ? h->acquired.count : 0; k-- > 0;) {
      const Acquire &a = h->acquired[k];
      const History *other = s.histories[a.from.block];
      for (u32 n = 0; n < a.threads; ++n) {
        if (!known.covers(a.thread + n, a.time)) continue;
        const Time *times = other ? snapshot_at(*other, warps, a.from.thread / LANES, a.from.time) : nullptr;
        add_known(c, known_block(c, a.from.block, warps), times, warps, a.from.thread + n, a.from.time);
      }
    }
    known.seen = h ? h->entered : 0;
    if (is_known(c, block, thread, time)) {
      c.waiting.count -= first + 1;
      for (u32 k = 0; k < c.waiting.count; ++k) c.waiting[k] = c.waiting[k + first + 1];
      return true;
    }
  }
  c.waiting.clear();
  return false;
}

// The start of a closure: knowledge of the block itself, and of a thread of it.
static bool knows(Block &b, Closure &c, const Time *times, u32 self, Time now, u32 block, u32 thread, Time time) {
  if (is_known(c, block, thread, time)) return true;
  Synchronization &s = *b.synchronization;
  KnownBlock &own = known_block(c, (u32)b.linear, b.warp_count);
  add_known(c, own, times, b.warp_count, self, now);
  if (own.seen != s.histories[b.linear]->entered) look_at(c, own);
  return spread(s, c, b.warp_count, block, thread, time);
}

// Whether a lane has acquired what a thread did at a time, or (thread NOBODY) anything at all of a block. Mostly all warps
// know it, because a barrier followed the acquire.
__attribute__((cold)) LOOM_NOINLINE bool has_acquired(const Warp &w, u32 lane, u32 block, u32 thread, Time time) {
  Block &b = *w.block;
  const Indivisible guard(w, true);
  Synchronization &s = *b.synchronization;
  if (!s.histories || !s.histories[b.linear] || !s.histories[b.linear]->acquired.count) return false;
  if (!b.closures) b.closures = (Closures *)allocate(sizeof(Closures));
  Closures &c = *b.closures;
  if (is_known(c.of_block, block, thread, time)) return true;
  Time common[WARPS];
  for (u32 k = 0; k < b.warp_count; ++k) {
    common[k] = b.warps[0].clocks->known[k];
    for (u32 n = 1; n < b.warp_count; ++n)
      if (const Time known = b.warps[n].clocks->known[k]; known < common[k]) common[k] = known;
  }
  if (knows(b, c.of_block, common, NOBODY, 0, block, thread, time)) return true;
  const Time *known = w.clocks->known;
  if (knows(b, c.of_warp[w.number], known, NOBODY, 0, block, thread, time)) return true;
  if (s.histories[b.linear]->last_acquired[w.number] <= known[w.number]) return false;
  Closure &own = c.of_lane[w.number];
  if (own.lane != lane) clear(own), own.lane = lane;
  return knows(b, own, known, w.thread(lane), w.clocks->own, block, thread, time);
}

}  // namespace gpu
