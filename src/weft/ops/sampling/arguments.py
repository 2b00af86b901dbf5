"""Arguments and outputs of selections and draws."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
    logits: Tensor  # [B, V]
    temperature: Tensor | None  # fp32 [B]; or the number below
    top_k: Tensor | None  # int32 or int64 [B]: tokens to keep; all if it is below 1
    top_p: Tensor | None  # fp32 [B]: mass to keep
    min_p: Tensor | None  # fp32 [B]: probability to keep, as a part of the largest
    seed: Tensor  # int64 [B]
    step: Tensor  # int64 [B]
    temperature_number: float
    top_k_number: int
    top_p_number: float
    min_p_number: float
    joint: bool  # the mass of top_p is measured on all tokens, not on the k largest

    @property
    def limited(self) -> bool:
        """Whether a request may draw from a part of the tokens."""
        given = self.top_k, self.top_p, self.min_p
        numbers = self.top_k_number > 0, self.top_p_number < 1.0, self.min_p_number > 0.0
        return any(t is not None for t in given) or any(numbers)


class Sampled(NamedTuple):
    """Drawn tokens and their log-probabilities among all tokens, at the temperature."""

    tokens: Tensor  # int64 [...]
    logprobs: Tensor  # fp32 [...]
    lse: Tensor  # fp32 [...]: log-sum-exp of the logits divided by the temperature
