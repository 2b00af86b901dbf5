"""Arguments and outputs of products."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...quant import PLAIN, Codes
from ..common.groups import Groups
from ..common.results import Result, ResultOptions

# An operand's codes come from the copy whose scales lie along K, [rows, K] or [groups, rows, K], with any strides.


class MatmulArgs(NamedTuple):
    a: Tensor  # [M, K] or [batch, M, K]; a stand-in if there are codes
    b: Tensor  # [K, N] or [batch, K, N]; 2N if gated
    a_codes: Codes  # [M, K]
    b_codes: Codes  # [N, K]
    bias: Tensor | None  # [N], or [2N] if gated
    residual: Tensor | None  # shaped like the result
    alpha: Tensor | None  # fp32, one element
    factor: float  # a second factor, known on the host
    activation: str | None
    gated: bool
    precision: str | None
    batch_invariant: bool
    engine: str  # auto, weft, torch or deep_gemm
    result: ResultOptions


class GroupedArgs(NamedTuple):
    """Arguments of a grouped product: rows in groups, each multiplied with its group's matrix."""

    x: Tensor  # [rows, K]; with slot_of_row [tokens, K]; a stand-in if there are codes
    w: Tensor  # [groups, N, K]; 2N if gated
    x_codes: Codes  # [rows, K]
    w_codes: Codes  # [groups, N, K]
    ends: Tensor  # [groups]
    align: int
    slot_of_row: Tensor | None  # int32 [rows]: row r is token slot_of_row[r] // slots
    slots: int
    bias: Tensor | None  # [groups, N]; 2N if gated
    activation: str | None
    gated: bool
    precision: str | None
    engine: str
    result: ResultOptions


class WgradArgs(NamedTuple):
    """Arguments of the groups' weight gradients: for each group, the sum of outer products of its rows."""

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


# ---- products with at most a bias or an addend ----------------------------------------------------------


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
