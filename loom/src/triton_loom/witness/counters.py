"""`count()`: what launches inside it load, store and multiply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .scopes import SCOPES
from .verdicts import Judged, Verdict
from .watched import Broken, Watched


class Traffic(NamedTuple):
    """Bytes that a launch loads from one tensor, or stores to it.

    - `requested`: by every access, however often a byte is asked for.
    - `distinct`: bytes touched at least once.
    - `program_sectors`: the 32-byte sectors that each program touches, summed over the programs: what moves if a
      program keeps what it has and programs share nothing.
    - `launch_sectors`: the sectors that the launch touches: what moves if nothing moves twice.
    """

    requested: int = 0
    distinct: int = 0
    program_sectors: int = 0
    launch_sectors: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """The sum, number by number."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class ArgumentCount:
    """The traffic of one tensor argument. An atomic update counts as a load and as a store."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    loads: Traffic
    stores: Traffic


@dataclass(frozen=True)
class LaunchCount:
    """What one launch moved and multiplied."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, ArgumentCount]
    dot_flops: int  # 2 M N K for each `tl.dot`

    @property
    def loads(self) -> Traffic:
        """What is loaded, all arguments together."""
        return total(argument.loads for argument in self.arguments.values())

    @property
    def stores(self) -> Traffic:
        """What is stored, all arguments together."""
        return total(argument.stores for argument in self.arguments.values())


def total(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of several tensors or launches."""
    sum_ = Traffic()
    for part in parts:
        sum_ = sum_.plus(part)
    return sum_


@dataclass
class Counter(Judged):
    """A scope: the launches that were counted, in order, and a verdict for every launch."""

    launches: list[LaunchCount] = field(default_factory=list)

    def finish(self, watched: Watched, broken: Sequence[Broken]) -> None:
        """Takes a launch down."""
        self.launches.append(launch_count(watched))
        self.verdicts.append(Verdict(watched.kernel.name, "counted", watched.ended_early))

    def miss(self, kernel: str, reason: str) -> None:
        """Takes down that nobody counted a launch."""
        self.verdicts.append(Verdict(kernel, "not counted", reason))

    @property
    def loads(self) -> Traffic:
        """What is loaded, all launches together."""
        return total(launch.loads for launch in self.launches)

    @property
    def stores(self) -> Traffic:
        """What is stored, all launches together."""
        return total(launch.stores for launch in self.launches)


def launch_count(watched: Watched) -> LaunchCount:
    """What the witness of a launch has counted."""
    arguments = {}
    for number, argument in enumerate(watched.arguments):
        loads, stores = (Traffic(*watched.traffic(number, direction)) for direction in (0, 1))
        tensor = argument.tensor
        dtype = str(tensor.dtype).removeprefix("torch.") if argument.known else "address"
        shape = tuple(tensor.shape) if argument.known else ()
        arguments[argument.name] = ArgumentCount(argument.name, dtype, shape, loads, stores)
    return LaunchCount(watched.kernel.name, watched.grid, arguments, watched.witness.dot_flops)


@contextmanager
def count() -> Iterator[Counter]:
    """A scope for a `with` block. It counts launches on a device that is made inside of it."""
    counter = Counter()
    with SCOPES.opened(SCOPES.counters, counter):
        yield counter
