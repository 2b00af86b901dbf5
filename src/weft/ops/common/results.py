"""Results that may be quantized: their options, allocation, reference and conversion to what the caller gets.

An op whose result may be quantized has a `ResultOptions` among its arguments and a `Result` among its outputs. Its
launch defines two passes, over rows and over stripes of 128 rows, and `make_copies` runs them in the order that the
format needs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import Copies, allocate_parts
from ...quant.formats import transposed_spec
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, quantize_copies
from ...quant.straight import wrap
from ...runtime import Present
from .checks import FLOATS, check_out_dtype, check_tensor, checked_once
from .groups import NO_GROUPS, Groups, empty_slots, slots_reference
from .rows import empty_like

# ---- arguments and outputs ------------------------------------------------------------------------------


class ResultOptions(NamedTuple):
    """Storage options of a result."""

    dtype: torch.dtype  # of a plain result, or the nominal dtype of a quantized one
    format: str | None  # of a quantized result; None for a plain one
    rowwise: bool
    columnwise: bool
    scale: Tensor | None  # the caller's scale, for a format with one scale per tensor
    return_amax: bool
    return_plain: bool = False  # return the plain result besides the quantized one

    def present(self) -> Present:
        """Return which fields of the `Result` are not None."""
        if self.format is None:
            return _ONLY_Y
        f = Format.of(self.format)
        row, col = self.rowwise, self.columnwise
        by_tensor, rotated = f.stored.block == "nvfp4", f.hadamard is not None
        last, last_t = by_tensor and (row or not rotated), rotated and col
        return True, row, row, col, col, last, self.return_amax, last_t

    def blocks(self) -> tuple[dict[str, str], int]:
        """Return (reasons, block) for `Sharding`: the reason, if any, why rows of the result cannot be sharded, and the
        rows of a block."""
        if self.format is None:
            return {}, 1
        f = Format.of(self.format)
        if f.needs_tensor_amax and self.scale is None:
            advice = "Give the scale (a delayed or static one), q" if f.block == "tensor" else "Q"
            why = f"{self.format} has a scale that depends on the largest element of all ranks. {advice}"
        elif self.columnwise and not f.group and f.block != "tensor":
            why = f"a column-wise copy of {self.format} has one scale for a column of all ranks. Q"
        else:
            return {}, max(f.block_rows if self.rowwise else 1, f.group if self.columnwise else 1, 1)
        return {"...": f"{why}uantize each rank's shard by itself with x.to_local()"}, 1


def plain_result(dtype: torch.dtype) -> ResultOptions:
    """Return the options of a result that is not quantized."""
    return ResultOptions(dtype, None, True, False, None, False)


class Result(NamedTuple):
    """A result: y, or its quantized copies with a stand-in for y that autograd tracks. With `return_plain`, y itself
    takes the place of the stand-in, and its gradient is the sum of both results'."""

    y: Tensor
    data: Tensor | None = None  # codes and scales of the row-wise copy
    scale: Tensor | None = None
    data_t: Tensor | None = None  # of the column-wise copy
    scale_t: Tensor | None = None
    global_scale: Tensor | None = None  # of nvfp4, one per tensor
    amax: Tensor | None = None
    global_scale_t: Tensor | None = None  # of the column-wise copy, if one of the copies is rotated

    @staticmethod
    def of(y: Tensor, copies: Copies, amax: Tensor | None, rotated: bool = False) -> Result:
        """Return a result with these copies; `rotated`: each copy has its own `global_scale`."""
        data, scale, last, _ = copies[0] or PLAIN
        data_t, scale_t, last_t, _ = copies[1] or PLAIN
        if not rotated:
            last, last_t = (last_t if copies[0] is None else last), None
        return Result(y, data, scale, data_t, scale_t, last, amax, last_t)

    def copies(self, spec: str | None) -> Copies:
        """Return the row-wise and the column-wise copy in the format `spec`, or None for a missing one."""
        row = col = None
        if self.data is not None:
            row = Codes(self.data, self.scale, self.global_scale, spec)  # type: ignore[arg-type]
        if self.data_t is not None:
            last = self.global_scale if self.global_scale_t is None else self.global_scale_t
            col = Codes(self.data_t, self.scale_t, last, transposed_spec(spec))  # type: ignore[arg-type]
        return row, col

    def value(self, options: ResultOptions) -> Tensor:
        """Return y, or a `QTensor` of the copies."""
        return self.y if options.format is None else self.quantized(options.format)

    def quantized(self, spec: str) -> QTensor:
        """Return the copies as a `QTensor` of this format."""
        return wrap(self.y, spec, *self.copies(spec))


_ONLY_Y = (True, *[False] * 7)


_WITH_QUANTIZE = "columnwise, quant_scale, return_amax and return_plain go with quantize=…; pass a format"


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
    """Check and return the options of the result of an op on x. Combinations of plain values are checked only once.
    `dtype` is the dtype of the result if the caller names none; x's by default."""
    options = _options(quantize, rowwise, columnwise, return_amax, return_plain, out_dtype, dtype or x.dtype)
    if quant_scale is None:
        return options
    if options.format is None:
        raise ValueError(_WITH_QUANTIZE)
    check_tensor("quant_scale", quant_scale, FLOATS, x.device)
    block = Format.of(options.format).block
    if block != "tensor" or quant_scale.numel() != 1:
        raise ValueError(
            f"quant_scale is a single scale, for block 'tensor'; got {quant_scale.numel()} for block {block!r}"
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
            "the column-wise copy of block 'row' has one scale per whole column, which one pass cannot compute: "
            "quantize the result with weft.quantize, or use 1x128"
        )
    check_fused_format(format)
    if out_dtype is not None and not return_plain:
        raise ValueError("out_dtype is for a plain result; a quantized one has the dtype of x: leave it out")
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


def check_fused_format(format: Format) -> None:
    """Raise an error for a format that only `weft.quantize` can produce."""
    if format.block == "nvfp4_16x16":
        raise ValueError(
            "block 'nvfp4_16x16' is for weights, and only weft.quantize produces it: use 'nvfp4' for a result"
        )
    if format.hadamard is not None:
        raise ValueError(
            f"only weft.quantize rotates a copy: quantize the plain result with it, or use 'nvfp4'; got {format}"
        )


# ---- allocation and reference ---------------------------------------------------------------------------


def allocate_result(
    options: ResultOptions, like: Tensor, shape: tuple[int, ...] | None = None, groups: Groups = NO_GROUPS
) -> Result:
    """Allocate a result of this shape, by default like's, on the device of `like`."""
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
    """Return the reference result of this shape from y [M, K], which is not rounded yet; x is the input of the op. With
    groups, no block of a column-wise copy has rows of two. `input_dtype` is the dtype of the quantized elements; a
    convention may use its largest value."""
    if options.format is None:
        return Result(y.to(options.dtype).view(shape))
    f = Format.of(options.format)
    amax = amax_reference(y) if f.needs_tensor_amax or options.return_amax else None
    copy_options: dict[str, Any] = {
        "tensor_amax": amax,
        "scale": options.scale,
        "input_dtype": input_dtype,
    }
    row, col = quantize_copies(
        y.float(), f, rowwise=options.rowwise, columnwise=options.columnwise, **copy_options
    )
    if col is not None and groups.have_slots(f, True):
        col = slots_reference(y.float(), f, groups, col, **copy_options)
    plain = y.to(options.dtype).view(shape) if options.return_plain else stand_in(x, shape, options.dtype)
    return Result.of(plain, (row, col), amax if options.return_amax else None)
