"""Rows in groups, one group to an expert, with their places known on the device alone.

`ends` [groups], int32 or int64 and never decreasing, says where the rows of each group end. A group begins where the
one before it ends, rounded up to a multiple of `align`; the rows between are padding, and so is what follows the last
group. With align 1 these are the offsets of `torch.nn.functional.grouped_mm`, with a larger one DeepGEMM's.

    group e: rows start_e <= r < ends[e]        start_0 = 0        start_e = ceil(ends[e - 1] / align) * align

Blocks of 128 rows (of column-wise copies) never mix groups. Where `align` is a multiple of 128 they lie as without
groups. Otherwise a group's blocks begin with its first row; the first of them has the number start_e // 128 + e,
which leaves at most one number unused between groups, and none of `count_slots` is past the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton

CHUNK = tl.constexpr(128)  # ends that a program looks at together


def count_slots(rows: int, groups: int, stripe: int) -> int:
    """How many numbers blocks may have that begin anew with every group."""
    return -(-rows // stripe) + groups


# ---- reference ------------------------------------------------------------------------------------------


def real_rows_reference(ends: Tensor, rows: int, align: int) -> Tensor:
    """bool [rows]: which rows are no padding."""
    row = torch.arange(rows, device=ends.device)
    ends = ends.long()
    known = torch.cat([ends.new_zeros(1), ends])
    passed = torch.searchsorted(ends, row, right=True)  # groups that end at or before the row
    start = (known[passed] + align - 1) // align * align
    return (row >= start) & (passed < ends.numel())


def slot_rows_reference(ends: Tensor, rows: int, align: int, stripe: int) -> Tensor:
    """int64 [rows]: where rows lie if the blocks of each group are laid out by their numbers."""
    row = torch.arange(rows, device=ends.device)
    starts = torch.cat([ends.new_zeros(1), ends]).long()
    starts = ((starts + align - 1) // align * align).clamp(max=rows)
    group = torch.searchsorted(starts, row, right=True) - 1
    begin = starts[group]
    return (begin // stripe + group) * stripe + row - begin


# ---- kernels --------------------------------------------------------------------------------------------


class GroupEnds(NamedTuple):
    """Groups as kernels take them. Without groups `ends` is None."""

    ends: Tensor | None  # [count]
    count: int
    align: int


@triton.jit
def _begin_after(end, align):
    """Where the next group begins."""
    return (end + align - 1) // align * align


@triton.jit
def real_rows(row, groups):
    """Which rows are no padding: int64 [R] -> bool [R]."""
    before = tl.zeros_like(row)  # the last end that is not past the row
    last = tl.zeros_like(row)
    for first in range(0, groups.count, CHUNK):
        index = first + tl.arange(0, CHUNK)
        end = tl.load(groups.ends + index, mask=index < groups.count, other=0).to(tl.int64)  # [CHUNK]
        before = tl.maximum(before, tl.max(tl.where(end[None, :] <= row[:, None], end[None, :], 0), axis=1))
        last = tl.maximum(last, tl.max(end, axis=0))
    start = _begin_after(before, groups.align)
    return (row >= start) & (row < last)


@triton.jit
def group_stripe(stripe, groups, rows, ROWS: tl.constexpr, RELATIVE: tl.constexpr):
    """(first row, how many rows it has, how many of them are no padding) of stripe number `stripe`, int64 scalars.

    RELATIVE: stripes begin anew with every group; else `align` is a multiple of their ROWS rows.
    """
    if RELATIVE:
        begin = stripe * 0
        following = stripe * 0 + rows
        passed = stripe * 0
        for first in range(0, groups.count + 1, CHUNK):
            group = first + tl.arange(0, CHUNK)  # the last one is what follows all groups
            known = (group > 0) & (group <= groups.count)
            end = tl.load(groups.ends + group - 1, mask=known, other=0).to(tl.int64)
            start = tl.minimum(_begin_after(end, groups.align), rows)
            mine = (start // ROWS + group <= stripe) & (group <= groups.count)
            passed += tl.sum(mine.to(tl.int64), axis=0)
            begin = tl.maximum(begin, tl.max(tl.where(mine, start, 0), axis=0))
            later = (group <= groups.count) & (mine == 0)
            following = tl.minimum(following, tl.min(tl.where(later, start, rows), axis=0))
        group = passed - 1
        first_row = begin + (stripe - begin // ROWS - group) * ROWS
        exist = tl.minimum(tl.maximum(following - first_row, 0), ROWS)
        end = tl.load(groups.ends + group, mask=group < groups.count, other=0).to(tl.int64)
        return first_row, exist, tl.minimum(tl.maximum(end - first_row, 0), exist)
    else:
        first_row = stripe * ROWS
        before = stripe * 0
        NOWHERE: tl.constexpr = 1 << 62
        after = stripe * 0 + NOWHERE
        for first in range(0, groups.count, CHUNK):
            group = first + tl.arange(0, CHUNK)
            end = tl.load(groups.ends + group, mask=group < groups.count, other=0).to(tl.int64)
            before = tl.maximum(before, tl.max(tl.where(end <= first_row, end, 0), axis=0))
            after = tl.minimum(after, tl.min(tl.where(end > first_row, end, NOWHERE), axis=0))
        exist = tl.minimum(rows - first_row, ROWS)
        begun = (_begin_after(before, groups.align) <= first_row) & (after < NOWHERE)
        return first_row, exist, tl.where(begun, tl.minimum(after - first_row, exist), 0)
