"""Stores that fill the copies of a quantized result from a tile. `quant.copies` defines their layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import quant
from ...language import tl, triton
from ...quant.copies import with_padding
from ...runtime import Capabilities, Launch, capabilities_of, choice, kernel
from ...tiles import (
    CONVERT,
    CONVERT_CLAMPED,
    INTEGER,
    amax,
    fp32_scale,
    given_scale,
    larger,
    nvfp4_global,
    pack_pairs,
    quantize_columns,
    quantize_rows,
    quantize_squares,
    repeat_rows,
    round_to,
    scaled,
)
from .loads import tile_mask
from .rows import STRIPE, scan_config


def count_stripes(rows: int, cols: int) -> int:
    """Return the number of stripes of 128 rows. Raises if `cols` is too large for 32-bit offsets within a stripe."""
    if cols >= 2**24:
        raise ValueError(
            f"rows of 2**24 elements or more have no column-wise copy and no square blocks; got {cols} elements"
        )
    return -(-rows // STRIPE)


class StripeConfig(NamedTuple):
    """Tiling of stripes: `tile` columns at a time."""

    tile: int
    num_warps: int


@choice("stripes", tile=(32, 256), num_warps=(1, 16))
def stripe_config(kernel: str, block: str, align: int, target: Capabilities) -> StripeConfig:
    """Choose the tiling for a kernel ("quantize", "permute", "norm", "gated_norm" or "pointwise") and a format's block.
    `align` divides the columns and strides."""
    if target.is_cpu:
        return StripeConfig(128, 4)
    # 16 elements per thread make 16 bytes of codes. On NVIDIA the registers of up to 512 threads hold such a tile:
    # compiled for sm_90 with 16 warps, in a norm, 1x128 takes 108 registers, 128x128 64, and nvfp4 88.
    tile = 128 if block in ("row", "1x128", "128x128") else 64
    if target.backend == "hip":
        return StripeConfig(tile, tile * STRIPE // 16 // 64)
    # 8 warps where 16 would have too few registers. Compiled for sm_90: mx in a norm spills with 16 warps (64
    # registers) and takes 97 with 8; nvfp4 alone takes 127 to 182 with 8.
    norm = kernel in ("norm", "gated_norm")
    few = block in (("mx",) if norm else ("nvfp4", "nvfp4_16x16"))
    if kernel == "gated_norm" and align == 1:
        few = False
    if kernel == "permute" and block == "1x128" and target.family == "sm_89":
        few = True  # 16 warps leave 128 registers per thread, not quite enough to encode by integers
    if kernel == "pointwise" and block == "1x128":
        # Compiled: 16 warps spill 80 bytes on sm_89 if aligned, up to 24 bytes on sm_100 and sm_120 if not.
        few = align < 16 if target.fp8_cast else (target.family == "sm_89" and align == 16)
    return StripeConfig(tile, 8 if few else 16)


def cast_mode(capabilities: Capabilities) -> int:
    """Return how kernels encode FP8 on this target; see `tiles.numbers`."""
    mode = (
        INTEGER if not capabilities.fp8_cast else CONVERT if capabilities.fp8_saturates else CONVERT_CLAMPED
    )
    return int(mode.value)


# ---- structs of kernels ---------------------------------------------------------------------------------

# Members in capitals are constants. They remain constant only if the struct is built in the call that takes it; stored
# in a variable, they become device scalars.


class StridedCodes(NamedTuple):
    """Codes and scales of a copy, with their strides. `data` is None if the copy is not wanted."""

    data: Tensor | None
    scale: Tensor | None
    stride: int  # of the rows of the codes
    scale_row_stride: int
    scale_col_stride: int


class Encoding(NamedTuple):
    """Encoding of elements as codes."""

    scale_source: Any  # amax of the tensor, or with STATIC its scale; unused by formats with neither
    INPUT_MAX: Any  # largest finite value of the quantized dtype
    FORMAT: Any
    CAST: Any  # from `cast_mode`
    STATIC: Any


class Tile(NamedTuple):
    """Position of a tile in a tensor [rows, cols]."""

    row: Any  # int64 [R]
    start: Any  # first column
    rows: Any
    cols: Any
    ALIGN: Any  # divides cols and the row strides
    ROWS_MASKED: Any  # some rows of the tile may lie past the last row
    COLS_MASKED: Any


class Stripe(NamedTuple):
    """Position of a tile that is as tall as a stripe."""

    number: Any  # index of the stripe, int64
    start: Any
    rows: Any
    cols: Any
    ALIGN: Any
    COLS_MASKED: Any


class Squares(NamedTuple):
    """Position of the square blocks of a tile in a tensor [rows, cols]."""

    down: Any  # index of the first square from the top
    across: Any  # index of the first square from the left
    rows: Any
    cols: Any


def copy_arguments(copy: quant.Codes | None) -> StridedCodes:
    """Return a copy as kernel arguments."""
    if copy is None:
        return NO_CODES
    row, col = copy.scale.stride()
    return StridedCodes(with_padding(copy.data), copy.scale, copy.data.stride(0), row, col)


NO_CODES = StridedCodes(None, None, 0, 0, 0)


# ---- stores ---------------------------------------------------------------------------------------------


@triton.jit
def load_scale_source(ptr, scale_ptr, scale_t_ptr, STATIC: tl.constexpr):
    """Load the amax of the tensor, or with STATIC its scale, which the first program then stores to the scales of the
    copies; 0 if ptr is None."""
    if ptr is not None:
        value = tl.load(ptr).to(tl.float32)
        if STATIC:
            is_first = tl.program_id(0) == 0
            if scale_ptr is not None:
                tl.store(scale_ptr, value, mask=is_first)
            if scale_t_ptr is not None:
                tl.store(scale_t_ptr, value, mask=is_first)
        return value
    else:
        return 0.0


@triton.jit
def tensor_factor(encoding):
    """Return the factor of a tensor with one scale, from the stored scale with STATIC, else from the amax."""
    if encoding.STATIC:
        return given_scale(encoding.scale_source, encoding.FORMAT)
    else:
        _, factor = fp32_scale(encoding.scale_source, encoding.INPUT_MAX, encoding.FORMAT)
        return factor


@triton.jit
def from_row(copy, first):
    """Return the row-wise copy from row `first` on. `first` is int64 and known to be a multiple of 16."""
    if copy.data is None:
        return copy
    else:
        return StridedCodes(
            copy.data + first * copy.stride,
            copy.scale + first * copy.scale_row_stride,
            copy.stride,
            copy.scale_row_stride,
            copy.scale_col_stride,
        )


@triton.jit
def store_rows(y, copy, tile, encoding, random=None):
    """Store the row-wise copy of a tile, for formats whose groups lie within the tile.

    y is fp32 [R, C], zero where there is no element; `random`, uint32 [R, C], rounds stochastically.
    """
    G: tl.constexpr = encoding.FORMAT.group
    codes, scale = quantize_rows(
        y, random, encoding.scale_source, encoding.INPUT_MAX, encoding.FORMAT, encoding.CAST
    )
    store_codes(codes, copy, tile, encoding.FORMAT)
    group = tile.start // G + tl.arange(0, y.shape[1] // G)
    groups = (tile.cols + G - 1) // G
    mask = tile_mask(tile.row, group, tile.rows, groups, tile.ROWS_MASKED, tile.COLS_MASKED)
    row_off = tile.row * copy.scale_row_stride
    group_off = group.to(tl.int64) * copy.scale_col_stride
    tl.store(copy.scale + row_off[:, None] + group_off[None, :], scale, mask=mask)


@triton.jit
def store_codes(codes, copy, tile, FORMAT: tl.constexpr):
    """Store uint8 codes [R, C] to a byte tensor [rows, cols]; 4-bit codes are packed two to a byte."""
    PACKED: tl.constexpr = FORMAT.packed
    ALIGN: tl.constexpr = tile.ALIGN // PACKED if tile.ALIGN > 1 else 1  # in bytes
    if PACKED == 2:
        if tile.COLS_MASKED:  # the unused half of an odd row's last byte is zero
            codes = tl.where((tile.start + tl.arange(0, codes.shape[1]) < tile.cols)[None, :], codes, 0)
        codes = pack_pairs(codes)
    bound = ((tile.cols + PACKED - 1) // PACKED // ALIGN) * ALIGN
    col = tile.start // PACKED + tl.arange(0, codes.shape[1])
    mask = tile_mask(tile.row, col, tile.rows, bound, tile.ROWS_MASKED, tile.COLS_MASKED)
    row_off = tl.multiple_of(tile.row * copy.stride, ALIGN)
    tl.store(
        copy.data + row_off[:, None] + col[None, :],
        codes.to(copy.data.dtype.element_ty, bitcast=True),
        mask=mask,
    )


@triton.jit
def store_stripe(y, copy, copy_t, stripe, encoding, random=None, random_t=None):
    """Store both copies of a tile that is as tall as the longest group.

    y is fp32 [STRIPE, C], zero where there is no element. `random` and `random_t`, uint32 [STRIPE, C], round the
    row-wise and the column-wise copy stochastically. Copies that share their codes (squares, tensor) both use
    `random`.
    """
    FORMAT: tl.constexpr = encoding.FORMAT
    STRIPE: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    # Rows are counted from the first row of the stripe, so that 32-bit offsets suffice: they take half the registers.
    row = tl.arange(0, STRIPE)
    first = stripe.number * STRIPE
    left = (stripe.rows - first).to(tl.int32)
    own = from_row(copy, first)
    if FORMAT.square or FORMAT.block == "tensor":  # both copies have the same codes
        if FORMAT.block == "tensor":
            codes = round_to(scaled(y, tensor_factor(encoding), FORMAT), random, FORMAT, encoding.CAST)
        else:
            codes, scale = quantize_squares(
                y, random, encoding.scale_source, encoding.INPUT_MAX, FORMAT, encoding.CAST
            )
            down, across = stripe.number * (STRIPE // FORMAT.square), stripe.start // FORMAT.square
            if copy.data is not None:
                store_squares(scale, copy, Squares(down, across, stripe.rows, stripe.cols), FORMAT)
            if copy_t.data is not None:
                transposed = Squares(across, down, stripe.cols, stripe.rows)
                store_squares(tl.trans(scale), copy_t, transposed, FORMAT)
        if copy.data is not None:
            store_codes(
                codes,
                own,
                Tile(row, stripe.start, left, stripe.cols, stripe.ALIGN, True, stripe.COLS_MASKED),
                FORMAT,
            )
        if copy_t.data is not None:
            store_transposed(codes, copy_t, stripe, FORMAT)
    else:
        if copy.data is not None:
            store_rows(
                y,
                own,
                Tile(row, stripe.start, left, stripe.cols, stripe.ALIGN, True, stripe.COLS_MASKED),
                encoding,
                random,
            )
        if copy_t.data is not None:
            codes, scale = quantize_columns(
                y, random_t, encoding.scale_source, encoding.INPUT_MAX, FORMAT, encoding.CAST
            )
            store_transposed(codes, copy_t, stripe, FORMAT)
            G: tl.constexpr = FORMAT.group
            group = stripe.number * (STRIPE // G) + tl.arange(0, STRIPE // G)
            col = stripe.start + tl.arange(0, C)
            exists = (group < (stripe.rows + G - 1) // G)[:, None] & (col < stripe.cols)[None, :]
            group_off = group * copy_t.scale_col_stride
            col_off = col.to(tl.int64) * copy_t.scale_row_stride
            tl.store(copy_t.scale + (group_off[:, None] + col_off[None, :]), scale, mask=exists)


@triton.jit
def store_squares(scale, copy, squares, FORMAT: tl.constexpr):
    """Store the scales of squares, fp32 or uint8 [R, C]: each once per square, or once per row of it if the format
    stores scales by row."""
    REPEATED: tl.constexpr = FORMAT.square // FORMAT.block_rows
    scale = repeat_rows(scale, REPEATED)
    row = squares.down.to(tl.int64) * REPEATED + tl.arange(0, scale.shape[0])
    col = squares.across.to(tl.int64) + tl.arange(0, scale.shape[1])
    height = (squares.rows + FORMAT.block_rows - 1) // FORMAT.block_rows
    width = (squares.cols + FORMAT.square - 1) // FORMAT.square
    mask = (row < height)[:, None] & (col < width)[None, :]
    row_off, col_off = row * copy.scale_row_stride, col * copy.scale_col_stride
    tl.store(copy.scale + row_off[:, None] + col_off[None, :], scale, mask=mask)


@triton.jit
def store_transposed(codes, copy_t, stripe, FORMAT: tl.constexpr):
    """Store the codes [STRIPE, C] of a stripe to the column-wise copy, whose rows are padded to 16 bytes."""
    STRIPE: tl.constexpr = codes.shape[0]
    PACKED: tl.constexpr = FORMAT.packed
    codes = tl.trans(codes)  # [C, STRIPE]
    if PACKED == 2:
        codes = tl.where((stripe.number * STRIPE + tl.arange(0, STRIPE) < stripe.rows)[None, :], codes, 0)
        codes = pack_pairs(codes)
    byte = stripe.number * (STRIPE // PACKED) + tl.arange(0, STRIPE // PACKED)
    bound = (((stripe.rows + PACKED - 1) // PACKED + 15) // 16) * 16  # into the padding, never past it
    col = stripe.start + tl.arange(0, codes.shape[0])
    mask = (col < stripe.cols)[:, None] & (byte < bound)[None, :]
    col_off = tl.multiple_of(col.to(tl.int64) * copy_t.stride, 16)
    tl.store(
        copy_t.data + col_off[:, None] + byte[None, :],
        codes.to(copy_t.data.dtype.element_ty, bitcast=True),
        mask=mask,
    )


@kernel
def _tensor_scale_kernel(
    partial_ptr,  # fp32 [count]: amax of each part of the tensor
    amax_ptr,  # scalar, or None
    scale_ptr,  # scalar of the row-wise copy, or None
    scale_t_ptr,  # scalar of the column-wise copy, or None
    count,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Reduce the amax of the parts to the tensor's amax, and derive the tensor's scale: d, or nvfp4's g."""
    largest = tl.zeros((TILE,), tl.float32)
    for start in range(0, count, TILE):
        part = start + tl.arange(0, TILE)
        largest = larger(largest, tl.load(partial_ptr + part, mask=part < count, other=0.0))
    tensor_amax = amax(largest, axis=0)
    if amax_ptr is not None:
        tl.store(amax_ptr, tensor_amax)
    if FORMAT is not None:
        if FORMAT.stored.block == "nvfp4":
            scale = nvfp4_global(tensor_amax, FORMAT)
        else:
            scale, _ = fp32_scale(tensor_amax, INPUT_MAX, FORMAT)
        if scale_ptr is not None:
            tl.store(scale_ptr, scale)
        if scale_t_ptr is not None:
            tl.store(scale_t_ptr, scale)


def reduce_amax(
    partials: Tensor,
    format: quant.Format | None,
    input_dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> None:
    """Launch the reduction of partial amax values to the tensor's, and store its scale in up to two tensors."""
    first, second = [*scales, None, None][:2]
    tile, num_warps = scan_config("amax", capabilities_of(partials.device))
    launch = Launch.of(
        _tensor_scale_kernel,
        num_warps=num_warps,
        INPUT_MAX=torch.finfo(input_dtype).max,
        FORMAT=format,
        TILE=tile,
    )
    launch(
        (1, 1, 1),
        *_tensor_scale_kernel.arguments(
            partial_ptr=partials, amax_ptr=amax, scale_ptr=first, scale_t_ptr=second, count=partials.numel()
        ),
    )
