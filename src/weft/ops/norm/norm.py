"""RMSNorm and LayerNorm, with the residual add before them, the modulation after them, and the quantiser last.

    h = round(x + residual)                    to x's dtype; everything below reads h
    r = 1 / sqrt(mean(h^2) + eps)              rms                       z = h * r
    r = 1 / sqrt(mean((h - m)^2) + eps)        layer, m = mean(h)        z = (h - m) * r
    z = round(z)                               to x's dtype, with casting="llama" only
    y = z * (weight + weight_offset) + bias
    y = y * (1 + scale) + shift                modulation, per row or per sample
    out = round(y), or its codes and scales

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. Backward,
with d the gradient of y (times 1 + scale if modulated) and t = d * (weight + weight_offset):

    dh = r * (t - z * mean(t * z))             rms; layer: r * (t - mean(t) - z * mean(t * z))
    dx = dresidual_in = dh + dresidual_out
    dweight = sum d * z      dbias = sum d     dscale = sum dy * (z * (weight + offset) + bias)     dshift = sum dy

The sums over rows are fp32 partial sums, one per program, added up in order: the same bits every run. Rounding
steps are passed straight through.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...language import tl, triton
from ...quant import Format, QTensor
from ...quant.copies import allocate_copies, count_copies, split_copies
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, nvfp4_global_reference, quantize_copies
from ...quant.straight import wrap
from ...runtime import Launch, Sharding, capabilities_of, define_flat_op, is_distributed, kernel
from ...tiles import amax, encode, fp32_scale, larger, merge_moments, scaled
from ..common.checks import FLOATS, check_input, check_tensor, epsilon, is_tensor, real
from ..common.copies import (
    STRIPE,
    blocks_over_rows,
    cast_mode,
    check_quantize,
    copies_and_amax,
    copy_arguments,
    count_stripes,
    reduce_amax,
    store_codes,
    store_rows,
    store_stripe,
    stripe_tile,
    tensor_factor,
)
from ..common.rows import (
    align_of,
    compute_dtype,
    contiguous,
    count_rows,
    cpu_tile,
    load_tile,
    load_vector,
    one_stride,
    row_offset,
    row_strides,
    tile_mask,
)

# ---- reference ------------------------------------------------------------------------------------------


def _normalized(
    h: Tensor, eps: float, kind: str, casting: str, io: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(z, rstd, mean) of h [M, K], in h's dtype."""
    mean = h.mean(1) if kind == "layer" else None
    centred = h if mean is None else h - mean[:, None]
    rstd = 1.0 / torch.sqrt(centred.square().mean(1) + eps)
    z = centred * rstd[:, None]
    return (z.to(io).to(h.dtype) if casting == "llama" else z), rstd, mean


def _per_row(modulation: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Per-sample rows repeated for each of the sample's rows."""
    return modulation.to(dtype).repeat_interleave(rows // max(modulation.shape[0], 1), 0)


def norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, eps: float, weight_offset: float, kind: str, casting: str, stats: bool,
    out_dtype: torch.dtype, format: str | None, rowwise: bool, columnwise: bool, quant_scale: Tensor | None,
    return_amax: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition. x [..., K], residual like x, scale and shift [M or samples, K], weight and bias [K]."""
    dtype = compute_dtype(x)
    flat = x.reshape(count_rows(x), x.shape[-1])
    h = flat if residual is None else (flat.to(dtype) + residual.reshape(flat.shape).to(dtype)).to(x.dtype)
    y, rstd, mean = _normalized(h.to(dtype), eps, kind, casting, x.dtype)
    if weight is not None:
        y = y * (weight.to(dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(dtype)
    if scale is not None:
        y = y * (1.0 + _per_row(scale, len(flat), dtype))
    if shift is not None:
        y = y + _per_row(shift, len(flat), dtype)
    outputs = []
    if format is None:
        outputs.append(y.to(out_dtype).view(x.shape))
    else:
        f = Format.of(format)
        largest = amax_reference(y) if f.needs_tensor_amax or return_amax else None
        outputs.append(stand_in(x))
        outputs += quantize_copies(
            y.float(), f, rowwise=rowwise, columnwise=columnwise, tensor_amax=largest, scale=quant_scale,
            input_dtype=torch.float32,
        )  # fmt: skip
        if f.block == "nvfp4":
            assert largest is not None
            outputs.append(nvfp4_global_reference(largest, f))
        if return_amax:
            assert largest is not None
            outputs.append(largest)
    if residual is not None:
        outputs.append(h.view(x.shape))
    if stats:
        outputs += [rstd] if mean is None else [rstd, mean]
    return outputs


def norm_backward_reference(
    h: Tensor, dy: Tensor, dresidual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, rstd: Tensor, mean: Tensor | None, weight_offset: float, casting: str,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Of dx, dweight, dbias, dscale and dshift those that are needed."""
    dtype = compute_dtype(h)
    flat = h.reshape(count_rows(h), h.shape[-1])
    rows, cols = flat.shape
    v, d = flat.to(dtype), dy.reshape(flat.shape).to(dtype)
    exact = (v if mean is None else v - mean.to(dtype)[:, None]) * rstd.to(dtype)[:, None]
    z = exact.to(h.dtype).to(dtype) if casting == "llama" else exact
    w = 1.0 if weight is None else weight.to(dtype) + weight_offset
    sums: list[Tensor] = []
    need_x, need_weight, need_bias, need_scale, need_shift = needs
    before = d
    if scale is not None:
        d = d * (1.0 + _per_row(scale, rows, dtype))
    if need_weight:
        assert weight is not None
        sums.append((d * z).sum(0).to(weight.dtype))
    if need_bias:
        assert bias is not None
        sums.append(d.sum(0).to(bias.dtype))
    if need_scale or need_shift:
        assert scale is not None
        samples = scale.shape[0]
        y = z * w + (0.0 if bias is None else bias.to(dtype))
        if need_scale:
            sums.append((before * y).view(samples, rows // max(samples, 1), cols).sum(1).to(scale.dtype))
        if need_shift:
            sums.append(before.view(samples, rows // max(samples, 1), cols).sum(1).to(scale.dtype))
    if not need_x:
        return sums
    t = d * w
    dh = t - exact * (t * exact).mean(1, keepdim=True)
    if mean is not None:
        dh = dh - t.mean(1, keepdim=True)
    dh = dh * rstd.to(dtype)[:, None]
    if dresidual is not None:
        dh = dh + dresidual.reshape(flat.shape).to(dtype)
    return [dh.to(h.dtype).view(h.shape), *sums]


# ---- kernels --------------------------------------------------------------------------------------------

FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


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
def _norm_kernel(
    x_ptr,  # [rows, cols]
    residual_ptr,  # like x, or None
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None
    scale_ptr,  # [samples, cols], or None
    shift_ptr,  # [samples, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    y_ptr,  # [rows, cols], or None
    residual_out_ptr,  # [rows, cols], or None
    rstd_ptr,  # [rows], or None; written, or read if KNOWN
    mean_ptr,  # so too
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    data_scale_ptr,
    rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    residual_stride,
    modulation_stride,
    rows_per_sample,
    data_stride,
    data_scale_row_stride,
    data_scale_col_stride,
    eps,
    weight_offset,
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
                    factor = tensor_factor(given, FP32_MAX, FORMAT, STATIC)
                    codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
                else:
                    if not LOOP:
                        largest = amax(y, axis=1)
                    row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                    codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
                    tl.store(data_scale_ptr + row, row_scale, mask=row < rows)
                store_codes(
                    codes, data_ptr, row, start, rows, cols, data_stride, FORMAT, ALIGN, ROWS_MASKED, COLS_MASKED,
                )  # fmt: skip
            elif FORMAT is not None:
                store_rows(
                    y, None, data_ptr, data_scale_ptr, given, row, start, rows, cols, data_stride,
                    data_scale_row_stride, data_scale_col_stride, FP32_MAX, FORMAT, CAST, ALIGN, ROWS_MASKED,
                    COLS_MASKED,
                )  # fmt: skip
        if amax_ptr is not None:
            tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def _norm_stripe_kernel(
    h_ptr,  # [rows, cols]
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None
    scale_ptr,  # [samples, cols], or None
    shift_ptr,  # [samples, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    rstd_ptr,  # [rows]
    mean_ptr,  # [rows], or None
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    data_scale_ptr,
    data_t_ptr,  # column-wise codes, or None
    data_t_scale_ptr,
    rows,
    cols,
    inner,
    h_outer_stride,
    h_inner_stride,
    modulation_stride,
    rows_per_sample,
    data_stride,
    data_scale_row_stride,
    data_scale_col_stride,
    data_t_stride,
    data_t_scale_row_stride,
    data_t_scale_col_stride,
    weight_offset,
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
        y, None, None, data_ptr, data_scale_ptr, data_t_ptr, data_t_scale_ptr, given, stripe, start, rows,
        cols, data_stride, data_scale_row_stride, data_scale_col_stride, data_t_stride, data_t_scale_row_stride,
        data_t_scale_col_stride, FP32_MAX, FORMAT, CAST, STATIC, ALIGN, COLS_MASKED,
    )  # fmt: skip
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(y, axis=1), axis=0))


@kernel
def _norm_backward_kernel(
    h_ptr,  # [rows, cols]
    dy_ptr,  # [rows, cols]
    dresidual_ptr,  # [rows, cols], or None
    weight_ptr,  # [cols], or None
    bias_ptr,  # [cols], or None; read for dscale alone
    scale_ptr,  # [samples, cols], or None
    rstd_ptr,  # [rows]
    mean_ptr,  # [rows], or None
    dx_ptr,  # [rows, cols], or None
    dweight_ptr,  # partial sums [programs, cols] in fp32, or None; so the next
    dbias_ptr,
    dscale_ptr,  # partial sums like dweight; with PER_ROW the gradients themselves, [rows, cols]
    dshift_ptr,
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
                    _add_to(dweight_ptr + sums_off, tl.sum(d * z, axis=0), more, col, cols)
                if dbias_ptr is not None:
                    _add_to(dbias_ptr + sums_off, tl.sum(d, axis=0), more, col, cols)
                if dscale_ptr is not None and not PER_ROW:
                    _add_to(dscale_ptr + sums_off, tl.sum(dy * y, axis=0), more, col, cols)
                if dshift_ptr is not None and not PER_ROW:
                    _add_to(dshift_ptr + sums_off, tl.sum(dy, axis=0), more, col, cols)
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


@triton.jit
def _add_to(sums_ptr, value, more, col, cols):
    """Add a piece to a sum in memory, or begin the sum with it."""
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


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowConfig:
    """How rows are cut: `rows` of them to a program, `tile` columns at a time, in a loop if that is not all."""

    rows: int
    tile: int
    loop: bool
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest_tile: int, target: str) -> RowConfig:
        # A power of two that holds the row, up to what registers hold.
        tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
        if target == "cpu":
            # Measured with 2048 columns: reading a row twice is 1.1 times as fast as keeping it.
            # Quantised rows in pieces of 1024, plain ones of 512: 1.05 times as fast as the other way round.
            return RowConfig(1, cpu_tile(cols, smallest_tile, 1024 if smallest_tile > 1 else 512), True, 4)
        loop = tile > 16384
        tile = min(tile, 8192 if loop else 16384)
        rows = max(1, 2048 // tile)
        return RowConfig(rows, tile, loop, _warps(rows * tile, target))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose_backward(cols: int, target: str) -> RowConfig:
        # Two tiles and up to four sums live at once: half the columns of the forward.
        tile = max(1 << max(cols - 1, 0).bit_length(), 64)
        if target == "cpu":
            tile = cpu_tile(cols, largest=4096)
            return RowConfig(1, tile, tile < cols, 4)
        loop = tile > 8192
        tile = min(tile, 4096 if loop else 8192)
        rows = max(1, 1024 // tile)
        # In a loop there is more to hold: 8 numbers to a thread (40 registers on sm_90 in place of 80).
        return RowConfig(rows, tile, loop, _warps(rows * tile * (2 if loop else 1), target))


def _warps(numbers: int, target: str) -> int:
    """Warps for a tile of so many numbers: 16 to a thread, which are 16 bytes of codes and two loads of bf16, but no
    fewer than 128 threads. Compiled for sm_90: 32 to 48 registers forward, 72 to 123 backward."""
    lanes = 64 if target.startswith("gfx") else 32
    return min(16, max(128 // lanes, numbers // (16 * lanes)))


@functools.cache
def _rows_launch(
    layer: bool, llama: bool, spec: str | None, cast: int, static: bool, known: bool, config: RowConfig,
    nested: bool, align: int, masked: bool,
) -> Launch:  # fmt: skip
    return Launch.of(
        _norm_kernel, num_warps=config.num_warps, LAYER=layer, LLAMA=llama, FORMAT=spec and Format.of(spec),
        CAST=cast, STATIC=static, KNOWN=known, ROWS=config.rows, TILE=config.tile, LOOP=config.loop,
        NESTED=nested, ALIGN=align, COLS_MASKED=masked,
    )  # fmt: skip


def _allocate_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, eps: float, weight_offset: float, kind: str, casting: str, stats: bool,
    out_dtype: torch.dtype, format: str | None, rowwise: bool, columnwise: bool, quant_scale: Tensor | None,
    return_amax: bool,
) -> list[Tensor]:  # fmt: skip
    cols, rows = x.shape[-1], count_rows(x)
    outputs = []
    if format is None:
        outputs.append(torch.empty(x.shape, dtype=out_dtype, device=x.device))
    else:
        f = Format.of(format)
        outputs.append(stand_in(x))
        outputs += allocate_copies(f, rows, cols, x.device, rowwise=rowwise, columnwise=columnwise)
        if return_amax:
            outputs.append(torch.empty((), dtype=torch.float32, device=x.device))
    if residual is not None:
        outputs.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    if stats:
        outputs.append(torch.empty(rows, dtype=torch.float32, device=x.device))
        if kind == "layer":
            outputs.append(torch.empty(rows, dtype=torch.float32, device=x.device))
    return outputs


def _launch_norm(
    outputs: list[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, eps: float, weight_offset: float, kind: str, casting: str,
    stats: bool, out_dtype: torch.dtype, format: str | None, rowwise: bool, columnwise: bool,
    quant_scale: Tensor | None, return_amax: bool,
) -> None:  # fmt: skip
    cols = x.shape[-1]
    rows = x.numel() // cols
    layer, llama = kind == "layer", casting == "llama"
    mean = outputs[-1] if stats and layer else None
    rstd = outputs[-2 if layer else -1] if stats else None
    residual_out = None if residual is None else outputs[-1 - (1 + layer) * stats]
    target = capabilities_of(x.device)

    weight, bias = contiguous(weight), contiguous(bias)
    x, inner, outer_stride, inner_stride = row_strides(x)
    residual, residual_stride = one_stride(residual)
    modulation_stride, rows_per_sample = 0, 1
    if scale is not None or shift is not None:
        scale, scale_stride = one_stride(scale)
        shift, modulation_stride = one_stride(shift)
        if scale is not None and shift is not None and scale_stride != modulation_stride:
            scale, shift = scale.contiguous(), shift.contiguous()
        one = scale if scale is not None else shift
        assert one is not None
        modulation_stride, rows_per_sample = one.stride(0), rows // one.shape[0]
    align = align_of(cols, outer_stride, inner_stride, residual_stride, modulation_stride)
    nested = inner > 1
    integers = (
        rows, cols, inner, outer_stride, inner_stride, residual_stride, modulation_stride, rows_per_sample
    )  # fmt: skip

    if format is None:
        config = RowConfig.choose(cols, 1, target.target)
        _rows_launch(layer, llama, None, 0, False, False, config, nested, align, cols % config.tile != 0)(
            (-(-rows // config.rows), 1, 1),
            (
                x,
                residual,
                weight,
                bias,
                scale,
                shift,
                None,
                outputs[0],
                residual_out,
                rstd,
                mean,
                None,
                None,
                None,
            ),
            (*integers, 0, 0, 0),
            (eps, weight_offset),
        )
        return

    f = Format.of(format)
    cast = cast_mode(target)
    row_copy, col_copy = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise)
    amax_out = outputs[1 + count_copies(f, rowwise=rowwise, columnwise=columnwise)] if return_amax else None
    rows_config = RowConfig.choose(cols, f.group, target.target)
    programs = -(-rows // rows_config.rows)
    by_tensor = f.needs_tensor_amax and quant_scale is None
    by_stripes = columnwise or f.block == "128x128"
    if (by_tensor or by_stripes) and rstd is None:
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = torch.empty(rows, dtype=torch.float32, device=x.device) if layer else None

    def rows_pass(spec: str | None, partials: Tensor | None, known: bool = False) -> None:
        data, data_scale, *strides = copy_arguments(None if spec is None else row_copy)
        vectors = (weight, bias, scale, shift)
        if spec is None and partials is None:  # no more than the statistics
            vectors = (None, None, None, None)
        _rows_launch(
            layer, llama, spec, cast, quant_scale is not None, known, rows_config, nested, align,
            cols % rows_config.tile != 0,
        )(
            (programs, 1, 1),
            (
                x, residual, *vectors, given if spec else None, None, None if known else residual_out, rstd, mean,
                partials, data, data_scale,
            ),
            (*integers, *strides),
            (eps, weight_offset),
        )  # fmt: skip

    given, partials = quant_scale, None
    scales = [copy.scale for copy in (row_copy, col_copy) if copy is not None]
    if quant_scale is not None:
        for copied in scales:
            copied.copy_(quant_scale.reshape(1, 1))
    # A pass over the rows takes their statistics and makes the row-wise copy, if that needs no more than a row: with a
    # column-wise copy the same pass as without, since what it stores decides the order of a GPU's sums.
    if by_tensor:
        partials = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(None, partials)
        given = amax_out if amax_out is not None else torch.empty((), dtype=torch.float32, device=x.device)
        if f.block == "nvfp4":
            scales = [outputs[count_copies(f, rowwise=rowwise, columnwise=columnwise)]]
        reduce_amax(partials, f, torch.float32, amax=given, scales=scales)
        amax_out = None
    elif rowwise and f.block != "128x128":
        if amax_out is not None:
            partials = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(format, partials)
        if partials is not None:
            reduce_amax(partials, None, torch.float32, amax=amax_out)
            amax_out = None
        row_copy = None
    else:
        rows_pass(None, None)
    if col_copy is None and row_copy is None:
        return

    # What is left is made from h and the statistics.
    if residual_out is not None:
        x, residual, nested = residual_out, None, False
        integers = (rows, cols, 1, cols, 0, 0, modulation_stride, rows_per_sample)
    if not by_stripes:
        rows_pass(format, None, known=True)
        return
    tile, num_warps = stripe_tile(f.block, target.target, norm=True)
    tiles = count_stripes(rows, cols) * -(-cols // tile)
    partials = None
    if amax_out is not None:
        partials = torch.empty(tiles, dtype=torch.float32, device=x.device)
    data, data_scale, *strides = copy_arguments(row_copy)
    data_t, data_t_scale, *strides_t = copy_arguments(col_copy)
    launch = Launch.of(
        _norm_stripe_kernel, num_warps=num_warps, LAYER=layer, LLAMA=llama, FORMAT=f, CAST=cast,
        STATIC=quant_scale is not None, ROWS=STRIPE, TILE=tile, NESTED=nested, ALIGN=align,
        COLS_MASKED=cols % tile != 0,
    )  # fmt: skip
    launch(
        (tiles, 1, 1),
        (x, weight, bias, scale, shift, given, rstd, mean, partials, data, data_scale, data_t, data_t_scale),
        (*integers[:5], *integers[6:], *strides, *strides_t),  # all but the stride of the residual
        (weight_offset,),
    )  # fmt: skip
    if partials is not None:
        reduce_amax(partials, None, torch.float32, amax=amax_out)


def _allocate_norm_backward(
    h: Tensor, dy: Tensor, dresidual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, rstd: Tensor, mean: Tensor | None, weight_offset: float, casting: str,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    like = (h, weight, bias, scale, scale)
    return [
        torch.empty(t.shape, dtype=t.dtype, device=h.device)
        for t, need in zip(like, needs, strict=True)
        if need and t is not None
    ]


def _launch_norm_backward(
    outputs: list[Tensor], h: Tensor, dy: Tensor, dresidual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, scale: Tensor | None, rstd: Tensor, mean: Tensor | None, weight_offset: float,
    casting: str, needs: list[bool],
) -> None:  # fmt: skip
    cols = h.shape[-1]
    rows = h.numel() // cols
    target = capabilities_of(h.device)
    weight, bias = contiguous(weight), contiguous(bias)
    h, inner, h_outer, h_inner = row_strides(h)
    dy, dy_nest, dy_outer, dy_inner = row_strides(dy)
    if inner != dy_nest:  # two ways to nest rows: both are straightened
        h, inner, h_outer, h_inner = row_strides(h.contiguous())
        dy, _, dy_outer, dy_inner = row_strides(dy.contiguous())
    dresidual, dresidual_stride = one_stride(dresidual)
    scale, scale_stride = one_stride(scale)
    per_row = scale is not None and scale.shape[0] == rows
    samples = 1 if scale is None or per_row else scale.shape[0]
    align = align_of(cols, h_outer, h_inner, dy_outer, dy_inner, dresidual_stride, scale_stride)
    config = RowConfig.choose_backward(cols, target.target)
    sample_rows = rows // samples
    wanted = max(1, (target.multiprocessors * 2) // samples)
    sample_programs = min(-(-sample_rows // config.rows), wanted)
    program_rows = -(-sample_rows // sample_programs)
    program_rows = -(-program_rows // config.rows) * config.rows
    sample_programs = -(-sample_rows // program_rows)
    programs = samples * sample_programs

    results = iter(outputs)
    grads = [next(results) if need else None for need in needs]
    direct = (True, False, False, per_row, per_row)
    sums = [
        grad
        if grad is None or written
        else torch.empty((programs, cols), dtype=torch.float32, device=h.device)
        for grad, written in zip(grads, direct, strict=True)
    ]
    launch = Launch.of(
        _norm_backward_kernel, num_warps=config.num_warps, LAYER=mean is not None, LLAMA=casting == "llama",
        PER_ROW=per_row, ROWS=config.rows, TILE=config.tile, LOOP=config.loop, NESTED=inner > 1, ALIGN=align,
        COLS_MASKED=cols % config.tile != 0,
    )  # fmt: skip
    launch(
        (programs, 1, 1),
        (h, dy, dresidual, weight, bias if needs[3] else None, scale, rstd, mean, *sums),
        (
            sample_rows, sample_programs, program_rows, cols, inner, h_outer, h_inner, dy_outer, dy_inner,
            dresidual_stride, scale_stride,
        ),
        (weight_offset,),
    )  # fmt: skip
    counts = (0, programs, programs, sample_programs, sample_programs)
    for grad, partial, written, count in zip(grads, sums, direct, counts, strict=True):
        if grad is not None and not written:
            # Few columns and hundreds of rows: many loads have to be under way at once.
            piece, tile = (1, 256) if target.target == "cpu" else (32, 64)
            launch = Launch.of(_sum_kernel, num_warps=4, ROWS=piece, TILE=tile, ALIGN=align_of(cols))
            launch((-(-cols // tile) * (programs // count), 1, 1), (partial, grad), (count, cols))


# ---- registration ---------------------------------------------------------------------------------------


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, residual, scale, shift, _, weight_offset, kind, casting = inputs[:10]
    layer = kind == "layer"
    mean = output[-1] if layer else None
    rstd = output[-2 if layer else -1]
    ctx.residual_index = None if residual is None else len(output) - 2 - layer
    h = x if residual is None else output[ctx.residual_index]
    ctx.save_for_backward(h, weight, bias, scale if scale is not None else shift, rstd, mean)
    ctx.scaled, ctx.shifted = scale is not None, shift is not None
    ctx.weight_offset, ctx.casting = weight_offset, casting
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for i, t in enumerate(output) if i not in (0, ctx.residual_index)))


def _norm_gradients(ctx: Any, grads: Any) -> Any:
    h, weight, bias, modulation, rstd, mean = ctx.saved_tensors
    dy = grads[0]
    dresidual = None if ctx.residual_index is None else grads[ctx.residual_index]
    nothing = (None,) * ctx.inputs
    if dy is None and dresidual is None:
        return nothing
    if dy is None:
        dy = h.new_zeros(1).expand(h.shape)
    wants_x, wants_weight, wants_bias, wants_residual, wants_scale, wants_shift = ctx.needs_input_grad[:6]
    needs = [wants_x or wants_residual, wants_weight, wants_bias, wants_scale, wants_shift]
    scale = modulation if ctx.scaled else None
    if ctx.shifted and not ctx.scaled:
        scale = torch.zeros_like(modulation)  # a shift alone: as if scaled by 1
    results = iter(
        norm_backward_op(
            h, dy, dresidual, weight, bias, scale, rstd, mean, ctx.weight_offset, ctx.casting, needs
        )
    )
    dx, dweight, dbias, dscale, dshift = (next(results) if need else None for need in needs)
    return (
        dx if wants_x else None,
        dweight,
        dbias,
        dx if wants_residual else None,
        dscale,
        dshift,
        *nothing[6:],
    )


def _shard_norm(a: Any) -> Sharding:
    rows = "... k"
    per_sample = [None if t is None else " ".join(map(str, range(t.dim() - 1))) for t in (a.scale, a.shift)]
    modulations = [
        "k" if t is None else f"({'_' if len(t) == 1 else lead}) k"
        for t, lead in zip((a.scale, a.shift), per_sample, strict=True)
    ]
    outputs = {"y": rows, **copies_and_amax(a.format, a.rowwise, a.columnwise, a.return_amax)}
    if a.residual is not None:
        outputs["residual"] = rows
    if a.stats:
        outputs |= {"rstd": None} if a.kind == "rms" else {"rstd": None, "mean": None}
    joint, block = blocks_over_rows(a.format, a.rowwise, a.columnwise, a.quant_scale is not None)
    return Sharding(
        {
            "x": rows,
            "residual": rows,
            "weight": "k",
            "bias": "k",
            "scale": modulations[0],
            "shift": modulations[1],
            "quant_scale": "",
        },
        outputs,
        {"k": "the norm is taken over it", **joint},
        block,
    )


norm_backward_op = define_flat_op(
    "norm_backward(Tensor h, Tensor dy, Tensor? dresidual, Tensor? weight, Tensor? bias, Tensor? scale, Tensor rstd, "
    "Tensor? mean, float weight_offset, str casting, bool[] needs) -> Tensor[]",
    allocate=_allocate_norm_backward,
    launch=_launch_norm_backward,
    reference=norm_backward_reference,
    variants=32,
)

norm_op = define_flat_op(
    "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, float eps, "
    "float weight_offset, str kind, str casting, bool stats, ScalarType out_dtype, str? format, bool rowwise, "
    "bool columnwise, Tensor? quant_scale, bool return_amax) -> Tensor[]",
    allocate=_allocate_norm,
    launch=_launch_norm,
    reference=norm_reference,
    setup_context=_setup_norm,
    backward=_norm_gradients,
    sharding=_shard_norm,
    variants=72,
)


# ---- public functions -----------------------------------------------------------------------------------

Modulation = Tensor | tuple[Tensor | None, Tensor | None]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    modulation: Modulation | None = None,
    casting: Literal["fp32", "llama"] = "fp32",
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """RMSNorm over the last dimension: `y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias`.

    x: [..., K] in bf16, fp16 or fp32, of any strides (heads of a packed QKV included). weight, bias: [K], in any
    of these dtypes. Returns y, or a tuple of y and those of the following that were asked for, in this order.

    - `residual` [..., K]: h = x + residual, rounded to x's dtype, is normalised and also returned. Otherwise h = x.
    - `modulation`: `(scale, shift)`, each [..., K] with the leading dimensions of x (per row) or the first few of
      them (per sample): y = y * (1 + scale) + shift. Packed into one tensor [..., 2K], or [..., 3K] whose last
      third, the gate for the next residual add, is returned.
    - `return_amax` (with `quantize`): the largest |y|, an fp32 scalar on the device, for delayed scaling.

    - `eps`: None is what it is to `torch.nn.RMSNorm`, the eps of fp32 (of fp64 for an x in fp64).
    - `weight_offset`: 1 for weights stored around zero, as Gemma does.
    - `casting`: "fp32" rounds once, at the end; "llama" rounds the normalised h to x's dtype before the weight.
    - `out_dtype`: of y, x's by default.
    - `quantize`: a `Format` or its name; y is then a `QTensor` made from the fp32 y without another rounding.
      `rowwise` and `columnwise` choose its copies; the row-wise one is the same with a column-wise one and without.
      `quant_scale` is a given scale (static or delayed) for block "tensor".
    - `out`, `residual_out`: write into these instead of new tensors; not with autograd. `residual_out` may be
      `residual` itself.

    >>> import torch, weft
    >>> x, weight = torch.randn(8, 256, dtype=torch.bfloat16), torch.ones(256)
    >>> y = weft.rms_norm(x, weight)
    >>> q, h = weft.rms_norm(x, weight, residual=x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([8, 256]), torch.Size([256, 8]))
    """
    check_input("x", x)
    return _norm(
        "rms", x, weight, bias, epsilon(eps, x), weight_offset, residual, modulation, casting, out_dtype, quantize,
        rowwise, columnwise, quant_scale, return_amax, out, residual_out,
    )  # fmt: skip


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    modulation: Modulation | None = None,
    casting: Literal["fp32", "llama"] = "fp32",
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """LayerNorm over the last dimension: `y = (h - mean(h)) / sqrt(var(h) + eps) * (weight + weight_offset) + bias`.

    Arguments and results are those of `rms_norm`; eps is a number.

    >>> import torch, weft
    >>> x = torch.randn(2, 16, 128)
    >>> modulation = torch.randn(2, 3 * 128)  # scale, shift and gate of each sample
    >>> y, gate = weft.layer_norm(x, modulation=modulation)
    >>> gate.shape
    torch.Size([2, 128])
    """
    check_input("x", x)
    return _norm(
        "layer", x, weight, bias, epsilon(real("eps", eps), x), weight_offset, residual, modulation, casting,
        out_dtype, quantize, rowwise, columnwise, quant_scale, return_amax, out, residual_out,
    )  # fmt: skip


def _norm(
    kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    residual: Tensor | None, modulation: Modulation | None, casting: str, out_dtype: torch.dtype | None,
    quantize: Format | str | None, rowwise: bool, columnwise: bool, quant_scale: Tensor | None,
    return_amax: bool, out: Tensor | None, residual_out: Tensor | None,
) -> Any:  # fmt: skip
    shape, device = x.shape, x.device
    if weight is not None:
        check_tensor("weight", weight, FLOATS, device, shape[-1:], note=_ORDER)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, device, shape[-1:], note=_ORDER)
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), device, shape)
    if casting not in ("fp32", "llama"):
        raise ValueError(f"casting must be 'fp32' or 'llama'; got {casting!r}")
    scale = shift = gate = None
    if modulation is not None:
        scale, shift, gate = _split_modulation(modulation, x)
    format = check_quantize(quantize, rowwise, columnwise, quant_scale, return_amax, out_dtype, device)
    stats = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (scale is not None and scale.requires_grad)
        or (shift is not None and shift.requires_grad)
    )
    args = (
        x, weight, bias, residual, scale, shift, eps, real("weight_offset", weight_offset), kind, casting, stats,
        out_dtype or x.dtype,
        None if format is None else format.spec, rowwise, columnwise, quant_scale, return_amax,
    )  # fmt: skip
    if out is None and residual_out is None:
        outputs = norm_op(*args)
    else:
        outputs = _norm_into(out, residual_out, args)
    if residual is None and gate is None and format is None:
        return outputs[0]
    results = []
    after = 1
    if format is None:
        results.append(outputs[0])
    else:
        rest = outputs[1:]
        copies = split_copies(format, rest, rowwise=rowwise, columnwise=columnwise)
        results.append(wrap(outputs[0], format, *copies))
        after += count_copies(format, rowwise=rowwise, columnwise=columnwise) + return_amax
    if residual is not None:
        results.append(outputs[after])
    if gate is not None:
        results.append(gate)
    if return_amax:
        results.append(outputs[after - 1])
    return results[0] if len(results) == 1 else tuple(results)


# What to do about another library's order of arguments.
_ORDER = "Arguments are (x, weight, bias), and eps= by its name; no shape is given: the last dimension is normalised"


def _split_modulation(
    modulation: Modulation, x: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """scale and shift as [samples, K], and the gate as it was packed."""
    cols = x.shape[-1]
    gate = None
    if is_tensor(modulation):
        check_input("modulation", modulation)
        parts = modulation.shape[-1] // max(cols, 1)
        if modulation.shape[-1] != parts * cols or parts not in (2, 3):
            raise ValueError(
                f"a packed modulation ends in {2 * cols} (scale, shift) or {3 * cols} (scale, shift, gate); "
                f"got {modulation.shape[-1]}"
            )
        scale, shift, *rest = modulation.split(cols, dim=-1)
        gate = rest[0] if rest else None
    elif isinstance(modulation, (tuple, list)) and len(modulation) == 2:
        scale, shift = modulation
    else:
        raise TypeError(
            "modulation must be (scale, shift), two tensors, or one in which they are packed; got "
            f"a {type(modulation).__name__}"
        )
    flat: list[Tensor | None] = []
    for name, part in (("scale", scale), ("shift", shift)):
        if part is None:
            flat.append(None)
            continue
        check_tensor(f"modulation's {name}", part, FLOATS, x.device)
        lead = list(part.shape[:-1])
        while lead and lead[-1] == 1 and len(lead) > 1:
            lead.pop()
        per_row = list(x.shape[:-1])
        if part.shape[-1:] != x.shape[-1:] or (per_row[: len(lead)] != lead and lead != [1]):
            raise ValueError(
                f"modulation's {name} must be [..., {cols}] with leading dimensions {tuple(per_row)} (per row) or the "
                f"first of them (per sample); got {tuple(part.shape)}"
            )
        # Of DTensors the shards are joined into rows, each rank its own.
        flat.append(part.reshape(*(lead if is_distributed(x, part) else [-1]), cols))
    if flat[0] is not None and flat[1] is not None and flat[0].shape != flat[1].shape:
        raise ValueError(
            f"scale and shift must have one shape; got {tuple(flat[0].shape)}, {tuple(flat[1].shape)}"
        )
    return flat[0], flat[1], gate


def _norm_into(out: Tensor | None, residual_out: Tensor | None, args: tuple[Any, ...]) -> list[Tensor]:
    """The op with its results in the caller's tensors."""
    x, residual, stats, format, rowwise, columnwise = args[0], args[3], args[10], args[12], args[13], args[14]
    if stats:
        raise ValueError("out= and residual_out= are for inference: call them under torch.no_grad()")
    if residual_out is not None and residual is None:
        raise ValueError("residual_out= needs residual=")
    if torch.compiler.is_compiling() or not norm_op.serves(x):
        outputs = norm_op(*args)
    else:
        outputs = norm_op.allocate(*args)
    mine = list(outputs)
    if isinstance(out, QTensor):
        copies = [copy for copy, made in ((out.rowwise, rowwise), (out.columnwise, columnwise)) if made]
        fits = format == out.format.spec and out.shape == x.shape and out.device == x.device
        if not fits or None in copies:
            raise ValueError(
                f"out is a {out!r}; the result is {format} of shape {tuple(x.shape)} on {x.device}, with "
                f"{' and '.join(['rowwise'] * rowwise + ['columnwise'] * columnwise)}"
            )
        parts = [part for copy in copies if copy is not None for part in copy[:2]]
        last = None if copies[0] is None else copies[0].global_scale
        parts += [] if last is None else [last]
        mine[1 : 1 + len(parts)] = parts
    elif out is not None:
        if format is not None:
            raise ValueError(
                f"out of a quantised result must be a QTensor, {format}; got {type(out).__name__}"
            )
        check_tensor("out", out, (args[11],), x.device, x.shape)
        mine[0] = out
    if residual_out is not None:
        check_tensor("residual_out", residual_out, (x.dtype,), x.device, x.shape)
        mine[-1] = residual_out
    for name, given in (("out", out), ("residual_out", residual_out)):
        if given is not None and not isinstance(given, QTensor) and not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {given.stride()}")
    if torch.compiler.is_compiling() or not norm_op.serves(x):
        for target, value in zip(mine, outputs, strict=True):
            if target is not value:
                target.copy_(value)
    else:
        norm_op.launch(mine, *args)
    return mine
