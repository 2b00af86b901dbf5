// The shadow of global memory: races between the threads of a block, and between the blocks of a launch.
//
// The shadow keeps the last write and the last read of each 4-byte word: by which block, when, by which thread; if several
// blocks have read it, also the one with the lowest number. Blocks are numbered through all launches of the process, so
// that nothing has to be cleared in between. Two accesses of different blocks, one of which writes, race unless a release
// and an acquire order them (synchronization.h), or both are strong and of a scope that includes the other: relaxed atomics
// on one word do not race with each other, and order nothing else. Blocks that store the same value race as well; threads
// of one block do not, because Triton lets all owners of a replicated value store it.
//
// Most accesses are to 16 aligned bytes. As long as a launch accesses such a line as a whole, it has one cell like that of
// a word; the first other access during the launch splits it, and from then on its four words have cells.
#pragma once
#include "shadow.h"
#include "synchronization.h"

namespace gpu {

struct Cell {
  u32 block;  // its number among all blocks ever
  u32 when;   // time, and in the low four bits which bytes of the word
  u32 who;    // instruction and thread
  u32 first;  // of a read: the first of several blocks, see `first_reader`; of a write: what kind it was, of `Written`
};
enum Written : u32 {
  STRONG = 1,
  STRONG_IN_BLOCK = 2,  // of a scope that ends at the block
  RELEASED = 4,         // the write itself is a release
  RELEASES_LISTED = 8,  // releases that it hands on are listed at its location
};
constexpr u32 THREAD_BITS = 10;

// The block with the lowest number in the launch that has read a word, and in the high four bits which bytes it has read:
// rows of bf16 may end in the middle of a word, whose halves belong to two blocks. Blocks from the limit on share a number;
// races between them are not detected.
constexpr u32 FIRST_LIMIT = (1u << 28) - 1;
LOOM_INLINE u32 first_reader(u64 linear, u32 bytes) {
  return (u32)(linear < FIRST_LIMIT ? linear : FIRST_LIMIT) | bytes << 28;
}
LOOM_INLINE u32 block_of(u32 first) { return first & FIRST_LIMIT; }
LOOM_INLINE u32 bytes_of(u32 first) { return first >> 28; }
// Merges two readers of a word.
LOOM_INLINE u32 earlier_reader(u32 one, u32 other) {
  return block_of(one) == block_of(other) ? one | other : block_of(one) < block_of(other) ? one : other;
}
// Strong reads leave it unchanged: they need no order to the strong writes that most such words have.
constexpr u32 NO_READER = FIRST_LIMIT;
LOOM_INLINE u32 who(u32 instruction, u32 thread) { return instruction << THREAD_BITS | thread; }

constexpr u64 PAGE = 1 << 16, WORDS = PAGE / 4, LINES = PAGE / 16, TABLE = 1 << 14;

struct Page {
  u64 key;  // of the address, counted from 1
  Cell *writes, *reads;            // of words
  Cell *line_writes, *line_reads;  // of lines
  u32 *split;                      // of lines: the first block of the launch that has split it
};
// Everything here is shared by the workers; a page is entered once and stays until the table is emptied between launches.
struct GlobalShadow {
  Page pages[TABLE];
  u32 used;
  u32 lock;
  u32 next_block;  // the number of the first block of the next launch
  Synchronization synchronization;  // of the launch
};

static void begin_global_shadow(Launch &launch) {
  static GlobalShadow process;  // launches of a process are one after another
  GlobalShadow &g = process;
  launch.global_shadow = &g;
  const u64 blocks = (u64)launch.grid[0] * launch.grid[1] * launch.grid[2];
  if (g.used > TABLE / 4 || g.next_block == 0 || g.next_block + blocks > 0xFFFF0000u) {
    for (Page &page : g.pages) {
      free(page.writes);
      page = {};
    }
    g.used = 0, g.next_block = 1;
  }
  launch.first_block = g.next_block;
  g.next_block += (u32)blocks;
  g.synchronization.blocks = blocks;
}
static void end_global_shadow(Launch &launch) { end_synchronization(launch.global_shadow->synchronization); }

LOOM_NOINLINE Page *find_page(GlobalShadow &g, u64 key) {
  u32 at = (u32)(key * 0x9E3779B97F4A7C15ull >> 50);
  for (u32 tries = 0; tries < TABLE / 2; ++tries, at = (at + 1) % TABLE) {
    Page &page = g.pages[at];
    const u64 have = __atomic_load_n(&page.key, __ATOMIC_ACQUIRE);
    if (have == key) return &page;
    if (have) continue;
    while (__atomic_exchange_n(&g.lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
    if (!page.key) {
      page.writes = (Cell *)calloc(2 * WORDS + 2 * LINES + LINES / 4, sizeof(Cell));
      page.reads = page.writes + WORDS;
      page.line_writes = page.reads + WORDS;
      page.line_reads = page.line_writes + LINES;
      page.split = (u32 *)(page.line_reads + LINES);
      ++g.used;
      __atomic_store_n(&page.key, key, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&g.lock, 0, __ATOMIC_RELEASE);
    if (page.key == key) return &page;
  }
  return nullptr;  // the table is full: this memory is not watched
}
LOOM_INLINE Page *page_of(Worker &worker, u64 address) {
  const u64 key = address / PAGE + 1;
  if (worker.last_page && worker.last_page->key == key) return worker.last_page;
  Page *page = find_page(*worker.launch->global_shadow, key);
  if (page) worker.last_page = page;
  return page;
}

// Called before cells of words are used. Cells from earlier launches mean nothing.
LOOM_INLINE void split_line(Page &page, u32 word, u32 begun) {
  const u32 line = word / 4;
  if (__builtin_expect(page.split[line] == begun, 1)) return;
  page.split[line] = begun;
  const Cell written = page.line_writes[line], read = page.line_reads[line];
  for (u32 k = 4 * line; k < 4 * line + 4; ++k) {
    if (written.block >= begun) page.writes[k] = written;
    if (read.block >= begun) page.reads[k] = read;
  }
}

// ---- is it known? ---------------------------------------------------------------------------------------

LOOM_INLINE u32 thread_of(const Cell &c) { return c.who & ((1u << THREAD_BITS) - 1); }
LOOM_INLINE bool comes_after(const Warp &w, u32 lane, const Cell &c, u32 block) {
  const Block &b = *w.block;
  const u32 begun = b.launch->first_block;
  if (c.block < begun) return true;
  const u32 thread = thread_of(c);
  if (c.block == block && (c.when >> 4 <= w.clocks->known[thread / LANES] || thread == w.thread(lane))) return true;
  return has_acquired(w, lane, c.block - begun, thread, c.when >> 4);
}

__attribute__((cold)) LOOM_NOINLINE void report_global_race(Warp &w, u32 instruction, u32 lane, const Cell &c,
                                                            u32 other_block, u64 address) {
  Block &b = *w.block;
  const Launch &launch = *b.launch;
  const u64 linear = other_block - launch.first_block;
  const u32 id[3] = {(u32)(linear % launch.grid[0]), (u32)(linear / launch.grid[0] % launch.grid[1]),
                     (u32)(linear / launch.grid[0] / launch.grid[1])};
  const bool same_who = other_block == c.block;
  const u32 other_thread = same_who ? thread_of(c) : NOBODY;
  Finding f = {GLOBAL_RACE, instruction, c.who >> THREAD_BITS, w.thread(lane), other_thread, {}, {}, address, 1, b.linear};
  __builtin_memcpy(f.block, b.id, sizeof b.id);
  __builtin_memcpy(f.other_block, id, sizeof id);
  // It is one race, whichever access came second here: the later block is named first, or the later instruction.
  if (linear > b.linear || (linear == b.linear && f.other_instruction > f.instruction)) {
    f.order = linear;
    f.instruction = c.who >> THREAD_BITS, f.other_instruction = instruction;
    f.thread = other_thread, f.other_thread = w.thread(lane);
    __builtin_memcpy(f.block, id, sizeof id);
    __builtin_memcpy(f.other_block, b.id, sizeof b.id);
  }
  report(b, f);
}

// ---- one access -----------------------------------------------------------------------------------------

// The bytes of a word that an access from `address` to `end` covers.
LOOM_INLINE u32 bytes_in_word(u64 word, u64 address, u64 end) {
  const u32 from = address > word ? (u32)(address - word) : 0, to = end < word + 4 ? (u32)(end - word) : 4;
  return ((1u << to) - 1) & ~((1u << from) - 1);
}

LOOM_INLINE void read_word(Warp &w, const Instruction &i, u32 lane, Page &page, u64 word, u32 bytes, u32 block) {
  const u32 at = (u32)(word % PAGE / 4);
  const Cell written = page.writes[at];
  if (__builtin_expect(!comes_after(w, lane, written, block) && written.when & bytes, 0))
    report_global_race(w, i.number, lane, written, written.block, word);
  Cell &read = page.reads[at];
  const u32 own = first_reader(w.block->linear, bytes);
  const u32 first = read.block < w.block->launch->first_block ? own : earlier_reader(read.first, own);
  read = {block, w.clocks->own << 4 | bytes, who(i.number, w.thread(lane)), first};
}

// Whether another block, of which nothing is known, has read it; if so, the one with the lowest number.
LOOM_INLINE bool read_by_others(const Warp &w, u32 lane, const Cell &read) {
  const Block &b = *w.block;
  if (read.block < b.launch->first_block || block_of(read.first) == block_of(first_reader(b.linear, 0))) return false;
  return bytes_of(read.first) && !has_acquired(w, lane, block_of(read.first), NOBODY, 0);
}

// `data(lane)` is what a lane of this instruction stores into the word.
template <class F>
LOOM_INLINE void write_word(Warp &w, const Instruction &i, u32 lane, Page &page, u64 word, u32 bytes, u32 block, F data) {
  const u32 at = (u32)(word % PAGE / 4);
  Cell &written = page.writes[at], &read = page.reads[at];
  const u32 begun = w.block->launch->first_block;
  const bool others_read = read_by_others(w, lane, read);
  if (__builtin_expect(!comes_after(w, lane, written, block) || !comes_after(w, lane, read, block) || others_read, 0)) {
    auto changed = [&](const u8 *before) LOOM_ALWAYS {
      u32 result = 0;
      for (u32 k = 0; k < 4; ++k)
        if (bytes >> k & 1 && before[k] != data(lane)[k]) result |= 1u << k;
      return result;
    };
    auto races = [&](const Cell &c) LOOM_ALWAYS {
      if (comes_after(w, lane, c, block)) return false;
      if (c.block != block) return (c.when & bytes) != 0;
      // Another block may have written since a lane of this instruction did, so that memory tells nothing about the two.
      const u32 thread = thread_of(c);
      const bool together = c.who >> THREAD_BITS == i.number && thread / LANES == w.number;
      return (c.when & changed(together ? data(thread % LANES) : (const u8 *)word)) != 0;
    };
    if (races(written)) {
      report_global_race(w, i.number, lane, written, written.block, word);
      if (written.block < block) return;
    } else if (races(read)) {
      report_global_race(w, i.number, lane, read, read.block, word);
    } else if (others_read && bytes_of(read.first) & bytes) {
      report_global_race(w, i.number, lane, read, begun + block_of(read.first), word);
    } else if (!changed((const u8 *)word)) {
      return;
    }
  } else if (bytes == 15 && read.block >= begun) {
    read.block = 0;  // whatever comes after this write comes after those reads
  }
  written = {block, w.clocks->own << 4 | bytes, who(i.number, w.thread(lane)), 0};
}

template <class F> LOOM_INLINE void each_word(Warp &w, u64 address, u32 bytes, F f) {
  const u64 end = address + bytes;
  for (u64 word = address & ~3ull; word < end; word += 4) {
    Page *page = page_of(*w.block->worker, word);
    if (!page) continue;
    split_line(*page, (u32)(word % PAGE / 4), w.block->launch->first_block);
    f(*page, word, bytes_in_word(word, address, end));
  }
}

// ---- what the lanes of an instruction do ----------------------------------------------------------------

LOOM_INLINE u32 number_of(const Block &b) { return b.launch->first_block + (u32)b.linear; }
// The common case: whole words that nobody has touched during this launch, with one entry for all of them. With READS,
// others may have read them before; the first reader stays known.
template <u32 COUNT, bool READS>
LOOM_INLINE bool enter_cells(Cell *writes, Cell *reads, u32 at, u32 begun, u32 block, u32 own, u32 when, u32 by) {
  bool written = false, read = false;
  for (u32 k = 0; k < COUNT; ++k) written |= writes[at + k].block >= begun, read |= reads[at + k].block >= begun;
  if (__builtin_expect(written, 0)) return false;
  if (!READS && read) return false;
  const Cell cell = {block, when, by, READS ? own : 0};
  Cell *to = READS ? reads : writes;
  if (!read) {
    for (u32 k = 0; k < COUNT; ++k) to[at + k] = cell;
  } else {
    for (u32 k = 0; k < COUNT; ++k) {
      const bool stale = reads[at + k].block < begun;
      reads[at + k] = {block, when, by, stale ? own : earlier_reader(reads[at + k].first, own)};
    }
  }
  return true;
}

// COUNT words: a line, if there are four of them.
template <u32 COUNT, bool READS>
LOOM_INLINE bool enter_untouched(Page &page, u32 at, u32 begun, u32 block, u32 own, u32 when, u32 by) {
  if constexpr (COUNT == 4) {
    if (page.split[at / 4] == begun) return false;
    return enter_cells<1, READS>(page.line_writes, page.line_reads, at / 4, begun, block, own, when, by);
  } else {
    split_line(page, at, begun);
    return enter_cells<COUNT, READS>(page.writes, page.reads, at, begun, block, own, when, by);
  }
}

// The page that all lanes access, if it is a single one and they access whole words (or whole lines, if requested).
LOOM_INLINE Page *one_page(Warp &w, const u64 *address, u32 bytes, u32 lanes) {
  const Extent e = extent_of(address, lanes);
  if (e.bits & (bytes - 1) || e.low / PAGE != (e.high + bytes - 1) / PAGE) return nullptr;
  return page_of(*w.block->worker, e.low);
}

template <u32 COUNT>
LOOM_INLINE void read_words(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  const u32 block = number_of(*w.block), begun = w.block->launch->first_block, when = w.clocks->own << 4 | 15;
  Page *page = COUNT && lanes ? one_page(w, address, bytes, lanes) : nullptr;
  const u32 by = who(i.number, w.thread(0)), own = first_reader(w.block->linear, 15);
  GPU_EACH_LANE(lanes, lane) {
    const u32 at = (u32)(address[lane] % PAGE / 4);
    if (COUNT && page && enter_untouched<COUNT, true>(*page, at, begun, block, own, when, by + lane)) continue;
    each_word(w, address[lane], bytes, [&](Page &page, u64 word, u32 which) LOOM_ALWAYS {
      read_word(w, i, lane, page, word, which, block);
    });
  }
}
LOOM_NOINLINE void read_global_strongly(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes);
LOOM_NOINLINE void read_global(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  if (__builtin_expect(i.flags & ATOMIC, 0)) return read_global_strongly(w, i, address, bytes, lanes);
  switch (bytes) {
    case 4: return read_words<1>(w, i, address, bytes, lanes);
    case 8: return read_words<2>(w, i, address, bytes, lanes);
    case 16: return read_words<4>(w, i, address, bytes, lanes);
    default: return read_words<0>(w, i, address, bytes, lanes);
  }
}

// Lane by lane, each store before the next check: two lanes may access the same bytes.
template <u32 COUNT>
LOOM_INLINE void write_words(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride, u32 bytes,
                             u32 lanes) {
  const u32 block = number_of(*w.block), begun = w.block->launch->first_block, when = w.clocks->own << 4 | 15;
  Page *page = COUNT && lanes ? one_page(w, address, bytes, lanes) : nullptr;
  const u32 by = who(i.number, w.thread(0));
  GPU_EACH_LANE(lanes, lane) {
    const u8 *from = data + lane * stride;
    const u32 at = (u32)(address[lane] % PAGE / 4);
    if (!(COUNT && page && enter_untouched<COUNT, false>(*page, at, begun, block, 0, when, by + lane)))
      each_word(w, address[lane], bytes, [&](Page &page, u64 word, u32 which) LOOM_ALWAYS {
        write_word(w, i, lane, page, word, which, block,
                   [&](u32 k) LOOM_ALWAYS { return data + k * stride + (i64)(word - address[k]); });
      });
    __builtin_memcpy((u8 *)address[lane], from, COUNT ? 4 * COUNT : bytes);
  }
}
LOOM_NOINLINE void write_global_strongly(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                           u32 bytes, u32 lanes);
LOOM_NOINLINE void write_global(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride, u32 bytes,
                                u32 lanes) {
  if (__builtin_expect(i.flags & ATOMIC, 0)) return write_global_strongly(w, i, address, data, stride, bytes, lanes);
  u32 &storing = w.block->launch->storing[i.number * WARPS + w.number];
  if (__builtin_expect(lanes & ~storing, 0)) __atomic_fetch_or(&storing, lanes, __ATOMIC_RELAXED);
  switch (bytes) {
    case 4: return write_words<1>(w, i, address, data, stride, bytes, lanes);
    case 8: return write_words<2>(w, i, address, data, stride, bytes, lanes);
    case 16: return write_words<4>(w, i, address, data, stride, bytes, lanes);
    default: return write_words<0>(w, i, address, data, stride, bytes, lanes);
  }
}

// ---- strong operations ----------------------------------------------------------------------------------

// Relaxed or stronger loads and stores, and atomic operations. The memory model is described in synchronization.h.
struct StrongAccess {
  Warp &w;
  const Instruction &i;
  const u32 lane;
  const bool reads, writes;

  bool acquires() const { return i.flags & ACQUIRES; }
  bool releases() const { return i.flags & RELEASES; }
  bool narrow() const { return i.flags & NARROW; }
  u32 block() const { return (u32)w.block->linear; }
  // Whether a strong operation of a block has a scope that includes this one, and this one's the block.
  bool is_strong_with(u32 number, bool its_narrow) const {
    return number == number_of(*w.block) || (!narrow() && !its_narrow);
  }
  bool is_strong_with_write(const Cell &c) const {
    return c.first & STRONG && is_strong_with(c.block, c.first & STRONG_IN_BLOCK);
  }
  bool is_strong_with_read(const Cell &c) const {
    const u32 flags = w.block->launch->instructions[c.who >> THREAD_BITS].flags;
    return flags & ATOMIC && is_strong_with(c.block, flags & NARROW);
  }

  bool is_own(const Release &r) const { return r.block == block() && r.thread == w.thread(lane); }
  Release release_of(const Cell &c) const {
    return {c.block - w.block->launch->first_block, thread_of(c), c.when >> 4, c.first & STRONG_IN_BLOCK};
  }

  LOOM_ALWAYS void word(Page &page, u64 word, u32 which);
  u32 hand_on(const Cell &written, u64 location);
  u32 hand_on_lists(const Cell &written, u64 location);
  void acquire(const Release &from);
};

// Acquires a release that this access reads from, directly or through others: at once, or at the thread's next fence.
inline void StrongAccess::acquire(const Release &from) {
  const u32 thread = w.thread(lane);
  if (from.block == block() ? from.thread == thread : from.narrow || narrow()) return;
  History &h = history_of(*w.block);
  const Acquire a = {from, thread, w.clocks->own, 1};
  if (acquires()) return enter_acquire(h, a);
  for (const Acquire &known : h.unfenced)
    if (known.thread == thread && known.from.block == from.block && known.from.thread == from.thread &&
        known.from.time >= from.time)
      return;
  h.unfenced.push(a);
}

// What a location publishes from here on, of `Written`: only the access's own release if it has acquired what was
// released before, or if nothing was.
__attribute__((noinline)) inline u32 StrongAccess::hand_on(const Cell &written, u64 location) {
  const u32 begun = w.block->launch->first_block, handed_on = written.first & (RELEASED | RELEASES_LISTED);
  const bool found = written.block >= begun && handed_on && is_strong_with_write(written);
  const bool both = acquires() && releases() && reads;
  if (writes && releases() && !found) return RELEASED;
  if (writes && both && handed_on == RELEASED && (!narrow() || written.block == begun + block()))
    return acquire(release_of(written)), RELEASED;
  return hand_on_lists(written, location);
}
__attribute__((noinline)) inline u32 StrongAccess::hand_on_lists(const Cell &written, u64 location) {
  Synchronization &s = *w.block->synchronization;
  const u32 begun = w.block->launch->first_block, thread = w.thread(lane);
  Vec<Release> found = {};
  if (written.block >= begun && written.first & (RELEASED | RELEASES_LISTED) && is_strong_with_write(written)) {
    if (written.first & RELEASES_LISTED)
      for (const Release &r : location_at(s, location).releases) found.push(r);
    if (written.first & RELEASED) found.push(release_of(written));
  }
  if (reads)
    for (const Release &r : found) acquire(r);
  if (!writes) return found.release(), 0;
  // A store ends the release sequence of an atomic operation, except for releases of the same thread.
  Vec<Release> kept = {};
  for (const Release &r : found) {
    const bool known = reads && acquires() && releases() && (r.block == block() || (!r.narrow && !narrow()));
    if ((reads || is_own(r)) && !known && !(is_own(r) && releases())) kept.push(r);
  }
  for (u32 scope = 0; scope < 2 && !releases(); ++scope)  // fences before a write that is not a release itself
    if (const Time time = w.clocks->released[scope][lane]; time >= w.block->began) {
      for (u32 k = kept.count; k-- > 0;)
        if (is_own(kept[k]) && kept[k].narrow >= scope && kept[k].time <= time) kept.remove(k);
      kept.push({block(), thread, time, scope || narrow()});
    }
  const bool listed = kept.count;
  if (listed) {
    Location &l = location_at(s, location);
    l.releases.clear();
    for (const Release &r : kept) l.releases.push(r);
  }
  found.release(), kept.release();
  return (releases() ? RELEASED : 0) | (listed ? RELEASES_LISTED : 0);
}

LOOM_ALWAYS void StrongAccess::word(Page &page, u64 word, u32 which) {
  const u32 at = (u32)(word % PAGE / 4), own = number_of(*w.block), begun = w.block->launch->first_block;
  Cell &written = page.writes[at], &read = page.reads[at];
  const bool touched = written.block >= begun;
  if (touched && written.when & which && !is_strong_with_write(written) && !comes_after(w, lane, written, own)) {
    report_global_race(w, i.number, lane, written, written.block, word);
  } else if (writes && read.block >= begun) {
    if (read.when & which && !is_strong_with_read(read) && !comes_after(w, lane, read, own))
      report_global_race(w, i.number, lane, read, read.block, word);
    else if (bytes_of(read.first) & which && read_by_others(w, lane, read))
      report_global_race(w, i.number, lane, read, begun + block_of(read.first), word);
  }
  const bool hands_on = touched && written.first & (RELEASED | RELEASES_LISTED);
  const bool fenced = writes && (w.clocks->released[0][lane] | w.clocks->released[1][lane]) >= w.block->began;
  u32 kind = 0;
  if (hands_on || fenced || (writes && releases())) kind = hand_on(written, word);
  const u32 when = w.clocks->own << 4 | which, by = who(i.number, w.thread(lane));
  if (writes) written = {own, when, by, STRONG | (narrow() ? STRONG_IN_BLOCK : 0) | kind};
  else if (read.block < begun || is_atomic(*w.block, read.who >> THREAD_BITS) || comes_after(w, lane, read, own))
    read = {own, when, by, read.block < begun ? NO_READER : read.first};
}

LOOM_INLINE void touch_strongly(Warp &w, const Instruction &i, u32 lane, u64 address, u32 bytes, bool reads, bool writes) {
  StrongAccess access = {w, i, lane, reads, writes};
  each_word(w, address, bytes, [&](Page &page, u64 word, u32 which) LOOM_ALWAYS { access.word(page, word, which); });
}
// Around a release: the lanes' knowledge is saved, and their next accesses are later.
LOOM_INLINE void begin_release(Warp &w, const Instruction &i) {
  if (i.flags & RELEASES) keep_snapshot(w);
}
LOOM_INLINE void end_release(Warp &w, const Instruction &i) {
  if (i.flags & RELEASES) ++w.clocks->own;
}
LOOM_NOINLINE void update_global(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  begin_release(w, i);
  GPU_EACH_LANE(lanes, lane) touch_strongly(w, i, lane, address[lane], bytes, true, true);
  end_release(w, i);
}
// A comparison and a store, which is performed if it `succeeds`.
LOOM_NOINLINE void compare_global(Warp &w, const Instruction &i, u32 lane, u64 address, u32 bytes, bool succeeds) {
  begin_release(w, i);
  touch_strongly(w, i, lane, address, bytes, true, succeeds);
  end_release(w, i);
}
LOOM_NOINLINE void read_global_strongly(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  GPU_EACH_LANE(lanes, lane) touch_strongly(w, i, lane, address[lane], bytes, true, false);
}
LOOM_NOINLINE void write_global_strongly(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                         u32 bytes, u32 lanes) {
  begin_release(w, i);
  GPU_EACH_LANE(lanes, lane) {
    touch_strongly(w, i, lane, address[lane], bytes, false, true);
    __builtin_memcpy((u8 *)address[lane], data + lane * stride, bytes);
  }
  end_release(w, i);
}

// fence and membar: following strong writes publish what came before; preceding strong reads acquire.
static void fence(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  if (!b.checks) return;
  const Indivisible guard(w, true);
  Clocks &c = *w.clocks;
  if (i.flags & ACQUIRES && b.synchronization->histories && b.synchronization->histories[b.linear]) {
    History &h = history_of(b);
    for (u32 k = h.unfenced.count; k-- > 0;) {
      Acquire a = h.unfenced[k];
      const bool here = a.thread / LANES == w.number && w.mask >> a.thread % LANES & 1;
      if (!here || (i.flags & NARROW && a.from.block != b.linear)) continue;
      h.unfenced.remove(k);
      a.time = c.own;
      enter_acquire(h, a);
    }
  }
  if (!(i.flags & RELEASES)) return;
  keep_snapshot(w);
  GPU_EACH_LANE(w.mask, lane) c.released[i.flags & NARROW ? 1 : 0][lane] = c.own;
  ++c.own;
}

}  // namespace gpu
