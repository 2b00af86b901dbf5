"""Launches of draws from a linear head: the products of `linear_logprobs`, which draw each token's target."""

from __future__ import annotations

from ...common.rows import contiguous
from ...loss.join import launch_join
from ...loss.linear_logprobs.launch import Choice, Operands, launch_products
from ...loss.statistics import LinearSampled, Statistics, Wanted
from .arguments import LinearSampleArgs

_PLAIN = Wanted(False, False, False)


def launch_linear_sample_statistics(o: LinearSampled | Statistics, a: LinearSampleArgs) -> None:
    choice = Choice(seed=contiguous(a.seed), step=contiguous(a.step))
    launch_products(o, Operands(a.hidden, a.weight, a.bias), choice, a.softmax, _PLAIN)


def launch_linear_sample(o: LinearSampled, a: LinearSampleArgs) -> None:
    if a.stats is None:
        launch_linear_sample_statistics(o, a)
    else:
        launch_join(o, a.stats.contiguous(), None, None, a.softmax, _PLAIN)
