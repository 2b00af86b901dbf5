"""How operations read QTensors: what runs when PyTorch's dispatcher meets one among the arguments.

The dispatcher hands every call with a `QTensor` to the tensor, which asks `run` for the operations that are registered
here, and decodes itself for all others. Ops take a stand-in for the tensor and its `Codes`; products of two matrices
become `matmul`. Eager calls of public functions take QTensors apart before (`quant.straight`): this is for compiled
graphs and for PyTorch's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...quant import PLAIN, Codes, QTensor
from ...quant.qtensor import decoded, stand_in
from ...runtime import Op

# Return the codes that an op reads of a QTensor, or None if it cannot read this one and gets it decoded.
Reader = Callable[[QTensor], Codes | None]

# By operation: a function of its arguments that computes it, or returns NotImplemented to get them decoded.
_registered: dict[Any, Callable[..., Any]] = {}


def run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation that reads codes, or NotImplemented if its QTensors must be decoded."""
    found = _registered.get(operation)
    return NotImplemented if found is None else found(*args, **kwargs)


def register(operation: Any, function: Callable[..., Any]) -> None:
    """Let a function compute an operation of PyTorch if a QTensor is among its arguments."""
    _registered[operation] = function


def register_codes(op: Op[Any, Any], **readers: Reader) -> None:
    """Let an op read the QTensors that it gets as these arguments. It takes the codes of its argument `x` as `x_codes`,
    or as `codes`."""
    names, places = op.arguments.names, []
    for name, read in readers.items():
        codes = f"{name}_codes_data" if f"{name}_codes_data" in names else "codes_data"
        places.append((names.index(name), names.index(codes), read))
    for overload in (op.overload, op.reference_overload):
        register(overload, functools.partial(_with_codes, overload, places))


def _with_codes(overload: Any, places: list[tuple[int, int, Reader]], *args: Any, **kwargs: Any) -> Any:
    """Call an op with QTensors replaced by their stand-ins and codes. One that the op cannot read becomes decoded
    numbers without codes, whatever the caller said of its format."""
    apart = list(args)
    for tensor, first, read in places:
        q = args[tensor]
        if isinstance(q, QTensor):
            codes = read(q)
            apart[tensor] = decoded(q) if codes is None else stand_in(q)
            apart[first : first + len(PLAIN)] = codes or PLAIN
    return overload(*map(decoded, apart), **kwargs)


def rowwise_codes(q: QTensor) -> Codes | None:
    """Return the row-wise copy of a tensor that is no flat view and has no `global_scale`."""
    if q.rowwise is None or q.rowwise.global_scale is not None or q._matrix()[1] != q.shape[-1]:
        return None
    return q.rowwise
