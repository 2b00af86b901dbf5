"""Kernels of scalar functions, written as text for the types and the layout of their operands.

The dimensions of all operands are merged where possible. If one is left, a program computes TILE elements in a row;
otherwise a tile of ROWS x COLS, where a row is the last dimension, and its number is taken apart into the positions
along the others.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...language import tl, triton
from ...runtime.launch import Kernel
from ...tiles.scores import sigmoid
from .lowering import NUMBER, Scalar, Typed


class Operand(NamedTuple):
    """How a kernel addresses a tensor."""

    name: str
    step: str  # along the last dimension: "0", "1", or "any"
    varies: bool  # along the other dimensions


class Form(NamedTuple):
    """What the text of a kernel depends on, besides its scalar function."""

    kinds: tuple[Typed, ...]  # of the parameters that the function uses
    inputs: tuple[Operand, ...]  # those that are tensors
    outputs: tuple[Operand, ...]
    outer: int  # dimensions before the last


@functools.cache
def kernel_for(name: str, scalar: Scalar, form: Form) -> Kernel:
    """Return the kernel of a scalar function for operands of a form. Its name ends in a digest of its text."""
    text = kernel_text("KERNEL", scalar, form)
    key = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if key not in _kernels:
        file = folder() / f"{key}.py"
        _write(file, text.replace("KERNEL", key, 1))
        _kernels[key] = _loaded(key, file)
    return _kernels[key]


_kernels: dict[str, Kernel] = {}  # by name


def folder() -> Path:
    """Return where the texts of kernels are: beside Triton's cache, for people, debuggers and compilers in other
    processes."""
    return Path(triton.knobs.cache.dir) / "weft_pointwise"


def _write(file: Path, text: str) -> None:
    """Write a file for good: processes that write it at the same time write the same."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)


def _loaded(key: str, file: Path) -> Kernel:
    from triton.language.extra import libdevice

    names: dict[str, Any] = {
        "__name__": __name__, "tl": tl, "triton": triton, "libdevice": libdevice, "sigmoid": sigmoid
    }  # fmt: skip
    exec(compile(file.read_text(), str(file), "exec"), names)
    return Kernel(triton.jit(names[key]))


def __getattr__(key: str) -> Kernel:
    """Return a kernel by its name, for those that compile it in another process."""
    if key not in _kernels:
        if key.startswith("__") or not (file := folder() / f"{key}.py").exists():
            raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
        _kernels[key] = _loaded(key, file)
    return _kernels[key]


def kernel_text(name: str, scalar: Scalar, form: Form) -> str:
    """Return the source of a kernel."""
    kinds = dict(zip(scalar.parameters, form.kinds, strict=True))
    numbers = [name for name, kind in kinds.items() if kind.rank == NUMBER]
    floats = [name for name in numbers if kinds[name].dtype.is_floating_point]
    operands = (*form.inputs, *form.outputs)
    parameters = [f"{each.name}_ptr" for each in operands]
    parameters += [name for name in numbers if name not in floats]
    body: list[str] = []
    if not form.outer:
        parameters += ["count"]
        constants = ["TILE", "ALIGN"]
        body += [
            "count = (count // ALIGN) * ALIGN",
            "off = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]",
            "mask = off < count",
        ]
    else:
        parameters += ["rows", "cols", *(f"size{i}" for i in range(1, form.outer))]
        parameters += [
            *(f"{each.name}_stride{i}" for each in operands if each.varies for i in range(form.outer)),
        ]
        constants = ["ROWS", "COLS", "ALIGN"]
        body += [
            "cols = (cols // ALIGN) * ALIGN",
            "tiles = tl.cdiv(cols, COLS)",
            "row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]",
            "col = ((tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]",
            "exists = (row < rows)[:, None]",
            "inside = col < cols",
            "mask = exists & inside",
        ]
        for i in reversed(range(1, form.outer)):
            body += [f"at{i} = row % size{i}", f"row = row // size{i}"]
        body += ["at0 = row"]
    parameters += [f"{each.name}_step" for each in operands if each.step == "any"]
    parameters += [f"{name}: float" for name in floats]
    for each in form.inputs:
        pointer, mask = _address(each, form.outer)
        dtype = kinds[each.name].dtype
        is_float = dtype.is_floating_point
        other = "0.0" if is_float else "0" if dtype is torch.bool else "1"  # which may be a divisor
        load = f"tl.load({pointer}, mask={mask}, other={other})" if mask else f"tl.load({pointer})"
        body += [f"{each.name} = {load}{'.to(tl.float32)' if is_float else ''}"]
    body += [f"{name} = {name} != 0" for name in numbers if kinds[name].dtype is torch.bool]
    lines, results = scalar.lines(form.kinds)
    body += lines
    for each, result in zip(form.outputs, results, strict=True):
        pointer, mask = _address(each, form.outer)
        body += [f"tl.store({pointer}, tl.cast({result}, {each.name}_ptr.dtype.element_ty), mask={mask})"]
    signature = ", ".join([*parameters, *(f"{each}: tl.constexpr" for each in constants)])
    return f"def {name}({signature}):\n" + "".join(f"    {line}\n" for line in body)


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
    if operand.step != "0":
        pointer += " + col" if operand.step == "1" else f" + col.to(tl.int64) * {name}_step"
    mask = {(True, True): "mask", (True, False): "exists", (False, True): "inside", (False, False): ""}
    return pointer, mask[operand.varies, operand.step != "0"]
