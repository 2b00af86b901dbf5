"""The arguments and outputs of `matmul`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..common.results import Result, ResultOptions


class OperandCodes(NamedTuple):
    """The copy of a quantised operand whose scales lie along K, as [rows, K]; its strides may be any."""

    data: Tensor | None = None
    scale: Tensor | None = None
    whole: Tensor | None = None  # nvfp4's scale of the whole tensor
    format: str | None = None  # as which the copy is a row-wise one


PLAIN = OperandCodes()


class MatmulArgs(NamedTuple):
    a: Tensor  # [M, K] or [batch, M, K]; a stand-in if there are codes
    b: Tensor  # [K, N] or [batch, K, N]; with a gated unit 2N
    a_codes: OperandCodes  # [M, K]
    b_codes: OperandCodes  # [N, K]
    bias: Tensor | None  # [N], with a gated unit [2N]
    residual: Tensor | None  # of the shape of the result
    alpha: Tensor | None  # one fp32 number
    factor: float  # another one, known on the host
    activation: str | None
    gated: bool
    precision: str | None
    batch_invariant: bool
    engine: str  # auto, weft or torch
    result: ResultOptions


class MatmulOutputs(NamedTuple):
    result: Result
