"""Running sums along a dimension, in fp32 for floats and int64 for integers.

    y_j = sum_{i <= j} x_i        dx_i = sum_{j >= i} dy_j        reverse: the other way round

A row of up to 8192 elements is one scan. A longer one is scanned in tiles of 4096, to each of which the sum of the
earlier ones is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...language import traced as tl
from ..generated.rowwise import rowwise
from .dims import back, rows_along


@rowwise
def _cumsum(x):
    return tl.cumsum(x)


@rowwise
def _cumsum_reversed(x):
    return tl.cumsum(x, reverse=True)


def cumsum(
    x: Tensor, dim: int = -1, *, reverse: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Sums of the elements up to each one along a dimension.

    Elements are summed in fp32, in an order that depends on the size of the dimension alone.

    - `x`: any shape and strides. Integers and bools are summed in int64.
    - `dim`: the dimension along which elements are summed.
    - `reverse`: sum from each element to the last.
    - `out_dtype`: dtype of a float result; x's by default.

    >>> import torch, weft
    >>> weft.cumsum(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 3., 6.])
    """
    op = _cumsum_reversed if reverse else _cumsum
    return back(op(rows_along(x, dim), out_dtype=out_dtype), x, dim)
