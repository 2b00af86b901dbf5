"""Kernels of functions, written as text for the types and the layout of their operands.

Of a function of elements, the dimensions of all operands are merged where possible. If one is left, a program computes
TILE elements in a row; otherwise a tile of ROWS x COLS, where a row is the last dimension, and its number is taken
apart into the positions along the others. Functions of rows have kernels of their own (`rows.py`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from ...language import tl, triton
from ...runtime.launch import Kernel
from ...tiles.exponentials import expm1, log1p
from ...tiles.scores import sigmoid
from ..common.destination import Destination, store_quantized
from .lowering import Scalar
from .rows import kernel_text_of_rows
from .text import Form, bools, definition, loaded, positions, signature, stored


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
    return Path(triton.knobs.cache.dir) / "weft_generated"


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
        "__name__": __name__, "tl": tl, "triton": triton, "libdevice": libdevice, "sigmoid": sigmoid,
        "expm1": expm1, "log1p": log1p,
        "Destination": Destination, "store_quantized": store_quantized,
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
    if scalar.dims:
        return kernel_text_of_rows(name, scalar, form)
    parameters, floats = signature(scalar, form)
    constants = form.constants if form.outer else ("TILE", "ALIGN")
    place = "tl.program_id(0) // tiles, tl.program_id(0) % tiles, tiles"
    if form.outer:
        body = [
            "cols = (cols // ALIGN) * ALIGN",
            "tiles = tl.cdiv(cols, COLS)",
            "row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]",
            "col = ((tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]",
            "exists = (row < rows)[:, None]",
            "inside = col < cols",
            "mask = exists & inside",
            *positions(form.outer),
        ]
    else:
        body = [
            "count = (count // ALIGN) * ALIGN",
            "off = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]",
            "mask = off < count",
        ]
    kinds = dict(zip(scalar.parameters, form.kinds, strict=True))
    body += [loaded(each, kinds[each.name].dtype, form.outer) for each in form.inputs]
    body += bools(kinds)
    expressions, results = scalar.expressions(form.kinds)
    body += [f"v{index} = {text}" for index, text in expressions.items()]
    stores = zip(form.outputs, results, strict=True)
    body += [stored(each, result, form.outer, place) for each, result in stores]
    return definition(name, [*parameters, *floats], constants, body)
