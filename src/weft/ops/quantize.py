"""Quantise and dequantise: row-wise, column-wise (transposed) or both copies, from one read of the input.

    amax  = largest |x| of a block, in fp32, NaN if one is in it
    scale = the format's convention applied to amax (`weft.quant.formats`)
    code  = x brought to the element's range by the scale, rounded once to nearest even, saturated

The scale of a whole tensor (block "tensor", nvfp4's second scale) or of a whole column (the column-wise copy of
block "row") has to be known before the first code: there the input is read twice, unless the scale is given.
Gradients pass straight through: d quantize(x) / dx = 1.

Stochastic rounding draws 32 bits for element (r, c) from Philox with the key `seed` and the counter
(c, r, 0 or 1 for the column-wise copy, 0): the same seed gives the same bytes on every device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..language import tl, triton
from ..quant import Copy, Format, QTensor
from ..quant.copies import allocate_copies, count_copies, split_copies
from ..quant.qtensor import stand_in
from ..quant.reference import amax_reference, dequantize_copy, nvfp4_global_reference, quantize_copies
from ..quant.straight import wrap
from ..runtime import Launch, Sharding, capabilities_of, define_flat_op, is_distributed, kernel, place_like
from ..tiles import amax, decode, decode_e4m3, fp32_scale, given_scale, larger, round_to, scaled, unpack_pairs
from .common.checks import FLOATS, check_input, check_tensor, whole
from .common.copies import (
    STRIPE,
    blocks_over_rows,
    cast_mode,
    copies_and_amax,
    copy_arguments,
    count_stripes,
    reduce_amax,
    store_codes,
    store_rows,
    store_stripe,
    store_transposed,
    stripe_tile,
    tensor_factor,
)
from .common.rows import align_of, count_rows, cpu_tile, flat_rows, load_tile, tile_mask

# ---- reference ------------------------------------------------------------------------------------------


def quantize_reference(
    x: Tensor, format: str, rowwise: bool, columnwise: bool, scale: Tensor | None, return_amax: bool,
    seed: int | None,
) -> list[Tensor]:  # fmt: skip
    """x [..., K] -> [stand-in for autograd, copies, amax]."""
    f = Format.of(format)
    flat = x.reshape(count_rows(x), x.shape[-1])
    largest = amax_reference(flat)
    outputs = [stand_in(x)]
    options = {"tensor_amax": largest, "scale": scale, "input_dtype": x.dtype}
    if seed is None:
        outputs += quantize_copies(flat, f, rowwise=rowwise, columnwise=columnwise, **options)
    else:
        for transposed in [False] * rowwise + [True] * columnwise:
            which = int(transposed and not _shares_codes(f))
            options["random"] = philox_reference(seed, flat.shape[0], flat.shape[1], which, x.device)
            outputs += quantize_copies(flat, f, rowwise=not transposed, columnwise=transposed, **options)
    if f.block == "nvfp4":
        outputs.append(nvfp4_global_reference(largest, f))
    return [*outputs, largest] if return_amax else outputs


def _shares_codes(format: Format) -> bool:
    """Whether both copies hold the same codes, and so the same draws."""
    return format.block in ("128x128", "tensor")


def philox_reference(seed: int, rows: int, cols: int, which: int, device: torch.device) -> Tensor:
    """The first word of Philox4x32-10 for each element of a [rows, cols] tensor, in int64."""
    mask = 0xFFFFFFFF
    c0 = torch.arange(cols, device=device).expand(rows, cols)
    c1 = torch.arange(rows, device=device)[:, None].expand(rows, cols) & mask
    c2, c3 = torch.full_like(c0, which), torch.zeros_like(c0)
    k0, k1 = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
    for _ in range(10):
        high_a, low_a = _multiply(c0, 0xD2511F53)
        high_b, low_b = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low half of a 32 x 32 bit product, in int64 without its sign getting in the way."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def dequantize_reference(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, cols: int, dtype: torch.dtype
) -> list[Tensor]:
    shape = (data.shape[0], cols)
    return [dequantize_copy(Copy(data, scale, global_scale), Format.of(format), shape, dtype)]


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _draw(seed_low, seed_high, row, col, WHICH: tl.constexpr):
    """32 random bits for each element of a tile; row [R], col [C] -> uint32 [R, C]. Of the seed's halves it takes the
    complements."""
    c0 = tl.broadcast_to(col[None, :].to(tl.uint32), (row.shape[0], col.shape[0]))
    c1 = tl.broadcast_to(row[:, None].to(tl.uint32), (row.shape[0], col.shape[0]))
    zero = tl.zeros_like(c0)
    first, _, _, _ = tl.philox_impl(
        c0, c1, zero + WHICH, zero, zero + (~seed_low).to(tl.uint32), zero + (~seed_high).to(tl.uint32), 10
    )
    return first


@kernel
def _quantize_rows_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale, or scales [rows]; or None
    amax_ptr,  # [programs], or None
    data_ptr,  # codes [rows, cols], packed; or None to find amax alone
    scale_ptr,
    rows,
    cols,
    row_programs,
    x_stride,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # scales are given
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """The row-wise copy. ROWS rows belong to `row_programs` programs in turn, tile by tile; to one if a scale
    belongs to the whole row."""
    cols = (cols // ALIGN) * ALIGN
    row = (tl.program_id(0) // row_programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    piece = tl.arange(0, TILE)
    first = (tl.program_id(0) % row_programs) * TILE
    step = row_programs * TILE
    WHOLE: tl.constexpr = FORMAT.block == "row" or FORMAT.block == "tensor"
    if FORMAT.block == "row":
        if not STATIC:
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                largest = larger(
                    largest, amax(load_tile(x_ptr + x_off[:, None] + col[None, :], mask), axis=1)
                )
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
        else:
            row_scale = tl.load(given_ptr + row, mask=row < rows, other=1.0)
            factor = given_scale(row_scale, FORMAT)
        if data_ptr is not None:
            tl.store(scale_ptr + row, row_scale, mask=row < rows)
        factor = factor[:, None]
    elif given_ptr is not None:
        given = tl.load(given_ptr)
        if FORMAT.block == "tensor":
            factor = tensor_factor(given, INPUT_MAX, FORMAT, STATIC)
    else:
        given = 0.0

    program_amax = tl.zeros((ROWS,), tl.float32)
    for start in range(first, cols, step):
        start = tl.multiple_of(start, TILE)
        col = start + piece
        mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
        x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
        if amax_ptr is not None:
            program_amax = larger(program_amax, amax(x, axis=1))
        if data_ptr is not None:
            random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
            if WHOLE:
                codes = round_to(scaled(x, factor, FORMAT), random, FORMAT, CAST)
                store_codes(
                    codes,
                    data_ptr,
                    row,
                    start,
                    rows,
                    cols,
                    data_stride,
                    FORMAT,
                    ALIGN,
                    ROWS_MASKED,
                    COLS_MASKED,
                )
            else:
                store_rows(
                    x, random, data_ptr, scale_ptr, given, row, start, rows, cols, data_stride, scale_row_stride,
                    scale_col_stride, INPUT_MAX, FORMAT, CAST, ALIGN, ROWS_MASKED, COLS_MASKED,
                )  # fmt: skip
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def _quantize_stripe_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale; or None
    row_amax_ptr,  # [rows] for block "row", or None
    col_amax_ptr,  # [cols] for block "row", or None
    amax_ptr,  # [programs], or None
    data_ptr,  # row-wise codes, or None
    scale_ptr,
    data_t_ptr,  # column-wise codes, or None
    scale_t_ptr,
    rows,
    cols,
    x_stride,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    data_t_stride,
    scale_t_row_stride,
    scale_t_col_stride,
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # scales are given
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """A tile as tall as the longest group: both copies. For block "row" the amax are known already."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    if given_ptr is not None:
        given = tl.load(given_ptr)
    else:
        given = 0.0
    random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
    random_t = _draw(seed_low, seed_high, row, col, 1) if STOCHASTIC else None
    if FORMAT.block == "row":
        if data_ptr is not None:
            largest = tl.load(row_amax_ptr + row, mask=row < rows, other=0.0)
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(scale_ptr + row, row_scale, mask=(row < rows) & (start == 0))
            codes = round_to(scaled(x, factor[:, None], FORMAT), random, FORMAT, CAST)
            store_codes(
                codes, data_ptr, row, start, rows, cols, data_stride, FORMAT, ALIGN, True, COLS_MASKED
            )
        if data_t_ptr is not None:
            largest = tl.load(col_amax_ptr + col, mask=col < cols, other=0.0)
            col_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(scale_t_ptr + col, col_scale, mask=(col < cols) & (stripe == 0))
            codes = round_to(scaled(x, factor[None, :], FORMAT), random_t, FORMAT, CAST)
            store_transposed(codes, data_t_ptr, stripe, start, rows, cols, data_t_stride, FORMAT)
    else:
        store_stripe(
            x, random, random_t, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, given, stripe, start, rows, cols,
            data_stride, scale_row_stride, scale_col_stride, data_t_stride, scale_t_row_stride, scale_t_col_stride,
            INPUT_MAX, FORMAT, CAST, STATIC, ALIGN, COLS_MASKED,
        )  # fmt: skip
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(x, axis=1), axis=0))


@kernel
def _amax_kernel(
    x_ptr,  # [rows, cols]
    row_ptr,  # fp32 [tiles, rows]: amax of each piece of a row, or None
    col_ptr,  # fp32 [stripes, cols]: amax of each piece of a column
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """amax of the rows and columns of a tile, from one read."""
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
def _dequantize_kernel(
    data_ptr,  # codes [rows, cols], packed
    scale_ptr,
    global_ptr,  # nvfp4's scale of the tensor, or None
    out_ptr,  # [rows, cols]
    rows,
    cols,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """q * d in fp32 (q * (d * g) for nvfp4), rounded once to the result's dtype."""
    PACKED: tl.constexpr = FORMAT.packed
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    byte = tile * (TILE // PACKED) + tl.arange(0, TILE // PACKED)
    width = (
        cols + PACKED - 1
    ) // PACKED  # of a multiple of ALIGN nothing but the quotient, and known divisible
    if ALIGN > 1:
        width = (cols // ALIGN) * (ALIGN // PACKED)
    mask = tile_mask(row, byte, rows, width, True, COLS_MASKED)
    data_off = tl.multiple_of(row * data_stride, ALIGN // PACKED if ALIGN > 1 else 1)
    if mask is None:
        codes = tl.load(data_ptr + data_off[:, None] + byte[None, :])
    else:
        codes = tl.load(data_ptr + data_off[:, None] + byte[None, :], mask=mask, other=0)
    codes = codes.to(tl.uint8, bitcast=True)
    if PACKED == 2:
        codes = unpack_pairs(codes)
    exists = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    row_block = row * 0 if FORMAT.block_rows == 0 else row // FORMAT.block_rows
    if FORMAT.group == 0:  # one scale to a row, or to all
        scale_off = (row_block * scale_row_stride)[:, None]
        values = decode(codes, FORMAT) * tl.load(scale_ptr + scale_off, mask=(row < rows)[:, None], other=0.0)
    else:
        GROUP: tl.constexpr = FORMAT.group
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        there = (row < rows)[:, None] & (group < (cols + GROUP - 1) // GROUP)[None, :]
        scale_off = (row_block * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)[None, :]
        scale = tl.load(scale_ptr + scale_off, mask=there, other=0)  # [ROWS, TILE // GROUP]
        if FORMAT.block == "mx":
            bits = scale.to(tl.int32)
            bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x00400000, bits << 23))
            scale = bits.to(tl.float32, bitcast=True)
        elif FORMAT.block == "nvfp4":
            scale = decode_e4m3(scale) * tl.load(global_ptr)
        groups = tl.reshape(decode(codes, FORMAT), (ROWS, TILE // GROUP, GROUP))
        values = tl.reshape(groups * scale[:, :, None], (ROWS, TILE))
    out_off = tl.multiple_of(row * cols, ALIGN)
    tl.store(out_ptr + out_off[:, None] + col[None, :], values.to(out_ptr.dtype.element_ty), mask=exists)


# ---- launch ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _rows_tile(cols: int, target: str) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile that is quantised along its rows: 4096 numbers, or on a CPU one row."""
    if target == "cpu":
        return 1, cpu_tile(cols, 128), 4
    tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
    return 4096 // tile, tile, 4


def _allocate_quantize(
    x: Tensor, format: str, rowwise: bool, columnwise: bool, scale: Tensor | None, return_amax: bool,
    seed: int | None,
) -> list[Tensor]:  # fmt: skip
    rows, cols = count_rows(x), x.shape[-1]
    outputs = [stand_in(x)]
    outputs += allocate_copies(
        Format.of(format), rows, cols, x.device, rowwise=rowwise, columnwise=columnwise
    )
    if return_amax:
        outputs.append(torch.empty((), dtype=torch.float32, device=x.device))
    return outputs


def _launch_quantize(
    outputs: list[Tensor], x: Tensor, format: str, rowwise: bool, columnwise: bool, scale: Tensor | None,
    return_amax: bool, seed: int | None,
) -> None:  # fmt: skip
    f = Format.of(format)
    row_copy, col_copy = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise)
    amax_out = outputs[-1] if return_amax else None
    copies = [copy for copy in (row_copy, col_copy) if copy is not None]
    x = flat_rows(x)
    rows, cols = x.shape
    target = capabilities_of(x.device)
    align = align_of(cols, x.stride(0))
    input_max = torch.finfo(x.dtype).max
    # Complements, which are negative: no seed is taken for a size that needs 64 bits.
    seeds = (0, 0) if seed is None else (~(seed & 0x7FFFFFFF), ~(seed >> 31 & 0x7FFFFFFF))
    tile_rows, tile, warps = _rows_tile(cols, target.target)
    row_programs = 1 if f.block == "row" or target.target == "cpu" else -(-cols // tile)
    programs = -(-rows // tile_rows) * row_programs

    def rows_pass(given: Tensor | None, partials: Tensor | None, copy: Copy | None) -> None:
        data, data_scale, *strides = copy_arguments(copy)
        launch = Launch.of(
            _quantize_rows_kernel, num_warps=warps, INPUT_MAX=input_max, FORMAT=f, CAST=cast_mode(target),
            STATIC=scale is not None, STOCHASTIC=seed is not None, ROWS=tile_rows, TILE=tile, ALIGN=align,
            COLS_MASKED=cols % tile != 0,
        )  # fmt: skip
        launch(
            (programs, 1, 1),
            (x, given, partials, data, data_scale),
            (rows, cols, row_programs, x.stride(0), *strides, *seeds),
        )

    given = scale
    if scale is not None:
        given = scale.reshape(-1).contiguous()
        for copied in copies:
            copied.scale.copy_(scale.reshape(copied.scale.shape))
    elif f.needs_tensor_amax:
        pieces_amax = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(None, pieces_amax, None)
        largest = amax_out if amax_out is not None else torch.empty((), dtype=torch.float32, device=x.device)
        tensor_scales = (
            [copies[0].global_scale] if f.block == "nvfp4" else [copied.scale for copied in copies]
        )
        reduce_amax(pieces_amax, f, x.dtype, amax=largest, scales=[s for s in tensor_scales if s is not None])
        given, amax_out = largest, None

    partials = None
    if not columnwise and f.block != "128x128":
        if amax_out is not None:
            partials = torch.empty(programs, dtype=torch.float32, device=x.device)
        rows_pass(given, partials, row_copy)
    else:
        stripe_cols, stripe_warps = stripe_tile(f.block, target.target)
        stripes, tiles = count_stripes(rows, cols), -(-cols // stripe_cols)
        constants = {
            "ROWS": STRIPE, "TILE": stripe_cols, "ALIGN": align, "COLS_MASKED": cols % stripe_cols != 0,
        }  # fmt: skip
        largest_of: list[Tensor | None] = [None, None]
        if f.block == "row":
            pieces = [torch.empty((tiles, rows), dtype=torch.float32, device=x.device) if rowwise else None]
            pieces.append(torch.empty((stripes, cols), dtype=torch.float32, device=x.device))
            find = Launch.of(_amax_kernel, num_warps=stripe_warps, **constants)
            find((stripes * tiles, 1, 1), (x, *pieces), (rows, cols, x.stride(0)))
            largest_of = [piece if piece is None else piece.amax(0) for piece in pieces]
        if amax_out is not None:
            partials = torch.empty(stripes * tiles, dtype=torch.float32, device=x.device)
        data, data_scale, *strides = copy_arguments(row_copy)
        data_t, data_t_scale, *strides_t = copy_arguments(col_copy)
        launch = Launch.of(
            _quantize_stripe_kernel, num_warps=stripe_warps, INPUT_MAX=input_max, FORMAT=f, CAST=cast_mode(target),
            STATIC=scale is not None, STOCHASTIC=seed is not None, **constants,
        )  # fmt: skip
        launch(
            (stripes * tiles, 1, 1),
            (x, given, *largest_of, partials, data, data_scale, data_t, data_t_scale),
            (rows, cols, x.stride(0), *strides, *strides_t, *seeds),
        )
    if partials is not None:
        reduce_amax(partials, None, x.dtype, amax=amax_out)


def _allocate_dequantize(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, cols: int, dtype: torch.dtype
) -> list[Tensor]:
    return [torch.empty((data.shape[0], cols), dtype=dtype, device=data.device)]


def _launch_dequantize(
    outputs: list[Tensor], data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, cols: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    f = Format.of(format)
    rows = data.shape[0]
    data = flat_rows(data)
    align = align_of(cols, data.stride(0) * f.packed)
    tile_rows, tile, warps = _rows_tile(cols, capabilities_of(data.device).target)
    launch = Launch.of(
        _dequantize_kernel, num_warps=warps, FORMAT=f, ROWS=tile_rows, TILE=tile, ALIGN=align,
        COLS_MASKED=cols % tile != 0,
    )  # fmt: skip
    launch(
        (-(-rows // tile_rows) * -(-cols // tile), 1, 1),
        (data, scale, global_scale, outputs[0]),
        (rows, cols, data.stride(0), scale.stride(0), scale.stride(1)),
    )


# ---- registration ---------------------------------------------------------------------------------------


def _setup_quantize(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.inputs = len(inputs)


def _quantize_gradients(ctx: Any, grads: Any) -> Any:
    return grads[0], *[None] * (ctx.inputs - 1)


def _shard_quantize(a: Any) -> Sharding:
    joint, block = blocks_over_rows(a.format, a.rowwise, a.columnwise, a.scale is not None)
    if a.seed is not None:
        joint["..."] = (
            "seed= draws by the number of a row; quantise each rank's shard with its own seed: x.to_local()"
        )
    if a.scale is not None and a.scale.dim() and a.scale.numel() > 1 and a.x.dim() > 2:
        joint["..."] = "a given scale of each row goes with an x [rows, K]"
    of_scale = "" if a.scale is None or a.scale.numel() == 1 else "... _"
    return Sharding(
        {"x": "... k", "scale": of_scale},
        {"q": "... k", **copies_and_amax(a.format, a.rowwise, a.columnwise, a.return_amax)},
        {"k": "blocks reach along it", **joint},
        block,
    )


quantize_op = define_flat_op(
    "quantize(Tensor x, str format, bool rowwise, bool columnwise, Tensor? scale, bool return_amax, int? seed) "
    "-> Tensor[]",
    allocate=_allocate_quantize,
    launch=_launch_quantize,
    reference=quantize_reference,
    setup_context=_setup_quantize,
    backward=_quantize_gradients,
    sharding=_shard_quantize,
    variants=32,
)

dequantize_op = define_flat_op(
    "dequantize(Tensor data, Tensor scale, Tensor? global_scale, str format, SymInt cols, ScalarType dtype) "
    "-> Tensor[]",
    allocate=_allocate_dequantize,
    launch=_launch_dequantize,
    reference=dequantize_reference,
    variants=16,
)


# ---- public functions -----------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    format: Format | str = "1x128",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: Tensor | None = None,
    return_amax: bool = False,
    seed: int | None = None,
) -> Any:
    """Quantise x [..., K] (bf16, fp16 or fp32) to a `QTensor`.

    - `format`: a `Format`, a block's name or a spec such as "e5m2:1x128:deepgemm".
    - `rowwise`, `columnwise`: which copies; both come from one read of x. The column-wise copy is that of x viewed
      as [M, K] and transposed.
    - `scale`: a given (decode) scale, one number for block "tensor", [M, 1] for block "row" without a column-wise
      copy. Otherwise scales are made from x.
    - `return_amax`: also return the largest |x|, an fp32 scalar on the device: what delayed scaling keeps, and
      `weft.scale_from_amax` turns into the next `scale`.
    - `seed`: round stochastically, the same bytes for the same seed. Not for int8.

    By the usual convention (`te`) a block with an Inf gets the scale 1, and the Inf the largest code, ±448 in e4m3:
    nothing of the result is infinite, and the block's other numbers are rounded with a scale that is not theirs. A NaN
    stays one, except in int8, where it is 0. Other conventions make the block NaN, or Inf among zeros: the table in
    `weft.quant.formats` has them all. `weft.any_nonfinite(x)` tells before, and so does the amax of `return_amax`.

    >>> import torch, weft
    >>> x = torch.randn(64, 512, dtype=torch.bfloat16)
    >>> q = weft.quantize(x, "1x128", columnwise=True)
    >>> bool((q.dequantize() - x).abs().max() < x.abs().max() / 12)
    True
    """
    f = Format.of(format)
    check_input("x", x, FLOATS[:3])
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False needs columnwise=True: a QTensor has at least one copy")
    if scale is not None:
        check_tensor("scale", scale, FLOATS, x.device)
        rows = x.numel() // max(x.shape[-1], 1)
        fits = {"tensor": scale.numel() == 1, "row": scale.numel() == rows and not columnwise}
        if not fits.get(f.block, False):
            raise ValueError(
                f"a given scale is one number for block 'tensor', or [{rows}, 1] for block 'row' without a column-wise "
                f"copy; got {tuple(scale.shape)} for block {f.block!r}"
            )
        scale = scale.float()
    if seed is not None and (f.element == "int8" or not 0 <= whole("seed", seed) < 2**62):
        raise ValueError("seed is for float elements and lies between 0 and 2**62 - 1")
    outputs = quantize_op(x, f.spec, rowwise, columnwise, scale, return_amax, seed)
    copies = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise)
    q = wrap(outputs[0], f, *copies)
    return (q, outputs[1 + count_copies(f, rowwise=rowwise, columnwise=columnwise)]) if return_amax else q


def dequantize(q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers that a `QTensor` stands for, q * d in fp32 and rounded once to `dtype` (q's own by default). They
    come from the row-wise copy if there is one; the gradient passes straight through.

    >>> import torch, weft
    >>> weft.dequantize(weft.quantize(torch.ones(2, 128), "row")).sum()
    tensor(256.)
    """
    if is_distributed(q) and isinstance(q.to_local(), QTensor):  # type: ignore[operator]
        return place_like(dequantize(q.to_local(grad_placements=q.placements), dtype), q)  # type: ignore[operator, attr-defined]
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize takes a QTensor; got {type(q).__name__}")
    return q.dequantize(dtype)
