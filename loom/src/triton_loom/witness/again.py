"""A program of a launch, worked out again from the launch's arguments."""

from __future__ import annotations

import torch

from ..ir.provenance import root_of
from ..ir.ttir import Module, Op, Pointer, Scalar, Value, element_of
from .evaluate import Program, Tile, Unknown, wrapped
from .watched import PointerArgument, Watched


def signed(address: int) -> int:
    """Return an address as TTIR has it: an integer of 64 bits with a sign."""
    return address - (1 << 64) if address >= 1 << 63 else address


def pointers_of(watched: Watched, module: Module) -> dict[Value, PointerArgument]:
    """Return what a launch gave for the kernel's pointers."""
    values = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
    return dict(zip(values, watched.arguments, strict=False))  # those found in memory come after them


def program_of(watched: Watched, position: tuple[int, int, int], module: Module) -> Program:
    """Return a program of a launch, with what it found in its arguments and in memory."""
    pointers = pointers_of(watched, module)
    arguments: dict[Value, int] = {arg: signed(given.address) for arg, given in pointers.items()}
    for arg, value in zip(module.entry.args, watched.values, strict=True):
        if isinstance(arg.type, Scalar) and not arg.type.is_float and isinstance(value, int):
            arguments[arg] = int(wrapped(torch.tensor(signed(value)), arg.type))

    def load(op: Op, address: Tile, mask: Tile | None, other: Tile | None) -> Tile:
        root = root_of(op.operands[0])
        argument = pointers.get(root) if root is not None else None
        on = torch.ones_like(address, dtype=torch.bool) if mask is None else (mask != 0).expand(address.shape)
        rest = torch.zeros_like(address) if other is None else other
        if watched.dry:
            return torch.where(on, 0, rest)
        if argument is None:
            raise Unknown("a load through an address found in memory")
        element = element_of(op.result.type)
        return wrapped(torch.where(on, _loaded(watched, argument, address, on), rest), element)

    return Program(arguments=arguments, position=position, grid=watched.grid, load=load)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _loaded(watched: Watched, argument: PointerArgument, address: Tile, on: Tile) -> Tile:
    """What a load found in memory: what is there now, unless the launch has stored to it."""
    memory = argument.memory
    if not argument.known or memory.dims or argument.tensor.dtype.is_floating_point:
        raise Unknown("a load")
    stored = (a.memory for a in watched.arguments if a.stored)
    if any(other.low < memory.high and memory.low < other.high for other in stored):
        raise Unknown("a load of what was stored")
    size = argument.tensor.element_size()
    place = address - argument.address
    outside = (place < 0) | (place >= memory.high - memory.low) | (place % size != 0)
    if bool((outside & on).any()):
        raise Unknown("a load out of bounds")
    numbers = argument.tensor.as_strided(((memory.high - memory.low) // size,), (1,)).view(_INTEGERS[size])
    return numbers[torch.where(on, place // size, 0)].long() if len(numbers) else torch.zeros_like(address)
