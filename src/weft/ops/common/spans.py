"""Device functions that find the groups, rows and stripes of a program."""

from __future__ import annotations

from ...language import tl, triton

CHUNK = tl.constexpr(128)  # how many ends a program loads at a time


@triton.jit
def _begin_after(end, align):
    """Return the first row of the group after the one that ends at `end`."""
    return (end + align - 1) // align * align


@triton.jit
def real_rows(row, groups):
    """Return which rows, int64 [R], belong to a group and are not padding: bool [R]."""
    before = tl.zeros_like(row)  # the largest end at or before the row
    last = tl.zeros_like(row)
    for first in range(0, groups.number, CHUNK):
        index = first + tl.arange(0, CHUNK)
        end = tl.load(groups.ends + index, mask=index < groups.number, other=0).to(tl.int64)  # [CHUNK]
        before = tl.maximum(before, tl.max(tl.where(end[None, :] <= row[:, None], end[None, :], 0), axis=1))
        last = tl.maximum(last, tl.max(end, axis=0))
    start = _begin_after(before, groups.align)
    return (row >= start) & (row < last)


@triton.jit
def group_of(row, groups):
    """Return how many groups end at or before each row, int64 [R]: the group of a row that is not padding."""
    passed = tl.zeros_like(row)
    for first in range(0, groups.number, CHUNK):
        index = first + tl.arange(0, CHUNK)
        end = tl.load(groups.ends + index, mask=index < groups.number, other=0).to(tl.int64)  # [CHUNK]
        ended = (end[None, :] <= row[:, None]) & (index < groups.number)[None, :]
        passed += tl.sum(ended.to(tl.int64), axis=1)
    return passed


@triton.jit
def group_rows(group, groups, rows):
    """Return (first row, row after the last) of a group, int64 scalars; without rows the second is not larger."""
    before = tl.load(groups.ends + group - 1, mask=group > 0, other=0).to(tl.int64)
    end = tl.minimum(tl.load(groups.ends + group).to(tl.int64), rows)
    return _begin_after(before, groups.align), end


@triton.jit
def stripes_of_group(group, groups, rows, stripe_rows, RELATIVE: tl.constexpr):
    """Return the range (first, end) of stripes that hold a group's rows, numbered as in `group_stripe`."""
    start, end = group_rows(group, groups, rows)
    first = start // stripe_rows
    if RELATIVE:
        first += group
    return first, first + (tl.maximum(end - start, 0) + stripe_rows - 1) // stripe_rows


@triton.jit
def group_tile(number, groups, rows, ROWS: tl.constexpr):
    """Return (group, first row, rows, rows that are not padding) of a tile of ROWS rows, int64 scalars.

    Tiles restart at each group: the first tile of group e has the number start_e // ROWS + e. The rows after the last
    group count as one more group of padding. A number without a tile has no rows.
    """
    begin = number * 0
    following = number * 0 + rows
    passed = number * 0
    for first in range(0, groups.number + 1, CHUNK):
        group = first + tl.arange(0, CHUNK)  # the last one stands for the rows after all groups
        has_end = (group > 0) & (group <= groups.number)
        end = tl.load(groups.ends + group - 1, mask=has_end, other=0).to(tl.int64)
        start = tl.minimum(_begin_after(end, groups.align), rows)
        mine = (start // ROWS + group <= number) & (group <= groups.number)
        passed += tl.sum(mine.to(tl.int64), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(mine, start, 0), axis=0))
        later = (group <= groups.number) & (mine == 0)
        following = tl.minimum(following, tl.min(tl.where(later, start, rows), axis=0))
    # If the ends do not ascend the result is wrong, but it never leads outside of the tensor.
    group = tl.maximum(passed - 1, 0)
    first_row = begin + tl.maximum(number - begin // ROWS - group, 0) * ROWS
    first_row = tl.minimum(first_row, following)  # for a number without a tile
    exist = tl.minimum(tl.maximum(following - first_row, 0), ROWS)
    end = tl.load(groups.ends + group, mask=group < groups.number, other=0).to(tl.int64)
    return group, first_row, exist, tl.minimum(tl.maximum(end - first_row, 0), exist)


@triton.jit
def group_stripe(stripe, groups, rows, ROWS: tl.constexpr, RELATIVE: tl.constexpr):
    """Return (first row, rows, rows that are not padding) of a stripe, int64 scalars.

    RELATIVE: stripes restart at each group; otherwise `align` is a multiple of the ROWS rows of a stripe.
    """
    if RELATIVE:
        _, first_row, exist, real = group_tile(stripe, groups, rows, ROWS)
        return first_row, exist, real
    else:
        first_row = stripe * ROWS
        before = stripe * 0
        NOWHERE: tl.constexpr = 1 << 62
        after = stripe * 0 + NOWHERE
        for first in range(0, groups.number, CHUNK):
            group = first + tl.arange(0, CHUNK)
            end = tl.load(groups.ends + group, mask=group < groups.number, other=0).to(tl.int64)
            before = tl.maximum(before, tl.max(tl.where(end <= first_row, end, 0), axis=0))
            after = tl.minimum(after, tl.min(tl.where(end > first_row, end, NOWHERE), axis=0))
        exist = tl.minimum(rows - first_row, ROWS)
        begun = (_begin_after(before, groups.align) <= first_row) & (after < NOWHERE)
        return first_row, exist, tl.where(begun, tl.minimum(after - first_row, exist), 0)
