"""Reference norms in plain PyTorch, in fp32, or fp64 for fp64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.results import result_reference
from ..common.rows import compute_dtype, count_rows
from .arguments import NormArgs, NormBackwardArgs, NormGradients, NormOutputs


def _per_row(by_sample: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Repeat each sample's row for all rows of the sample."""
    return by_sample.to(dtype).repeat_interleave(rows // max(by_sample.shape[0], 1), 0)


def _sum_samples(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum over the rows of each sample."""
    rows, cols = gradient.shape
    samples = like.shape[0]
    return gradient.view(samples, rows // max(samples, 1), cols).sum(1).to(like.dtype)


def norm_reference(a: NormArgs) -> NormOutputs:
    """Compute a norm; this defines what the kernels compute."""
    x, dtype, mean = a.x, compute_dtype(a.x), None
    flat = x.reshape(count_rows(x), x.shape[-1])
    h = flat.to(dtype)
    if a.pre_bias is not None:
        h = h + a.pre_bias.to(dtype)
    if a.residual_gate is not None:
        h = h * _per_row(a.residual_gate, len(flat), dtype)
    if a.residual is not None:
        h = h + a.residual.reshape(flat.shape).to(dtype)
    exact, h = h, h.to(a.h_dtype)
    y = exact if a.unrounded_sum else h.to(dtype)
    if a.kind == "layer":
        mean = y.mean(1)
        y = y - mean[:, None]
    rstd = 1.0 / torch.sqrt(y.square().mean(1) + a.eps)
    y = y * rstd[:, None]
    if a.casting == "llama":
        y = y.to(a.h_dtype).to(dtype)
    if a.weight is not None:
        y = y * (a.weight.to(dtype) + a.weight_offset)
    if a.bias is not None:
        y = y + a.bias.to(dtype)
    if a.scale is not None:
        y = y * (1.0 + _per_row(a.scale, len(flat), dtype))
    if a.shift is not None:
        y = y + _per_row(a.shift, len(flat), dtype)
    return NormOutputs(
        result_reference(a.result, y, x.shape, x),
        h.view(x.shape) if a.keeps_h else None,
        rstd if a.stats else None,
        mean if a.stats else None,
    )


def norm_backward_reference(a: NormBackwardArgs) -> NormGradients:
    h, needs, dtype, h_dtype = a.h, a.needs, compute_dtype(a.h), a.h.dtype
    flat = h.reshape(count_rows(h), h.shape[-1])
    rows = len(flat)
    centered, dy = flat.to(dtype), a.dy.reshape(flat.shape).to(dtype)
    v = None
    if a.x is not None:
        v = a.x.reshape(flat.shape).to(dtype) + (0.0 if a.pre_bias is None else a.pre_bias.to(dtype))
    if a.unrounded_sum and v is not None:
        centered = centered + (v if a.residual_gate is None else v * _per_row(a.residual_gate, rows, dtype))
        h_dtype = torch.promote_types(a.x_dtype, a.residual_dtype)
    rstd = a.rstd.to(dtype)[:, None]
    if a.mean is not None:
        centered = centered - a.mean.to(dtype)[:, None]
    exact = centered * rstd
    z = exact.to(h_dtype).to(dtype) if a.casting == "llama" else exact
    w = 1.0 if a.weight is None else a.weight.to(dtype) + a.weight_offset
    d = dy
    dx = dweight = dbias = dscale = dshift = dresidual = dgate = dpre_bias = None
    if a.scale is not None:
        d = dy * (1.0 + _per_row(a.scale, rows, dtype))
        if needs.scale:
            y = z * w + (0.0 if a.bias is None else a.bias.to(dtype))
            dscale = _sum_samples(dy * y, a.scale)
        if needs.shift:
            dshift = _sum_samples(dy, a.scale)
    if needs.weight and a.weight is not None:
        dweight = (d * z).sum(0).to(a.weight.dtype)
    if needs.bias and a.bias is not None:
        dbias = d.sum(0).to(a.bias.dtype)
    t = d * w
    dh = t - exact * (t * exact).mean(1, keepdim=True)
    if a.mean is not None:
        dh = dh - t.mean(1, keepdim=True)
    dh = dh * rstd
    if a.dresidual is not None:
        dh = dh + a.dresidual.reshape(flat.shape).to(dtype)
    if needs.residual:
        dresidual = dh.to(a.residual_dtype).view(h.shape)
    if needs.residual_gate and a.residual_gate is not None and v is not None:
        dgate = _sum_samples(dh * v, a.residual_gate)
    dv = dh if a.residual_gate is None else dh * _per_row(a.residual_gate, rows, dtype)
    if needs.x:
        dx = dv.to(a.x_dtype).view(h.shape)
    if needs.pre_bias and a.pre_bias is not None:
        dpre_bias = dv.sum(0).to(a.pre_bias.dtype)
    return NormGradients(dx, dweight, dbias, dscale, dshift, dresidual, dgate, dpre_bias)
