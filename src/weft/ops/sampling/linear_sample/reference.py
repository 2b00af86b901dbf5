"""Reference of draws from a linear head in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

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
from ..arguments import SampleArgs
from ..noise import gumbel
from ..parameters import Integer, Number
from ..reference import descending, kept_tokens
from .arguments import STATISTICS, LinearSampleArgs

_PLAIN = Wanted(False, False, False)


def linear_sample_statistics_reference(a: LinearSampleArgs) -> Statistics:
    """Define the statistics [STATS, T] of drawn targets, or of none and the lists of the largest logits."""
    rows, start = count_rows(a.hidden), a.softmax.start
    hidden = a.hidden.reshape(rows, a.hidden.shape[-1]).to(compute_dtype(a.hidden))
    z, _ = logits_reference(hidden, a.weight, a.bias, a.softmax)
    tokens = torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
    if a.top_k:
        highest, best = z.new_full((rows,), -torch.inf), tokens.new_full((rows,), -1)
    else:
        highest, best = _best(a, z, tokens)
    everywhere = torch.ones_like(best, dtype=torch.bool)
    stats = statistics_reference(z, Targets(best, everywhere, ~everywhere), None, start, _PLAIN)
    stats = torch.cat([stats, highest[None], _bits(best, z)[None]])
    if a.top_k:
        z = torch.nn.functional.pad(z, (0, a.top_k), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, a.top_k), value=-1)
        # In the order of the tokens, as in a row of logits.
        column = descending(z)[:, : a.top_k].sort(-1).values
        z, tokens = (
            z.gather(1, column),
            tokens.gather(1, column).masked_fill(z.gather(1, column) == -torch.inf, -1),
        )
        stats = torch.cat([stats, z.t(), _bits(tokens, z).t()])
    return Statistics(stats)


def _best(a: LinearSampleArgs, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (score, token) of the best logit of each row; minus infinity and -1 if there is none."""
    score = z
    if a.seed is not None and a.step is not None:
        score = z + gumbel(a.seed.reshape(-1, 1), a.step.reshape(-1, 1), tokens)
    score = torch.where(z > -torch.inf, score, -torch.inf)
    # A shard may have no columns.
    highest, column = torch.cat([score, score.new_full((len(z), 1), -torch.inf)], 1).max(1)
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=-1)
    return highest, torch.where(highest > -torch.inf, tokens.gather(1, column[:, None])[:, 0], -1)


def _integer(like: Tensor) -> torch.dtype:
    return torch.int64 if like.dtype is torch.float64 else torch.int32


def _bits(tokens: Tensor, like: Tensor) -> Tensor:
    """Return tokens as the bits of numbers like `like`."""
    return tokens.to(_integer(like)).view(like.dtype)


def _choose(stats: Tensor, a: LinearSampleArgs) -> Tensor:
    """Draw from the lists of all parts, and let the statistics of the first part draw the same."""
    listed = stats[:, STATISTICS:].permute(2, 0, 1)
    z, tokens = (x.flatten(1) for x in listed.split(a.top_k, 2))
    tokens = tokens.contiguous().view(_integer(z)).long()
    one = Number(None, 1.0)
    limits = one, Number(None, float(a.top_k)), a.top_p, a.min_p
    args = SampleArgs(z, *limits, Integer(a.seed, 0), Integer(a.step, 0), False)
    m = z.amax(-1, keepdim=True)
    total = torch.where(z == m, 1.0, (z - m).exp()).sum(-1, keepdim=True)
    highest, token = _best(a, z.masked_fill(~kept_tokens(args, z, m, total), -torch.inf), tokens)
    picked = torch.where((tokens == token[:, None]) & (tokens >= 0), z, 0.0).sum(-1)
    stats = stats[:, :STATISTICS].clone()
    stats[0, 2], stats[0, 3], stats[0, 4] = picked, highest, _bits(token, z)
    return stats


def linear_sample_reference(a: LinearSampleArgs) -> LinearSampled:
    """Define the outputs of the op: the part with the highest score decides."""
    stats = linear_sample_statistics_reference(a).stats[None] if a.stats is None else a.stats
    if a.top_k:
        stats = _choose(stats, a)
    largest, total, picked, highest, bits = stats.unbind(1)
    winner = highest.argmax(0, keepdim=True)
    tokens = bits.contiguous().view(_integer(stats)).gather(0, winner)[0].long()
    picked = torch.zeros_like(picked).scatter(0, winner, picked.gather(0, winner))
    results = joined_reference(torch.stack([largest, total, picked], 1), tokens, a.softmax, _PLAIN)
    return LinearSampled(*(x.view(a.hidden.shape[:-1]) for x in (tokens, results.logprobs)))
