"""Sums over rows with the same bits in every run: programs leave partial sums in fp32, and one kernel adds them up."""

from __future__ import annotations

from torch import Tensor

from ...language import tl, triton
from ...runtime import Launch, capabilities_of, kernel
from .rows import align_of


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


def sum_partials(
    partials: Tensor, out: Tensor, count: int | None = None, *, tile: tuple[int, int] = (32, 64)
) -> None:
    """Sum partials [any, count, cols] over the middle dimension into out [any, cols]; without `count`, over all rows.
    `tile` is (rows, columns) at a time on a GPU: few columns and hundreds of rows, so that many loads are under way at
    once."""
    cols = partials.shape[-1]
    rows = partials.numel() // cols
    count = rows if count is None else count
    piece, width = (1, 256) if capabilities_of(out.device).is_cpu else tile
    launch = Launch.of(_sum_kernel, num_warps=4, ROWS=piece, TILE=width, ALIGN=align_of(cols))
    launch((-(-cols // width) * (rows // count), 1, 1), (partials, out), (count, cols))
