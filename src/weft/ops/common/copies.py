"""How an op writes a quantised result: the stores that fill its copies from a tile. `quant.copies` has their layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...language import tl, triton
from ...quant import Copy, Format
from ...quant.flat import count_copies
from ...runtime import Capabilities, Launch, kernel
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
    round_to,
    scaled,
)
from .checks import FLOATS, check_out_dtype, check_tensor
from .rows import tile_mask

STRIPE = 128  # rows of a program that writes column-wise copies: the longest group along M


def check_quantize(
    quantize: Format | str | None, rowwise: bool, columnwise: bool, quant_scale: Tensor | None, return_amax: bool,
    out_dtype: torch.dtype | None, device: torch.device,
) -> Format | None:  # fmt: skip
    """The format of a result that may be quantised; None for a plain one."""
    if quantize is None:
        if quant_scale is not None or return_amax or columnwise:
            raise ValueError("columnwise, quant_scale and return_amax go with quantize=…")
        check_out_dtype(out_dtype)
        return None
    format = Format.of(quantize)
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False needs columnwise=True: a QTensor has at least one copy")
    if columnwise and format.block == "row":
        raise ValueError(
            "block 'row' has one scale to a whole column in its column-wise copy, which one pass cannot make: "
            "quantise the result with weft.quantize, or take 1x128"
        )
    if quant_scale is not None:
        check_tensor("quant_scale", quant_scale, FLOATS, device)
        if format.block != "tensor" or quant_scale.numel() != 1:
            raise ValueError(
                f"quant_scale is one given scale, for block 'tensor'; got {quant_scale.numel()} for {format.block!r}"
            )
    if out_dtype is not None:
        raise ValueError("out_dtype is for a plain result; a quantised one has the dtype of x")
    return format


def blocks_over_rows(
    spec: str | None, rowwise: bool, columnwise: bool, scale_given: bool
) -> tuple[dict[str, str], int]:
    """For `Sharding`: why the rows of a result in this format cannot be sharded, if so, and how many a block has."""
    if spec is None:
        return {}, 1
    f = Format.of(spec)
    if f.needs_tensor_amax and not scale_given:
        given = "Give the scale (a delayed or static one), q" if f.block == "tensor" else "Q"
        why = f"{spec} has a scale that depends on the largest number of all ranks. {given}"
    elif columnwise and not f.group and f.block != "tensor":
        why = f"a column-wise copy of {spec} has one scale for a column of all ranks. Q"
    else:
        return {}, max(f.block_rows if rowwise else 1, f.group if columnwise else 1, 1)
    return {"...": f"{why}uantise each rank's shard by itself with x.to_local()"}, 1


def copies_and_amax(
    spec: str | None, rowwise: bool, columnwise: bool, return_amax: bool
) -> dict[str, str | None]:
    """For `Sharding`: the outputs after a quantised result. Copies stay with their rank, in the QTensor that is its
    shard."""
    if spec is None:
        return {}
    count = count_copies(Format.of(spec), rowwise=rowwise, columnwise=columnwise)
    copies: dict[str, str | None] = {f"copy{i}": None for i in range(count)}
    return copies | {"amax": "max:"} if return_amax else copies


def count_stripes(rows: int, cols: int) -> int:
    """Stripes of 128 rows; within one, offsets have 32 bits."""
    if cols >= 2**24:
        raise ValueError(
            f"rows of 2**24 elements or more have no column-wise copy and no 128x128 blocks; got {cols}"
        )
    return -(-rows // STRIPE)


def copy_arguments(copy: Copy | None) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """A copy as kernels take it: codes, scales, row stride of the codes, row and column stride of the scales."""
    if copy is None:
        return None, None, 0, 0, 0
    data, stride = copy.data, copy.data.stride(0)
    if stride > data.shape[1]:
        data = data.as_strided((data.shape[0], stride), (stride, 1))  # with the padding, which is written too
    return data, copy.scale, stride, copy.scale.stride(0), copy.scale.stride(1)


@functools.lru_cache(maxsize=1024)
def stripe_tile(block: str, target: str, norm: bool = False) -> tuple[int, int]:
    """(columns, warps) of the tiles that stripes are cut into, for formats with this block; in a norm, or alone."""
    if target == "cpu":
        return 128, 4
    # 16 numbers to a thread are 16 bytes of codes; on NVIDIA up to 512 threads, whose registers still hold a tile.
    # Compiled for sm_90, in a norm: 1x128 108 registers at 16 warps, 128x128 64, nvfp4 88.
    tile = 64 if block in ("mx", "nvfp4", "tensor") else 128
    if target.startswith("gfx"):
        return tile, tile * STRIPE // 16 // 64
    # Where 16 warps get fewer registers than they need: mx in a norm (for sm_90 64, and spills; 97 at 8), nvfp4 alone
    # (127 to 182 at 8).
    return tile, 8 if block == ("mx" if norm else "nvfp4") else 16


def cast_mode(capabilities: Capabilities) -> int:
    """How kernels for this target encode FP8; see `tiles.numbers`."""
    mode = (
        INTEGER if not capabilities.fp8_cast else CONVERT if capabilities.fp8_saturates else CONVERT_CLAMPED
    )
    return int(mode.value)


@triton.jit
def tensor_factor(given, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, STATIC: tl.constexpr):
    """The factor of a tensor with one scale: from that scale if it is STATIC, else from the tensor's amax."""
    if STATIC:
        return given_scale(given, FORMAT)
    else:
        _, factor = fp32_scale(given, INPUT_MAX, FORMAT)
        return factor


@triton.jit
def store_rows(
    y,  # fp32 [R, C], zero where there is no element
    random,  # uint32 [R, C] to round stochastically, or None
    data_ptr,
    scale_ptr,
    tensor_amax,
    row,  # int64 [R]
    start,  # first column
    rows,
    cols,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS_MASKED: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """The row-wise copy of a tile, for formats whose groups lie within it."""
    codes, scale = quantize_rows(y, random, tensor_amax, INPUT_MAX, FORMAT, CAST)
    store_codes(codes, data_ptr, row, start, rows, cols, data_stride, FORMAT, ALIGN, ROWS_MASKED, COLS_MASKED)
    group = start // FORMAT.group + tl.arange(0, y.shape[1] // FORMAT.group)
    groups = (cols + FORMAT.group - 1) // FORMAT.group
    mask = tile_mask(row, group, rows, groups, ROWS_MASKED, COLS_MASKED)
    tl.store(
        scale_ptr + (row * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)[None, :],
        scale,
        mask=mask,
    )


@triton.jit
def store_codes(
    codes,  # uint8 [R, C]
    data_ptr,
    row,
    start,
    rows,
    cols,
    data_stride,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS_MASKED: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Codes to a [rows, cols] tensor of bytes, two to a byte if they have four bits."""
    PACKED: tl.constexpr = FORMAT.packed
    if PACKED == 2:
        if COLS_MASKED:  # the unused half of an odd row's last byte is zero
            codes = tl.where((start + tl.arange(0, codes.shape[1]) < cols)[None, :], codes, 0)
        codes = pack_pairs(codes)
    bound = ((cols + PACKED - 1) // PACKED // (ALIGN // PACKED if ALIGN > 1 else 1)) * (
        ALIGN // PACKED if ALIGN > 1 else 1
    )
    col = start // PACKED + tl.arange(0, codes.shape[1])
    mask = tile_mask(row, col, rows, bound, ROWS_MASKED, COLS_MASKED)
    row_off = tl.multiple_of(row * data_stride, ALIGN // PACKED if ALIGN > 1 else 1)
    tl.store(
        data_ptr + row_off[:, None] + col[None, :],
        codes.to(data_ptr.dtype.element_ty, bitcast=True),
        mask=mask,
    )


@triton.jit
def store_stripe(
    y,  # fp32 [STRIPE, C], zero where there is no element
    random,  # uint32 [STRIPE, C] to round the row-wise copy stochastically, or None
    random_t,  # and for the column-wise copy
    data_ptr,  # row-wise copy, or None
    scale_ptr,
    data_t_ptr,  # column-wise copy, or None
    scale_t_ptr,
    given,  # the tensor's amax; its scale with STATIC; read by the formats that need it
    stripe,  # number of the stripe, int64
    start,  # first column
    rows,
    cols,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    data_t_stride,
    scale_t_row_stride,
    scale_t_col_stride,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Both copies of a tile that is as tall as the longest group, from one read of it. Where they share their
    codes (128x128, tensor), `random` serves both."""
    STRIPE: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    # Rows are counted from the stripe's first: their offsets need 32 bits, which halves the registers for them.
    row = tl.arange(0, STRIPE)
    left = (rows - stripe * STRIPE).to(tl.int32)
    if data_ptr is not None:
        data_ptr += stripe * STRIPE * data_stride
    if FORMAT.block == "128x128":
        codes, scale = quantize_squares(y, random, INPUT_MAX, FORMAT, CAST)
        square = start // STRIPE + tl.arange(0, C // STRIPE)
        exists = square < (cols + STRIPE - 1) // STRIPE
        if data_ptr is not None:
            store_codes(
                codes, data_ptr, row, start, left, cols, data_stride, FORMAT, ALIGN, True, COLS_MASKED
            )
            tl.store(scale_ptr + stripe * scale_row_stride + square * scale_col_stride, scale, mask=exists)
        if data_t_ptr is not None:
            store_transposed(codes, data_t_ptr, stripe, start, rows, cols, data_t_stride, FORMAT)
            tl.store(
                scale_t_ptr + square * scale_t_row_stride + stripe * scale_t_col_stride, scale, mask=exists
            )
    elif FORMAT.block == "tensor":
        codes = round_to(
            scaled(y, tensor_factor(given, INPUT_MAX, FORMAT, STATIC), FORMAT), random, FORMAT, CAST
        )
        if data_ptr is not None:
            store_codes(
                codes, data_ptr, row, start, left, cols, data_stride, FORMAT, ALIGN, True, COLS_MASKED
            )
        if data_t_ptr is not None:
            store_transposed(codes, data_t_ptr, stripe, start, rows, cols, data_t_stride, FORMAT)
    else:
        if data_ptr is not None:
            store_rows(
                y, random, data_ptr, scale_ptr + stripe * STRIPE * scale_row_stride, given, row, start, left, cols,
                data_stride, scale_row_stride, scale_col_stride, INPUT_MAX, FORMAT, CAST, ALIGN, True, COLS_MASKED,
            )  # fmt: skip
        if data_t_ptr is not None:
            codes, scale = quantize_columns(y, random_t, given, INPUT_MAX, FORMAT, CAST)
            store_transposed(codes, data_t_ptr, stripe, start, rows, cols, data_t_stride, FORMAT)
            G: tl.constexpr = FORMAT.group
            group = stripe * (STRIPE // G) + tl.arange(0, STRIPE // G)
            col = start + tl.arange(0, C)
            exists = (group < (rows + G - 1) // G)[:, None] & (col < cols)[None, :]
            scale_off = (group * scale_t_col_stride)[:, None] + (col.to(tl.int64) * scale_t_row_stride)[
                None, :
            ]
            tl.store(scale_t_ptr + scale_off, scale, mask=exists)


@triton.jit
def store_transposed(codes, data_t_ptr, stripe, start, rows, cols, data_t_stride, FORMAT: tl.constexpr):
    """Codes [STRIPE, C] of rows `stripe` to the column-wise copy, whose rows are padded to 16 bytes."""
    STRIPE: tl.constexpr = codes.shape[0]
    PACKED: tl.constexpr = FORMAT.packed
    codes = tl.trans(codes)  # [C, STRIPE]
    if PACKED == 2:
        codes = tl.where((stripe * STRIPE + tl.arange(0, STRIPE) < rows)[None, :], codes, 0)
        codes = pack_pairs(codes)
    byte = stripe * (STRIPE // PACKED) + tl.arange(0, STRIPE // PACKED)
    bound = (((rows + PACKED - 1) // PACKED + 15) // 16) * 16  # into the padding, never past it
    col = start + tl.arange(0, codes.shape[0])
    mask = (col < cols)[:, None] & (byte < bound)[None, :]
    col_off = tl.multiple_of(col.to(tl.int64) * data_t_stride, 16)
    tl.store(
        data_t_ptr + col_off[:, None] + byte[None, :],
        codes.to(data_t_ptr.dtype.element_ty, bitcast=True),
        mask=mask,
    )


@kernel
def _tensor_scale_kernel(
    partial_ptr,  # fp32 [count]: amax of parts of the tensor
    amax_ptr,  # scalar, or None
    scale_ptr,  # scalar of the row-wise copy, or None
    scale_t_ptr,  # scalar of the column-wise copy, or None
    count,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tensor's amax, and the scale that it makes: d, or nvfp4's g."""
    largest = tl.zeros((TILE,), tl.float32)
    for start in range(0, count, TILE):
        part = start + tl.arange(0, TILE)
        largest = larger(largest, tl.load(partial_ptr + part, mask=part < count, other=0.0))
    tensor_amax = amax(largest, axis=0)
    if amax_ptr is not None:
        tl.store(amax_ptr, tensor_amax)
    if FORMAT is not None:
        if FORMAT.block == "nvfp4":
            scale = nvfp4_global(tensor_amax, FORMAT)
        else:
            scale, _ = fp32_scale(tensor_amax, INPUT_MAX, FORMAT)
        if scale_ptr is not None:
            tl.store(scale_ptr, scale)
        if scale_t_ptr is not None:
            tl.store(scale_t_ptr, scale)


def reduce_amax(
    partials: Tensor,
    format: Format | None,
    input_dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> None:
    """From the amax of parts of a tensor to its own, and to its scale in up to two places."""
    first, second = [*scales, None, None][:2]
    launch = Launch.of(_tensor_scale_kernel, INPUT_MAX=torch.finfo(input_dtype).max, FORMAT=format, TILE=1024)
    launch((1, 1, 1), (partials, amax, first, second), (partials.numel(),))
