"""Arguments of draws from a linear head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...loss.statistics import Softmax


class LinearSampleArgs(NamedTuple):
    hidden: Tensor  # [..., H]
    weight: Tensor  # [columns, H]: the whole vocabulary, or a shard of it
    bias: Tensor | None  # [columns]
    # int64, one element or [...]; None to take the largest logit
    seed: Tensor | None
    step: Tensor | None
    stats: Tensor | None  # [ranks, STATS, T] if the vocabulary is sharded, and the op only joins them
    softmax: Softmax
