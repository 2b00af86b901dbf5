"""`out=`: results in the caller's memory.

An op with `out=` checks the caller's tensors against the outputs that it would allocate, and that none of them shares
memory with anything else that the call reads or writes; `Op.into` then fills them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...quant import QTensor
from ...quant.copies import with_padding
from ...runtime import Op, current_workspace
from .checks import check_disjoint, check_distinct, check_tensor
from .results import Result, ResultOptions

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


def run_into(
    op: Op[Any, Outputs],
    a: Any,
    targets: Mapping[str, Tensor | None],
    *,
    names: Mapping[str, str] | None = None,
    in_place: tuple[str, ...] = (),
    strided: tuple[str, ...] = (),
    dropped: tuple[str, ...] = (),
) -> Outputs:
    """Run an op with the outputs `targets`, by name, in the caller's memory. Returns the outputs; those without a
    target are new. `dropped` names outputs that nobody reads, whose memory is scratch. See `check_into` for the other
    options."""
    check_into(op, a, targets, names=names, in_place=in_place, strided=strided)
    return op.into(op.outputs.build(*(targets.get(name) for name in op.outputs.names)), a, dropped)


def check_into(
    op: Op[Any, Any],
    a: Any,
    targets: Mapping[str, Tensor | None],
    *,
    names: Mapping[str, str] | None = None,
    in_place: tuple[str, ...] = (),
    strided: tuple[str, ...] = (),
    others: Sequence[tuple[str, Tensor]] = (),
) -> None:
    """Raise an error unless an op can write its outputs to `targets`.

    - `names`: what errors call an output, by default "q of out".
    - `in_place`: arguments whose elements the kernels read before they write the same element: these may be the same
      tensor as an output. No other input may share memory with an output.
    - `strided`: outputs that may have any strides, as long as their last dimension is contiguous.
    - `others`: tensors that the call also reads or writes, with their names.
    """
    tensors = (*op.arguments.tensors(a), *targets.values())
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise ValueError("out= is for inference: call this under torch.no_grad()")
    expected = dict(zip(op.outputs.names, op.outputs.flatten(op.expected(a)), strict=True))
    written = []
    for output, target in targets.items():
        if target is not None:
            name = (names or {}).get(output, f"{output} of out")
            if expected[output] is None:
                raise ValueError(f"{name} is given, but this call has no such result: pass None for it")
            if isinstance(target, QTensor):
                raise ValueError(f"{name} is a {target!r}; this result is plain: pass a tensor")
            check_tensor(name, target, (expected[output].dtype,), a[0].device, expected[output].shape)
            written.append((name, _in_memory(name, target, expected[output], output in strided)))
    read = zip(op.arguments.names, op.arguments.flatten(a), strict=True)
    check_disjoint(written, [*((name, t) for name, t in read if isinstance(t, Tensor)), *others], in_place)
    space = current_workspace()
    if space is not None:
        for name, target in written:
            space.check_apart([name], [target])


def _in_memory(name: str, out: Tensor, expected: Tensor, strided: bool) -> Tensor:
    """Check the strides of an output. Returns it with the padding of its rows, which kernels write too."""
    strides = out.stride()
    if strided:
        check_distinct(name, out)
        if out.shape[-1] > 1 and expected.stride(-1) == 1 and strides[-1] != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous; its strides are {strides}")
        return out
    if expected.is_contiguous():
        if not out.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {strides}")
        return out
    if strides != expected.stride():
        raise ValueError(
            f"{name} must have the strides {expected.stride()}, as a new result has; got {strides}"
        )
    try:
        return with_padding(out)
    except RuntimeError as error:
        raise ValueError(
            f"the last row of {name} has no memory for its padding: each takes {strides[0]} elements"
        ) from error


def result_into(
    op: Op[Any, Outputs],
    a: Any,
    out: Tensor | Sequence[Tensor | None] | None,
    *,
    in_place: tuple[str, ...] = (),
    strided: bool = False,
    dropped: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    **others: Tensor | None,
) -> Outputs:
    """Run an op with its `Result` written to `out`, a tensor or a `QTensor`, and other outputs to the tensors passed by
    name. With several results, `out` may be a tuple of them: y, the plain y of `return_plain`, amax. See `run_into` for
    the options; `strided` concerns a plain y."""
    options: ResultOptions = a.result
    given = ["out", *["plain"] * options.return_plain, *["amax"] * options.return_amax]
    y, *more = results_in(out, *given)
    parts = dict(zip(given[1:], more, strict=True))
    targets: dict[str, Tensor | None] = {"result_amax": parts.get("amax"), **others}
    called = {"result_y": "out", "result_amax": "amax of out", **(names or {})}
    if options.format is None:
        if isinstance(y, QTensor):
            raise ValueError(
                f"out is a {y!r}; the result is plain: pass quantize={y.format.spec!r}, or a tensor"
            )
        targets["result_y"] = y
    else:
        targets["result_y"] = parts.get("plain")
        if not options.return_plain:
            dropped = (*dropped, "result_y")
        if y is not None:
            expected: Any = op.expected(a)
            for name, part in _copies_of(y, options, expected.result, a[0].device).items():
                targets[f"result_{name}"], called[f"result_{name}"] = part, f"the {name} of out"
    any_strides = ("result_y",) * strided + ("result_scale", "result_scale_t")
    return run_into(op, a, targets, names=called, in_place=in_place, strided=any_strides, dropped=dropped)


def results_in(out: Tensor | Sequence[Tensor | None] | None, *names: str) -> Sequence[Tensor | None]:
    """Return the members of `out`, one for each of a call's results: a tensor alone is the first one."""
    if out is None or isinstance(out, Tensor):
        return [out, *[None] * (len(names) - 1)]
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out must be a tensor or a tuple of {', '.join(names)}; got {type(out).__name__}")
    if len(out) != len(names):
        raise ValueError(f"out must be a tuple of {len(names)} results, {', '.join(names)}; got {len(out)}")
    return out


def _copies_of(
    out: Tensor, options: ResultOptions, expected: Result, device: torch.device
) -> dict[str, Tensor | None]:
    """Return the parts of the caller's QTensor by name, checked to be of the kind that the op allocates."""
    if not isinstance(out, QTensor):
        raise ValueError(
            f"out of a quantized result must be a QTensor in {options.format}; got {type(out).__name__}"
        )
    shape, dtype = expected.y.shape, expected.y.dtype
    has_copies = (out.rowwise is not None, out.columnwise is not None) == (
        options.rowwise,
        options.columnwise,
    )
    same = (out.format.spec, out.shape, out.device, out.dtype) == (options.format, shape, device, dtype)
    if not (has_copies and same):
        raise ValueError(
            f"out is a {out!r}; the result is {options.format} of shape {tuple(shape)} and dtype {dtype} on "
            f"{device}, with "
            f"{' and '.join(['rowwise'] * options.rowwise + ['columnwise'] * options.columnwise)}"
        )
    rotated = expected.global_scale_t is not None
    last = [None if copy is None else copy.global_scale for copy in (out.rowwise, out.columnwise)]
    if options.rowwise and options.columnwise and not rotated and last[0] is not last[1]:
        raise ValueError(
            "both copies of out must have the same global_scale: allocate it with torch.empty_like"
        )
    result = Result.of(expected.y, (out.rowwise, out.columnwise), None, rotated)
    return {name: part for name, part in result._asdict().items() if name not in ("y", "amax")}
