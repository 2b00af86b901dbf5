"""`count()`: bytes that launches load and store, and FLOPs of their dots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .scopes import SCOPES
from .verdicts import Judged, Verdict
from .watched import BrokenPromise, Watched


class Traffic(NamedTuple):
    """Bytes that a launch loads from one tensor, or stores to it.

    - `requested`: bytes of all accesses, repeated ones included.
    - `distinct`: bytes touched at least once.
    - `program_sectors`: 32-byte sectors that each program touches, summed over the programs: the traffic if a program
      caches everything and programs share nothing.
    - `launch_sectors`: sectors that the launch touches: the traffic if nothing moves twice.
    """

    requested: int = 0
    distinct: int = 0
    program_sectors: int = 0
    launch_sectors: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum, field by field."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class ArgumentCount:
    """Traffic of one tensor argument. An atomic update counts as a load and as a store."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    loads: Traffic
    stores: Traffic


@dataclass(frozen=True)
class LaunchCount:
    """Bytes moved and FLOPs computed by one launch."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, ArgumentCount]
    dot_flops: int  # 2 M N K for each `tl.dot`

    @property
    def loads(self) -> Traffic:
        """Total loads of all arguments."""
        return total(argument.loads for argument in self.arguments.values())

    @property
    def stores(self) -> Traffic:
        """Total stores of all arguments."""
        return total(argument.stores for argument in self.arguments.values())


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the summed traffic of several tensors or launches."""
    result = Traffic()
    for part in parts:
        result = result.plus(part)
    return result


@dataclass
class Counter(Judged):
    """Scope with the counted launches, in order, and a verdict for every launch."""

    launches: list[LaunchCount] = field(default_factory=list)

    def finish(self, watched: Watched, broken_promises: Sequence[BrokenPromise]) -> None:
        """Record a launch."""
        self.launches.append(launch_count(watched))
        self.verdicts.append(Verdict(watched.kernel.name, "counted", watched.ended_early))

    def miss(self, kernel: str, reason: str) -> None:
        """Record that a launch was not counted."""
        self.verdicts.append(Verdict(kernel, "not counted", reason))

    @property
    def loads(self) -> Traffic:
        """Total loads of all launches."""
        return total(launch.loads for launch in self.launches)

    @property
    def stores(self) -> Traffic:
        """Total stores of all launches."""
        return total(launch.stores for launch in self.launches)


def launch_count(watched: Watched) -> LaunchCount:
    """Return the counts of a launch's witness."""
    arguments = {}
    for number, argument in enumerate(watched.arguments):
        loads, stores = (Traffic(*watched.traffic(number, direction)) for direction in (0, 1))
        tensor = argument.tensor
        dtype = str(tensor.dtype).removeprefix("torch.") if argument.has_tensor else "address"
        shape = tuple(tensor.shape) if argument.has_tensor else ()
        arguments[argument.name] = ArgumentCount(argument.name, dtype, shape, loads, stores)
    return LaunchCount(watched.kernel.name, watched.grid, arguments, watched.witness.dot_flops)


@contextmanager
def count() -> Iterator[Counter]:
    """Open a scope for a `with` block. It counts launches on a device created inside of it."""
    counter = Counter()
    with SCOPES.opened(SCOPES.counters, counter):
        yield counter
