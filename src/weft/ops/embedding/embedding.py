"""Embeddings: rows of a table by token, and sums of gradients by row of the table.

    y[t] = round(scale * weight[ids[t]]), or its codes and scales
    dweight[v] = round(main_grad[v] + scale * sum over t with ids[t] = v of dy[t])

`gather` says in which order rows are added.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...quant import Format, QTensor
from ...quant.straight import take_apart
from ...runtime import LATER, plain_gradient
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, main_grad_of, real, whole
from ..common.results import plain_result, result_options
from ..loss.sharding import VocabShard, check_shard
from ..quantize.quantize import quantize as quantize_rows
from .arguments import GatherArgs, SumRowsArgs, SumRowsOutputs
from .gather import gather_op, sum_rows_op, table_codes


class _IntoMainGrad(torch.autograd.Function):
    """Identity of gathered rows whose backward adds their gradient to `main`, in place of a gradient of the table."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, table: Tensor, ids: Tensor, main: Tensor, args: SumRowsArgs) -> Tensor:
        # `main` is not saved: other layers may add to it before this backward.
        ctx.main, ctx.args = main, args
        ctx.save_for_backward(ids)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        args = ctx.args._replace(x=plain_gradient(dy), ids=ids, onto=ctx.main)
        sum_rows_op.into(SumRowsOutputs(ctx.main), args)
        return None, None, None, None, None


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float = 1.0,
    padding_idx: int | None = None,
    shard: VocabShard | None = None,
    main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Tensor | QTensor:
    """Look up rows of a table: `scale * weight[ids]`.

    - `ids`: int32 or int64, of any shape. An id that the vocabulary does not have gives a row of NaN.
    - `weight`: [V, D], a tensor or a row-wise `QTensor`, whose rows are decoded.
    - `scale`: factor of every row, for instance `D ** 0.5`; applied in fp32, before the only rounding.
    - `padding_idx`: an id whose row gets no gradient. Negative numbers count from the end, as in PyTorch.
    - `shard`: weight is this rank's part of the vocabulary. All ranks pass the same ids and get the whole result.
    - `main_grad`: [V, D], contiguous: a tensor to which the gradient of weight is added; only rows of ids are read and
      written, and `weight.grad` is unchanged. By default the attribute `weight.main_grad`, if there is one.
    - `out_dtype`: dtype of a plain result; weight's by default.
    - `quantize`: a format; the result is then a `QTensor`, encoded from fp32. `rowwise` and `columnwise` select its
      copies.

    Returns [..., D]. The gradient of weight is summed in fp32 in the order of the ids, in parts of 256 rows, and
    rounded once: the same bits in every run.

    >>> import torch, weft
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> y = weft.embedding(torch.tensor([1, 0, 1]), weight)
    >>> y.sum().backward()
    >>> weight.grad
    tensor([[1., 1.],
            [2., 2.]])
    """
    check_input("weight", weight, FLOATS)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V, D]; got {tuple(weight.shape)}")
    check_tensor("ids", ids, INTEGERS, weight.device)
    check_shard(shard, weight.shape[0])
    first, size = (0, weight.shape[0]) if shard is None else (shard.start, shard.size)
    skipped = -1
    if padding_idx is not None:
        skipped = whole("padding_idx", padding_idx)
        skipped += size if skipped < 0 else 0
        if not 0 <= skipped < size:
            raise ValueError(f"padding_idx must be a row of the {size} of the vocabulary; got {padding_idx}")
    scale = real("scale", scale)
    if isinstance(weight, QTensor):
        table_codes(weight)
    table, codes = take_apart(weight)
    options = result_options(
        table, quantize, rowwise=rowwise, columnwise=columnwise, out_dtype=out_dtype, dtype=weight.dtype
    )
    # The rows of other ranks are added before they are quantized.
    own = options if shard is None or quantize is None else plain_result(weight.dtype)
    main = main_grad_of(weight, main_grad)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        main = None
    read = table if main is None else table.detach()
    result = gather_op(GatherArgs(read, codes, ids, first, size, math.nan, scale, skipped, False, own)).result
    if main is not None:
        args = SumRowsArgs(LATER, LATER, len(table), first, skipped, scale, False, main.dtype, None)
        result = result._replace(y=_IntoMainGrad.apply(result.y, weight, ids, main, args))
    if shard is None:
        return result.value(options)
    y: Tensor = shard.sum_rows(result.y)
    return y if quantize is None else quantize_rows(y, quantize, rowwise=rowwise, columnwise=columnwise)
