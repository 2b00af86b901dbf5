"""Launches of draws from a linear head: the products of `linear_logprobs`, which draw each token's target, or list the
largest logits for another kernel to draw from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime import Launch, capabilities_of, contiguous_copy
from ...common.rows import contiguous
from ...loss.join import launch_join
from ...loss.linear_logprobs.launch import Choice, Operands, launch_splits
from ...loss.statistics import LinearSampled, Statistics, Wanted
from ..draw_kernels import Requests
from ..launch import largest_columns
from ..limit_kernels import choose_listed_kernel
from ..loads import IntegerArgument, NumberArgument
from ..parameters import Integer, Number
from .arguments import STATISTICS, LinearSampleArgs

_PLAIN = Wanted(False, False, False)
ROOM = 4096  # logits from which a program draws


class Lists(NamedTuple):
    """Statistics, and lists among which are the largest logits of each token."""

    stats: Tensor  # [parts, STATISTICS, T]
    values: Tensor  # fp32 [T, n]: minus infinity for none
    tokens: Tensor  # int32 [T, n] in ascending order, -1 for none


def _lists(a: LinearSampleArgs) -> Lists:
    """Return what this rank's products list, or what all ranks have listed."""
    if a.stats is None:
        choice = Choice(listed=1 << (a.top_k - 1).bit_length())
        stats, (value, token) = launch_splits(Operands(a.hidden, a.weight, a.bias), choice, a.softmax, _PLAIN)
        assert value is not None
        assert token is not None
        return Lists(stats, value.flatten(1), token.flatten(1))
    listed = a.stats[:, STATISTICS:].permute(2, 0, 1)  # [T, ranks, 2 * top_k]
    values, tokens = (x.flatten(1) for x in listed.split(a.top_k, 2))
    stats = contiguous_copy(a.stats[:, :STATISTICS])  # the draw is written to it
    return Lists(stats, values, tokens.view(torch.int32))


def launch_linear_sample_statistics(o: Statistics, a: LinearSampleArgs) -> None:
    if a.top_k == 0:
        _launch_drawn(o, a)
        return
    stats, values, tokens = _lists(a)
    launch_join(Statistics(o.stats[:STATISTICS]), stats, None, None, a.softmax, _PLAIN)
    if values.shape[1] > a.top_k:
        place = largest_columns(values, a.top_k, a.top_k)
        at = place.clamp(min=0).long()
        values = values.gather(1, at).masked_fill(place < 0, -torch.inf)
        tokens = tokens.gather(1, at).masked_fill(place < 0, -1)
    # A shard may have fewer columns.
    missing = a.top_k - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    o.stats[STATISTICS:] = torch.cat([values, tokens.view(torch.float32)], 1).t()


def _launch_choice(lists: Lists, a: LinearSampleArgs) -> None:
    """Draw from the lists, and let the statistics of the first part draw the same."""
    place, (rows, width) = None, lists.values.shape
    if width > ROOM:
        place = largest_columns(lists.values, a.top_k, ROOM)
    count = width if place is None else place.shape[1]
    requests = Requests(
        NumberArgument.of(Number(None, 1.0), rows),
        NumberArgument.of(Number(None, float(a.top_k)), rows),
        NumberArgument.of(a.top_p, rows),
        NumberArgument.of(a.min_p, rows),
        IntegerArgument.of(Integer(a.seed, 0), rows),
        IntegerArgument.of(Integer(a.step, 0), rows),
    )
    block = 1 << max(count - 1, 15).bit_length()
    warps = max(1, min(8, block // (8 * capabilities_of(lists.stats.device).warp_size)))
    Launch.of(choose_listed_kernel, num_warps=warps, STATS=STATISTICS, COUNT=block)(
        (rows, 1, 1),
        *choose_listed_kernel.arguments(
            place_ptr=place,
            value_ptr=lists.values,
            listed_ptr=lists.tokens,
            requests=requests,
            stats_ptr=lists.stats,
            rows=rows,
            count=count,
            width=width,
        ),
    )


def _launch_drawn(o: LinearSampled | Statistics, a: LinearSampleArgs) -> None:
    """Draw from all tokens."""
    choice = Choice(seed=contiguous(a.seed), step=contiguous(a.step))
    stats, _ = launch_splits(Operands(a.hidden, a.weight, a.bias), choice, a.softmax, _PLAIN)
    launch_join(o, stats, None, None, a.softmax, _PLAIN)


def launch_linear_sample(o: LinearSampled, a: LinearSampleArgs) -> None:
    if a.top_k:
        lists = _lists(a)
        _launch_choice(lists, a)
        launch_join(o, lists.stats, None, None, a.softmax, _PLAIN)
    elif a.stats is None:
        _launch_drawn(o, a)
    else:
        launch_join(o, contiguous(a.stats), None, None, a.softmax, _PLAIN)
