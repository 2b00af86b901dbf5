// Who touched which byte, and whether something orders them.
#pragma once
#include "clocks.h"

namespace gpu {

LOOM_INLINE void read_shared(Warp &, const Instruction &, const u64 *, u32, u32) {}
LOOM_INLINE void write_shared(Warp &, const Instruction &, const u64 *, const u8 *, u32, u32, u32) {}
LOOM_INLINE void update_shared(Warp &, const Instruction &, const u64 *, u32, u32) {}
LOOM_INLINE void read_global(Warp &, const Instruction &, const u64 *, u32, u32) {}
LOOM_INLINE void write_global(Warp &, const Instruction &, const u64 *, const u8 *, u32, u32, u32) {}
LOOM_INLINE void update_global(Warp &, const Instruction &, const u64 *, u32, u32) {}

}  // namespace gpu
