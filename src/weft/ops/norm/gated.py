"""RMSNorm of an attention's output, times a gate: over the whole of a row or each of its groups, transposed on the way.

    r = 1 / sqrt(mean(x^2) + eps)              over each of the `groups` equal parts of a row
    z = x * r
    y = z * (weight + weight_offset) * f(gate)                f = sigmoid, or silu: f(g) = g * sigmoid(g)
    out = round(y), or its codes and scales

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. With
`transpose`, x and its gradient are [B, L, ...] while gate, y and their gradients are [L, B, ...]: each is read and
written where it lies. Backward, with dy the gradient of y, d = dy * f(gate) and t = d * (weight + weight_offset):

    dx = r * (t - z * mean(t * z))             the mean over the group
    dgate = dy * z * (weight + weight_offset) * f'(gate)
    dweight = sum over rows of d * z

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
from ...quant import Format
from ...quant.flat import allocate_flat, count_copies, quantize_flat, split_copies
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, nvfp4_global_reference
from ...quant.straight import wrap
from ...runtime import Launch, Sharding, capabilities_of, define_flat_op, kernel
from ...tiles import activate, activate_with_slope, amax, encode, fp32_scale, larger, quantize_rows, scaled
from ..common.checks import FLOATS, check_input, check_tensor, epsilon, real, whole
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
    store_stripe,
    stripe_tile,
    tensor_factor,
)
from ..common.results import Result, ResultOptions
from ..common.rows import (
    align_of,
    compute_dtype,
    contiguous,
    count_rows,
    cpu_tile,
    load_tile,
    load_vector,
    tile_mask,
)
from ..common.rows import tile_warps as _warps
from ..common.sums import _sum_kernel
from ..common.sums import add_to as _add_to
from ..glu.glu import _activated
from ..quantize import quantize_into

Activation = Literal["sigmoid", "silu"]

# ---- reference ------------------------------------------------------------------------------------------


def _in_order(x: Tensor, transpose: bool) -> Tensor:
    """x with its rows in the order of y's: a view."""
    return x.transpose(0, 1) if transpose else x


def _split(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[rows, groups, columns of a group]."""
    return x.reshape(count_rows(x), groups, x.shape[-1] // groups).to(dtype)


def gated_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, activation: str, eps: float, weight_offset: float,
    transpose: bool, stats: bool, out_dtype: torch.dtype, format: str | None, rowwise: bool, columnwise: bool,
    quant_scale: Tensor | None, return_amax: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition. x [..., K], gate like it, or [L, B, ..., K] of an x [B, L, ..., K]; weight [K]."""
    dtype = compute_dtype(x)
    h = _split(_in_order(x, transpose), groups, dtype)
    rstd = 1.0 / torch.sqrt(h.square().mean(2) + eps)
    y = (h * rstd[:, :, None]).reshape(len(h), gate.shape[-1])
    if weight is not None:
        y = y * (weight.to(dtype) + weight_offset)
    y = y * _activated(gate.reshape(y.shape).to(dtype), activation, 1.0)[0]
    if format is None:
        outputs = [y.to(out_dtype).view(gate.shape)]
    else:
        f = Format.of(format)
        largest = amax_reference(y) if f.needs_tensor_amax or return_amax else None
        outputs = [stand_in(_in_order(x, transpose))]
        outputs += quantize_flat(
            y.float(), f, rowwise=rowwise, columnwise=columnwise, tensor_amax=largest, scale=quant_scale,
            input_dtype=torch.float32,
        )  # fmt: skip
        if f.block == "nvfp4":
            assert largest is not None
            outputs.append(nvfp4_global_reference(largest, f))
        if return_amax:
            assert largest is not None
            outputs.append(largest)
    return [*outputs, rstd.flatten()] if stats else outputs


def gated_norm_backward_reference(
    x: Tensor, gate: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, groups: int, activation: str,
    weight_offset: float, transpose: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Of dx, dgate and dweight those that are needed."""
    dtype = compute_dtype(x)
    h, g, d = (_split(t, groups, dtype) for t in (_in_order(x, transpose), gate, dy))
    r = rstd.to(dtype).view(len(h), groups, 1)
    z = h * r
    w = 1.0 if weight is None else (weight.to(dtype) + weight_offset).view(groups, -1)
    f, slope = _activated(g, activation, 1.0)
    outputs = []
    if needs[0]:
        t = d * f * w
        dx = (r * (t - z * (t * z).mean(2, keepdim=True))).to(x.dtype)
        outputs.append(_in_order(dx.view(gate.shape), transpose).contiguous())
    if needs[1]:
        outputs.append((d * z * w * slope).to(gate.dtype).view(gate.shape))
    if needs[2]:
        assert weight is not None
        outputs.append((d * f * z).sum(0).flatten().to(weight.dtype))
    return outputs


# ---- kernels --------------------------------------------------------------------------------------------
# A row of the kernels is one group of a row of y; those of one row of y follow each other.

FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _place(row, second, third, first_stride, second_stride, third_stride, ALIGN: tl.constexpr):
    """Where rows lie that are counted in three dimensions [any, second, third]. Offsets have 64 bits; rows have no
    more than it takes to count them, since long divisions take time and registers."""
    rest = row // third
    off = (rest // second).to(tl.int64) * first_stride + (rest % second).to(tl.int64) * second_stride
    return tl.multiple_of(off + (row % third).to(tl.int64) * third_stride, ALIGN)


@triton.jit
def _gated(x, rstd, gate_ptr, gate_off, weight_ptr, weight_off, weight_offset, col, mask, ACT: tl.constexpr):
    """y [R, C] from x, zero where there is no element."""
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y = y * (load_tile(weight_ptr + weight_off[:, None] + col[None, :], mask) + weight_offset)
    y = y * activate(load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask), 1.0, ACT)
    if mask is not None:
        y = tl.where(mask, y, 0.0)
    return y


@kernel
def _gated_norm_kernel(
    x_ptr,  # [rows, cols]
    gate_ptr,  # [rows, cols], or None if there is nothing to do but the statistics
    weight_ptr,  # [groups, cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    y_ptr,  # [rows, cols], or None
    rstd_ptr,  # [rows], or None; written, or read if KNOWN
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    data_scale_ptr,
    bound,  # rows of all programs, of which the last may not exist
    rows,
    cols,  # of a group
    groups,
    second,  # rows are counted in three dimensions, and each of x and gate has three strides
    third,
    x_first_stride,
    x_second_stride,
    x_third_stride,
    gate_first_stride,
    gate_second_stride,
    gate_third_stride,
    data_scale_row_stride,
    data_scale_col_stride,
    eps,
    weight_offset,
    ACT: tl.constexpr,
    FORMAT: tl.constexpr,  # of the quantised copy, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the scale of the tensor is given
    KNOWN: tl.constexpr,  # the statistics are given
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # columns at a time; all of them unless LOOP
    LOOP: tl.constexpr,
    ALIGN: tl.constexpr,  # cols and all strides are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """ROWS groups in full to a program: y, or its row-wise copy; or no more than the statistics."""
    cols = (cols // ALIGN) * ALIGN
    row = tl.program_id(0).to(bound.dtype) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    x_off = _place(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
    gate_off = _place(row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN)
    weight_off = tl.multiple_of((row % groups) * cols, ALIGN)
    y_off = tl.multiple_of(row.to(tl.int64) * cols, ALIGN)
    piece = tl.arange(0, TILE)

    if not LOOP:
        mask = tile_mask(row, piece, rows, cols, ROWS_MASKED, COLS_MASKED)
        x = load_tile(x_ptr + x_off[:, None] + piece[None, :], mask)  # [ROWS, TILE]
    if KNOWN:
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    else:
        if LOOP:
            squares = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + piece
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
        if given_ptr is not None:
            given = tl.load(given_ptr)
        else:
            given = 0.0
        BY_ROW: tl.constexpr = False if FORMAT is None else FORMAT.block == "row"
        BY_TENSOR: tl.constexpr = False if FORMAT is None else FORMAT.block == "tensor"
        if BY_ROW and LOOP:  # the row's largest y has to be known before its first code
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
                y = _gated(x, rstd, gate_ptr, gate_off, weight_ptr, weight_off, weight_offset, col, mask, ACT)
                largest = larger(largest, amax(y, axis=1))

        program_amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols if LOOP else 1, TILE):
            col = start + piece
            exists = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            if LOOP:
                value = load_tile(x_ptr + x_off[:, None] + col[None, :], exists)
            else:
                value = x
            y = _gated(
                value, rstd, gate_ptr, gate_off, weight_ptr, weight_off, weight_offset, col, exists, ACT
            )
            if amax_ptr is not None:
                program_amax = larger(program_amax, amax(y, axis=1))
            if y_ptr is not None:
                tl.store(y_ptr + y_off[:, None] + col[None, :], y.to(y_ptr.dtype.element_ty), mask=exists)
            if FORMAT is not None:
                if BY_TENSOR:
                    factor = tensor_factor(given, FP32_MAX, FORMAT, STATIC)
                    codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
                elif BY_ROW:
                    if not LOOP:
                        largest = amax(y, axis=1)
                    row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                    codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
                    tl.store(data_scale_ptr + row, row_scale, mask=row < rows)
                else:  # blocks of a row of y lie in one group, or there is but one
                    codes, scale = quantize_rows(y, None, given, FP32_MAX, FORMAT, CAST)
                    G: tl.constexpr = FORMAT.group
                    blocks = (cols + G - 1) // G
                    block = start // G + tl.arange(0, TILE // G)
                    block_off = (((row % groups) * blocks)[:, None] + block[None, :]).to(tl.int64)
                    scale_off = (row // groups).to(tl.int64)[:, None] * data_scale_row_stride
                    scale_off += block_off * data_scale_col_stride
                    scale_mask = tile_mask(row, block, rows, blocks, ROWS_MASKED, COLS_MASKED)
                    tl.store(data_scale_ptr + scale_off, scale, mask=scale_mask)
                # The groups of a row of codes follow each other; an odd row of 4-bit codes ends within a byte.
                data_stride = (cols + FORMAT.packed - 1) // FORMAT.packed
                store_codes(
                    codes, data_ptr, row.to(tl.int64), start, rows, cols, data_stride, FORMAT, ALIGN, ROWS_MASKED,
                    COLS_MASKED,
                )  # fmt: skip
        if amax_ptr is not None:
            tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def _gated_norm_stripe_kernel(
    x_ptr,  # [tokens, cols]
    gate_ptr,  # [tokens, cols]
    weight_ptr,  # [cols], or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    rstd_ptr,  # [tokens, groups]
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    data_scale_ptr,
    data_t_ptr,  # column-wise codes, or None
    data_t_scale_ptr,
    bound,  # rows of all programs, of which the last may not exist
    tokens,
    cols,  # of all groups
    groups,
    second,  # as above; a token is `groups` rows
    third,
    x_first_stride,
    x_second_stride,
    x_third_stride,
    gate_first_stride,
    gate_second_stride,
    gate_third_stride,
    data_stride,
    data_scale_row_stride,
    data_scale_col_stride,
    data_t_stride,
    data_t_scale_row_stride,
    data_t_scale_col_stride,
    weight_offset,
    ACT: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the scale of the tensor is given
    ROWS: tl.constexpr,  # tokens of a stripe: the longest block along them
    TILE: tl.constexpr,
    WITHIN: tl.constexpr,  # every tile lies in one group
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """A tile as tall as the longest block: its copies, made from the same registers. The statistics are known."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    token = stripe.to(bound.dtype) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(token, col, tokens, cols, True, COLS_MASKED)
    row = token * groups  # the first group of each
    x_off = _place(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
    gate_off = _place(row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN)
    y = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    if WITHIN:
        rstd = tl.load(rstd_ptr + (row + start // (cols // groups)), mask=token < tokens, other=0.0)
        y = y * rstd[:, None]
    else:
        y = y * load_tile(rstd_ptr + (row[:, None] + (col // (cols // groups))[None, :]), mask)
    if weight_ptr is not None:
        y = y * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)
    y = y * activate(load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask), 1.0, ACT)
    y = tl.where(mask, y, 0.0)
    if given_ptr is not None:
        given = tl.load(given_ptr)
    else:
        given = 0.0
    store_stripe(
        y, None, None, data_ptr, data_scale_ptr, data_t_ptr, data_t_scale_ptr, given, stripe, start, tokens,
        cols, data_stride, data_scale_row_stride, data_scale_col_stride, data_t_stride, data_t_scale_row_stride,
        data_t_scale_col_stride, FP32_MAX, FORMAT, CAST, STATIC, ALIGN, COLS_MASKED,
    )  # fmt: skip
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(y, axis=1), axis=0))


@triton.jit
def _gradient_of_y(
    x_ptr, x_off, gate_ptr, gate_off, dy_ptr, dy_off, rstd, weight_ptr, weight_offset, col, cols, mask,
    ACT: tl.constexpr, COLS_MASKED: tl.constexpr,
):  # fmt: skip
    """(z, d, t, the slope's share of dgate) [R, C] as the module's formulas name them, zero where there is none."""
    z = load_tile(x_ptr + x_off[:, None] + col[None, :], mask) * rstd
    dy = load_tile(dy_ptr + dy_off[:, None] + col[None, :], mask)
    f, slope = activate_with_slope(load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask), 1.0, ACT)
    d = dy * f
    t = d
    through = dy * slope
    if weight_ptr is not None:
        weight = load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset  # [1, C]
        t = t * weight
        through = through * weight
    return z, d, t, through


@kernel
def _gated_norm_backward_kernel(
    x_ptr,  # [rows, cols]
    gate_ptr,  # [rows, cols]
    dy_ptr,  # [rows, cols]
    weight_ptr,  # [groups, cols], or None
    rstd_ptr,  # [rows]
    dx_ptr,  # [rows, cols], or None
    dgate_ptr,  # [rows, cols], or None
    dweight_ptr,  # partial sums [parts, groups, cols] in fp32, or None
    bound,  # rows of all programs, of which the last may not exist
    tokens,  # rows of a group
    program_tokens,
    cols,  # of a group
    groups,
    second,  # rows are counted in three dimensions, and each of x, gate, dy and dx has three strides
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
    weight_offset,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LOOP: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """A run of tokens of one group: dx and dgate of each, and the sum over them.

    Without LOOP the sum stays in registers until the last token. With it, it lies in the program's own row of the
    partial sums, which it reads and writes for each of its tokens.
    """
    cols = (cols // ALIGN) * ALIGN
    program = tl.program_id(0)
    group = program % groups
    if weight_ptr is not None:
        weight_ptr += tl.multiple_of(group.to(tl.int64) * cols, ALIGN)
    sums_off = tl.multiple_of(program.to(tl.int64) * cols, ALIGN)  # [parts, groups, cols]
    first = (program // groups).to(bound.dtype) * program_tokens
    last = tl.minimum(first + program_tokens, tokens)
    piece = tl.arange(0, TILE)
    ROWS_MASKED: tl.constexpr = ROWS > 1
    count = cols.to(tl.float32)

    sums = tl.zeros((ROWS, TILE), tl.float32)
    for begin in range(first, last, ROWS):
        token = begin + tl.arange(0, ROWS)  # [ROWS]
        row = token * groups + group
        x_off = _place(row, second, third, x_first_stride, x_second_stride, x_third_stride, ALIGN)
        gate_off = _place(row, second, third, gate_first_stride, gate_second_stride, gate_third_stride, ALIGN)
        dy_off = _place(row, second, third, dy_first_stride, dy_second_stride, dy_third_stride, ALIGN)
        dx_off = _place(row, second, third, dx_first_stride, dx_second_stride, dx_third_stride, ALIGN)
        dgate_off = tl.multiple_of(row.to(tl.int64) * cols, ALIGN)
        rstd = tl.load(rstd_ptr + row, mask=token < last, other=0.0)[:, None]

        tz = tl.zeros((ROWS,), tl.float32)  # sum over the group of t * z
        if LOOP and dx_ptr is not None:
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(token, col, last, cols, ROWS_MASKED, COLS_MASKED)
                z, _, t, _ = _gradient_of_y(
                    x_ptr, x_off, gate_ptr, gate_off, dy_ptr, dy_off, rstd, weight_ptr, weight_offset, col, cols, mask,
                    ACT, COLS_MASKED,
                )  # fmt: skip
                tz += tl.sum(t * z, axis=1)

        for start in range(0, cols if LOOP else 1, TILE):
            col = start + piece
            mask = tile_mask(token, col, last, cols, ROWS_MASKED, COLS_MASKED)
            z, d, t, through = _gradient_of_y(
                x_ptr, x_off, gate_ptr, gate_off, dy_ptr, dy_off, rstd, weight_ptr, weight_offset, col, cols, mask,
                ACT, COLS_MASKED,
            )  # fmt: skip
            if dx_ptr is not None:
                if not LOOP:
                    tz = tl.sum(t * z, axis=1)
                dx = (t - z * (tz / count)[:, None]) * rstd
                tl.store(dx_ptr + dx_off[:, None] + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                dgate = (through * z).to(dgate_ptr.dtype.element_ty)
                tl.store(dgate_ptr + dgate_off[:, None] + col[None, :], dgate, mask=mask)
            if dweight_ptr is not None:
                if LOOP:
                    _add_to(dweight_ptr + sums_off, tl.sum(d * z, axis=0), begin > first, col, cols)
                else:
                    sums += d * z  # zero where there is no element
    if dweight_ptr is not None and not LOOP:
        tl.store(dweight_ptr + sums_off + piece, tl.sum(sums, axis=0), mask=piece < cols)


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupConfig:
    """How groups are cut: `rows` of them to a program, `tile` columns at a time, in a loop if that is not all."""

    rows: int
    tile: int
    loop: bool
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest_tile: int, backward: bool, align: int, target: str) -> GroupConfig:
        if target == "cpu":
            tile = cpu_tile(cols, 128, 4096 if backward else 1024)  # 128: a block of any format
            return GroupConfig(1, tile, tile < cols, 4)
        # A power of two that holds the group, up to what registers hold: backward has three tiles and a sum.
        tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
        most = 8192 if backward else 16384
        loop = tile > most
        tile = min(tile, most // 2 if loop else most)
        # Where an access has one element, its address is longer than it.
        rows = max(1, (1024 if backward else 2048) // (4 if align == 1 else 1) // tile)
        return GroupConfig(rows, tile, loop, _warps(rows * tile * (2 if loop and backward else 1), target))


@functools.lru_cache(maxsize=4096)
def _levels(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """(second, third, three strides of each tensor): how kernels count rows that have these leading sizes, and where
    the rows of each tensor lie; None if that takes more than three dimensions."""
    merged: list[tuple[int, list[int]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > 3:
        return None
    merged = [(1, [0] * len(strides))] * (3 - len(merged)) + merged
    found = [merged[1][0], merged[2][0]]
    for i in range(len(strides)):
        found += [steps[i] for _, steps in merged]
    return tuple(found)


def _laid_out(
    groups: int, read: tuple[Tensor, ...], written: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors of one shape [..., K] that are read, and the `_levels` of all; copies of those that lie in too many
    ways. The one that is written has no gaps."""
    shape = read[0].shape
    cols = shape[-1]
    sizes = (*shape[:-1], groups)
    every = read if written is None else (*read, written)
    found = None
    if all(t.stride(-1) == 1 or cols == 1 for t in read):
        found = _levels(sizes, *((*t.stride()[:-1], cols // groups) for t in every))
    if found is None:
        read = tuple(t if _has_no_gaps(t) else t.contiguous() for t in read)
        every = read if written is None else (*read, written)
        found = _levels(sizes, *((*t.stride()[:-1], cols // groups) for t in every))
        assert found is not None
    return read, found


def _has_no_gaps(x: Tensor) -> bool:
    """Whether x is contiguous, or was before it was transposed."""
    return x.is_contiguous() or (x.dim() > 2 and x.transpose(0, 1).is_contiguous())


@functools.cache
def _rows_launch(
    act: str, spec: str | None, cast: int, static: bool, known: bool, config: GroupConfig, align: int, masked: bool
) -> Launch:  # fmt: skip
    return Launch.of(
        _gated_norm_kernel, num_warps=config.num_warps, ACT=act, FORMAT=spec and Format.of(spec), CAST=cast,
        STATIC=static, KNOWN=known, ROWS=config.rows, TILE=config.tile, LOOP=config.loop, ALIGN=align,
        COLS_MASKED=masked,
    )  # fmt: skip


def _allocate_gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, activation: str, eps: float, weight_offset: float,
    transpose: bool, stats: bool, out_dtype: torch.dtype, format: str | None, rowwise: bool, columnwise: bool,
    quant_scale: Tensor | None, return_amax: bool,
) -> list[Tensor]:  # fmt: skip
    if format is None:
        outputs = [torch.empty(gate.shape, dtype=out_dtype, device=x.device)]
    else:
        outputs = [stand_in(_in_order(x, transpose))]
        outputs += allocate_flat(
            Format.of(format), count_rows(gate), gate.shape[-1], x.device, rowwise=rowwise, columnwise=columnwise
        )  # fmt: skip
        if return_amax:
            outputs.append(torch.empty((), dtype=torch.float32, device=x.device))
    if stats:
        outputs.append(torch.empty(count_rows(gate) * groups, dtype=torch.float32, device=x.device))
    return outputs


def _within_groups(format: Format, groups: int, cols: int) -> bool:
    """Whether the row-wise copy comes from groups alone: no block of it has two."""
    if format.block == "128x128":
        return False
    if groups == 1:
        return True
    return format.block != "row" and cols % max(format.group, format.packed) == 0


def _launch_gated_norm(
    outputs: list[Tensor], x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, activation: str, eps: float,
    weight_offset: float, transpose: bool, stats: bool, out_dtype: torch.dtype, format: str | None, rowwise: bool,
    columnwise: bool, quant_scale: Tensor | None, return_amax: bool,
) -> None:  # fmt: skip
    width = gate.shape[-1]
    cols, rows = width // groups, gate.numel() // width * groups
    target = capabilities_of(x.device)
    weight = contiguous(weight)
    (x, gate), levels = _laid_out(groups, (_in_order(x, transpose), gate))
    rstd = outputs[-1] if stats else None
    align = align_of(cols, *levels[2:])

    if format is None:
        config = GroupConfig.choose(cols, 1, False, align, target.target)
        programs = -(-rows // config.rows)
        _rows_launch(activation, None, 0, False, False, config, align, cols % config.tile != 0)(
            (programs, 1, 1),
            (x, gate, weight, None, outputs[0], rstd, None, None, None),
            (programs * config.rows, rows, cols, groups, *levels, 0, 0),
            (eps, weight_offset),
        )
        return

    f = Format.of(format)
    cast = cast_mode(target)
    row_copy, col_copy = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise)
    count = count_copies(f, rowwise=rowwise, columnwise=columnwise)
    amax_out = outputs[1 + count] if return_amax else None
    config = GroupConfig.choose(cols, f.group, False, align, target.target)
    programs = -(-rows // config.rows)
    by_tensor = f.needs_tensor_amax and quant_scale is None
    direct = row_copy is not None and _within_groups(f, groups, cols)
    further = col_copy is not None or not direct  # something is made from the statistics, after them
    if (by_tensor or further) and rstd is None:
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)

    def rows_pass(
        spec: str | None, partials: Tensor | None, y: Tensor | None = None, known: bool = False
    ) -> None:
        data, data_scale, _, *strides = copy_arguments(None if spec is None else row_copy)
        idle = spec is None and partials is None and y is None  # no more than the statistics
        _rows_launch(
            activation, spec, cast, quant_scale is not None, known, config, align, cols % config.tile != 0
        )(
            (programs, 1, 1),
            (
                x, None if idle else gate, None if idle else weight, given if spec else None, y, rstd, partials,
                data, data_scale,
            ),
            (programs * config.rows, rows, cols, groups, *levels, *strides),
            (eps, weight_offset),
        )  # fmt: skip

    given = quant_scale
    if f.block == "row" and not direct:  # one scale to several groups: by way of y in fp32
        y = torch.empty(gate.shape, dtype=torch.float32, device=x.device)
        rows_pass(None, None, y)
        parts = [*outputs[1 : 1 + count + return_amax], None]
        quantize_into(
            Result(y, parts[0], parts[1], amax=parts[2]),
            ResultOptions(y.dtype, format, True, False, None, return_amax),
            y,
        )
        return

    partials = None
    scales = [copy.scale for copy in (row_copy, col_copy) if copy is not None]
    if quant_scale is not None:
        for copied in scales:
            copied.copy_(quant_scale.reshape(1, 1))
    # A pass over the groups takes their statistics and makes the row-wise copy, if that needs no more.
    if by_tensor:
        partials = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(None, partials)
        given = amax_out if amax_out is not None else torch.empty((), dtype=torch.float32, device=x.device)
        if f.block == "nvfp4":
            scales = [outputs[count]]
        reduce_amax(partials, f, torch.float32, amax=given, scales=scales)
        amax_out = None
        if not further:
            rows_pass(format, None, known=True)
            return
    elif direct:
        if amax_out is not None:
            partials = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(format, partials)
        if partials is not None:
            reduce_amax(partials, None, torch.float32, amax=amax_out)
            amax_out = None
        if not further:
            return
        row_copy = None
    else:
        rows_pass(None, None)

    tokens = rows // groups
    tile, num_warps = stripe_tile(f.block, target.target, norm=True)
    if align == 1 and target.backend == "cuda":
        num_warps = 16
    stripes = count_stripes(tokens, width)
    tiles = stripes * -(-width // tile)
    partials = None
    if amax_out is not None:
        partials = torch.empty(tiles, dtype=torch.float32, device=x.device)
    data, data_scale, *strides = copy_arguments(row_copy)
    data_t, data_t_scale, *strides_t = copy_arguments(col_copy)
    launch = Launch.of(
        _gated_norm_stripe_kernel, num_warps=num_warps, ACT=activation, FORMAT=f, CAST=cast,
        STATIC=quant_scale is not None, ROWS=STRIPE, TILE=tile, WITHIN=cols % tile == 0, ALIGN=align,
        COLS_MASKED=width % tile != 0,
    )  # fmt: skip
    launch(
        (tiles, 1, 1),
        (x, gate, weight, given, rstd, partials, data, data_scale, data_t, data_t_scale),
        (stripes * STRIPE * groups, tokens, width, groups, *levels, *strides, *strides_t),
        (weight_offset,),
    )
    if partials is not None:
        reduce_amax(partials, None, torch.float32, amax=amax_out)


def _allocate_gated_norm_backward(
    x: Tensor, gate: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, groups: int, activation: str,
    weight_offset: float, transpose: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [
        torch.empty(t.shape, dtype=t.dtype, device=x.device)
        for t, need in zip((x, gate, weight), needs, strict=True)
        if need and t is not None
    ]


def _launch_gated_norm_backward(
    outputs: list[Tensor], x: Tensor, gate: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, groups: int,
    activation: str, weight_offset: float, transpose: bool, needs: list[bool],
) -> None:  # fmt: skip
    width = gate.shape[-1]
    cols, tokens = width // groups, gate.numel() // width
    target = capabilities_of(x.device)
    weight = contiguous(weight)
    results = iter(outputs)
    dx, dgate, dweight = (next(results) if need else None for need in needs)
    (x, gate, dy), levels = _laid_out(
        groups, (_in_order(x, transpose), gate, dy), None if dx is None else _in_order(dx, transpose)
    )
    if dx is None:
        levels = (*levels, 0, 0, 0)
    align = align_of(cols, *levels[2:])
    config = GroupConfig.choose(cols, 1, True, align, target.target)
    # Four programs to a multiprocessor. Each group has its own, as many as it has tiles of tokens at most.
    parts = min(-(-tokens // config.rows), max(1, -(-target.multiprocessors * 4 // groups)))
    program_tokens = -(-tokens // parts)
    program_tokens = -(-program_tokens // config.rows) * config.rows
    parts = -(-tokens // program_tokens)
    sums = None
    if dweight is not None:
        sums = torch.empty((parts, width), dtype=torch.float32, device=x.device)
    launch = Launch.of(
        _gated_norm_backward_kernel, num_warps=config.num_warps, ACT=activation, ROWS=config.rows, TILE=config.tile,
        LOOP=config.loop, ALIGN=align, COLS_MASKED=cols % config.tile != 0,
    )  # fmt: skip
    launch(
        (parts * groups, 1, 1),
        (x, gate, dy, weight, rstd, dx, dgate, sums),
        (parts * program_tokens * groups, tokens, program_tokens, cols, groups, *levels),
        (weight_offset,),
    )
    if dweight is not None:
        # Few columns and hundreds of rows: many loads have to be under way at once.
        piece, tile = (1, 256) if target.target == "cpu" else (32, 64)
        launch = Launch.of(_sum_kernel, num_warps=4, ROWS=piece, TILE=tile, ALIGN=align_of(width))
        launch((-(-width // tile), 1, 1), (sums, dweight), (parts, width))


# ---- registration ---------------------------------------------------------------------------------------


def _setup_gated_norm(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, gate, weight, groups, activation, _, weight_offset, transpose = inputs[:8]
    ctx.save_for_backward(x, gate, weight, output[-1])
    ctx.options = (groups, activation, weight_offset, transpose)
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def _gated_norm_gradients(ctx: Any, grads: Any) -> Any:
    x, gate, weight, rstd = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    results = iter(gated_norm_backward_op(x, gate, grads[0], weight, rstd, *ctx.options, needs))
    return *(next(results) if need else None for need in needs), *[None] * (ctx.inputs - 3)


def _shard_gated_norm(a: Any) -> Sharding:
    rows = "... k"
    outputs = {"y": rows, **copies_and_amax(a.format, a.rowwise, a.columnwise, a.return_amax)}
    if a.stats:
        outputs["rstd"] = None
    joint, block = blocks_over_rows(a.format, a.rowwise, a.columnwise, a.quant_scale is not None)
    of_x = " ".join(["1", "0", *map(str, range(2, a.x.dim() - 1)), "k"]) if a.transpose else rows
    return Sharding(
        {"gate": rows, "x": of_x, "weight": "k", "quant_scale": ""},
        outputs,
        {"k": "the norm is taken over it", **joint},
        block,
    )


gated_norm_backward_op = define_flat_op(
    "gated_norm_backward(Tensor x, Tensor gate, Tensor dy, Tensor? weight, Tensor rstd, SymInt groups, "
    "str activation, float weight_offset, bool transpose, bool[] needs) -> Tensor[]",
    allocate=_allocate_gated_norm_backward,
    launch=_launch_gated_norm_backward,
    reference=gated_norm_backward_reference,
    variants=32,
)

gated_norm_op = define_flat_op(
    "gated_norm(Tensor x, Tensor gate, Tensor? weight, SymInt groups, str activation, float eps, "
    "float weight_offset, bool transpose, bool stats, ScalarType out_dtype, str? format, bool rowwise, "
    "bool columnwise, Tensor? quant_scale, bool return_amax) -> Tensor[]",
    allocate=_allocate_gated_norm,
    launch=_launch_gated_norm,
    reference=gated_norm_reference,
    setup_context=_setup_gated_norm,
    backward=_gated_norm_gradients,
    sharding=_shard_gated_norm,
    variants=72,
)


# ---- public function ------------------------------------------------------------------------------------


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    groups: int = 1,
    act: Activation = "sigmoid",
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    transpose: bool = False,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
) -> Any:
    """RMSNorm of x times a gate: `y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) * f(gate)`.

    x: [..., K], or the heads [..., H, d] of an attention with H * d = K; gate: [..., K]; weight: [K]. All in bf16,
    fp16 or fp32, x and gate of any strides. Returns y in the shape of the gate, and the largest |y| with
    `return_amax`.

    - `groups`: the mean is taken over each of so many equal parts of the last dimension. For heads with a weight
      [d] in common, give x and gate as [..., H, d] and leave groups=1.
    - `act`: f, "sigmoid" or "silu".
    - `eps`: None as for `weft.rms_norm`.
    - `transpose`: x and its gradient are [B, L, ...], as attention leaves them; gate and y are [L, B, ...], as the
      layers around it want them.
    - `weight_offset`: 1 for weights stored around zero.
    - `out_dtype`: of y, x's by default.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`; the rows of the
      codes are those of y. A row-wise copy is made in the same pass if no block of it reaches from one group into
      the next.

    >>> import torch, weft
    >>> x = torch.randn(2, 5, 4, 64, dtype=torch.bfloat16)  # heads of 2 sequences
    >>> gate = torch.randn(5, 2, 256, dtype=torch.bfloat16)
    >>> y = weft.gated_norm(x, gate, torch.ones(256), groups=4, transpose=True)
    >>> y.shape
    torch.Size([5, 2, 256])
    >>> q = weft.gated_norm(x, gate, groups=2, transpose=True, quantize="1x128")
    >>> q.rowwise.data.shape
    torch.Size([10, 256])
    """
    check_input("x", x)
    check_input("gate", gate)
    if x.dim() == gate.dim() + 1 and x.shape[-2] * x.shape[-1] == gate.shape[-1]:
        x = x.flatten(-2)
    shape = x.shape
    if transpose:
        if len(shape) < 3:
            raise ValueError(f"transpose=True is for an x of shape [B, L, ..., K]; got {tuple(shape)}")
        shape = torch.Size((shape[1], shape[0], *shape[2:]))
    check_tensor("gate", gate, FLOATS, x.device, shape)
    cols = shape[-1]
    if whole("groups", groups) < 1 or cols % groups:
        raise ValueError(f"groups must be equal parts of the last dimension, {cols}; got {groups}")
    if weight is not None:
        check_tensor("weight", weight, FLOATS, x.device, (cols,))
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be 'sigmoid' or 'silu'; got {act!r}")
    format = check_quantize(quantize, rowwise, columnwise, quant_scale, return_amax, out_dtype, x.device)
    stats = torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or (weight is not None and weight.requires_grad)
    )
    outputs = gated_norm_op(
        x, gate, weight, groups, act, epsilon(eps, x), real("weight_offset", weight_offset), transpose, stats,
        out_dtype or x.dtype, None if format is None else format.spec, rowwise, columnwise, quant_scale, return_amax,
    )  # fmt: skip
    if format is None:
        return outputs[0]
    q = wrap(outputs[0], format, *split_copies(format, outputs[1:], rowwise=rowwise, columnwise=columnwise))
    if not return_amax:
        return q
    return q, outputs[1 + count_copies(format, rowwise=rowwise, columnwise=columnwise)]
