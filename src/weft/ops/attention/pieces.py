"""Tiles of heads in one or two pieces, and what becomes of the products of queries and keys.

A piece is a power of two: 192 numbers are 128 + 64, and 80 are 64 + 16, so that no more is multiplied than need be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...language import tl, triton
from ...tiles.softmax import tanh

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MINUS_INFINITY = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32


class Scores(NamedTuple):
    """What becomes of q . k."""

    scale: float
    softcap: float


class Pieces(NamedTuple):
    """The two pieces of a tile of heads; the second is None where one holds all numbers."""

    first: Any
    second: Any


@triton.jit
def addresses(
    ptr,
    stride,
    start,
    limit,
    ROWS: tl.constexpr,
    BEGIN: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Pointers [ROWS, PIECE] to numbers from BEGIN on of rows from `start` on, and which of them exist."""
    step = tl.multiple_of(stride.to(tl.int64), ALIGN)
    inside = tl.arange(0, ROWS)
    number = BEGIN + tl.arange(0, PIECE)
    at = ptr + start.to(tl.int64) * step + (inside.to(tl.int64) * step)[:, None] + number[None, :]
    mask = (start + inside < limit)[:, None]
    if WIDTH.numbers < BEGIN + PIECE:
        mask = mask & (number < WIDTH.numbers)[None, :]
    return at, mask


@triton.jit
def load_heads(ptr, stride, start, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Rows from `start` on of one head, zero from `limit` on."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at, mask = addresses(ptr, stride, start, limit, ROWS, 0, FIRST, WIDTH, ALIGN)
    first = tl.load(at, mask=mask, other=0.0)
    if SECOND:
        at, mask = addresses(ptr, stride, start, limit, ROWS, FIRST, SECOND, WIDTH, ALIGN)
        return Pieces(first, tl.load(at, mask=mask, other=0.0))
    else:
        return Pieces(first, None)


@triton.jit
def load_turned(ptr, columns, start, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Rows from `start` on of one head in e4m3 whose codes lie transposed: the rows are neighbours, and its numbers
    `columns` bytes apart. They may hold anything finite from `limit` on, up to the next multiple of ALIGN."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    codes_ptr = ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    first = _columns_of(codes_ptr, columns, start, limit, ROWS, 0, FIRST, WIDTH, ALIGN)
    if SECOND:
        second = _columns_of(codes_ptr, columns, start, limit, ROWS, FIRST, SECOND, WIDTH, ALIGN)
        return Pieces(tl.trans(first), tl.trans(second))
    else:
        return Pieces(tl.trans(first), None)


@triton.jit
def _columns_of(
    ptr,
    columns,
    start,
    limit,
    ROWS: tl.constexpr,
    BEGIN: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Numbers from BEGIN on of rows from `start` on: [PIECE, ROWS]."""
    step = tl.multiple_of(columns.to(tl.int64), ALIGN)
    row = start + tl.arange(0, ROWS)
    number = BEGIN + tl.arange(0, PIECE)
    # A mask that changes at multiples of ALIGN alone lets a thread load as many bytes at once.
    mask = (row < tl.cdiv(limit, ALIGN) * ALIGN)[None, :]
    if WIDTH.numbers < BEGIN + PIECE:
        mask = mask & (number < WIDTH.numbers)[:, None]
    return tl.load(ptr + (number.to(tl.int64) * step)[:, None] + row[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(value, ptr, stride, start, limit, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Round rows and store them, up to `limit`."""
    ROWS: tl.constexpr = value.first.shape[0]
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at, mask = addresses(ptr, stride, start, limit, ROWS, 0, FIRST, WIDTH, ALIGN)
    tl.store(at, rounded(value.first, ptr), mask=mask)
    if SECOND:
        at, mask = addresses(ptr, stride, start, limit, ROWS, FIRST, SECOND, WIDTH, ALIGN)
        tl.store(at, rounded(value.second, ptr), mask=mask)


@triton.jit
def load_at(ptr, row, exists, WIDTH: tl.constexpr):
    """Heads that begin at `row`, int64 [R], zero where they do not exist. What `row` is a multiple of is said where it
    is computed: a hint about a parameter is lost."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at = ptr + row[:, None]
    number = tl.arange(0, FIRST)
    mask = exists[:, None] & (number < WIDTH.numbers)[None, :]
    first = tl.load(at + number[None, :], mask=mask, other=0)
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        mask = exists[:, None] & (number < WIDTH.numbers)[None, :]
        return Pieces(first, tl.load(at + number[None, :], mask=mask, other=0))
    else:
        return Pieces(first, None)


@triton.jit
def store_at(value, ptr, row, exists, WIDTH: tl.constexpr):
    """Round heads and store them, each from its `row` on, int64 [R], of which the caller says what it is a multiple
    of."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at = ptr + row[:, None]
    number = tl.arange(0, FIRST)
    mask = exists[:, None] & (number < WIDTH.numbers)[None, :]
    tl.store(at + number[None, :], rounded(value.first, ptr), mask=mask)
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        mask = exists[:, None] & (number < WIDTH.numbers)[None, :]
        tl.store(at + number[None, :], rounded(value.second, ptr), mask=mask)


@triton.jit
def rounded(value, ptr):
    """Rounded to the dtype that a pointer points to."""
    return value.to(ptr.dtype.element_ty)


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    first = tl.zeros((ROWS, FIRST), tl.float32)
    if SECOND:
        return Pieces(first, tl.zeros((ROWS, SECOND), tl.float32))
    else:
        return Pieces(first, None)


@triton.jit
def dot(a, b, total):
    """total + a @ b, or a @ b if total is None."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype == tl.int8:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    elif a.dtype.is_fp8():
        # sm_90 keeps 14 bits of the sums of 8-bit products, unless it adds them up elsewhere; a piece is one such sum.
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1] if a.shape[1] < 128 else 128)
    else:
        return tl.dot(a, b, total)


@triton.jit
def across(a, b):
    """a @ b^T over all numbers of heads: [R, numbers] and [C, numbers] -> [R, C]."""
    total = dot(a.first, tl.trans(b.first), None)
    if a.second is not None:
        total = dot(a.second, tl.trans(b.second), total)
    return total


@triton.jit
def add_product(total, weights, rows):
    """total + weights @ rows: [R, C] and [C, numbers] -> [R, numbers]."""
    if weights.dtype.is_fp8():
        # Matrix units of sm_89 and sm_90 keep 14 bits of sums of 8-bit products: no more than C are left to them.
        if total.second is not None:
            more = Pieces(dot(weights, rows.first, None), dot(weights, rows.second, None))
        else:
            more = Pieces(dot(weights, rows.first, None), None)
        return plus(total, more)
    else:
        first = dot(weights, rows.first, total.first)
        if total.second is not None:
            return Pieces(first, dot(weights, rows.second, total.second))
        else:
            return Pieces(first, None)


@triton.jit
def plus(one, other):
    """The sum of two tiles of heads."""
    if one.second is not None:
        return Pieces(one.first + other.first, one.second + other.second)
    else:
        return Pieces(one.first + other.first, None)


@triton.jit
def times(value, factor):
    """Each row times its factor, [R] or a number."""
    if value.second is not None:
        return Pieces(value.first * factor, value.second * factor)
    else:
        return Pieces(value.first * factor, None)


@triton.jit
def times_columns(value, ptr, WIDTH: tl.constexpr):
    """Each column times its factor, fp32 [numbers]."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    number = tl.arange(0, FIRST)
    first = value.first * tl.load(ptr + number, mask=number < WIDTH.numbers, other=0.0)[None, :]
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        more = tl.load(ptr + number, mask=number < WIDTH.numbers, other=0.0)
        return Pieces(first, value.second * more[None, :])
    else:
        return Pieces(first, None)


# ---- scores ---------------------------------------------------------------------------------------------


@triton.jit
def capped(products, scores, CAPPED: tl.constexpr):
    """(what is multiplied by `_factor` to give scores in base 2, the slope of the cap)."""
    if CAPPED:
        t = tanh(products * (scores.scale / scores.softcap))
        return t, 1.0 - t * t
    else:
        return products, None


@triton.jit
def factor_of(scores, CAPPED: tl.constexpr):
    if CAPPED:
        return scores.softcap * LOG2E
    else:
        return scores.scale * LOG2E
