"""Findings of the machine: a hazard, its location, and the two threads involved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..ptx.text import Place

FindingKind = Literal[  # in the order of `Kind` in include/gpu/machine.h
    "shared memory race",
    "global memory race",
    "uninitialized shared memory",
    "shared memory out of bounds",
    "global memory out of bounds",
    "store to read-only memory",
    "misaligned address",
    "split warp",
    "lane not there",
    "lanes disagree",
    "barrier not reached",
    "deadlock",
    "division by zero",
    "barrier misuse",
    "copy misuse",
    "no mbarrier",
    "mbarrier in use",
    "mbarrier overrun",
    "copy outlives its phase",
    "copy outlives its block",
    "proxy fence missing",
    "proxy fence missing after cp.async",
    "unusable tensor map",
    "tensor map not acquired",
    "unusable matrix descriptor",
    "product under way",
    "wgmma.fence missing",
    "warps disagree",
    "local memory out of bounds",
    "tensor memory race",
    "uninitialized tensor memory",
    "tensor memory out of bounds",
    "tensor memory misuse",
    "load under way",
    "tcgen05.fence missing",
    "time limit",
    "mbarrier fence missing",
]
KINDS: tuple[FindingKind, ...] = get_args(FindingKind)

# ptxas reports when it repairs these: C7514 (products are serialized), C7517 (a wait is injected), C7519 (a fence is
# injected). Its code has a scoreboard for the results of a tcgen05.ld, with and without a tcgen05.wait::ld.
MENDED: frozenset[FindingKind] = frozenset({"product under way", "wgmma.fence missing", "load under way"})

# The manual requires it, and Triton 3.7 omits it: most of its kernels with tensor descriptors initialize mbarriers that
# bulk copies then use, with no fence between. Reported by `emulate(strict=True)`.
CUSTOMARY: frozenset[FindingKind] = frozenset({"mbarrier fence missing"})

_MEANING: dict[FindingKind, str] = {
    "shared memory race": "two threads touch the same bytes and nothing orders them",
    "global memory race": "two threads touch the same bytes and nothing orders them",
    "uninitialized shared memory": "the bytes are read but were never written",
    "shared memory out of bounds": "the address lies outside of the block's shared memory",
    "global memory out of bounds": "the address is in none of the launch's memory",
    "store to read-only memory": "the bytes may not be written",
    "misaligned address": "the address is not a multiple of the access size",
    "split warp": "an instruction for the whole warp is executed by a part of it",
    "lane not there": "a value is taken from a lane that does not execute the instruction",
    "lanes disagree": "lanes of one store write different values to the same bytes",
    "barrier not reached": "some threads of the block left the kernel and never came to the barrier",
    "deadlock": "no thread of the block can continue",
    "division by zero": "PTX does not define the quotient",
    "barrier misuse": "there is no such barrier, or it is used for another number of threads at the same time",
    "copy misuse": "this form of asynchronous copy is not allowed",
    "no mbarrier": "there is no mbarrier at this address: not initialized, invalidated, or overwritten",
    "mbarrier in use": "an mbarrier is initialized again, or invalidated, while it is in use",
    "mbarrier overrun": "an mbarrier gets more arrivals or bytes than its phase can count",
    "copy outlives its phase": "a phase of the mbarrier is over before all copies have arrived that it should count "
    "(expect_tx is too small or missing)",
    "copy outlives its block": "the block ends while a copy that nobody has waited for still uses its shared memory",
    "proxy fence missing": "a bulk copy or a product of matrices reads what a thread wrote, and no fence.proxy.async "
    "follows the write",
    "proxy fence missing after cp.async": "a bulk copy or a product of matrices reads what cp.async brought, and no "
    "fence.proxy.async follows the wait for it",
    "unusable tensor map": "a field is missing or no copy can be made with it, or its kind of tile is not emulated",
    "tensor map not acquired": "the kernel made this tensor map, and no fence.proxy.tensormap makes copies see it",
    "unusable matrix descriptor": "bits are set that mean nothing or contradict each other, or what they say is not "
    "emulated (a base offset, sparse matrices, formats of six bits)",
    "product under way": "registers of a wgmma are touched before it has been waited for; ptxas puts in a wait, which "
    "costs time",
    "wgmma.fence missing": "registers of the wgmma were touched, and no wgmma.fence stands between; ptxas puts one in",
    "warps disagree": "the four warps of a warp group execute different products, or one does not come to a product",
    "local memory out of bounds": "the address lies outside of the thread's own memory",
    "tensor memory race": "the same cells are touched twice and nothing orders that: no wait for the mbarrier of the "
    "products' commit, no tcgen05.wait, or no barrier between",
    "uninitialized tensor memory": "the cells are read but were never written",
    "tensor memory out of bounds": "the cells are not allocated, or they are not those of the warp's quarter of "
    "the lanes or of the operand's rows",
    "tensor memory misuse": "it is not allocated or freed like this, or never freed; or lanes name different "
    "addresses, or the quarters of the lanes have different scales",
    "load under way": "results of a tcgen05.ld are used before its tcgen05.wait::ld; ptxas waits for them by a "
    "scoreboard",
    "tcgen05.fence missing": "it comes after what another thread did, and this kernel, which fences such, has no fence "
    "between",
    "time limit": "the block has taken longer than it may and was stopped here, and the launch with it: it waits for "
    "what does not come, or needs more seconds (`limit=` of emulate, or TRITON_LOOM_EMULATE_LIMIT)",
    "mbarrier fence missing": "a bulk copy uses an mbarrier, and no fence.proxy.async or fence.mbarrier_init follows "
    "its init",
}


class HazardError(RuntimeError):
    """Error: a launch inside `emulate()` had hazards, listed in `findings`."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def _short(instruction: str) -> str:
    """Return the instruction with long register lists cut to the first two and the last."""
    return re.sub(r"\{(%r\d+, %r\d+,)( %r\d+,){4,} (%r\d+)\}", r"{\1 …, \3}", instruction)


@dataclass(frozen=True)
class Access:
    """An instruction, and the thread that executed it."""

    instruction: str
    ptx_line: int
    place: Place
    block: tuple[int, int, int]
    thread: int | None  # None: the operation belongs to no single thread

    def __str__(self) -> str:
        executor = (
            f"thread {self.thread} of block {self.block}"
            if self.thread is not None
            else f"block {self.block}"
        )
        return f"`{_short(self.instruction)}` by {executor} ({self.place}, PTX line {self.ptx_line})"


@dataclass(frozen=True)
class Finding:
    """A hazard at a pair of instructions: its occurrence in the first block, and the number of occurrences."""

    kind: FindingKind
    kernel: str
    by: Access
    other: Access | None = None  # what it collides with
    address: int | None = None
    memory: str = ""  # the name of the memory that the address lies in, or next to
    count: int = 1

    @property
    def is_mended(self) -> bool:
        """True if ptxas detects it in the text and repairs it: the result is right, but time is lost."""
        return self.kind in MENDED

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        where = f" at {self.memory or 'address'} {self.address:#x}" if self.address is not None else ""
        other = f" and {self.other}" if self.other else ""
        return f"{self.kind} in {self.kernel}{times}{where}: {self.by}{other}: {_MEANING[self.kind]}"
