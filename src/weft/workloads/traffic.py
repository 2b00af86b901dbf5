"""How many bytes a workload moves, counted at every access of its kernels, beside the least that must move.

Kernels run on this machine's CPU through Loom, which counts; with `target`, they are those that the op would launch on
that GPU (its tiles, its number of programs). What moves between a GPU's memory and its caches is then modelled:

- a tensor of at most `CACHED` bytes is read and written once, however many programs want it (a weight, the scales);
- of a larger one, every program reads the 32-byte sectors it touches for itself, as often as it asks for them;
- stores are put together in the cache: each sector is written as often as its bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..runtime import choosing_for
from .problem import Workload

if TYPE_CHECKING:
    from triton_loom.counters import LaunchCount

CACHED = 8 << 20  # a sixth of an H100's L2 cache


class Totals(NamedTuple):
    """Bytes that launches move, added up."""

    requested: int  # by every access
    per_program: int  # 32-byte sectors that each program touches, summed over the programs
    per_launch: int  # sectors that each launch touches
    modelled: int  # what a GPU's memory moves


@dataclass(frozen=True)
class Moved:
    """One call of a workload, over all of its launches."""

    workload: Workload
    rows: int
    launches: int
    tensors: int  # loaded or stored by a launch
    least: int
    total: Totals

    @property
    def ratio(self) -> float:
        return self.total.modelled / self.least if self.least else 1.0

    @property
    def as_promised(self) -> bool:
        """Within what the workload says, and a part of a sector at either end of each tensor. An excess of a few
        percent is one of partial sums, as large with fewer rows as with the workload's own."""
        moves = self.workload.moves
        excess = (moves - 1) * (self.workload.least_bytes() if 1.02 < moves < 1.1 else self.least)
        return self.total.modelled <= self.least + excess + 64 * self.tensors


def rows_within(workload: Workload, least_bytes: int) -> int:
    """The workload's rows, or so many that about `least_bytes` have to move, if that is fewer."""
    per_row = max(1, (workload.least_bytes(1032) - workload.least_bytes(8)) // 1024)
    return min(workload.rows, max(1, least_bytes // per_row))


def count_traffic(workload: Workload, rows: int | None = None, target: str = "sm_90") -> Moved:
    """Run a workload once, with as many rows as it has or with `rows`, and count."""
    import torch
    from triton_loom import count

    call = workload.make(rows=rows)
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
    """The counts of launches, and the model of above."""
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
