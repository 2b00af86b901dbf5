// The shadow of shared memory: who wrote and who read each byte, and whether that is ordered before the next access.
//
// The shadow keeps the last write of each byte, and the last read of each agent (one plane of the shadow for each that
// reads). A read must know the last write; a write must know the last write and all reads. A write that does not change a
// byte does not count: Triton lets all owners of a replicated value store it, and the order makes no difference.
#pragma once
#include "clocks.h"

namespace gpu {

// The time, instruction, agent and lane of an access.
typedef u64 Stamp;
constexpr u32 SEVERAL_LANES = 32;
constexpr Time LAST_TIME = (1u << 28) - 1;
LOOM_INLINE Stamp stamp(Time time, u32 instruction, u32 lane, u32 agent) {
  return (u64)time << 36 | (u64)instruction << 14 | (u64)lane << 8 | agent;
}
LOOM_INLINE Time time_of(Stamp s) { return (Time)(s >> 36); }
LOOM_INLINE u32 instruction_of(Stamp s) { return (u32)(s >> 14) & 0x3FFFFF; }
LOOM_INLINE u32 lane_of(Stamp s) { return (u32)(s >> 8) & 63; }
LOOM_INLINE u32 agent_of(Stamp s) { return (u32)s & 255; }

struct Shadow {
  Stamp *writes;
  Stamp *reads[AGENTS];  // null until the agent reads; of units by granules, not by bytes
  u32 readers[AGENTS], reader_count;
  Time latest_read[AGENTS];  // anywhere: an agent that knows this knows all reads of the agent
  u32 bytes;
};

static Shadow *new_shadow(u32 bytes) {
  Shadow *s = (Shadow *)allocate(sizeof(Shadow));
  s->bytes = bytes;
  s->writes = (Stamp *)calloc(bytes + 64, sizeof(Stamp));
  return s;
}
static void free_shadow(Shadow *s) {
  if (!s) return;
  for (u32 k = 0; k < s->reader_count; ++k) free(s->reads[s->readers[k]]);
  free(s->writes);
  free(s);
}
// Units read at least eight aligned bytes: warps and their copies have a plane of bytes, units one of 8-byte granules.
constexpr u32 GRANULE = 8;
LOOM_INLINE u32 granule_of(u32 agent) { return agent < MATRIX_UNITS ? 1 : GRANULE; }

LOOM_NOINLINE Stamp *new_plane(Shadow &s, u32 agent) {
  s.readers[s.reader_count++] = agent;
  return s.reads[agent] = (Stamp *)calloc(s.bytes / granule_of(agent) + 64, sizeof(Stamp));
}
// The plane of an agent that is about to read.
LOOM_INLINE Stamp *plane_of(Shadow &s, u32 agent, Time time) {
  s.latest_read[agent] = time;
  return s.reads[agent] ? s.reads[agent] : new_plane(s, agent);
}

// ---- is it known? ---------------------------------------------------------------------------------------

// Whether an access of a lane comes after the stamped one in every order in which the block could have run.
LOOM_INLINE bool comes_after(const Warp &w, u32 lane, Stamp s) {
  const Clocks &c = *w.clocks;
  const u32 agent = agent_of(s);
  if (time_of(s) <= c.known[agent]) return true;
  if (agent < WARPS && lane_of(s) == 0 && time_of(s) <= c.known[LEADERS + agent]) return true;
  if (lane_of(s) != lane) return false;
  return agent == w.number || (agent == COPIES + w.number && time_of(s) <= c.copies_waited);
}

__attribute__((cold)) LOOM_NOINLINE void report_race(Warp &w, u32 instruction, u32 lane, Stamp s, u32 address) {
  const u32 agent = agent_of(s), warp = agent < FURTHER ? agent % WARPS : NOBODY;
  const u32 other_lane = lane_of(s) < LANES ? lane_of(s) : lane == 0 ? 1 : 0;
  const u32 thread = warp == NOBODY ? NOBODY : warp * LANES + other_lane;
  const bool one_instruction = agent == w.number && instruction_of(s) == instruction;
  found(w, one_instruction ? LANES_DISAGREE : SHARED_RACE, instruction, lane, address, instruction_of(s), thread);
}

// ---- one access -----------------------------------------------------------------------------------------

// A lane, or an operation that it issued, reads `n` bytes. `as` has the agent, its time and the instruction.
LOOM_INLINE void shadow_read(Warp &w, u32 lane, u32 address, u32 n, Stamp as, Stamp *plane) {
  Shadow &shadow = *w.block->shadow;
  const u32 at = address - SHARED_BASE;
  const Stamp *writes = shadow.writes + at;
  Stamp differs = 0;
  for (u32 k = 1; k < n; ++k) differs |= writes[k] ^ writes[0];
  bool fine = differs == 0 && time_of(writes[0]) >= w.block->began && comes_after(w, lane, writes[0]);
  for (u32 k = 0; k < n && !fine; ++k) {
    if (time_of(writes[k]) < w.block->began) {
      found(w, SHARED_UNINITIALIZED, instruction_of(as), lane, address + k);
      break;
    }
    if (!comes_after(w, lane, writes[k])) {
      report_race(w, instruction_of(as), lane, writes[k], address + k);
      break;
    }
  }
  Stamp *reads = plane + at;
  const Stamp several = (as & ~(63ull << 8)) | (u64)SEVERAL_LANES << 8;
  for (u32 k = 0; k < n; ++k) {
    const bool again = time_of(reads[k]) == time_of(as) && lane_of(reads[k]) != lane_of(as);
    reads[k] = again ? several : as;
  }
}

// Whether the bytes may be read by somebody later.
LOOM_INLINE bool after_reads(Warp &w, u32 lane, u32 at, u32 n, Stamp &culprit, u32 &which) {
  Shadow &shadow = *w.block->shadow;
  for (u32 r = 0; r < shadow.reader_count; ++r) {
    const u32 agent = shadow.readers[r];
    if (shadow.latest_read[agent] <= w.clocks->known[agent]) continue;
    const u32 granule = granule_of(agent), first = at / granule, count = (at + n - 1) / granule - first + 1;
    const Stamp *reads = shadow.reads[agent] + first;
    Stamp latest = 0;
    for (u32 k = 0; k < count; ++k) latest = reads[k] > latest ? reads[k] : latest;
    if (time_of(latest) <= w.clocks->known[agent]) continue;
    for (u32 k = 0; k < count; ++k)
      if (!comes_after(w, lane, reads[k])) return culprit = reads[k], which = granule == 1 ? k : 0, false;
  }
  return true;
}

LOOM_NOINLINE void shadow_write_slowly(Warp &w, u32 lane, u32 address, const u8 *data, u32 n, Stamp as) {
  Shadow &shadow = *w.block->shadow;
  for (u32 k = 0; k < n; ++k) {
    const u32 at = address - SHARED_BASE + k;
    Stamp &last = shadow.writes[at];
    const bool written = time_of(last) >= w.block->began;
    if (data && written && w.block->shared[at] == data[k]) continue;
    Stamp culprit = last;
    u32 which;
    if ((written && !comes_after(w, lane, last)) || !after_reads(w, lane, at, 1, culprit, which)) {
      report_race(w, instruction_of(as), lane, culprit, address + k);
      data = nullptr;  // one finding is enough for an access
      for (; k < n; ++k) shadow.writes[address - SHARED_BASE + k] = as;
      return;
    }
    last = as;
  }
}

// A lane, or an operation that it issued, writes `n` bytes; `data` is null if they are not known yet.
LOOM_INLINE void shadow_write(Warp &w, u32 lane, u32 address, const u8 *data, u32 n, Stamp as) {
  Shadow &shadow = *w.block->shadow;
  const u32 at = address - SHARED_BASE;
  Stamp *writes = shadow.writes + at;
  Stamp differs = 0, culprit;
  u32 which;
  for (u32 k = 1; k < n; ++k) differs |= writes[k] ^ writes[0];
  const bool fine = differs == 0 && comes_after(w, lane, writes[0]) && after_reads(w, lane, at, n, culprit, which);
  if (!fine) return shadow_write_slowly(w, lane, address, data, n, as);
  for (u32 k = 0; k < n; ++k) writes[k] = as;
}

// ---- what the lanes of an instruction do ----------------------------------------------------------------

#define GPU_EACH_LANE(LANES_, LANE) for (u32 rest_ = LANES_, LANE; rest_ && (LANE = first_lane(rest_), true); rest_ &= rest_ - 1)

template <u32 BYTES>
LOOM_INLINE void read_shared_of(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  Stamp *plane = plane_of(*w.block->shadow, w.number, w.clocks->own);
  const u32 n = BYTES ? BYTES : bytes;
  GPU_EACH_LANE(lanes, lane)
    shadow_read(w, lane, (u32)address[lane], n, stamp(w.clocks->own, i.number, lane, w.number), plane);
}
LOOM_NOINLINE void read_shared(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  switch (bytes) {
    case 2: return read_shared_of<2>(w, i, address, bytes, lanes);
    case 4: return read_shared_of<4>(w, i, address, bytes, lanes);
    case 16: return read_shared_of<16>(w, i, address, bytes, lanes);
    default: return read_shared_of<0>(w, i, address, bytes, lanes);
  }
}

// Rows of 16 bytes that the warp reads together: each goes to several lanes, whichever lane provided its address.
LOOM_NOINLINE void read_shared_rows(Warp &w, const Instruction &i, const u64 *address, u32 lanes) {
  Stamp *plane = plane_of(*w.block->shadow, w.number, w.clocks->own);
  const Stamp as = stamp(w.clocks->own, i.number, SEVERAL_LANES, w.number);
  Stamp known = 0;  // a write that is known to come before
  GPU_EACH_LANE(lanes, lane) {
    const u32 at = (u32)address[lane] - SHARED_BASE;
    const Stamp *writes = w.block->shadow->writes + at;
    Stamp differs = 0;
    for (u32 k = 0; k < 16; ++k) differs |= writes[k] ^ known;
    if (__builtin_expect(differs != 0 || known == 0, 0)) {
      shadow_read(w, lane, (u32)address[lane], 16, as, plane);
      known = writes[15];
    }
    for (u32 k = 0; k < 16; ++k) plane[at + k] = as;
  }
}

// Lane by lane, each store before the next check: two lanes may access the same bytes.
template <u32 BYTES>
LOOM_INLINE void write_shared_of(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                 u32 bytes, u32 lanes) {
  const u32 n = BYTES ? BYTES : bytes;
  GPU_EACH_LANE(lanes, lane) {
    const u8 *from = data + lane * stride;
    shadow_write(w, lane, (u32)address[lane], from, n, stamp(w.clocks->own, i.number, lane, w.number));
    __builtin_memcpy(w.block->shared + (address[lane] - SHARED_BASE), from, n);
  }
}
LOOM_NOINLINE void write_shared(Warp &w, const Instruction &i, const u64 *address, const u8 *data, u32 stride,
                                u32 bytes, u32 lanes) {
  switch (bytes) {
    case 2: return write_shared_of<2>(w, i, address, data, stride, bytes, lanes);
    case 4: return write_shared_of<4>(w, i, address, data, stride, bytes, lanes);
    case 16: return write_shared_of<16>(w, i, address, data, stride, bytes, lanes);
    default: return write_shared_of<0>(w, i, address, data, stride, bytes, lanes);
  }
}

LOOM_INLINE bool is_atomic(const Block &b, u32 instruction) { return b.launch->instructions[instruction].flags & ATOMIC; }

// Atomic operations do not race with each other.
LOOM_NOINLINE void update_shared(Warp &w, const Instruction &i, const u64 *address, u32 bytes, u32 lanes) {
  Shadow &shadow = *w.block->shadow;
  GPU_EACH_LANE(lanes, lane) {
    const u32 at = (u32)address[lane] - SHARED_BASE;
    for (u32 k = 0; k < bytes; ++k) {
      Stamp &last = shadow.writes[at + k], culprit = last;
      u32 which;
      if (time_of(last) < w.block->began) {
        found(w, SHARED_UNINITIALIZED, i.number, lane, address[lane] + k);
        break;
      }
      const bool atomic_before = is_atomic(*w.block, instruction_of(last));
      if ((!atomic_before && !comes_after(w, lane, last)) || !after_reads(w, lane, at + k, 1, culprit, which)) {
        report_race(w, i.number, lane, culprit, (u32)address[lane] + k);
        break;
      }
    }
    const Stamp as = stamp(w.clocks->own, i.number, lane, w.number);
    for (u32 k = 0; k < bytes; ++k) shadow.writes[at + k] = as;
  }
}

}  // namespace gpu
