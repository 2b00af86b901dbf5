"""Parts of a kernel's text: its signature, and the lines that load and store a tile.

Names that come from a function's parameters have an ending, so that they are not those of a kernel's own variables:
`x_ptr`, `x_stride0` and `x_value` for a parameter x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .lowering import NUMBER, Scalar, Typed


class Operand(NamedTuple):
    """How a kernel addresses a tensor."""

    name: str
    # Along the last dimension: "0", "1" or "any"; "split" if the dimensions of a row are not one, and "part" if a tile
    # lies within one stretch of the last of them, along which the operand does not vary. "codes" if it is a result that
    # is stored quantized: a `Destination`.
    step: str
    varies: bool  # along the other dimensions
    along: tuple[int, ...] = ()  # the dimensions of a row along which it varies, if they are not one


class Form(NamedTuple):
    """What the text of a kernel depends on, besides its scalar function."""

    kinds: tuple[Typed, ...]  # of the parameters that the function uses
    inputs: tuple[Operand, ...]  # those that are tensors
    outputs: tuple[Operand, ...]
    outer: int  # dimensions before the last
    loops: bool = False  # over the tiles of a row, which is longer than a tile

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants of a kernel whose tiles have rows and columns."""
        stored = ("FORMAT", "CAST") if any(each.step == "codes" for each in self.outputs) else ()
        return *stored, "ROWS", "COLS", "ALIGN"

    def inner_sizes(self, dims: int) -> range:
        """Return the dimensions of a row whose sizes a kernel takes: what it takes the number of an element, or of a
        tile, apart by."""
        first = min((each.along[0] for each in (*self.inputs, *self.outputs) if each.along), default=dims)
        return range(1 if self.loops and first < dims else max(first, 1), dims)


def definition(name: str, parameters: Iterable[str], constants: Iterable[str], body: Iterable[str]) -> str:
    signature = ", ".join([*parameters, *(f"{each}: tl.constexpr" for each in constants)])
    return f"def {name}({signature}):\n" + "".join(f"    {line}\n" for line in body)


def signature(scalar: Scalar, form: Form) -> tuple[list[str], list[str]]:
    """Return the parameters of a kernel: pointers, integers, sizes and strides; and the floats, which come last."""
    numbers = {n: kind for n, kind in zip(scalar.parameters, form.kinds, strict=True) if kind.rank == NUMBER}
    floats = [f"{n}_value: float" for n, kind in numbers.items() if kind.dtype.is_floating_point]
    operands = (*form.inputs, *form.outputs)
    parameters = [f"{each.name}_ptr" for each in form.inputs]
    parameters += [f"{name}_ptr" for name in scalar.tables]
    parameters += [
        f"{each.name}: Destination" if each.step == "codes" else f"{each.name}_ptr" for each in form.outputs
    ]
    for name, indices in scalar.tables.items():
        parameters += [f"{name}_{what}{i}" for what in ("size", "stride") for i in range(indices)]
    parameters += [f"{n}_value" for n, kind in numbers.items() if not kind.dtype.is_floating_point]
    parameters += ["rows", "cols", *(f"size{i}" for i in range(1, form.outer))] if form.outer else ["count"]
    parameters += [f"{o.name}_stride{i}" for o in operands if o.varies for i in range(form.outer)]
    parameters += [f"inner{i}" for i in form.inner_sizes(scalar.dims)]
    parameters += [f"{each.name}_step{i}" for each in operands for i in each.along]
    return [*parameters, *(f"{o.name}_step" for o in operands if o.step == "any")], floats


def positions(outer: int) -> list[str]:
    """Take the number of a row apart into its positions `at0`, `at1`, ... along the outer dimensions."""
    lines = []
    for i in reversed(range(1, outer)):
        lines += [f"at{i} = row % size{i}", f"row = row // size{i}"]
    return [*lines, "at0 = row"]


def bools(kinds: Mapping[str, Typed]) -> list[str]:
    """Return the lines that make bools of numbers."""
    return [f"{n}_value = {n}_value != 0" for n, kind in kinds.items() if kind == Typed(torch.bool, NUMBER)]


def loaded(operand: Operand, dtype: torch.dtype, outer: int) -> str:
    """Return the line that loads an operand's elements of a tile."""
    pointer, mask = _address(operand, outer)
    is_float = dtype.is_floating_point
    other = "0.0" if is_float else "0" if dtype is torch.bool else "1"  # which may be a divisor
    load = f"tl.load({pointer}, mask={mask}, other={other})" if mask else f"tl.load({pointer})"
    return f"{operand.name}_value = {load}{'.to(tl.float32)' if is_float else ''}"


def stored(operand: Operand, result: str, outer: int, place: str = "") -> str:
    """Return the line that stores a tile of a result. For one that is quantized, `place` is the number of the block of
    rows, that of the tile in it, and how many tiles it has."""
    if operand.step == "codes":
        return f"store_quantized({result}, mask, {operand.name}, {place}, rows, cols, FORMAT, CAST, ALIGN)"
    pointer, mask = _address(operand, outer)
    return f"tl.store({pointer}, tl.cast({result}, {operand.name}_ptr.dtype.element_ty), mask={mask})"


def _address(operand: Operand, outer: int) -> tuple[str, str]:
    """Return (pointers, mask) of an operand's elements in a tile."""
    name = operand.name
    if not outer:
        step = {"0": "", "1": " + off", "any": f" + off * {name}_step"}[operand.step]
        return f"{name}_ptr{step}", "mask" if step else ""
    pointer = f"{name}_ptr"
    if operand.varies:
        offset = " + ".join(f"at{i} * {name}_stride{i}" for i in range(outer))
        offset = f"tl.multiple_of({offset}, ALIGN)" if operand.step == "1" else offset
        pointer += f" + ({offset})[:, None]"
    if operand.step in ("split", "part"):
        pointer += f" + {name}_off"
    elif operand.step != "0":
        pointer += " + col" if operand.step == "1" else f" + col.to(tl.int64) * {name}_step"
    mask = {(True, True): "mask", (True, False): "exists", (False, True): "inside", (False, False): ""}
    return pointer, mask[operand.varies, operand.step not in ("0", "part")]
