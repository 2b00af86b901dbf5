"""Count the bytes that a workload moves, at every access of its kernels, and compare them with the minimum.

Loom runs the kernels on this machine's CPU and counts their accesses. The kernels are those that the op would launch on
`target`, with that GPU's tiles and number of programs. Traffic between the GPU's memory and its caches is modelled from
the counts:

- a tensor of at most `CACHED` bytes is read and written once, however many programs access it (a weight, the scales);
- of a larger tensor, every program reads the 32-byte sectors that it touches from memory, each time it loads them;
- stores are combined in the cache: a sector is written as many times as its bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..runtime import choosing_for
from .problem import Call, Workload

if TYPE_CHECKING:
    from triton_loom.witness.counters import LaunchCount

CACHED = 8 << 20  # a sixth of an H100's L2 cache


class Totals(NamedTuple):
    """Total bytes that launches move."""

    requested: int  # by every access
    per_program: int  # 32-byte sectors that each program touches, summed over the programs
    per_launch: int  # sectors that any program of a launch touches, summed over the launches
    modelled: int  # what a GPU's memory would move


@dataclass(frozen=True)
class Moved:
    """Traffic of one call of a workload, over all of its launches."""

    workload: Workload
    rows: int
    launches: int
    tensors: int  # how many tensors the launches load or store
    least: int
    total: Totals

    @property
    def ratio(self) -> float:
        return self.total.modelled / self.least if self.least else 1.0

    @property
    def as_promised(self) -> bool:
        """True if the modelled bytes are within what the workload allows. Part of a sector is tolerated at either end
        of each tensor. An excess of a few percent comes from partial sums, which do not shrink with the number of
        rows."""
        moves = self.workload.moves
        excess = (moves - 1) * (self.workload.least_bytes() if 1.02 < moves < 1.1 else self.least)
        return self.total.modelled <= self.least + excess + 64 * self.tensors


def rows_within(workload: Workload, least_bytes: int) -> int:
    """Return the workload's number of rows, or the smaller number for which about `least_bytes` must move."""
    per_row = max(1, (workload.least_bytes(1032) - workload.least_bytes(8)) // 1024)
    return min(workload.rows, max(1, least_bytes // per_row))


def count_traffic(workload: Workload, rows: int | None = None, target: str = "sm_90") -> Moved:
    """Run a workload once, with its own number of rows or with `rows`, and count the bytes."""
    return count_call(workload, workload.make(rows=rows), rows, target)


def count_call(workload: Workload, call: Call, rows: int | None = None, target: str = "sm_90") -> Moved:
    """Run a call that `workload` made for a number of rows, and count the bytes."""
    import torch
    from triton_loom import count

    with torch.no_grad(), choosing_for(target), count() as counted:
        call()
    tensors = [argument for launch in counted.launches for argument in launch.arguments.values()]
    return Moved(
        workload,
        workload.rows if rows is None else rows,
        len(counted.launches),
        sum(bool(tensor.loads.requested) + bool(tensor.stores.requested) for tensor in tensors),
        workload.least_bytes(rows),
        totals(counted.launches),
    )


def totals(launches: Iterable[LaunchCount]) -> Totals:
    """Return the sum of the counts of launches, with the model that this module describes."""
    requested = per_program = per_launch = modelled = 0
    for argument in (argument for launch in launches for argument in launch.arguments.values()):
        loads, stores = argument.loads, argument.stores
        requested += loads.requested + stores.requested
        per_program += loads.program_sectors + stores.program_sectors
        per_launch += loads.launch_sectors + stores.launch_sectors
        small = loads.distinct <= CACHED
        modelled += loads.launch_sectors if small else max(loads.requested, loads.program_sectors)
        small = stores.distinct <= CACHED
        modelled += stores.launch_sectors if small else max(stores.requested, stores.launch_sectors)
    return Totals(requested, per_program, per_launch, modelled)
