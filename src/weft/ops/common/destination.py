"""Quantized results of kernels that compute them tile by tile: what a tile stores as codes.

A tile of 128 rows fills both copies and the squares of a format. A tile of other rows fills the row-wise copy; its
groups, and with a scale for each row the whole rows, lie within it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...tiles import amax, encode, fp32_scale, scaled
from .copies import (
    Encoding,
    StridedCodes,
    Stripe,
    Tile,
    load_scale_source,
    store_codes,
    store_rows,
    store_stripe,
    tensor_factor,
)
from .passes import FP32_MAX


class Destination(NamedTuple):
    """Copies of a quantized result, as the argument of a kernel."""

    given: (
        Tensor | None
    )  # a scalar: the amax of the result, if the scales depend on it, or with STATIC its scale
    amax: Tensor | None  # [blocks of rows, tiles]: amax of each tile, or None
    copy: StridedCodes  # row-wise
    copy_t: StridedCodes  # column-wise


@triton.jit
def store_quantized(
    y,
    mask,
    to,
    block,
    tile,
    tiles,
    rows,
    cols,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    ALIGN: tl.constexpr,
    STATIC: tl.constexpr = False,
):
    """Store the amax of a tile of a result, and its codes and scales. A group lies within the tile, and with a scale
    for each row so does the row. With STATIC, `to.given` is the tensor's scale."""
    y = tl.where(mask, y, 0.0)  # [ROWS, COLS]
    block = block.to(tl.int64)
    start = tile * y.shape[1]
    row = block * y.shape[0] + tl.arange(0, y.shape[0])
    largest = amax(y, axis=1)
    if to.amax is not None:
        tl.store(to.amax + block * tiles + tile, amax(largest, axis=0))
    given = load_scale_source(to.given, to.copy.scale, to.copy_t.scale, STATIC)
    if to.copy_t.data is not None or FORMAT.square:
        if to.copy.data is not None or to.copy_t.data is not None:
            store_stripe(
                y,
                to.copy,
                to.copy_t,
                Stripe(block, start, rows, cols, ALIGN, True),
                Encoding(given, FP32_MAX, FORMAT, CAST, STATIC),
            )
    elif to.copy.data is not None:
        if FORMAT.block == "row" or FORMAT.block == "tensor":
            if FORMAT.block == "row":
                scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                tl.store(to.copy.scale + row, scale, mask=row < rows)
                factor = factor[:, None]
            else:
                factor = tensor_factor(Encoding(given, FP32_MAX, FORMAT, CAST, STATIC))
            codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
            store_codes(codes, to.copy, Tile(row, start, rows, cols, ALIGN, True, True), FORMAT)
        else:
            store_rows(
                y,
                to.copy,
                Tile(row, start, rows, cols, ALIGN, True, True),
                Encoding(given, FP32_MAX, FORMAT, CAST, STATIC),
            )
