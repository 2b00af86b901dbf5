"""Launches of gated norms and their backward."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from ....quant import Codes, Format
from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.copies import cast_mode, copy_arguments, count_stripes, stripe_config
from ...common.passes import make_copies
from ...common.rows import STRIPE, align_of, contiguous, cpu_tile, tile_warps
from ...common.sums import sum_partials
from ...quantize.launch import quantize_into
from .arguments import GatedNormArgs, GatedNormBackwardArgs, GatedNormGradients, GatedNormOutputs
from .kernels import gated_norm_backward_kernel, gated_norm_kernel, gated_norm_stripe_kernel


class GroupConfig(NamedTuple):
    """Tiling of groups: `rows` groups per program, `tile` columns at a time, in a loop over longer groups."""

    rows: int
    tile: int
    num_warps: int


@choice("gated_norm", rows=(1, 64), tile=(64, 16384), num_warps=(1, 16))
def group_config(
    cols: int, smallest_tile: int, backward: bool, align: int, target: Capabilities
) -> GroupConfig:
    if target.is_cpu:
        return GroupConfig(
            1, cpu_tile(cols, 128, 4096 if backward else 1024), 4
        )  # 128: a block of any format
    # The group rounded up to a power of two, as far as registers allow: the backward holds three tiles and a sum.
    tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
    limit = 8192 if backward else 16384
    loop = tile > limit
    tile = min(tile, limit // 2 if loop else limit)
    # Where accesses are one element wide, addresses take more registers than the elements.
    rows = max(1, (1024 if backward else 2048) // (4 if align == 1 else 1) // tile)
    return GroupConfig(rows, tile, tile_warps(rows * tile * (2 if loop and backward else 1), target))


@remembered
def _levels(shape: tuple[int, ...], groups: int, *strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return (second, third, three strides per tensor): the dimensions in which kernels index the groups of tensors of
    this shape; None if that takes more than three dimensions, or if the elements of a group are not contiguous."""
    *sizes, cols = shape
    if cols > 1 and any(stride[-1] != 1 for stride in strides):
        return None
    merged: list[tuple[int, list[int]]] = []
    for size, *steps in zip((*sizes, groups), *((*s[:-1], cols // groups) for s in strides), strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > 3:
        return None
    merged = [(1, [0] * len(strides))] * (3 - len(merged)) + merged
    levels = [merged[1][0], merged[2][0]]
    for i in range(len(strides)):
        levels += [steps[i] for _, steps in merged]
    return tuple(levels)


# Kernel parameters for the values of `_levels`. Interned names are faster to pass.
_LEVELS = (
    "second",
    "third",
    *(
        sys.intern(f"{tensor}_{level}_stride")
        for tensor in ("x", "gate", "dy", "dx")
        for level in ("first", "second", "third")
    ),
)


def _named(levels: tuple[int, ...]) -> dict[str, int]:
    """Name the levels of x and the gate, or of these, dy and dx."""
    return dict(zip(_LEVELS, levels, strict=False))


def _strides_in_order(x: Tensor, transpose: bool) -> tuple[int, ...]:
    """Return the strides of `in_order(x, transpose)`. Kernels need only these and x's address."""
    if not transpose:
        return x.stride()
    first, second, *rest = x.stride()
    return second, first, *rest


def _inputs_and_levels(
    groups: int, transpose: bool, x: Tensor, read: tuple[Tensor, ...], written: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return x and the other inputs, with their `_levels` and those of the gradient of x, which is `written`. Inputs
    whose strides fit no levels are copied; `written` is contiguous. `transpose` applies to x and its gradient."""
    shape = read[0].shape
    rest = [] if written is None else [_strides_in_order(written, transpose)]
    levels = _levels(shape, groups, _strides_in_order(x, transpose), *[t.stride() for t in read], *rest)
    if levels is None:
        x, *others = map(contiguous, (x, *read))
        read = tuple(others)
        levels = _levels(shape, groups, _strides_in_order(x, transpose), *[t.stride() for t in read], *rest)
        assert levels is not None
    return (x, *read), levels


def _within_groups(format: Format, groups: int, cols: int) -> bool:
    """Return whether no block of the row-wise copy spans two groups."""
    if format.block == "128x128":
        return False
    if groups == 1:
        return True
    return format.block != "row" and cols % max(format.group, format.packed) == 0


class _Layout(NamedTuple):
    """Sizes and strides of the groups of x and of the gate."""

    rows: int  # groups of all tokens
    cols: int  # of a group
    groups: int
    levels: tuple[int, ...]

    @property
    def align(self) -> int:
        """Alignment that divides the columns of a group and all strides: 16, 8 or 1."""
        return align_of(self.cols, *self.levels[2:])


class _Pass(NamedTuple):
    """Options of a pass over groups that determine its launch."""

    smallest_tile: int = 1
    format: str | None = None  # of the row-wise copy
    cast: int = 0
    static: bool = False  # the caller passed the scale
    has_stats: bool = False  # an earlier pass has stored the statistics
    strides: tuple[int, ...] = (0, 0)  # of the scales of the copy


_PLAIN = _Pass()


@remembered
def _groups_launch(
    layout: _Layout, act: str, casting: str, target: Capabilities, pass_: _Pass
) -> BoundLaunch:
    """Return the launch of a pass over groups."""
    align = layout.align
    config = group_config(layout.cols, pass_.smallest_tile, False, align, target)
    launch = Launch.of(
        gated_norm_kernel,
        num_warps=config.num_warps,
        ACT=act,
        LLAMA=casting == "llama",
        FORMAT=pass_.format and Format.of(pass_.format),
        CAST=pass_.cast,
        STATIC=pass_.static,
        KNOWN=pass_.has_stats,
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.tile < layout.cols,
        ALIGN=align,
        COLS_MASKED=layout.cols % config.tile != 0,
    )
    rows, cols, groups, levels = layout
    programs = -(-rows // config.rows)
    scale_row_stride, scale_col_stride = pass_.strides
    return launch.bind(
        (programs, 1, 1),
        bound=programs * config.rows,
        rows=rows,
        cols=cols,
        groups=groups,
        **_named(levels),
        data_scale_row_stride=scale_row_stride,
        data_scale_col_stride=scale_col_stride,
    )


class _GatedNorm:
    """Layout and passes of one call."""

    def __init__(self, o: GatedNormOutputs, a: GatedNormArgs) -> None:
        self.o, self.a = o, a
        width = a.gate.shape[-1]
        self.target = capabilities_of(a.x.device)
        self.weight = contiguous(a.weight)
        (self.x, self.gate), levels = _inputs_and_levels(a.groups, a.transpose, a.x, (a.gate,))
        self.layout = _Layout(a.gate.numel() // width * a.groups, width // a.groups, a.groups, levels)
        self.rstd = o.rstd

    def plain(self, y: Tensor, pass_: _Pass = _PLAIN) -> None:
        _groups_launch(self.layout, self.a.act, self.a.casting, self.target, pass_)(
            *gated_norm_kernel.tensors(
                x_ptr=self.x,
                gate_ptr=self.gate,
                weight_ptr=self.weight,
                y_ptr=y,
                rstd_ptr=self.rstd,
                eps=self.a.eps,
                weight_offset=self.a.weight_offset,
            )
        )

    def quantized(self) -> None:
        o, a = self.o, self.a
        assert a.result.format is not None
        self.format = f = Format.of(a.result.format)
        self.cast = cast_mode(self.target)
        direct = _within_groups(f, a.groups, self.layout.cols)
        if f.block == "row" and not direct:
            # One scale covers several groups: store y in fp32 and then quantize it.
            y = scratch(a.gate.shape, torch.float32, self.x.device)
            self.plain(y, _Pass(f.group, cast=self.cast, static=a.result.scale is not None))
            quantize_into(o.result, a.result, y)
            return
        by_tensor = f.needs_tensor_amax and a.result.scale is None
        if self.rstd is None and (by_tensor or a.result.columnwise or not direct):
            # Of several passes, the later ones read the statistics that the first one writes.
            self.rstd = scratch((self.layout.rows,), torch.float32, self.x.device)
        make_copies(o.result, a.result, self.groups_pass, self.stripes_pass, direct=direct, statistics=True)

    def groups_pass(
        self, copy: Codes | None, scale_source: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        a, options = self.a, self.a.result
        data, data_scale, _, *strides = copy_arguments(copy)
        format = None if copy is None else options.format
        pass_ = _Pass(
            self.format.group, format, self.cast, options.scale is not None, has_stats, tuple(strides)
        )
        launch = _groups_launch(self.layout, a.act, a.casting, self.target, pass_)
        partials = scratch((launch.grid[0],), torch.float32, self.x.device) if wants_amax else None
        gate, weight = self.gate, self.weight
        if copy is None and partials is None:  # only the statistics
            gate = weight = None  # type: ignore[assignment]
        launch(
            *gated_norm_kernel.tensors(
                x_ptr=self.x,
                gate_ptr=gate,
                weight_ptr=weight,
                given_ptr=scale_source if copy else None,
                rstd_ptr=self.rstd,
                amax_ptr=partials,
                data_ptr=data,
                data_scale_ptr=data_scale,
                eps=a.eps,
                weight_offset=a.weight_offset,
            )
        )
        return partials

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, scale_source: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        rows, cols, groups, levels = self.layout
        tokens, width, align = rows // groups, cols * groups, self.layout.align
        tile, num_warps = stripe_config("gated_norm", self.format.block, align, self.target)
        stripes = count_stripes(tokens, width)
        tiles = stripes * -(-width // tile)
        partials = scratch((tiles,), torch.float32, self.x.device) if wants_amax else None
        launch = Launch.of(
            gated_norm_stripe_kernel,
            num_warps=num_warps,
            ACT=self.a.act,
            LLAMA=self.a.casting == "llama",
            FORMAT=self.format,
            CAST=self.cast,
            STATIC=self.a.result.scale is not None,
            ROWS=STRIPE,
            TILE=tile,
            WITHIN=cols % tile == 0,
            ALIGN=align,
            COLS_MASKED=width % tile != 0,
        )
        launch(
            (tiles, 1, 1),
            *gated_norm_stripe_kernel.arguments(
                x_ptr=self.x,
                gate_ptr=self.gate,
                weight_ptr=self.weight,
                given_ptr=scale_source,
                rstd_ptr=self.rstd,
                amax_ptr=partials,
                bound=stripes * STRIPE * groups,
                tokens=tokens,
                cols=width,
                groups=groups,
                **_named(levels),
                copy=copy_arguments(row),
                copy_t=copy_arguments(col),
                weight_offset=self.a.weight_offset,
            ),
        )
        return partials


def launch_gated_norm_backward(o: GatedNormGradients, a: GatedNormBackwardArgs) -> None:
    groups, width = a.groups, a.gate.shape[-1]
    cols, tokens = width // groups, a.gate.numel() // width
    target = capabilities_of(a.x.device)
    (x, gate, dy), levels = _inputs_and_levels(groups, a.transpose, a.x, (a.gate, a.dy), o.x)
    if o.x is None:
        levels = (*levels, 0, 0, 0)
    align = align_of(cols, *levels[2:])
    config = group_config(cols, 1, True, align, target)
    # Four programs per multiprocessor, divided evenly among the groups; at most one per tile of tokens.
    parts = min(-(-tokens // config.rows), max(1, -(-target.multiprocessors * 4 // groups)))
    program_tokens = -(-tokens // parts)
    program_tokens = -(-program_tokens // config.rows) * config.rows
    parts = -(-tokens // program_tokens)
    sums = None
    if o.weight is not None:
        sums = scratch((parts, width), torch.float32, x.device)
    launch = Launch.of(
        gated_norm_backward_kernel,
        num_warps=config.num_warps,
        ACT=a.act,
        LLAMA=a.casting == "llama",
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.tile < cols,
        ALIGN=align,
        COLS_MASKED=cols % config.tile != 0,
    )
    launch(
        (parts * groups, 1, 1),
        *gated_norm_backward_kernel.arguments(
            x_ptr=x,
            gate_ptr=gate,
            dy_ptr=dy,
            weight_ptr=contiguous(a.weight),
            rstd_ptr=a.rstd,
            dx_ptr=o.x,
            dgate_ptr=o.gate,
            dweight_ptr=sums,
            bound=parts * program_tokens * groups,
            tokens=tokens,
            program_tokens=program_tokens,
            cols=cols,
            groups=groups,
            **_named(levels),
            weight_offset=a.weight_offset,
        ),
    )
    if o.weight is not None and sums is not None:
        sum_partials(sums, o.weight)


def launch_gated_norm(o: GatedNormOutputs, a: GatedNormArgs) -> None:
    call = _GatedNorm(o, a)
    if a.result.format is None:
        call.plain(o.result.y)
    else:
        call.quantized()
