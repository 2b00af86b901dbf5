"""Dispatch of operations that have a QTensor among their arguments.

PyTorch's dispatcher hands such a call to the `QTensor`, which asks `run` for the operations registered here and decodes
itself for all others. Ops take a stand-in for the tensor and its `Codes`; products of two matrices become `matmul`.
Eager calls of public functions unpack QTensors earlier (`quant.straight`): this module serves compiled graphs and
PyTorch's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...quant import PLAIN, Codes, QTensor
from ...quant.qtensor import decoded, stand_in
from ...runtime import Op

# Returns the codes that an op reads of a QTensor, or None if the op cannot read it and needs it decoded.
Reader = Callable[[QTensor], Codes | None]

# For each operation a function that computes it, or returns NotImplemented to have its arguments decoded.
_registered: dict[Any, Callable[..., Any]] = {}


def run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation that reads codes, or NotImplemented if its QTensors must be decoded."""
    function = _registered.get(operation)
    return NotImplemented if function is None else function(*args, **kwargs)


def register(operation: Any, function: Callable[..., Any]) -> None:
    """Make `function` compute an operation whenever a QTensor is among its arguments."""
    _registered[operation] = function


def register_codes(op: Op[Any, Any], **readers: Reader) -> None:
    """Make an op read QTensors that are passed as these arguments. The codes of its argument `x` go to `x_codes`, or to
    `codes`."""
    names, slots = op.arguments.names, []
    for name, read in readers.items():
        codes = f"{name}_codes_data" if f"{name}_codes_data" in names else "codes_data"
        slots.append((names.index(name), names.index(codes), read))
    for overload in (op.overload, op.reference_overload):
        register(overload, functools.partial(_with_codes, overload, slots))


def _with_codes(overload: Any, slots: list[tuple[int, int, Reader]], *args: Any, **kwargs: Any) -> Any:
    """Call an op with QTensors replaced by their stand-ins and codes. A QTensor that the op cannot read is decoded and
    passed without codes, whatever format the caller named."""
    arguments = list(args)
    for tensor, first, read in slots:
        q = args[tensor]
        if isinstance(q, QTensor):
            codes = read(q)
            arguments[tensor] = decoded(q) if codes is None else stand_in(q)
            arguments[first : first + len(PLAIN)] = codes or PLAIN
    return overload(*map(decoded, arguments), **kwargs)


def rowwise_codes(q: QTensor) -> Codes | None:
    """Return the row-wise copy of a QTensor, or None if it has a `global_scale` or the QTensor is a flat view."""
    if q.rowwise is None or q.rowwise.global_scale is not None or q._matrix()[1] != q.shape[-1]:
        return None
    return q.rowwise
