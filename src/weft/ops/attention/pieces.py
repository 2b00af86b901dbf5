"""Tiles of heads in one or two pieces, and the scores made of products of queries and keys.

The width of a piece is a power of two: 192 is split into 128 + 64, and 80 into 64 + 16, which keeps padding small.
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
    """Scale and softcap of the scores."""

    scale: float
    softcap: float


class Heads(NamedTuple):
    """Number of query heads; each key head is shared by `group` of them."""

    q: int
    group: int


class Pieces(NamedTuple):
    """Tile of heads in two pieces; the second is None if one piece holds the whole head."""

    first: Any
    second: Any


@triton.jit
def first_token(place, batch, start, head, ALIGN: tl.constexpr):
    """Return a pointer to the first token of a sequence in a head."""
    at = place.at
    off = batch * at.batch + start * at.token + head.to(tl.int64) * at.head
    return place.ptr + tl.multiple_of(off, ALIGN)


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
    used=None,
):
    """Return pointers [ROWS, PIECE] to columns from BEGIN on of rows from `start` on, and their mask: rows before
    `limit` that are `used`, bool [ROWS] or None for all."""
    step = tl.multiple_of(stride.to(tl.int64), ALIGN)
    inside = tl.arange(0, ROWS)
    number = BEGIN + tl.arange(0, PIECE)
    at = ptr + start.to(tl.int64) * step + (inside.to(tl.int64) * step)[:, None] + number[None, :]
    mask = (start + inside < limit)[:, None]
    if used is not None:
        mask = mask & used[:, None]
    if WIDTH.dim < BEGIN + PIECE:
        mask = mask & (number < WIDTH.dim)[None, :]
    return at, mask


@triton.jit
def load_heads(
    ptr, stride, start, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, used=None
):
    """Load ROWS rows of one head from `start` on; zero from `limit` on, and where they are not `used`."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at, mask = addresses(ptr, stride, start, limit, ROWS, 0, FIRST, WIDTH, ALIGN, used)
    first = tl.load(at, mask=mask, other=0.0)
    if SECOND:
        at, mask = addresses(ptr, stride, start, limit, ROWS, FIRST, SECOND, WIDTH, ALIGN, used)
        return Pieces(first, tl.load(at, mask=mask, other=0.0))
    else:
        return Pieces(first, None)


@triton.jit
def load_transposed(ptr, columns, start, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Load rows from `start` on of one head of int8 or, as bytes, e4m3 codes that is stored transposed: rows are
    contiguous, and columns have a stride of `columns` bytes. Rows from `limit` to the next multiple of ALIGN may hold
    anything finite."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    if ptr.dtype.element_ty == tl.uint8:
        codes_ptr = ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        codes_ptr = ptr
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
    """Load columns from BEGIN on of rows from `start` on, as [PIECE, ROWS]."""
    step = tl.multiple_of(columns.to(tl.int64), ALIGN)
    row = start + tl.arange(0, ROWS)
    number = BEGIN + tl.arange(0, PIECE)
    # A mask that changes only at multiples of ALIGN lets a thread load ALIGN bytes at once.
    mask = (row < tl.cdiv(limit, ALIGN) * ALIGN)[None, :]
    if WIDTH.dim < BEGIN + PIECE:
        mask = mask & (number < WIDTH.dim)[:, None]
    return tl.load(ptr + (number.to(tl.int64) * step)[:, None] + row[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(value, ptr, stride, start, limit, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Round rows to the dtype of the pointer and store them, up to `limit`."""
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
    """Load heads that begin at `row`, int64 [R]; zero where they do not exist. The caller gives the alignment hint for
    `row` where it computes it: a hint on a parameter is lost."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at = ptr + row[:, None]
    number = tl.arange(0, FIRST)
    mask = exists[:, None] & (number < WIDTH.dim)[None, :]
    first = tl.load(at + number[None, :], mask=mask, other=0)
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        mask = exists[:, None] & (number < WIDTH.dim)[None, :]
        return Pieces(first, tl.load(at + number[None, :], mask=mask, other=0))
    else:
        return Pieces(first, None)


@triton.jit
def store_at(value, ptr, row, exists, WIDTH: tl.constexpr):
    """Round heads and store them, each from its `row` on, int64 [R]. As in `load_at`, the caller gives the alignment
    hint for `row`."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    at = ptr + row[:, None]
    number = tl.arange(0, FIRST)
    mask = exists[:, None] & (number < WIDTH.dim)[None, :]
    tl.store(at + number[None, :], rounded(value.first, ptr), mask=mask)
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        mask = exists[:, None] & (number < WIDTH.dim)[None, :]
        tl.store(at + number[None, :], rounded(value.second, ptr), mask=mask)


@triton.jit
def rounded(value, ptr):
    """Round a value to the dtype that a pointer points to."""
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
    """Return total + a @ b, or a @ b if total is None."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype == tl.int8:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    elif a.dtype.is_fp8():
        # sm_90 keeps only 14 bits in sums of 8-bit products: move them to fp32 after each piece.
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1] if a.shape[1] < 128 else 128)
    else:
        return tl.dot(a, b, total)


@triton.jit
def across(a, b):
    """Return a @ b^T over both pieces: [R, dim] and [C, dim] -> [R, C]."""
    total = dot(a.first, tl.trans(b.first), None)
    if a.second is not None:
        total = dot(a.second, tl.trans(b.second), total)
    return total


@triton.jit
def across_groups(a, a_scale, b, b_scale, zero):
    """Return a @ b^T over both pieces of e4m3 codes, whose e8m0 scales each cover 32 elements: [R, dim] and [C, dim],
    with scales [R, dim / 32] and [C, dim / 32] -> [R, C]. `zero` is 0 at run time only: with a constant accumulator,
    Triton 3.7's OptimizeAccumulatorInit makes invalid code of scaled products for sm_100."""
    total = tl.zeros((a.first.shape[0], b.first.shape[0]), tl.float32) + zero
    total = tl.dot_scaled(a.first, a_scale.first, "e4m3", tl.trans(b.first), b_scale.first, "e4m3", total)
    if a.second is not None:
        total = tl.dot_scaled(
            a.second, a_scale.second, "e4m3", tl.trans(b.second), b_scale.second, "e4m3", total
        )
    return total


@triton.jit
def add_coded_product(total, alpha, weights, beta, rows, scale_ptr, WIDTH: tl.constexpr):
    """Return alpha * total + beta * (int8(weights) @ rows) * scales of columns: weights [R, C] up to 127, int8 rows
    [C, dim]. The int32 sums are exact."""
    # Rounded differences of large scores make weights above 127. Adding 1.5 * 2^23 rounds to the nearest even integer
    # and leaves it in the lowest byte.
    codes = (tl.minimum(weights, 127.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    if total.second is not None:
        second = dot(codes, rows.second, None).to(tl.float32)
        product = Pieces(dot(codes, rows.first, None).to(tl.float32), second)
    else:
        product = Pieces(dot(codes, rows.first, None).to(tl.float32), None)
    return plus(times(total, alpha), times(times_columns(product, scale_ptr, WIDTH), beta))


@triton.jit
def add_product(total, weights, rows):
    """Return total + weights @ rows: [R, C] and [C, dim] -> [R, dim]."""
    if weights.dtype.is_fp8():
        # Matrix units of sm_89 and sm_90 keep 14 bits in sums of 8-bit products: let them add at most C products.
        if total.second is not None:
            product = Pieces(dot(weights, rows.first, None), dot(weights, rows.second, None))
        else:
            product = Pieces(dot(weights, rows.first, None), None)
        return plus(total, product)
    else:
        first = dot(weights, rows.first, total.first)
        if total.second is not None:
            return Pieces(first, dot(weights, rows.second, total.second))
        else:
            return Pieces(first, None)


@triton.jit
def plus(a, b):
    """Add two tiles of heads."""
    if a.second is not None:
        return Pieces(a.first + b.first, a.second + b.second)
    else:
        return Pieces(a.first + b.first, None)


@triton.jit
def times(value, factor):
    """Multiply a tile by a factor, [R, 1] or a scalar."""
    if value.second is not None:
        return Pieces(value.first * factor, value.second * factor)
    else:
        return Pieces(value.first * factor, None)


@triton.jit
def times_columns(value, ptr, WIDTH: tl.constexpr):
    """Multiply each column by its factor, fp32 [dim]."""
    FIRST: tl.constexpr = WIDTH.first
    SECOND: tl.constexpr = WIDTH.second
    number = tl.arange(0, FIRST)
    first = value.first * tl.load(ptr + number, mask=number < WIDTH.dim, other=0.0)[None, :]
    if SECOND:
        number = FIRST + tl.arange(0, SECOND)
        second_scale = tl.load(ptr + number, mask=number < WIDTH.dim, other=0.0)
        return Pieces(first, value.second * second_scale[None, :])
    else:
        return Pieces(first, None)


# ---- scores ---------------------------------------------------------------------------------------------


@triton.jit
def capped(products, scores, CAPPED: tl.constexpr):
    """Return (capped products, slope of the cap); `factor_of` converts the former to scores in base 2."""
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
