// State of a launch of an instrumented kernel: the structures that Python passes (mirrored in witness/abi.py), and each
// thread's own tallies.
#pragma once
#include "launch.h"

enum Kind { LOAD_OUTSIDE, STORE_OUTSIDE, UNWRITTEN, RACE, OVERFLOW, PROMISE, UNDEFINED, KINDS };

struct Finding {  // of one kind at one site: the count, and the first occurrence
  i64 count;
  i32 program[3];
  i32 argument;  // its position among the pointers, or -1
  u64 address;
  i64 value;  // what overflowed, or broke a promise
  i64 other;  // the position in the grid of the program on the other side of a race
};

struct Traffic {
  i64 requested, distinct, program_sectors, launch_sectors;
};

struct Direction {  // loads of an argument, or its stores
  Traffic total;
  u32 *touched;  // a bit for each byte, a word for each 32-byte sector
};

struct Argument {
  u64 low, high;  // its elements lie in [low, high)
  i64 run;        // elements that lie one after another, in bytes; runs repeat along `rank` dimensions
  i32 rank;
  i32 region;  // or -1: no program writes here
  i32 shadow;  // or -1: all of it has been written
  i32 loaded, stored;
  i64 extent[64], stride[64], reach[65];  // reach[d]: bytes from the first to past the last byte of dimensions d, d + 1, ...
  Direction direction[2];              // loads, stores
};

// A cell records who accessed a few bytes. Programs are numbered by their position in the grid, continuing from launch
// to launch: numbers up to `Witness::base` belong to earlier launches, so cells need not be cleared between them.
struct Region {  // memory that programs write, through one argument or several
  u64 low, high;
  i32 shift;             // one cell for 1 << shift bytes
  i32 loaded, updated;   // whether programs read it, or update it atomically, as well
  u32 *writer;           // the last program that wrote
  u32 *reader, *updater; // the programs that read, that updated
};

struct Shadow {  // memory that was allocated but not written: a bit per byte says what has been written since
  u64 low, high;
  u8 *written;
  i32 loaded;
  i32 grain;  // what somebody else wrote shows this many bytes at a time: 4 or 8
};

struct Witness {
  Argument *arguments;
  Region *regions;
  Shadow *shadows;
  Finding *findings;  // [site][kind]
  i32 argument_count, region_count, shadow_count;
  i32 dry;      // evaluate addresses only, in a sample of the programs
  i32 ordered;  // atomics of this kernel may put programs in an order
  i32 lock;
  i64 dot_flops;
  i32 *locks;  // of LOCKS stripes of memory
  u32 base;    // the highest number used by earlier launches,
  u32 number;  // and by this one so far
  char *cells, *bits;  // memory for cells, and zeroed memory; as much as `Watched.prepare` of Python says
  struct Worker *workers;
  void *workers_memory;
  struct Actor *actors;      // [number - base]
  struct Clock *clocks;      // all that were made
  struct Release *releases;  // a hash table of addresses that programs have synchronized by
  u64 actor_capacity, release_count, release_capacity;
};

namespace loom {

constexpr bool CHECKS = LOOM_WITNESS & 1, COUNTS = LOOM_WITNESS & 2;

}  // namespace loom

// One thread's account of one direction of an argument, with what an access needs to know of the argument.
struct alignas(64) Tally {
  u64 low;      // the argument's first byte
  i64 dense;    // bytes from there on that are all an element's; 0 where that is not so simple
  u64 sectors_low;
  u32 *touched;
  u32 *program;  // the last program that touched a sector
  i64 requested, sectors;
  i32 watched;  // more has to be checked than whether an element is there
};

// What one thread keeps while it runs programs.
struct alignas(64) Worker {
  Witness *witness;
  Tally *tallies;  // [argument][direction]
  u32 number;      // the running program: base + 1 + its position in the grid
  u32 segment;     // its steps since its last release; the number itself where nothing is ordered
  u32 self;        // the set of this segment alone; the number itself where nothing is ordered
  u32 known_set;   // a set that was over when it was last looked at
  bool released;   // what comes next belongs to a new segment
  struct Clock *clock;
  i64 dot_flops;
};
