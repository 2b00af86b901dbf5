"""Kernels that quantize and dequantize; `quantize` defines what they compute."""

from __future__ import annotations

from ...language import tl, triton
from ...runtime import kernel
from ...tiles import (
    amax,
    fp32_scale,
    given_scale,
    hadamard_columns,
    larger,
    round_to,
    scaled,
)
from ..common.copies import (
    Encoding,
    StridedCodes,
    Stripe,
    Tile,
    load_scale_source,
    store_codes,
    store_rows,
    store_stripe,
    store_transposed,
    tensor_factor,
)
from ..common.loads import load_decoded, load_tile, tile_mask


@triton.jit
def _draw(seed_low, seed_high, row, col, WHICH: tl.constexpr):
    """Draw 32 random bits per element of a tile; row [R], col [C] -> uint32 [R, C]. The seed's halves arrive
    complemented."""
    c0 = tl.broadcast_to(col[None, :].to(tl.uint32), (row.shape[0], col.shape[0]))
    c1 = tl.broadcast_to(row[:, None].to(tl.uint32), (row.shape[0], col.shape[0]))
    zero = tl.zeros_like(c0)
    first, _, _, _ = tl.philox_impl(
        c0, c1, zero + WHICH, zero, zero + (~seed_low).to(tl.uint32), zero + (~seed_high).to(tl.uint32), 10
    )
    return first


@kernel
def quantize_rows_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale or the scales [rows]; or None
    amax_ptr,  # [programs], or None
    rows,
    cols,
    row_programs,
    x_stride,
    copy: StridedCodes,  # row-wise; absent when only amax is computed
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller supplies the scales
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Store the row-wise copy. `row_programs` programs share ROWS rows and interleave their tiles; one program takes
    them all if a scale covers the whole row."""
    cols = (cols // ALIGN) * ALIGN
    row = (tl.program_id(0) // row_programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    lane = tl.arange(0, TILE)
    first = (tl.program_id(0) % row_programs) * TILE
    step = row_programs * TILE
    WHOLE: tl.constexpr = FORMAT.block == "row" or FORMAT.block == "tensor"
    if FORMAT.block == "row":
        if not STATIC:
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                largest = larger(
                    largest, amax(load_tile(x_ptr + x_off[:, None] + col[None, :], mask), axis=1)
                )
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
        else:
            row_scale = tl.load(given_ptr + row, mask=row < rows, other=1.0)
            factor = given_scale(row_scale, FORMAT)
        if copy.data is not None:
            tl.store(copy.scale + row, row_scale, mask=row < rows)
        factor = factor[:, None]
        amax_or_scale = 0.0
    else:
        amax_or_scale = load_scale_source(given_ptr, copy.scale, None, STATIC)
    if FORMAT.block == "tensor" and given_ptr is not None:
        factor = tensor_factor(Encoding(amax_or_scale, INPUT_MAX, FORMAT, CAST, STATIC))

    program_amax = tl.zeros((ROWS,), tl.float32)
    for start in range(first, cols, step):
        start = tl.multiple_of(start, TILE)
        col = start + lane
        mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
        x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
        if amax_ptr is not None:
            program_amax = larger(program_amax, amax(x, axis=1))
        if copy.data is not None:
            random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
            if WHOLE:
                codes = round_to(scaled(x, factor, FORMAT), random, FORMAT, CAST)
                store_codes(
                    codes, copy, Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED), FORMAT
                )
            else:
                store_rows(
                    x,
                    copy,
                    Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                    Encoding(amax_or_scale, INPUT_MAX, FORMAT, CAST, STATIC),
                    random,
                )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def quantize_stripe_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale, or None
    given_t_ptr,  # the amax of the rotated tensor, or None
    row_amax_ptr,  # [rows] for block "row", or None
    col_amax_ptr,  # [cols] for block "row", or None
    amax_ptr,  # [programs], or None
    amax_t_ptr,  # [programs]: amax of the rotated elements, or None
    rows,
    cols,
    x_stride,
    copy: StridedCodes,  # row-wise
    copy_t: StridedCodes,  # column-wise
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller supplies the scales
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Store both copies of a tile that is as tall as the longest group. Block "row" reads precomputed amaxes of rows
    and columns. Without copies, compute only the amax."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    amax_or_scale = load_scale_source(given_ptr, copy.scale, copy_t.scale, STATIC)
    random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
    random_t = _draw(seed_low, seed_high, row, col, 1) if STOCHASTIC else None
    ROTATED: tl.constexpr = FORMAT.hadamard is not None and (
        copy_t.data is not None or amax_t_ptr is not None
    )
    if FORMAT.block == "row":
        if copy.data is not None:
            largest = tl.load(row_amax_ptr + row, mask=row < rows, other=0.0)
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(copy.scale + row, row_scale, mask=(row < rows) & (start == 0))
            codes = round_to(scaled(x, factor[:, None], FORMAT), random, FORMAT, CAST)
            store_codes(codes, copy, Tile(row, start, rows, cols, ALIGN, True, COLS_MASKED), FORMAT)
        if copy_t.data is not None:
            largest = tl.load(col_amax_ptr + col, mask=col < cols, other=0.0)
            col_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(copy_t.scale + col, col_scale, mask=(col < cols) & (stripe == 0))
            codes = round_to(scaled(x, factor[None, :], FORMAT), random_t, FORMAT, CAST)
            store_transposed(codes, copy_t, Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED), FORMAT)
    elif ROTATED:
        nothing = StridedCodes(None, None, 0, 0, 0)
        if copy.data is not None:
            store_stripe(
                x,
                copy,
                nothing,
                Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
                Encoding(amax_or_scale, INPUT_MAX, FORMAT, CAST, STATIC),
                random,
            )
        rotated = hadamard_columns(x).to(x_ptr.dtype.element_ty).to(tl.float32)
        if copy_t.data is not None:  # the last 16 rows are padded with zeros
            store_stripe(
                rotated,
                nothing,
                copy_t,
                Stripe(stripe, start, (rows + 15) // 16 * 16, cols, ALIGN, COLS_MASKED),
                Encoding(tl.load(given_t_ptr), INPUT_MAX, FORMAT, CAST, STATIC),
                None,
                _draw(seed_low, seed_high, row, col, 1) if STOCHASTIC else None,
            )
        if amax_t_ptr is not None:
            tl.store(amax_t_ptr + tl.program_id(0), amax(amax(rotated, axis=1), axis=0))
    else:
        store_stripe(
            x,
            copy,
            copy_t,
            Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
            Encoding(amax_or_scale, INPUT_MAX, FORMAT, CAST, STATIC),
            random,
            random_t,
        )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(x, axis=1), axis=0))


@kernel
def amax_kernel(
    x_ptr,  # [rows, cols]
    row_ptr,  # fp32 [tiles, rows]: amax of each row segment, or None
    col_ptr,  # fp32 [stripes, cols]: amax of each column segment
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute the amax of every row and every column of a tile in one read."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
    if row_ptr is not None:
        tl.store(row_ptr + tile.to(tl.int64) * rows + row, amax(x, axis=1), mask=row < rows)
    tl.store(col_ptr + stripe * cols + col, amax(x, axis=0), mask=col < cols)


@kernel
def dequantize_kernel(
    codes: StridedCodes,  # [rows, cols]
    global_ptr,  # nvfp4's scale of the tensor, or None
    out_ptr,  # [rows, cols]
    rows,
    cols,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute q * d in fp32 (q * (d * g) for nvfp4) and round once to the result's dtype."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    start = (tl.program_id(0) % tiles) * TILE
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    values = load_decoded(
        codes, global_ptr, row, row < rows, start, cols, FORMAT, TILE, ALIGN, COLS_MASKED
    )  # [ROWS, TILE]
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    out_off = tl.multiple_of(row * cols, ALIGN)
    tl.store(out_ptr + out_off[:, None] + col[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
