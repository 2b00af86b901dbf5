"""Arguments and outputs of permute, unpermute and unpermute's backward."""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from typing_extensions import NamedTuple

from ....quant import Codes
from ....runtime import G
from ...common.results import Result, ResultOptions
from ..row_map.arguments import RowMap


class PermuteArgs(NamedTuple):
    x: Tensor  # [..., K]; not read if codes are present
    codes: Codes  # codes of a quantized x, which are moved unchanged
    probs: Tensor | None  # [..., slots], or [..., experts] if the routing was a mask
    map: RowMap
    result: ResultOptions


class PermuteOutputs(NamedTuple):
    result: Result  # [rows, K]
    row_probs: Tensor | None  # [rows]


class UnpermuteArgs(NamedTuple):
    rows: Tensor  # [rows, K]; not read if codes are present
    codes: Codes
    probs: Tensor | None
    carried: Tensor | None  # [rows]
    map: RowMap


class UnpermuteOutputs(NamedTuple):
    y: Tensor  # [..., K]
    carried: Tensor | None  # shaped like probs


class UnpermuteGradients(NamedTuple, Generic[G]):
    rows: G
    probs: G


class UnpermuteBackwardArgs(NamedTuple):
    dy: Tensor  # [..., K]
    rows: Tensor | None  # for the gradient of probs; None if it is not needed or the rows are codes
    codes: Codes
    probs: Tensor
    map: RowMap
    needs: UnpermuteGradients[bool]
