"""`explain()`: which loop nests a kernel became, what it keeps in scratch memory, and where its time goes."""

from __future__ import annotations

import atexit
import ctypes
import functools
import linecache
import math
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .device.launcher import LoomLauncher
from .tables import table


@dataclass
class Nest:
    """Loop nest: the kernel line it comes from, what it computes, and the time that launches spent in it."""

    file: str
    line: int  # 0 for code outside of any nest
    does: str
    ticks: int = 0  # of the processor's time-stamp counter, summed over threads
    times: int = 0  # how often it was entered


@dataclass(frozen=True)
class ScratchTile:
    """Tile in scratch memory."""

    name: str
    tile: str  # shape and dtype: "64x64 f32"
    bytes: int
    why: str


@dataclass
class ExplainedKernel:
    """Compiled variant of a kernel, and its launches."""

    name: str
    file: str
    line: int
    scratch_bytes: int  # for each thread
    nests: list[Nest]
    kept: list[ScratchTile]
    launches: int = 0
    programs: int = 0  # summed over all launches
    fastest: float = math.inf  # fastest launch, from call to return, in seconds

    @property
    def ticks(self) -> int:
        """Sum of the ticks of all nests."""
        return sum(nest.ticks for nest in self.nests)

    def __str__(self) -> str:
        launches = f"{self.launches:,} {'launch' if self.launches == 1 else 'launches'} of {self.programs:,} programs"
        fastest = f"the fastest {1e3 * self.fastest:.3g} ms"
        head = f"{self.name} ({self.file}:{self.line}): {launches}, {fastest}"
        nests = [("time", "ticks", "times", "line", "", "becomes")]
        for nest in sorted(self.nests, key=lambda nest: -nest.ticks):
            if nest.times:
                nests.append(
                    (
                        f"{100 * nest.ticks / max(self.ticks, 1):.1f} %",
                        f"{nest.ticks // nest.times:,}",
                        f"{nest.times:,}",
                        str(nest.line or ""),
                        textwrap.shorten(linecache.getline(nest.file, nest.line), 70, placeholder=" ..."),
                        nest.does,
                    )
                )
        lines = [head, *table(nests, ">>>><<")]
        lines.append(f"  scratch memory of each thread: {self.scratch_bytes:,} bytes")
        return "\n".join(lines + table([(f"{k.bytes:,}", k.tile, k.name, k.why) for k in self.kept], "><<<"))


class Explained:
    """Scope that collects the kernels launched in it, in the order of their first launch."""

    def __init__(self) -> None:
        self._by_launcher: dict[ExplainedLauncher, ExplainedKernel] = {}

    @property
    def kernels(self) -> list[ExplainedKernel]:
        """Return the launched kernels, one entry for each compiled signature."""
        return list(self._by_launcher.values())

    def kernel(self, launcher: ExplainedLauncher) -> ExplainedKernel:
        """Return the record to which a launcher adds its launches."""
        return self._by_launcher.setdefault(launcher, launcher.new_record())

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.kernels)) or "no kernel was launched"


class ExplainedLauncher(LoomLauncher):
    """Launcher of a kernel that times its nests; adds the times to the open scopes."""

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.about = metadata.explained
        code = getattr(getattr(getattr(src, "fn", None), "fn", None), "__code__", None)
        self.file = code.co_filename if code else ""

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: Any, *rest: Any) -> None:
        size = len(self.about["nests"])
        counters = (ctypes.c_uint64 * size * 2).in_dll(function.library, "loom_explained")
        before = [list(counter) for counter in counters]
        start = time.perf_counter()
        super().__call__(grid_x, grid_y, grid_z, stream, function, *rest)
        seconds = time.perf_counter() - start
        for scope in _OPEN:
            kernel = scope.kernel(self)
            kernel.launches += 1
            kernel.programs += grid_x * grid_y * grid_z
            kernel.fastest = min(kernel.fastest, seconds)
            for i, nest in enumerate(kernel.nests):
                nest.ticks += counters[0][i] - before[0][i]
                nest.times += counters[1][i] - before[1][i]

    def new_record(self) -> ExplainedKernel:
        """Return the kernel's record before its first launch."""
        return ExplainedKernel(
            self.name,
            *self.resolve_location(self.about["location"]),
            scratch_bytes=self.scratch_bytes,
            nests=[
                Nest(*self.resolve_location(nest["location"]), nest["does"]) for nest in self.about["nests"]
            ],
            kept=[ScratchTile(**tile) for tile in self.about["kept"]],
        )

    def resolve_location(self, location: str) -> tuple[str, int]:
        """Return file and line.

        The file is the kernel's current one: Triton's cache identifies kernels by their text, wherever it was.
        """
        file, _, line = location.rpartition(":")
        own = self.file and file == self.about["location"].rpartition(":")[0]
        return (self.file if own else file), int(line or 0)


_OPEN: list[Explained] = []


@contextmanager
def explain() -> Iterator[Explained]:
    """Open a scope for a `with` block. It receives launches on a device created to explain."""
    scope = Explained()
    _OPEN.append(scope)
    try:
        yield scope
    finally:
        _OPEN[:] = [other for other in _OPEN if other is not scope]


@functools.cache
def explain_process() -> None:
    """Open a scope that lasts as long as the process: TRITON_LOOM_EXPLAIN."""
    scope = Explained()
    _OPEN.insert(0, scope)
    atexit.register(lambda: print(scope, file=sys.stderr))
