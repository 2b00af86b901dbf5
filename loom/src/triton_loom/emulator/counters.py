"""Counters of launches by line of Python: instructions, barriers, and traffic of global and shared memory.

Executions of each instruction are always counted. Its memory traffic is counted by include/gpu/counters.h;
`requests_of` tells it which operand of an instruction is an address and how many bytes are accessed there.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ..codegen import ptx
from ..ptx import opcodes
from ..ptx.text import Statement

InstructionClass = Literal[
    "integer",  # arithmetic, logic, comparisons and selections of integers and predicates
    "float",  # arithmetic, comparisons and selections of floats
    "cast",  # between formats
    "special",  # approximate functions, quotients, reciprocals and roots
    "global",  # loads, stores and atomics of global memory
    "shared",  # loads, stores and atomics of shared memory; ldmatrix and stmatrix
    "copy",  # asynchronous copies, their commits and waits
    "matrix",  # products in matrix units, their commits and waits
    "lanes",  # exchange of values between the lanes of a warp
    "control",  # branches
    "barrier",  # barriers of all kinds, and fences
    "other",  # moves and parameters, most of which cost nothing on a GPU
]
CLASSES: tuple[InstructionClass, ...] = get_args(InstructionClass)

_CLASSES: tuple[tuple[InstructionClass, str], ...] = (  # the first pattern that the opcode begins with
    (
        "other",
        r"(mov|cvta|createpolicy|prefetch|nanosleep|griddepcontrol|setmaxnreg)\b|ld\.param|(ld|st)\.local",
    ),
    ("cast", r"cvt\."),
    ("special", r"(ex2|lg2|sin|cos|tanh|rcp|rsqrt|sqrt)\.|div\..*f(16|32|64)"),
    ("copy", r"cp\.|tensormap\."),
    ("matrix", r"(mma|wgmma|tcgen05)\."),
    ("shared", r"(ldmatrix|stmatrix)\.|(ld|st|atom|red)\..*shared"),
    ("global", r"(ld|st|atom|red)\."),
    ("lanes", r"(shfl|vote|redux|elect|activemask|match)\b"),
    ("control", r"(bra|brx|ret|exit)\b"),
    ("barrier", r"(bar|barrier|mbarrier|membar|fence)\b"),
    ("float", r".*\.(f16|bf16|f32|f64)(x2)?$"),
)


@lru_cache(maxsize=4096)
def class_of(opcode: str) -> InstructionClass:
    """Return the class of an instruction."""
    for name, begins in _CLASSES:
        if re.match(begins, opcode):
            return name
    return "integer" if ptx.find(opcode) is not None else "other"


# ---- counters ----------------------------------------------------------------------------------------------------


class GlobalTraffic(NamedTuple):
    """Requests of warps to global memory.

    A sector is 32 bytes, the unit in which global memory moves data. `least_sectors` is the number that each request
    would touch if its bytes were contiguous from the beginning of a sector on; a byte that several lanes request counts
    once there.
    """

    requests: int = 0  # warp instructions
    bytes: int = 0  # requested by lanes, each counted separately
    sectors: int = 0  # touched, summed over requests
    least_sectors: int = 0

    def plus(self, other: GlobalTraffic) -> GlobalTraffic:
        """Return the elementwise sum."""
        return GlobalTraffic(*(a + b for a, b in zip(self, other, strict=True)))


class SharedTraffic(NamedTuple):
    """Requests of warps to shared memory.

    A wavefront serves one word from each of the 32 banks, to however many lanes want it. Lanes are served together up
    to 128 bytes; `least_wavefronts` counts one for each such group, the number without bank conflicts.
    """

    requests: int = 0  # warp instructions
    bytes: int = 0  # requested by lanes, each counted separately
    wavefronts: int = 0
    least_wavefronts: int = 0

    def plus(self, other: SharedTraffic) -> SharedTraffic:
        """Return the elementwise sum."""
        return SharedTraffic(*(a + b for a, b in zip(self, other, strict=True)))


NO_GLOBAL, NO_SHARED = GlobalTraffic(), SharedTraffic()


@dataclass(frozen=True)
class Memory:
    """Memory traffic by kind of request. An asynchronous copy counts as a load from global memory and a write to shared
    memory; an atomic operation on shared memory counts as a write."""

    loads: GlobalTraffic = NO_GLOBAL
    stores: GlobalTraffic = NO_GLOBAL
    atomics: GlobalTraffic = NO_GLOBAL
    shared_reads: SharedTraffic = NO_SHARED
    shared_writes: SharedTraffic = NO_SHARED

    def plus(self, other: Memory) -> Memory:
        """Return the elementwise sum."""
        return Memory(
            self.loads.plus(other.loads),
            self.stores.plus(other.stores),
            self.atomics.plus(other.atomics),
            self.shared_reads.plus(other.shared_reads),
            self.shared_writes.plus(other.shared_writes),
        )

    @property
    def all_global(self) -> GlobalTraffic:
        """Sum of loads, stores and atomics."""
        return self.loads.plus(self.stores).plus(self.atomics)

    @property
    def all_shared(self) -> SharedTraffic:
        """Sum of reads and writes."""
        return self.shared_reads.plus(self.shared_writes)


class NotCounted(RuntimeError):
    """Error: memory traffic is requested of a launch that did not count it."""


@dataclass(frozen=True)
class Counters:
    """Counters of a set of instructions."""

    instructions: Mapping[InstructionClass, int] = field(default_factory=dict)  # executed by warps
    barriers: float = 0  # of blocks; if several instructions lead to one barrier, each counts its share
    tensor_flops: int = 0  # two for each multiply-add of mma, wgmma and tcgen05.mma
    counted: Memory | None = None

    @property
    def memory(self) -> Memory:
        """Memory traffic; raises `NotCounted` unless the launch was made with `counters=True`."""
        if self.counted is None:
            raise NotCounted("memory traffic is only counted with `emulate(target, counters=True)`")
        return self.counted

    @property
    def warp_instructions(self) -> int:
        """Warp instructions of all classes."""
        return sum(self.instructions.values())

    def plus(self, other: Counters) -> Counters:
        """Return the elementwise sum."""
        both = [(name, self.instructions.get(name, 0) + other.instructions.get(name, 0)) for name in CLASSES]
        counted = [memory for memory in (self.counted, other.counted) if memory is not None]
        return Counters(
            {name: number for name, number in both if number},
            self.barriers + other.barriers,
            self.tensor_flops + other.tensor_flops,
            reduce(Memory.plus, counted) if counted else None,
        )


class Line(NamedTuple):
    """A line of a kernel's Python source. Work of Triton's own library is attributed to the line that called it."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" if self.number else "no line"

    @property
    def text(self) -> str:
        """Source text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True)
class KernelCounters:
    """Counters of all launches of a kernel."""

    kernel: str
    launches: int
    blocks: int
    findings: int
    lines: dict[Line, Counters]  # sorted by instructions, most first

    @property
    def total(self) -> Counters:
        """Sum over all lines."""
        return added(self.lines.values())


def added(counters: Iterable[Counters]) -> Counters:
    """Return the sum of several counters."""
    return reduce(Counters.plus, counters, Counters())


# ---- counting of requests ----------------------------------------------------------------------------------------

HOW = ("", "global", "shared", "copy")  # in the order of `How` in include/gpu/counters.h
COUNTING = np.dtype([("how", "u4"), ("operand", "u4"), ("bytes", "u4"), ("lanes", "u4")])
COUNTS = len(GlobalTraffic._fields) + len(SharedTraffic._fields)  # traffic counters per instruction
Counts = npt.NDArray[np.uint64]  # by instruction: counters of global memory, then of shared memory


def requests_of(statements: Iterable[Statement]) -> np.ndarray:
    """Return, for include/gpu/counters.h, how each instruction accesses memory."""
    return np.array([_request(statement) for statement in statements], COUNTING)


def _request(statement: Statement) -> tuple[int, int, int, int]:
    operation = opcodes.decode(statement)
    name, *rest = operation.handler.split(".")
    uses, space = operation.uses, rest[0] if rest else ""
    if name in ("ld", "st") and space in ("global", "shared"):
        values = uses[:-1] if name == "ld" else uses[1:]
        size = sum(ptx.width(use.type) for use in values) // 8
        return HOW.index(space), len(uses) - 1 if name == "ld" else 0, size, 0
    if name == "atom":
        values = uses[:1] if "cas" in rest else uses[: (len(uses) - 1) // 2]
        return HOW.index(space), len(values), sum(ptx.width(use.type) for use in values) // 8, 0
    if name in ("ldmatrix", "stmatrix"):
        rows = 8 * int(rest[0][1:])
        return HOW.index("shared"), len(uses) - 1 if name == "ldmatrix" else 0, 16, (1 << rows) - 1
    if match := re.fullmatch(r"cp\.async\.(4|8|16)", operation.handler):
        return HOW.index("copy"), 0, int(match[1]), 0
    return 0, 0, 0, 0


# ---- attribution to lines ----------------------------------------------------------------------------------------


def by_line(
    statements: Sequence[Statement], executed: npt.NDArray[np.uint64], counts: Counts | None, threads: int
) -> dict[Line, Counters]:
    """Return the counters of a program's instructions by line; `threads` is the size of a block."""
    files = {Path(statement.place.file).name: statement.place.file for statement in statements}
    lines: dict[Line, Counters] = {}
    numbers = _constants(statements)
    for number in np.flatnonzero(executed).tolist():
        statement, times = statements[number], int(executed[number])
        memory = None if counts is None else _memory(statement, counts[number])
        counted = Counters(
            {class_of(statement.opcode): times},
            times * _barriers(statement, threads),
            times * _flops(statement, numbers),
            memory,
        )
        line = _line(statement, files)
        lines[line] = lines[line].plus(counted) if line in lines else counted
    return lines


_TRITON = "/triton/language/"


def _line(statement: Statement, files: Mapping[str, str]) -> Line:
    place = statement.place
    if _TRITON not in place.file or not place.outermost:
        return Line(place.file, place.line)
    file, _, number = place.outermost.rpartition(":")  # the file without its directory
    return Line(files.get(file, file), int(number))


def _barriers(statement: Statement, threads: int) -> float:
    """Return the share of a barrier that one warp contributes."""
    if not re.match(r"(bar|barrier)\.(cta\.)?(sync|arrive)", statement.opcode):
        return 0
    expected = statement.operands[1] if len(statement.operands) > 1 else ""
    return 32 / (int(expected) if expected.isdecimal() else threads)


def _constants(statements: Sequence[Statement]) -> dict[str, int]:
    """Return the registers that are set exactly once, to a constant, with its value."""
    values: dict[str, set[str]] = {}
    for statement in statements:
        if statement.operands and statement.opcode in ("mov.b32", "mov.u32"):
            values.setdefault(statement.operands[0], set()).add(statement.operands[1])
    single = {name: next(iter(texts)) for name, texts in values.items() if len(texts) == 1}
    return {
        name: int(text, 0) for name, text in single.items() if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text)
    }


_STEPS = {"tf32": 8, "f16": 16, "mxf4": 64, "mxf4nvf4": 64}  # extent of K by kind; 32 for others


def _flops(statement: Statement, numbers: Mapping[str, int]) -> int:
    """Return the FLOPs of one warp's share of the instruction.

    A wgmma is issued by four warps; the shape of a tcgen05.mma is in its instruction descriptor."""
    if match := re.match(r"tcgen05\.mma\..*\bkind::(\w+)", statement.opcode):
        descriptor = numbers.get(statement.operands[3], 0)
        return 2 * (descriptor >> 24 & 31) * 16 * (descriptor >> 17 & 63) * 8 * _STEPS.get(match[1], 32)
    shape = re.match(r"(mma|wgmma)\..*\bm(\d+)n(\d+)k(\d+)\b", statement.opcode)
    if shape is None:
        return 0
    m, n, k = map(int, shape.groups()[1:])
    return 2 * m * n * k // (4 if shape[1] == "wgmma" else 1)


def _memory(statement: Statement, counts: Counts) -> Memory:
    if not counts.any():
        return Memory()
    numbers = [int(count) for count in counts]
    of_global, of_shared = GlobalTraffic(*numbers[:4]), SharedTraffic(*numbers[4:])
    is_read = statement.opcode.startswith("ld")
    direction = _direction(statement.opcode)
    return Memory(
        loads=of_global if direction == "loads" else NO_GLOBAL,
        stores=of_global if direction == "stores" else NO_GLOBAL,
        atomics=of_global if direction == "atomics" else NO_GLOBAL,
        shared_reads=of_shared if is_read else NO_SHARED,
        shared_writes=NO_SHARED if is_read else of_shared,
    )


def _direction(opcode: str) -> Literal["loads", "stores", "atomics"]:
    """Return how an opcode uses global memory, if it does. A copy names its destination before its source."""
    if re.match(r"(atom|red|cp\.reduce)\.", opcode):
        return "atomics"
    return "stores" if re.match(r"st\.|cp\..*global.*shared", opcode) else "loads"
