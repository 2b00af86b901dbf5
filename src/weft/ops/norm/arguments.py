"""What norms and their backward take and give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..common.results import Result, ResultOptions


class NormArgs(NamedTuple):
    x: Tensor  # [..., K]
    weight: Tensor | None  # [K]
    bias: Tensor | None  # [K]
    residual: Tensor | None  # like x
    pre_bias: Tensor | None  # [K]
    residual_gate: Tensor | None  # [samples, K]; a sample may be one row
    scale: Tensor | None  # [samples, K], of the modulation; a sample may be one row
    shift: Tensor | None  # [samples, K]
    eps: float
    weight_offset: float
    kind: str  # "rms" or "layer"
    casting: str
    stats: bool  # rstd and mean are wanted, for the backward
    result: ResultOptions

    @property
    def keeps_h(self) -> bool:
        """Whether h is stored: it is returned with a residual, and the backward reads it where it is not x."""
        return self.residual is not None or (self.pre_bias is not None and self.stats)


class NormOutputs(NamedTuple):
    result: Result
    residual: Tensor | None  # h, if it is the sum with a residual, or a sum that the backward reads
    rstd: Tensor | None  # fp32 [rows]
    mean: Tensor | None  # fp32 [rows], of a LayerNorm


class NormNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    shift: bool = False
    residual: bool = False  # where it is not that of x
    residual_gate: bool = False
    pre_bias: bool = False


class NormGradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    residual: Tensor | None
    residual_gate: Tensor | None
    pre_bias: Tensor | None


class NormBackwardArgs(NamedTuple):
    h: Tensor  # [..., K]
    dy: Tensor
    dresidual: Tensor | None
    x: Tensor | None  # like h; for the gradient of residual_gate alone
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    rstd: Tensor
    mean: Tensor | None
    weight_offset: float
    casting: str
    needs: NormNeeds
