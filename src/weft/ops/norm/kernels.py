"""The kernels of RMSNorm and LayerNorm. What they compute, and the names, are those of `norm.py`."""

from __future__ import annotations

from ...language import tl, triton
from ...runtime import kernel
from ...tiles import amax, encode, fp32_scale, larger, merge_moments, scaled
from ..common.copies import (
    Codes,
    Encoding,
    Stripe,
    Tile,
    store_codes,
    store_rows,
    store_stripe,
    tensor_factor,
)
from ..common.results import FP32_MAX
from ..common.rows import load_tile, load_vector, row_offset, tile_mask
from ..common.sums import add_to


@triton.jit
def _load_h(x_ptr, x_off, residual_ptr, residual_off, col, mask):
    """h [R, C] in fp32, rounded to x's dtype if it is a sum."""
    h = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
    if residual_ptr is not None:
        h += load_tile(residual_ptr + residual_off[:, None] + col[None, :], mask)
        h = h.to(x_ptr.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def _load_again(x_ptr, x_off, residual_ptr, residual_off, residual_out_ptr, y_off, col, mask):
    """The h that was loaded before: from where it was stored, if it was."""
    if residual_out_ptr is not None:
        return load_tile(residual_out_ptr + y_off[:, None] + col[None, :], mask)
    else:
        return _load_h(x_ptr, x_off, residual_ptr, residual_off, col, mask)


@triton.jit
def _statistics(h, mask, count, LAYER: tl.constexpr):
    """(mean, sum of squared deviations) of each row of a tile with `count` elements; rms takes them from 0."""
    if LAYER:
        mean = tl.sum(h, axis=1) / count
        centred = h - mean[:, None]
        if mask is not None:
            centred = tl.where(mask, centred, 0.0)  # a lane without an element would add mean^2
        return mean, tl.sum(centred * centred, axis=1)
    else:
        return tl.zeros((h.shape[0],), tl.float32), tl.sum(h * h, axis=1)


@triton.jit
def _affine(
    h, mean, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation_off, col, cols, mask, weight_offset,
    DTYPE: tl.constexpr, LAYER: tl.constexpr, LLAMA: tl.constexpr, COLS_MASKED: tl.constexpr,
):  # fmt: skip
    """y [R, C] from h, zero where there is no element."""
    y = h
    if LAYER:
        y = y - mean[:, None]
    y = y * rstd[:, None]
    if LLAMA:
        y = y.to(DTYPE).to(tl.float32)
    if weight_ptr is not None:
        y = y * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)
    if bias_ptr is not None:
        y = y + load_vector(bias_ptr, col, cols, COLS_MASKED)
    if scale_ptr is not None:
        y = y * (1.0 + load_tile(scale_ptr + modulation_off[:, None] + col[None, :], mask))
    if shift_ptr is not None:
        y = y + load_tile(shift_ptr + modulation_off[:, None] + col[None, :], mask)
    if mask is not None:
        y = tl.where(mask, y, 0.0)
    return y


@kernel
def norm_kernel(
    x_ptr,  # [rows, cols]
    residual_ptr,  # like x, or None
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None
    scale_ptr,  # [samples, cols], or None
    shift_ptr,  # [samples, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    y_ptr,  # [rows, cols], or None
    residual_out_ptr,  # [rows, cols], or None
    rstd_ptr,  # [rows]: 1 / rms or 1 / deviation of each row, written, or read if KNOWN; or None
    mean_ptr,  # [rows]: mean of each row of a LayerNorm, written, or read if KNOWN; or None
    amax_ptr,  # [programs]: the largest |y| of each, or None
    rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    residual_stride,
    modulation_stride,
    rows_per_sample,
    copy: Codes,  # row-wise
    eps: float,
    weight_offset: float,
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    FORMAT: tl.constexpr,  # of the quantised copy, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the scale of the tensor is given
    KNOWN: tl.constexpr,  # the statistics are given
    ROWS: tl.constexpr,  # rows of a program
    TILE: tl.constexpr,  # columns at a time; all of them unless LOOP
    LOOP: tl.constexpr,
    NESTED: tl.constexpr,  # x has two row strides
    ALIGN: tl.constexpr,  # cols and all row strides are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """Rows in full, ROWS to a program: y, or its row-wise copy; or no more than residual_out and the statistics."""
    cols = (cols // ALIGN) * ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x_off = row_offset(row, inner, x_outer_stride, x_inner_stride, NESTED, ALIGN)
    residual_off = tl.multiple_of(row * residual_stride, ALIGN)
    modulation_off = tl.multiple_of((row // rows_per_sample) * modulation_stride, ALIGN)
    y_off = tl.multiple_of(row * cols, ALIGN)
    piece = tl.arange(0, TILE)

    mean = None
    if KNOWN:
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if LAYER:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    elif LOOP:
        mean = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols, TILE):
            col = start + piece
            mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            h = _load_h(x_ptr, x_off, residual_ptr, residual_off, col, mask)
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + y_off[:, None] + col[None, :], h.to(DTYPE), mask=mask)
            count = tl.minimum(cols - start, TILE).to(tl.float32)
            tile_mean, tile_squares = _statistics(h, mask, count, LAYER)
            if LAYER:
                _, mean, squares = merge_moments(
                    tl.cast(start, tl.float32), mean, squares, count, tile_mean, tile_squares
                )
            else:
                squares += tile_squares
    if not LOOP:
        mask = tile_mask(row, piece, rows, cols, ROWS_MASKED, COLS_MASKED)
        h = _load_h(x_ptr, x_off, residual_ptr, residual_off, piece, mask)  # [ROWS, TILE]
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + y_off[:, None] + piece[None, :], h.to(DTYPE), mask=mask)
        if not KNOWN:
            mean, squares = _statistics(h, mask, cols.to(tl.float32), LAYER)
    if not KNOWN:
        rstd = tl.div_rn(
            tl.full((ROWS,), 1.0, tl.float32),
            tl.sqrt_rn(tl.div_rn(squares, tl.zeros((ROWS,), tl.float32) + cols.to(tl.float32)) + eps),
        )
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < rows)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < rows)

    # Without anything made of y the statistics are all.
    if y_ptr is not None or amax_ptr is not None or FORMAT is not None:
        if given_ptr is not None:
            given = tl.load(given_ptr)
        else:
            given = 0.0

        BY_ROW: tl.constexpr = False if FORMAT is None else FORMAT.block == "row"
        BY_TENSOR: tl.constexpr = False if FORMAT is None else FORMAT.block == "tensor"
        if LOOP and residual_out_ptr is not None:
            tl.debug_barrier()  # below, h is read back from where it was stored
        if BY_ROW and LOOP:  # the row's largest y has to be known before its first code
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                h = _load_again(x_ptr, x_off, residual_ptr, residual_off, residual_out_ptr, y_off, col, mask)
                y = _affine(
                    h, mean, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation_off, col, cols, mask,
                    weight_offset, DTYPE, LAYER, LLAMA, COLS_MASKED,
                )  # fmt: skip
                largest = larger(largest, amax(y, axis=1))

        program_amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols if LOOP else 1, TILE):
            col = start + piece
            exists = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            if LOOP:
                value = _load_again(
                    x_ptr, x_off, residual_ptr, residual_off, residual_out_ptr, y_off, col, exists
                )
            else:
                value = h
            y = _affine(
                value, mean, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation_off, col, cols, exists,
                weight_offset, DTYPE, LAYER, LLAMA, COLS_MASKED,
            )  # fmt: skip
            if amax_ptr is not None:
                program_amax = larger(program_amax, amax(y, axis=1))
            if y_ptr is not None:
                tl.store(y_ptr + y_off[:, None] + col[None, :], y.to(y_ptr.dtype.element_ty), mask=exists)
            if BY_ROW or BY_TENSOR:
                if BY_TENSOR:
                    factor = tensor_factor(Encoding(given, FP32_MAX, FORMAT, CAST, STATIC))
                    codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
                else:
                    if not LOOP:
                        largest = amax(y, axis=1)
                    row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                    codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
                    tl.store(copy.scale + row, row_scale, mask=row < rows)
                store_codes(
                    codes, copy, Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED), FORMAT
                )
            elif FORMAT is not None:
                store_rows(
                    y,
                    copy,
                    Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                    Encoding(given, FP32_MAX, FORMAT, CAST, STATIC),
                )
        if amax_ptr is not None:
            tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def norm_stripe_kernel(
    h_ptr,  # [rows, cols]
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None
    scale_ptr,  # [samples, cols], or None
    shift_ptr,  # [samples, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    rstd_ptr,  # [rows]
    mean_ptr,  # [rows], or None
    amax_ptr,  # [programs], or None
    rows,
    cols,
    inner,
    h_outer_stride,
    h_inner_stride,
    modulation_stride,
    rows_per_sample,
    copy: Codes,  # row-wise
    copy_t: Codes,  # column-wise
    weight_offset: float,
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the scale of the tensor is given
    ROWS: tl.constexpr,  # rows of a stripe: the longest group along M
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """A tile as tall as the longest group: its copies, made from the same registers. The statistics of the rows are
    known already."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    h_off = row_offset(row, inner, h_outer_stride, h_inner_stride, NESTED, ALIGN)
    modulation_off = tl.multiple_of((row // rows_per_sample) * modulation_stride, ALIGN)
    h = load_tile(h_ptr + h_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if LAYER:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    else:
        mean = None
    y = _affine(
        h, mean, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation_off, col, cols, mask,
        weight_offset, h_ptr.dtype.element_ty, LAYER, LLAMA, COLS_MASKED,
    )  # fmt: skip
    if given_ptr is not None:
        given = tl.load(given_ptr)
    else:
        given = 0.0
    store_stripe(
        y,
        copy,
        copy_t,
        Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
        Encoding(given, FP32_MAX, FORMAT, CAST, STATIC),
    )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(y, axis=1), axis=0))


@kernel
def norm_backward_kernel(
    h_ptr,  # [rows, cols]
    dy_ptr,  # [rows, cols]
    dresidual_ptr,  # [rows, cols], or None
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None; read for dscale alone
    scale_ptr,  # [samples, cols], or None
    rstd_ptr,  # [rows]
    mean_ptr,  # [rows], or None
    dx_ptr,  # [rows, cols], or None
    dweight_ptr,  # partial sums in fp32 [programs, cols], or None
    dbias_ptr,  # partial sums in fp32 [programs, cols], or None
    dscale_ptr,  # partial sums in fp32 [programs, cols]; with PER_ROW the gradient, [rows, cols]; or None
    dshift_ptr,  # partial sums in fp32 [programs, cols]; with PER_ROW the gradient, [rows, cols]; or None
    sample_rows,  # rows of a sample; all rows are one, unless they are modulated by sample
    sample_programs,  # programs of a sample
    program_rows,  # rows of a program
    cols,
    inner,
    h_outer_stride,
    h_inner_stride,
    dy_outer_stride,
    dy_inner_stride,
    dresidual_stride,
    scale_stride,
    weight_offset,
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    PER_ROW: tl.constexpr,  # each row has its own modulation
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LOOP: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """A run of rows of one sample: dx of each, and the sums over them.

    Without LOOP the sums stay in registers until the last row. With it they lie in the program's own row of the
    partial sums, which it reads and writes for each of its rows.
    """
    cols = (cols // ALIGN) * ALIGN
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    SUMS: tl.constexpr = not LOOP
    program = tl.program_id(0).to(tl.int64)
    sample = program // sample_programs
    sums_off = tl.multiple_of(program * cols, ALIGN)
    first = (program % sample_programs) * program_rows
    last = tl.minimum(first + program_rows, sample_rows)
    piece = tl.arange(0, TILE)
    ROWS_MASKED: tl.constexpr = ROWS > 1
    count = cols.to(tl.float32)

    sum_weight = tl.zeros((TILE,), tl.float32)
    sum_bias = tl.zeros((TILE,), tl.float32)
    sum_scale = tl.zeros((TILE,), tl.float32)
    sum_shift = tl.zeros((TILE,), tl.float32)
    for begin in range(first, last, ROWS):
        local = begin + tl.arange(0, ROWS)  # [ROWS], within the sample
        row = sample * sample_rows + local
        h_off = row_offset(row, inner, h_outer_stride, h_inner_stride, NESTED, ALIGN)
        dy_off = row_offset(row, inner, dy_outer_stride, dy_inner_stride, NESTED, ALIGN)
        dresidual_off = tl.multiple_of(row * dresidual_stride, ALIGN)
        dx_off = tl.multiple_of(row * cols, ALIGN)
        scale_off = tl.multiple_of((row if PER_ROW else row * 0 + sample) * scale_stride, ALIGN)
        rstd = tl.load(rstd_ptr + row, mask=local < last, other=0.0)[:, None]
        if LAYER:
            mean = tl.load(mean_ptr + row, mask=local < last, other=0.0)[:, None]
        else:
            mean = 0.0

        tz = tl.zeros((ROWS,), tl.float32)  # sum over the row of t * z
        ts = tl.zeros((ROWS,), tl.float32)  # sum over the row of t
        if LOOP:
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(local, col, last, cols, ROWS_MASKED, COLS_MASKED)
                z, _, _, t = _gradient_of_z(
                    h_ptr, h_off, dy_ptr, dy_off, weight_ptr, scale_ptr, scale_off, mean, rstd, weight_offset,
                    col, cols, mask, LAYER, COLS_MASKED,
                )  # fmt: skip
                tz += tl.sum(t * z, axis=1)
                if LAYER:
                    ts += tl.sum(t, axis=1)

        for start in range(0, cols if LOOP else 1, TILE):
            col = start + piece
            mask = tile_mask(local, col, last, cols, ROWS_MASKED, COLS_MASKED)
            z, dy, d, t = _gradient_of_z(
                h_ptr, h_off, dy_ptr, dy_off, weight_ptr, scale_ptr, scale_off, mean, rstd, weight_offset,
                col, cols, mask, LAYER, COLS_MASKED,
            )  # fmt: skip
            if SUMS:
                tz = tl.sum(t * z, axis=1)
                if LAYER:
                    ts = tl.sum(t, axis=1)
            if dx_ptr is not None:
                dh = t - z * (tz / count)[:, None]
                if LAYER:
                    dh -= (ts / count)[:, None]
                dh = dh * rstd
                if dresidual_ptr is not None:
                    dh += load_tile(dresidual_ptr + dresidual_off[:, None] + col[None, :], mask)
                tl.store(dx_ptr + dx_off[:, None] + col[None, :], dh.to(DTYPE), mask=mask)

            if LLAMA:
                z = z.to(DTYPE).to(tl.float32)
            if dscale_ptr is not None:
                y = z
                if weight_ptr is not None:
                    y = y * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)
                if bias_ptr is not None:
                    y = y + load_vector(bias_ptr, col, cols, COLS_MASKED)
            if SUMS:
                if dweight_ptr is not None:
                    sum_weight += tl.sum(d * z, axis=0)
                if dbias_ptr is not None:
                    sum_bias += tl.sum(d, axis=0)
                if dscale_ptr is not None and not PER_ROW:
                    sum_scale += tl.sum(dy * y, axis=0)
                if dshift_ptr is not None and not PER_ROW:
                    sum_shift += tl.sum(dy, axis=0)
            else:
                more = begin > first
                if dweight_ptr is not None:
                    add_to(dweight_ptr + sums_off, tl.sum(d * z, axis=0), more, col, cols)
                if dbias_ptr is not None:
                    add_to(dbias_ptr + sums_off, tl.sum(d, axis=0), more, col, cols)
                if dscale_ptr is not None and not PER_ROW:
                    add_to(dscale_ptr + sums_off, tl.sum(dy * y, axis=0), more, col, cols)
                if dshift_ptr is not None and not PER_ROW:
                    add_to(dshift_ptr + sums_off, tl.sum(dy, axis=0), more, col, cols)
            if PER_ROW and dscale_ptr is not None:
                scale_grad = (dy * y).to(dscale_ptr.dtype.element_ty)
                tl.store(dscale_ptr + dx_off[:, None] + col[None, :], scale_grad, mask=mask)
            if PER_ROW and dshift_ptr is not None:
                shift_grad = dy.to(dshift_ptr.dtype.element_ty)
                tl.store(dshift_ptr + dx_off[:, None] + col[None, :], shift_grad, mask=mask)
    if SUMS:
        exists = piece < cols
        if dweight_ptr is not None:
            tl.store(dweight_ptr + sums_off + piece, sum_weight, mask=exists)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums_off + piece, sum_bias, mask=exists)
        if dscale_ptr is not None and not PER_ROW:
            tl.store(dscale_ptr + sums_off + piece, sum_scale, mask=exists)
        if dshift_ptr is not None and not PER_ROW:
            tl.store(dshift_ptr + sums_off + piece, sum_shift, mask=exists)


@triton.jit
def _gradient_of_z(
    h_ptr, h_off, dy_ptr, dy_off, weight_ptr, scale_ptr, scale_off, mean, rstd, weight_offset, col, cols, mask,
    LAYER: tl.constexpr, COLS_MASKED: tl.constexpr,
):  # fmt: skip
    """(z, dy, d, t) [R, C] as the module's formulas name them, zero where there is no element."""
    z = load_tile(h_ptr + h_off[:, None] + col[None, :], mask)
    if LAYER:
        z = z - mean
    z = z * rstd
    if LAYER and mask is not None:
        z = tl.where(mask, z, 0.0)
    dy = load_tile(dy_ptr + dy_off[:, None] + col[None, :], mask)
    d = dy
    if scale_ptr is not None:
        d = d * (1.0 + load_tile(scale_ptr + scale_off[:, None] + col[None, :], mask))
    t = d
    if weight_ptr is not None:
        t = t * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)
    return z, dy, d, t
