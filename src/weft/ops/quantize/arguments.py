"""The arguments and outputs of quantize and dequantize."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.results import Result, ResultOptions


class QuantizeArgs(NamedTuple):
    x: Tensor  # [..., K]
    result: ResultOptions
    seed: int | None  # to round stochastically; None rounds to nearest


class QuantizeOutputs(NamedTuple):
    result: Result


class DequantizeArgs(NamedTuple):
    data: Tensor  # the members of `Codes`
    scale: Tensor
    global_scale: Tensor | None
    format: str
    cols: int  # how many numbers a row has
    dtype: torch.dtype


class DequantizeOutputs(NamedTuple):
    values: Tensor  # [rows, cols]
