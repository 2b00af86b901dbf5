// Bulk copies of tiles between global and shared memory, described by a tensor map (TMA).
//
// A load writes its box to shared memory row after row, the innermost dimension first, each chunk of 16 bytes where the
// swizzle puts it; elements outside the tensor are zeros (or NaN, if the map says so) and still count as bytes. An
// mbarrier counts the bytes when they have arrived. A store reads the box and writes the elements that are inside. It
// belongs to a group of the thread that issues it; the thread can wait until its groups have been read, or written.
#pragma once
#include "atomics.h"
#include "counters.h"
#include "maps.h"
#include "mbarrier.h"
#include "tensor_commit.h"

namespace gpu {

// ---- the rows of a box ----------------------------------------------------------------------------------

struct TileRow {
  u32 shared;         // its first byte, before the swizzle
  u64 global;         // the address of its first element, which may be outside
  u32 bytes;          // of the whole row
  u32 begin, end;     // the bytes of the row that are inside the tensor
};

LOOM_INLINE u32 row_bytes(const TensorMap &map) { return map.box[0] * (u32)element_bits(map.type) / 8; }
LOOM_INLINE u32 row_count(const BulkCopy &copy) {
  if (copy.scattered) return 4;
  u32 rows = 1;
  for (int d = 1; d < copy.map.rank(); ++d) rows *= copy.map.box[d];
  return rows;
}
LOOM_INLINE u32 box_bytes(const BulkCopy &copy) { return row_count(copy) * row_bytes(copy.map); }

template <class F> LOOM_INLINE void each_row(const BulkCopy &copy, F f) {
  const TensorMap &map = copy.map;
  const i64 size = element_bits(map.type) / 8, left = copy.at[0], length = map.box[0];
  const i64 begin = left < 0 ? -left : 0, end = (i64)map.dimension[0] - left;
  const u32 rows = row_count(copy);
  for (u32 number = 0; number < rows; ++number) {
    bool inside = true;
    u64 global = map.address + (u64)(left * size);
    u32 rest = number;
    for (int d = 1; d < map.rank(); ++d) {
      i64 at = copy.scattered ? copy.at[1 + number] : (i64)copy.at[d] + rest % map.box[d];
      rest /= map.box[d];
      inside &= at >= 0 && at < (i64)map.dimension[d];
      global += (u64)at * map.stride[d - 1];
    }
    TileRow row = {copy.address + number * (u32)(length * size), global, (u32)(length * size), 0, 0};
    if (inside && begin < length && end > begin) {
      row.begin = (u32)(begin * size);
      row.end = (u32)((end < length ? end : length) * size);
    }
    f(row);
  }
}
template <class F> LOOM_INLINE void each_chunk(const BulkCopy &copy, const TileRow &row, F f) {
  for (u32 offset = 0; offset < row.bytes; offset += CHUNK) f(swizzled(row.shared + offset, copy.map.swizzle), offset);
}

// ---- beginning one --------------------------------------------------------------------------------------

// Checks of all bulk copies before they begin. `to_global`: it writes to global memory.
template <bool TO_GLOBAL> static bool can_begin(Warp &w, const Instruction &i, const BulkCopy &copy) {
  const u32 end = SHARED_BASE + w.block->shared_bytes, bytes = box_bytes(copy);
  if (copy.address % 128) return found(w, MISALIGNED, i.number, copy.lane, copy.address), false;
  if (copy.address < SHARED_BASE || copy.address + bytes > end)
    return found(w, SHARED_BOUNDS, i.number, copy.lane, copy.address), false;
  bool fine = true;
  each_row(copy, [&](const TileRow &row) {
    if (row.begin == row.end) return;
    const Range *range = range_of(*w.block->worker, row.global + row.begin, row.global + row.end);
    if (range && (!TO_GLOBAL || range->writable)) return;
    found(w, range ? GLOBAL_READ_ONLY : GLOBAL_BOUNDS, i.number, copy.lane, row.global + row.begin);
    fine = false;
  });
  return fine;
}

// Counted as one request for the rows of the tile, as far as they are inside the tensor.
static void count_tile(Warp &w, const Instruction &i, const BulkCopy &copy) {
  if (!w.block->worker->counts) return;
  Counts &c = w.block->worker->counts[i.number];
  ++c.requests;
  each_row(copy, [&](const TileRow &row) {
    if (row.begin == row.end) return;
    c.bytes += row.end - row.begin;
    count_run(c, row.global + row.begin, row.end - row.begin);
  });
}

// The immediate: the offset of the shared address in the low 32 bits, the rank from bit 32, in bit 40 whether rows are
// listed individually, and from bit 48 the reduction.
static BulkCopy *new_copy(Warp &w, const Instruction &i, u32 lane, u32 address, u64 map, u32 first_coordinate) {
  const u32 rank = (u32)(i.immediate >> 32 & 255);
  const bool scattered = i.immediate >> 40 & 1;
  BulkCopy copy = {};
  if (!read_map(w, i, lane, map, rank, copy.map)) return nullptr;
  if (scattered && copy.map.box[1] != 1) return found(w, TENSOR_MAP, i.number, lane, map), nullptr;
  for (u32 d = 0; d < (scattered ? 5 : rank); ++d) copy.at[d] = (i32)w.words(i, first_coordinate + d)[lane];
  copy.address = address + (u32)i.immediate;
  copy.warp = w.number, copy.lane = lane, copy.instruction = &i, copy.scattered = scattered;
  BulkCopy *made = (BulkCopy *)allocate(sizeof(BulkCopy));
  *made = copy;
  return made;
}

// ---- loads ----------------------------------------------------------------------------------------------

LOOM_INLINE void fill_outside(const TensorMap &map, u8 *row, u32 bytes) {
  const u32 size = (u32)element_bits(map.type) / 8;
  if (map.fill == Fill::zeros) return (void)__builtin_memset(row, 0, bytes);
  for (u32 k = 0; k < bytes; ++k) row[k] = k % size == size - 1 ? 0x7F : 0xFF;  // PTX's NaN
}

static void deliver_load(Block &b, Pending &p) {
  BulkCopy &copy = *(BulkCopy *)p.operation;
  Warp &w = b.warps[copy.warp];
  each_row(copy, [&](const TileRow &row) {
    u8 data[2048];
    fill_outside(copy.map, data, row.bytes);
    __builtin_memcpy(data + row.begin, (const u8 *)(row.global + row.begin), row.end - row.begin);
    each_chunk(copy, row, [&](u32 address, u32 offset) {
      __builtin_memcpy(b.shared + (address - SHARED_BASE), data + offset, CHUNK);
    });
  });
  MBarrier *m = mbarrier_slot(b, copy.mbarrier);
  if (!m || !m->live) found(w, NO_MBARRIER, copy.instruction->number, copy.lane, copy.mbarrier);
  else {
    --m->under_way;
    count_bytes(w, *copy.instruction, copy.lane, *m, -(i64)box_bytes(copy));
    end_phase_if_complete(w, *copy.instruction, copy.lane, *m);
  }
  free(&copy);
}

// Operands: destination, map, mbarrier, coordinates.
static void load_tile(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  GPU_EACH_LANE(w.mask, lane) {
    BulkCopy *copy = new_copy(w, i, lane, w.words(i, 0)[lane], w.longs(i, 1)[lane], 3);
    if (!copy) continue;
    copy->mbarrier = w.words(i, 2)[lane];
    MBarrier *slot = mbarrier_slot(b, copy->mbarrier);
    MBarrier *m = mbarrier_at(w, i, lane, copy->mbarrier, slot ? slot->agent : w.number);
    if (!m || !can_begin<false>(w, i, *copy)) {
      free(copy);
      continue;
    }
    count_tile(w, i, *copy);
    if (b.checks) {
      const u32 end = copy->address + box_bytes(*copy);
      UnitWrites writes(w, i, lane, m->agent, b.agent_time[m->agent], copy->address, end);
      each_row(*copy, [&](const TileRow &row) {
        u64 from[LANES];
        from[lane] = row.global + row.begin;
        if (row.end > row.begin) read_global(w, i, from, row.end - row.begin, 1u << lane);
        each_chunk(*copy, row, [&](u32 address, u32) {
          writes.chunk(address);
          // A read before the tile has arrived must not see anything useful.
          __builtin_memset(b.shared + (address - SHARED_BASE), 0xA5, CHUNK);
        });
      });
    }
    ++m->under_way;
    m->copied = stamp(b.agent_time[m->agent], i.number, lane, m->agent);
    m->copied_by = w.number;
    Pending pending = {deliver_load, copy, w.number, copy->mbarrier};
    if (b.launch->options & EARLY) deliver_load(b, pending);
    else b.pending.push(pending);
  }
}

// ---- stores ---------------------------------------------------------------------------------------------

// After the first, in the order of REDUCTIONS in ptx/asynchronous.py.
enum Reduction : u32 { NONE, SUM, MINIMUM, MAXIMUM, INCREMENT, DECREMENT, BIT_AND, BIT_OR, BIT_XOR };
LOOM_INLINE Reduction reduction_of(const Instruction &i) { return (Reduction)(i.immediate >> 48 & 15); }

template <class Op, class T> static void reduce_all(u8 *to, const u8 *from, u32 bytes) {
  for (u32 k = 0; k < bytes; k += sizeof(T)) {
    T x;
    __builtin_memcpy(&x, from + k, sizeof x);
    update<GLOBAL, Op, T>(to + k, x, x);
  }
}
// By the values of a packed format, as minima and maxima need them.
template <class F> struct Ordered {
  u16 code;
  bool operator<(Ordered other) const { return ptx::decode<F>(code) < ptx::decode<F>(other.code); }
  bool operator>(Ordered other) const { return ptx::decode<F>(code) > ptx::decode<F>(other.code); }
};
template <class F> struct Raw<Ordered<F>> { typedef u16 type; };

// Applies a reduction to neighboring elements in memory; false if there is none for this type.
static bool reduce_elements(Reduction reduction, ElementType type, u8 *to, const u8 *from, u32 bytes) {
#define GPU_REDUCE(REDUCTION, OP, TYPE, T) \
  if (reduction == REDUCTION && type == ElementType::TYPE) return reduce_all<OP, T>(to, from, bytes), true;
#define GPU_REDUCE_INTEGERS(REDUCTION, OP)                                                     \
  GPU_REDUCE(REDUCTION, OP, u32, u32) GPU_REDUCE(REDUCTION, OP, s32, i32)                        \
  GPU_REDUCE(REDUCTION, OP, u64, u64) GPU_REDUCE(REDUCTION, OP, s64, i64)
#define GPU_REDUCE_BITS(REDUCTION, OP)                                                         \
  GPU_REDUCE(REDUCTION, OP, u32, u32) GPU_REDUCE(REDUCTION, OP, s32, u32)                        \
  GPU_REDUCE(REDUCTION, OP, u64, u64) GPU_REDUCE(REDUCTION, OP, s64, u64)
  GPU_REDUCE(SUM, Add, u32, u32) GPU_REDUCE(SUM, Add, s32, u32) GPU_REDUCE(SUM, Add, u64, u64)
  GPU_REDUCE(SUM, Add, s64, u64) GPU_REDUCE(SUM, Add, f32, f32) GPU_REDUCE(SUM, Add, f64, f64)
  GPU_REDUCE(SUM, Add, f16, Half<ptx::f16>) GPU_REDUCE(SUM, Add, bf16, Half<ptx::bf16>)
  GPU_REDUCE_INTEGERS(MINIMUM, Min) GPU_REDUCE_INTEGERS(MAXIMUM, Max)
  GPU_REDUCE(MINIMUM, Min, f16, Ordered<ptx::f16>) GPU_REDUCE(MINIMUM, Min, bf16, Ordered<ptx::bf16>)
  GPU_REDUCE(MAXIMUM, Max, f16, Ordered<ptx::f16>) GPU_REDUCE(MAXIMUM, Max, bf16, Ordered<ptx::bf16>)
  GPU_REDUCE(INCREMENT, Increment, u32, u32) GPU_REDUCE(DECREMENT, Decrement, u32, u32)
  GPU_REDUCE_BITS(BIT_AND, And) GPU_REDUCE_BITS(BIT_OR, Or) GPU_REDUCE_BITS(BIT_XOR, Xor)
#undef GPU_REDUCE
#undef GPU_REDUCE_INTEGERS
#undef GPU_REDUCE_BITS
  return false;
}

// Reads and writes the tile.
static void move_store(Block &b, BulkCopy &copy) {
  const Instruction &i = *copy.instruction;
  Warp &w = b.warps[copy.warp];
  const Reduction reduction = reduction_of(i);
  each_row(copy, [&](const TileRow &row) {
    u8 data[2048];
    each_chunk(copy, row, [&](u32 address, u32 offset) {
      __builtin_memcpy(data + offset, b.shared + (address - SHARED_BASE), CHUNK);
    });
    if (row.begin == row.end) return;
    u64 to[LANES];
    to[copy.lane] = row.global + row.begin;
    const u32 bytes = row.end - row.begin;
    if (reduction) {
      if (b.checks) update_global(w, i, to, bytes, 1u << copy.lane);
      reduce_elements(reduction, copy.map.type, (u8 *)to[copy.lane], data + row.begin, bytes);
    } else if (b.checks) write_global(w, i, to, data + row.begin, 0, bytes, 1u << copy.lane);
    else __builtin_memcpy((u8 *)to[copy.lane], data + row.begin, bytes);
  });
  b.happened();
}
static void finish_store(Block &b, BulkCopy &copy) {
  if (!(b.launch->options & EARLY)) move_store(b, copy);
  free(&copy);
}

// Operands: map, source, coordinates.
static void store_tile(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  GPU_EACH_LANE(w.mask, lane) {
    BulkCopy *copy = new_copy(w, i, lane, w.words(i, 1)[lane], w.longs(i, 0)[lane], 2);
    if (!copy) continue;
    const Reduction reduction = reduction_of(i);
    u8 nothing[8];
    if (reduction && !reduce_elements(reduction, copy->map.type, nothing, nothing, 0))
      found(w, TENSOR_MAP, i.number, lane, w.longs(i, 0)[lane]);
    else if (can_begin<true>(w, i, *copy)) {
      const u32 agent = BULK_COPIES + w.number;
      copy->time = b.agent_time[agent]++;
      count_tile(w, i, *copy);
      if (b.checks) {
        UnitReads reads(w, i, lane, agent, copy->time, false);
        each_row(*copy, [&](const TileRow &row) {
          each_chunk(*copy, row, [&](u32 address, u32) { reads.chunk(address); });
        });
      }
      if (b.launch->options & EARLY) move_store(b, *copy);
      units_of(b).of[w.number].stores.push(copy);
      continue;
    }
    free(copy);
  }
}

static void commit_stores(Warp &w, const Instruction &) {
  auto &own = units_of(*w.block).of[w.number];
  GPU_EACH_LANE(w.mask, lane) ++own.committed[lane];
  for (BulkCopy *copy : own.stores)
    if (!copy->group && w.mask >> copy->lane & 1) copy->group = own.committed[copy->lane];
}

// The immediate is the number of latest groups that may still be pending. Waiting for the read also performs the write
// here: a store happens as late as allowed, which is when it is waited for.
static void wait_for_stores(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  auto &own = units_of(b).of[w.number];
  u32 left = 0;
  Time oldest = b.agent_time[BULK_COPIES + w.number];
  for (u32 k = 0; k < own.stores.count; ++k) {
    BulkCopy *copy = own.stores[k];
    const bool waited = w.mask >> copy->lane & 1 && copy->group && copy->group + i.immediate <= own.committed[copy->lane];
    if (waited) {
      finish_store(b, *copy);
      continue;
    }
    oldest = copy->time < oldest ? copy->time : oldest;
    own.stores[left++] = copy;
  }
  own.stores.count = left;
  know(w, BULK_COPIES + w.number, oldest - 1);
}

// ---- the end of a block ---------------------------------------------------------------------------------

static void end_units(Block &b) {
  Units &units = *b.units;
  const bool left = b.live_threads == 0;  // otherwise it is deadlocked, which is reported
  for (u32 k = 0; k < b.warp_count; ++k) {
    auto &own = units.of[k];
    for (BulkCopy *copy : own.stores) {
      if (left) found(b.warps[k], COPY_OUTLIVES_BLOCK, copy->instruction->number, copy->lane, copy->address);
      finish_store(b, *copy);
    }
    own.stores.clear();
    own.products.clear();
    for (u32 &groups : own.committed) groups = 0;
  }
  u32 others = 0;
  for (u32 k = 0; k < b.pending.count; ++k) {
    const Pending p = b.pending[k];
    if (p.deliver != deliver_load && p.deliver != deliver_commit) {
      b.pending[others++] = p;
      continue;
    }
    free(p.operation);
  }
  b.pending.count = others;
  for (MBarrier *m : units.mbarriers) {
    bool waited = !m->copied;
    for (u32 k = 0; k < b.warp_count; ++k) waited |= time_of(m->copied) <= b.warps[k].clocks->known[m->agent];
    if (left && !waited)
      found(b.warps[m->copied_by], COPY_OUTLIVES_BLOCK, instruction_of(m->copied), lane_of(m->copied), m->address);
    free(m);
  }
  units.mbarriers.clear();
  __builtin_memset(units.found, 0, sizeof units.found);
  units.maps.clear();
  for (u32 k = 0; k < WARPS; ++k) {
    WarpGroup &group = units.groups[k / GROUP];
    const u32 step = group.done[k % GROUP] - group.first;
    if (left && step < group.steps.count && k < b.warp_count)
      found(b.warps[k], WARPS_DISAGREE, group.steps[step].instruction->number, 0);
  }
  for (WarpGroup &group : units.groups) {
    group.steps.clear(), group.first = 0;
    for (u32 &done : group.done) done = 0;
  }
  units.cluster = {};
}

static void release_units(Block &b) {
  Units &units = *b.units;
  units.mbarriers.release(), units.maps.release();
  for (auto &own : units.of) own.stores.release(), own.products.release();
  for (WarpGroup &group : units.groups) group.steps.release();
  free(&units);
}

static const Named BULK_TABLE[] = {
  GPU_HANDLER("cp.async.bulk.tensor.load", load_tile)
  GPU_HANDLER("cp.async.bulk.tensor.store", store_tile)
  GPU_HANDLER("cp.async.bulk.commit_group", commit_stores)
  GPU_HANDLER("cp.async.bulk.wait_group", wait_for_stores)
};

}  // namespace gpu
