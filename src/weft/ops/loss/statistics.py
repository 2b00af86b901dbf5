"""Softmax statistics of one token over part of a vocabulary, and the formulas that join several parts.

For the logits z of one token over a part of the columns, with class weights w (1 if none are given):

    largest = max(z)               total = sum(exp(z - largest))        picked = z_y, or 0 if y is another part's
    moment = sum(exp(z - largest) * (z - largest))                      if the entropy is requested
    below = sum(w * (z - largest))   mass = sum(w)   there = sum(1)     if the spread is, over columns above -infinity
    squares = sum(exp(z - largest)^2)                                   if the squares are
    best = the first column with the largest z                          if the accuracy is, as the bits of a float

If a target is drawn, y is the first column with the largest score, which is z, or z with noise. Two more statistics are
`highest`, its score (minus infinity if no column can be drawn), and `best`, which is y (or -1), as the bits of a float.
The picked logit of all parts is that of the part with the highest score.

The statistics are fp32 [STATS, T]. A part is a split of a kernel's work or the shard of a rank; one kernel joins either
kind, in order. A part with no columns, or only minus infinities, has (LOWEST, 0, 0, ...), which needs no special case
when parts are joined.

    logprob = (picked - largest) - log(total)           lse = largest + log(total)
    entropy = log(total) - moment / total               spread = (mass * log(total) - below) / there
    log_sum_squares = log(sum(p^2)) = log(squares) - 2 * log(total)

A vocabulary sharded over ranks needs one collective in the forward: an all-gather of T * STATS elements per rank,
which every rank joins in the same order, so all ranks get the same bits. All-reduces would add in an unknown order, and
two would be necessary: the largest must be known before sums can be added. Backward needs no collective.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Present, capabilities_of, is_readable
from ..common.checks import checked_once, real, whole

# Limits of temperatures: within them, a temperature and its reciprocal are normal fp32 numbers.
COLDEST, HOTTEST = 2.0**-126, 2.0**126


# ---- arguments and outputs ------------------------------------------------------------------------------


class Softmax(NamedTuple):
    """Softmax over the vocabulary: this call's columns, the index that means "no target", and the transformation of
    logits x before the softmax, z = scale * cap(x), with cap(x) = softcap * tanh(x / softcap), or x."""

    start: int  # first column of this call
    vocab: int  # columns of the whole vocabulary
    ignore_index: int
    softcap: float | None  # the caller's softcap / logit_scale
    scale: float  # logit_scale / temperature

    @property
    def kind(self) -> int:
        """Transformation of the logits: PLAIN, SCALED or CAPPED."""
        return 2 if self.softcap is not None else 1 if self.scale != 1.0 else 0

    @property
    def cap(self) -> float:
        """Softcap as kernels take it: 0 for none."""
        return self.softcap or 0.0


class Wanted(NamedTuple):
    """Requested results of each token besides its log-probability and its lse."""

    entropy: bool
    spread: bool
    accuracy: bool
    squares: bool = False  # never computed by `cross_entropy`

    @property
    def statistics(self) -> int:
        """Number of statistics that these results require."""
        return 3 + self.entropy + 3 * self.spread + self.accuracy + self.squares


class Statistics(NamedTuple):
    stats: Tensor  # [STATS, T]

    @staticmethod
    def allocate(target: Tensor, dtype: torch.dtype, wanted: Wanted) -> Statistics:
        return Statistics(torch.empty((wanted.statistics, target.numel()), dtype=dtype, device=target.device))


class TokenResults(NamedTuple):
    """Results of each token, from the statistics of all parts."""

    # [...] each
    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None
    spread: Tensor | None
    hits: Tensor | None  # 1 where the target has the largest logit, else 0
    log_sum_squares: Tensor | None
    largest: Tensor  # [T], for the backward
    total: Tensor  # [T]
    shares: Tensor | None  # [2, T]: sum(w) / V and 1 / V

    @staticmethod
    def present(wanted: Wanted) -> Present:
        return True, True, *wanted, True, True, wanted.spread

    @staticmethod
    def allocate(target: Tensor, dtype: torch.dtype, wanted: Wanted) -> TokenResults:
        shape, rows = target.shape, target.numel()
        new = functools.partial(torch.empty, dtype=dtype, device=target.device)
        return TokenResults(
            new(shape),
            new(shape),
            new(shape) if wanted.entropy else None,
            new(shape) if wanted.spread else None,
            new(shape) if wanted.accuracy else None,
            new(shape) if wanted.squares else None,
            new(rows),
            new(rows),
            new((2, rows)) if wanted.spread else None,
        )


class LinearSampled(NamedTuple):
    """Results of `linear_sample`."""

    # [...] each
    tokens: Tensor  # int64; -1 for a row without a logit above minus infinity
    logprobs: Tensor


DIFFERENTIABLE = ("logprobs", "lse", "entropy", "spread")  # of `TokenResults`


@checked_once
def softmax_of(
    start: int,
    vocab: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
) -> Softmax:
    """Check the options of a softmax and return it."""
    if not -(2**31) <= whole("ignore_index", ignore_index) < 2**31:
        raise ValueError(f"ignore_index must fit 32 bits; got {ignore_index}")
    if softcap is not None:
        softcap = real("softcap", softcap)
        if not 0.0 < softcap < math.inf:
            raise ValueError(f"softcap must be above 0 and finite, or None for none; got {softcap}")
    temperature = real("temperature", temperature)
    if not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature must be above 0 and finite, from 2^-126 to 2^126: logits are divided by it; got {temperature}"
        )
    logit_scale = real("logit_scale", logit_scale)
    scale = logit_scale / temperature
    if not (COLDEST <= logit_scale <= HOTTEST and COLDEST <= scale <= HOTTEST):
        raise ValueError(
            "logit_scale must be above 0 and finite, and so must logit_scale / temperature, from 2^-126 to 2^126; got "
            f"{logit_scale} and {scale}"
        )
    return Softmax(start, vocab, ignore_index, None if softcap is None else softcap / logit_scale, scale)


# ---- labels ---------------------------------------------------------------------------------------------


def check_labels(target: Tensor, softmax: Softmax) -> None:
    """Raise an IndexError, as PyTorch does on the CPU, if a label is neither a class of the whole vocabulary nor
    ignore_index. Ops call this to validate targets, so compiled graphs check them too. Labels on a GPU are not read,
    because that would synchronize: kernels make the results of such tokens NaN. An emulated GPU behaves like a GPU."""
    if not is_readable(target) or not capabilities_of(target.device).is_cpu:
        return
    vocab = softmax.vocab
    if vocab and torch.equal(target.clamp(0, vocab - 1), target):
        return
    wrong = ((target < 0) | (target >= vocab)) & (target != softmax.ignore_index)
    if torch.is_nonzero(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        position = ", ".join(map(str, index))
        raise IndexError(
            f"target[{position}] is {target[index].item()}; there are {vocab} classes, 0 to {vocab - 1}. Label tokens "
            f"without a class with ignore_index, which is {softmax.ignore_index}"
        )


# ---- reference ------------------------------------------------------------------------------------------


def capped_reference(x: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | float]:
    """Return (z, dz/dx) for logits x."""
    scale, softcap = softmax.scale, softmax.softcap
    if softcap is None:
        return x * scale, scale
    t = torch.tanh(x / softcap)
    return torch.where(x == -torch.inf, x, softcap * t * scale), (1.0 - t * t) * scale


class Targets(NamedTuple):
    """Targets of all tokens, [T] each."""

    column: Tensor  # in the whole vocabulary; 0 for a token without a target
    valid: Tensor  # whether the token has a target
    wrong: Tensor  # whether its target is neither a column nor ignore_index

    @staticmethod
    def of(target: Tensor, softmax: Softmax) -> Targets:
        y = target.reshape(-1).long()
        inside, labeled = (y >= 0) & (y < softmax.vocab), y != softmax.ignore_index
        return Targets(torch.where(inside & labeled, y, 0), inside & labeled, labeled & ~inside)

    def masked(self, values: Tensor) -> Tensor:
        """Return values [T], but 0 for tokens without a target and NaN for targets that are no column."""
        return torch.where(self.valid, values, torch.where(self.wrong, torch.nan, 0.0))


def statistics_reference(
    z: Tensor, targets: Targets, classes: Tensor | None, start: int, wanted: Wanted
) -> Tensor:
    """Define the statistics [STATS, T] of z [T, V], which holds the vocabulary's columns from `start` on; `classes` [V]
    weighs the same columns. A token without a target has the statistics of no columns."""
    y, valid = targets.column, targets.valid
    rows, cols = z.shape
    z = torch.where(valid[:, None], z, -torch.inf)
    if cols == 0:
        z = z.new_full((rows, 1), -torch.inf)
        classes = None
    largest = z.amax(1).clamp(min=torch.finfo(z.dtype).min)
    t = z - largest[:, None]
    e = torch.exp(t)
    owned = valid & (y >= start) & (y < start + cols)
    picked = z.gather(1, torch.where(owned, y - start, 0)[:, None])[:, 0]
    stats = [largest, e.sum(1), torch.where(owned, picked, 0.0)]
    if wanted.entropy:
        stats.append(torch.where(e > 0, e * t, 0.0).sum(1))
    if wanted.spread:
        finite = z > -torch.inf
        w = torch.ones_like(z) if classes is None else classes.to(z.dtype).expand(z.shape)
        w = torch.where(finite, w, 0.0)
        stats += [torch.where(finite, w * t, 0.0).sum(1), w.sum(1), finite.sum(1).to(z.dtype)]
    if wanted.squares:
        stats.append(e.square().sum(1))
    if wanted.accuracy:
        bits = torch.int64 if z.dtype is torch.float64 else torch.int32
        best = torch.where(z.amax(1) > -torch.inf, z.argmax(1) + start, -1)
        stats.append(best.to(bits).view(z.dtype))
    return torch.stack(stats)


class NamedStatistics(NamedTuple):
    """Statistics by name, [T] or [parts, T] each."""

    largest: Tensor
    total: Tensor
    picked: Tensor
    moment: Tensor | None = None
    below: Tensor | None = None
    mass: Tensor | None = None
    there: Tensor | None = None
    squares: Tensor | None = None
    best: Tensor | None = None  # a column, as an integer

    @staticmethod
    def of(stats: Tensor, wanted: Wanted) -> NamedStatistics:
        """Split stats [..., STATS, T] into its rows, by name."""
        rows = list(stats.unbind(-2))
        largest, total, picked, *rows = rows
        moment = below = mass = there = squares = best = None
        if wanted.entropy:
            moment, *rows = rows
        if wanted.spread:
            below, mass, there, *rows = rows
        if wanted.squares:
            squares, *rows = rows
        if wanted.accuracy:
            (best,) = rows
            best = best.contiguous().view(torch.int64 if stats.dtype is torch.float64 else torch.int32)
        return NamedStatistics(largest, total, picked, moment, below, mass, there, squares, best)


def joined_reference(stats: Tensor, target: Tensor, softmax: Softmax, wanted: Wanted) -> TokenResults:
    """Define the results of stats [parts, STATS, T]."""
    targets = Targets.of(target, softmax)
    parts = NamedStatistics.of(stats, wanted)

    def per_token(values: Tensor) -> Tensor:
        return targets.masked(values).view(target.shape)

    largest, picked = parts.largest.amax(0), parts.picked.sum(0)
    shift = parts.largest - largest
    nonempty = parts.total > 0
    total = torch.where(nonempty, parts.total * torch.exp(shift), parts.total).sum(0)
    log_total = torch.log(total)
    entropy = spread = hits = log_sum_squares = shares = None
    if parts.moment is not None:
        moment = torch.where(nonempty, (parts.moment + shift * parts.total) * torch.exp(shift), 0.0).sum(0)
        entropy = per_token(log_total - moment / total)
    if parts.below is not None and parts.mass is not None and parts.there is not None:
        below = torch.where(parts.there > 0, parts.below + parts.mass * shift, 0.0).sum(0)
        mass, there = parts.mass.sum(0), parts.there.sum(0)
        spread = per_token((mass * log_total - below) / there)
        shares = torch.where(targets.valid, torch.stack([mass / there, 1.0 / there]), 0.0)
    if parts.squares is not None:
        squares = torch.where(nonempty, parts.squares * torch.exp(2.0 * shift), parts.squares).sum(0)
        log_sum_squares = per_token(torch.log(squares) - 2.0 * log_total)
    if parts.best is not None:
        # Several parts may have the largest logit: the first of them decides.
        first = (parts.largest == largest).int().argmax(0, keepdim=True)
        hit = parts.best.gather(0, first)[0] == targets.column
        hits = torch.where(targets.valid, hit.to(stats.dtype), 0.0).view(target.shape)
    return TokenResults(
        per_token((picked - largest) - log_total),
        per_token(largest + log_total),
        entropy,
        spread,
        hits,
        log_sum_squares,
        torch.where(targets.valid, largest, 0.0),
        torch.where(targets.valid, total, 1.0),
        shares,
    )
