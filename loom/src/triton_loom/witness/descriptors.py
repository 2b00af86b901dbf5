"""Tensor descriptors that kernels make: what a GPU asks of their base and strides.

On a CPU a descriptor is a pointer, and any will do. A GPU whose descriptors are hardware (sm_90 and later) takes those
whose base and whose strides, but the last, are multiples of 16 bytes; of others it ends the launch, or reads elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, product

from ..ir.provenance import MAKES_DESCRIPTOR, described, root_of
from ..ir.reader import parse
from ..ir.ttir import Module, Op, Pointer, element_of
from .again import pointers_of, program_of
from .evaluate import Frame, Program, Unknown
from .watched import Broken, Watched

_ALIGNED = 16  # bytes
_MOST_RUNS = 16  # of the block that makes a descriptor, in one program


def misaligned(watched: Watched, ttir: str) -> Iterator[Broken]:
    """Yield the descriptors that a GPU would not take, by the first program that makes them so. The first and the last
    program of each axis stand for all. `ttir` is the kernel's text before its descriptors became pointers."""
    module = _parsed(ttir)
    if len(module.entry.args) != len(watched.values):
        return  # descriptors that the host made are among its arguments: Triton has checked those
    pointers = pointers_of(watched, module)
    makers = [op for op in module.entry.body.walk() if op.name == MAKES_DESCRIPTOR]
    for position in product(*(sorted({0, axis - 1}) for axis in watched.grid)):
        x, y, z = position
        program = program_of(watched, (x, y, z), module)
        for op in list(makers):
            try:
                frames = islice(program.frames(op.block, op.operands), _MOST_RUNS) if op.block else ()
                detail = next(filter(None, (_detail(op, program, frame) for frame in frames)), "")
            except Unknown:
                continue
            if detail:
                makers.remove(op)
                root = root_of(op.operands[0])
                argument = pointers[root].name if root in pointers else None
                yield Broken(argument, detail, op.origin or op.location, (x, y, z))


@lru_cache(maxsize=32)
def _parsed(ttir: str) -> Module:
    return parse(ttir)


def _detail(op: Op, program: Program, frame: Frame) -> str:
    """Say what is wrong with a descriptor; nothing if a GPU takes it."""
    base, _, strides = described(op)
    pointer = element_of(base.type)
    assert isinstance(pointer, Pointer)
    size = max(1, element_of(pointer.pointee).bits // 8)
    address = program.number(base, frame)
    if address % _ALIGNED:
        return f"the descriptor begins at {address:#x}, and a GPU takes multiples of {_ALIGNED} bytes alone"
    for dim, stride in enumerate(strides[:-1]):
        pitch = program.number(stride, frame) * size
        if pitch % _ALIGNED:
            return (
                f"dimension {dim} of the descriptor has a stride of {pitch} bytes, and a GPU takes multiples of "
                f"{_ALIGNED} alone"
            )
    return ""
