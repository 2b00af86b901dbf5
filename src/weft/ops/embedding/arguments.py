"""Arguments and outputs of gathered rows and of their sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Codes
from ..common.results import Result, ResultOptions

PART = 256  # rows of one id that are summed one after another


class GatherArgs(NamedTuple):
    table: Tensor  # [rows, D]; not read if codes are present
    codes: Codes  # of a quantized table
    ids: Tensor  # int32 or int64 [...]
    first: int  # the id of the table's first row
    size: int  # ids of other tables are those from 0 to size - 1
    outside: float  # elements of rows with any other id: 0 or NaN
    scale: float
    skipped: int  # rows of this id have no gradient; -1 for none
    moved: bool  # codes are moved unchanged
    result: ResultOptions


class GatherOutputs(NamedTuple):
    result: Result  # [..., D]


class SumRowsArgs(NamedTuple):
    x: Tensor  # [..., D]
    ids: Tensor  # int32 or int64 [...]: the row of the result to which each row of x is added
    rows: int  # of the result
    first: int  # the id of its first row
    skipped: int  # rows of this id are not added; -1 for none
    scale: float
    is_sorted: bool  # the ids never decrease, and none is negative
    dtype: torch.dtype  # of the result
    onto: Tensor | None  # [rows, D], to which the sums are added


class SumRowsOutputs(NamedTuple):
    y: Tensor  # [rows, D]
