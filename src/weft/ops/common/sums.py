"""Deterministic sums over rows: programs write fp32 partial sums, and a second kernel adds them in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Capabilities, Launch, capabilities_of, choice, kernel, scratch
from .groups import NO_ENDS, GroupEnds
from .rows import STRIPE, align_of
from .spans import stripes_of_group


@triton.jit
def add_to(sums_ptr, value, more, col, cols):
    """Add `value` to a sum in memory if `more`, otherwise start the sum with it."""
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
    """Sum over the middle dimension in order, ROWS at a time."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    exists = col < cols
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        row_off = tl.multiple_of((outer * count + row) * cols, ALIGN)
        mask = (row < count)[:, None] & exists[None, :]
        total += tl.sum(tl.load(partial_ptr + row_off[:, None] + col[None, :], mask=mask, other=0.0), axis=0)
    tl.store(
        out_ptr + tl.multiple_of(outer * cols, ALIGN) + col, total.to(out_ptr.dtype.element_ty), mask=exists
    )


class SumConfig(NamedTuple):
    """Tiling of sums over rows: `tile` columns per program, `rows` rows at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("sums", rows=(1, 128), tile=(16, 1024), num_warps=(1, 16))
def sum_config(kernel: str, cols: int, few: bool, target: Capabilities) -> SumConfig:
    """Choose the tiling for a kernel, "partials" or "runs". Tiles have few columns and many rows, to keep many loads in
    flight, unless there are only a few, long rows (`few`)."""
    if target.is_cpu:
        return SumConfig(1, 256, 4)
    return SumConfig(8, 256, 4) if few else SumConfig(32, 64, 4)


def sum_partials(partials: Tensor, out: Tensor, count: int | None = None, *, few: bool = False) -> None:
    """Sum partials [any, count, cols] over the middle dimension into out [any, cols]; without `count`, over all rows.
    Set `few` for few, long rows."""
    cols = partials.shape[-1]
    rows = partials.numel() // cols
    count = rows if count is None else count
    height, width, warps = sum_config("partials", cols, few, capabilities_of(out.device))
    launch = Launch.of(_sum_kernel, num_warps=warps, ROWS=height, TILE=width, ALIGN=align_of(cols))
    launch(
        (-(-cols // width) * (rows // count), 1, 1),
        *_sum_kernel.arguments(partial_ptr=partials, out_ptr=out, count=count, cols=cols),
    )


@kernel
def _sum_runs_kernel(
    x_ptr,  # [rows, cols]
    out_ptr,  # [runs, cols]
    groups: GroupEnds,  # of the rows that are summed in x; absent if x holds the rows themselves
    rows,  # before any of them were summed in x
    cols,
    run_rows,  # rows of a run, or rows summed in one row of x
    ANEW: tl.constexpr,  # the runs summed in x restart at every group
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Sum runs of rows, the last of which may be shorter; with groups, sum each group from the sums of its runs. Adds
    ROWS rows at a time, in order."""
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
        mask = (row < end)[:, None] & exists[None, :]
        values = tl.load(x_ptr + row_off[:, None] + col[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    out_off = tl.multiple_of(run * cols, ALIGN)
    tl.store(out_ptr + out_off + col, total.to(out_ptr.dtype.element_ty), mask=exists)


def _sum_runs(x: Tensor, out: Tensor, rows: int, groups: GroupEnds, restart: bool) -> None:
    runs, cols = out.shape
    height, width, warps = sum_config("runs", cols, False, capabilities_of(x.device))
    launch = Launch.of(
        _sum_runs_kernel, num_warps=warps, ANEW=restart, ROWS=height, TILE=width, ALIGN=align_of(cols)
    )
    launch(
        (-(-cols // width) * runs, 1, 1),
        *_sum_runs_kernel.arguments(
            x_ptr=x, out_ptr=out, groups=groups, rows=rows, cols=cols, run_rows=STRIPE
        ),
    )


def sum_rows(x: Tensor, out: Tensor) -> None:
    """Sum the rows of x [rows, cols], contiguous and of any dtype, into out [cols]: first runs of 128 rows, then the
    runs."""
    rows, cols = x.shape
    runs = -(-rows // STRIPE)
    sums = scratch((runs, cols), torch.float32, x.device)
    _sum_runs(x, sums, rows, NO_ENDS, False)
    sum_partials(sums, out)


def sum_groups(sums: Tensor, out: Tensor, groups: GroupEnds, rows: int) -> None:
    """Sum the rows of each group into out [groups, cols]; there are `rows` rows in all. `sums` holds the sums of runs
    of 128 rows, none of which has rows of two groups: the stripes of `group_stripe`, which restart at every group
    unless `align` is a multiple of 128."""
    _sum_runs(sums, out, rows, groups, groups.align % STRIPE != 0)
