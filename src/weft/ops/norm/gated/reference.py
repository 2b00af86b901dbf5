"""Reference gated norms in plain PyTorch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...common.activations import activation_reference
from ...common.results import result_reference
from ...common.rows import compute_dtype, count_rows
from .arguments import GatedNormArgs, GatedNormBackwardArgs, GatedNormGradients, GatedNormOutputs


def in_order(x: Tensor, transpose: bool) -> Tensor:
    """View x with its rows in the order of y's."""
    return x.transpose(0, 1) if transpose else x


def _by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return x as [rows, groups, columns of a group]."""
    return x.reshape(count_rows(x), groups, x.shape[-1] // groups).to(dtype)


def _rounded(value: Tensor, a: GatedNormArgs | GatedNormBackwardArgs, *factors: Tensor) -> Tensor:
    """Round the value, with casting="llama", to the dtype in which PyTorch stores the product of these factors."""
    if a.casting != "llama":
        return value
    dtype = functools.reduce(torch.promote_types, [factor.dtype for factor in factors])
    return value.to(dtype).to(value.dtype)


def gated_norm_backward_reference(a: GatedNormBackwardArgs) -> GatedNormGradients:
    dtype, groups = compute_dtype(a.x), a.groups
    h, g, d = (_by_group(t, groups, dtype) for t in (in_order(a.x, a.transpose), a.gate, a.dy))
    r = a.rstd.to(dtype).view(len(h), groups, 1)
    z = h * r
    w = 1.0 if a.weight is None else (a.weight.to(dtype) + a.weight_offset).view(groups, -1)
    f, slope = activation_reference(g, a.act)
    z_cast = _rounded(z, a, a.x)  # as the weight multiplies it
    weighted = z_cast if a.weight is None else _rounded(z_cast * w, a, a.x, a.weight)
    dx = dgate = dweight = None
    if a.needs.x:
        t = d * f * w
        dx = (r * (t - z * (t * z).mean(2, keepdim=True))).to(a.x.dtype)
        dx = in_order(dx.view(a.gate.shape), a.transpose).contiguous()
    if a.needs.gate:
        dgate = (d * weighted * slope).to(a.gate.dtype).view(a.gate.shape)
    if a.needs.weight and a.weight is not None:
        dweight = (d * f * z_cast).sum(0).flatten().to(a.weight.dtype)
    return GatedNormGradients(dx, dgate, dweight)


def gated_norm_reference(a: GatedNormArgs) -> GatedNormOutputs:
    """Compute a gated norm; this defines what the kernels compute."""
    dtype = compute_dtype(a.x)
    h = _by_group(in_order(a.x, a.transpose), a.groups, dtype)
    rstd = 1.0 / torch.sqrt(h.square().mean(2) + a.eps)
    y = (h * rstd[:, :, None]).reshape(len(h), a.gate.shape[-1])
    y = _rounded(y, a, a.x)
    if a.weight is not None:
        y = _rounded(y * (a.weight.to(dtype) + a.weight_offset), a, a.x, a.weight)
    y = y * activation_reference(a.gate.reshape(y.shape).to(dtype), a.act)[0]
    return GatedNormOutputs(
        result_reference(a.result, y, a.gate.shape, a.x), rstd.flatten() if a.stats else None
    )
