"""Softmax, its logarithm, and the logarithm of its denominator.

    m = max_j x_j        l = sum_j exp(x_j - m)
    softmax(x) = exp(x - m) / l        log_softmax(x) = x - m - log(l)        logsumexp(x) = m + log(l)

One fp32 kernel each, with one rounding at the end. A row of up to 8192 elements is read once, a longer one three times.
The backward computes the softmax again from x, so that nothing else is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...language import traced as tl
from ..generated.rowwise import rowwise
from .dims import back, rows_along

INF = float("inf")


def _of(x):
    e = tl.exp(x - tl.max(x))
    return e / tl.sum(e)


def _softmax_gradient(x, dout):
    y = _of(x)
    return y * (dout - tl.sum(y * dout))


@rowwise(backward=_softmax_gradient)
def _softmax(x):
    return _of(x)


def _log_softmax_gradient(x, dout):
    return dout - _of(x) * tl.sum(dout)


@rowwise(backward=_log_softmax_gradient)
def _log_softmax(x):
    centered = x - tl.max(x)
    return centered - tl.log(tl.sum(tl.exp(centered)))


def _logsumexp_gradient(x, dout):
    return _of(x) * dout


@rowwise(backward=_logsumexp_gradient)
def _logsumexp(x):
    m = tl.max(x)
    m = tl.where(tl.abs(m) == INF, 0.0, m)  # inf - inf would be NaN
    return m + tl.log(tl.sum(tl.exp(x - m)))


def softmax(x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Exponentials of x, divided by their sum along a dimension.

    - `x`: any shape and strides.
    - `dim`: the dimension that sums to 1.
    - `out_dtype`: dtype of the result; x's by default.

    >>> import torch, weft
    >>> weft.softmax(torch.tensor([[0.0, 0.0], [0.0, float("-inf")]]))
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000]])
    """
    return back(_softmax(rows_along(x, dim), out_dtype=out_dtype), x, dim)


def log_softmax(x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax of x along a dimension.

    - `x`: any shape and strides.
    - `dim`: the dimension over which the exponentials are summed.
    - `out_dtype`: dtype of the result; x's by default.

    >>> import torch, weft
    >>> weft.log_softmax(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """
    return back(_log_softmax(rows_along(x, dim), out_dtype=out_dtype), x, dim)


def logsumexp(x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the sum of exponentials of x along a dimension, which the result does not have.

    - `x`: any shape and strides.
    - `dim`: the dimension that is summed over.
    - `out_dtype`: dtype of the result; x's by default.

    >>> import torch, weft
    >>> weft.logsumexp(torch.zeros(2, 4))
    tensor([1.3863, 1.3863])
    """
    result: Tensor = _logsumexp(rows_along(x, dim), out_dtype=out_dtype)
    return result
