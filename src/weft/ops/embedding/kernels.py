"""Kernels that gather rows by index, and that sum rows of equal index; `gather` documents the formulas."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ..common.copies import StridedCodes
from ..common.destination import Destination, store_quantized
from ..common.loads import load_decoded, load_stored, mask_of_rows, tile_mask
from .arguments import PART

PART_ROWS = tl.constexpr(PART)


@kernel
def gather_kernel(
    ids_ptr,  # int32 or int64 [count]
    table: StridedCodes,  # [rows, cols]: elements, or codes with their scales
    global_ptr,  # nvfp4's scale of the table, or None
    y_ptr,  # [count, cols], or None
    to: Destination,  # of a quantized result [count, cols]
    count,
    rows,
    cols,
    first,
    size,
    tiles,  # of a row
    scale: float,
    outside: float,
    TABLE: tl.constexpr,  # format of the table, or None
    SAME: tl.constexpr,  # elements are copied as they are
    FORMAT: tl.constexpr,  # of the result, or None
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the strides of rows
    COLS_MASKED: tl.constexpr,
):
    """Compute a tile of the result."""
    cols = (cols // ALIGN) * ALIGN
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    at = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    id = tl.load(ids_ptr + at, mask=at < count, other=0).to(tl.int64)
    row = id - first
    real = (at < count) & (row >= 0) & (row < rows)
    foreign = (at < count) & ((id < 0) | (id >= size))
    if TABLE is None:
        table_off = tl.multiple_of(row * table.stride, ALIGN)
        mask = mask_of_rows(real, col, cols, True, COLS_MASKED)
        x = load_stored(table.data + table_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    else:
        x = load_decoded(table, global_ptr, row, real, tile * TILE, cols, TABLE, TILE, ALIGN, COLS_MASKED)
    if not SAME:
        x = x.to(tl.float32) * scale
    x = tl.where(foreign[:, None], tl.cast(outside, x.dtype), x)
    mask = tile_mask(at, col, count, cols, True, COLS_MASKED)
    if FORMAT is None:
        y_off = tl.multiple_of(at * cols, ALIGN)
        tl.store(y_ptr + y_off[:, None] + col[None, :], x.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        store_quantized(x, mask, to, block, tile, tiles, count, cols, FORMAT, CAST, ALIGN)


# ---- sorting ids ----------------------------------------------------------------------------------------


@kernel
def digit_kernel(
    ids_ptr,  # int32 or int64 [count]
    early_ptr,  # int32 [count]: places in ids, or None for all in order
    late_ptr,  # int32 [count]: places in that list, or None for all in order
    order_ptr,  # int32 [count], or None
    digit_ptr,  # int32 [count]
    count,
    rows,
    first,
    skipped,
    divisor,
    digits,
    missing,
    BLOCK: tl.constexpr,
):
    """Write the places of ids in an order, and a digit of each id's row: `missing` where there is no row."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    place = at
    if late_ptr is not None:
        place = tl.load(late_ptr + at, mask=at < count, other=-1).to(tl.int64)
    if early_ptr is not None:
        place = tl.load(early_ptr + place, mask=(at < count) & (place >= 0), other=-1).to(tl.int64)
    id = tl.load(ids_ptr + place, mask=(at < count) & (place >= 0), other=0).to(tl.int64)
    row = id - first
    exists = (place >= 0) & (row >= 0) & (row < rows) & (id != skipped)
    digit = tl.where(exists, row // divisor % digits, missing)
    tl.store(digit_ptr + at, digit.to(tl.int32), mask=at < count)
    if order_ptr is not None:
        tl.store(order_ptr + at, place.to(tl.int32), mask=at < count)


# ---- sums -----------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The result of sums, [rows, cols]."""

    ptr: Tensor
    onto: Tensor | None  # the same memory, if its elements count
    rows: int


@kernel
def parts_kernel(
    row_ptr,  # int32 [count], ascending
    part_ptr,  # int32 [count]
    target_ptr,  # int64 [count]
    count,
    rows,
    BLOCK: tl.constexpr,
):
    """Write, where a part of equal rows begins, how many there are in it (PART, except in the last part), and where its
    sum goes: to that row of the result, or with `rows` added to a row of partial sums, if the row has several parts.
    Where no part begins these are 0 and -1."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = tl.load(row_ptr + at, mask=at < count, other=0)
    begin, end = at * 0, at * 0  # how many rows come before this one, and with it
    for step in range(31):  # count < 2^31
        width = tl.cast(1, tl.int64) << (30 - step)
        place = begin + width - 1
        inside = (place >= 0) & (place < count)
        begin += tl.where(inside & (tl.load(row_ptr + place, mask=inside, other=0) < row), width, 0)
        place = end + width - 1
        inside = (place >= 0) & (place < count)
        end += tl.where(inside & (tl.load(row_ptr + place, mask=inside, other=0) <= row), width, 0)
    is_start = (at < count) & (row < rows) & ((at - begin) % PART_ROWS == 0)
    tl.store(
        part_ptr + at, tl.where(is_start, tl.minimum(end - at, PART_ROWS), 0).to(tl.int32), mask=at < count
    )
    # Of the rows that begin among PART places at most one has several parts, and at most one other such row continues
    # there.
    slot = at // PART_ROWS * 2 + (at == begin).to(tl.int64)
    target = tl.where(end - begin > PART_ROWS, rows + slot, row)
    tl.store(target_ptr + at, tl.where(is_start, target, -1), mask=at < count)


@triton.jit
def _store_sum(acc, y, row, col, cols, scale, ALIGN: tl.constexpr):
    """Store scale * acc [TILE] as a row of the result, added to its elements if they count, with one rounding."""
    off = tl.multiple_of(row.to(tl.int64) * cols, ALIGN)
    mask = (col < cols) & (row < y.rows)
    acc = acc * scale
    if y.onto is not None:
        acc += tl.load(y.onto + off + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y.ptr + off + col, acc.to(y.ptr.dtype.element_ty), mask=mask)


@kernel
def sum_parts_kernel(
    x_ptr,  # [count, cols]
    order_ptr,  # int32 [count], or None if x is sorted
    part_ptr,  # int32 [count]
    target_ptr,  # int64 [count]
    partial_ptr,  # fp32 [2 * parts, cols]: sums of parts of rows that have several
    y: Sums,  # [rows, cols]
    count,
    cols,
    tiles,
    x_stride,
    scale: float,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Sum the part that begins at a place, row by row in fp32. If its row has no other part, store the sum."""
    cols = (cols // ALIGN) * ALIGN
    at = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    target = tl.load(target_ptr + at)
    if target >= 0:
        length = tl.load(part_ptr + at)
        acc = tl.zeros((TILE,), tl.float32)
        for begin in range(0, length, AT_ONCE):
            for step in tl.static_range(AT_ONCE):
                place = at + begin + step
                exists = (begin + step < length) & (place < count)
                if order_ptr is not None:
                    place = tl.load(order_ptr + place, mask=exists, other=-1).to(tl.int64)
                x_off = tl.multiple_of(place * x_stride, ALIGN)
                mask = exists & (place >= 0) & (col < cols)
                acc += tl.load(x_ptr + x_off + col, mask=mask, other=0.0).to(tl.float32)
        if target < y.rows:
            _store_sum(acc, y, target, col, cols, scale, ALIGN)
        else:
            off = tl.multiple_of((target - y.rows) * cols, ALIGN)
            tl.store(partial_ptr + off + col, acc, mask=col < cols)


@kernel
def join_parts_kernel(
    row_ptr,  # int32 [count], ascending
    target_ptr,  # int64 [count]
    partial_ptr,  # fp32 [2 * parts, cols]
    y: Sums,  # [rows, cols]
    count,
    cols,
    tiles,
    scale: float,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Add up the parts of the row with several parts that begins among PART places, in order, if there is one."""
    cols = (cols // ALIGN) * ALIGN
    block = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    slot = block * 2 + 1
    place = block * PART_ROWS + tl.arange(0, PART_ROWS)  # [PART_ROWS]
    target = tl.load(target_ptr + place, mask=place < count, other=-1)
    at = tl.max(tl.where(target == y.rows + slot, place, -1), axis=0)
    if at >= 0:
        row = tl.load(row_ptr + at, mask=at < count, other=0)
        acc = tl.load(partial_ptr + tl.multiple_of(slot * cols, ALIGN) + col, mask=col < cols, other=0.0)
        at += PART_ROWS
        slot = at // PART_ROWS * 2
        while tl.load(target_ptr + at, mask=(at >= 0) & (at < count), other=-1) == y.rows + slot:
            off = tl.multiple_of(slot * cols, ALIGN)
            inside = (at >= 0) & (at < count) & (col < cols)
            acc += tl.load(partial_ptr + off + col, mask=inside, other=0.0)
            at += PART_ROWS
            slot = at // PART_ROWS * 2
        _store_sum(acc, y, row, col, cols, scale, ALIGN)
