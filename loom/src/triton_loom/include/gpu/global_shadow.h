// The shadow of global memory: races between the threads of a block, and between the blocks of a launch.
//
// Of each word of four bytes the last write and the last read are kept: by which block, when, by which thread. Blocks are
// numbered through all launches of the process, so that nothing has to be cleared in between. Between blocks only atomic
// operations make an order: a block that updates or reads atomically what another one has written that way is taken to come
// after everything that blocks up to that one have done. That is generous: it never makes an alarm of something ordered.
//
// Most accesses are to 16 bytes at a multiple of that. As long as a launch accesses such a line as a whole, it has a cell
// like that of a word; the first other access during the launch splits it, and from then on its four words have cells.
#pragma once
#include "shadow.h"

namespace gpu {

struct Cell {
  u32 block;  // its number among all blocks ever
  u32 when;   // time, and in the low four bits which bytes of the word
  u32 who;    // instruction and thread
  u32 first;  // of a read: the first of several blocks, see `first_reader`; of a write: nonzero if it was atomic
};
constexpr u32 THREAD_BITS = 10;

// Of the blocks that have read a word the one with the lowest number in the launch, and in the high four bits which bytes
// it has read: rows of bf16 may end in the middle of a word, whose halves belong to two blocks. Blocks from the limit on
// share a number, and races between them are not seen.
constexpr u32 FIRST_LIMIT = (1u << 28) - 1;
LOOM_INLINE u32 first_reader(u64 linear, u32 bytes) {
  return (u32)(linear < FIRST_LIMIT ? linear : FIRST_LIMIT) | bytes << 28;
}
LOOM_INLINE u32 block_of(u32 first) { return first & FIRST_LIMIT; }
LOOM_INLINE u32 bytes_of(u32 first) { return first >> 28; }
// Of two readers of a word.
LOOM_INLINE u32 earlier_reader(u32 one, u32 other) {
  return block_of(one) == block_of(other) ? one | other : block_of(one) < block_of(other) ? one : other;
}
LOOM_INLINE u32 who(u32 instruction, u32 thread) { return instruction << THREAD_BITS | thread; }

constexpr u64 PAGE = 1 << 16, WORDS = PAGE / 4, LINES = PAGE / 16, TABLE = 1 << 14;

struct Page {
  u64 key;  // of the address, counted from 1
  Cell *writes, *reads;            // of words
  Cell *line_writes, *line_reads;  // of lines
  u32 *split;                      // of lines: the first block of the launch that has split it
};
// All of it is shared by the workers; a page is entered once and stays until the table is emptied between launches.
struct GlobalShadow {
  Page pages[TABLE];
  u32 used;
  u32 lock;
  u32 next_block;  // the number of the first block of the next launch
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
}

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
  return nullptr;  // more memory than the table has room for: it is not watched
}
LOOM_INLINE Page *page_of(Worker &worker, u64 address) {
  const u64 key = address / PAGE + 1;
  if (worker.last_page && worker.last_page->key == key) return worker.last_page;
  Page *page = find_page(*worker.launch->global_shadow, key);
  if (page) worker.last_page = page;
  return page;
}

// Before cells of words are used. Those of lines from earlier launches say nothing, as those of words.
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

LOOM_INLINE bool comes_after(const Warp &w, u32 lane, const Cell &c, u32 block) {
  const Block &b = *w.block;
  if (c.block < b.launch->first_block) return true;
  if (c.block != block) return c.block <= b.known_block;
  const u32 thread = c.who & ((1u << THREAD_BITS) - 1), warp = thread / LANES;
  return c.when >> 4 <= w.clocks->known[warp] || thread == w.thread(lane);
}

__attribute__((cold)) LOOM_NOINLINE void report_global_race(Warp &w, u32 instruction, u32 lane, const Cell &c,
                                                            u32 other_block, u64 address) {
  Block &b = *w.block;
  const Launch &launch = *b.launch;
  const u64 linear = other_block - launch.first_block;
  const u32 id[3] = {(u32)(linear % launch.grid[0]), (u32)(linear / launch.grid[0] % launch.grid[1]),
                     (u32)(linear / launch.grid[0] / launch.grid[1])};
  const bool same_who = other_block == c.block;
  const u32 other_thread = same_who ? c.who & ((1u << THREAD_BITS) - 1) : NOBODY;
  Finding f = {GLOBAL_RACE, instruction, c.who >> THREAD_BITS, w.thread(lane), other_thread, {}, {}, address, 1, b.linear};
  __builtin_memcpy(f.block, b.id, sizeof b.id);
  __builtin_memcpy(f.other_block, id, sizeof id);
  // It is one race, whoever came second here: the later block is named first, or the later instruction.
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

// The bytes of a word that an access from `address` to `end` has.
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

LOOM_INLINE void write_word(Warp &w, const Instruction &i, u32 lane, Page &page, u64 word, u32 bytes, const u8 *data,
                            u32 block) {
  const u32 at = (u32)(word % PAGE / 4);
  Cell &written = page.writes[at];
  const Cell &read = page.reads[at];
  const u32 first_block = w.block->launch->first_block;
  const bool others_read = read.block >= first_block && block_of(read.first) != first_reader(w.block->linear, 0) &&
                           first_block + block_of(read.first) > w.block->known_block;
  if (__builtin_expect(!comes_after(w, lane, written, block) || !comes_after(w, lane, read, block) || others_read, 0)) {
    u32 changed = 0;
    for (u32 k = 0; k < 4; ++k)
      if (bytes >> k & 1 && (!data || ((const u8 *)word)[k] != data[k])) changed |= 1u << k;
    if (!changed) return;
    if (!comes_after(w, lane, written, block) && written.when & changed) {
      report_global_race(w, i.number, lane, written, written.block, word);
      if (written.block < block) return;
    } else if (!comes_after(w, lane, read, block) && read.when & changed) {
      report_global_race(w, i.number, lane, read, read.block, word);
    } else if (others_read && bytes_of(read.first) & changed) {
      report_global_race(w, i.number, lane, read, first_block + block_of(read.first), word);
    }
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
// Whole words that nobody has touched during this launch, which is what most accesses meet: one entry for all of them.
// With READS, others may have read them before; the first of them stays known.
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

// The page that all of the lanes access, if it is one and they access whole words, or whole lines if that is what they want.
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
LOOM_NOINLINE void read_global_atomically(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes);
LOOM_NOINLINE void read_global(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  if (__builtin_expect(i.flags & ATOMIC, 0)) return read_global_atomically(w, i, address, bytes, lanes);
  switch (bytes) {
    case 4: return read_words<1>(w, i, address, bytes, lanes);
    case 8: return read_words<2>(w, i, address, bytes, lanes);
    case 16: return read_words<4>(w, i, address, bytes, lanes);
    default: return read_words<0>(w, i, address, bytes, lanes);
  }
}

// Lane after lane, each store before the next check: two lanes may mean the same bytes.
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
        write_word(w, i, lane, page, word, which, from + (i64)(word - address[lane]), block);
      });
    __builtin_memcpy((u8 *)address[lane], from, COUNT ? 4 * COUNT : bytes);
  }
}
LOOM_NOINLINE void write_global_atomically(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                           u32 bytes, u32 lanes);
LOOM_NOINLINE void write_global(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride, u32 bytes,
                                u32 lanes) {
  if (__builtin_expect(i.flags & ATOMIC, 0)) return write_global_atomically(w, i, address, data, stride, bytes, lanes);
  u32 &storing = w.block->launch->storing[i.number * WARPS + w.number];
  if (__builtin_expect(lanes & ~storing, 0)) __atomic_fetch_or(&storing, lanes, __ATOMIC_RELAXED);
  switch (bytes) {
    case 4: return write_words<1>(w, i, address, data, stride, bytes, lanes);
    case 8: return write_words<2>(w, i, address, data, stride, bytes, lanes);
    case 16: return write_words<4>(w, i, address, data, stride, bytes, lanes);
    default: return write_words<0>(w, i, address, data, stride, bytes, lanes);
  }
}

// Atomic operations, and loads and stores that are relaxed or stronger, do not race with each other. What blocks do that way
// hands on what they did before, to whoever meets it.
template <bool READS, bool WRITES>
LOOM_INLINE void touch_atomically(Warp &w, const Instruction &i, u32 lane, u64 address, u32 bytes) {
  Block &b = *w.block;
  const u32 block = number_of(b);
  each_word(w, address, bytes, [&](Page &page, u64 word, u32 which) LOOM_ALWAYS {
    const u32 at = (u32)(word % PAGE / 4);
    Cell &written = page.writes[at], &read = page.reads[at];
    // Blocks that run at once and wait for each other meet in any order: which of them have met is not kept.
    if (b.launch->options & COOPERATIVE) b.known_block = ~0u;
    const bool by_another = written.block >= b.launch->first_block && written.block != block;
    if (READS && written.first && by_another && written.block > b.known_block) b.known_block = written.block;
    if (!written.first && !comes_after(w, lane, written, block) && written.when & which)
      report_global_race(w, i.number, lane, written, written.block, word);
    else if (WRITES && !comes_after(w, lane, read, block) && read.when & which)
      report_global_race(w, i.number, lane, read, read.block, word);
    if (WRITES) written = {block, w.clocks->own << 4 | which, who(i.number, w.thread(lane)), 1};
  });
}
LOOM_NOINLINE void update_global(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  GPU_EACH_LANE(lanes, lane) touch_atomically<true, true>(w, i, lane, address[lane], bytes);
}
LOOM_NOINLINE void read_global_atomically(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  GPU_EACH_LANE(lanes, lane) touch_atomically<true, false>(w, i, lane, address[lane], bytes);
}
LOOM_NOINLINE void write_global_atomically(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                           u32 bytes, u32 lanes) {
  GPU_EACH_LANE(lanes, lane) {
    touch_atomically<false, true>(w, i, lane, address[lane], bytes);
    __builtin_memcpy((u8 *)address[lane], data + lane * stride, bytes);
  }
}

}  // namespace gpu
