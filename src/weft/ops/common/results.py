"""A result that may be quantised: the arguments it takes, room for it, its definition, the passes that make it, and
what the caller gets.

An op whose result may be quantised has a `ResultOptions` among its arguments and a `Result` among its outputs. Its
launch describes two passes, over rows and over stripes of 128 rows, and `make_copies` runs them in the order that the
format takes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import Copies, allocate_parts
from ...quant.formats import transposed_spec
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, quantize_copies
from ...quant.straight import wrap
from ...runtime import Op, Present
from .checks import FLOATS, check_apart, check_out_dtype, check_tensor, checked_once
from .groups import NO_GROUPS, Groups, empty_slots, slots_reference
from .rows import empty_like

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


# ---- arguments and outputs ------------------------------------------------------------------------------


class ResultOptions(NamedTuple):
    """How a result is stored."""

    dtype: torch.dtype  # of a plain result, or the dtype that a quantised one states
    format: str | None  # of a quantised result; None for a plain one
    rowwise: bool
    columnwise: bool
    scale: Tensor | None  # the caller's scale, for a format with one scale for the tensor
    return_amax: bool
    return_plain: bool = False  # give the plain result as well as the quantised one

    def present(self) -> Present:
        """Which parts of the result are not None."""
        if self.format is None:
            return _ONLY_Y
        f = Format.of(self.format)
        row, col = self.rowwise, self.columnwise
        by_tensor, apart = f.stored.block == "nvfp4", f.hadamard is not None
        last, last_t = by_tensor and (row or not apart), apart and col
        return True, row, row, col, col, last, self.return_amax, last_t

    def blocks(self) -> tuple[dict[str, str], int]:
        """(whole, block) for `Sharding`: why rows of the result cannot be sharded, if they cannot, and the rows of a
        block."""
        if self.format is None:
            return {}, 1
        f = Format.of(self.format)
        if f.needs_tensor_amax and self.scale is None:
            given = "Give the scale (a delayed or static one), q" if f.block == "tensor" else "Q"
            why = f"{self.format} has a scale that depends on the largest number of all ranks. {given}"
        elif self.columnwise and not f.group and f.block != "tensor":
            why = f"a column-wise copy of {self.format} has one scale for a column of all ranks. Q"
        else:
            return {}, max(f.block_rows if self.rowwise else 1, f.group if self.columnwise else 1, 1)
        return {"...": f"{why}uantise each rank's shard by itself with x.to_local()"}, 1


def plain_result(dtype: torch.dtype) -> ResultOptions:
    """The options of a result that is not quantised."""
    return ResultOptions(dtype, None, True, False, None, False)


class Result(NamedTuple):
    """A result: y, or its copies with a stand-in for y that autograd holds on to. With `return_plain`, y itself is
    there in place of the stand-in, and its gradient is the sum of both results'."""

    y: Tensor
    data: Tensor | None = None  # codes and scales of the row-wise copy
    scale: Tensor | None = None
    data_t: Tensor | None = None  # and of the column-wise one
    scale_t: Tensor | None = None
    global_scale: Tensor | None = None  # nvfp4's, one for the tensor
    amax: Tensor | None = None
    global_scale_t: Tensor | None = None  # that of the column-wise copy, if one of the copies is rotated

    @staticmethod
    def of(y: Tensor, copies: Copies, amax: Tensor | None, apart: bool = False) -> Result:
        """A result with these copies; `apart`: each has its own `global_scale`."""
        data, scale, last, _ = copies[0] or PLAIN
        data_t, scale_t, last_t, _ = copies[1] or PLAIN
        if not apart:
            last, last_t = (last_t if copies[0] is None else last), None
        return Result(y, data, scale, data_t, scale_t, last, amax, last_t)

    def copies(self, spec: str | None) -> Copies:
        """The row-wise and the column-wise copy of a result in the format `spec`; None for what it has not."""
        row = col = None
        if self.data is not None:
            row = Codes(self.data, self.scale, self.global_scale, spec)  # type: ignore[arg-type]
        if self.data_t is not None:
            last = self.global_scale if self.global_scale_t is None else self.global_scale_t
            col = Codes(self.data_t, self.scale_t, last, transposed_spec(spec))  # type: ignore[arg-type]
        return row, col

    def value(self, options: ResultOptions) -> Tensor:
        """What the caller gets: a tensor, or a `QTensor`."""
        return self.y if options.format is None else self.quantized(options.format)

    def quantized(self, spec: str) -> QTensor:
        """The result in this format."""
        return wrap(self.y, spec, *self.copies(spec))


_ONLY_Y = (True, *[False] * 7)


_WITH_QUANTIZE = "columnwise, quant_scale, return_amax and return_plain go with quantize=…"


def result_options(
    x: Tensor,
    quantize: Format | str | None,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    return_plain: bool = False,
    out_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> ResultOptions:
    """The options of the result of an op on x, checked. Whatever does not depend on tensors is checked only once.
    `dtype` is that of the result where the caller gives none; x's by default."""
    options = _options(quantize, rowwise, columnwise, return_amax, return_plain, out_dtype, dtype or x.dtype)
    if quant_scale is None:
        return options
    if options.format is None:
        raise ValueError(_WITH_QUANTIZE)
    check_tensor("quant_scale", quant_scale, FLOATS, x.device)
    block = Format.of(options.format).block
    if block != "tensor" or quant_scale.numel() != 1:
        raise ValueError(
            f"quant_scale is one given scale, for block 'tensor'; got {quant_scale.numel()} for {block!r}"
        )
    return options._replace(scale=quant_scale)


@checked_once
def _options(
    quantize: Format | str | None, rowwise: bool, columnwise: bool, return_amax: bool, return_plain: bool,
    out_dtype: torch.dtype | None, dtype: torch.dtype,
) -> ResultOptions:  # fmt: skip
    if quantize is None:
        if return_amax or return_plain or columnwise:
            raise ValueError(_WITH_QUANTIZE)
        check_out_dtype(out_dtype)
        return plain_result(out_dtype or dtype)
    format = Format.of(quantize)
    check_copies(rowwise, columnwise)
    if columnwise and format.block == "row":
        raise ValueError(
            "block 'row' has one scale to a whole column in its column-wise copy, which one pass cannot make: "
            "quantise the result with weft.quantize, or take 1x128"
        )
    check_made_here(format)
    if out_dtype is not None and not return_plain:
        raise ValueError("out_dtype is for a plain result; a quantised one has the dtype of x")
    check_out_dtype(out_dtype)
    return ResultOptions(
        out_dtype or dtype,
        format.spec,
        bool(rowwise),
        bool(columnwise),
        None,
        bool(return_amax),
        bool(return_plain),
    )


def check_copies(rowwise: bool, columnwise: bool) -> None:
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False needs columnwise=True: a QTensor has at least one copy")


def check_made_here(format: Format) -> None:
    """Complain about a format that `weft.quantize` alone makes."""
    if format.block == "nvfp4_16x16":
        raise ValueError(
            "block 'nvfp4_16x16' is for weights, and weft.quantize alone makes it: take 'nvfp4' for a result"
        )
    if format.hadamard is not None:
        raise ValueError(
            f"weft.quantize alone rotates a copy: quantise the plain result with it, or take 'nvfp4'; got {format}"
        )


# ---- room and definition --------------------------------------------------------------------------------


def allocate_result(
    options: ResultOptions, like: Tensor, shape: tuple[int, ...] | None = None, groups: Groups = NO_GROUPS
) -> Result:
    """Room for a result of this shape, by default that of `like`, on its device."""
    if options.format is None:
        if shape is None:
            return Result(empty_like(like, options.dtype))
        return Result(torch.empty(*shape, dtype=options.dtype, device=like.device))
    shape = like.shape if shape is None else shape
    rows, cols, device = math.prod(shape[:-1]), shape[-1], like.device
    data, scale, data_t, scale_t, global_scale, global_scale_t = allocate_parts(
        options.format, rows, cols, device, rowwise=options.rowwise, columnwise=options.columnwise
    )
    if data_t is not None and groups.ends is not None:
        f = Format.of(options.format)
        if groups.have_slots(f, True):
            scale_t = empty_slots(f, rows, cols, groups.ends)
    amax = torch.empty((), dtype=torch.float32, device=device) if options.return_amax else None
    if options.return_plain:
        y = torch.empty(*shape, dtype=options.dtype, device=device)
    else:
        y = stand_in(like, shape, options.dtype)
    return Result(y, data, scale, data_t, scale_t, global_scale, amax, global_scale_t)


def result_reference(
    options: ResultOptions,
    y: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    groups: Groups = NO_GROUPS,
    input_dtype: torch.dtype = torch.float32,
) -> Result:
    """The definition of a result of this shape, from y [M, K] that has not been rounded yet; x is the input of the op.
    With groups, no block of a column-wise copy has rows of two. `input_dtype` is that of the numbers that are
    quantised; a convention may look at its largest number."""
    if options.format is None:
        return Result(y.to(options.dtype).view(shape))
    f = Format.of(options.format)
    amax = amax_reference(y) if f.needs_tensor_amax or options.return_amax else None
    known: dict[str, Any] = {"tensor_amax": amax, "scale": options.scale, "input_dtype": input_dtype}
    row, col = quantize_copies(y.float(), f, rowwise=options.rowwise, columnwise=options.columnwise, **known)
    if col is not None and groups.have_slots(f, True):
        col = slots_reference(y.float(), f, groups, col, **known)
    plain = y.to(options.dtype).view(shape) if options.return_plain else stand_in(x, shape, options.dtype)
    return Result.of(plain, (row, col), amax if options.return_amax else None)


# ---- results in the caller's memory ---------------------------------------------------------------------


def result_into(
    op: Op[Any, Outputs],
    a: Any,
    out: Tensor | None,
    *,
    in_place: tuple[str, ...] = (),
    **others: Tensor | None,
) -> Outputs:
    """Run an op with its result written to `out`, a tensor or a `QTensor`, and other outputs to the tensors given by
    name. Returns the outputs. `in_place` names the arguments that the kernels read element by element before they write
    that element: such a one may be the same tensor as an output. No other memory that is read may be written."""
    options, room = a.result, cast(Any, op.allocate(a))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in op.arguments.tensors(a)):
        raise ValueError("out= and residual_out= are for inference: call them under torch.no_grad()")
    result = Result(None)  # type: ignore[arg-type]
    if out is not None and options.format is None:
        if isinstance(out, QTensor):
            raise ValueError(
                f"out is a {out!r}; the result is plain: pass quantize={out.format.spec!r}, or a tensor"
            )
        _check_room("out", out, room.result.y)
        result = Result(out)
    elif out is not None:
        result = _parts_of(out, options, room.result)
    for name, tensor in others.items():
        if tensor is not None:
            _check_room(f"{name}_out", tensor, getattr(room, name))
    written = [("out", t) for t in result if t is not None]
    written += [(f"{name}_out", t) for name, t in others.items() if t is not None]
    read = zip(op.arguments.names, op.arguments.flatten(a), strict=True)
    check_apart(written, [(name, t) for name, t in read if isinstance(t, Tensor)], in_place)
    nothing: Any = op.outputs.build(*[None] * len(op.outputs.names))
    return op.into(nothing._replace(result=result, **others), a)


def _check_room(name: str, out: Tensor, room: Tensor) -> None:
    check_tensor(name, out, (room.dtype,), room.device, room.shape)
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {out.stride()}")


def _parts_of(out: Tensor, options: ResultOptions, room: Result) -> Result:
    """The copies of the caller's QTensor, checked to be of the kind that the op would make."""
    if not isinstance(out, QTensor):
        raise ValueError(
            f"out of a quantised result must be a QTensor, {options.format}; got {type(out).__name__}"
        )
    copies = (out.rowwise if options.rowwise else None, out.columnwise if options.columnwise else None)
    there = (copies[0] is not None) == options.rowwise and (copies[1] is not None) == options.columnwise
    same = out.format.spec == options.format and out.shape == room.y.shape and out.device == room.y.device
    if not (there and same):
        raise ValueError(
            f"out is a {out!r}; the result is {options.format} of shape {tuple(room.y.shape)} on {room.y.device}, with "
            f"{' and '.join(['rowwise'] * options.rowwise + ['columnwise'] * options.columnwise)}"
        )
    found = Result.of(room.y, copies, None)
    for name, given, wanted in zip(Result._fields, found, room, strict=True):
        if given is not None and wanted is not None and given.shape != wanted.shape:
            raise ValueError(
                f"the {name} of out has the shape {tuple(given.shape)}; that of the result is {tuple(wanted.shape)}"
            )
    return found
