"""Scope of `emulate()`: the launches inside it and their outcomes."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..ptx import exactness
from ..witness.findings import caller
from ..witness.watched import Memory
from . import machine
from .counters import Counters, KernelCounters, Line, by_line
from .devices import Device
from .findings import CUSTOMARY, KINDS, Finding, HazardError
from .libcuda import Arrived
from .machine import MemoryRange, Options, Outcome
from .report import tables

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Launch:
    """An emulated launch."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    cooperative: bool  # all blocks run at once
    parameters: bytes  # of the .param space
    ptx: str  # of the kernel
    outcome: Outcome
    launched_from: str  # file:line

    @property
    def inexact(self) -> frozenset[str]:
        """Reasons why results may have different bits on another device, such as Loom: see `exactness`."""
        return exactness.reasons(self.ptx)

    @property
    def counters(self) -> KernelCounters:
        """Counters of the launch, with memory traffic if `counters=True`."""
        return counters_of([self])


def counters_of(launches: Sequence[Launch]) -> KernelCounters:
    """Return the counters of all launches of one kernel. Launches of one program are summed before they are decoded."""
    programs: dict[int, list[Launch]] = {}
    for launch in launches:
        programs.setdefault(id(launch.outcome.statements), []).append(launch)
    lines: dict[Line, Counters] = {}
    for group in programs.values():
        outcomes = [launch.outcome for launch in group]
        counts = [outcome.counts for outcome in outcomes if outcome.counts is not None]
        by_lines = by_line(
            outcomes[0].statements,
            executed=np.sum([outcome.executed for outcome in outcomes], axis=0, dtype=np.uint64),
            counts=np.sum(counts, axis=0) if counts else None,
            threads=group[0].threads,
        )
        for line, counters in by_lines.items():
            lines[line] = lines[line].plus(counters) if line in lines else counters
    lines = dict(sorted(lines.items(), key=lambda item: (-item[1].warp_instructions, item[0])))
    return KernelCounters(
        kernel=launches[0].kernel,
        launches=len(launches),
        blocks=sum(math.prod(launch.grid) for launch in launches),
        findings=sum(len(launch.outcome.findings) for launch in launches),
        lines=lines,
    )


LIMIT = 60.0  # seconds that a block may take: some billions of warp instructions
LIMIT_VARIABLE = "TRITON_LOOM_EMULATE_LIMIT"


def seconds(limit: float | None) -> float:
    """Return the seconds that a block may take: the argument, else the environment's value, else the default."""
    text = os.environ.get(LIMIT_VARIABLE, LIMIT) if limit is None else limit
    name = LIMIT_VARIABLE if limit is None else "limit"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, or inf for no limit; got {text!r}")
    return value


class Gpu:
    """An emulated GPU: its launches, in order, and their findings."""

    def __init__(
        self,
        device: Device,
        options: Options,
        raises: bool,
        ignored: Collection[str] = (),
        strict: bool = False,
    ) -> None:
        if unknown := set(ignored) - set(KINDS):
            raise ValueError(
                f"ignore= has unknown kinds of findings {sorted(unknown)}; choose from {', '.join(KINDS)}"
            )
        self.device, self.options, self.raises = device, options, raises
        self.ignored = frozenset(ignored) if strict else frozenset(ignored) | CUSTOMARY
        self.launches: list[Launch] = []
        self._allowed: list[MemoryRange] = []
        self._lock = threading.Lock()
        self._here = _Here()

    @property
    def target(self) -> str:
        """Name of the GPU's target, such as sm_90."""
        return self.device.target

    @property
    def findings(self) -> list[Finding]:
        """Findings, launch by launch."""
        return [finding for launch in self.launches for finding in launch.outcome.findings]

    def allow(self, *tensors: torch.Tensor) -> None:
        """Allow kernels to reach these tensors by addresses that they find in memory or get as integers."""
        for tensor in tensors:
            self._allowed.append(memory_of(tensor, f"allowed[{len(self._allowed)}]"))

    @property
    def counters(self) -> dict[str, KernelCounters]:
        """Counters of each kernel by name, with memory traffic if `counters=True`."""
        kernels: dict[str, list[Launch]] = {}
        for launch in self.launches:
            kernels.setdefault(launch.kernel, []).append(launch)
        return {name: counters_of(launches) for name, launches in kernels.items()}

    def report(self, *, lines: bool = False) -> str:
        """Return the launched kernels, their counters and findings as text; with `lines`, also each Python line's."""
        if not self.launches:
            return f"{self.device.target}: no kernel was launched"
        title = f"{self.device.target}, emulated:"
        findings = ["", *map(str, self.findings)] if self.findings else []
        return "\n".join([title, tables(list(self.counters.values()), lines=lines), *findings])

    # -- a launch --

    @contextmanager
    def launching(self, memory: Sequence[MemoryRange], file: str | None) -> Iterator[None]:
        """Set, inside a `with` block, the memory that this thread's launch may touch and the file of its kernel.

        Raise its findings at the end of the block. A hook may launch another kernel inside the block."""
        here = self._here
        outer = here.memory, here.file, here.launched
        here.memory, here.file, here.launched = memory, file, None
        try:
            yield
            launched = here.launched
        finally:
            here.memory, here.file, here.launched = outer
        findings: list[Finding] = launched.outcome.findings if launched is not None else []
        if self.raises and not all(finding.is_mended for finding in findings):
            raise HazardError(findings)

    def knows(self, address: int, memory: Sequence[MemoryRange]) -> bool:
        """Return whether an address lies in this memory, or in allowed tensors."""
        return any(each.begin <= address < each.end for each in (*memory, *self._allowed))

    def receive(self, arrived: Arrived) -> None:
        """Execute a launch."""
        if arrived.cluster != (1, 1, 1):
            raise NotImplementedError(
                f"{arrived.kernel.name} is launched with clusters of {arrived.cluster} blocks (num_ctas), and clusters "
                "are not emulated"
            )
        x, y, z = arrived.block
        outcome = machine.run(
            machine.Program.of(in_file(arrived.ptx, self._here.file)),
            grid=arrived.grid,
            block=x * y * z,
            shared_bytes=arrived.shared_bytes,
            parameters=arrived.parameters,
            memory=[*self._here.memory, *self._allowed],
            cooperative=arrived.cooperative,
            options=self.options,
        )
        reported = [finding for finding in outcome.findings if finding.kind not in self.ignored]
        launch = Launch(
            kernel=arrived.kernel.name,
            grid=arrived.grid,
            threads=x * y * z,
            shared_bytes=arrived.shared_bytes,
            cooperative=arrived.cooperative,
            parameters=arrived.parameters,
            ptx=arrived.ptx,
            outcome=replace(outcome, findings=reported),
            launched_from=caller(),
        )
        self._here.launched = launch
        with self._lock:
            self.launches.append(launch)


class _Here(threading.local):
    """State of the launch that a thread is about to make, or has made."""

    memory: Sequence[MemoryRange] = ()
    file: str | None = None
    launched: Launch | None = None


@functools.lru_cache(maxsize=256)
def in_file(ptx: str, file: str | None) -> str:
    """Return the PTX with the kernel's current file: Triton's cache identifies kernels by text, whatever their file."""
    location = re.search(r"^\s*\.loc\s+(\d+)", ptx, re.M)
    if location is None or file is None:
        return ptx
    pattern = re.compile(rf'^(\s*\.file\s+{location[1]}\s+)"[^"]*"', re.M)
    return pattern.sub(lambda match: f'{match[1]}"{file}"', ptx, count=1)


def memory_of(tensor: torch.Tensor, name: str) -> MemoryRange:
    """Return the range from a tensor's first element to its last."""
    memory = Memory.of(tensor, tensor.data_ptr())
    return MemoryRange(memory.low, memory.high, True, name)


# ---- the scopes that are open ---------------------------------------------------------------------------------------

_open: list[Gpu] = []


def current() -> Gpu:
    """Return the GPU of the innermost block. Like Triton's active driver, it is the same for every thread."""
    if not _open:
        raise RuntimeError("no GPU is being emulated: launch inside `with triton_loom.emulate(...)`")
    return _open[-1]


@contextmanager
def opened(gpu: Gpu) -> Iterator[None]:
    """Make this the GPU of all launches inside a `with` block."""
    _open.append(gpu)
    try:
        yield
    finally:
        _open.remove(gpu)


def receive(arrived: Arrived) -> None:
    """Pass a launch to the current GPU."""
    current().receive(arrived)
