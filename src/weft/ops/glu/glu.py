"""Gated linear units: the activation of a gate times a value, weighted by the router, quantised, forward and backward.

    gate, up = split(x + bias)                                            the bias of a row is that of its expert
    a = min(gate, limit)          b = clamp(up, -limit, limit)            without a limit: gate and up themselves
    y = f(a) * (b + up_offset) * probs                                    out = round(y), or its codes and scales

    silu       f = a * s(alpha a)      s(z) = 1 / (1 + exp(-z))              f' = s (1 + alpha a (1 - s))
    gelu       f = a * Phi(a)          Phi(a) = erfc(-a / sqrt 2) / 2        f' = Phi + a exp(-a^2 / 2) / sqrt(2 pi)
    gelu_tanh  f = a * s(2 u)          u = sqrt(2 / pi) (a + 0.044715 a^3)   f' = s + 2 a u' s (1 - s)
    relu       f = max(a, 0)           sigmoid  f = s(alpha a)               relu2  f = max(a, 0)^2

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. Backward, with
dy the gradient of y:

    dgate = dy * probs * (b + up_offset) * f'(a), 0 where gate > limit
    dup = dy * probs * f(a), 0 where |up| > limit
    dprobs = sum over the row of dy * f(a) * (b + up_offset)
    dbias = sum over the rows, or over those of each expert, of dgate and dup

The quantised gradient is made from the fp32 dgate and dup as well, and so is dbias. For it a program goes through a
stripe of 128 rows of one expert and leaves their sum in fp32, and a second kernel adds up the sums of each expert in
order. That moves 8 bytes of every column for 128 rows, 1.3 % of what the gradient itself takes in bf16. A sum of the
gradient after it would read all of it again, 40 % more, and there is nothing to read if it is quantised.

Everything is computed again from the inputs: they alone are kept for the backward. Rows that belong to no group
(`weft.ops.common.groups`) are never read; their results, gradients and codes are zero. Sums over a row are added up in
a fixed order: the same bits every run.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from ...quant import Copy, Format, QTensor
from ...runtime import (
    LATER,
    Backward,
    Gradients,
    Launch,
    Sharding,
    capabilities_of,
    define_op,
    is_distributed,
    warp_size_of,
)
from ..common.activations import Act, activation_reference
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, real, whole
from ..common.copies import STRIPE, cast_mode, copy_arguments, count_stripes
from ..common.groups import (
    NO_ENDS,
    NO_GROUPS,
    GroupEnds,
    Groups,
    clear_slots,
    count_slots,
    group_of_reference,
    real_rows_reference,
)
from ..common.results import (
    Result,
    ResultOptions,
    allocate_result,
    check_copies,
    make_copies,
    result_into,
    result_options,
    result_reference,
)
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, cpu_tile, empty_like, row_strides
from ..common.sums import sum_groups, sum_partials
from ..quantize import quantize_into
from .kernels import glu_backward_kernel, glu_kernel

# ---- arguments and outputs ------------------------------------------------------------------------------


class GatedUnit(NamedTuple):
    """What is computed."""

    act: str
    layout: (
        str  # of gate and up: "concat" or "interleaved" in x, "pair" in x and up, "none" if nothing is gated
    )
    limit: float | None
    alpha: float
    up_offset: float


class GluArgs(NamedTuple):
    x: Tensor  # [..., 2H], or [..., H] for the layouts "pair" and "none"
    up: Tensor | None  # [..., H]
    probs: Tensor | None  # [M]
    bias: Tensor | None  # [width of x], with groups one for each of them
    groups: Groups
    unit: GatedUnit
    result: ResultOptions
    gradient: ResultOptions  # of x and up


class GluOutputs(NamedTuple):
    result: Result


class GluNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = False
    up: bool = False
    probs: bool = False
    bias: bool = False


class GluBackwardArgs(NamedTuple):
    x: Tensor
    up: Tensor | None
    probs: Tensor | None
    bias: Tensor | None
    dy: Tensor  # [..., H]
    groups: Groups
    unit: GatedUnit
    gradient: ResultOptions
    needs: GluNeeds


class GluBackwardOutputs(NamedTuple):
    x: Result
    up: Result
    probs: Tensor | None
    bias: Tensor | None


_NO_RESULT = Result(None)  # type: ignore[arg-type]


# ---- reference ------------------------------------------------------------------------------------------


def _hidden(x: Tensor, layout: str) -> int:
    """Columns of y."""
    cols = x.shape[-1]
    return cols // 2 if layout in ("concat", "interleaved") else cols


def _parts(a: GluArgs | GluBackwardArgs) -> tuple[Tensor, Tensor | None]:
    """gate and up as [M, H], with their bias; no up if nothing is gated."""
    dtype, layout = compute_dtype(a.x), a.unit.layout
    flat = a.x.reshape(count_rows(a.x), a.x.shape[-1]).to(dtype)
    if a.bias is not None and a.groups.ends is None:
        flat = flat + a.bias.to(dtype)
    elif a.bias is not None and a.groups.ends is not None:  # rows past the last expert have none
        biases = torch.cat([a.bias, a.bias.new_zeros(1, flat.shape[1])])
        flat = flat + biases.to(dtype)[group_of_reference(a.groups.ends, len(flat))]
    if layout == "concat":
        hidden = flat.shape[1] // 2
        return flat[:, :hidden], flat[:, hidden:]
    if layout == "interleaved":
        return flat[:, 0::2], flat[:, 1::2]
    return flat, None if a.up is None else a.up.reshape(flat.shape).to(dtype)


def _limited(gate: Tensor, up: Tensor | None, limit: float | None) -> tuple[Tensor, Tensor | None]:
    if limit is None:
        return gate, up
    gate = torch.where(gate > limit, limit, gate)
    return gate, up if up is None else torch.where(up.abs() > limit, up.sign() * limit, up)


def glu_reference(a: GluArgs) -> GluOutputs:
    """The definition."""
    gate, up = _limited(*_parts(a), a.unit.limit)
    y, _ = activation_reference(gate, a.unit.act, a.unit.alpha)
    if up is not None:
        y = y * (up + a.unit.up_offset)
    if a.probs is not None:
        y = y * a.probs.to(y.dtype)[:, None]
    if a.groups.ends is not None:
        y = torch.where(real_rows_reference(a.groups.ends, len(y), a.groups.align)[:, None], y, 0.0)
    return GluOutputs(result_reference(a.result, y, (*a.x.shape[:-1], y.shape[1]), a.x, a.groups))


def glu_backward_reference(a: GluBackwardArgs) -> GluBackwardOutputs:
    gate, up = _parts(a)
    d, probs, unit, needs = a.dy.reshape(gate.shape).to(gate.dtype), a.probs, a.unit, a.needs
    real = None
    if a.groups.ends is not None:
        real = real_rows_reference(a.groups.ends, len(gate), a.groups.align)[:, None]
        gate, d = torch.where(real, gate, 0.0), torch.where(real, d, 0.0)
        up = up if up is None else torch.where(real, up, 0.0)
        probs = probs if probs is None else torch.where(real[:, 0], probs, 0.0)
    inside, value = _limited(gate, up, unit.limit)
    f, slope = activation_reference(inside, unit.act, unit.alpha)
    g = torch.ones_like(f) if value is None else value + unit.up_offset
    w = d if probs is None else d * probs.to(d.dtype)[:, None]
    dgate, dup = w * g * slope, w * f
    if unit.limit is not None:
        dgate = torch.where(gate > unit.limit, 0.0, dgate)
        dup = dup if up is None else torch.where(up.abs() > unit.limit, 0.0, dup)
    if real is not None:
        dgate, dup = torch.where(real, dgate, 0.0), torch.where(real, dup, 0.0)
    dx = dgate
    if unit.layout == "concat":
        dx = torch.cat([dgate, dup], 1)
    elif unit.layout == "interleaved":
        dx = torch.stack([dgate, dup], -1).flatten(1)
    dbias = None
    if a.bias is not None and needs.bias:
        dbias = dx.sum(0)
        if a.groups.ends is not None:
            by_group = dx.new_zeros(len(a.bias) + 1, dx.shape[1])
            dbias = by_group.index_add(0, group_of_reference(a.groups.ends, len(dx)), dx)[:-1]
        dbias = dbias.to(a.bias.dtype)
    return GluBackwardOutputs(
        result_reference(a.gradient, dx, a.x.shape, a.x, a.groups) if needs.x else _NO_RESULT,
        _NO_RESULT
        if a.up is None or not needs.up
        else result_reference(a.gradient, dup, a.up.shape, a.up, a.groups),
        (d * (f * g)).sum(1).to(probs.dtype) if probs is not None and needs.probs else None,
        dbias,
    )


# ---- launch ---------------------------------------------------------------------------------------------


class GluConfig(NamedTuple):
    """How a tensor is cut: `rows` rows and `tile` columns of y at a time."""

    rows: int
    tile: int
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest_tile: int, backward: bool, known_multiple: int, target: str) -> GluConfig:
        if target == "cpu":
            return GluConfig(1, cpu_tile(cols, max(smallest_tile, 64)), 4)
        tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
        # Where an access has one element, its address is longer than it.
        numbers = 4096 // (2 if backward else 1) // (4 if known_multiple == 1 else 1)
        return GluConfig(max(1, numbers // tile), tile, 4)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose_stripe(
        block: str, rowwise: bool, backward: bool, interleaved: bool, known_multiple: int, target: str
    ) -> GluConfig:
        narrow = block in ("mx", "nvfp4", "tensor") or (block == "1x128" and not rowwise)
        tile = 64 if narrow else 128
        warps = 16
        if target == "cpu":
            tile = 128
        elif warp_size_of(target) == 64:
            warps = tile * STRIPE // 16 // 64
        elif (backward and tile == 128) or known_multiple == 1:
            # Compiled for both copies of a gradient at 1x128: 255 registers, none spilled on sm_90 (with 16 warps 128
            # and 376 to 612 bytes), up to 24 bytes on sm_100 and sm_120, and 312 on sm_80 and sm_89, which encode by
            # integers.
            warps = 8
        # Interleaved gradients are twice as wide as gate or up.
        return GluConfig(STRIPE, tile // 2 if backward and interleaved else tile, warps)


class _Layout(NamedTuple):
    """Where rows lie: row r of the gate at (r // inner) * gate_outer_stride + (r % inner) * gate_inner_stride."""

    rows: int
    cols: int
    up_shift: int
    inner: int
    gate_outer_stride: int
    gate_inner_stride: int
    up_outer_stride: int
    up_inner_stride: int
    dy_outer_stride: int
    dy_inner_stride: int

    @property
    def known_multiple(self) -> int:
        """Of which the columns and all row strides are multiples."""
        return align_of(self.cols, self.up_shift, *self[4:])


class _Pass(NamedTuple):
    """What a pass makes, as far as it decides the code of the kernel."""

    static: bool | None  # the scale is given; None in the backward
    format: str | None = None  # of copies that are made
    rowwise: bool = False  # the row-wise copy is made
    stripes: bool = False  # by stripes
    sums: bool = False  # dprobs is made
    bias_sums: bool = False  # and the gradient of the bias


class _Cut(NamedTuple):
    """How a pass is cut into programs."""

    launch: Launch
    blocks: int  # of rows
    row_programs: int  # programs that share a block


@functools.lru_cache(maxsize=4096)
def _cut(
    layout: _Layout, unit: GatedUnit, groups: tuple[int, int] | None, made: _Pass, cast: int, target: str
) -> _Cut:
    """groups: how many there are, and their align."""
    backward, cpu, multiple = made.static is None, target == "cpu", layout.known_multiple
    interleaved = unit.layout == "interleaved"
    format = None if made.format is None else Format.of(made.format)
    if made.stripes:
        assert format is not None
        config = GluConfig.choose_stripe(format.block, made.rowwise, backward, interleaved, multiple, target)
        blocks = count_stripes(layout.rows, layout.cols)
    else:
        group = 1 if format is None else format.group
        config = GluConfig.choose(layout.cols, group, backward, multiple, target)
        height = STRIPE if made.bias_sums else config.rows
        blocks = -(-layout.rows // height)
    places = "rows"
    if (made.stripes or made.bias_sums) and groups is not None:
        number, align = groups
        if align % STRIPE == 0:
            places = "stripes"
        elif made.bias_sums or (format is not None and format.group):
            places, blocks = "slots", count_slots(layout.rows, number)
    # A scale of a whole row belongs to one program, and so does a sum over the row, unless its tiles are stripes: in a
    # loop over those, too much is held in registers. Sums over rows are those of one tile.
    by_row = format is not None and format.block == "row"
    once = made.bias_sums or not (cpu or by_row or (made.sums and not made.stripes))
    launch = Launch.of(
        glu_backward_kernel if backward else glu_kernel,
        num_warps=config.num_warps,
        ACT=unit.act,
        INTERLEAVED=interleaved,
        LIMITED=unit.limit is not None,
        FORMAT=format,
        CAST=cast,
        STRIPES=made.stripes,
        PLACES=places,
        ROWS=config.rows,
        TILE=config.tile,
        ONCE=once,
        NESTED=layout.inner > 1,
        ALIGN=multiple,
        COLS_MASKED=layout.cols % config.tile != 0,
        **({} if backward else {"STATIC": made.static}),
    )
    return _Cut(launch, blocks, -(-layout.cols // config.tile) if once else 1)


class _Call:
    """A call's inputs as kernels take them."""

    def __init__(self, a: GluArgs | GluBackwardArgs, dy: Tensor | None) -> None:
        layout, unit = a.unit.layout, a.unit
        x, up, cols = a.x, a.up, _hidden(a.x, layout)
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
        if not nested:  # two ways to nest rows: all are straightened
            straight = a._replace(x=a.x.contiguous(), up=None if a.up is None else a.up.contiguous())
            self.__init__(straight, None if dy is None else dy.contiguous())  # type: ignore[misc]
            return
        self.gate, self.up, self.dy, self.probs, self.unit = x, up, dy, a.probs, unit
        self.bias = contiguous(a.bias)
        self.layout = _Layout(
            a.x.numel() // a.x.shape[-1], cols, cols if layout == "concat" else 0, inner, outer_stride, inner_stride,
            *up_strides, *dy_strides,
        )  # fmt: skip
        self.prob_stride = 0 if a.probs is None else a.probs.stride(0)
        self.groups = NO_ENDS
        if a.groups.ends is not None:
            self.groups = GroupEnds(a.groups.ends.contiguous(), a.groups.ends.numel(), a.groups.align)
        self.target = capabilities_of(x.device)

    def cut(self, made: _Pass) -> _Cut:
        ends, *groups = self.groups
        known = None if ends is None else (groups[0], groups[1])
        return _cut(self.layout, self.unit, known, made, cast_mode(self.target), self.target.target)


def _allocate_glu(a: GluArgs) -> GluOutputs:
    shape = (*a.x.shape[:-1], _hidden(a.x, a.unit.layout))
    return GluOutputs(allocate_result(a.result, a.x, shape, a.groups))


class _Glu(_Call):
    """One call of glu: its passes."""

    options: ResultOptions

    def quantize(self, result: Result, options: ResultOptions, groups: Groups) -> None:
        assert options.format is not None
        f, self.options = Format.of(options.format), options
        if result.scale_t is not None and groups.have_slots(f, True):
            clear_slots(result.scale_t)
        direct = f.block != "128x128"
        make_copies(result, options, self.rows_pass, self.stripes_pass, direct=direct, statistics=False)

    def rows_pass(
        self, copy: Copy | None, given: Tensor | None, wants_amax: bool, known: bool
    ) -> Tensor | None:
        made = _Pass(self.options.scale is not None, copy and self.options.format, copy is not None)
        return self.run(made, None, copy, None, given, wants_amax)

    def stripes_pass(
        self, row: Copy | None, col: Copy | None, given: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        static = self.options.scale is not None
        made = _Pass(static, self.options.format, row is not None, stripes=True)
        return self.run(made, None, row, col, given, wants_amax)

    def run(
        self,
        made: _Pass,
        y: Tensor | None,
        row: Copy | None = None,
        col: Copy | None = None,
        given: Tensor | None = None,
        wants_amax: bool = False,
    ) -> Tensor | None:
        """A pass; the amax of each of its programs, if it is wanted."""
        launch, blocks, row_programs = self.cut(made)
        layout, unit, programs = self.layout, self.unit, blocks * row_programs
        found = None
        if wants_amax:
            found = torch.empty(programs, dtype=torch.float32, device=self.gate.device)
        launch(
            (programs, 1, 1),
            *glu_kernel.arguments(
                rows=layout.rows,
                cols=layout.cols,
                up_shift=layout.up_shift,
                inner=layout.inner,
                gate=(self.gate, layout.gate_outer_stride, layout.gate_inner_stride),
                up=(self.up, layout.up_outer_stride, layout.up_inner_stride),
                prob_ptr=self.probs,
                prob_stride=self.prob_stride,
                groups=self.groups,
                bias_ptr=self.bias,
                given_ptr=given,
                y_ptr=y,
                amax_ptr=found,
                row_programs=row_programs,
                copy=copy_arguments(row),
                copy_t=copy_arguments(col),
                alpha=unit.alpha,
                limit=0.0 if unit.limit is None else unit.limit,
                up_offset=unit.up_offset,
            ),
        )
        return found


def _launch_glu(o: GluOutputs, a: GluArgs) -> None:
    call = _Glu(a, None)
    if a.result.format is None:
        call.run(_PLAIN, o.result.y)
    else:
        call.quantize(o.result, a.result, a.groups)


_PLAIN = _Pass(static=False)


def _in_one_pass(format: Format, layout: str, hidden: int) -> tuple[bool, bool]:
    """Whether the row-wise and the column-wise copies of a gradient come from the tiles of dgate and dup: their scales
    are known within a tile, and none belongs to the end of dgate and the beginning of dup."""
    if format.block not in ("1x128", "128x128", "mx"):
        return False, False
    crossing = layout == "concat" and hidden % format.group != 0
    return not crossing, not (crossing and format.block == "128x128")


def _allocate_glu_backward(a: GluBackwardArgs) -> GluBackwardOutputs:
    x, up, probs, bias, needs = a.x, a.up, a.probs, a.bias, a.needs
    return GluBackwardOutputs(
        allocate_result(a.gradient, x, groups=a.groups) if needs.x else _NO_RESULT,
        allocate_result(a.gradient, up, groups=a.groups) if up is not None and needs.up else _NO_RESULT,
        torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
        if probs is not None and needs.probs
        else None,
        empty_like(bias) if bias is not None and needs.bias else None,
    )


class _Gradient:
    """The gradient of x or up: which of its copies come from the kernel, and which from an fp32 gradient after it."""

    def __init__(self, result: Result, options: ResultOptions, direct: tuple[bool, bool]) -> None:
        self.plain: Tensor | None = result.y
        self.result, self.options, self.later = result, options, False
        self.row = self.col = None
        if result.y is None or options.format is None:
            return
        self.row = result.rowwise if direct[0] else None
        self.col = result.columnwise if direct[1] else None
        self.later = direct != (options.rowwise, options.columnwise)
        self.plain = (
            torch.empty(result.y.shape, dtype=torch.float32, device=result.y.device) if self.later else None
        )

    def finish(self) -> None:
        """Make the copies that the kernel did not; its column-wise one stays."""
        if self.later:
            assert self.plain is not None
            options = self.options._replace(columnwise=self.options.columnwise and self.col is None)
            result = self.result if options.columnwise else self.result._replace(data_t=None, scale_t=None)
            quantize_into(result, options._replace(dtype=torch.float32), self.plain)


def _launch_glu_backward(o: GluBackwardOutputs, a: GluBackwardArgs) -> None:
    call = _Call(a, a.dy)
    layout, unit, options = call.layout, a.unit, a.gradient
    direct = (False, False)
    if options.format is not None:
        f = Format.of(options.format)
        direct = _in_one_pass(f, unit.layout, layout.cols)
        direct = direct[0] and options.rowwise, direct[1] and options.columnwise
        for result in (o.x, o.up):
            if result.scale_t is not None and a.groups.have_slots(f, True):
                clear_slots(result.scale_t)
    dx, dup = _Gradient(o.x, options, direct), _Gradient(o.up, options, direct)
    up = dx if unit.layout == "concat" else dup
    format = options.format if any(direct) else None
    stripes = format is not None and (direct[1] or Format.of(format).block == "128x128")
    made = _Pass(None, format, direct[0], stripes, o.probs is not None, o.bias is not None)
    launch, blocks, row_programs = call.cut(made)
    dprobs, dbias = o.probs, None
    if o.bias is not None:
        dbias = torch.empty((blocks, a.x.shape[-1]), dtype=torch.float32, device=o.bias.device)
    if dprobs is not None and row_programs > 1:
        dprobs = torch.empty((row_programs, layout.rows), dtype=torch.float32, device=dprobs.device)
    row, col = copy_arguments(dx.row), copy_arguments(dx.col)
    up_row, up_col = copy_arguments(up.row), copy_arguments(up.col)
    if (
        dx.plain is None and dx.row is None and dx.col is None
    ):  # dup alone, whose copies lie as those of dgate would
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
            prob_stride=call.prob_stride,
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
        o.probs.copy_(dprobs.sum(0))
    if o.bias is not None and dbias is not None:
        if call.groups.ends is None:
            sum_partials(dbias, o.bias)
        elif call.groups.number:
            sum_groups(dbias, o.bias, call.groups, layout.rows)
    dx.finish()
    dup.finish()


# ---- registration ---------------------------------------------------------------------------------------


def _keep(a: GluArgs, o: GluOutputs) -> GluBackwardArgs:
    return GluBackwardArgs(a.x, a.up, a.probs, a.bias, LATER, a.groups, a.unit, a.gradient, GluNeeds())


def _gradients(b: Backward) -> Gradients:
    kept: GluBackwardArgs = b.kept
    needs = GluNeeds(b.needs.x, b.needs.up, b.needs.probs, b.needs.bias)
    found = glu_backward_op(kept._replace(dy=b.grads.result.y, needs=needs))
    dx, dup = _gradient(found.x, kept.gradient, kept.x), _gradient(found.up, kept.gradient, kept.up)
    if type(kept.x) not in (Tensor, torch.nn.Parameter):
        # A graph that is being traced has plain tensors for the gradients of its inputs, which are leaves to it.
        of_x, *of_others = b.node.next_functions
        dx = _dequantized_leaf(dx, of_x)
        dup = dup if dup is None else _dequantized_leaf(dup, of_others[0])
    return {"x": dx, "up": dup, "probs": found.probs, "bias": found.bias}


def _gradient(result: Result, options: ResultOptions, like: Tensor | None) -> Tensor | None:
    """A gradient as the caller gets it."""
    if result.y is None or like is None or options.format is None:
        return result.y
    return QTensor(like.shape, like.dtype, Format.of(options.format), result.rowwise, result.columnwise)


def _dequantized_leaf(gradient: Tensor | None, edge: tuple[Any, int]) -> Tensor | None:
    node, _ = edge
    if isinstance(gradient, QTensor) and node is not None and not node.next_functions:
        return gradient.dequantize()
    return gradient


def _present(a: GluBackwardArgs) -> Any:
    there = a.gradient.present()
    return GluBackwardOutputs(
        there if a.needs.x else _NO_RESULT,
        there if a.needs.up and a.up is not None else _NO_RESULT,
        a.needs.probs and a.probs is not None,  # type: ignore[arg-type]
        a.needs.bias and a.bias is not None,  # type: ignore[arg-type]
    )


def _shard(a: GluArgs) -> Sharding:
    whole, block = a.result.blocks()
    of_gradient, rows = a.gradient.blocks()
    whole |= of_gradient
    if a.groups.ends is not None:
        whole["..."] = "ends= counts the rows of all experts. Give x.to_local() and each rank's own ends"
        whole["e"] = "ends= is needed for every expert"
    of_x = "... h"
    if a.unit.layout in ("concat", "interleaved"):
        of_x, whole["c"] = "... c", "gate and up lie in it. Give them apart, as glu(gate, up)"
    elif a.result.format is not None or a.gradient.format is not None:
        whole["h"] = "a block of the quantised result may reach over it"
    of_bias = of_x.split()[-1] if a.groups.ends is None else f"e {of_x.split()[-1]}"
    return Sharding(
        {"x": of_x, "up": "... h", "probs": "(...)", "bias": of_bias, "groups_ends": "e", "result_scale": ""},
        {"result_y": "... h", "result_amax": "max:"},
        whole,
        max(block, rows),
    )


glu_backward_op = define_op(
    "glu_backward",
    GluBackwardArgs,
    GluBackwardOutputs,
    allocate=_allocate_glu_backward,
    launch=_launch_glu_backward,
    reference=glu_backward_reference,
    present=_present,
    variants=32,
)

glu_op = define_op(
    "glu",
    GluArgs,
    GluOutputs,
    allocate=_allocate_glu,
    launch=_launch_glu,
    reference=glu_reference,
    present=lambda a: GluOutputs(a.result.present()),
    keep=_keep,
    backward=_gradients,
    sharding=_shard,
    variants=48,
)


# ---- public functions -----------------------------------------------------------------------------------

Layout = Literal["concat", "interleaved", "none"]


class GluGradients(NamedTuple):
    """What `glu_backward` returns: the gradients of x, up, probs and bias, None for what the call does not have."""

    x: Tensor
    up: Tensor | None
    probs: Tensor | None
    bias: Tensor | None


@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: Literal[False] = False,
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: Literal[True],
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A gated linear unit: `y = f(gate) * up * probs`, in fp32 and rounded once.

    x: [..., 2H] with gate and up in it, or the gate [..., H] beside `up` [..., H]; bf16, fp16 or fp32, of any
    strides. Returns y [..., H], and the largest |y| with `return_amax`.

    - `act`: f. "silu" makes it SwiGLU, "gelu" (by erf) and "gelu_tanh" GeGLU, "relu" ReGLU; "relu2" is ReLU squared.
    - `layout` of x: "concat" has all of the gate first, "interleaved" gate and up in turn. "none": nothing is gated,
      x is [..., H] and y = f(x).
    - `probs` [...] or [..., 1]: a weight for each row, such as the router's probability. It has a gradient.
    - `bias` [last dimension of x], with `ends` one for each expert, [experts, last dimension of x]: that of the
      projection which makes x, added to it in fp32; bf16, fp16 or fp32. Its gradient is a sum over rows in fp32, in a
      fixed order. It does not go with `up`, where each of two projections adds its own.
    - `limit`: gate counts as at most the limit, up as within ±limit; their gradients are 0 beyond it. `alpha`: the
      steepness of the sigmoid in silu. `up_offset` is added to up. gpt-oss has limit 7, alpha 1.702, up_offset 1.
    - `ends` [experts], int32 or int64 on the device: where the rows of each expert end, the `ends` of a `RowMap`. An
      expert begins where the one before it ends, rounded up to a multiple of `align`. Rows of no expert are not read;
      their results and gradients are zero. Without experts there is one group of all rows. What the numbers are is
      known on the device alone: `RowMap.offsets` in their place, where an expert's pads count as its rows, is not
      noticed.
    - `out_dtype`: of y, x's by default.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`. No block of a
      column-wise copy mixes experts. If `align` is a multiple of 128 its blocks lie as without experts. Otherwise
      `align` is a multiple of 16 (32 for 4-bit codes), and the scales of an expert that begins with row s and has
      e experts before it begin with block s // 128 + e of 128 rows; blocks without rows have the scale zero.
    - `quantize_grad`, `grad_rowwise`, `grad_columnwise`: the gradient of x (and of up) is a `QTensor` of this format,
      made from fp32. Blocks 1x128, 128x128 and mx come from one read of x and of y's gradient, unless one of them
      would reach from the gate into up; those and the other blocks take an fp32 gradient in memory. What leaves a
      graph of `torch.compile` as the gradient of one of its inputs is dequantised. Gradients that autograd adds up
      are dequantised and added in x's dtype.
    - `out`: write y into this tensor, or into this `QTensor`, instead of a new one; not with autograd.

    >>> import torch, weft
    >>> x = torch.randn(48, 2 * 256, dtype=torch.bfloat16)
    >>> weft.glu(x).shape
    torch.Size([48, 256])
    >>> ends = torch.tensor([5, 32, 40])  # rows 0-4, 16-31, 32-39; the others are padding
    >>> y = weft.glu(x, probs=torch.rand(48), ends=ends, align=16)
    >>> y[5:16].count_nonzero(), y[40:].count_nonzero()
    (tensor(0), tensor(0))
    >>> q = weft.glu(x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([48, 256]), torch.Size([256, 48]))
    """
    unit = _checked_unit(x, up, act, layout, limit, alpha, up_offset)
    probs, groups = _checked_rows(x, probs, ends, align)
    if bias is not None:
        _check_bias(bias, x, unit, groups)
    options = result_options(
        x, quantize, rowwise=rowwise, columnwise=columnwise, quant_scale=quant_scale, return_amax=return_amax,
        out_dtype=out_dtype,
    )  # fmt: skip
    gradient = _PLAIN_GRADIENTS[x.dtype]
    if options.format is not None:
        _check_groups(options, groups, True)
    if quantize_grad is not None:
        gradient = _gradient_options(x, unit, groups, quantize_grad, grad_rowwise, grad_columnwise)
    a = GluArgs(x, up, probs, bias, groups, unit, options, gradient)
    result = (glu_op(a) if out is None else result_into(glu_op, a, out)).result
    if options.format is None:
        return result.y
    q = result.value(options)
    return q if result.amax is None else (q, result.amax)


def glu_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> GluGradients:
    """The gradients of `glu`, for those who write their backward themselves: dy [..., H] is the gradient of y, the
    other arguments are those of `glu`. With `quantize` the gradients of x and up are `QTensor`s.

    >>> import torch, weft
    >>> x, dy = torch.randn(48, 512, dtype=torch.bfloat16), torch.randn(48, 256, dtype=torch.bfloat16)
    >>> found = weft.glu_backward(dy, x, probs=torch.rand(48), quantize="1x128", columnwise=True)
    >>> found.x.rowwise.data.shape, found.x.columnwise.data.shape, found.probs.shape
    (torch.Size([48, 512]), torch.Size([512, 48]), torch.Size([48]))
    """
    unit = _checked_unit(x, up, act, layout, limit, alpha, up_offset)
    flat_probs, groups = _checked_rows(x, probs, ends, align)
    if bias is not None:
        _check_bias(bias, x, unit, groups)
    check_tensor("dy", dy, FLOATS, x.device, (*x.shape[:-1], _hidden(x, unit.layout)))
    gradient = _PLAIN_GRADIENTS[x.dtype]
    if quantize is not None:
        gradient = _gradient_options(x, unit, groups, quantize, rowwise, columnwise)
    elif columnwise:
        raise ValueError("columnwise goes with quantize=…")
    needs = GluNeeds(True, up is not None, probs is not None, bias is not None)
    found = glu_backward_op(GluBackwardArgs(x, up, flat_probs, bias, dy, groups, unit, gradient, needs))
    dx, dup, dprobs = _gradient(found.x, gradient, x), _gradient(found.up, gradient, up), found.probs
    assert dx is not None
    if dprobs is not None and probs is not None:
        dprobs = dprobs.view(probs.shape)
    return GluGradients(dx, dup, dprobs, found.bias)


_ACTS = get_args(Act)
_PLAIN_GRADIENTS = {dtype: ResultOptions(dtype, None, True, False, None, False) for dtype in FLOATS}


def _checked_unit(
    x: Tensor, up: Tensor | None, act: str, layout: str, limit: float | None, alpha: float, up_offset: float
) -> GatedUnit:
    check_input("x", x)
    if act not in _ACTS:
        raise ValueError(f"act must be one of {', '.join(_ACTS)}; got {act!r}")
    if layout not in ("concat", "interleaved", "none"):
        raise ValueError(f"layout must be 'concat', 'interleaved' or 'none'; got {layout!r}")
    if up is not None:
        if layout != "concat":
            raise ValueError(f"with up= there is no layout of gate and up in x; got layout={layout!r}")
        check_tensor("up", up, (x.dtype,), x.device, x.shape)
        layout = "pair"
    elif layout != "none" and x.shape[-1] % 2:
        raise ValueError(f"x holds gate and up, [..., 2H]; its last dimension is {x.shape[-1]}, which is odd")
    if limit is not None:
        limit = real("limit", limit)
        if not limit > 0:
            raise ValueError(f"limit must be positive, or None for no limit; got {limit}")
    alpha = real("alpha", alpha)
    if alpha != 1.0 and act not in ("silu", "sigmoid"):
        raise ValueError(
            f"alpha is the steepness of a sigmoid, for silu and sigmoid; got {alpha} for {act!r}"
        )
    return GatedUnit(act, layout, limit, alpha, real("up_offset", up_offset))


def _checked_rows(
    x: Tensor, probs: Tensor | None, ends: Tensor | None, align: int
) -> tuple[Tensor | None, Groups]:
    """What the rows of x have: their weights [M], and their experts."""
    if probs is not None:
        lead = x.shape[:-1]
        check_tensor("probs", probs, FLOATS, x.device, lead, (*lead, 1))
        if not is_distributed(x, probs):
            probs = probs.reshape(-1)
        elif probs.dim() == x.dim():
            probs = probs.squeeze(-1)  # the shards are joined into rows, by each rank its own
    if whole("align", align) < 1 or (ends is None and align != 1):
        raise ValueError(f"align is a positive number that goes with ends=…; got {align}")
    if ends is None:
        return probs, NO_GROUPS
    check_tensor("ends", ends, INTEGERS, x.device)
    if ends.dim() != 1:
        raise ValueError(f"ends must be [experts], where the rows of each end; got {tuple(ends.shape)}")
    return probs, Groups(ends, align)


def _check_bias(bias: Tensor, x: Tensor, unit: GatedUnit, groups: Groups) -> None:
    if unit.layout == "pair":
        raise ValueError(
            "bias= is that of one projection; gate and up are given apart: add each bias in its own"
        )
    width = x.shape[-1]
    shape = (width,) if groups.ends is None else (groups.ends.numel(), width)
    check_tensor("bias", bias, FLOATS, x.device, shape)


def _gradient_options(
    x: Tensor, unit: GatedUnit, groups: Groups, quantize: Format | str, rowwise: bool, columnwise: bool
) -> ResultOptions:
    """How the gradients of x and up are quantised, checked."""
    format = Format.of(quantize)
    check_copies(rowwise, columnwise)
    options = ResultOptions(x.dtype, format.spec, bool(rowwise), bool(columnwise), None, False)
    _, one_pass = _in_one_pass(format, unit.layout, _hidden(x, unit.layout))
    _check_groups(options, groups, one_pass)
    return options


def _check_groups(options: ResultOptions, groups: Groups, one_pass: bool) -> None:
    """Complain about copies that cannot be made of experts that begin anywhere."""
    if groups.ends is None or options.format is None:
        return
    format, columnwise, align = Format.of(options.format), options.columnwise, groups.align
    if columnwise and format.block == "row":
        raise ValueError("block 'row' has one scale to a whole column, which would mix experts: take 1x128")
    if not groups.begin_anew() or format.block == "tensor":
        return
    if format.block == "128x128":
        raise ValueError(f"128x128 blocks would mix experts: pad them to align=128; got align={align}")
    if columnwise and not options.rowwise:
        raise ValueError(
            "column-wise blocks that begin anew with every expert need the row-wise copy beside them: "
            f"pad the experts to align=128, or leave rowwise=True; got align={align}"
        )
    if columnwise and align % (16 * format.packed):
        raise ValueError(
            f"a column-wise copy needs experts that begin at multiples of {16 * format.packed}: got align={align}"
        )
    if columnwise and not one_pass:
        raise ValueError(
            f"{format.spec} takes the whole gradient before its first code; its column-wise copy would mix experts: "
            f"pad them to align=128; got align={align}"
        )
