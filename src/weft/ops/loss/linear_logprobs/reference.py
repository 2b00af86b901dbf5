"""Reference of the log-probabilities of a linear head in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.rows import compute_dtype, count_rows
from ..statistics import (
    Softmax,
    Statistics,
    Targets,
    capped_reference,
    joined_reference,
    statistics_reference,
)
from .arguments import (
    AnyHeadArgs,
    HeadGradients,
    LinearBackwardArgs,
    LinearLogprobsArgs,
    LinearLogprobsOutputs,
    LinearStatisticsArgs,
)


def logits_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor | float]:
    """Return (z, slope): z [T, V] of hidden states [T, H] in the dtype to compute in; dz/dx."""
    x = hidden @ weight.to(hidden.dtype).t()
    return capped_reference(x if bias is None else x + bias.to(x.dtype), softmax)


def _logits(a: AnyHeadArgs, targets: Targets) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return (hidden, z, slope): the hidden states [T, H], zero for tokens without a target; z [T, V]; dz/dx."""
    dtype = compute_dtype(a.hidden)
    hidden = a.hidden.reshape(count_rows(a.hidden), a.hidden.shape[-1])
    hidden = torch.where(targets.valid[:, None], hidden, 0.0).to(dtype)
    return hidden, *logits_reference(hidden, a.weight, a.bias, a.softmax)


def linear_statistics_reference(a: LinearStatisticsArgs | LinearLogprobsArgs) -> Statistics:
    targets = Targets.of(a.target, a.softmax)
    _, z, _ = _logits(a, targets)
    return Statistics(statistics_reference(z, targets, a.classes, a.softmax.start, a.wanted))


def linear_logprobs_backward_reference(a: LinearBackwardArgs) -> HeadGradients:
    """Define the gradients; `skip_below` is ignored and every tile computed."""
    targets, start = Targets.of(a.target, a.softmax), a.softmax.start
    hidden, z, slope = _logits(a, targets)
    dtype = z.dtype
    t = z - a.largest.to(dtype)[:, None]
    log_total = torch.log(a.total.to(dtype))
    p = torch.exp(t) / a.total.to(dtype)[:, None]

    def column(gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, 1).to(dtype)

    factor = torch.zeros_like(z[:, :1])
    dz = torch.zeros_like(z)
    if a.dlogprob is not None:
        factor = factor - column(a.dlogprob)
        at_target = torch.arange(start, start + len(a.weight), device=z.device) == targets.column[:, None]
        dz = dz + torch.where(at_target, column(a.dlogprob), 0.0)
    if a.dlse is not None:
        factor = factor + column(a.dlse)
    if a.dspread is not None:
        assert a.shares is not None
        mass_share, column_share = a.shares.unbind()
        factor = factor + column(a.dspread) * column(mass_share)
        w = torch.ones_like(z) if a.classes is None else a.classes.to(dtype)
        dz = dz - torch.where(z > -torch.inf, column(a.dspread) * column(column_share) * w, 0.0)
    if a.dentropy is not None:
        assert a.entropy is not None
        factor = factor - column(a.dentropy) * (t - log_total[:, None] + column(a.entropy))
    dz = dz + torch.where(p > 0, p * factor, p)
    dx = torch.where(targets.valid[:, None], dz * slope, 0.0)
    dhidden = dweight = dbias = None
    if a.needs.hidden:
        dhidden = (dx @ a.weight.to(dtype)).to(a.hidden.dtype).view(a.hidden.shape)
    if a.needs.weight:
        dweight = (dx.t() @ hidden).to(a.weight.dtype)
    if a.needs.bias and a.bias is not None:
        dbias = dx.sum(0).to(a.bias.dtype)
    return HeadGradients(dhidden, dweight, dbias)


def linear_logprobs_reference(a: LinearLogprobsArgs) -> LinearLogprobsOutputs:
    """Define the outputs of the op."""
    stats = linear_statistics_reference(a).stats[None] if a.stats is None else a.stats
    valid = Targets.of(a.target, a.softmax).valid
    order = torch.argsort((~valid).int(), stable=True).int()
    return LinearLogprobsOutputs(
        joined_reference(stats, a.target, a.softmax, a.wanted),
        torch.cat([order, valid.sum(dtype=torch.int32)[None]]),
    )
