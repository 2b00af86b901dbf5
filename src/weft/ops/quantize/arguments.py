"""Arguments and outputs of quantize and dequantize."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.results import Result, ResultOptions


class QuantizeArgs(NamedTuple):
    x: Tensor  # [..., K]
    result: ResultOptions
    seed: int | None  # for stochastic rounding; None rounds to nearest


class QuantizeOutputs(NamedTuple):
    result: Result


class DequantizeArgs(NamedTuple):
    data: Tensor  # data to format: the fields of `Codes`
    scale: Tensor
    global_scale: Tensor | None
    format: str
    cols: int  # elements per row
    dtype: torch.dtype


class DequantizeOutputs(NamedTuple):
    values: Tensor  # [rows, cols]
