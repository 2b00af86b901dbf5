"""Tensor memory for the tests of sm_100: write an image of it, run instructions, and read it back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gpu.emulated import launch
from gpu.hopper import Array, aligned_copy, wait, words_in
from triton_loom.emulator.machine import CHECKED, Options, Outcome

THREADS, LANES = 128, 128
ADDRESS_AT, BARRIER_AT, TILES_AT = 0, 16, 1024  # offsets in shared memory: the first two are the kernel's own
PER_STATEMENT = 32  # columns


def place(lane: int, column: int) -> int:
    """Return an address of tensor memory."""
    return lane << 16 | column


@dataclass
class Kernel:
    """Kernel of 128 threads, each with a lane of tensor memory. %r10 is its address, %r11 that of the warp's quarter,
    %r12 the mbarrier's; %p10 is true in the first thread. `parts` are the texts of the steps, in order."""

    columns: int = 256
    shared: int = 2048
    parts: dict[str, str] = field(default_factory=dict)

    def standard(self) -> dict[str, str]:
        lane = "mul.wide.u32 %rd10, %r0, {}; add.s64 %rd10, {}, %rd10;"
        row = 4 * self.columns
        stores, loads = [lane.format(row, "%rd1")], [lane.format(row, "%rd0")]
        names = [f"%r{64 + n}" for n in range(PER_STATEMENT)]
        listed = "{" + ", ".join(names) + "}"
        fours = ["{" + ", ".join(names[n : n + 4]) + "}" for n in range(0, PER_STATEMENT, 4)]
        for column in range(0, self.columns, PER_STATEMENT):
            at = 4 * column
            stores += [f"ld.global.v4.b32 {four}, [%rd10+{at + 16 * n}];" for n, four in enumerate(fours)]
            stores.append(f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r11 + {column}], {listed};")
            loads.append(f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {listed}, [%r11 + {column}];")
            loads.append("{wait_ld}")
            loads += [f"st.global.v4.b32 [%rd10+{at + 16 * n}], {four};" for n, four in enumerate(fours)]
        return {
            "begin": f"setp.lt.u32 %p11, %r0, 32; setp.eq.u32 %p10, %r0, 0; mov.b32 %r9, smem; "
            f"add.s32 %r12, %r9, {BARRIER_AT};",
            "alloc": f"@%p11 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], {self.columns};",
            "share": f"bar.sync 0; ld.shared.b32 %r10, [%r9+{ADDRESS_AT}]; shr.u32 %r13, %r0, 5; "
            "and.b32 %r13, %r13, 3; shl.b32 %r13, %r13, 21; add.s32 %r11, %r10, %r13; bar.sync 0;",
            "relinquish": "@%p11 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
            "init": "@%p10 mbarrier.init.shared::cta.b64 [%r12], 1;",
            "fill": words_in((self.shared - TILES_AT) // 4, TILES_AT, "%rd2", THREADS),
            "store": "\n".join(stores),
            "wait_st": "tcgen05.wait::st.sync.aligned;",
            "fence": "fence.proxy.async.shared::cta;",
            "meet": "bar.sync 0;",
            "act": "",
            "commit": "@%p10 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];",
            "wait": wait("%r12"),
            "load": "\n".join(loads),
            "wait_ld": "tcgen05.wait::ld.sync.aligned;",
            "end": "bar.sync 0;",
            "free": f"@%p11 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, {self.columns};",
        }

    def body(self, **changes: str) -> str:
        parts = self.standard() | self.parts | changes
        parts["load"] = parts["load"].replace("{wait_ld}", parts.pop("wait_ld"))
        return "\n".join(parts.values())

    def run(
        self, image: Array, tiles: Array, options: Options = CHECKED, **changes: str
    ) -> tuple[Array, Outcome]:
        """Return tensor memory afterward, and the findings. `tiles` are the bytes of shared memory from TILES_AT on."""
        out = aligned_copy(np.zeros((LANES, self.columns), np.uint32))
        filled = np.zeros(self.shared - TILES_AT, np.uint8)
        filled[: tiles.size] = tiles
        arrays = (out, aligned_copy(image), aligned_copy(filled.view(np.uint32)))
        outcome = launch(self.body(**changes), *arrays, threads=THREADS, shared=self.shared, options=options)
        return out, outcome


def unwritten(columns: int = 256, seed: int = 5) -> Array:
    """Return an image in which every cell has a different number."""
    cells = np.random.default_rng(seed).permutation(LANES * columns).astype(np.uint32)
    return cells.reshape(LANES, columns)


def only(text: str) -> str:
    """Return a text that only the first thread executes."""
    return "\n".join(f"@%p10 {statement.strip()};" for statement in text.split(";") if statement.strip())
