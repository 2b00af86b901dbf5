"""Arguments and outputs of cross entropy, its statistics and its backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..reduction import LossOptions
from ..statistics import Softmax, Wanted


class CrossEntropyArgs(NamedTuple):
    logits: Tensor  # [..., V]
    target: Tensor  # [...]
    weight: Tensor | None  # [V], class weights
    softmax: Softmax
    loss: LossOptions
    wanted: Wanted
    inplace: bool  # the backward writes the gradient over the logits


class CrossEntropyOutputs(NamedTuple):
    loss: Tensor  # a scalar, or [...]
    lse: Tensor  # [...]
    entropy: Tensor | None  # [...]
    accuracy: Tensor | None  # like the loss
    largest: Tensor  # [T]; this and all fields below are saved for the backward
    total: Tensor  # [T]
    inverse: Tensor | None  # a scalar, if the reduction is a mean: 1 / sum(w_y)
    smooth: Tensor | None  # [2, T], with label smoothing: a / V * sum(w), and a / V


class StatisticsArgs(NamedTuple):
    logits: Tensor  # [..., columns of this rank's shard]
    target: Tensor  # [...], columns of the whole vocabulary
    weight: Tensor | None  # [columns]
    softmax: Softmax
    wanted: Wanted


class ShardedArgs(NamedTuple):
    stats: Tensor  # [ranks, STATS, T]
    # This rank's shard, read by the backward.
    logits: Tensor
    target: Tensor
    weight: Tensor | None
    softmax: Softmax
    wanted: Wanted
    inplace: bool


class CrossEntropyBackwardArgs(NamedTuple):
    """Arguments of the backward. A gradient is None if its result was not used.

    With `dspread`, `dloss` is the gradient of the negative log-probability without class weights and smoothing: class
    weights then belong to the spread alone.
    """

    logits: Tensor  # [..., V], or a shard
    target: Tensor
    weight: Tensor | None
    largest: Tensor
    total: Tensor
    inverse: Tensor | None
    smooth: Tensor | None
    entropy: Tensor | None
    dloss: Tensor | None  # a scalar, or [...]
    dlse: Tensor | None  # [...]
    dentropy: Tensor | None
    dspread: Tensor | None
    softmax: Softmax
    label_smoothing: float
    z_loss: float


class LogitsGradient(NamedTuple):
    logits: Tensor
