"""The kernel of patches, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

from ...language import tl, triton
from ...runtime import kernel
from ..common.destination import Destination, store_quantized
from ..common.loads import load_tile, tile_mask


class Patches(NamedTuple):
    """Where the pixels of patches are in images [B, H, W, C]."""

    stride_b: int
    stride_y: int
    stride_x: int
    stride_c: int
    down: int  # patches of an image from top to bottom
    across: int  # from left to right
    height: int  # of a patch
    width: int
    channels: int
    merge: int  # patches follow each other in blocks of merge x merge


@triton.jit
def _pixels(row, col, p, CHANNELS_FIRST: tl.constexpr, RUN: tl.constexpr):
    """Return the offsets of the pixels of patches, int64 [R, C], and their channels [C], from row [R], the numbers of
    the patches, and col [C], the positions within a patch. Runs of RUN positions are contiguous and aligned."""
    number, at = row // (p.down * p.across), row % (p.down * p.across)
    block, inside = at // (p.merge * p.merge), at % (p.merge * p.merge)
    blocks = p.across // p.merge
    y = block // blocks * p.merge + inside // p.merge
    x = block % blocks * p.merge + inside % p.merge
    row_off = number * p.stride_b + y * p.height * p.stride_y + x * p.width * p.stride_x
    if CHANNELS_FIRST:
        channel, rest = col // (p.height * p.width), col % (p.height * p.width)
        dy, dx = rest // p.width, rest % p.width
    else:
        dy, rest = col // (p.width * p.channels), col % (p.width * p.channels)
        dx, channel = rest // p.channels, rest % p.channels
    col_off = dy.to(tl.int64) * p.stride_y + dx.to(tl.int64) * p.stride_x + channel.to(tl.int64) * p.stride_c
    col_off = tl.max_contiguous(tl.multiple_of(col_off, RUN), RUN)
    return tl.multiple_of(row_off, RUN)[:, None] + col_off[None, :], channel


@kernel
def patchify_kernel(
    image_ptr,  # [B, H, W, C], which the backward writes
    scale_ptr,  # fp32 [C], or None
    shift_ptr,  # fp32 [C], or None
    y_ptr,  # [rows, cols], or None
    dy_ptr,  # [rows, cols] in the backward, or None
    to: Destination,  # of a quantized result [rows, cols]
    patches: Patches,
    rows,  # patches of all images
    cols,  # elements of a patch
    tiles,  # of a row
    CHANNELS_FIRST: tl.constexpr,  # in a patch
    FORMAT: tl.constexpr,  # of the result, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols
    RUN: tl.constexpr,  # divides the runs of a patch that are contiguous in the image, and the strides between them
):
    """Compute a tile of the patches, or of the gradient of their pixels."""
    cols = (cols // ALIGN) * ALIGN
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, True)
    off, channel = _pixels(row, col, patches, CHANNELS_FIRST, RUN)
    y_off = tl.multiple_of(row * cols, ALIGN)[:, None] + col[None, :]
    x = (
        load_tile(image_ptr + off, mask) if dy_ptr is None else load_tile(dy_ptr + y_off, mask)
    )  # [ROWS, TILE]
    # One fused product and sum: the same bits on every target, whatever its compiler fuses.
    scale, shift = 1.0, 0.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + channel, mask=col < cols, other=0.0)[None, :]
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + channel, mask=col < cols, other=0.0)[None, :]
        x = tl.fma(x, tl.zeros_like(x) + scale, tl.zeros_like(x) + shift)
    elif scale_ptr is not None:
        x = x * scale
    if dy_ptr is not None:
        tl.store(image_ptr + off, x.to(image_ptr.dtype.element_ty), mask=mask)
    elif FORMAT is None:
        tl.store(y_ptr + y_off, x.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        store_quantized(x, mask, to, block, tile, tiles, rows, cols, FORMAT, CAST, ALIGN, STATIC)
