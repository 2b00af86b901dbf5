"""Reference of cross entropy and its gradient in plain PyTorch."""

from __future__ import annotations

import torch

from ...common.rows import compute_dtype, count_rows
from ..statistics import (
    Statistics,
    Targets,
    TokenResults,
    capped_reference,
    joined_reference,
    statistics_reference,
)
from .arguments import (
    CrossEntropyArgs,
    CrossEntropyBackwardArgs,
    CrossEntropyOutputs,
    LogitsGradient,
    ShardedArgs,
    StatisticsArgs,
)


def cross_entropy_backward_reference(a: CrossEntropyBackwardArgs) -> LogitsGradient:
    logits, dtype, start = a.logits, compute_dtype(a.logits), a.softmax.start
    rows, cols = count_rows(logits), logits.shape[-1]
    z, slope = capped_reference(logits.reshape(rows, cols).to(dtype), a.softmax)
    targets = Targets.of(a.target, a.softmax)
    weight = None if a.weight is None else a.weight.to(dtype)
    t = z - a.largest.to(dtype)[:, None]
    log_total = torch.log(a.total.to(dtype))
    p = torch.exp(t) / a.total.to(dtype)[:, None]
    factor = torch.zeros_like(log_total)
    dz = torch.zeros_like(z)
    dspread = None if a.dspread is None else a.dspread.reshape(-1).to(dtype)
    if a.dloss is not None:
        g = a.dloss.reshape(-1).to(dtype).expand(rows) * (1.0 if a.inverse is None else a.inverse.to(dtype))
        at_target = g * (1.0 - a.label_smoothing)
        if dspread is None:
            dspread = g
            if weight is not None:
                at_target = at_target * weight[targets.column]
        factor = at_target + g * 2.0 * a.z_loss * (a.largest.to(dtype) + log_total)
        at_column = torch.arange(start, start + cols, device=z.device) == targets.column[:, None]
        dz = dz - torch.where(at_column, at_target[:, None], 0.0)
    if a.smooth is not None and dspread is not None:
        mass_share, column_share = a.smooth.to(dtype).unbind()
        factor = factor + dspread * mass_share
        part = (dspread * column_share)[:, None].expand(z.shape)
        part = part if weight is None else part * weight
        dz = dz - torch.where(z > -torch.inf, part, 0.0)
    if a.dlse is not None:
        factor = factor + a.dlse.reshape(-1).to(dtype)
    scaled = factor[:, None]
    if a.dentropy is not None:
        assert a.entropy is not None
        e = a.dentropy.reshape(-1, 1).to(dtype)
        scaled = scaled - e * (t - log_total[:, None] + a.entropy.reshape(-1, 1).to(dtype))
    dz = dz + torch.where(p > 0, p * scaled, p)
    dx = torch.where(targets.valid[:, None], dz * slope, 0.0)
    return LogitsGradient(dx.to(logits.dtype).view(logits.shape))


def cross_entropy_reference(a: CrossEntropyArgs) -> CrossEntropyOutputs:
    """Define the outputs of the op."""
    logits, target, options = a.logits, a.target, a.loss
    rows, cols, dtype = count_rows(logits), logits.shape[-1], compute_dtype(logits)
    z, _ = capped_reference(logits.reshape(rows, cols).to(dtype), a.softmax)
    targets = Targets.of(target, a.softmax)
    y, valid = targets.column, targets.valid
    largest = z.amax(1).clamp(min=torch.finfo(dtype).min)
    t = z - largest[:, None]
    e = torch.exp(t)
    total = e.sum(1)
    log_total = torch.log(total)
    picked = z.gather(1, y[:, None])[:, 0]
    nll = (largest - picked) + log_total
    share = torch.ones_like(nll) if a.weight is None else a.weight.to(dtype)[y]
    lse = largest + log_total
    loss = share * nll
    entropy = accuracy = inverse = smooth = None
    if a.wanted.spread:
        finite = z > -torch.inf
        weights = torch.ones_like(z) if a.weight is None else a.weight.to(dtype).expand(z.shape)
        weights = torch.where(finite, weights, 0.0)
        part = options.label_smoothing / finite.sum(1).to(dtype)
        origin = torch.where(picked > -torch.inf, picked, 0.0)
        below = torch.where(finite, weights * (z - origin[:, None]), 0.0).sum(1)
        mass = weights.sum(1)
        spread = mass * ((largest - origin) + log_total) - below
        loss = (1.0 - options.label_smoothing) * loss + part * spread
        smooth = torch.where(valid, torch.stack([part * mass, part]), 0.0)
    loss = targets.masked(loss + options.z_loss * lse.square())
    if a.wanted.entropy:
        moment = torch.where(e > 0, e * t, 0.0).sum(1)
        entropy = targets.masked(log_total - moment / total).view(target.shape)
    if a.wanted.accuracy:
        col = torch.arange(cols, device=z.device)
        before = (z > picked[:, None]) | ((z == picked[:, None]) & (col < y[:, None]))
        accuracy = torch.where(valid, (~before.any(1)).to(dtype), 0.0)
    if options.reduction == "none":
        loss = loss.view(target.shape)
        accuracy = None if accuracy is None else accuracy.view(target.shape)
    else:
        loss = loss.sum()
        accuracy = None if accuracy is None else accuracy.sum()
    if options.reduction == "mean":
        divisor, count = torch.where(valid, share, 0.0).sum(), valid.sum()
        inverse, mean = 1.0 / divisor, loss / divisor
        accuracy = None if accuracy is None else accuracy / count
        if options.zero_if_none:
            inverse = torch.where(divisor == 0, 0.0, inverse)
            mean = torch.where((divisor == 0) & ~loss.isnan(), 0.0, mean)
            accuracy = None if accuracy is None else torch.where(count == 0, 0.0, accuracy)
        loss = mean
    return CrossEntropyOutputs(
        loss,
        targets.masked(lse).view(target.shape),
        entropy,
        accuracy,
        torch.where(valid, largest, 0.0),
        torch.where(valid, total, 1.0),
        inverse,
        smooth,
    )


def cross_entropy_statistics_reference(a: StatisticsArgs) -> Statistics:
    z = a.logits.reshape(a.target.numel(), a.logits.shape[-1]).to(compute_dtype(a.logits))
    z, _ = capped_reference(z, a.softmax)
    return Statistics(
        statistics_reference(z, Targets.of(a.target, a.softmax), a.weight, a.softmax.start, a.wanted)
    )


def sharded_logprobs_reference(a: ShardedArgs) -> TokenResults:
    """Compute the results of each token from the statistics of all ranks. Their gradient goes to `a.logits`, this
    rank's shard."""
    return joined_reference(a.stats, a.target, a.softmax, a.wanted)
