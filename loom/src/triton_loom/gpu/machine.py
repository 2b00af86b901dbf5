"""The machine that executes a decoded kernel: built once from include/gpu, loaded with ctypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class MemoryRange(NamedTuple):
    """Bytes of this process that a launch may touch: a tensor, its scratch memory, a device's printf buffer."""

    begin: int
    end: int
    writable: bool = True
    name: str = ""  # for findings: the argument or whatever else the bytes are


@dataclass(frozen=True)
class Options:
    """How a launch is executed. Results do not depend on `threads`."""

    checks: bool = True  # hazards; without them addresses are still checked
    delivery: Literal["late", "early"] = "late"  # when asynchronous copies arrive: the latest or the earliest moment
    threads: int = 0  # of the CPU; 0: as many as torch uses


@dataclass(frozen=True)
class Outcome:
    """What a launch did: findings (an empty list is a clean launch), and how often each instruction was executed."""

    findings: list[str] = field(default_factory=list)  # will be gpu.findings.Finding; str() of either is a line
    executed: Sequence[int] = ()  # warp instructions, by their number in the program


class Program:
    """A kernel, decoded from its PTX: what `run` executes. `Program.of(ptx)` keeps those that it has decoded."""

    name: str
    threads: int  # of a block: reqntid
    parameter_bytes: int

    @classmethod
    def of(cls, ptx: str) -> Program:
        raise NotImplementedError("the machine is being written")


def run(
    program: Program,
    *,
    grid: tuple[int, int, int],
    block: int,
    shared_bytes: int,
    parameters: bytes,
    memory: Sequence[MemoryRange],
    options: Options = Options(),
) -> Outcome:
    """Execute a launch: `parameters` are the bytes of the .param space, tensor maps in the encoding of tensor_map.h."""
    raise NotImplementedError("the machine is being written")
