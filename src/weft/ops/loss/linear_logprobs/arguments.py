"""Arguments and outputs of the log-probabilities of a linear head, their statistics and their backward."""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from typing_extensions import NamedTuple

from ....runtime import G
from ..statistics import Softmax, TokenResults, Wanted


class LinearStatisticsArgs(NamedTuple):
    hidden: Tensor  # [..., H]
    weight: Tensor  # [columns, H]: the whole vocabulary, or a shard of it
    bias: Tensor | None  # [columns]
    target: Tensor  # [...], columns of the whole vocabulary
    classes: Tensor | None  # [columns], class weights for the spread
    softmax: Softmax
    wanted: Wanted


class LinearLogprobsArgs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    classes: Tensor | None
    stats: Tensor | None  # [ranks, STATS, T] if the vocabulary is sharded, and the op only joins them
    softmax: Softmax
    wanted: Wanted
    skip_below: float | None


class LinearLogprobsOutputs(NamedTuple):
    tokens: TokenResults
    order: Tensor  # int32 [T + 1]: tokens with a target, the other tokens, and the number of tokens with a target


class HeadGradients(NamedTuple, Generic[G]):
    hidden: G
    weight: G
    bias: G


class LinearBackwardArgs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    classes: Tensor | None
    largest: Tensor
    total: Tensor
    entropy: Tensor | None
    shares: Tensor | None
    order: Tensor
    # Upstream gradients of the results, [...] each; None for a result that was not used.
    dlogprob: Tensor | None
    dlse: Tensor | None
    dentropy: Tensor | None
    dspread: Tensor | None
    softmax: Softmax
    skip_below: float | None
    needs: HeadGradients[bool]


AnyHeadArgs = LinearStatisticsArgs | LinearLogprobsArgs | LinearBackwardArgs


def order_shape(target: Tensor) -> tuple[int]:
    return (target.numel() + 1,)
