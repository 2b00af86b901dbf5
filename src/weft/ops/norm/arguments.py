"""Arguments and outputs of norms and their backward."""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from ...runtime import G
from ..common.results import Result, ResultOptions


class NormArgs(NamedTuple):
    x: Tensor  # [..., K]
    weight: Tensor | None  # [K]
    bias: Tensor | None  # [K]
    residual: Tensor | None  # of x's shape
    pre_bias: Tensor | None  # [K]
    residual_gate: Tensor | None  # [samples, K]; a sample may be one row
    scale: Tensor | None  # [samples, K], of the modulation; a sample may be one row
    shift: Tensor | None  # [samples, K]
    eps: float
    weight_offset: float
    kind: str  # "rms" or "layer"
    casting: str
    unrounded_sum: bool  # the sum with the residual is normalized before its rounding
    stats: bool  # rstd and mean are stored, for the backward
    result: ResultOptions

    @property
    def keeps_h(self) -> bool:
        """Return whether h is stored: a call with a residual returns it, and the backward reads it if it is not x."""
        return self.residual is not None or (self.pre_bias is not None and self.stats)

    @property
    def h_dtype(self) -> torch.dtype:
        """Dtype of h: the PyTorch promotion of the dtypes of x and the residual."""
        dtype = self.x.dtype
        if self.residual is None or self.residual.dtype is dtype:
            return dtype
        return torch.promote_types(dtype, self.residual.dtype)


class NormOutputs(NamedTuple):
    result: Result
    residual: Tensor | None  # h, if it is the sum with a residual, or a sum that the backward reads
    rstd: Tensor | None  # fp32 [rows]
    mean: Tensor | None  # fp32 [rows], of a LayerNorm


class NormGradients(NamedTuple, Generic[G]):
    x: G
    weight: G
    bias: G
    scale: G
    shift: G
    residual: G  # if it differs from that of x, because of a gate or another dtype
    residual_gate: G
    pre_bias: G


class NormBackwardArgs(NamedTuple):
    h: Tensor  # [..., K]; with unrounded_sum the residual
    dy: Tensor
    dresidual: Tensor | None
    x: Tensor | None  # of h's shape; read for the gradient of residual_gate and with unrounded_sum
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    rstd: Tensor
    mean: Tensor | None
    weight_offset: float
    casting: str
    unrounded_sum: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype
    needs: NormGradients[bool]
