"""Launches of permute, unpermute and unpermute's backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....quant import Codes, Format
from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered
from ...common.copies import cast_mode, copy_arguments, count_stripes, stripe_config
from ...common.rows import STRIPE, align_of, contiguous, cpu_tile, flat_rows
from ..row_map.arguments import RowMap
from .arguments import (
    PermuteArgs,
    PermuteOutputs,
    UnpermuteArgs,
    UnpermuteBackwardArgs,
    UnpermuteGradients,
    UnpermuteOutputs,
)
from .kernels import PADS, permute_kernel, permute_stripe_kernel, unpermute_backward_kernel, unpermute_kernel


class MoveConfig(NamedTuple):
    """Tiling of rows: `rows` per program, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("permute", rows=(1, 64), tile=(64, 8192), num_warps=(1, 16))
def move_config(kernel: str, cols: int, coded: bool, target: Capabilities) -> MoveConfig:
    """Return the tiling of "permute", whose output is `coded`, or of "unpermute", whose input is. Tiles have 2048
    elements per 128 threads, or 1024 if they are sums of several rows; on a CPU they lie within one row."""
    smallest = 128 if coded else 1
    if target.is_cpu:
        return MoveConfig(1, cpu_tile(cols, smallest), 4)
    elements = 2048 if kernel == "permute" or coded else 1024
    tile = min(max(1 << max(cols - 1, 0).bit_length(), smallest, 64), elements)
    return MoveConfig(elements // tile, tile, 128 // target.warp_size)


@choice("unpermute_backward", tile=(128, 4096), num_warps=(1, 16))
def dots_config(cols: int, target: Capabilities) -> MoveConfig:
    """Return the tiling of the gradients of `unpermute`, with one row per program."""
    if target.is_cpu:
        return MoveConfig(1, cpu_tile(cols, 128), 4)
    # Each thread holds 64 elements of the slots' rows and 16 bytes of dy.
    return MoveConfig(1, min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024), 128 // target.warp_size)


Strides = tuple[int, int, int]  # strides of rows, of scale rows, and of scales within a row


class _Layout(NamedTuple):
    """Sizes of a permutation, and strides of its inputs and outputs."""

    tokens: int
    rows: int
    cols: int
    slots: int  # per token
    x: Strides
    x_scales: int  # per row
    probs_stride: int
    y: Strides


@remembered
def _permute_launch(
    layout: _Layout, target_format: str | None, dtype: torch.dtype, cast: int, target: Capabilities
) -> BoundLaunch:
    """Bind a permutation that quantizes elements of this dtype to `target_format`, or, if that is None, moves its input
    unchanged."""
    tokens, rows, cols, slots, x, x_scales, probs_stride, y = layout
    config = move_config("permute", cols, target_format is not None, target)
    format = None if target_format is None else Format.of(target_format)
    launch = Launch.of(
        permute_kernel,
        num_warps=config.num_warps,
        INPUT_MAX=1.0 if target_format is None else torch.finfo(dtype).max,
        FORMAT=format,
        CAST=cast,
        ROWS=config.rows,
        TILE=config.tile,
        ALIGN=align_of(cols, x[0], y[0]),
        COLS_MASKED=cols % config.tile != 0,
    )
    whole = format is not None and format.block == "row"  # a program has whole rows
    token_programs = -(-tokens // config.rows) * (1 if whole else -(-cols // config.tile))
    grid = (token_programs - (-rows // PADS.value), 1, 1)
    x_stride, x_scale_row_stride, x_scale_col_stride = x
    y_stride, y_scale_row_stride, y_scale_col_stride = y
    return launch.bind(
        grid,
        tokens=tokens,
        rows=rows,
        cols=cols,
        slots=slots,
        token_programs=token_programs,
        scale_cols=x_scales,
        x_stride=x_stride,
        x_scale_row_stride=x_scale_row_stride,
        x_scale_col_stride=x_scale_col_stride,
        probs_stride=probs_stride,
        y_stride=y_stride,
        y_scale_row_stride=y_scale_row_stride,
        y_scale_col_stride=y_scale_col_stride,
    )


@remembered
def _unpermute_launch(
    tokens: int, slots: int, cols: int, strides: Strides, probs_stride: int, back_stride: int, format: str | None,
    target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the sum of rows with these strides; `format` is that of quantized rows."""
    config = move_config("unpermute", cols, format is not None, target)
    rows_stride, scale_row_stride, scale_col_stride = strides
    launch = Launch.of(
        unpermute_kernel,
        num_warps=config.num_warps,
        FORMAT=None if format is None else Format.of(format),
        AT_ONCE=_at_once(slots),
        ROWS=config.rows,
        TILE=config.tile,
        ALIGN=align_of(cols, rows_stride),
        COLS_MASKED=cols % config.tile != 0,
    )
    return launch.bind(
        (-(-tokens // config.rows) * -(-cols // config.tile), 1, 1),
        tokens=tokens,
        cols=cols,
        slots=slots,
        rows_stride=rows_stride,
        scale_row_stride=scale_row_stride,
        scale_col_stride=scale_col_stride,
        probs_stride=probs_stride,
        back_stride=back_stride,
    )


def _at_once(slots: int) -> int:
    """Return how many slots to load together: up to eight, since a thread has registers for eight loads of 16 bytes."""
    return 1 if slots == 1 else 2 if slots == 2 else 4 if slots <= 4 else 8


def _sizes(map: RowMap) -> tuple[int, int, int]:
    """Return (tokens, rows, slots per token)."""
    slots = map.row_of_slot.shape[-1]
    return map.row_of_slot.numel() // slots, map.slot_of_row.shape[0], slots


def _strides(data: Tensor, scale: Tensor | None) -> Strides:
    if scale is None:
        return data.stride(0), 0, 0
    scale_row, scale_col = scale.stride()
    return data.stride(0), scale_row, scale_col


def _source(rows: Tensor | None, codes: Codes) -> tuple[Tensor, Tensor | None, Strides]:
    """Return (data, scales, strides) of plain rows or codes [M, K] as kernels read them."""
    data = flat_rows(rows if codes.data is None else codes.data)
    return data, codes.scale, _strides(data, codes.scale)


def _row_stride(x: Tensor | None) -> int:
    """Return the row stride of a contiguous tensor, or 0 for None."""
    return 0 if x is None else x.shape[-1]


def _permute_by_tokens(o: PermuteOutputs, a: PermuteArgs) -> None:
    """Write a rowwise result: elements moved unchanged, elements quantized on the way, or codes moved unchanged."""
    tokens, rows, slots = _sizes(a.map)
    target = capabilities_of(a.x.device)
    x, x_scale, x_strides = _source(a.x, a.codes)
    probs = contiguous(a.probs)
    y, y_scale = o.result.data, o.result.scale
    if y is None:
        y = o.result.y
    layout = _Layout(
        tokens,
        rows,
        x.shape[1],
        slots,
        x_strides,
        _row_stride(x_scale),
        _row_stride(probs),
        _strides(y, y_scale),
    )
    target_format = a.result.format if a.codes.data is None else None
    cast = 0 if target_format is None else cast_mode(target)
    _permute_launch(layout, target_format, x.dtype, cast, target)(
        *permute_kernel.tensors(
            x_ptr=x,
            x_scale_ptr=x_scale,
            probs_ptr=probs,
            experts_ptr=a.map.experts,
            row_of_slot_ptr=a.map.row_of_slot,
            slot_of_row_ptr=a.map.slot_of_row,
            y_ptr=y,
            y_scale_ptr=y_scale,
            row_probs_ptr=o.row_probs,
        )
    )


def _permute_by_stripes(o: PermuteOutputs, a: PermuteArgs) -> None:
    """Write the columnwise copy, and the rowwise one if requested."""
    assert a.result.format is not None
    _, rows, slots = _sizes(a.map)
    f, target = Format.of(a.result.format), capabilities_of(a.x.device)
    x, probs = flat_rows(a.x), contiguous(a.probs)
    cols = x.shape[1]
    align = align_of(cols, x.stride(0))
    tile, num_warps = stripe_config("permute", f.block, align, target)
    row, col = map(copy_arguments, o.result.copies(a.result.format))
    launch = Launch.of(
        permute_stripe_kernel,
        num_warps=num_warps,
        INPUT_MAX=torch.finfo(x.dtype).max,
        FORMAT=f,
        CAST=cast_mode(target),
        ROWS=STRIPE,
        TILE=tile,
        ALIGN=align,
        COLS_MASKED=cols % tile != 0,
    )
    launch(
        (count_stripes(rows, cols) * -(-cols // tile), 1, 1),
        *permute_stripe_kernel.arguments(
            x_ptr=x,
            probs_ptr=probs,
            experts_ptr=a.map.experts,
            slot_of_row_ptr=a.map.slot_of_row,
            row_probs_ptr=o.row_probs,
            rows=rows,
            cols=cols,
            slots=slots,
            x_stride=x.stride(0),
            probs_stride=_row_stride(probs),
            copy=row,
            copy_t=col,
        ),
    )


def launch_unpermute_backward(o: UnpermuteGradients, a: UnpermuteBackwardArgs) -> None:
    tokens, row_count, slots = _sizes(a.map)
    dy, probs = flat_rows(a.dy), contiguous(a.probs)
    cols, rows, scale, strides = dy.shape[1], None, None, (0, 0, 0)
    if o.probs is not None:
        rows, scale, strides = _source(a.rows, a.codes)
        if a.map.experts is not None:
            o.probs.zero_()
    _, tile, num_warps = dots_config(cols, capabilities_of(a.dy.device))
    launch = Launch.of(
        unpermute_backward_kernel,
        num_warps=num_warps,
        FORMAT=None if scale is None or a.codes.format is None else Format.of(a.codes.format),
        AT_ONCE=_at_once(slots),
        TILE=tile,
        ALIGN=align_of(cols, dy.stride(0), strides[0]),
        COLS_MASKED=cols % tile != 0,
    )
    launch(
        (tokens - (0 if o.rows is None else -row_count // PADS.value), 1, 1),
        *unpermute_backward_kernel.arguments(
            dy_ptr=dy,
            rows_ptr=rows,
            scale_ptr=scale,
            probs_ptr=probs,
            experts_ptr=a.map.experts,
            row_of_slot_ptr=a.map.row_of_slot,
            slot_of_row_ptr=a.map.slot_of_row,
            drows_ptr=o.rows,
            dprobs_ptr=o.probs,
            tokens=tokens,
            rows=row_count,
            cols=cols,
            slots=slots,
            dy_stride=dy.stride(0),
            rows_stride=strides[0],
            scale_row_stride=strides[1],
            scale_col_stride=strides[2],
            probs_stride=_row_stride(probs),
            dprobs_stride=_row_stride(probs),
        ),
    )


def launch_permute(o: PermuteOutputs, a: PermuteArgs) -> None:
    if a.map.slot_of_row.shape[0] == 0:
        return
    if a.result.columnwise:
        _permute_by_stripes(o, a)
    else:
        _permute_by_tokens(o, a)


def launch_unpermute(o: UnpermuteOutputs, a: UnpermuteArgs) -> None:
    tokens, _, slots = _sizes(a.map)
    if tokens == 0:
        return
    if o.carried is not None and a.map.experts is not None:
        o.carried.zero_()  # experts that a token did not choose
    rows, scale, strides = _source(a.rows, a.codes)
    probs, format = contiguous(a.probs), None if a.codes.data is None else a.codes.format
    _unpermute_launch(
        tokens,
        slots,
        rows.shape[1],
        strides,
        _row_stride(probs),
        _row_stride(o.carried),
        format,
        capabilities_of(rows.device),
    )(
        *unpermute_kernel.tensors(
            rows_ptr=rows,
            scale_ptr=scale,
            probs_ptr=probs,
            experts_ptr=a.map.experts,
            carried_ptr=contiguous(a.carried),
            row_of_slot_ptr=a.map.row_of_slot,
            y_ptr=o.y,
            back_ptr=o.carried,
        )
    )
