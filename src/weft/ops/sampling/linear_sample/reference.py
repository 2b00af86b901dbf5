"""Reference of draws from a linear head in plain PyTorch."""

from __future__ import annotations

import torch

from ...common.rows import compute_dtype, count_rows
from ...loss.linear_logprobs.reference import logits_reference
from ...loss.statistics import (
    LinearSampled,
    Statistics,
    Targets,
    Wanted,
    joined_reference,
    statistics_reference,
)
from ..noise import gumbel
from .arguments import LinearSampleArgs

_PLAIN = Wanted(False, False, False)


def linear_sample_statistics_reference(a: LinearSampleArgs) -> Statistics:
    """Define the statistics [STATS, T] of drawn targets."""
    rows, start = count_rows(a.hidden), a.softmax.start
    hidden = a.hidden.reshape(rows, a.hidden.shape[-1]).to(compute_dtype(a.hidden))
    z, _ = logits_reference(hidden, a.weight, a.bias, a.softmax)
    score = z
    if a.seed is not None and a.step is not None:
        tokens = torch.arange(start, start + z.shape[1], device=z.device)
        score = z + gumbel(a.seed.reshape(-1, 1), a.step.reshape(-1, 1), tokens)
    score = torch.where(z > -torch.inf, score, -torch.inf)
    # A shard may have no columns.
    highest, column = torch.cat([score, score.new_full((rows, 1), -torch.inf)], 1).max(1)
    best = torch.where(highest > -torch.inf, column + start, -1)
    everywhere = torch.ones_like(best, dtype=torch.bool)
    stats = statistics_reference(z, Targets(best, everywhere, ~everywhere), None, start, _PLAIN)
    bits = best.to(torch.int64 if z.dtype is torch.float64 else torch.int32).view(z.dtype)
    return Statistics(torch.cat([stats, highest[None], bits[None]]))


def linear_sample_reference(a: LinearSampleArgs) -> LinearSampled:
    """Define the outputs of the op: the part with the highest score decides."""
    stats = linear_sample_statistics_reference(a).stats[None] if a.stats is None else a.stats
    integer = torch.int64 if stats.dtype is torch.float64 else torch.int32
    largest, total, picked, highest, bits = stats.unbind(1)
    winner = highest.argmax(0, keepdim=True)
    tokens = bits.contiguous().view(integer).gather(0, winner)[0].long()
    picked = torch.zeros_like(picked).scatter(0, winner, picked.gather(0, winner))
    results = joined_reference(torch.stack([largest, total, picked], 1), tokens, a.softmax, _PLAIN)
    return LinearSampled(*(x.view(a.hidden.shape[:-1]) for x in (tokens, results.logprobs)))
