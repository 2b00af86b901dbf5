// Memory traffic of a launch, counted by instruction: sectors of global memory, wavefronts of shared memory.
//
// Counting reads an instruction's registers before its handler does: handlers need not know of it, and a launch without
// counters pays nothing. Bulk copies, which proceed row by row, count by `count_run` in their handlers.
#pragma once
#include "machine.h"

namespace gpu {

constexpr u32 SECTOR = 32;     // bytes that global memory gives at a time
constexpr u32 WAVEFRONT = 128;  // bytes that shared memory gives at a time: 32 banks of a word

enum How : u32 { NOT_COUNTED, GLOBAL_REQUEST, SHARED_REQUEST, COPY_REQUEST };  // in the order of HOW in emulator/counters.py

struct Counting {  // mirrored in emulator/counters.py
  u32 how;      // of How
  u32 operand;  // the address; of a copy it is 0 and the other address 1
  u32 bytes;    // of a lane
  u32 lanes;    // if not 0, those that give addresses, whoever executes the instruction (ldmatrix)
};

struct Counts {  // mirrored in emulator/counters.py
  u64 requests, bytes, sectors, least_sectors;                         // global memory
  u64 shared_requests, shared_bytes, wavefronts, least_wavefronts;  // shared memory
};

// ---- global memory --------------------------------------------------------------------------------------

LOOM_INLINE u64 sectors_of(u64 bytes) { return (bytes + SECTOR - 1) / SECTOR; }

// Contiguous bytes of global memory.
LOOM_INLINE void count_run(Counts &c, u64 address, u64 bytes) {
  c.sectors += (address + bytes - 1) / SECTOR - address / SECTOR + 1;
  c.least_sectors += sectors_of(bytes);
}

// Scattered bytes. The minimum is the cost of the same bytes side by side, each once however many lanes request it.
LOOM_NOINLINE void count_scattered(Counts &c, const u64 *address, u32 bytes, u32 lanes) {
  u64 sectors[2 * LANES];
  u32 touched[2 * LANES];  // a bit for each byte
  u32 count = 0, last = 0;
  u64 met = 0;  // a bit for the hash of each sector: where it is not set, the sector is new
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u64 begin = address[first_lane(rest)], end = begin + bytes;
    for (u64 at = begin; at < end; at = (at / SECTOR + 1) * SECTOR) {
      const u64 sector = at / SECTOR, ends = end - sector * SECTOR;
      if (!count || sectors[last] != sector) {
        const u64 bit = 1ull << (sector * 0x9E3779B97F4A7C15ull >> 58);
        last = met & bit ? 0 : count;
        while (last < count && sectors[last] != sector) ++last;
        if (last == count) sectors[count] = sector, touched[count++] = 0;
        met |= bit;
      }
      touched[last] |= (ends >= SECTOR ? FULL : (1u << ends) - 1) & (FULL << at % SECTOR);
    }
  }
  u64 distinct = 0;
  for (u32 k = 0; k < count; ++k) distinct += (u64)__builtin_popcount(touched[k]);
  c.sectors += count;
  c.least_sectors += sectors_of(distinct);
}

LOOM_INLINE void count_global(Counts &c, const u64 *address, u32 bytes, u32 lanes) {
  ++c.requests;
  c.bytes += (u64)bytes * (u32)__builtin_popcount(lanes);
  const u32 first = first_lane(lanes);
  const u64 origin = address[first] - (u64)first * bytes;
  u64 in_a_row = 0, same = 0;  // 0 if all lanes' addresses follow each other, or are one
  for (u32 lane = 0; lane < LANES; ++lane) {
    const u64 here = lanes >> lane & 1 ? ~0ull : 0;
    in_a_row |= (address[lane] - (u64)lane * bytes - origin) & here;
    same |= (address[lane] - address[first]) & here;
  }
  const u32 neighbors = lanes >> first;
  if (!in_a_row && !(neighbors & (neighbors + 1)))
    count_run(c, address[first], (u64)bytes * (u32)__builtin_popcount(lanes));
  else if (!same) count_run(c, address[first], bytes);
  else count_scattered(c, address, bytes, lanes);
}

// ---- shared memory --------------------------------------------------------------------------------------

// The maximum number of different places that some lanes want in one slot. A place is as wide as an access; a slot is its
// banks.
template <u32 SLOTS> LOOM_NOINLINE u32 most_in_a_slot(const u32 *place, u32 lanes) {
  u32 kept[SLOTS][SLOTS];
  u32 count[SLOTS] = {}, most = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 wanted = place[first_lane(rest)], slot = wanted % SLOTS;
    u32 k = 0;
    while (k < count[slot] && kept[slot][k] != wanted) ++k;
    if (k == count[slot]) kept[slot][count[slot]++] = wanted;
    most = count[slot] > most ? count[slot] : most;
  }
  return most;
}

// SLOTS lanes are served together, as many as fit in 128 bytes.
template <u32 SLOTS> LOOM_INLINE void count_wavefronts(Counts &c, const u32 *address, u32 lanes) {
  u32 place[LANES], slot[LANES];
  for (u32 lane = 0; lane < LANES; ++lane) {
    place[lane] = address[lane] / (WAVEFRONT / SLOTS);
    slot[lane] = (lanes >> lane & 1) << place[lane] % SLOTS;
  }
  for (u32 first = 0; first < LANES; first += SLOTS) {
    const u32 group = lanes >> first & (FULL >> (LANES - SLOTS));
    u32 used = 0;
    for (u32 k = 0; k < SLOTS; ++k) used |= slot[first + k];
    const bool apart = __builtin_popcount(used) == __builtin_popcount(group);
    c.least_wavefronts += group != 0;
    c.wavefronts += apart ? group != 0 : most_in_a_slot<SLOTS>(place + first, group);
  }
}

LOOM_INLINE void count_shared(Counts &c, const u32 *address, u32 bytes, u32 lanes) {
  ++c.shared_requests;
  c.shared_bytes += (u64)bytes * (u32)__builtin_popcount(lanes);
  if (bytes <= 4) count_wavefronts<32>(c, address, lanes);
  else if (bytes == 8) count_wavefronts<16>(c, address, lanes);
  else count_wavefronts<8>(c, address, lanes);
}

// ---- an instruction -------------------------------------------------------------------------------------

LOOM_NOINLINE void count_request(Warp &w, const Instruction &i, const Counting &counting, Counts &c) {
  const u32 lanes = counting.lanes ? counting.lanes : w.mask;
  if (counting.how == GLOBAL_REQUEST) {
    u64 address[LANES];
    const u64 *base = w.longs(i, counting.operand);
    for (u32 lane = 0; lane < LANES; ++lane) address[lane] = base[lane] + (u64)i.immediate;
    return count_global(c, address, counting.bytes, lanes);
  }
  u32 address[LANES];
  const u32 *base = w.words(i, counting.operand);
  for (u32 lane = 0; lane < LANES; ++lane) address[lane] = base[lane] + (u32)i.immediate;
  count_shared(c, address, counting.bytes, lanes);
  if (counting.how != COPY_REQUEST) return;
  u64 source[LANES];
  const u64 *from = w.longs(i, 1);
  const u32 *given = w.words(i, 2);  // bytes, of which Triton gives all or none: such a lane copies zeros
  u32 reading = 0;
  for (u32 lane = 0; lane < LANES; ++lane) {
    source[lane] = from[lane] + (u64)(i.immediate >> 32);
    reading |= (given[lane] ? lanes : 0) & 1u << lane;
  }
  if (reading) count_global(c, source, counting.bytes, reading);
}

LOOM_INLINE void count(Warp &w, const Instruction &i) {
  const Counting &counting = w.block->launch->counting[i.number];
  if (counting.how) count_request(w, i, counting, w.block->worker->counts[i.number]);
}

// Adds a worker's counts to the launch's.
static void add_counts(Launch &launch, const Counts *counts) {
  const u64 *from = (const u64 *)counts;
  u64 *to = (u64 *)launch.counts;
  for (u64 k = 0; k < sizeof(Counts) / sizeof(u64) * launch.instruction_count; ++k)
    if (from[k]) __atomic_fetch_add(&to[k], from[k], __ATOMIC_RELAXED);
}

}  // namespace gpu
