"""Recompute the values of one program of a launch from the launch's arguments."""

from __future__ import annotations

import torch

from ..ir.provenance import root_of
from ..ir.ttir import Module, Op, Pointer, Scalar, Value, element_of
from .evaluate import Program, Tile, Unknown, wrapped
from .watched import PointerArgument, Watched


def signed(address: int) -> int:
    """Return an address as TTIR sees it: a signed 64-bit integer."""
    return address - (1 << 64) if address >= 1 << 63 else address


def pointers_of(watched: Watched, module: Module) -> dict[Value, PointerArgument]:
    """Return the launch's argument for each pointer of the kernel."""
    values = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
    return dict(
        zip(values, watched.arguments, strict=False)
    )  # arguments reached through memory come after them


def program_of(watched: Watched, position: tuple[int, int, int], module: Module) -> Program:
    """Return a program of a launch, with the arguments and memory of that launch."""
    pointers = pointers_of(watched, module)
    arguments: dict[Value, int] = {arg: signed(pointer.address) for arg, pointer in pointers.items()}
    for arg, value in zip(module.entry.args, watched.values, strict=True):
        if isinstance(arg.type, Scalar) and not arg.type.is_float and isinstance(value, int):
            arguments[arg] = int(wrapped(torch.tensor(signed(value)), arg.type))

    def load(op: Op, address: Tile, mask: Tile | None, other: Tile | None) -> Tile:
        root = root_of(op.operands[0])
        argument = pointers.get(root) if root is not None else None
        active = (
            torch.ones_like(address, dtype=torch.bool) if mask is None else (mask != 0).expand(address.shape)
        )
        other_tile = torch.zeros_like(address) if other is None else other
        if watched.dry:
            return torch.where(active, 0, other_tile)
        if argument is None:
            raise Unknown("a load through an address found in memory")
        element = element_of(op.result.type)
        return wrapped(torch.where(active, _loaded(watched, argument, address, active), other_tile), element)

    return Program(arguments=arguments, position=position, grid=watched.grid, load=load)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _loaded(watched: Watched, argument: PointerArgument, address: Tile, active: Tile) -> Tile:
    """Return the elements that a load read: current memory, provided that the launch has not stored to it."""
    memory = argument.memory
    if not argument.has_tensor or memory.dims or argument.tensor.dtype.is_floating_point:
        raise Unknown("a load")
    stored = (a.memory for a in watched.arguments if a.stored)
    if any(other.low < memory.high and memory.low < other.high for other in stored):
        raise Unknown("a load of what was stored")
    size = argument.tensor.element_size()
    offset = address - argument.address
    outside = (offset < 0) | (offset >= memory.high - memory.low) | (offset % size != 0)
    if bool((outside & active).any()):
        raise Unknown("a load out of bounds")
    elements = argument.tensor.as_strided(((memory.high - memory.low) // size,), (1,)).view(_INTEGERS[size])
    return (
        elements[torch.where(active, offset // size, 0)].long()
        if len(elements)
        else torch.zeros_like(address)
    )
