// Tensor memory: 128 lanes by 512 columns of 32 bits, which a block allocates by columns; its loads and stores by warps.
//
// An address is a lane (bits 16 and up) and a column. A warp can only access the 32 lanes of its quarter (its number % 4).
// Loads and stores are asynchronous: in the vector clocks those of a warp are two agents, whose accesses the warp knows after
// tcgen05.wait::ld or ::st, and passes on by barriers. Products and copies of tcgen05.h are performed by the matrix unit of
// the warp whose thread issues them.
//
// The shadow has a stamp for sixteen lanes of a column: no instruction here touches fewer. It keeps the last write of each,
// and the last read of each agent. Tensor memory is uninitialized until somebody writes it.
#pragma once
#include "memory.h"
#include "units.h"

namespace gpu {

constexpr u32 TENSOR_LANES = 128, TENSOR_COLUMNS = 512, LANE_GROUP = 16, LANE_GROUPS = TENSOR_LANES / LANE_GROUP;
constexpr u32 LEAST_COLUMNS = 32;      // that can be allocated
constexpr u32 UNWRITTEN = 0x7FFF7FFF;  // a NaN in every format, so that a use shows in the result

struct Allocation {
  u32 first, columns, instruction, warp;
};

struct TensorMemory {
  u32 cells[TENSOR_LANES][TENSOR_COLUMNS];
  alignas(64) u8 left[32768], right[65536];  // room for the operands of a product
  Stamp writes[LANE_GROUPS][TENSOR_COLUMNS];
  Stamp (*reads[AGENTS])[TENSOR_COLUMNS];  // null until the agent reads
  u32 readers[AGENTS], reader_count;
  Time latest_read[AGENTS];
  bool owned[TENSOR_COLUMNS];
  Vec<Allocation> allocations;
  bool relinquished;
  struct {
    Vec<const Instruction *> loads;      // that the warp has not waited for
    Time loads_waited, stores_waited;    // of the warp's own
    Time fenced[KNOWLEDGE];              // what the warp knew at its last tcgen05.fence::after_thread_sync
    Time unit_known[KNOWLEDGE];          // what its matrix unit knows: the knowledge of the issuer of its last operation
    Stamp last;                          // of that operation
    bool is_open;                        // it is not committed
  } of[WARPS];
};

static void end_tensor_memory(Block &b) {
  TensorMemory &t = *b.tensor_memory;
  const bool left = b.live_threads == 0;  // else it is deadlocked, and that is reported
  for (const Allocation &a : t.allocations)
    if (left) found(b.warps[a.warp], TENSOR_MISUSE, a.instruction, 0, a.first);
  t.allocations.clear();
  for (bool &owned : t.owned) owned = false;
  t.relinquished = false;
  for (u32 k = 0; k < b.warp_count; ++k) {
    auto &own = t.of[k];
    bool waited = time_of(own.last) < b.began;
    for (u32 n = 0; n < b.warp_count; ++n) waited |= time_of(own.last) <= b.warps[n].clocks->known[MATRIX_UNITS + k];
    if (left && !waited) found(b.warps[k], COPY_OUTLIVES_BLOCK, instruction_of(own.last), lane_of(own.last));
    own.loads.clear();
    own.is_open = false;
  }
}
static void release_tensor_memory(Block &b) {
  TensorMemory &t = *b.tensor_memory;
  for (u32 k = 0; k < t.reader_count; ++k) free(t.reads[t.readers[k]]);
  for (auto &own : t.of) own.loads.release();
  t.allocations.release();
  free(&t);
}
LOOM_INLINE TensorMemory &tensor_memory_of(Block &b) {
  if (__builtin_expect(!b.tensor_memory, 0)) {
    b.tensor_memory = (TensorMemory *)allocate(sizeof(TensorMemory));
    b.end_tensor_memory = end_tensor_memory, b.release_tensor_memory = release_tensor_memory;
  }
  return *b.tensor_memory;
}

// ---- accesses -------------------------------------------------------------------------------------------

LOOM_INLINE u32 lane_of_address(u32 address) { return address >> 16; }
LOOM_INLINE u32 column_of_address(u32 address) { return address & 0xFFFF; }

// The block's columns, from the address on.
LOOM_INLINE bool are_owned(const TensorMemory &t, u32 address, u32 columns) {
  const u32 first = column_of_address(address);
  if (first + columns > TENSOR_COLUMNS) return false;
  for (u32 k = 0; k < columns; ++k)
    if (!t.owned[first + k]) return false;
  return true;
}

// Accesses to tensor memory, under an agent and a time, by an operation of a lane or of a warp's lanes together.
struct TensorUse {
  Warp &w;
  const Instruction &i;
  const u32 lane, agent;
  const bool is_unit;  // of products and copies, not the loads or stores of a warp
  TensorMemory &t;
  const Stamp as;
  Stamp (*plane)[TENSOR_COLUMNS] = nullptr;
  bool reported = false;  // one finding is enough for an access

  TensorUse(Warp &w, const Instruction &i, u32 lane, u32 agent)
      : w(w), i(i), lane(lane), agent(agent), is_unit(agent >= MATRIX_UNITS && agent < BULK_COPIES),
        t(tensor_memory_of(*w.block)),
        as(stamp(w.block->agent_time[agent], i.number, is_unit ? lane : SEVERAL_LANES, agent)) {}

  // Whether a stamped access is known to be complete. If the kernel fences threads, this must be known through a fence.
  bool comes_before(Stamp s) {
    const auto &own = t.of[w.number];
    const u32 by = agent_of(s);
    if (by == TENSOR_LOADS + w.number) return time_of(s) <= own.loads_waited;
    if (by == TENSOR_STORES + w.number) return time_of(s) <= own.stores_waited;
    if (time_of(s) > w.clocks->known[by]) return false;
    const bool needs_fence = i.flags & FENCES_THREADS && by != MATRIX_UNITS + w.number;
    if (needs_fence && time_of(s) >= w.block->began && time_of(s) > own.fenced[by] && !reported) {
      reported = true;
      found(w, NO_TENSOR_FENCE, i.number, lane, 0, instruction_of(s), by % WARPS * LANES);
    }
    return true;
  }
  // Operations of one thread in one unit are performed in order.
  bool is_pipelined(Stamp s) const { return is_unit && agent_of(s) == agent && lane_of(s) == lane; }
  bool is_copy(Stamp s) const { return w.block->launch->instructions[instruction_of(s)].flags & TENSOR_COPY; }

  __attribute__((cold, noinline)) void report(Kind kind, u32 group, u32 column, Stamp s) {
    if (reported) return;
    reported = true;
    const u64 address = (u64)group * LANE_GROUP << 16 | column;
    if (!s) return found(w, kind, i.number, lane, address);
    const u32 by = agent_of(s), other = lane_of(s) < LANES ? lane_of(s) : 0;
    found(w, kind, i.number, lane, address, instruction_of(s), by % WARPS * LANES + other);
  }
  // A product reads the result of another one only after that is known to be complete; copies complete in time. A load may
  // read cells that nobody has written: if a pipelined loop has no iterations, Triton loads sums that were never computed,
  // and drops them.
  void read(u32 group, u32 column, bool adds = false) {
    const Stamp s = t.writes[group][column];
    if (time_of(s) < w.block->began) {
      if (is_unit) report(TENSOR_UNINITIALIZED, group, column, 0);
    } else if (!(is_pipelined(s) && (adds || is_copy(s))) && !comes_before(s)) report(TENSOR_RACE, group, column, s);
    if (adds) return;  // the write that follows covers it
    if (!plane) plane = plane_of_reads();
    plane[group][column] = as;
  }
  void write(u32 group, u32 column) {
    check_end(group, column);
    t.writes[group][column] = as;
  }
  // Nothing may be pending there.
  void check_end(u32 group, u32 column) {
    const Stamp s = t.writes[group][column];
    if (time_of(s) >= w.block->began && !is_pipelined(s) && !comes_before(s)) report(TENSOR_RACE, group, column, s);
    for (u32 r = 0; r < t.reader_count; ++r) {
      const u32 reader = t.readers[r];
      const Stamp read = t.reads[reader][group][column];
      if (time_of(read) < w.block->began || is_pipelined(read)) continue;
      if (!comes_before(read)) report(TENSOR_RACE, group, column, read);
    }
  }
  Stamp (*plane_of_reads())[TENSOR_COLUMNS] {
    if (!t.reads[agent]) {
      t.readers[t.reader_count++] = agent;
      t.reads[agent] = (Stamp(*)[TENSOR_COLUMNS])calloc(LANE_GROUPS * TENSOR_COLUMNS, sizeof(Stamp));
    }
    return t.reads[agent];
  }
};

// ---- allocation -----------------------------------------------------------------------------------------

// Operands: where in shared memory to store the address, number of columns. The highest free columns are allocated: other
// blocks of the multiprocessor may have those from 0 on.
static void allocate_columns(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  Block &b = *w.block;
  TensorMemory &t = tensor_memory_of(b);
  const u32 lane = first_lane(w.mask), columns = w.words(i, 1)[lane];
  u64 addresses[LANES];
  addresses[lane] = w.words(i, 0)[lane] + (u32)i.immediate;
  if (!reachable_shared(w, i, addresses, 4, 1u << lane)) return;
  const bool possible = columns >= LEAST_COLUMNS && columns <= TENSOR_COLUMNS && (columns & (columns - 1)) == 0;
  if (!possible || t.relinquished) return found(w, TENSOR_MISUSE, i.number, lane);
  u32 first = TENSOR_COLUMNS;
  for (u32 at = 0; at + columns <= TENSOR_COLUMNS; at += columns) {
    bool taken = false;
    for (u32 k = 0; k < columns; ++k) taken |= t.owned[at + k];
    if (!taken) first = at;
  }
  if (first == TENSOR_COLUMNS) return found(w, TENSOR_MISUSE, i.number, lane);  // it would wait forever
  for (u32 k = 0; k < columns; ++k) {
    t.owned[first + k] = true;
    for (u32 row = 0; row < TENSOR_LANES; ++row) t.cells[row][first + k] = UNWRITTEN;
    for (u32 group = 0; group < LANE_GROUPS; ++group) t.writes[group][first + k] = 0;
  }
  t.allocations.push({first, columns, i.number, w.number});
  write_one(w, i, lane, addresses[lane], &first, 4);
}

// Operands: address, number of columns.
static void free_columns(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  TensorMemory &t = tensor_memory_of(*w.block);
  const u32 lane = first_lane(w.mask), first = w.words(i, 0)[lane], columns = w.words(i, 1)[lane];
  for (u32 k = 0; k < t.allocations.count; ++k) {
    if (t.allocations[k].first != first || t.allocations[k].columns != columns) continue;
    t.allocations.remove(k);
    TensorUse use(w, i, lane, TENSOR_STORES + w.number);
    for (u32 column = first; column < first + columns; ++column) {
      for (u32 group = 0; group < LANE_GROUPS && w.block->checks; ++group) use.check_end(group, column);
      t.owned[column] = false;
    }
    return;
  }
  found(w, TENSOR_MISUSE, i.number, lane, first);
}

static void relinquish(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  tensor_memory_of(*w.block).relinquished = true;
}

// ---- loads and stores -----------------------------------------------------------------------------------

// The cell of a shape that is in a register of a thread: row and column.
struct TensorCell {
  u32 row, column;
};
struct Shape32x32b {
  static constexpr u32 lanes = 32, columns = 1;  // of a register
  static TensorCell at(u32 r, u32 lane) { return {lane, r}; }
};
struct Shape16x64b {
  static constexpr u32 lanes = 16, columns = 2;
  static TensorCell at(u32 r, u32 lane) { return {lane % 2 * 8 + lane / 4, 2 * r + lane / 2 % 2}; }
};
struct Shape16x128b {
  static constexpr u32 lanes = 16, columns = 2;
  static TensorCell at(u32 r, u32 lane) { return {lane / 4 + r % 2 * 8, r / 2 * 4 + lane % 4}; }
};
struct Shape16x256b {
  static constexpr u32 lanes = 16, columns = 2;
  static TensorCell at(u32 r, u32 lane) { return {lane / 4 + r / 2 % 2 * 8, r / 4 * 8 + lane % 4 * 2 + r % 2}; }
};
struct Shape16x32bx2 {  // the second sixteen lanes of the warp have columns of their own
  static constexpr u32 lanes = 16, columns = 1;
  static TensorCell at(u32 r, u32 lane) { return {lane % 16, r}; }
};

// The cells of a warp's instruction: up to two runs of columns in one or two groups of sixteen lanes.
template <class SHAPE, u32 PACK> struct TensorPlace {
  static constexpr bool TWO = __is_same(SHAPE, Shape16x32bx2);
  u32 address[2];  // of the first and of the second sixteen threads
  u32 columns;
  bool fine;

  // The immediate: the offset of the address in the low 32 bits, that of the second sixteen threads in the others.
  TensorPlace(Warp &w, const Instruction &i, u32 operand, u32 registers) : columns(registers * SHAPE::columns * PACK) {
    const u32 lane = first_lane(w.mask), *base = w.words(i, operand);
    const TensorMemory &t = tensor_memory_of(*w.block);
    address[0] = base[lane] + (u32)i.immediate;
    address[1] = TWO ? address[0] + (u32)(i.immediate >> 32) : address[0];
    bool same = true;
    GPU_EACH_LANE(w.mask, other) same &= base[other] == base[lane];
    if (!same) found(w, TENSOR_MISUSE, i.number, lane, address[0]);
    fine = true;
    for (u32 a : address) {
      const u32 row = lane_of_address(a);
      fine &= row / 32 == w.number % 4 && row % SHAPE::lanes == 0 && are_owned(t, a, columns);
    }
    if (!fine) found(w, TENSOR_BOUNDS, i.number, lane, address[0]);
  }
  template <class F> void each_group(F f) const {
    const u32 count = TWO && address[1] != address[0] ? 2 : 1;
    for (u32 k = 0; k < count; ++k)
      for (u32 row = 0; row < SHAPE::lanes; row += LANE_GROUP)
        for (u32 column = 0; column < columns; ++column)
          f((lane_of_address(address[k]) + row) / LANE_GROUP, column_of_address(address[k]) + column);
  }
  u32 *cell(TensorMemory &t, u32 r, u32 lane) const {
    const TensorCell at = SHAPE::at(r, lane);
    const u32 a = address[lane / 16];
    return &t.cells[lane_of_address(a) + at.row][column_of_address(a) + at.column * PACK];
  }
};

// Operands: results, address. With PACK 2 a register has the low halves of two columns.
template <class SHAPE, u32 PACK> static void load_tensor(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  const u32 registers = i.operand_count - 1;
  const TensorPlace<SHAPE, PACK> place(w, i, registers, registers);
  if (!place.fine) return;
  TensorMemory &t = tensor_memory_of(*w.block);
  if (w.block->checks) {
    TensorUse use(w, i, first_lane(w.mask), TENSOR_LOADS + w.number);
    place.each_group([&](u32 group, u32 column) { use.read(group, column); });
    t.of[w.number].loads.push(&i);
  }
  for (u32 r = 0; r < registers; ++r) {
    u32 *to = w.words(i, r);
    GPU_EACH_LANE(w.mask, lane) {
      const u32 *cell = place.cell(t, r, lane);
      to[lane] = PACK == 1 ? *cell : (cell[0] & 0xFFFF) | cell[1] << 16;
    }
  }
}

// Operands: address, values.
template <class SHAPE, u32 PACK> static void store_tensor(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  const u32 registers = i.operand_count - 1;
  const TensorPlace<SHAPE, PACK> place(w, i, 0, registers);
  if (!place.fine) return;
  TensorMemory &t = tensor_memory_of(*w.block);
  if (w.block->checks) {
    TensorUse use(w, i, first_lane(w.mask), TENSOR_STORES + w.number);
    place.each_group([&](u32 group, u32 column) {
      if (t.writes[group][column] != use.as) use.write(group, column);  // otherwise the other half of the warp did it
    });
  }
  for (u32 r = 0; r < registers; ++r) {
    const u32 *from = w.words(i, 1 + r);
    GPU_EACH_LANE(w.mask, lane) {
      u32 *cell = place.cell(t, r, lane);
      if (PACK == 1) *cell = from[lane];
      else cell[0] = from[lane] & 0xFFFF, cell[1] = from[lane] >> 16;
    }
  }
}

// The warp's loads, or stores, so far are complete. Others learn of it at the next barrier; in a kernel that fences threads,
// only if the warp has executed a fence before.
template <bool LOADS> static void wait_for_tensor(Warp &w, const Instruction &i) {
  expect_whole(w, i);
  auto &own = tensor_memory_of(*w.block).of[w.number];
  const u32 agent = (LOADS ? TENSOR_LOADS : TENSOR_STORES) + w.number;
  const Time done = w.block->agent_time[agent]++;
  (LOADS ? own.loads_waited : own.stores_waited) = done;
  if (LOADS) own.loads.clear();
  if (!(i.flags & FENCES_THREADS)) know(w, agent, done);
}

// ---- fences ---------------------------------------------------------------------------------------------

static void fence_before(Warp &w, const Instruction &) {
  const auto &own = tensor_memory_of(*w.block).of[w.number];
  know(w, TENSOR_LOADS + w.number, own.loads_waited);
  know(w, TENSOR_STORES + w.number, own.stores_waited);
}
static void fence_after(Warp &w, const Instruction &) {
  auto &own = tensor_memory_of(*w.block).of[w.number];
  __builtin_memcpy(own.fenced, w.clocks->known, sizeof own.fenced);
}

// ---- registers that a load may still be filling ---------------------------------------------------------

// Replaces the handler of an instruction that may use results of a pending load, or copies of them. The original handler
// follows the operands, in two words.
static void touch_loaded(Warp &w, const Instruction &i) {
  const auto &loads = tensor_memory_of(*w.block).of[w.number].loads;
  const u32 lane = first_lane(w.mask);
  if (loads.count) found(w, LOAD_UNDER_WAY, i.number, lane, 0, loads[loads.count - 1]->number, w.thread(lane));
  const u64 handler = i.operands[i.operand_count] | (u64)i.operands[i.operand_count + 1] << 32;
  ((Handler)handler)(w, i);
}

static const Named TENSOR_MEMORY_TABLE[] = {
  GPU_HANDLER("tcgen05.alloc", allocate_columns)
  GPU_HANDLER("tcgen05.dealloc", free_columns)
  GPU_HANDLER("tcgen05.relinquish_alloc_permit", relinquish)
#define GPU_TENSOR_SHAPE(NAME, SHAPE)                            \
  GPU_HANDLER("tcgen05.ld." NAME, load_tensor<SHAPE, 1>)           \
  GPU_HANDLER("tcgen05.ld." NAME ".pack", load_tensor<SHAPE, 2>)   \
  GPU_HANDLER("tcgen05.st." NAME, store_tensor<SHAPE, 1>)          \
  GPU_HANDLER("tcgen05.st." NAME ".unpack", store_tensor<SHAPE, 2>)
  GPU_TENSOR_SHAPE("32x32b", Shape32x32b)
  GPU_TENSOR_SHAPE("16x64b", Shape16x64b)
  GPU_TENSOR_SHAPE("16x128b", Shape16x128b)
  GPU_TENSOR_SHAPE("16x256b", Shape16x256b)
  GPU_TENSOR_SHAPE("16x32bx2", Shape16x32bx2)
#undef GPU_TENSOR_SHAPE
  GPU_HANDLER("tcgen05.wait::ld", wait_for_tensor<true>)
  GPU_HANDLER("tcgen05.wait::st", wait_for_tensor<false>)
  GPU_HANDLER("tcgen05.fence::before_thread_sync", fence_before)
  GPU_HANDLER("tcgen05.fence::after_thread_sync", fence_after)
  GPU_HANDLER("tcgen05.touched", touch_loaded)
};

}  // namespace gpu
