// Control flow of a warp: branches, divergence and reconvergence of lanes, the end of the kernel.
//
// Lanes that diverge at a branch reconverge at its immediate post-dominator, the first instruction on all of their paths.
// Each part is a fragment of the warp that runs independently: while one waits at a barrier, another may continue.
#pragma once
#include "machine.h"

namespace gpu {

// Number of backward branches after which others may run: they may wait for this warp's stores. Each turn of a long loop
// counts more than once, so that this takes milliseconds at most.
constexpr u32 TURN = 4096, LONG_LOOP = 64;

LOOM_INLINE void suspend(Warp &w) {
  Fragment &f = w.fragments[w.current];
  f.pc = w.pc, f.lanes = w.active;
}
LOOM_INLINE void resume(Warp &w, u32 number) {
  const Fragment &f = w.fragments[number];
  w.current = number;
  w.pc = f.pc, w.active = f.lanes, w.reconverge = f.reconverge;
}

// The next fragment that can continue, if there is one.
LOOM_NOINLINE bool resume_any(Warp &w) {
  for (u32 k = w.fragments_used; k-- > 0;)
    if (w.fragments[k].state == READY) return resume(w, k), true;
  w.running = 0;
  return false;
}

static u32 new_fragment(Warp &w) {
  for (u32 k = 0; k < w.fragments_used; ++k)
    if (w.fragments[k].state == FREE) return k;
  return w.fragments_used++;
}

// Ends the current fragment: its lanes have reached its end, or have left the kernel. The last fragment of several resumes
// the one that they were split from; if no lane of that is left, it ends as well.
LOOM_NOINLINE void finish(Warp &w) {
  u32 number = w.current;
  for (;;) {
    Fragment &f = w.fragments[number];
    f.state = FREE;
    if (f.parent == NOWHERE) break;
    Fragment &parent = w.fragments[f.parent];
    if (--parent.children) break;
    parent.lanes &= w.live;
    parent.state = READY;
    number = f.parent;
    if (parent.lanes && parent.pc != parent.reconverge) break;
  }
  resume_any(w);
}

LOOM_NOINLINE void part(Warp &w, u32 taken, u32 target, u32 next, u32 reconverge) {
  const u32 parent = w.current, rest = w.active & ~taken;
  Fragment &f = w.fragments[parent];
  f.pc = reconverge, f.lanes = w.active, f.state = FORKED, f.children = 0;
  const u32 ways[2][2] = {{target, taken}, {next, rest}};
  for (auto &way : ways) {
    if (way[0] == reconverge) continue;
    const u32 child = new_fragment(w);
    w.fragments[child] = {way[0], reconverge, way[1], READY, parent, 0, 0};
    ++w.fragments[parent].children;
  }
  if (!w.fragments[parent].children) w.fragments[parent].state = READY;
  resume_any(w);
}

static void branch(Warp &w, const Instruction &i) {
  if (i.target <= i.number && (w.turns += 1 + (i.number - i.target) / LONG_LOOP) >= TURN) w.let_others_run();
  if (__builtin_expect(w.mask == w.active, 1)) w.pc = i.target;
  else part(w, w.mask, i.target, i.number + 1, i.reconverge);
}

// brx.idx: a table of targets, which follow the index among the operands as numbers, not as registers.
static void branch_by_index(Warp &w, const Instruction &i) {
  const u32 *index = w.words(i, 0);
  u32 rest = w.mask;
  const u32 first = index[first_lane(rest)];
  bool same = w.mask == w.active;
  for (u32 lanes = rest; lanes; lanes &= lanes - 1) same &= index[first_lane(lanes)] == first;
  if (same) {
    w.pc = i.operands[1 + first];
    return;
  }
  // One target at a time is split from the others, which come back here.
  u32 taken = 0;
  for (u32 lanes = rest; lanes; lanes &= lanes - 1)
    if (index[first_lane(lanes)] == first) taken |= lanes & (0u - lanes);
  part(w, taken, i.operands[1 + first], i.number, i.reconverge);
}

static void leave(Warp &w, const Instruction &) {
  w.live &= ~w.mask;
  w.active &= ~w.mask;
  w.block->live_threads -= (u32)__builtin_popcount(w.mask);
  w.block->happened();
  if (!w.active) finish(w);
}

static const Named CONTROL_TABLE[] = {
  GPU_HANDLER("branch", branch)
  GPU_HANDLER("branch.table", branch_by_index)
  GPU_HANDLER("leave", leave)
};

}  // namespace gpu
