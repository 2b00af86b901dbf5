"""Sums over rows with the same bits in every run: programs leave partial sums in fp32, and one kernel adds them up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Capabilities, Launch, capabilities_of, choice, kernel
from .groups import NO_ENDS, GroupEnds
from .rows import STRIPE, align_of
from .spans import stripes_of_group


@triton.jit
def add_to(sums_ptr, value, more, col, cols):
    """Add `value` to a sum in memory, or store it as the beginning of the sum if not `more`."""
    exists = col < cols
    before = tl.load(sums_ptr + col, mask=exists & more, other=0.0)
    tl.store(sums_ptr + col, before + value, mask=exists)


@kernel
def _sum_kernel(
    partial_ptr,  # fp32 [outer, count, cols]
    out_ptr,  # [outer, cols]
    count,
    cols,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The sum over the middle dimension, ROWS at a time, in order."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    exists = col < cols
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        row_off = tl.multiple_of((outer * count + row) * cols, ALIGN)
        there = (row < count)[:, None] & exists[None, :]
        total += tl.sum(tl.load(partial_ptr + row_off[:, None] + col[None, :], mask=there, other=0.0), axis=0)
    tl.store(
        out_ptr + tl.multiple_of(outer * cols, ALIGN) + col, total.to(out_ptr.dtype.element_ty), mask=exists
    )


class SumConfig(NamedTuple):
    """How sums over rows are cut: `tile` columns to a program, `rows` rows at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("sums", rows=(1, 128), tile=(16, 1024), num_warps=(1, 16))
def sum_config(kernel: str, cols: int, few: bool, target: Capabilities) -> SumConfig:
    """For a kernel, "partials" or "runs". Few columns and hundreds of rows, so that many loads are under way at once;
    `few`: there are few and long rows."""
    if target.is_cpu:
        return SumConfig(1, 256, 4)
    return SumConfig(8, 256, 4) if few else SumConfig(32, 64, 4)


def sum_partials(partials: Tensor, out: Tensor, count: int | None = None, *, few: bool = False) -> None:
    """Sum partials [any, count, cols] over the middle dimension into out [any, cols]; without `count`, over all rows.
    `few`: those are few and long."""
    cols = partials.shape[-1]
    rows = partials.numel() // cols
    count = rows if count is None else count
    piece, width, warps = sum_config("partials", cols, few, capabilities_of(out.device))
    launch = Launch.of(_sum_kernel, num_warps=warps, ROWS=piece, TILE=width, ALIGN=align_of(cols))
    launch(
        (-(-cols // width) * (rows // count), 1, 1),
        *_sum_kernel.arguments(partial_ptr=partials, out_ptr=out, count=count, cols=cols),
    )


@kernel
def _sum_runs_kernel(
    x_ptr,  # [rows, cols]
    out_ptr,  # [runs, cols]
    groups: GroupEnds,  # of the rows that x has the sums of; absent if x has them all
    rows,  # that x or its sums have
    cols,
    run_rows,  # of a run, or of one of the sums in x
    ANEW: tl.constexpr,  # the runs that x has the sums of begin anew with every group
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The sums of runs of rows, of which the last may be shorter; or of each group's rows from those of its runs. ROWS
    at a time, in order."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    run = (tl.program_id(0) // tiles).to(tl.int64)
    if groups.ends is None:
        begin = run * run_rows
        end = tl.minimum(begin + run_rows, rows)
    else:
        begin, end = stripes_of_group(run, groups, rows, run_rows, ANEW)
    exists = col < cols
    total = tl.zeros((TILE,), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        row_off = tl.multiple_of(row * cols, ALIGN)
        there = (row < end)[:, None] & exists[None, :]
        piece = tl.load(x_ptr + row_off[:, None] + col[None, :], mask=there, other=0.0)
        total += tl.sum(piece.to(tl.float32), axis=0)
    out_off = tl.multiple_of(run * cols, ALIGN)
    tl.store(out_ptr + out_off + col, total.to(out_ptr.dtype.element_ty), mask=exists)


def _sum_runs(x: Tensor, out: Tensor, rows: int, groups: GroupEnds, anew: bool) -> None:
    runs, cols = out.shape
    piece, width, warps = sum_config("runs", cols, False, capabilities_of(x.device))
    launch = Launch.of(
        _sum_runs_kernel, num_warps=warps, ANEW=anew, ROWS=piece, TILE=width, ALIGN=align_of(cols)
    )
    launch(
        (-(-cols // width) * runs, 1, 1),
        *_sum_runs_kernel.arguments(
            x_ptr=x, out_ptr=out, groups=groups, rows=rows, cols=cols, run_rows=STRIPE
        ),
    )


def sum_rows(x: Tensor, out: Tensor) -> None:
    """The sums over the rows of x [rows, cols], contiguous and of any dtype, to out [cols]: those of runs of 128 rows,
    and then the sum of these."""
    rows, cols = x.shape
    runs = -(-rows // STRIPE)
    sums = torch.empty((runs, cols), dtype=torch.float32, device=x.device)
    _sum_runs(x, sums, rows, NO_ENDS, False)
    sum_partials(sums, out)


def sum_groups(sums: Tensor, out: Tensor, groups: GroupEnds, rows: int) -> None:
    """The sums over the rows of each group, of `rows` in all, to out [groups, cols]. `sums` has them for runs of 128
    rows, none of which has rows of two groups: those of `group_stripe`, that begin anew with every group unless its
    `align` is a multiple of 128."""
    _sum_runs(sums, out, rows, groups, groups.align % STRIPE != 0)
