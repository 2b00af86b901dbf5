"""Reference gated linear units in plain PyTorch, in fp32, or fp64 for fp64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.activations import activation_reference
from ..common.groups import group_of_reference, real_rows_reference
from ..common.results import result_reference
from ..common.rows import compute_dtype, count_rows
from .arguments import NO_RESULT, GluArgs, GluBackwardArgs, GluBackwardOutputs, GluOutputs


def _parts(a: GluArgs | GluBackwardArgs) -> tuple[Tensor, Tensor | None]:
    """Return gate and up as [M, H], with their bias; up is None without a gate."""
    dtype, layout = compute_dtype(a.x), a.unit.layout
    flat = a.x.reshape(count_rows(a.x), a.x.shape[-1]).to(dtype)
    if a.bias is not None and a.groups.ends is None:
        flat = flat + a.bias.to(dtype)
    elif a.bias is not None and a.groups.ends is not None:  # rows past the last expert have no bias
        biases = torch.cat([a.bias, a.bias.new_zeros(1, flat.shape[1])])
        flat = flat + biases.to(dtype)[group_of_reference(a.groups.ends, len(flat))]
    if layout == "concat":
        hidden = flat.shape[1] // 2
        return flat[:, :hidden], flat[:, hidden:]
    if layout == "interleaved":
        return flat[:, 0::2], flat[:, 1::2]
    return flat, None if a.up is None else a.up.reshape(flat.shape).to(dtype)


def _limited(gate: Tensor, up: Tensor | None, limit: float | None) -> tuple[Tensor, Tensor | None]:
    if limit is None:
        return gate, up
    gate = torch.where(gate > limit, limit, gate)
    return gate, up if up is None else torch.where(up.abs() > limit, up.sign() * limit, up)


def glu_reference(a: GluArgs) -> GluOutputs:
    """Compute a gated linear unit; this defines what the kernels compute."""
    gate, up = _limited(*_parts(a), a.unit.limit)
    y, _ = activation_reference(gate, a.unit.act, a.unit.alpha)
    if up is not None:
        y = y * (up + a.unit.up_offset)
    if a.probs is not None:
        y = y * a.probs.to(y.dtype)[:, None]
    if a.groups.ends is not None:
        y = torch.where(real_rows_reference(a.groups.ends, len(y), a.groups.align)[:, None], y, 0.0)
    return GluOutputs(result_reference(a.result, y, (*a.x.shape[:-1], y.shape[1]), a.x, a.groups))


def glu_backward_reference(a: GluBackwardArgs) -> GluBackwardOutputs:
    gate, up = _parts(a)
    d, probs, unit, needs = a.dy.reshape(gate.shape).to(gate.dtype), a.probs, a.unit, a.needs
    real = None
    if a.groups.ends is not None:
        real = real_rows_reference(a.groups.ends, len(gate), a.groups.align)[:, None]
        gate, d = torch.where(real, gate, 0.0), torch.where(real, d, 0.0)
        up = up if up is None else torch.where(real, up, 0.0)
        probs = probs if probs is None else torch.where(real[:, 0], probs, 0.0)
    inside, value = _limited(gate, up, unit.limit)
    f, slope = activation_reference(inside, unit.act, unit.alpha)
    g = torch.ones_like(f) if value is None else value + unit.up_offset
    w = d if probs is None else d * probs.to(d.dtype)[:, None]
    dgate, dup = w * g * slope, w * f
    if unit.limit is not None:
        dgate = torch.where(gate > unit.limit, 0.0, dgate)
        dup = dup if up is None else torch.where(up.abs() > unit.limit, 0.0, dup)
    if real is not None:
        dgate, dup = torch.where(real, dgate, 0.0), torch.where(real, dup, 0.0)
    dx = dgate
    if unit.layout == "concat":
        dx = torch.cat([dgate, dup], 1)
    elif unit.layout == "interleaved":
        dx = torch.stack([dgate, dup], -1).flatten(1)
    dbias = None
    if a.bias is not None and needs.bias:
        dbias = dx.sum(0)
        if a.groups.ends is not None:
            by_group = dx.new_zeros(len(a.bias) + 1, dx.shape[1])
            dbias = by_group.index_add(0, group_of_reference(a.groups.ends, len(dx)), dx)[:-1]
        dbias = dbias.to(a.bias.dtype)
    return GluBackwardOutputs(
        result_reference(a.gradient, dx, a.x.shape, a.x, a.groups) if needs.x else NO_RESULT,
        NO_RESULT
        if a.up is None or not needs.up
        else result_reference(a.up_gradient, dup, a.up.shape, a.up, a.groups),
        (d * (f * g)).sum(1).to(probs.dtype) if probs is not None and needs.probs else None,
        dbias,
    )
