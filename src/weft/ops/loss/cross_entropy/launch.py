"""Launches of cross entropy, its statistics and its backward."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.rows import align_of, contiguous, row_strides, scan_config
from ..join import CAPPED, launch_join
from ..reduction import LossOptions
from ..statistics import Statistics, TokenResults, Wanted
from .arguments import (
    CrossEntropyArgs,
    CrossEntropyBackwardArgs,
    CrossEntropyOutputs,
    LogitsGradient,
    ShardedArgs,
    StatisticsArgs,
)
from .kernels import cross_entropy_backward_kernel, cross_entropy_kernel, cross_entropy_totals_kernel


class RowConfig(NamedTuple):
    """Tile of a row: `tile` logits at a time, in `lanes` interleaved parts that each have their own statistics."""

    tile: int
    lanes: int
    num_warps: int


@choice("cross_entropy", tile=(64, 16384), lanes=(32, 4096), num_warps=(1, 16))
def row_config(kernel: str, cols: int, element: int, steps: int, target: Capabilities) -> RowConfig:
    """Return the tile of a kernel ("forward" or "backward"), in which each thread keeps `steps` loads of 128 bits in
    flight."""
    if target.is_cpu:
        # Measured at 128 x 157184 in bf16: tiles of 512 to 2048 logits and 64 to 256 lanes make no difference.
        long = cols >= 2048
        return RowConfig(1024 if long else 64, 128 if long else 64, 4)
    wave = target.warp_size
    num_warps = (4 if wave == 64 else 8) if cols >= 4096 else 4 if cols >= 1024 else 1
    lanes = num_warps * wave * (16 // element)
    return RowConfig((steps if cols >= 4096 else 1) * lanes, lanes, num_warps)


def _steps(capped: bool, more: bool) -> int:
    """Return how many loads of 128 bits each thread of the forward keeps in flight.

    Compiled for sm_90, four steps take 64 registers. With `more` sums they would take over 100, and with a softcap two
    steps already spill. Backward takes half as many steps, since four would spill on sm_80.
    """
    return 1 if capped else 2 if more else 4


def _align(element: int, *sizes: int) -> int:
    """Return the alignment of all sizes: 16, or as many elements as 16 bytes hold, else 1."""
    return align_of(*sizes, least=16 // element if element >= 4 else 8)


@remembered
def _rows_launch(
    rows: int, strides: tuple[int, int, int, int], element: int, softmax: tuple[int, int, int, int], wanted: Wanted,
    mark_missing: bool, target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the forward over rows of (cols, inner, outer_stride, inner_stride), with a softmax of (kind, start, vocab,
    ignore_index)."""
    (cols, inner, outer_stride, inner_stride), (kind, start, vocab, ignore_index) = strides, softmax
    config = row_config("forward", cols, element, _steps(kind == CAPPED.value, True in wanted), target)
    launch = Launch.of(
        cross_entropy_kernel,
        num_warps=config.num_warps,
        KIND=kind,
        ENTROPY=wanted.entropy,
        SPREAD=wanted.spread,
        ACCURACY=wanted.accuracy,
        MARK_MISSING=mark_missing,
        TILE=config.tile,
        LANES=config.lanes,
        NESTED=inner > 1,
        ALIGN=_align(element, cols, outer_stride, inner_stride),
    )
    return launch.bind(
        (rows, 1, 1),
        rows=rows,
        cols=cols,
        inner=inner,
        outer_stride=outer_stride,
        inner_stride=inner_stride,
        start_col=start,
        vocab=vocab,
        ignore_index=ignore_index,
    )


@remembered
def _totals_launch(rows: int, zero_if_none: bool, target: Capabilities) -> BoundLaunch:
    tile, num_warps = scan_config("totals", target)
    launch = Launch.of(cross_entropy_totals_kernel, num_warps=num_warps, ZERO_IF_NONE=zero_if_none, TILE=tile)
    return launch.bind((1, 1, 1), rows=rows)


def _launch_rows(
    a: CrossEntropyArgs | StatisticsArgs, loss: LossOptions | None, **outputs: Tensor | None
) -> None:
    """Read the logits once and compute losses, or, if `loss` is None, the statistics of a shard."""
    softmax, target = a.softmax, contiguous(a.target)
    logits, *strides = row_strides(a.logits)
    _rows_launch(
        target.numel(),
        (logits.shape[-1], *strides),  # type: ignore[arg-type]
        logits.element_size(),
        (softmax.kind, softmax.start, softmax.vocab, softmax.ignore_index),
        a.wanted,
        loss is not None and loss.reduction != "none",
        capabilities_of(logits.device),
    )(
        *cross_entropy_kernel.tensors(
            logits_ptr=logits,
            target_ptr=target,
            weight_ptr=contiguous(a.weight),
            **outputs,
            softcap=softmax.cap,
            scale=softmax.scale,
            label_smoothing=0.0 if loss is None else loss.label_smoothing,
            z_loss=0.0 if loss is None else loss.z_loss,
        )
    )


class _BackwardConstants(NamedTuple):
    """Constants that select the variant of the backward kernel."""

    config: RowConfig
    kind: int
    inplace: bool
    nested: bool
    align: int
    alike: bool


@functools.cache
def _backward_launch(c: _BackwardConstants) -> Launch:
    return Launch.of(
        cross_entropy_backward_kernel,
        num_warps=c.config.num_warps,
        KIND=c.kind,
        INPLACE=c.inplace,
        TILE=c.config.tile,
        LANES=c.config.lanes,
        NESTED=c.nested,
        ALIGN=c.align,
        ALIKE=c.alike,
    )


def _per_row(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a gradient as a vector, and its stride; a single gradient for all rows has the stride 0."""
    if gradient is None:
        return None, 0
    flat = gradient.reshape(-1)
    return flat, 0 if flat.numel() == 1 else flat.stride(0)


def launch_cross_entropy_backward(o: LogitsGradient, a: CrossEntropyBackwardArgs) -> None:
    """Write the gradient, in place if `o` holds the logits themselves."""
    inplace = o.logits is a.logits
    softmax, capabilities = a.softmax, capabilities_of(a.logits.device)
    target = contiguous(a.target)
    logits, inner, outer_stride, inner_stride = row_strides(a.logits)
    rows, cols, element = target.numel(), logits.shape[-1], logits.element_size()
    dloss, dloss_stride = _per_row(a.dloss)
    dlse, dlse_stride = _per_row(a.dlse)
    dentropy, dentropy_stride = _per_row(a.dentropy)
    dspread, dspread_stride = _per_row(a.dspread)
    config = row_config("backward", cols, element, 1 if softmax.softcap is not None else 2, capabilities)
    align = _align(element, cols, outer_stride, inner_stride)
    alike = inplace or align > 1 or (inner == 1 and (outer_stride - cols) % (16 // element) == 0)
    tiles = max(1, cols // config.tile)
    spans = 1
    # Each program takes a few tiles, and there are enough programs to keep all multiprocessors busy.
    if not capabilities.is_cpu:
        spans = max(1, min(tiles // 4, 16 * capabilities.multiprocessors // rows))
    span = -(-tiles // spans) * config.tile
    spans = -(-tiles * config.tile // span)
    _backward_launch(_BackwardConstants(config, softmax.kind, inplace, inner > 1, align, alike))(
        (rows, spans, 1),
        *cross_entropy_backward_kernel.arguments(
            logits_ptr=logits,
            target_ptr=target,
            weight_ptr=contiguous(a.weight),
            largest_ptr=a.largest,
            total_ptr=a.total,
            inverse_ptr=a.inverse,
            smooth_ptr=a.smooth,
            entropy_ptr=contiguous(a.entropy),
            dloss_ptr=dloss,
            dlse_ptr=dlse,
            dentropy_ptr=dentropy,
            dspread_ptr=dspread,
            dlogits_ptr=logits if inplace else o.logits,
            rows=rows,
            cols=cols,
            inner=inner,
            outer_stride=outer_stride,
            inner_stride=inner_stride,
            start_col=softmax.start,
            vocab=softmax.vocab,
            ignore_index=softmax.ignore_index,
            dloss_stride=dloss_stride,
            dlse_stride=dlse_stride,
            dentropy_stride=dentropy_stride,
            dspread_stride=dspread_stride,
            span=span,
            softcap=softmax.cap,
            scale=softmax.scale,
            label_smoothing=a.label_smoothing,
            z_loss=a.z_loss,
        ),
    )


def launch_cross_entropy(o: CrossEntropyOutputs, a: CrossEntropyArgs) -> None:
    rows, device = a.target.numel(), a.logits.device
    losses, hits, shares = o.loss, o.accuracy, None
    reduced = a.loss.reduction != "none"
    if reduced:
        losses = scratch((rows,), torch.float32, device)
        hits = None if o.accuracy is None else scratch((rows,), torch.float32, device)
        shares = None if o.inverse is None else scratch((rows,), torch.float32, device)
    _launch_rows(
        a,
        a.loss,
        loss_ptr=losses,
        lse_ptr=o.lse,
        entropy_ptr=o.entropy,
        hit_ptr=hits,
        largest_ptr=o.largest,
        total_ptr=o.total,
        share_ptr=shares,
        smooth_ptr=o.smooth,
    )
    if not reduced:
        return
    _totals_launch(rows, a.loss.zero_if_none, capabilities_of(device))(
        *cross_entropy_totals_kernel.tensors(
            loss_ptr=losses,
            share_ptr=shares,
            hit_ptr=hits,
            total_loss_ptr=o.loss,
            inverse_ptr=o.inverse,
            accuracy_ptr=o.accuracy,
        )
    )


def launch_cross_entropy_statistics(o: Statistics, a: StatisticsArgs) -> None:
    _launch_rows(a, None, stats_ptr=o.stats)


def launch_sharded_logprobs(o: TokenResults, a: ShardedArgs) -> None:
    launch_join(o, contiguous(a.stats), contiguous(a.target), None, a.softmax, a.wanted)
