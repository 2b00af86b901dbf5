// tcgen05.commit: arrives at an mbarrier when all products and copies that the thread has issued are complete.
//
// Whoever waits for the mbarrier then knows the matrix unit's accesses and all that it knew: whatever it read was written
// before. The thread's own accesses are not published. The arrival happens as late as allowed, when nobody can continue, or
// (`early`) at once; arrivals of one thread are in order.
#pragma once
#include "mbarrier.h"
#include "tensor_memory.h"

namespace gpu {

struct Commit {
  u32 address, warp, lane;
  const Instruction *instruction;
  Time time;
  Time known[KNOWLEDGE];
};

static void deliver_commit(Block &b, Pending &p) {
  Commit &commit = *(Commit *)p.operation;
  Warp &w = b.warps[commit.warp];
  MBarrier *m = mbarrier_slot(b, commit.address);
  if (!m || !m->live) found(w, NO_MBARRIER, commit.instruction->number, commit.lane, commit.address);
  else {
    learn(m->known, commit.known);
    Time &unit = m->known[MATRIX_UNITS + commit.warp];
    unit = commit.time > unit ? commit.time : unit;
    count_arrivals(w, *commit.instruction, commit.lane, *m, 1);
  }
  free(&commit);
}

// Operand: the mbarrier's address.
static void commit_tensor(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  auto &own = tensor_memory_of(b).of[w.number];
  const u32 agent = MATRIX_UNITS + w.number;
  each_address(w, i, 0, [&](u32 lane, u32 address) {
    if (!mbarrier_at(w, i, lane, address, agent)) return;
    // It does not cover operations of other threads of the warp.
    const bool others = own.is_open && lane_of(own.last) != lane;
    Commit *commit = (Commit *)allocate(sizeof(Commit));
    *commit = {address, w.number, lane, &i, others ? b.began - 1 : b.agent_time[agent], {}};
    if (!others) {
      __builtin_memcpy(commit->known, own.unit_known, sizeof commit->known);
      ++b.agent_time[agent];
      own.is_open = false;
    }
    Pending pending = {deliver_commit, commit, w.number, address};
    if (b.launch->options & EARLY) deliver_commit(b, pending);
    else b.pending.push(pending);
  });
}

static const Named TENSOR_COMMIT_TABLE[] = {GPU_HANDLER("tcgen05.commit", commit_tensor)};

}  // namespace gpu
