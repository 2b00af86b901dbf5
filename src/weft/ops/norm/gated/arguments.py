"""The arguments and outputs of gated norms and their backward."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from ...common.results import Result, ResultOptions

Activation = Literal["sigmoid", "silu"]


class GatedNormArgs(NamedTuple):
    x: Tensor  # [..., K]
    gate: Tensor  # like x, or [L, B, ..., K] of an x [B, L, ..., K]
    weight: Tensor | None  # [K]
    groups: int
    act: str
    eps: float
    weight_offset: float
    casting: str
    transpose: bool
    stats: bool  # rstd is wanted, for the backward
    result: ResultOptions


class GatedNormOutputs(NamedTuple):
    result: Result
    rstd: Tensor | None  # fp32 [rows of y * groups]


class GatedNormNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = False
    gate: bool = False
    weight: bool = False


class GatedNormGradients(NamedTuple):
    x: Tensor | None
    gate: Tensor | None
    weight: Tensor | None


class GatedNormBackwardArgs(NamedTuple):
    x: Tensor
    gate: Tensor
    dy: Tensor
    weight: Tensor | None
    rstd: Tensor
    groups: int
    act: str
    weight_offset: float
    casting: str
    transpose: bool
    needs: GatedNormNeeds
