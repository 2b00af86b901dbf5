"""Launches of gated linear units, and the choice of their tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ..common.copies import NO_CODES, cast_mode, copy_arguments, count_stripes
from ..common.groups import NO_ENDS, GroupEnds, Groups, clear_slots, count_slots
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import STRIPE, align_of, contiguous, cpu_tile, row_strides
from ..common.sums import sum_groups, sum_partials
from ..quantize.launch import quantize_into
from .arguments import (
    GatedUnit,
    GluArgs,
    GluBackwardArgs,
    GluBackwardOutputs,
    GluOutputs,
    hidden_of,
    in_one_pass,
)
from .kernels import glu_backward_kernel, glu_kernel


class GluConfig(NamedTuple):
    """Tiling of a tensor: `rows` rows and `tile` columns of y at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("glu.rows", rows=(1, 64), tile=(64, 4096), num_warps=(1, 16))
def row_config(
    cols: int, smallest_tile: int, backward: bool, known_multiple: int, target: Capabilities
) -> GluConfig:
    if target.is_cpu:
        return GluConfig(1, cpu_tile(cols, max(smallest_tile, 64)), 4)
    tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
    # If accesses are one element wide, addresses take more registers than the elements.
    elements = 4096 // (2 if backward else 1) // (4 if known_multiple == 1 else 1)
    return GluConfig(max(1, elements // tile), tile, 4)


@choice("glu.stripes", tile=(32, 256), num_warps=(1, 16))
def stripe_config(
    block: str, rowwise: bool, backward: bool, interleaved: bool, known_multiple: int, target: Capabilities
) -> GluConfig:
    narrow = block in ("mx", "nvfp4", "tensor") or (block == "1x128" and not rowwise)
    tile = 64 if narrow else 128
    warps = 16
    if target.is_cpu:
        tile = 128
    elif target.warp_size == 64:
        warps = tile * STRIPE // 16 // 64
    elif (backward and tile == 128) or known_multiple == 1:
        # Compiled for both copies of a gradient at 1x128: 255 registers, no spills on sm_90 (with 16 warps 128
        # registers and 376 to 612 bytes spilled), up to 24 bytes on sm_100 and sm_120, and 312 on sm_80 and sm_89,
        # which encode by integers.
        warps = 8
    # Interleaved gradients are twice as wide as gate or up.
    return GluConfig(STRIPE, tile // 2 if backward and interleaved else tile, warps)


class _Layout(NamedTuple):
    """Row strides: row r of the gate lies at (r // inner) * gate_outer_stride + (r % inner) * gate_inner_stride."""

    rows: int
    cols: int
    up_shift: int
    probs_stride: int
    inner: int
    gate_outer_stride: int
    gate_inner_stride: int
    up_outer_stride: int
    up_inner_stride: int
    dy_outer_stride: int
    dy_inner_stride: int

    @property
    def known_multiple(self) -> int:
        """Alignment that divides the columns and all row strides: 16, 8 or 1."""
        return align_of(self.cols, self.up_shift, *self[5:])


class _Pass(NamedTuple):
    """Options of a pass that determine its launch."""

    static: bool | None  # the caller passed the scale; None in the backward
    format: str | None = None  # of the stored copies
    rowwise: bool = False  # the row-wise copy is stored
    stripes: bool = False  # copies are stored by stripes
    sums: bool = False  # dprobs is computed
    bias_sums: bool = False  # the gradient of the bias is computed
    strides: tuple[int, ...] = (0, 0, 0)  # of the codes and scales of the row-wise copy of a result
    strides_t: tuple[int, ...] = (0, 0, 0)  # of the column-wise copy


class _Cut(NamedTuple):
    """Launch of a pass, and its programs."""

    launch: Launch
    blocks: int  # blocks of rows
    row_programs: int  # programs that share a block


@remembered
def _cut(
    layout: _Layout,
    unit: GatedUnit,
    groups: tuple[int, int] | None,
    pass_: _Pass,
    cast: int,
    target: Capabilities,
) -> _Cut:
    """Choose the launch and programs of a pass; `groups` is (number, align)."""
    backward, cpu, multiple = pass_.static is None, target.is_cpu, layout.known_multiple
    interleaved = unit.layout == "interleaved"
    format = None if pass_.format is None else Format.of(pass_.format)
    if pass_.stripes:
        assert format is not None
        config = stripe_config(format.block, pass_.rowwise, backward, interleaved, multiple, target)
        both = backward and unit.layout in ("concat", "interleaved")  # gradients of gate and up in one result
        blocks = count_stripes(layout.rows, 2 * layout.cols if both else layout.cols)
    else:
        group = 1 if format is None else format.group
        config = row_config(layout.cols, group, backward, multiple, target)
        height = STRIPE if pass_.bias_sums else config.rows
        blocks = -(-layout.rows // height)
    places = "rows"
    if (pass_.stripes or pass_.bias_sums) and groups is not None:
        number, align = groups
        if align % STRIPE == 0:
            places = "stripes"
        elif pass_.bias_sums or (format is not None and format.group):
            places, blocks = "slots", count_slots(layout.rows, number)
    # A scale per row needs the whole row in one program, and so does a sum over the row, unless tiles are stripes: a
    # loop over stripes holds too much in registers. Sums over rows cover one tile.
    by_row = format is not None and format.block == "row"
    once = pass_.bias_sums or not (cpu or by_row or (pass_.sums and not pass_.stripes))
    launch = Launch.of(
        glu_backward_kernel if backward else glu_kernel,
        num_warps=config.num_warps,
        ACT=unit.act,
        INTERLEAVED=interleaved,
        LIMITED=unit.limit is not None,
        FORMAT=format,
        CAST=cast,
        STRIPES=pass_.stripes,
        PLACES=places,
        ROWS=config.rows,
        TILE=config.tile,
        ONCE=once,
        NESTED=layout.inner > 1,
        ALIGN=multiple,
        COLS_MASKED=layout.cols % config.tile != 0,
        **({} if backward else {"STATIC": pass_.static}),
    )
    return _Cut(launch, blocks, -(-layout.cols // config.tile) if once else 1)


@remembered
def _forward(
    layout: _Layout,
    unit: GatedUnit,
    groups: tuple[int, int] | None,
    pass_: _Pass,
    cast: int,
    target: Capabilities,
) -> BoundLaunch:
    """Return the launch of a forward pass; each call adds its tensors and floats."""
    launch, blocks, row_programs = _cut(layout, unit, groups, pass_, cast, target)
    return launch.bind(
        (blocks * row_programs, 1, 1),
        rows=layout.rows,
        cols=layout.cols,
        up_shift=layout.up_shift,
        inner=layout.inner,
        gate=(layout.gate_outer_stride, layout.gate_inner_stride),
        up=(layout.up_outer_stride, layout.up_inner_stride),
        prob_stride=layout.probs_stride,
        groups=(NO_ENDS.number, NO_ENDS.align) if groups is None else groups,
        row_programs=row_programs,
        copy=pass_.strides,
        copy_t=pass_.strides_t,
    )


class _Call:
    """Inputs of a call as kernel arguments."""

    def __init__(self, a: GluArgs | GluBackwardArgs, dy: Tensor | None) -> None:
        layout, unit = a.unit.layout, a.unit
        x, up, cols = a.x, a.up, hidden_of(a.x, layout)
        x, inner, outer_stride, inner_stride = row_strides(x)
        up_strides, dy_strides, nested = (0, 0), (0, 0), True
        if layout == "concat":
            up, up_strides = x, (outer_stride, inner_stride)
        elif up is not None:
            up, up_inner, *strides = row_strides(up)
            up_strides, nested = (strides[0], strides[1]), up_inner == inner
        if dy is not None:
            dy, dy_inner, *strides = row_strides(dy)
            dy_strides, nested = (strides[0], strides[1]), nested and dy_inner == inner
        if not nested:  # rows are nested in two ways: make all contiguous
            contiguous_args = a._replace(x=contiguous(a.x), up=contiguous(a.up))
            self.__init__(contiguous_args, contiguous(dy))  # type: ignore[misc]
            return
        self.gate, self.up, self.dy, self.probs, self.unit = x, up, dy, a.probs, unit
        self.bias = contiguous(a.bias)
        self.layout = _Layout(
            a.x.numel() // a.x.shape[-1], cols, cols if layout == "concat" else 0,
            0 if a.probs is None else a.probs.stride(0), inner, outer_stride, inner_stride, *up_strides, *dy_strides,
        )  # fmt: skip
        self.groups = NO_ENDS
        if a.groups.ends is not None:
            self.groups = GroupEnds(contiguous(a.groups.ends), a.groups.ends.numel(), a.groups.align)
        self.target = capabilities_of(x.device)

    def plan(
        self, pass_: _Pass
    ) -> tuple[_Layout, GatedUnit, tuple[int, int] | None, _Pass, int, Capabilities]:
        """Return the arguments that determine the launch of a pass."""
        ends, *groups = self.groups
        number_and_align = None if ends is None else (groups[0], groups[1])
        return self.layout, self.unit, number_and_align, pass_, cast_mode(self.target), self.target


class _Glu(_Call):
    """Passes of one call of glu."""

    options: ResultOptions

    def quantize(self, result: Result, options: ResultOptions, groups: Groups) -> None:
        assert options.format is not None
        f, self.options = Format.of(options.format), options
        if result.scale_t is not None and groups.have_slots(f, True):
            clear_slots(result.scale_t)
        direct = f.block != "128x128"
        make_copies(result, options, self.rows_pass, self.stripes_pass, direct=direct, statistics=False)

    def rows_pass(
        self, copy: Codes | None, scale_source: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        pass_ = _Pass(self.options.scale is not None, copy and self.options.format, copy is not None)
        return self.run(pass_, None, copy, None, scale_source, wants_amax)

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, scale_source: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        static = self.options.scale is not None
        pass_ = _Pass(static, self.options.format, row is not None, stripes=True)
        return self.run(pass_, None, row, col, scale_source, wants_amax)

    def run(
        self,
        pass_: _Pass,
        y: Tensor | None,
        row: Codes | None = None,
        col: Codes | None = None,
        scale_source: Tensor | None = None,
        wants_amax: bool = False,
    ) -> Tensor | None:
        """Launch a pass; return the amax of each of its programs if wanted."""
        copy = copy_t = NO_CODES
        if row is not None or col is not None:
            copy, copy_t = copy_arguments(row), copy_arguments(col)
            _, _, *strides = copy
            _, _, *strides_t = copy_t
            pass_ = pass_._replace(strides=tuple(strides), strides_t=tuple(strides_t))
        launch, unit = _forward(*self.plan(pass_)), self.unit
        partials = None
        if wants_amax:
            partials = scratch((launch.grid[0],), torch.float32, self.gate.device)
        launch(
            *glu_kernel.tensors(
                gate=self.gate,
                up=self.up,
                prob_ptr=self.probs,
                groups=self.groups.ends,
                bias_ptr=self.bias,
                given_ptr=scale_source,
                y_ptr=y,
                amax_ptr=partials,
                copy=(copy.data, copy.scale),
                copy_t=(copy_t.data, copy_t.scale),
                alpha=unit.alpha,
                limit=0.0 if unit.limit is None else unit.limit,
                up_offset=unit.up_offset,
            )
        )
        return partials


def launch_glu(o: GluOutputs, a: GluArgs) -> None:
    call = _Glu(a, None)
    if a.result.format is None:
        call.run(_PLAIN, o.result.y)
    else:
        call.quantize(o.result, a.result, a.groups)


_PLAIN = _Pass(static=False)


class _Gradient:
    """Gradient of x or up: some copies come from the kernel, the others are quantized later from an fp32 gradient."""

    def __init__(self, result: Result, options: ResultOptions, direct: tuple[bool, bool]) -> None:
        self.plain: Tensor | None = result.y
        self.result, self.options, self.later = result, options, False
        self.row = self.col = None
        if result.y is None or options.format is None:
            return
        row, col = result.copies(options.format)
        self.row, self.col = row if direct[0] else None, col if direct[1] else None
        self.later = direct != (options.rowwise, options.columnwise)
        self.plain = scratch(result.y.shape, torch.float32, result.y.device) if self.later else None

    def finish(self) -> None:
        """Quantize the copies that the kernel did not store; a column-wise copy from the kernel is kept."""
        if self.later:
            assert self.plain is not None
            options = self.options._replace(columnwise=self.options.columnwise and self.col is None)
            result = self.result if options.columnwise else self.result._replace(data_t=None, scale_t=None)
            quantize_into(result, options._replace(dtype=torch.float32), self.plain)


def launch_glu_backward(o: GluBackwardOutputs, a: GluBackwardArgs) -> None:
    call = _Call(a, a.dy)
    layout, unit, options = call.layout, a.unit, a.gradient
    direct = (False, False)
    if options.format is not None:
        f = Format.of(options.format)
        direct = in_one_pass(f, unit.layout, layout.cols)
        direct = direct[0] and options.rowwise, direct[1] and options.columnwise
        for result in (o.x, o.up):
            if result.scale_t is not None and a.groups.have_slots(f, True):
                clear_slots(result.scale_t)
    dx, dup = _Gradient(o.x, options, direct), _Gradient(o.up, options, direct)
    up = dx if unit.layout == "concat" else dup
    format = options.format if any(direct) else None
    stripes = format is not None and (direct[1] or Format.of(format).block == "128x128")
    pass_ = _Pass(None, format, direct[0], stripes, o.probs is not None, o.bias is not None)
    launch, blocks, row_programs = _cut(*call.plan(pass_))
    dprobs, dbias = o.probs, None
    if o.bias is not None:
        dbias = scratch((blocks, a.x.shape[-1]), torch.float32, o.bias.device)
    if dprobs is not None and row_programs > 1:
        dprobs = scratch((row_programs, layout.rows), torch.float32, dprobs.device)
    row, col = copy_arguments(dx.row), copy_arguments(dx.col)
    up_row, up_col = copy_arguments(up.row), copy_arguments(up.col)
    # If only dup is wanted, the strides of its copies stand in for those of dgate.
    if dx.plain is None and dx.row is None and dx.col is None:
        row, col = up_row._replace(data=None, scale=None), up_col._replace(data=None, scale=None)
    launch(
        (blocks * row_programs, 1, 1),
        *glu_backward_kernel.arguments(
            rows=layout.rows,
            cols=layout.cols,
            up_shift=layout.up_shift,
            inner=layout.inner,
            gate=(call.gate, layout.gate_outer_stride, layout.gate_inner_stride),
            up=(call.up, layout.up_outer_stride, layout.up_inner_stride),
            dy=(call.dy, layout.dy_outer_stride, layout.dy_inner_stride),
            prob_ptr=call.probs,
            prob_stride=layout.probs_stride,
            groups=call.groups,
            bias_ptr=call.bias,
            dgate_ptr=dx.plain,
            dup_ptr=up.plain,
            dprob_ptr=dprobs,
            dbias_ptr=dbias,
            row_programs=row_programs,
            stride=a.x.shape[-1],
            copy=row,
            copy_t=col,
            up_codes=(up_row.data, up_row.scale, up_col.data, up_col.scale),
            alpha=unit.alpha,
            limit=0.0 if unit.limit is None else unit.limit,
            up_offset=unit.up_offset,
        ),
    )
    if o.probs is not None and dprobs is not None and dprobs is not o.probs:
        o.probs.copy_(torch.sum(dprobs, 0, out=scratch(dprobs.shape[1:], dprobs.dtype, dprobs.device)))
    if o.bias is not None and dbias is not None:
        if call.groups.ends is None:
            sum_partials(dbias, o.bias)
        elif call.groups.number:
            sum_groups(dbias, o.bias, call.groups, layout.rows)
    dx.finish()
    dup.finish()
