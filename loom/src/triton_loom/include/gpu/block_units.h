// The units of a block: created when the kernel first uses one, cleared at the end of a block.
#pragma once
#include "units.h"

namespace gpu {

static void end_units(Block &b);
static void release_units(Block &b);

LOOM_INLINE Units &units_of(Block &b) {
  if (__builtin_expect(!b.units, 0)) {
    b.units = (Units *)allocate(sizeof(Units));
    b.end = end_units, b.release = release_units;
  }
  return *b.units;
}

}  // namespace gpu
