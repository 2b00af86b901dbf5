"""Arguments of draws from a linear head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...loss.statistics import Softmax
from ..parameters import Number

STATISTICS = 5  # of a token that is drawn: largest, total, picked, highest, best
LONGEST_LIST = 64  # logits from which `top_k` draws at most


class LinearSampleArgs(NamedTuple):
    hidden: Tensor  # [..., H]
    weight: Tensor  # [columns, H]: the whole vocabulary, or a shard of it
    bias: Tensor | None  # [columns]
    # int64, one element or [...]; None to take the largest logit
    seed: Tensor | None
    step: Tensor | None
    stats: Tensor | None  # [ranks, STATS, T] if the vocabulary is sharded, and the op only joins them
    softmax: Softmax
    top_k: int = 0  # tokens to draw from; 0 for all
    top_p: Number = Number(None, 1.0)  # mass to keep of these
    min_p: Number = Number(None, 0.0)  # probability to keep of these, as a part of the largest
