"""Kernels of the gated norm. The docstring of `gated.py` has the formulas and their names.

In the kernels a "row" is one group of a row of y; the groups of a row of y are consecutive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....language import tl, triton
from ....runtime import kernel
from ....tiles import activate, activate_with_slope, amax, encode, fp32_scale, larger, quantize_rows, scaled
from ...common.copies import (
    Encoding,
    StridedCodes,
    Stripe,
    Tile,
    load_scale_source,
    store_codes,
    store_stripe,
    tensor_factor,
)
from ...common.loads import load_tile, load_vector, round_promoted, round_to_dtype, tile_mask
from ...common.passes import FP32_MAX
from ...common.sums import add_to


class Rows(NamedTuple):
    """Pointer to a tensor, and offsets of a tile's rows."""

    ptr: Any
    off: Any  # int64 [R], start of each row


class Weight(NamedTuple):
    """Weight of the groups of a tile's rows."""

    ptr: Any  # or None
    off: Any  # [R], start of each row's weight; None if all rows use the one at ptr
    offset: Any  # added to it


class Inputs(NamedTuple):
    """Inputs of the backward for the rows of a tile."""

    x: Any  # Rows
    gate: Any  # Rows
    dy: Any  # Rows
    rstd: Any  # [R, 1]


@triton.jit
def _row_offset(row, second, third, first_stride, second_stride, third_stride, ALIGN: tl.constexpr):
    """Return int64 offsets of rows that are indexed in three dimensions [any, second, third]. The dtype of `row` is
    only as wide as the number of rows needs, since 64-bit divisions cost time and registers."""
    rest = row // third
    off = (rest // second).to(tl.int64) * first_stride + (rest % second).to(tl.int64) * second_stride
    return tl.multiple_of(off + (row % third).to(tl.int64) * third_stride, ALIGN)


@triton.jit
def _gated(x, rstd, gate, weight, col, mask, x_ptr, ACT: tl.constexpr, LLAMA: tl.constexpr):
    """Compute y [R, C] from x, zero past the last row and column. x_ptr supplies x's dtype."""
    y = x * rstd[:, None]
    if LLAMA:
        y = round_to_dtype(y, x_ptr)
    if weight.ptr is not None:
        y = y * (load_tile(weight.ptr + weight.off[:, None] + col[None, :], mask) + weight.offset)
        if LLAMA:
            y = round_promoted(y, x_ptr, weight.ptr)
    y = y * activate(load_tile(gate.ptr + gate.off[:, None] + col[None, :], mask), 1.0, ACT)
    if mask is not None:
        y = tl.where(mask, y, 0.0)
    return y


@kernel
def gated_norm_kernel(
    x_ptr,  # [rows, cols]
    gate_ptr,  # [rows, cols], or None to compute only the statistics
    weight_ptr,  # [groups, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    y_ptr,  # [rows, cols], or None
    rstd_ptr,  # [rows], or None; read if KNOWN, else written
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    data_scale_ptr,
    bound,  # rows of all programs, including rows past the end
    rows,
    cols,  # of a group
    groups,
    second,  # rows are indexed in three dimensions; x and gate have three row strides each
    third,
    x_first_stride,
    x_second_stride,
    x_third_stride,
    gate_first_stride,
    gate_second_stride,
    gate_third_stride,
    data_scale_row_stride,
    data_scale_col_stride,
    eps: float,
    weight_offset: float,
    ACT: tl.constexpr,
    LLAMA: tl.constexpr,
    FORMAT: tl.constexpr,  # of the quantized copy, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    KNOWN: tl.constexpr,  # an earlier pass has written the statistics
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # columns at a time; all of them unless LOOP
    LOOP: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and all strides
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """Normalize ROWS whole groups per program: store y, or its row-wise copy, or only the statistics."""
    cols = (cols // ALIGN) * ALIGN
    row = tl.program_id(0).to(bound.dtype) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    x_off = _row_offset(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
    gate_off = _row_offset(
        row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN
    )
    weight_off = tl.multiple_of((row % groups) * cols, ALIGN)
    y_off = tl.multiple_of(row.to(tl.int64) * cols, ALIGN)
    lane = tl.arange(0, TILE)

    if not LOOP:
        mask = tile_mask(row, lane, rows, cols, ROWS_MASKED, COLS_MASKED)
        x = load_tile(x_ptr + x_off[:, None] + lane[None, :], mask)  # [ROWS, TILE]
    if KNOWN:
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    else:
        if LOOP:
            squares = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
                squares += tl.sum(x * x, axis=1)
        else:
            squares = tl.sum(x * x, axis=1)
        count = tl.zeros((ROWS,), tl.float32) + cols.to(tl.float32)
        rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(tl.div_rn(squares, count) + eps))
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < rows)

    if gate_ptr is not None:
        gate, weight = Rows(gate_ptr, gate_off), Weight(weight_ptr, weight_off, weight_offset)
        scale_source = load_scale_source(given_ptr, data_scale_ptr, None, STATIC)
        BY_ROW: tl.constexpr = False if FORMAT is None else FORMAT.block == "row"
        BY_TENSOR: tl.constexpr = False if FORMAT is None else FORMAT.block == "tensor"
        if BY_ROW and LOOP:  # the codes of a row need its largest |y| first
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
                y = _gated(x, rstd, gate, weight, col, mask, x_ptr, ACT, LLAMA)
                largest = larger(largest, amax(y, axis=1))

        program_amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols if LOOP else 1, TILE):
            col = start + lane
            exists = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            if LOOP:
                value = load_tile(x_ptr + x_off[:, None] + col[None, :], exists)
            else:
                value = x
            y = _gated(value, rstd, gate, weight, col, exists, x_ptr, ACT, LLAMA)
            if amax_ptr is not None:
                program_amax = larger(program_amax, amax(y, axis=1))
            if y_ptr is not None:
                tl.store(y_ptr + y_off[:, None] + col[None, :], y.to(y_ptr.dtype.element_ty), mask=exists)
            if FORMAT is not None:
                if BY_TENSOR:
                    factor = tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC))
                    codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
                elif BY_ROW:
                    if not LOOP:
                        largest = amax(y, axis=1)
                    row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                    codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
                    tl.store(data_scale_ptr + row, row_scale, mask=row < rows)
                else:  # each block lies within one group, or there is only one group
                    codes, scale = quantize_rows(y, None, scale_source, FP32_MAX, FORMAT, CAST)
                    G: tl.constexpr = FORMAT.group
                    blocks = (cols + G - 1) // G
                    block = start // G + tl.arange(0, TILE // G)
                    block_off = (((row % groups) * blocks)[:, None] + block[None, :]).to(tl.int64)
                    scale_off = (row // groups).to(tl.int64)[:, None] * data_scale_row_stride
                    scale_off += block_off * data_scale_col_stride
                    scale_mask = tile_mask(row, block, rows, blocks, ROWS_MASKED, COLS_MASKED)
                    tl.store(data_scale_ptr + scale_off, scale, mask=scale_mask)
                # The groups of a row of codes are consecutive. An odd row of 4-bit codes ends within a byte.
                data_stride = (cols + FORMAT.packed - 1) // FORMAT.packed
                store_codes(
                    codes,
                    StridedCodes(
                        data_ptr, data_scale_ptr, data_stride, data_scale_row_stride, data_scale_col_stride
                    ),
                    Tile(row.to(tl.int64), start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                    FORMAT,
                )
        if amax_ptr is not None:
            tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def gated_norm_stripe_kernel(
    x_ptr,  # [tokens, cols]
    gate_ptr,  # [tokens, cols]
    weight_ptr,  # [cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    rstd_ptr,  # [tokens, groups]
    amax_ptr,  # [programs], or None
    bound,  # rows of all programs, including rows past the end
    tokens,
    cols,  # of all groups
    groups,
    second,  # as in `gated_norm_kernel`, where a token is `groups` rows
    third,
    x_first_stride,
    x_second_stride,
    x_third_stride,
    gate_first_stride,
    gate_second_stride,
    gate_third_stride,
    copy: StridedCodes,  # row-wise
    copy_t: StridedCodes,  # column-wise
    weight_offset: float,
    ACT: tl.constexpr,
    LLAMA: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    ROWS: tl.constexpr,  # tokens of a stripe: the rows of the longest block
    TILE: tl.constexpr,
    WITHIN: tl.constexpr,  # every tile lies in one group
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Store both copies of a tile as tall as the longest block, from one read. An earlier pass has written the
    statistics."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    token = stripe.to(bound.dtype) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(token, col, tokens, cols, True, COLS_MASKED)
    row = token * groups  # the first group of each token
    x_off = _row_offset(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
    gate_off = _row_offset(
        row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN
    )
    y = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    if WITHIN:
        rstd = tl.load(rstd_ptr + (row + start // (cols // groups)), mask=token < tokens, other=0.0)
        y = y * rstd[:, None]
    else:
        y = y * load_tile(rstd_ptr + (row[:, None] + (col // (cols // groups))[None, :]), mask)
    if LLAMA:
        y = round_to_dtype(y, x_ptr)
    if weight_ptr is not None:
        y = y * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)
        if LLAMA:
            y = round_promoted(y, x_ptr, weight_ptr)
    y = y * activate(load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask), 1.0, ACT)
    y = tl.where(mask, y, 0.0)
    scale_source = load_scale_source(given_ptr, copy.scale, copy_t.scale, STATIC)
    store_stripe(
        y,
        copy,
        copy_t,
        Stripe(stripe, start, tokens, cols, ALIGN, COLS_MASKED),
        Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC),
    )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(y, axis=1), axis=0))


@triton.jit
def _gradient_of_y(
    a, weight, col, cols, mask, ACT: tl.constexpr, LLAMA: tl.constexpr, COLS_MASKED: tl.constexpr
):
    """Return (z, z as the weight multiplies it, d, t, dgate) [R, C], as named in the formulas of `gated.py`, zero past
    the last row and column."""
    z = load_tile(a.x.ptr + a.x.off[:, None] + col[None, :], mask) * a.rstd
    dy = load_tile(a.dy.ptr + a.dy.off[:, None] + col[None, :], mask)
    f, slope = activate_with_slope(load_tile(a.gate.ptr + a.gate.off[:, None] + col[None, :], mask), 1.0, ACT)
    d = dy * f
    t = d
    dgate = dy * slope
    z_cast = z
    if LLAMA:
        z_cast = round_to_dtype(z, a.x.ptr)
    if weight.ptr is not None:
        w = load_vector(weight.ptr, col, cols, COLS_MASKED) + weight.offset  # [1, C]
        t = t * w
        if LLAMA:
            dgate = dgate * round_promoted(z_cast * w, a.x.ptr, weight.ptr)
        else:
            dgate = dgate * w * z
    else:
        dgate = dgate * z_cast
    return z, z_cast, d, t, dgate


@kernel
def gated_norm_backward_kernel(
    x_ptr,  # [rows, cols]
    gate_ptr,  # [rows, cols]
    dy_ptr,  # [rows, cols]
    weight_ptr,  # [groups, cols], or None
    rstd_ptr,  # [rows]
    dx_ptr,  # [rows, cols], or None
    dgate_ptr,  # [rows, cols], or None
    dweight_ptr,  # partial sums [parts, groups, cols] in fp32, or None
    bound,  # rows of all programs, including rows past the end
    tokens,  # rows of a group
    program_tokens,
    cols,  # of a group
    groups,
    second,  # rows are indexed in three dimensions; x, gate, dy and dx have three row strides each
    third,
    x_first_stride,
    x_second_stride,
    x_third_stride,
    gate_first_stride,
    gate_second_stride,
    gate_third_stride,
    dy_first_stride,
    dy_second_stride,
    dy_third_stride,
    dx_first_stride,
    dx_second_stride,
    dx_third_stride,
    weight_offset: float,
    ACT: tl.constexpr,
    LLAMA: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LOOP: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute dx and dgate for a run of tokens of one group, and the sum of dweight over them.

    Without LOOP the sum stays in registers until the last token. With LOOP it is in the program's own row of the
    partial sums, which is read and written for each token.
    """
    cols = (cols // ALIGN) * ALIGN
    program = tl.program_id(0)
    group = program % groups
    if weight_ptr is not None:
        weight_ptr += tl.multiple_of(group.to(tl.int64) * cols, ALIGN)
    sums_off = tl.multiple_of(program.to(tl.int64) * cols, ALIGN)  # [parts, groups, cols]
    first = (program // groups).to(bound.dtype) * program_tokens
    last = tl.minimum(first + program_tokens, tokens)
    lane = tl.arange(0, TILE)
    ROWS_MASKED: tl.constexpr = ROWS > 1
    count = cols.to(tl.float32)

    sums = tl.zeros((ROWS, TILE), tl.float32)
    for begin in range(first, last, ROWS):
        token = begin + tl.arange(0, ROWS)  # [ROWS]
        row = token * groups + group
        x_off = _row_offset(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
        gate_off = _row_offset(
            row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN
        )
        dy_off = _row_offset(row, second, third, dy_first_stride, dy_second_stride, dy_third_stride, ALIGN)
        dx_off = _row_offset(row, second, third, dx_first_stride, dx_second_stride, dx_third_stride, ALIGN)
        dgate_off = tl.multiple_of(row.to(tl.int64) * cols, ALIGN)
        rstd = tl.load(rstd_ptr + row, mask=token < last, other=0.0)[:, None]
        inputs = Inputs(Rows(x_ptr, x_off), Rows(gate_ptr, gate_off), Rows(dy_ptr, dy_off), rstd)
        weight = Weight(weight_ptr, None, weight_offset)

        tz = tl.zeros((ROWS,), tl.float32)  # sum over the group of t * z
        if LOOP and dx_ptr is not None:
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(token, col, last, cols, ROWS_MASKED, COLS_MASKED)
                z, _, _, t, _ = _gradient_of_y(inputs, weight, col, cols, mask, ACT, LLAMA, COLS_MASKED)
                tz += tl.sum(t * z, axis=1)

        for start in range(0, cols if LOOP else 1, TILE):
            col = start + lane
            mask = tile_mask(token, col, last, cols, ROWS_MASKED, COLS_MASKED)
            z, z_cast, d, t, dgate = _gradient_of_y(inputs, weight, col, cols, mask, ACT, LLAMA, COLS_MASKED)
            if dx_ptr is not None:
                if not LOOP:
                    tz = tl.sum(t * z, axis=1)
                dx = (t - z * (tz / count)[:, None]) * rstd
                tl.store(dx_ptr + dx_off[:, None] + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                rounded = dgate.to(dgate_ptr.dtype.element_ty)
                tl.store(dgate_ptr + dgate_off[:, None] + col[None, :], rounded, mask=mask)
            if dweight_ptr is not None:
                if LOOP:
                    add_to(dweight_ptr + sums_off, tl.sum(d * z_cast, axis=0), begin > first, col, cols)
                else:
                    sums += d * z_cast  # both are zero past the last row and column
    if dweight_ptr is not None and not LOOP:
        tl.store(dweight_ptr + sums_off + lane, tl.sum(sums, axis=0), mask=lane < cols)
