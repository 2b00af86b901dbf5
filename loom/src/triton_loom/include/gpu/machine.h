// A GPU in software: instructions, warps, blocks and launches.
//
// Python decodes PTX to a flat array of `Instruction`s (ptx/program.py); executing one calls its handler, a function of 32
// lanes. A register is an array of 32 lanes in its warp's register file: 4 bytes per lane for %rs and %r, 8 for %rd; a
// predicate is one u32 with a bit per lane. An operand is the byte offset of its register. Immediates, special registers
// (%tid.x, ...) and addresses of symbols are registers as well, filled before a block begins, so that handlers deal with
// only one kind of operand.
//
// How to add an instruction
//   1. Write its handler `void name(Warp &w, const Instruction &i)` in the header of its subject. It acts on the lanes in
//      `w.mask` (those that are active and whose guard holds; never none). `w.words(i, k)` and `w.longs(i, k)` are the 32
//      lanes of operand k, `w.flags(i, k)` its predicate bits; `i.immediate` is the constant that ptx/opcodes.py gave.
//   2. List it at the end of that header: `GPU_HANDLER("its.name", name)` in the header's table (see `memory.h`). If the
//      header is new, add its table to the GPU_LIBRARY of a .cpp file here; each such file is a library that
//      emulator/machine.py builds (`LIBRARIES`), in parallel with the others.
//   3. Give ptx/opcodes.py a row that maps the opcode and its modifiers to this handler, and decodes its operands.
//   Plain arithmetic needs none of this: codegen/ptx.py defines its meaning and ptx/scalars.py makes the handlers.
//
// How an asynchronous operation works (cp.async is the example: async.h)
//   The executor is an *agent*: a warp, or a unit that reads or writes memory on its own. An agent has a number and a
//   clock (clocks.h). An operation's accesses are entered into the shadow (shadow.h) under its agent and clock; whoever
//   waits for the operation learns that clock (`know`), and a barrier passes knowledge on. An access that meets one it does
//   not know of is a race. So use one agent for operations that complete in order (all copies of a warp, by groups), and
//   another agent for those that complete independently (the copies that one mbarrier counts).
//   The bytes themselves move either at once (`early`), or as late as the rules allow: the operation is put into
//   `block.pending`, and whoever waits for it calls `deliver` on it. A block in which nobody can continue delivers its
//   pending operations, one at a time, before it counts as deadlocked.
//   An instruction that has to wait (mbarrier.try_wait) leaves its lanes POLLING: they execute it again when something has
//   happened in the block (`look_again` in mbarrier.h). One that must not wait (mbarrier.test_wait) sets its result to
//   false and calls `w.let_others_run()`; the loop around it, which is part of the PTX, comes back later.
#pragma once
#include "../ptx.h"
#include "storage.h"

namespace gpu {

constexpr u32 LANES = 32, WARPS = 32, FULL = ~0u, NOWHERE = ~0u;
constexpr u32 SHARED_BASE = 1024;  // the address of the first byte of shared memory, since 0 is not a valid address

struct Warp;
struct Block;
struct Worker;
struct Launch;
struct Instruction;
typedef void (*Handler)(Warp &, const Instruction &);

struct Instruction {  // mirrored in emulator/machine.py
  Handler handler;
  const u32 *operands;  // offsets into the register file
  i64 immediate;
  u32 operand_count;
  u32 guard, flip;  // a predicate; `flip` (all ones or zero) negates its bits
  u32 target;       // of a branch
  u32 reconverge;   // where lanes that diverged at a branch reconverge: its immediate post-dominator
  u32 number;       // its own, in the program
  u32 flags;        // of Flags
};
enum Flags : u32 {
  ATOMIC = 1,
  UNFENCED = 2,          // of a wgmma: no wgmma.fence stands between it and an access to its registers
  UNIFORM_OPERANDS = 4,  // of a shuffle: the lane and the clamp are constants
  FENCES_THREADS = 8,    // of a tcgen05: the kernel has a tcgen05.fence, so it must have all that it needs
  TENSOR_COPY = 16,      // a tcgen05.cp: products of the same thread come after it
  ACQUIRES = 32, RELEASES = 64,  // of what is strong, and of fences
  NARROW = 128,                  // and whose scope is the block
};

// ---- what is found --------------------------------------------------------------------------------------

enum Kind : i32 {  // in the order of KINDS in emulator/findings.py
  SHARED_RACE,
  GLOBAL_RACE,
  SHARED_UNINITIALIZED,
  SHARED_BOUNDS,
  GLOBAL_BOUNDS,
  GLOBAL_READ_ONLY,
  MISALIGNED,
  SPLIT_WARP,
  LANE_NOT_THERE,
  LANES_DISAGREE,
  BARRIER_NOT_REACHED,
  DEADLOCK,
  DIVISION_BY_ZERO,
  BARRIER_MISUSE,
  COPY_MISUSE,
  NO_MBARRIER,
  MBARRIER_IN_USE,
  MBARRIER_OVERRUN,
  COPY_OUTLIVES_PHASE,
  COPY_OUTLIVES_BLOCK,
  NO_PROXY_FENCE,
  NO_PROXY_FENCE_AFTER_COPY,
  TENSOR_MAP,
  TENSOR_MAP_NOT_ACQUIRED,
  MATRIX_OPERAND,
  PRODUCT_UNDER_WAY,
  NO_PRODUCT_FENCE,
  WARPS_DISAGREE,
  LOCAL_BOUNDS,
  TENSOR_RACE,
  TENSOR_UNINITIALIZED,
  TENSOR_BOUNDS,
  TENSOR_MISUSE,
  LOAD_UNDER_WAY,
  NO_TENSOR_FENCE,
  TIME_LIMIT,
  NO_MBARRIER_FENCE,
};

constexpr u32 NOBODY = ~0u;

struct Finding {  // mirrored in emulator/machine.py
  i32 kind;
  u32 instruction, other_instruction;  // NOWHERE if there is none
  u32 thread, other_thread;            // of the block
  u32 block[3], other_block[3];
  u64 address;
  u64 count;  // how often
  u64 order;  // of the block in the grid: of several, the first one is kept
};

// ---- a launch -------------------------------------------------------------------------------------------

struct Range {
  u64 begin, end;
  u64 writable;
};

struct Constant {  // a register that is the same in all lanes and never written
  u32 offset, bytes;
  u64 value;
};

enum SpecialKind : u32 {  // in the order of SPECIALS in ptx/program.py
  TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z,
  LANEID, WARPID, NWARPID, PARAMETERS, DYNAMIC_SHARED, CLUSTER_CTAID, CLUSTER_NCTAID, LANEMASK_LT, LANEMASK_LE,
  LANEMASK_EQ, LANEMASK_GE, LANEMASK_GT, CLOCK, GRIDID, SMID, NSMID,
};
struct Special {
  u32 offset, kind;
  u64 addend;
};

enum Check : u32 { HAZARDS = 1, EARLY = 2, ALONE = 4, COOPERATIVE = 8 };

// Python's functions by which the launching thread checks for Ctrl-C.
struct Interpreter {
  int (*enter)();
  void (*leave)(int);
  int (*is_interrupted)();
};

struct Launch {  // mirrored in emulator/machine.py
  const Instruction *instructions;
  const Constant *constants;
  const Special *specials;
  const Range *ranges;  // sorted and disjoint
  const u8 *parameters;
  u64 *executed;      // by instruction: warps that executed it
  Finding *findings;  // sorted by nothing; one for each kind and pair of instructions
  const struct Counting *counting;  // by instruction: what is counted of it (counters.h), or null
  struct Counts *counts;
  u32 *storing;  // by instruction and warp: lanes that have stored to global memory by it
  u64 findings_total;
  u64 limit;  // nanoseconds that a block may take; 0: no limit
  Interpreter interpreter;
  u32 instruction_count, constant_count, special_count, range_count;
  u32 finding_capacity, finding_count;
  u32 register_bytes, parameter_bytes, shared_bytes, threads;
  u32 grid[3];
  u32 options;  // of Check
  u32 workers;
  // Private to the machine.
  i32 lock;
  u64 next_block;
  u32 first_block;  // global_shadow.h
  u32 waiting;      // workers whose blocks wait for others
  struct GlobalShadow *global_shadow;
  i32 thread;         // that launches
  u32 started, over;  // workers, and of those the ones that have no block any more
  u32 stopped;        // of `Stop`
};
enum Stop : u32 { NOT_STOPPED, BY_LIMIT, BY_INTERRUPT };

// ---- a warp ---------------------------------------------------------------------------------------------

enum State : u32 { FREE, READY, FORKED, AT_BARRIER, POLLING };

// Lanes that follow the same path. A branch at which they diverge splits off two fragments; the original one waits at the
// reconvergence point.
struct Fragment {
  u32 pc, reconverge, lanes;
  State state;
  u32 parent, children;
  u32 barrier;
};
constexpr u32 FRAGMENTS = 2 * LANES;

struct Warp {
  u8 *registers;
  u32 mask;    // the lanes of the current instruction
  u32 active;  // the lanes of the current fragment
  u32 pc, reconverge;
  u32 running;  // cleared by what stops the warp for now
  u32 number;   // in the block
  u32 live;     // lanes that have not left the kernel
  u32 current;  // fragment
  u32 fragments_used;
  u32 turns;  // backward branches since another warp ran
  u64 state;  // a digest of its registers when it last let others run
  u32 polls;  // whether one of its fragments waits for an event of the block
  u64 polled;  // the block's events when it began to
  Block *block;
  Fragment fragments[FRAGMENTS];
  // What the warp knows of other agents, and its own clock: clocks.h.
  struct Clocks *clocks;

  u32 *words(const Instruction &i, u32 k) { return (u32 *)(registers + i.operands[k]); }
  u64 *longs(const Instruction &i, u32 k) { return (u64 *)(registers + i.operands[k]); }
  u32 &flags(const Instruction &i, u32 k) { return *(u32 *)(registers + i.operands[k]); }
  u32 thread(u32 lane) const { return number * LANES + lane; }
  bool is_split() const { return active != live; }
  void let_others_run() { running = 0; }
};

// ---- a block --------------------------------------------------------------------------------------------

typedef u32 Time;  // clocks.h
constexpr u32 AGENTS = 256;
constexpr u32 KNOWLEDGE = AGENTS + 96;  // entries of knowledge: one per agent, and the further ones of clocks.h

struct Barrier {
  u32 arrived, expected;  // threads; 0 expected: all of them
  u32 waiting;            // warps that wait for the others to arrive, a bit each
  Time known[KNOWLEDGE];  // to those that have arrived
};
constexpr u32 BARRIERS = 16;

// A pending asynchronous operation. `operation` points to its handler's saved state.
struct Pending {
  void (*deliver)(Block &, Pending &);
  void *operation;
  u32 warp;
  u64 ticket;  // key by which a waiter finds it: a group, a barrier's address
};

struct Block {
  Launch *launch;
  Worker *worker;
  u32 id[3];
  u64 linear;
  u8 *shared;  // shared[0] has the address SHARED_BASE
  u32 shared_bytes, warp_count, thread_count;
  u32 live_threads;
  u64 deadline;  // the time limit
  u64 events;  // counts events that may let a waiting thread continue
  Warp warps[WARPS];
  Barrier barriers[BARRIERS];
  Vec<Pending> pending;
  bool checks;
  struct Shadow *shadow;     // of shared memory: shadow.h
  struct Synchronization *synchronization;  // between blocks: synchronization.h
  struct History *history;                  // what it has released and acquired, if anything
  struct Closures *closures;                // what its warps know from that
  Time began;                // clocks.h
  Time agent_time[AGENTS];   // of agents that are no warps
  struct Units *units;       // asynchronous units, if the kernel has used one: units.h
  void (*end)(Block &);      // called for them at the end of a block
  void (*release)(Block &);  // and at the end of the launch
  struct TensorMemory *tensor_memory;  // if the kernel has used it: tensor_memory.h
  void (*end_tensor_memory)(Block &);
  void (*release_tensor_memory)(Block &);

  void happened() { ++events; }
};

// One CPU thread and its state across blocks.
struct Worker {
  Launch *launch;
  Block block;
  u64 *executed;
  struct Counts *counts;  // null if nothing is counted
  u8 *registers;
  u8 *shared_memory;
  const Range *last_range;
  struct Page *last_page;
  bool launches;   // it is the thread that launched
  u64 next_look;   // when it asks again whether it is to stop
  u32 stops;       // of warps
};

// ---- findings -------------------------------------------------------------------------------------------

__attribute__((cold)) LOOM_NOINLINE void report(Block &b, const Finding &found) {
  Launch &launch = *b.launch;
  while (__atomic_exchange_n(&launch.lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
  ++launch.findings_total;
  Finding *same = nullptr;
  for (u32 k = 0; k < launch.finding_count && !same; ++k) {
    Finding &f = launch.findings[k];
    if (f.kind == found.kind && f.instruction == found.instruction && f.other_instruction == found.other_instruction)
      same = &f;
  }
  if (same) {
    const u64 count = same->count + 1;
    if (found.order < same->order) *same = found;
    same->count = count;
  } else if (launch.finding_count < launch.finding_capacity) {
    launch.findings[launch.finding_count] = found;
    launch.findings[launch.finding_count++].count = 1;
  }
  __atomic_store_n(&launch.lock, 0, __ATOMIC_RELEASE);
}

// A finding at an instruction of a warp, by one of its lanes.
__attribute__((cold)) LOOM_NOINLINE void found(Warp &w, Kind kind, u32 instruction, u32 lane, u64 address = 0,
                                               u32 other_instruction = NOWHERE, u32 other_thread = NOBODY) {
  Block &b = *w.block;
  Finding f = {kind, instruction, other_instruction, w.thread(lane), other_thread, {}, {}, address, 1, b.linear};
  const bool race = kind == SHARED_RACE || kind == TENSOR_RACE;
  if (race && other_instruction > instruction)  // it is one race, whichever access came second here
    f = {kind, other_instruction, instruction, other_thread, w.thread(lane), {}, {}, address, 1, b.linear};
  __builtin_memcpy(f.block, b.id, sizeof b.id);
  __builtin_memcpy(f.other_block, b.id, sizeof b.id);
  report(b, f);
}

LOOM_INLINE u32 first_lane(u32 lanes) { return (u32)__builtin_ctz(lanes); }

// The span of some lanes' addresses.
struct Extent {
  u64 low, high;  // the lowest and the highest address
  u64 bits;       // all of the addresses, or-ed
};
LOOM_INLINE Extent extent_of(const u64 *address, u32 lanes) {
  const u64 some = address[first_lane(lanes)];
  Extent e = {some, some, 0};
  for (u32 lane = 0; lane < LANES; ++lane) {
    const u64 a = lanes >> lane & 1 ? address[lane] : some;
    e.low = a < e.low ? a : e.low;
    e.high = a > e.high ? a : e.high;
    e.bits |= a;
  }
  return e;
}

// For instructions whose behavior is undefined unless all threads of a warp execute them together.
LOOM_INLINE void expect_whole(Warp &w, const Instruction &i) {
  if (__builtin_expect(w.mask != w.live, 0)) found(w, SPLIT_WARP, i.number, first_lane(w.mask));
}

// ---- the table of handlers ------------------------------------------------------------------------------

struct Named {
  const char *name;
  Handler handler;
};
#define GPU_HANDLER(NAME, ...) {NAME, __VA_ARGS__},

struct Table {
  const Named *rows;
  u32 count;
};
#define GPU_TABLE(NAME) {NAME, sizeof NAME / sizeof NAME[0]}
#define GPU_EXPORT extern "C" __attribute__((visibility("default")))

// Exports of a library of handlers: the handler of a name, and the names by index, null after the last.
#define GPU_LIBRARY(...)                                                                  \
  static const gpu::Table GPU_TABLES[] = {__VA_ARGS__};                                   \
  GPU_EXPORT gpu::Handler gpu_handler(const char *name) {                                 \
    for (const gpu::Table &table : GPU_TABLES)                                            \
      for (u32 k = 0; k < table.count; ++k)                                               \
        if (!__builtin_strcmp(table.rows[k].name, name)) return table.rows[k].handler;    \
    return nullptr;                                                                       \
  }                                                                                       \
  GPU_EXPORT const char *gpu_handler_name(u32 number) {                                   \
    for (const gpu::Table &table : GPU_TABLES) {                                          \
      if (number < table.count) return table.rows[number].name;                           \
      number -= table.count;                                                              \
    }                                                                                     \
    return nullptr;                                                                       \
  }

}  // namespace gpu
