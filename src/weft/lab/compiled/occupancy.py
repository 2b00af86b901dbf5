"""Compute how many warps of a kernel a multiprocessor holds at once, and what limits them."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.capabilities import warp_size_of


class Multiprocessor(NamedTuple):
    """Resources that the blocks on one multiprocessor (or compute unit) share."""

    warps: int
    blocks: int
    registers: int  # 32-bit; on AMD those of one lane of a SIMD, of which there are four
    shared: int  # bytes
    reserved: int = 0  # bytes of shared memory that each block takes beyond its own


# CUDA C++ Programming Guide, table of technical specifications by compute capability; AMD CDNA 3 and 4 white papers.
_MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 65536, 164 << 10, 1 << 10),
    "sm_86": Multiprocessor(48, 16, 65536, 100 << 10, 1 << 10),
    "sm_89": Multiprocessor(48, 24, 65536, 100 << 10, 1 << 10),
    "sm_90": Multiprocessor(64, 32, 65536, 228 << 10, 1 << 10),
    "sm_100": Multiprocessor(64, 32, 65536, 228 << 10, 1 << 10),
    "sm_103": Multiprocessor(64, 32, 65536, 228 << 10, 1 << 10),
    "sm_110": Multiprocessor(48, 24, 65536, 228 << 10, 1 << 10),
    "sm_120": Multiprocessor(48, 24, 65536, 100 << 10, 1 << 10),
    "gfx942": Multiprocessor(32, 32, 512, 64 << 10),
    "gfx950": Multiprocessor(32, 32, 512, 160 << 10),
}


class Occupancy(NamedTuple):
    warps: int  # resident on one multiprocessor
    most_warps: int
    limited_by: str  # "registers", "shared memory", "blocks", or "warps" if nothing else limits

    @property
    def share(self) -> float:
        return self.warps / self.most_warps


def occupancy_of(target: str, num_warps: int, registers: int, shared: int) -> Occupancy:
    """Return the occupancy of a kernel from its warps per block, registers per thread and bytes of shared memory.

    >>> occupancy_of("sm_90", num_warps=4, registers=128, shared=0)
    Occupancy(warps=16, most_warps=64, limited_by='registers')
    """
    limits = _MULTIPROCESSORS[target]
    if warp_size_of(target) == 64:  # registers are allocated in eights, to the waves of each SIMD separately
        allocated = -(-max(registers, 1) // 8) * 8
        by_registers = 4 * (limits.registers // allocated) // num_warps
    else:  # allocated to warps, in units of 256
        allocated = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = limits.registers // allocated // num_warps
    blocks = {
        "warps": limits.warps // num_warps,
        "blocks": limits.blocks,
        "registers": by_registers,
    }
    if shared:
        blocks["shared memory"] = limits.shared // (shared + limits.reserved)
    limit = min(blocks, key=lambda name: blocks[name])
    return Occupancy(blocks[limit] * num_warps, limits.warps, limit)
