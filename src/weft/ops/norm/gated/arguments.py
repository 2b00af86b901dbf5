"""Arguments and outputs of gated norms and their backward."""

from __future__ import annotations

from typing import Generic, Literal

from torch import Tensor
from typing_extensions import NamedTuple

from ....runtime import G
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
    stats: bool  # rstd is stored, for the backward
    result: ResultOptions


class GatedNormOutputs(NamedTuple):
    result: Result
    rstd: Tensor | None  # fp32 [rows of y * groups]


class GatedNormGradients(NamedTuple, Generic[G]):
    x: G
    gate: G
    weight: G


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
    needs: GatedNormGradients[bool]
