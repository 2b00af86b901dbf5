"""The arguments and outputs of products."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...quant import PLAIN, Codes
from ..common.groups import Groups
from ..common.results import Result, ResultOptions

# The codes of an operand are those of the copy whose scales lie along K, [rows, K] or [groups, rows, K]; their strides
# may be any.


class MatmulArgs(NamedTuple):
    a: Tensor  # [M, K] or [batch, M, K]; a stand-in if there are codes
    b: Tensor  # [K, N] or [batch, K, N]; with a gated unit 2N
    a_codes: Codes  # [M, K]
    b_codes: Codes  # [N, K]
    bias: Tensor | None  # [N], with a gated unit [2N]
    residual: Tensor | None  # of the shape of the result
    alpha: Tensor | None  # one fp32 number
    factor: float  # another one, known on the host
    activation: str | None
    gated: bool
    precision: str | None
    batch_invariant: bool
    engine: str  # auto, weft, torch or deep_gemm
    result: ResultOptions


class GroupedArgs(NamedTuple):
    """Rows in groups, each multiplied with the matrix of its group."""

    x: Tensor  # [rows, K]; with slot_of_row [tokens, K]; a stand-in if there are codes
    w: Tensor  # [groups, N, K], with a gated unit 2N
    x_codes: Codes  # [rows, K]
    w_codes: Codes  # [groups, N, K]
    ends: Tensor  # [groups]
    align: int
    slot_of_row: Tensor | None  # int32 [rows]: row r is that of the token slot_of_row[r] // slots
    slots: int
    bias: Tensor | None  # [groups, N], with a gated unit 2N
    activation: str | None
    gated: bool
    precision: str | None
    engine: str
    result: ResultOptions


class WgradArgs(NamedTuple):
    """The gradients of the matrices of groups: for each group the sum of outer products of its rows."""

    dy: Tensor  # [rows, N]
    x: Tensor  # [rows, K]
    dy_codes: Codes  # [N, rows]
    x_codes: Codes  # [K, rows]
    ends: Tensor  # [groups]
    align: int
    addend: Tensor | None  # [groups, N, K]
    precision: str | None
    engine: str
    result: ResultOptions


class ProductOutputs(NamedTuple):
    result: Result


# ---- products with nothing but a bias or an addend ------------------------------------------------------


def matmul_args(
    a: Tensor,
    b: Tensor,
    result: ResultOptions,
    *,
    a_codes: Codes = PLAIN,
    b_codes: Codes = PLAIN,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> MatmulArgs:
    return MatmulArgs(
        a, b, a_codes, b_codes, bias, residual, alpha=None, factor=1.0, activation=None, gated=False, precision=None,
        batch_invariant=False, engine="auto", result=result,
    )  # fmt: skip


def grouped_args(
    x: Tensor,
    w: Tensor,
    groups: Groups,
    result: ResultOptions,
    *,
    x_codes: Codes = PLAIN,
    w_codes: Codes = PLAIN,
    bias: Tensor | None = None,
) -> GroupedArgs:
    assert groups.ends is not None
    return GroupedArgs(
        x, w, x_codes, w_codes, groups.ends, groups.align, slot_of_row=None, slots=1, bias=bias, activation=None,
        gated=False, precision=None, engine="auto", result=result,
    )  # fmt: skip


def wgrad_args(
    dy: Tensor,
    x: Tensor,
    groups: Groups,
    result: ResultOptions,
    *,
    dy_codes: Codes = PLAIN,
    x_codes: Codes = PLAIN,
    addend: Tensor | None = None,
) -> WgradArgs:
    assert groups.ends is not None
    return WgradArgs(
        dy,
        x,
        dy_codes,
        x_codes,
        groups.ends,
        groups.align,
        addend=addend,
        precision=None,
        engine="auto",
        result=result,
    )
