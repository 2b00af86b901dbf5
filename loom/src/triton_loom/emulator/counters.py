"""What launches do, counted by line of Python: instructions, barriers, and what is asked of global and shared memory.

How often each instruction was executed is always known. What it asked of memory is counted by include/gpu/counters.h,
to which `requests_of` says which operand of an instruction is an address and how many bytes are accessed there.
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
    "integer",  # with logic, comparisons and selections of integers and predicates
    "float",  # that of the arithmetic units; comparisons and selections of floats as well
    "cast",  # between formats
    "special",  # approximate functions, quotients, reciprocals and roots
    "global",  # loads, stores and atomics of global memory
    "shared",  # loads, stores and atomics of shared memory; ldmatrix and stmatrix
    "copy",  # asynchronous copies, with what commits them and waits for them
    "matrix",  # products in matrix units, with what commits them and waits for them
    "lanes",  # what passes values between the lanes of a warp
    "control",  # branches
    "barrier",  # barriers of all kinds, and fences
    "other",  # moves and parameters, most of which cost nothing on a GPU
]
CLASSES: tuple[InstructionClass, ...] = get_args(InstructionClass)

_CLASSES: tuple[tuple[InstructionClass, str], ...] = (  # the first that an opcode begins with
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
    """What kind of work an instruction is."""
    for name, begins in _CLASSES:
        if re.match(begins, opcode):
            return name
    return "integer" if ptx.find(opcode) is not None else "other"


# ---- what is counted ---------------------------------------------------------------------------------------------


class GlobalTraffic(NamedTuple):
    """What warps ask of global memory.

    A sector is 32 bytes, the least that global memory moves. `least_sectors` is what each request would touch if its
    bytes lay side by side from the beginning of a sector on; a byte that several lanes ask for counts once there.
    """

    requests: int = 0  # instructions of warps
    bytes: int = 0  # that lanes ask for, each by itself
    sectors: int = 0  # that requests touch, one request after another
    least_sectors: int = 0

    def plus(self, other: GlobalTraffic) -> GlobalTraffic:
        """The sum, number by number."""
        return GlobalTraffic(*(a + b for a, b in zip(self, other, strict=True)))


class SharedTraffic(NamedTuple):
    """What warps ask of shared memory.

    A wavefront serves each of the 32 banks with one word, to however many lanes want it. Lanes are served together as
    far as they ask for 128 bytes; `least_wavefronts` is one for each such group, what there would be without conflicts.
    """

    requests: int = 0  # instructions of warps
    bytes: int = 0  # that lanes ask for, each by itself
    wavefronts: int = 0
    least_wavefronts: int = 0

    def plus(self, other: SharedTraffic) -> SharedTraffic:
        """The sum, number by number."""
        return SharedTraffic(*(a + b for a, b in zip(self, other, strict=True)))


NO_GLOBAL, NO_SHARED = GlobalTraffic(), SharedTraffic()


@dataclass(frozen=True)
class Memory:
    """Requests by what they do. An asynchronous copy loads from global memory and writes to shared memory; an atomic
    operation on shared memory counts as a write."""

    loads: GlobalTraffic = NO_GLOBAL
    stores: GlobalTraffic = NO_GLOBAL
    atomics: GlobalTraffic = NO_GLOBAL
    shared_reads: SharedTraffic = NO_SHARED
    shared_writes: SharedTraffic = NO_SHARED

    def plus(self, other: Memory) -> Memory:
        """The sum, number by number."""
        return Memory(
            self.loads.plus(other.loads),
            self.stores.plus(other.stores),
            self.atomics.plus(other.atomics),
            self.shared_reads.plus(other.shared_reads),
            self.shared_writes.plus(other.shared_writes),
        )

    @property
    def all_global(self) -> GlobalTraffic:
        """Loads, stores and atomics together."""
        return self.loads.plus(self.stores).plus(self.atomics)

    @property
    def all_shared(self) -> SharedTraffic:
        """Reads and writes together."""
        return self.shared_reads.plus(self.shared_writes)


class NotCounted(RuntimeError):
    """Requests to memory are asked for, and nobody has counted them."""


@dataclass(frozen=True)
class Counters:
    """What some instructions did."""

    instructions: Mapping[InstructionClass, int] = field(default_factory=dict)  # executed by warps
    barriers: float = 0  # of blocks; where several instructions lead to one barrier, each has its part of it
    tensor_flops: int = 0  # two for each multiply-add of mma, wgmma and tcgen05.mma
    counted: Memory | None = None

    @property
    def memory(self) -> Memory:
        """Requests to memory; raises `NotCounted` unless the launch was made with `counters=True`."""
        if self.counted is None:
            raise NotCounted("requests to memory are counted by `emulate(target, counters=True)` alone")
        return self.counted

    @property
    def warp_instructions(self) -> int:
        """Of all classes."""
        return sum(self.instructions.values())

    def plus(self, other: Counters) -> Counters:
        """The sum, number by number."""
        both = [(name, self.instructions.get(name, 0) + other.instructions.get(name, 0)) for name in CLASSES]
        counted = [memory for memory in (self.counted, other.counted) if memory is not None]
        return Counters(
            {name: number for name, number in both if number},
            self.barriers + other.barriers,
            self.tensor_flops + other.tensor_flops,
            reduce(Memory.plus, counted) if counted else None,
        )


class Line(NamedTuple):
    """A line of Python that a kernel is made of. What Triton's own library does belongs to the line that called it."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" if self.number else "no line"

    @property
    def text(self) -> str:
        """The line itself; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True)
class KernelCounters:
    """What all launches of a kernel did."""

    kernel: str
    launches: int
    blocks: int
    findings: int
    lines: dict[Line, Counters]  # those with the most instructions first

    @property
    def total(self) -> Counters:
        """All lines together."""
        return added(self.lines.values())


def added(counters: Iterable[Counters]) -> Counters:
    """The sum of several."""
    return reduce(Counters.plus, counters, Counters())


# ---- how requests are counted ------------------------------------------------------------------------------------

HOW = ("", "global", "shared", "copy")  # in the order of `How` in include/gpu/counters.h
COUNTING = np.dtype([("how", "u4"), ("operand", "u4"), ("bytes", "u4"), ("lanes", "u4")])
COUNTS = len(GlobalTraffic._fields) + len(SharedTraffic._fields)  # numbers that are counted of an instruction
Counts = npt.NDArray[np.uint64]  # by instruction: those of global memory, then those of shared memory


def requests_of(statements: Iterable[Statement]) -> np.ndarray:
    """What include/gpu/counters.h has to know of each instruction."""
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
    if found := re.fullmatch(r"cp\.async\.(4|8|16)", operation.handler):
        return HOW.index("copy"), 0, int(found[1]), 0
    return 0, 0, 0, 0


# ---- from instructions to lines ----------------------------------------------------------------------------------


def by_line(
    statements: Sequence[Statement], executed: npt.NDArray[np.uint64], counts: Counts | None, threads: int
) -> dict[Line, Counters]:
    """What the instructions of a program did, line by line; `threads` are those of a block."""
    files = {Path(statement.place.file).name: statement.place.file for statement in statements}
    lines: dict[Line, Counters] = {}
    numbers = _constants(statements)
    for number in np.flatnonzero(executed).tolist():
        statement, times = statements[number], int(executed[number])
        memory = None if counts is None else _memory(statement, counts[number])
        did = Counters(
            {class_of(statement.opcode): times},
            times * _barriers(statement, threads),
            times * _flops(statement, numbers),
            memory,
        )
        line = _line(statement, files)
        lines[line] = lines[line].plus(did) if line in lines else did
    return lines


_TRITON = "/triton/language/"


def _line(statement: Statement, files: Mapping[str, str]) -> Line:
    place = statement.place
    if _TRITON not in place.file or not place.outermost:
        return Line(place.file, place.line)
    file, _, number = place.outermost.rpartition(":")  # the file without its directory
    return Line(files.get(file, file), int(number))


def _barriers(statement: Statement, threads: int) -> float:
    """The part of a barrier that one warp is."""
    if not re.match(r"(bar|barrier)\.(cta\.)?(sync|arrive)", statement.opcode):
        return 0
    expected = statement.operands[1] if len(statement.operands) > 1 else ""
    return 32 / (int(expected) if expected.isdecimal() else threads)


def _constants(statements: Sequence[Statement]) -> dict[str, int]:
    """Registers that are set once, to a number."""
    found: dict[str, set[str]] = {}
    for statement in statements:
        if statement.operands and statement.opcode in ("mov.b32", "mov.u32"):
            found.setdefault(statement.operands[0], set()).add(statement.operands[1])
    single = {name: next(iter(texts)) for name, texts in found.items() if len(texts) == 1}
    return {
        name: int(text, 0) for name, text in single.items() if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text)
    }


_STEPS = {"tf32": 8, "f16": 16, "mxf4": 64, "mxf4nvf4": 64}  # of k; others 32


def _flops(statement: Statement, numbers: Mapping[str, int]) -> int:
    """Of one warp. Four warps make a wgmma together; the shape of a tcgen05.mma is in its instruction descriptor."""
    if found := re.match(r"tcgen05\.mma\..*\bkind::(\w+)", statement.opcode):
        described = numbers.get(statement.operands[3], 0)
        return 2 * (described >> 24 & 31) * 16 * (described >> 17 & 63) * 8 * _STEPS.get(found[1], 32)
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
    does = _direction(statement.opcode)
    return Memory(
        loads=of_global if does == "loads" else NO_GLOBAL,
        stores=of_global if does == "stores" else NO_GLOBAL,
        atomics=of_global if does == "atomics" else NO_GLOBAL,
        shared_reads=of_shared if is_read else NO_SHARED,
        shared_writes=NO_SHARED if is_read else of_shared,
    )


def _direction(opcode: str) -> Literal["loads", "stores", "atomics"]:
    """What it does to global memory, if anything. A copy names where it goes before where it comes from."""
    if re.match(r"(atom|red|cp\.reduce)\.", opcode):
        return "atomics"
    return "stores" if re.match(r"st\.|cp\..*global.*shared", opcode) else "loads"
