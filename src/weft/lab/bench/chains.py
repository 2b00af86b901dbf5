"""What one writes in plain PyTorch in place of an op, where that is faster than the op's reference.

A reference is written to be read and to be right in float64: it loops over experts or sequences, and torch.compile
gets little out of it. These chains are written for torch.compile, in the order of memory in which it fuses most, and
use PyTorch's own fused functions where there are such. Some assume what holds for their workload alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..chain import EPS, Chain, tensors_of
from ..problem import Call

# ---- norms and quantisers ---------------------------------------------------------------------------------


# ---- gated linear units -----------------------------------------------------------------------------------


# ---- heads ------------------------------------------------------------------------------------------------


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 2 * cos.shape[-1] numbers of heads [S, B, heads, d] turned, by angles of S."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def _heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, B, 16, 128] and k, v [S, B, 4, 128] of groups [q q q q k v]."""
    groups = qkv.unflatten(-1, (4, 6, 128))
    return groups[..., :4, :].flatten(-3, -2), groups[..., 4, :], groups[..., 5, :]


def _qkv(x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads_of(x)
    done = []
    for part, weight in ((q, q_weight), (k, k_weight)):
        h = part.float()
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float()
        done.append(_rotated(normed, cos, sin).to(x.dtype))
    return tuple(part.transpose(0, 1).contiguous() for part in (*done, v))


def _qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, _ = _heads_of(x)
    parts, sums = [], []
    for gradient, part, weight in ((dq, q, q_weight), (dk, k, k_weight)):
        h, d = part.float(), _rotated(gradient.transpose(0, 1).float(), cos, -sin)
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        z, t = h * rstd, d * weight.float()
        parts.append((rstd * (t - z * (t * z).mean(-1, keepdim=True))).to(x.dtype))
        sums.append((d * z).flatten(0, -2).sum(0).to(weight.dtype))
    parts.append(dv.transpose(0, 1))
    groups = [part.unflatten(-2, (4, -1)) for part in parts]
    return torch.cat(groups, -2).flatten(-3), *sums


# ---- to the experts and back ------------------------------------------------------------------------------


# ---- gradients --------------------------------------------------------------------------------------------


# ---- the table --------------------------------------------------------------------------------------------


CHAINS: dict[tuple[str, str], Callable[[Call], Chain]] = {
    ("qkv_prepare", "groups-half"): lambda call: Chain(
        _qkv, tensors_of(call, "qkv", "q_weight", "k_weight", "cos", "sin"), lambda result: tuple(result)[:3]
    ),
    ("qkv_prepare_backward", "groups-half"): lambda call: Chain(
        _qkv_backward, tensors_of(call, "dq", "dk", "dv", "x", "q_weight", "k_weight", "cos", "sin")
    ),
}
"""By the op and the name of its set of options. The rest is compared with the op's reference."""
