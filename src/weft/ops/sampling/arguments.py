"""Arguments and outputs of selections and draws."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .parameters import Integer, Number

LONGEST_SELECTION = 2048  # elements of a row that `top_k` returns at most


class TopKArgs(NamedTuple):
    x: Tensor  # [..., V]
    k: int
    starts: Tensor | None  # int32 or int64 [...]: the first column that counts
    ends: Tensor | None  # int32 or int64 [...]: the column after the last that counts


class TopK(NamedTuple):
    """The largest elements of each row in descending order. Where a row has fewer, values are minus infinity and
    indices -1."""

    values: Tensor  # [..., k], in the dtype of x
    indices: Tensor  # int64 [..., k]


class SampleArgs(NamedTuple):
    logits: Tensor  # [..., V]
    temperature: Number
    top_k: Number  # tokens to keep; all if it is below 1
    top_p: Number  # mass to keep
    min_p: Number  # probability to keep, as a part of the largest
    seed: Integer
    step: Integer
    joint: bool  # the mass of top_p is measured on all tokens, not on the k largest

    @property
    def limited(self) -> bool:
        """Whether a request may draw from a part of the tokens."""
        return not (self.top_k.is_always(0.0) and self.top_p.is_always(1.0) and self.min_p.is_always(0.0))


class Sampled(NamedTuple):
    """Drawn tokens and their log-probabilities among all tokens, at the temperature."""

    tokens: Tensor  # int64 [...]
    logprobs: Tensor  # fp32 [...]
    lse: Tensor  # fp32 [...]: log-sum-exp of the logits divided by the temperature
