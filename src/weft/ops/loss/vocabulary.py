"""A vocabulary in parts: what is known of a token's logits over one part, and how parts are joined.

Of the logits z of one token over a part of the columns, with class weights w (1 without):

    largest = max(z)               total = sum(exp(z - largest))        picked = z_y, or 0 if y is another part's
    moment = sum(exp(z - largest) * (z - largest))                      if the entropy is asked for
    below = sum(w * (z - largest))   mass = sum(w)   there = sum(1)     if the spread is, over columns above -infinity
    best = the first column with the largest z                          if the accuracy is, as the bits of a float

These statistics are fp32 [STATS, T]. A part is a split of a kernel's work or the shard of a rank: one kernel joins
either, in order. Of nothing, and of minus infinities alone, they are (LOWEST, 0, 0, ...), which join like any others.

    logprob = (picked - largest) - log(total)           lse = largest + log(total)
    entropy = log(total) - moment / total               spread = (mass * log(total) - below) / there

A vocabulary that is sharded over ranks takes one collective forward: an all-gather of T * STATS numbers of each rank,
which every rank joins in the same order. So ranks agree in every bit, and with an all-reduce neither the order of the
additions would be known nor would one do: the largest must be known before sums can be added. Backward is local.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...language import tl
from ...runtime import Launch, kernel
from ...tiles.softmax import LOWEST, merge_moments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PLAIN, SCALED, CAPPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what becomes of logits
FEW = tl.constexpr(3)  # statistics that there always are: largest, total, picked
JOIN_ROWS = 128  # tokens of a program that joins statistics


class Joined(NamedTuple):
    """What statistics come to: of each token [...] the results, [T] what a backward needs, and None what was not asked
    for."""

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None
    spread: Tensor | None
    hits: Tensor | None
    largest: Tensor
    total: Tensor
    shares: Tensor | None  # [2, T]: sum(w) / V and 1 / V

    def constants(self) -> Iterable[Tensor]:
        """What has no gradient."""
        return (t for t in (self.hits, self.largest, self.total, self.shares) if t is not None)

    @staticmethod
    def of(outputs: Iterable[Tensor], entropy: bool, spread: bool, accuracy: bool) -> Joined:
        """The list of an op's outputs by name."""
        rest = iter(outputs)
        wanted = (True, True, entropy, spread, accuracy, True, True, spread)
        return Joined(*(next(rest) if want else None for want in wanted))  # type: ignore[arg-type]


def kind_of(softcap: float | None, scale: float) -> int:
    """PLAIN, SCALED or CAPPED."""
    return 2 if softcap is not None else 1 if scale != 1.0 else 0


def count_statistics(entropy: bool, spread: bool, accuracy: bool) -> int:
    return 3 + entropy + 3 * spread + accuracy


# ---- reference ------------------------------------------------------------------------------------------


def capped_reference(x: Tensor, softcap: float | None, scale: float) -> tuple[Tensor, Tensor | float]:
    """(z, dz/dx) of logits x."""
    if softcap is None:
        return x * scale, scale
    t = torch.tanh(x / softcap)
    return torch.where(x == -torch.inf, x, softcap * t * scale), (1.0 - t * t) * scale


def split_targets(target: Tensor, vocab: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(targets with 0 where there is none, which there are, which are no column though not ignored) [T]."""
    y = target.reshape(-1).long()
    inside, given = (y >= 0) & (y < vocab), y != ignore_index
    return torch.where(inside & given, y, 0), inside & given, given & ~inside


def statistics_reference(
    z: Tensor, y: Tensor, valid: Tensor, classes: Tensor | None, start: int, entropy: bool, spread: bool,
    accuracy: bool,
) -> Tensor:  # fmt: skip
    """The definition: [STATS, T] of z [T, V], the columns from `start` on, and classes [V] of the same columns. Tokens
    that are not valid have no columns."""
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
    rows_of = [largest, e.sum(1), torch.where(owned, picked, 0.0)]
    if entropy:
        rows_of.append(torch.where(e > 0, e * t, 0.0).sum(1))
    if spread:
        there = z > -torch.inf
        w = torch.ones_like(z) if classes is None else classes.to(z.dtype).expand(z.shape)
        w = torch.where(there, w, 0.0)
        rows_of += [torch.where(there, w * t, 0.0).sum(1), w.sum(1), there.sum(1).to(z.dtype)]
    if accuracy:
        bits = torch.int64 if z.dtype is torch.float64 else torch.int32
        best = torch.where(z.amax(1) > -torch.inf, z.argmax(1) + start, -1)
        rows_of.append(best.to(bits).view(z.dtype))
    return torch.stack(rows_of)


def joined_reference(
    stats: Tensor, target: Tensor, vocab: int, ignore_index: int, entropy: bool, spread: bool, accuracy: bool
) -> list[Tensor]:
    """The tensors of `Joined` that are asked for, of stats [parts, STATS, T]."""
    y, valid, wrong = split_targets(target, vocab, ignore_index)

    def told(value: Tensor) -> Tensor:
        """0 where there is no target, NaN where it is none of the columns."""
        return torch.where(valid, value, torch.where(wrong, torch.nan, 0.0)).view(target.shape)

    rows_of = iter(stats.unbind(1))
    largests, totals, picked = next(rows_of), next(rows_of), next(rows_of).sum(0)
    largest = largests.amax(0)
    down = largests - largest
    some = totals > 0
    total = torch.where(some, totals * torch.exp(down), totals).sum(0)
    log_total = torch.log(total)
    outputs = [told((picked - largest) - log_total), told(largest + log_total)]
    if entropy:
        moment = torch.where(some, (next(rows_of) + down * totals) * torch.exp(down), 0.0).sum(0)
        outputs.append(told(log_total - moment / total))
    if spread:
        below, mass, there = next(rows_of), next(rows_of), next(rows_of)
        below = torch.where(there > 0, below + mass * down, 0.0).sum(0)
        mass, there = mass.sum(0), there.sum(0)
        outputs.append(told((mass * log_total - below) / there))
    if accuracy:
        best = next(rows_of).contiguous().view(torch.int64 if stats.dtype is torch.float64 else torch.int32)
        # Of the parts with the largest the first one.
        first = best.gather(0, (largests == largest).int().argmax(0, keepdim=True))[0]
        outputs.append(torch.where(valid, (first == y).to(stats.dtype), 0.0).view(target.shape))
    outputs += [torch.where(valid, largest, 0.0), torch.where(valid, total, 1.0)]
    if spread:
        outputs.append(torch.where(valid, torch.stack([mass / there, 1.0 / there]), 0.0))
    return outputs


# ---- kernel ---------------------------------------------------------------------------------------------


@kernel
def _join_statistics_kernel(
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1], or None: by which statistics are numbered, else they are in the order of tokens
    stats_ptr,  # fp32 [parts, STATS, rows]
    joined_ptr,  # fp32 [STATS, rows], or None: then the results are wanted, not statistics
    logprob_ptr,  # fp32 [rows], and so the following, or None
    lse_ptr,
    entropy_ptr,
    spread_ptr,
    hit_ptr,
    largest_ptr,
    total_ptr,
    shares_ptr,  # [2, rows]: sum(w) / V and 1 / V
    rows,
    parts,
    vocab,
    ignore_index,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,
    ACCURACY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Join the statistics of parts, in order, and make the results of them."""
    STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + ACCURACY
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = number < rows
    row = number
    if order_ptr is not None:
        row = tl.load(order_ptr + number, mask=exists, other=0).to(tl.int64)
    y = tl.load(target_ptr + row, mask=exists, other=0)
    if order_ptr is not None:
        live = number < tl.load(order_ptr + rows)
    else:
        live = exists & (y != ignore_index) & (y >= 0) & (y < vocab)
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    below = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    there = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS,), -1, tl.int32)
    for part in range(parts):
        in_ptr = stats_ptr + tl.cast(part, tl.int64) * STATS * rows + number
        largest2 = tl.load(in_ptr, mask=live, other=LOWEST)
        total2 = tl.load(in_ptr + rows, mask=live, other=0.0)
        picked += tl.load(in_ptr + 2 * rows, mask=live, other=0.0)
        moment2 = tl.zeros((ROWS,), tl.float32)
        if ENTROPY:
            moment2 = tl.load(in_ptr + FEW * rows, mask=live, other=0.0)
        if SPREAD:
            more_ptr = in_ptr + (FEW + ENTROPY) * rows
            below2 = tl.load(more_ptr, mask=live, other=0.0)
            mass2 = tl.load(more_ptr + rows, mask=live, other=0.0)
            there2 = tl.load(more_ptr + 2 * rows, mask=live, other=0.0)
            joined = tl.maximum(largest, largest2)
            # A part without columns has no largest to come down from.
            below = tl.where(there > 0.0, below + mass * (largest - joined), 0.0)
            below += tl.where(there2 > 0.0, below2 + mass2 * (largest2 - joined), 0.0)
            mass += mass2
            there += there2
        if ACCURACY:
            at = tl.load(in_ptr + (STATS - 1) * rows, mask=live, other=0.0).to(tl.int32, bitcast=True)
            best = tl.where(largest2 > largest, at, best)
        largest, total, moment = merge_moments(largest, total, moment, largest2, total2, moment2)
    if joined_ptr is not None:
        out_ptr = joined_ptr + row
        tl.store(out_ptr, largest, mask=exists)
        tl.store(out_ptr + rows, total, mask=exists)
        tl.store(out_ptr + 2 * rows, picked, mask=exists)
        if ENTROPY:
            tl.store(out_ptr + FEW * rows, moment, mask=exists)
        if SPREAD:
            tl.store(out_ptr + (FEW + ENTROPY) * rows, below, mask=exists)
            tl.store(out_ptr + (FEW + ENTROPY + 1) * rows, mass, mask=exists)
            tl.store(out_ptr + (FEW + ENTROPY + 2) * rows, there, mask=exists)
        if ACCURACY:
            tl.store(out_ptr + (STATS - 1) * rows, best.to(tl.float32, bitcast=True), mask=exists)
    else:
        nothing = tl.where(y == ignore_index, 0.0, float("nan"))
        log_total = tl.log(total)
        tl.store(logprob_ptr + row, tl.where(live, (picked - largest) - log_total, nothing), mask=exists)
        tl.store(lse_ptr + row, tl.where(live, largest + log_total, nothing), mask=exists)
        if ENTROPY:
            tl.store(entropy_ptr + row, tl.where(live, log_total - moment / total, nothing), mask=exists)
        if SPREAD:
            spread = (mass * log_total - below) / there
            tl.store(spread_ptr + row, tl.where(live, spread, nothing), mask=exists)
            tl.store(shares_ptr + row, tl.where(live, mass / there, 0.0), mask=exists)
            tl.store(shares_ptr + rows + row, tl.where(live, 1.0 / there, 0.0), mask=exists)
        if ACCURACY:
            tl.store(hit_ptr + row, tl.where(live & (best == y.to(tl.int32)), 1.0, 0.0), mask=exists)
        tl.store(largest_ptr + row, tl.where(live, largest, 0.0), mask=exists)
        tl.store(total_ptr + row, tl.where(live, total, 1.0), mask=exists)


def allocate_joined(
    rows_like: Tensor, dtype: torch.dtype, entropy: bool, spread: bool, accuracy: bool
) -> list[Tensor]:
    """The tensors of `Joined` that are asked for, for targets like `rows_like`."""
    device, rows = rows_like.device, rows_like.numel()
    count = 2 + entropy + spread + accuracy
    outputs = [torch.empty(rows_like.shape, dtype=dtype, device=device) for _ in range(count)]
    outputs += [torch.empty((rows,), dtype=dtype, device=device) for _ in range(2)]
    if spread:
        outputs.append(torch.empty((2, rows), dtype=dtype, device=device))
    return outputs


def launch_join(
    target: Tensor, order: Tensor | None, stats: Tensor, outputs: list[Tensor], vocab: int, ignore_index: int,
    entropy: bool, spread: bool, accuracy: bool,
) -> None:  # fmt: skip
    """Join stats [parts, STATS, T] into outputs: one tensor of statistics [STATS, T], or those of
    `allocate_joined`."""
    pointers: tuple[Tensor | None, ...]
    if len(outputs) == 1:
        pointers = (outputs[0], *(None,) * 8)
    else:
        pointers = (None, *Joined.of(outputs, entropy, spread, accuracy))
    rows = target.numel()
    launch = Launch.of(
        _join_statistics_kernel,
        num_warps=4,
        ENTROPY=entropy,
        SPREAD=spread,
        ACCURACY=accuracy,
        ROWS=JOIN_ROWS,
    )
    launch(
        (-(-rows // JOIN_ROWS), 1, 1),
        (target, order, stats, *pointers),
        (rows, stats.shape[0], vocab, ignore_index),
    )


# ---- ranks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocabShard:
    """The part of a vocabulary that this rank holds: columns `start` to `stop`, without that, of `size`.

    Shards may be of any lengths, empty ones too; over all ranks of `group`, in the order of the ranks, they are the
    vocabulary. Targets and weights of classes are those of the whole vocabulary, the same on every rank.

    >>> import torch, torch.distributed as dist, weft
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard = weft.VocabShard.of(dist.group.WORLD, 1000)  # of one rank: all of it
    >>> logits, target = torch.randn(6, 1000), torch.arange(6)
    >>> loss = weft.cross_entropy(logits, target, shard=shard)
    >>> torch.testing.assert_close(loss, weft.cross_entropy(logits, target))
    >>> dist.destroy_process_group()
    """

    group: ProcessGroup
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup, size: int) -> VocabShard:
        """This rank's shard if the vocabulary is cut as `torch.chunk` and `DTensor` do: all shards of the same length,
        but for the last ones, which may be shorter or empty."""
        length = -(-size // group.size())
        start, stop = (min(rank * length, size) for rank in (group.rank(), group.rank() + 1))
        return cls(group, start, stop, size)

    def check(self, length: int) -> None:
        """Whether `length` columns can be this shard's."""
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(
                f"a shard from column {self.start} to {self.stop} is no part of a vocabulary of {self.size} columns"
            )
        if length != self.stop - self.start:
            raise ValueError(
                f"the shard from column {self.start} to {self.stop} has {self.stop - self.start} columns; "
                f"got {length}: give this rank's part of the vocabulary alone"
            )

    def gather(self, stats: Tensor) -> Tensor:
        """[STATS, T] of every rank, in order: [ranks, STATS, T]."""
        gathered = stats.new_empty((self.group.size(), *stats.shape))
        collectives = torch.distributed
        if hasattr(collectives, "all_gather_single"):
            collectives.all_gather_single(gathered.flatten(0, 1), stats, group=self.group)
        else:  # its name before PyTorch 2.13
            collectives.all_gather_into_tensor(gathered.flatten(0, 1), stats, group=self.group)
        return gathered

    def sum_gradient(self, x: Tensor) -> Tensor:
        """x itself, whose gradient is the sum of the ranks' gradients."""
        return x if not x.requires_grad else _SumGradient.apply(x, self.group)


class _SumGradient(torch.autograd.Function):
    """What every rank has the same of, used by each for its shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
