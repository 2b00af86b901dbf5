"""Kernels that select the largest elements of each row."""

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.select import places, rank_bits, threshold


@triton.jit
def _span(starts_ptr, ends_ptr, row, cols):
    """Return the first column of a row that counts, and the column after the last."""
    start, end = tl.cast(0, tl.int64), tl.cast(cols, tl.int64)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row).to(tl.int64)
    if ends_ptr is not None:
        end = tl.load(ends_ptr + row).to(tl.int64)
    return start, tl.minimum(end, cols)


@kernel
def select_kernel(
    chosen_ptr,  # int32 [rows, tiles, k]
    x_ptr,  # [rows, cols], or None
    listed_ptr,  # the same, if only the columns of a list are read, or None
    list_ptr,  # int32 [rows, count]: columns in ascending order, -1 for none; or None
    starts_ptr,  # [rows], or None
    ends_ptr,  # [rows], or None
    cols,
    count,
    x_stride,
    tiles,
    k,
    ONE: tl.constexpr,  # k is 1
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and x_stride
):
    """Write the columns of the k largest elements of a tile in ascending order, -1 after the last. Of equal elements
    the first are chosen."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    at = tile * TILE + tl.arange(0, TILE)  # [TILE]
    start, end = _span(starts_ptr, ends_ptr, row, cols)
    if list_ptr is not None:
        col = tl.load(list_ptr + row * count + at, mask=at < count, other=-1)
        exists = (col >= 0) & (col < cols)
        x = tl.load(listed_ptr + row * x_stride + col, mask=exists, other=0.0)
    else:
        col = at
        # The span is no part of this mask, so that whole vectors are loaded.
        exists = col < (cols // ALIGN) * ALIGN
        x = tl.load(x_ptr + tl.multiple_of(row * x_stride, ALIGN) + col, mask=exists, other=0.0)
        exists = exists & (col >= start) & (col < end)
    rank = rank_bits(x, exists, BITS)
    out_ptr = chosen_ptr + tl.program_id(0).to(tl.int64) * k
    if ONE:
        top = tl.max(rank, axis=0)
        first = tl.min(tl.where(exists & (rank == top), col, 2147483647), axis=0)
        tl.store(out_ptr, tl.where(first == 2147483647, -1, first).to(tl.int32))
    else:
        taken, place = places(rank, exists, threshold(rank, exists.to(tl.int32), k, BITS), k)
        tl.store(out_ptr + place, col.to(tl.int32), mask=taken & (place >= 0) & (place < k))
        slot = tl.arange(0, TILE)
        none = (slot >= tl.sum(taken.to(tl.int32), axis=0)) & (slot < k)
        tl.store(out_ptr + slot, (slot * 0 - 1).to(tl.int32), mask=none)


@kernel
def sort_kernel(
    x_ptr,  # [rows, cols]
    chosen_ptr,  # int32 [rows, count]
    value_ptr,  # [rows, k]
    index_ptr,  # int64 [rows, k]
    x_stride,
    cols,
    count,  # at most k
    k,
    TILE: tl.constexpr,  # at least k
):
    """Write the chosen elements of a row in descending order, and their columns. Of equal ones the first column comes
    first."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TILE)
    col = tl.load(chosen_ptr + row * count + slot, mask=slot < count, other=-1)
    exists = (col >= 0) & (col < cols)
    x_ptr += row * x_stride
    rank = rank_bits(tl.load(x_ptr + col, mask=exists, other=0.0), exists, 32)
    if TILE > 1:
        # A rank, then the column from the last to the first.
        low = tl.where(exists, 2147483647 - col, 0).to(tl.int64)
        key = (rank ^ 0x80000000).to(tl.int32, bitcast=True)
        packed = tl.sort((key.to(tl.int64) << 31) | low, descending=True)
        col = 2147483647 - (packed & 2147483647).to(tl.int32)
        exists = (col >= 0) & (col < cols)
    x = tl.load(x_ptr + col, mask=exists, other=-float("inf"))
    tl.store(value_ptr + row * k + slot, x, mask=slot < k)
    tl.store(index_ptr + row * k + slot, tl.where(exists, col, -1).to(tl.int64), mask=slot < k)
