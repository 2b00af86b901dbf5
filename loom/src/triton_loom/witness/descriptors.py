"""Alignment that a GPU requires of the base and strides of tensor descriptors created by kernels.

On a CPU a descriptor is a pointer, and any alignment works. GPUs with hardware descriptors (sm_90 and later)
require the base and all strides but the last to be multiples of 16 bytes; otherwise the launch fails or reads
elsewhere.
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
from .watched import BrokenPromise, Watched

_ALIGNED = 16  # bytes
_MAX_RUNS = 16  # executions of the block that creates a descriptor, in one program


def misaligned(watched: Watched, ttir: str) -> Iterator[BrokenPromise]:
    """Yield the descriptors that a GPU would reject, with the first program that creates each.

    Only the first and the last program of each axis are examined. `ttir` is the kernel's text before its
    descriptors became pointers.
    """
    module = _parsed(ttir)
    if len(module.entry.args) != len(watched.values):
        return  # some arguments are descriptors created by the host: Triton has checked those
    pointers = pointers_of(watched, module)
    makers = [op for op in module.entry.body.walk() if op.name == MAKES_DESCRIPTOR]
    for position in product(*(sorted({0, axis - 1}) for axis in watched.grid)):
        x, y, z = position
        program = program_of(watched, (x, y, z), module)
        for op in list(makers):
            try:
                frames = islice(program.frames(op.block, op.operands), _MAX_RUNS) if op.block else ()
                detail = next(filter(None, (_detail(op, program, frame) for frame in frames)), "")
            except Unknown:
                continue
            if detail:
                makers.remove(op)
                root = root_of(op.operands[0])
                argument = pointers[root].name if root in pointers else None
                yield BrokenPromise(argument, detail, op.origin or op.location, (x, y, z))


@lru_cache(maxsize=32)
def _parsed(ttir: str) -> Module:
    return parse(ttir)


def _detail(op: Op, program: Program, frame: Frame) -> str:
    """Return what is wrong with a descriptor, or an empty string."""
    base, _, strides = described(op)
    pointer = element_of(base.type)
    assert isinstance(pointer, Pointer)
    size = max(1, element_of(pointer.pointee).bits // 8)
    address = program.number(base, frame)
    if address % _ALIGNED:
        return f"the descriptor begins at {address:#x}, but a GPU requires multiples of {_ALIGNED} bytes"
    for dim, stride in enumerate(strides[:-1]):
        pitch = program.number(stride, frame) * size
        if pitch % _ALIGNED:
            return (
                f"dimension {dim} of the descriptor has a stride of {pitch} bytes, but a GPU requires multiples of "
                f"{_ALIGNED}"
            )
    return ""
