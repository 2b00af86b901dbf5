"""Group norm, and vectors of length 1.

    group_norm: xhat = (x - mean) * rstd over the channels and positions of a group,  y = xhat * weight + bias
    l2_normalize: y = x / max(sqrt(sum_j x_j^2), eps)

Variances are computed from centered elements. Gradients read x and dy and compute the statistics again:

    g = dy * weight        dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dx = (dy - y * sum_j(y_j dy_j)) / norm
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...language import traced as tl
from ..common.checks import FLOATS, check_input, check_tensor
from ..generated.rowwise import rowwise
from .dims import back, rows_along


def _standardized(x, eps):
    centered = x - tl.sum(x) / x.numel
    rstd = tl.rsqrt(tl.sum(centered * centered) / x.numel + eps)
    return centered * rstd, rstd


def _group_norm_gradient(x, weight, bias, eps, dout):
    xhat, rstd = _standardized(x, eps)
    g = dout * weight
    dx = rstd * (g - tl.sum(g) / x.numel - xhat * (tl.sum(g * xhat) / x.numel))
    return dx, dout * xhat, dout, 0.0


@rowwise(backward=_group_norm_gradient, dims=2)
def _group_norm(x, weight, bias, eps):
    return _standardized(x, eps)[0] * weight + bias


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Standardize groups of channels to mean 0 and variance 1, then scale and shift each channel.

    - `x`: [N, C, ...].
    - `groups`: number of groups, which divides C.
    - `weight`: [C], the scale of each channel; 1 if it is None.
    - `bias`: [C], the shift of each channel; 0 if it is None.
    - `eps`: is added to the variance.
    - `out_dtype`: dtype of the result; the promoted one by default.

    >>> import torch, weft
    >>> weft.group_norm(torch.tensor([[1.0, 3.0, 0.0, 0.0]]), 2)
    tensor([[-1.0000,  1.0000,  0.0000,  0.0000]])
    """
    check_input("x", x, FLOATS)
    if x.dim() < 2:
        raise ValueError(f"x must have the shape [N, C, ...]; got {tuple(x.shape)}")
    samples, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide the {channels} channels of x; got {groups}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            check_tensor(name, t, FLOATS, x.device, (channels,))
    grouped = (groups, channels // groups)
    rows = x.reshape(samples, *grouped, math.prod(x.shape[2:]))
    result: Tensor = _group_norm(
        rows,
        1.0 if weight is None else weight.view(*grouped, 1),
        0.0 if bias is None else bias.view(*grouped, 1),
        eps,
        out_dtype=out_dtype,
    )
    return result.view(x.shape)


def _l2_gradient(x, eps, dout):
    norm = tl.sqrt(tl.sum(x * x))
    longer = tl.maximum(norm, eps)
    y = x / longer
    along = tl.where(norm > eps, tl.sum(y * dout), 0.0)
    return (dout - y * along) / longer, 0.0


@rowwise(backward=_l2_gradient)
def _l2_normalize(x, eps):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x)), eps)


def l2_normalize(
    x: Tensor, dim: int = -1, *, eps: float = 1e-12, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Divide x by its length along a dimension.

    - `x`: any shape and strides.
    - `dim`: the dimension that gets the length 1.
    - `eps`: shorter vectors are divided by this instead of by their length.
    - `out_dtype`: dtype of the result; x's by default.

    >>> import torch, weft
    >>> weft.l2_normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return back(_l2_normalize(rows_along(x, dim), eps, out_dtype=out_dtype), x, dim)
