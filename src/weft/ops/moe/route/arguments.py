"""Arguments and outputs of routing and its backward."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES = get_args(Score)


class Weighing(NamedTuple):
    """Options that turn logits into the weights of the chosen experts."""

    score: str
    post_softmax: bool
    renormalize: bool
    eps: float
    scale: float


class Groups(NamedTuple):
    """Options for restricting a token to its best groups of experts."""

    number: int
    topk: int  # groups that a token may choose from
    best: int  # number of best experts whose sum is the group's score
    masked_is_zero: bool  # experts of other groups count as 0, not as minus infinity


class RouteArgs(NamedTuple):
    logits: Tensor  # [..., E]
    bias: Tensor | None  # [E]
    k: int
    weighing: Weighing
    groups: Groups
    weight_dtype: torch.dtype
    index_dtype: torch.dtype
    scores: bool  # return the scores of all experts
    balance: bool  # return score_sums and score_counts
    z: bool


class RouteOutputs(NamedTuple):
    weights: Tensor  # [..., k]
    indices: Tensor  # [..., k]
    counts: Tensor  # int32 [E]
    scores: Tensor | None  # fp32 [..., E]
    score_sums: Tensor | None  # fp32 [E]
    score_counts: Tensor | None  # int32 [E]
    z: Tensor | None  # fp32, sum over tokens of l^2


class RouteBackwardArgs(NamedTuple):
    logits: Tensor
    indices: Tensor
    dweights: Tensor | None
    dscores: Tensor | None
    dscore_sums: Tensor | None
    dz: Tensor | None
    weighing: Weighing


class RouteGradients(NamedTuple):
    logits: Tensor
