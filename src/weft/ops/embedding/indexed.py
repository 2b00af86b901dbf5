"""Rows by index outside of embeddings: gathered rows, rows added by index, and sums of segments.

    gather_rows: y[t] = x[index[t]], 0 for an index without a row
    index_add_: out[i] = round(out[i] + alpha * sum over t with index[t] = i of x[t])
    segment_sum: y[s] = round(sum over ends[s - 1] <= t < ends[s] of x[t])

`gather` says in which order rows are added.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...quant import PLAIN, QTensor
from ...quant.straight import take_apart
from ..common.checks import (
    FLOATS,
    INTEGERS,
    check_disjoint,
    check_input,
    check_out_dtype,
    check_tensor,
    dtypes_beside,
    real,
)
from ..common.results import ResultOptions, plain_result
from .arguments import GatherArgs, SumRowsArgs, SumRowsOutputs
from .gather import gather_op, sum_rows_op, table_codes

MOVABLE = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _as_rows(x: Tensor) -> Tensor:
    """Return x [N, ...] as [N, D]."""
    return x if x.dim() == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


def gather_rows(x: Tensor | QTensor, index: Tensor) -> Tensor | QTensor:
    """Return rows of x: `x[index]`, with zeros where the index is -1.

    - `x`: [N, ...], of any float or integer dtype. Of a row-wise `QTensor` [N, K] whose blocks lie within a row, codes
      and scales are moved unchanged.
    - `index`: int32 or int64, of any shape. Any index that is not a row of x gives zeros.

    The gradient of x is a sum of rows in fp32, with the same bits in every run.

    >>> import torch, weft
    >>> weft.gather_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, -1]))
    tensor([[3., 4.],
            [0., 0.]])
    """
    if isinstance(x, QTensor):
        table_codes(x)
        if x.format.block_rows != 1:
            raise ValueError(
                f"blocks of {x.spec} are not within one row: dequantize it, or use 1x128, mx or row"
            )
        check_tensor("index", index, INTEGERS, x.device)
        table, codes = take_apart(x)
        options = ResultOptions(x.dtype, x.spec, True, False, None, False)
        result = gather_op(GatherArgs(table, codes, index, 0, len(x), 0.0, 1.0, -1, True, options)).result
        return result.value(options)
    check_input("x", x, MOVABLE)
    check_tensor("index", index, INTEGERS, x.device)
    rows = _as_rows(x)
    options = plain_result(x.dtype)
    y = gather_op(GatherArgs(rows, PLAIN, index, 0, len(x), 0.0, 1.0, -1, False, options)).result.y
    return y.view(*index.shape, *x.shape[1:])


def index_add_(out: Tensor, index: Tensor, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add rows of x to rows of `out`, in place: `out[index[t]] += alpha * x[t]` for each t in ascending order.

    - `out`: [N, ...], contiguous; float. Returned.
    - `index`: int32 or int64 [T]. Rows whose index is -1, or no row of `out`, are not added.
    - `x`: [T, ...].
    - `alpha`: factor of the sums, in fp32.

    Rows of one index are summed in fp32 in parts of 256, and added to `out` with one rounding: the same bits in every
    run. For inference and optimizers; with gradients, use `torch.index_add`.

    >>> import torch, weft
    >>> weft.index_add_(torch.zeros(2, 2), torch.tensor([1, 1]), torch.ones(2, 2))
    tensor([[0., 0.],
            [2., 2.]])
    """
    check_input("out", out, FLOATS)
    check_input("x", x, dtypes_beside(out.dtype))
    check_tensor("x", x, FLOATS, out.device, (x.shape[0], *out.shape[1:]))
    check_tensor("index", index, INTEGERS, out.device, x.shape[:1])
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous; its strides are {out.stride()}")
    if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
        raise ValueError(
            "index_add_ changes out in place, without a gradient: call it under torch.no_grad(), or use torch.index_add"
        )
    check_disjoint([("out", out)], [("x", x), ("index", index)])
    onto = _as_rows(out)
    args = SumRowsArgs(_as_rows(x), index, len(onto), 0, -1, real("alpha", alpha), False, out.dtype, onto)
    sum_rows_op.into(SumRowsOutputs(onto), args)
    return out


def segment_sum(x: Tensor, ends: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Sum consecutive rows: row s of the result is the sum of the rows of x from `ends[s - 1]` to `ends[s] - 1`.

    - `x`: [T, ...].
    - `ends`: int32 or int64 [S], which never decreases: the end of each segment, such as the offsets of a `RowMap`. The
      first segment begins at row 0; rows after the last end are in none. An empty segment has the sum 0.
    - `out_dtype`: dtype of the result; x's by default.

    Sums are in fp32, row by row in parts of 256, and rounded once: the same bits in every run.

    >>> import torch, weft
    >>> weft.segment_sum(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 2, 3]))
    tensor([[3.],
            [0.],
            [4.]])
    """
    check_input("x", x, FLOATS)
    check_tensor("ends", ends, INTEGERS, x.device)
    if ends.dim() != 1:
        raise ValueError(f"ends must be [segments], the end of each; got {tuple(ends.shape)}")
    check_out_dtype(out_dtype)
    row = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    segment = torch.searchsorted(ends, row, right=True, out_int32=True)
    args = SumRowsArgs(_as_rows(x), segment, len(ends), 0, -1, 1.0, True, out_dtype or x.dtype, None)
    return sum_rows_op(args).y.view(len(ends), *x.shape[1:])
