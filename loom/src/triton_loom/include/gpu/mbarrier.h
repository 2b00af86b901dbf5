// mbarriers: barriers in shared memory that count arrivals of threads and bytes of copies.
//
// A phase is over when all expected arrivals and bytes have come; the next begins at once. A wait names a phase by its
// parity: it ends when the phase of that parity is over, that is, when the current one has the other parity. The shadow
// treats the eight bytes as written by init and inval, and read by every use in between: a use that is not ordered after
// the init, or an inval that is not ordered after all uses, is a race.
#pragma once
#include "control.h"
#include "block_units.h"

namespace gpu {

constexpr u32 MBARRIER_BYTES = 8;
constexpr u32 MOST_ARRIVALS = (1u << 20) - 1;
constexpr i64 MOST_BYTES = (1 << 20) - 1;

LOOM_NOINLINE MBarrier *find_mbarrier(Units &units, u32 address) {
  for (MBarrier *m : units.mbarriers)
    if (m->address == address) return units.found[address / 8 % 64] = m;
  return nullptr;
}
LOOM_INLINE MBarrier *mbarrier_slot(Block &b, u32 address) {
  Units &units = units_of(b);
  MBarrier *last = units.found[address / 8 % 64];
  return last && last->address == address ? last : find_mbarrier(units, address);
}

// Eight bytes of shared memory for one lane, or nothing.
LOOM_INLINE bool is_there(Warp &w, const Instruction &i, u32 lane, u32 address) {
  u64 addresses[LANES];
  addresses[lane] = address;
  return reachable_shared(w, i, addresses, MBARRIER_BYTES, 1u << lane) != 0;
}
// The opaque content in shared memory that stands for an mbarrier: its count, or a mark that there is none.
LOOM_INLINE void write_image(Warp &w, const Instruction &i, u32 lane, u32 address, u64 image) {
  write_one(w, i, lane, address, &image, sizeof image);
}

// Another write to one of its bytes since it was initialized, if there is one.
LOOM_INLINE Stamp written_over(const Block &b, const MBarrier &m) {
  for (u32 k = 0; k < MBARRIER_BYTES && b.checks; ++k)
    if (const Stamp last = b.shadow->writes[m.address - SHARED_BASE + k]; last != m.made) return last;
  return 0;
}

// The mbarrier that a lane uses, as itself or for an agent whose operation it issues. Reports and returns null if there is
// none: not initialized, no longer valid, or overwritten.
LOOM_NOINLINE MBarrier *mbarrier_at(Warp &w, const Instruction &i, u32 lane, u32 address, u32 agent) {
  Block &b = *w.block;
  if (!is_there(w, i, lane, address)) return nullptr;
  MBarrier *m = mbarrier_slot(b, address);
  if (!m || !m->live) return found(w, NO_MBARRIER, i.number, lane, address), nullptr;
  if (!b.checks) return m;
  if (const Stamp other = written_over(b, *m)) found(w, NO_MBARRIER, i.number, lane, address, instruction_of(other));
  // The use is checked as the lane's own; the unit's future use is recorded under the unit's name.
  u64 addresses[LANES];
  addresses[lane] = address;
  read_shared(w, i, addresses, MBARRIER_BYTES, 1u << lane);
  // A bulk copy uses it through the asynchronous proxy, but its init was a write of a thread.
  const bool copies = agent >= FURTHER && agent < FURTHER + MBARRIER_AGENTS;
  if (copies && !m->fenced && !is_fenced(w, lane, m->made))
    found(w, NO_MBARRIER_FENCE, i.number, lane, address, instruction_of(m->made), agent_of(m->made) * LANES + lane_of(m->made));
  if (agent != w.number) {
    const Time time = b.agent_time[agent];
    plane_of(*b.shadow, agent, time)[(address - SHARED_BASE) / GRANULE] = stamp(time, i.number, lane, agent);
  }
  return m;
}

// ---- phases ---------------------------------------------------------------------------------------------

static void end_phase_if_complete(Warp &w, const Instruction &i, u32 lane, MBarrier &m) {
  if (m.pending || m.bytes) return;
  Block &b = *w.block;
  if (m.under_way) found(w, COPY_OUTLIVES_PHASE, i.number, lane, m.address);
  m.known[m.agent] = b.agent_time[m.agent]++;
  __builtin_memcpy(m.over, m.known, sizeof m.known);
  ++m.phase;
  m.pending = m.count;
  b.happened();
}

static void count_bytes(Warp &w, const Instruction &i, u32 lane, MBarrier &m, i64 bytes) {
  m.bytes += bytes;
  if (m.bytes > MOST_BYTES || m.bytes < -MOST_BYTES) found(w, MBARRIER_OVERRUN, i.number, lane, m.address);
}

static void count_arrivals(Warp &w, const Instruction &i, u32 lane, MBarrier &m, u32 arrivals) {
  if (arrivals > m.pending) {
    found(w, MBARRIER_OVERRUN, i.number, lane, m.address);
    arrivals = m.pending;
  }
  m.pending -= arrivals;
  end_phase_if_complete(w, i, lane, m);
}

// ---- instructions ---------------------------------------------------------------------------------------

// Each lane names an address, which is operand k plus the immediate.
template <class F> LOOM_INLINE void each_address(Warp &w, const Instruction &i, u32 k, F f) {
  const u32 *base = w.words(i, k);
  GPU_EACH_LANE(w.mask, lane) f(lane, base[lane] + (u32)i.immediate);
}

// Operands: address, number of arrivals per phase.
static void make_mbarrier(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  Units &units = units_of(b);
  const u32 *counts = w.words(i, 1);
  each_address(w, i, 0, [&](u32 lane, u32 address) {
    const u32 count = counts[lane];
    if (!is_there(w, i, lane, address)) return;
    if (count == 0 || count > MOST_ARRIVALS) return found(w, MBARRIER_OVERRUN, i.number, lane, address);
    MBarrier *m = mbarrier_slot(b, address);
    if (!m) {
      m = (MBarrier *)allocate(sizeof(MBarrier));
      units.mbarriers.push(m);
      m->agent = FURTHER + (units.mbarriers.count - 1) % MBARRIER_AGENTS;
      m->address = address;
      m->live = false;
    }
    // Initializing an unused one again, in the same way, changes nothing.
    const bool untouched = m->live && m->count == count && m->pending == count && !m->phase && !m->bytes && !m->under_way;
    const bool overwritten = m->live && written_over(b, *m);
    if (m->live && !untouched && !overwritten) found(w, MBARRIER_IN_USE, i.number, lane, address);
    write_image(w, i, lane, address, 0x4D42000000000000ull | count);
    const bool again = untouched && !overwritten;
    // One write of all eight bytes, even if some of them do not change.
    const Stamp as = stamp(w.clocks->own, i.number, lane, w.number);
    for (u32 k = 0; k < MBARRIER_BYTES && b.checks && !again; ++k) b.shadow->writes[address - SHARED_BASE + k] = as;
    if (b.checks) m->made = b.shadow->writes[address - SHARED_BASE];
    if (again) return;
    m->live = true, m->fenced = false;
    m->count = m->pending = count;
    m->bytes = 0, m->phase = 0, m->under_way = 0, m->copied = 0;
    for (u32 k = 0; k < KNOWLEDGE; ++k) m->known[k] = m->over[k] = b.began - 1;
    b.happened();
  });
}

// fence.mbarrier_init: all agents see the mbarriers that the thread has initialized.
static void fence_mbarriers(Warp &w, const Instruction &) {
  for (MBarrier *m : units_of(*w.block).mbarriers) {
    const Stamp made = m->made;
    if (agent_of(made) == w.number && w.mask >> lane_of(made) & 1) m->fenced = true;
  }
}

// Operand: address.
static void end_mbarrier(Warp &w, const Instruction &i) {
  each_address(w, i, 0, [&](u32 lane, u32 address) {
    if (!is_there(w, i, lane, address)) return;
    MBarrier *m = mbarrier_slot(*w.block, address);
    if (!m || !m->live) return found(w, NO_MBARRIER, i.number, lane, address);
    if (m->under_way) found(w, MBARRIER_IN_USE, i.number, lane, address);
    write_image(w, i, lane, address, ~0ull);
    m->live = false;
    w.block->happened();
  });
}

enum Arrival { ARRIVE, EXPECT_AND_ARRIVE, EXPECT, DROP, COMPLETE };

// Operands: the previous state (its phase), address, number of arrivals or bytes.
template <Arrival HOW> static void arrive_at_mbarrier(Warp &w, const Instruction &i) {
  u64 *state = w.longs(i, 0);
  const u32 *amount = w.words(i, 2);
  MBarrier *handed_on = nullptr;
  each_address(w, i, 1, [&](u32 lane, u32 address) {
    MBarrier *m = mbarrier_at(w, i, lane, address, w.number);
    if (!m) return;
    state[lane] = m->phase;
    if (HOW == EXPECT) return count_bytes(w, i, lane, *m, amount[lane]);
    if (HOW == COMPLETE) {
      count_bytes(w, i, lane, *m, -(i64)amount[lane]);
      return end_phase_if_complete(w, i, lane, *m);
    }
    if (m != handed_on) hand_on_by_lanes(w, m->known), handed_on = m;
    if (HOW == EXPECT_AND_ARRIVE) count_bytes(w, i, lane, *m, amount[lane]);
    if (HOW == DROP && m->count) --m->count;
    count_arrivals(w, i, lane, *m, HOW == ARRIVE ? amount[lane] : 1);
  });
}

// The lanes execute the instruction again when something has happened in the block.
static void look_again(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  --b.worker->executed[i.number];
  w.pc = i.number;
  suspend(w);
  w.fragments[w.current].state = POLLING;
  if (!w.polls) w.polls = 1, w.polled = b.events;
  resume_any(w);
}

enum Naming { BY_PARITY, BY_STATE };

// Operands: whether the phase is over, address, the phase (its parity, or the state that an arrival returned). `try_wait`
// may block: here it waits until something happens in the block and checks again.
template <bool WAITS, Naming NAMING> static void wait_at_mbarrier(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  const u32 first = first_lane(w.mask), *base = w.words(i, 1);
  auto phase_of = [&](u32 lane) { return NAMING == BY_PARITY ? w.words(i, 2)[lane] & 1 : (u32)w.longs(i, 2)[lane] & 1; };
  auto is_over = [&](u32 lane) {
    const u32 address = base[lane] + (u32)i.immediate;
    const MBarrier *m = is_there(w, i, lane, address) ? mbarrier_slot(b, address) : nullptr;
    return !m || !m->live || (m->phase & 1) != phase_of(lane);
  };
  bool same = true;  // all lanes wait for the same phase of the same mbarrier
  GPU_EACH_LANE(w.mask, lane) same &= base[lane] == base[first] && phase_of(lane) == phase_of(first);
  u32 over = 0;
  if (same) over = is_over(first) ? w.mask : 0;
  else
    GPU_EACH_LANE(w.mask, lane) over |= is_over(lane) ? 1u << lane : 0;
  if (over != w.mask && WAITS && w.mask == w.active) return look_again(w, i);
  if (over != w.mask) w.let_others_run();
  put_flags(w, i.operands[0], over);
  // If lanes do the same, the first and one other stand for all: the other does not know what the first alone knows.
  const MBarrier *learnt = nullptr;
  const u32 telling = same ? (1u << first | 1u << (31 - __builtin_clz(w.mask))) & over : over;
  GPU_EACH_LANE(telling, lane) {
    const MBarrier *m = mbarrier_at(w, i, lane, base[lane] + (u32)i.immediate, w.number);
    if (m && m != learnt) learn(w.clocks->known, m->over), learnt = m;
  }
}

// ---- clusters of one block ------------------------------------------------------------------------------

// The immediate: whether the threads' knowledge and accesses are passed on.
static void arrive_at_cluster(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  ClusterBarrier &barrier = units_of(b).cluster;
  if (i.immediate) hand_on(w, barrier.known);
  barrier.came[w.number] = barrier.phase;
  barrier.arrived += (u32)__builtin_popcount(w.mask);
  if (barrier.arrived < b.thread_count) return;
  barrier.arrived = 0, ++barrier.phase;
  b.happened();
}
static void wait_for_cluster(Warp &w, const Instruction &i) {
  const ClusterBarrier &barrier = units_of(*w.block).cluster;
  if (barrier.phase == barrier.came[w.number]) return look_again(w, i);
  learn(w.clocks->known, barrier.known);
}

static const Named MBARRIER_TABLE[] = {
  GPU_HANDLER("barrier.cluster.arrive", arrive_at_cluster)
  GPU_HANDLER("barrier.cluster.wait", wait_for_cluster)
  GPU_HANDLER("fence.mbarrier_init", fence_mbarriers)
  GPU_HANDLER("mbarrier.init", make_mbarrier)
  GPU_HANDLER("mbarrier.inval", end_mbarrier)
  GPU_HANDLER("mbarrier.arrive", arrive_at_mbarrier<ARRIVE>)
  GPU_HANDLER("mbarrier.arrive.expect_tx", arrive_at_mbarrier<EXPECT_AND_ARRIVE>)
  GPU_HANDLER("mbarrier.arrive_drop", arrive_at_mbarrier<DROP>)
  GPU_HANDLER("mbarrier.expect_tx", arrive_at_mbarrier<EXPECT>)
  GPU_HANDLER("mbarrier.complete_tx", arrive_at_mbarrier<COMPLETE>)
  GPU_HANDLER("mbarrier.try_wait.parity", wait_at_mbarrier<true, BY_PARITY>)
  GPU_HANDLER("mbarrier.try_wait", wait_at_mbarrier<true, BY_STATE>)
  GPU_HANDLER("mbarrier.test_wait.parity", wait_at_mbarrier<false, BY_PARITY>)
  GPU_HANDLER("mbarrier.test_wait", wait_at_mbarrier<false, BY_STATE>)
};

}  // namespace gpu
