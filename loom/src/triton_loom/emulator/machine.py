"""The machine that executes a decoded kernel: built once from include/gpu, and loaded with ctypes."""

from __future__ import annotations

import _thread
import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ..device import launcher, toolchain
from ..ptx import scalars, text
from ..ptx.copies import Copies
from ..ptx.program import NOWHERE, Flat, flatten
from .counters import COUNTING, COUNTS, Counts, requests_of
from .findings import KINDS, Access, Finding

FINDINGS_KEPT = 256


class MemoryRange(NamedTuple):
    """Bytes of this process that a launch may touch: a tensor, scratch memory, a device's printf buffer."""

    begin: int
    end: int
    writable: bool = True
    name: str = ""  # for findings: the argument, or another name of the bytes


@dataclass(frozen=True)
class Options:
    """Options of a launch. Results and findings do not depend on `threads`."""

    checks: bool = True  # of hazards; addresses are checked regardless
    delivery: Literal["late", "early"] = (
        "late"  # when asynchronous copies arrive: the latest or the earliest moment
    )
    threads: int = 0  # of the CPU; 0: as many as torch uses
    counters: bool = False  # of memory traffic
    limit: float = math.inf  # seconds that a block may take


CHECKED = Options()


@dataclass(frozen=True)
class Outcome:
    """Result of a launch: findings (none: it is clean), and how many warps executed each instruction of the program."""

    findings: list[Finding]
    executed: Sequence[int]
    total_findings: int = 0  # including those that were not kept
    statements: Sequence[text.Statement] = ()  # the program's instructions
    counts: Counts | None = None  # by instruction, if requested


# ---- structures shared with C++ --------------------------------------------------------------------------

_INSTRUCTION = np.dtype(
    [
        ("handler", "u8"), ("operands", "u8"), ("immediate", "i8"), ("operand_count", "u4"), ("guard", "u4"),
        ("flip", "u4"), ("target", "u4"), ("reconverge", "u4"), ("number", "u4"), ("flags", "u4"), ("padding", "u4"),
    ]
)  # fmt: skip
_FINDING = np.dtype(
    [
        ("kind", "i4"), ("instruction", "u4"), ("other_instruction", "u4"), ("thread", "u4"), ("other_thread", "u4"),
        ("block", "u4", 3), ("other_block", "u4", 3), ("padding", "u4"), ("address", "u8"), ("count", "u8"),
        ("order", "u8"),
    ]
)  # fmt: skip
_RANGE = np.dtype([("begin", "u8"), ("end", "u8"), ("writable", "u8")])
_CONSTANT = np.dtype([("offset", "u4"), ("bytes", "u4"), ("value", "u8")])
_SPECIAL = np.dtype([("offset", "u4"), ("kind", "u4"), ("addend", "u8")])
_HAZARDS, _EARLY, _COOPERATIVE = 1, 2, 8


class _Interpreter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("enter", "leave", "is_interrupted")]


_PYTHON = _Interpreter(
    *(
        ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
        for name in ("PyGILState_Ensure", "PyGILState_Release", "PyOS_InterruptOccurred")
    )
)
_BY_INTERRUPT = 2  # of `Stop`


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "instructions", "constants", "specials", "ranges", "parameters", "executed", "findings", "counting",
            "counts", "storing",
        )),
        ("findings_total", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("interpreter", _Interpreter),
        *((name, ctypes.c_uint32) for name in (
            "instruction_count", "constant_count", "special_count", "range_count", "finding_capacity",
            "finding_count", "register_bytes", "parameter_bytes", "shared_bytes", "threads",
        )),
        ("grid", ctypes.c_uint32 * 3),
        ("options", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("lock", ctypes.c_int32),
        ("next_block", ctypes.c_uint64),
        ("first_block", ctypes.c_uint32),
        ("waiting", ctypes.c_uint32),
        ("global_shadow", ctypes.c_void_p),
        ("thread", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("started", "over", "stopped")),
    ]  # fmt: skip


# ---- the library -----------------------------------------------------------------------------------------

LIBRARIES = (
    "machine",
    "matrix",
    "hopper",
    "blackwell",
)  # in include/gpu: the machine itself, and further handlers


@functools.lru_cache
def libraries() -> dict[str, ctypes.CDLL]:
    """Build, in parallel, the machine, further handlers and common arithmetic; return the libraries by name."""
    sources = {name: f'#include "gpu/{name}.cpp"\n' for name in LIBRARIES}
    sources["scalars"] = scalars.unit(scalars.common())
    with ThreadPoolExecutor(len(sources)) as pool:
        binaries = dict(zip(sources, pool.map(toolchain.build_library, sources.values()), strict=True))
    loaded = {name: _loaded(binary, f"gpu-{name}") for name, binary in binaries.items()}
    machine = loaded["machine"]
    machine.gpu_launch.argtypes = [ctypes.POINTER(_Launch), ctypes.c_void_p]
    machine.gpu_launch.restype = None
    sizes = (_INSTRUCTION, _FINDING, None, _RANGE, _CONSTANT, _SPECIAL, COUNTING, np.dtype(("u8", COUNTS)))
    for index, dtype in enumerate(sizes):
        size = ctypes.sizeof(_Launch) if dtype is None else dtype.itemsize
        assert machine.gpu_size(index) == size, "machine.py does not mirror machine.h"
    return loaded


def _loaded(binary: bytes, name: str) -> ctypes.CDLL:
    loaded = toolchain.load(binary, name)
    loaded.gpu_handler.argtypes = [ctypes.c_char_p]
    loaded.gpu_handler.restype = ctypes.c_void_p
    loaded.gpu_handler_name.restype = ctypes.c_char_p
    return loaded


@functools.lru_cache(maxsize=256)
def _further_arithmetic(missing: frozenset[scalars.Scalar]) -> ctypes.CDLL:
    """Return handlers of rare instructions, compiled for a kernel that has them."""
    return _loaded(toolchain.build_library(scalars.unit(missing)), "gpu-scalars")


def _handlers(flat: Flat) -> dict[str, int]:
    """Return the address of each handler that a program names."""
    available = list(libraries().values())
    common_handler = libraries()["scalars"].gpu_handler
    if missing := frozenset(s for s in flat.scalars if not common_handler(s.handler.encode())):
        available.append(_further_arithmetic(missing))
    addresses: dict[str, int] = {}
    for name in {name for i in flat.instructions for name in (i.handler, i.behind) if name}:
        address = next((at for one in available if (at := one.gpu_handler(name.encode()))), None)
        if address is None:
            raise LookupError(f"the machine has no handler `{name}`: ptx/opcodes.py and include/gpu disagree")
        addresses[name] = address
    return addresses


# ---- a program -------------------------------------------------------------------------------------------


class Program:
    """A kernel, decoded from its PTX for `run`. `Program.of(ptx)` caches decoded programs."""

    def __init__(self, ptx: str) -> None:
        self.flat = flatten(text.read(ptx))
        kernel = self.flat.kernel
        self.name = kernel.name
        self.threads = kernel.threads  # of a block
        self.parameter_bytes = kernel.parameter_bytes
        self.static_shared_bytes = kernel.shared_bytes
        self._symbols = {
            name: ctypes.create_string_buffer(content) for name, content in kernel.constants.items()
        }
        self._fill()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, ptx: str) -> Program:
        """Return the program of a PTX text."""
        return cls(ptx)

    def _fill(self) -> None:
        flat, handlers = self.flat, _handlers(self.flat)
        # If another handler stands in for an instruction's own, the own one's address follows the operands.
        behind = [handlers[i.behind] if i.behind else 0 for i in flat.instructions]
        words = [
            word
            for i, address in zip(flat.instructions, behind, strict=True)
            for word in (*i.operands, address & 0xFFFFFFFF, address >> 32)
        ]
        self._operands = np.array(words, np.uint32)
        rows, at = [], self._operands.ctypes.data
        for number, i in enumerate(flat.instructions):
            control = (i.guard, i.flip, i.target, i.reconverge, number)
            rows.append((handlers[i.handler], at, i.immediate, len(i.operands), *control, i.flags, 0))
            at += 4 * (len(i.operands) + 2)
        self.instructions = np.array(rows, _INSTRUCTION)
        addresses = [(offset, 8, ctypes.addressof(self._symbols[name])) for offset, name in flat.symbols]
        self.constants = np.array([*flat.constants, *addresses], _CONSTANT)
        self.specials = np.array(flat.specials, _SPECIAL)

    @functools.cached_property
    def copies(self) -> Copies:
        """Analysis of the use of loaded values."""
        return Copies(self.flat.statements)

    @functools.cached_property
    def counting(self) -> np.ndarray:
        """The memory accesses to count for each instruction."""
        return requests_of(self.flat.statements)

    def own_memory(self) -> list[MemoryRange]:
        """Return the memory that the kernel may read besides its arguments: initialized globals of the module."""
        return [
            MemoryRange(ctypes.addressof(buffer), ctypes.addressof(buffer) + len(buffer), False, name)
            for name, buffer in self._symbols.items()
        ]


# ---- a launch --------------------------------------------------------------------------------------------


def run(
    program: Program,
    *,
    grid: tuple[int, int, int],
    block: int,
    shared_bytes: int,
    parameters: bytes,
    memory: Iterable[MemoryRange],
    cooperative: bool = False,
    options: Options = CHECKED,
) -> Outcome:
    """Execute a launch: `parameters` are the bytes of the .param space, tensor maps in the encoding of tensor_map.h.

    A block that takes longer than `options.limit` ends the launch with a finding that says where the block is. Ctrl-C
    ends it as well.

    `memory` is all that the kernel may touch; an access elsewhere is a finding and is not performed. Blocks of a
    `cooperative` launch wait for each other, so all run at once, each on a thread of its own.
    """
    if block != program.threads:
        raise ValueError(
            f"{program.name} is compiled for {program.threads} threads per block (reqntid), but launched with {block}"
        )
    if len(parameters) < program.parameter_bytes:
        raise ValueError(
            f"{program.name} has {program.parameter_bytes} bytes of parameters, but is launched with {len(parameters)}"
        )
    buffer = ctypes.create_string_buffer(len(parameters) + 64)
    begin = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(begin, parameters, len(parameters))
    own = [MemoryRange(begin, begin + len(parameters), False, "parameters"), *program.own_memory()]
    memory_ranges = _disjoint([*memory, *own])
    ranges = np.array([(r.begin, r.end, r.writable) for r in memory_ranges], _RANGE)
    executed = np.zeros(len(program.instructions), np.uint64)
    records = np.zeros(FINDINGS_KEPT, _FINDING)
    counts = np.zeros((len(program.instructions), COUNTS), np.uint64) if options.counters else None
    storing = np.zeros((len(program.instructions), 32), np.uint32)
    launch = _Launch(
        instructions=program.instructions.ctypes.data,
        constants=program.constants.ctypes.data,
        specials=program.specials.ctypes.data,
        ranges=ranges.ctypes.data,
        parameters=begin,
        executed=executed.ctypes.data,
        findings=records.ctypes.data,
        counting=None if counts is None else program.counting.ctypes.data,
        counts=None if counts is None else counts.ctypes.data,
        storing=storing.ctypes.data,
        limit=0 if math.isinf(options.limit) else max(1, round(1e9 * options.limit)),
        interpreter=_PYTHON,
        instruction_count=len(program.instructions),
        constant_count=len(program.constants),
        special_count=len(program.specials),
        range_count=len(ranges),
        finding_capacity=FINDINGS_KEPT,
        register_bytes=program.flat.register_bytes,
        parameter_bytes=len(parameters),
        shared_bytes=program.static_shared_bytes + shared_bytes,
        threads=block,
        options=(_HAZARDS * options.checks)
        | (_EARLY * (options.delivery == "early"))
        | (_COOPERATIVE * cooperative),
        workers=grid[0] * grid[1] * grid[2] if cooperative else _workers(program, grid, options),
    )
    launch.grid[:] = grid
    libraries()["machine"].gpu_launch(ctypes.byref(launch), launcher.find_gomp_parallel())
    if launch.stopped == _BY_INTERRUPT:
        _thread.interrupt_main()  # the machine has consumed Ctrl-C; let Python handle it as usual
    records = records[: launch.finding_count]
    unused = np.array([_between_copies(program, row, storing) for row in records], bool)
    findings = [_finding(program, row, memory_ranges) for row in records[~unused]]
    findings.sort(key=lambda f: (f.by.ptx_line, f.other.ptx_line if f.other else 0, KINDS.index(f.kind)))
    total = launch.findings_total - int(records["count"][unused].sum())
    return Outcome(findings, executed.tolist(), total, program.flat.statements, counts)


def _workers(program: Program, grid: tuple[int, int, int], options: Options) -> int:
    from torch import get_num_threads

    if program.flat.serial:
        return 1
    return max(1, min(options.threads or get_num_threads(), grid[0] * grid[1] * grid[2]))


def _disjoint(memory: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Return the ranges sorted and disjoint: views of one tensor are merged, other overlaps are cut."""
    merged: list[MemoryRange] = []
    for current in sorted(r for r in memory if r.end > r.begin):
        last = merged[-1] if merged else None
        if (
            last is not None
            and current.begin < last.end
            and (current.writable == last.writable or current.end <= last.end)
        ):
            merged[-1] = last._replace(
                end=max(last.end, current.end), writable=last.writable or current.writable
            )
        elif last is not None and current.begin < last.end:
            merged[-1] = last._replace(end=current.begin)
            merged.append(current)
        else:
            merged.append(current)
    return merged


def _between_copies(program: Program, row: np.void, storing: np.ndarray) -> bool:
    """Return whether a finding is a race that cannot affect any result: see `copies`."""
    if KINDS[row["kind"]] != "global memory race" or (row["block"] != row["other_block"]).any():
        return False
    threads = {
        int(row["instruction"]): int(row["thread"]),
        int(row["other_instruction"]): int(row["other_thread"]),
    }
    return any(
        program.copies.is_unused(load, store, threads[load], storing)
        for load in threads
        for store in threads
        if load != store
    )


def _finding(program: Program, row: np.void, memory: Sequence[MemoryRange]) -> Finding:
    kind = KINDS[row["kind"]]
    other = None
    if row["other_instruction"] != NOWHERE or row["other_thread"] != NOWHERE:
        number = row["other_instruction"] if row["other_instruction"] != NOWHERE else row["instruction"]
        other = _access(program, int(number), row["other_block"], int(row["other_thread"]))
    address = int(row["address"]) or None
    return Finding(
        kind=kind,
        kernel=program.name,
        by=_access(program, int(row["instruction"]), row["block"], int(row["thread"])),
        other=other,
        address=address,
        memory=_memory_name(kind, address, memory),
        count=int(row["count"]),
    )


def _access(program: Program, number: int, block: np.ndarray, thread: int) -> Access:
    statement = program.flat.statements[number]
    return Access(
        instruction=str(statement),
        ptx_line=statement.line,
        place=statement.place,
        block=(int(block[0]), int(block[1]), int(block[2])),
        thread=None if thread == NOWHERE else thread,
    )


def _memory_name(kind: str, address: int | None, memory: Sequence[MemoryRange]) -> str:
    if address is None:
        return ""
    if "global" not in kind and "read-only" not in kind:
        if "tensor memory" in kind:
            return "lane and column"
        return "shared memory address" if "shared" in kind or "disagree" in kind else "address"
    inside = [r for r in memory if r.begin <= address < r.end and r.name]
    if inside:
        return f"byte {address - inside[0].begin} of {inside[0].name}, address"
    return "address"
