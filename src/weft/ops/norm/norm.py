"""RMSNorm and LayerNorm, with the residual add before them, the modulation after them, and the quantiser last.

    v = x + pre_bias
    h = round(residual + v * residual_gate)    to x's dtype; everything below reads h
    r = 1 / sqrt(mean(h^2) + eps)              rms                       z = h * r
    r = 1 / sqrt(mean((h - m)^2) + eps)        layer, m = mean(h)        z = (h - m) * r
    z = round(z)                               to x's dtype, with casting="llama" only
    y = z * (weight + weight_offset) + bias
    y = y * (1 + scale) + shift                modulation, per row or per sample
    out = round(y), or its codes and scales

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. Backward,
with d the gradient of y (times 1 + scale if modulated) and t = d * (weight + weight_offset):

    dh = r * (t - z * mean(t * z))             rms; layer: r * (t - mean(t) - z * mean(t * z))
    dresidual = dh = dh + dresidual_out        the gradient that comes back to h itself is added
    dx = dv = dh * residual_gate               dpre_bias = sum dv         dresidual_gate = sum dh * v
    dweight = sum d * z      dbias = sum d     dscale = sum dy * (z * (weight + offset) + bias)     dshift = sum dy

The sums over rows are fp32 partial sums, one per program, added up in order: the same bits every run. Rounding
steps are passed straight through.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...quant import Copy, Format
from ...runtime import (
    Backward,
    Gradients,
    Launch,
    Sharding,
    capabilities_of,
    define_op,
    is_distributed,
)
from ..common.checks import FLOATS, check_input, check_tensor, epsilon, is_tensor, real
from ..common.copies import STRIPE, cast_mode, copy_arguments, count_stripes, stripe_tile
from ..common.results import (
    Result,
    ResultOptions,
    allocate_result,
    make_copies,
    result_into,
    result_options,
    result_reference,
)
from ..common.rows import (
    align_of,
    compute_dtype,
    contiguous,
    count_rows,
    cpu_tile,
    empty_like,
    empty_where,
    one_stride,
    row_strides,
    tile_warps,
)
from ..common.sums import sum_partials
from .kernels import Programs, norm_backward_kernel, norm_kernel, norm_stripe_kernel
from .signatures import Modulation, NormResult, norm_like

# ---- arguments and outputs ------------------------------------------------------------------------------


class NormArgs(NamedTuple):
    x: Tensor  # [..., K]
    weight: Tensor | None  # [K]
    bias: Tensor | None  # [K]
    residual: Tensor | None  # like x
    pre_bias: Tensor | None  # [K]
    residual_gate: Tensor | None  # [samples, K]; a sample may be one row
    scale: Tensor | None  # [samples, K], of the modulation; a sample may be one row
    shift: Tensor | None  # [samples, K]
    eps: float
    weight_offset: float
    kind: str  # "rms" or "layer"
    casting: str
    stats: bool  # rstd and mean are wanted, for the backward
    result: ResultOptions


class NormOutputs(NamedTuple):
    result: Result
    residual: Tensor | None  # h, if it is the sum with a residual, or a sum that the backward reads
    rstd: Tensor | None  # fp32 [rows]
    mean: Tensor | None  # fp32 [rows], of a LayerNorm


class NormNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    shift: bool = False
    residual: bool = False  # where it is not that of x
    residual_gate: bool = False
    pre_bias: bool = False


class NormGradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    residual: Tensor | None
    residual_gate: Tensor | None
    pre_bias: Tensor | None


class NormBackwardArgs(NamedTuple):
    h: Tensor  # [..., K]
    dy: Tensor
    dresidual: Tensor | None
    x: Tensor | None  # like h; for the gradient of residual_gate alone
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    rstd: Tensor
    mean: Tensor | None
    weight_offset: float
    casting: str
    needs: NormNeeds


# ---- reference ------------------------------------------------------------------------------------------


def _per_row(by_sample: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Per-sample rows repeated for each of the sample's rows."""
    return by_sample.to(dtype).repeat_interleave(rows // max(by_sample.shape[0], 1), 0)


def _sum_samples(gradient: Tensor, like: Tensor) -> Tensor:
    """The sum over the rows of each sample."""
    rows, cols = gradient.shape
    samples = like.shape[0]
    return gradient.view(samples, rows // max(samples, 1), cols).sum(1).to(like.dtype)


def norm_reference(a: NormArgs) -> NormOutputs:
    """The definition."""
    x, dtype, mean = a.x, compute_dtype(a.x), None
    flat = x.reshape(count_rows(x), x.shape[-1])
    h = flat.to(dtype)
    if a.pre_bias is not None:
        h = h + a.pre_bias.to(dtype)
    if a.residual_gate is not None:
        h = h * _per_row(a.residual_gate, len(flat), dtype)
    if a.residual is not None:
        h = h + a.residual.reshape(flat.shape).to(dtype)
    h = h.to(x.dtype)
    y = h.to(dtype)
    if a.kind == "layer":
        mean = y.mean(1)
        y = y - mean[:, None]
    rstd = 1.0 / torch.sqrt(y.square().mean(1) + a.eps)
    y = y * rstd[:, None]
    if a.casting == "llama":
        y = y.to(x.dtype).to(dtype)
    if a.weight is not None:
        y = y * (a.weight.to(dtype) + a.weight_offset)
    if a.bias is not None:
        y = y + a.bias.to(dtype)
    if a.scale is not None:
        y = y * (1.0 + _per_row(a.scale, len(flat), dtype))
    if a.shift is not None:
        y = y + _per_row(a.shift, len(flat), dtype)
    return NormOutputs(
        result_reference(a.result, y, x.shape, x),
        h.view(x.shape) if _keeps_h(a) else None,
        rstd if a.stats else None,
        mean if a.stats else None,
    )


def norm_backward_reference(a: NormBackwardArgs) -> NormGradients:
    h, needs, dtype = a.h, a.needs, compute_dtype(a.h)
    flat = h.reshape(count_rows(h), h.shape[-1])
    rows = len(flat)
    centred, dy = flat.to(dtype), a.dy.reshape(flat.shape).to(dtype)
    rstd = a.rstd.to(dtype)[:, None]
    if a.mean is not None:
        centred = centred - a.mean.to(dtype)[:, None]
    exact = centred * rstd
    z = exact.to(h.dtype).to(dtype) if a.casting == "llama" else exact
    w = 1.0 if a.weight is None else a.weight.to(dtype) + a.weight_offset
    d = dy
    dx = dweight = dbias = dscale = dshift = dresidual = dgate = dpre_bias = None
    if a.scale is not None:
        d = dy * (1.0 + _per_row(a.scale, rows, dtype))
        if needs.scale:
            y = z * w + (0.0 if a.bias is None else a.bias.to(dtype))
            dscale = _sum_samples(dy * y, a.scale)
        if needs.shift:
            dshift = _sum_samples(dy, a.scale)
    if needs.weight and a.weight is not None:
        dweight = (d * z).sum(0).to(a.weight.dtype)
    if needs.bias and a.bias is not None:
        dbias = d.sum(0).to(a.bias.dtype)
    t = d * w
    dh = t - exact * (t * exact).mean(1, keepdim=True)
    if a.mean is not None:
        dh = dh - t.mean(1, keepdim=True)
    dh = dh * rstd
    if a.dresidual is not None:
        dh = dh + a.dresidual.reshape(flat.shape).to(dtype)
    if needs.residual:
        dresidual = dh.to(h.dtype).view(h.shape)
    if needs.residual_gate and a.residual_gate is not None and a.x is not None:
        v = a.x.reshape(flat.shape).to(dtype) + (0.0 if a.pre_bias is None else a.pre_bias.to(dtype))
        dgate = _sum_samples(dh * v, a.residual_gate)
    dv = dh if a.residual_gate is None else dh * _per_row(a.residual_gate, rows, dtype)
    if needs.x:
        dx = dv.to(h.dtype).view(h.shape)
    if needs.pre_bias and a.pre_bias is not None:
        dpre_bias = dv.sum(0).to(a.pre_bias.dtype)
    return NormGradients(dx, dweight, dbias, dscale, dshift, dresidual, dgate, dpre_bias)


# ---- launch ---------------------------------------------------------------------------------------------


class RowConfig(NamedTuple):
    """How rows are cut: `rows` of them to a program, `tile` columns at a time, in a loop if that is not all."""

    rows: int
    tile: int
    loop: bool
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest_tile: int, target: str) -> RowConfig:
        # A power of two that holds the row, up to what registers hold.
        tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
        if target == "cpu":
            # Measured with 2048 columns: reading a row twice is 1.1 times as fast as keeping it.
            # Quantised rows in pieces of 1024, plain ones of 512: 1.05 times as fast as the other way round.
            return RowConfig(1, cpu_tile(cols, smallest_tile, 1024 if smallest_tile > 1 else 512), True, 4)
        loop = tile > 16384
        tile = min(tile, 8192 if loop else 16384)
        rows = max(1, 2048 // tile)
        # Compiled for sm_90: 32 to 48 registers.
        return RowConfig(rows, tile, loop, tile_warps(rows * tile, target))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose_backward(cols: int, target: str) -> RowConfig:
        # Two tiles and up to six sums live at once: half the columns of the forward.
        tile = max(1 << max(cols - 1, 0).bit_length(), 64)
        if target == "cpu":
            tile = cpu_tile(cols, largest=4096)
            return RowConfig(1, tile, tile < cols, 4)
        loop = tile > 8192
        tile = min(tile, 4096 if loop else 8192)
        rows = max(1, 1024 // tile)
        # In a loop there is more to hold: 8 numbers to a thread (40 registers on sm_90 in place of 80). Compiled for
        # sm_90 without a loop: 64 to 123 registers, and 185 with a gate.
        return RowConfig(rows, tile, loop, tile_warps(rows * tile * (2 if loop else 1), target))


def _keeps_h(a: NormArgs) -> bool:
    """Whether h is stored: it is returned with a residual, and the backward reads it where it is not x."""
    return a.residual is not None or (a.pre_bias is not None and a.stats)


def _allocate_norm(a: NormArgs) -> NormOutputs:
    x = a.x
    residual = rstd = mean = None
    if _keeps_h(a):
        residual = empty_like(x)
    if a.stats:
        rstd = torch.empty(count_rows(x), dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if a.kind == "layer" else None
    return NormOutputs(allocate_result(a.result, x), residual, rstd, mean)


def _present(a: NormArgs) -> Any:
    return NormOutputs(a.result.present(), _keeps_h(a), a.stats, a.stats and a.kind == "layer")  # type: ignore[arg-type]


class _Operands(NamedTuple):
    """The tensors that kernels read, in the order in which they take them."""

    x: Tensor
    residual: Tensor | None
    pre_bias: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None


class _Layout(NamedTuple):
    """Where the rows of the operands lie, in the order in which kernels take it. Row r of x lies at
    (r // inner) * outer_stride + (r % inner) * inner_stride."""

    rows: int
    cols: int
    inner: int
    outer_stride: int
    inner_stride: int
    residual_stride: int
    gate_stride: int
    rows_per_gate: int
    modulation_stride: int
    rows_per_sample: int

    @property
    def align(self) -> int:
        """Of which all row strides are multiples."""
        return align_of(
            self.cols,
            self.outer_stride,
            self.inner_stride,
            self.residual_stride,
            self.gate_stride,
            self.modulation_stride,
        )

    def of_h(self) -> _Layout:
        """That of h, which has no gaps, no residual and no gate."""
        return self._replace(
            inner=1, outer_stride=self.cols, inner_stride=0, residual_stride=0, gate_stride=0, rows_per_gate=1
        )


def _by_sample(part: Tensor | None, rows: int) -> tuple[Tensor | None, int, int]:
    """(a tensor [samples, K], its stride, rows of a sample). Without one, no sample is a single row."""
    if part is None:
        return None, 0, max(rows, 2)
    flat, stride = one_stride(part)
    return flat, stride, rows // part.shape[0]


def _laid_out(a: NormArgs) -> tuple[_Operands, _Layout]:
    cols = a.x.shape[-1]
    rows = a.x.numel() // cols
    x, inner, outer_stride, inner_stride = row_strides(a.x)
    residual, residual_stride = one_stride(a.residual)
    gate, gate_stride, rows_per_gate = a.residual_gate, 0, 1
    if gate is not None:
        gate, gate_stride, rows_per_gate = _by_sample(gate, rows)
    scale, shift, modulation_stride, rows_per_sample = a.scale, a.shift, 0, 1
    if scale is not None or shift is not None:
        scale, scale_stride = one_stride(scale)
        shift, shift_stride = one_stride(shift)
        if scale is not None and shift is not None and scale_stride != shift_stride:
            scale, shift = scale.contiguous(), shift.contiguous()
        one = scale if scale is not None else shift
        assert one is not None
        modulation_stride, rows_per_sample = one.stride(0), rows // one.shape[0]
    return (
        _Operands(
            x, residual, contiguous(a.pre_bias), gate, contiguous(a.weight), contiguous(a.bias), scale, shift
        ),
        _Layout(
            rows,
            cols,
            inner,
            outer_stride,
            inner_stride,
            residual_stride,
            gate_stride,
            rows_per_gate,
            modulation_stride,
            rows_per_sample,
        ),
    )


class _Pass(NamedTuple):
    """What a pass over rows makes, as far as it decides the code of the kernel."""

    format: str | None = None  # of the result
    copy: bool = False  # the row-wise copy is made
    cast: int = 0
    static: bool = False  # the scale is given
    known: bool = False  # the statistics are given


_PLAIN = _Pass()


@functools.lru_cache(maxsize=4096)
def _rows_launch(
    layout: _Layout, kind: str, casting: str, target: str, made: _Pass = _PLAIN, align: int | None = None
) -> tuple[Launch, tuple[int, int, int]]:
    """(launch, grid) of a pass over rows; `align` is that of the layout, or what another pass has to go by."""
    format = None if made.format is None else Format.of(made.format)
    config = RowConfig.choose(layout.cols, 1 if format is None else format.group, target)
    launch = Launch.of(
        norm_kernel,
        num_warps=config.num_warps,
        LAYER=kind == "layer",
        LLAMA=casting == "llama",
        FORMAT=format if made.copy else None,
        CAST=made.cast,
        STATIC=made.static,
        KNOWN=made.known,
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.loop,
        NESTED=layout.inner > 1,
        ALIGN=align or layout.align,
        COLS_MASKED=layout.cols % config.tile != 0,
    )
    return launch, (-(-layout.rows // config.rows), 1, 1)


def _launch_norm(o: NormOutputs, a: NormArgs) -> None:
    operands, layout = _laid_out(a)
    if a.result.format is not None:
        _Quantized(o, a, operands, layout).make()
        return
    target = capabilities_of(a.x.device).target
    launch, grid = _rows_launch(layout, a.kind, a.casting, target)
    launch(
        grid,
        (*operands, o.rstd, o.mean, None, o.result.y, o.residual, None, None, None),
        (*layout, 0, 0, 0),
        (a.weight_offset, a.eps),
    )


class _Quantized:
    """A call with a quantised result: its passes."""

    def __init__(self, o: NormOutputs, a: NormArgs, operands: _Operands, layout: _Layout) -> None:
        assert a.result.format is not None
        self.o, self.a, self.operands, self.layout = o, a, operands, layout
        self.align: int | None = None  # of the first pass, for the others: that of h may be larger
        self.format = Format.of(a.result.format)
        self.target = capabilities_of(a.x.device)
        self.cast, self.static = cast_mode(self.target), a.result.scale is not None
        self.rstd, self.mean = o.rstd, o.mean

    def make(self) -> None:
        f, to = self.format, self.a.result
        direct = f.block != "128x128"
        if self.rstd is None and ((f.needs_tensor_amax and not self.static) or to.columnwise or not direct):
            # There is more than one pass: the later ones read the statistics.
            self.rstd = self._empty(self.layout.rows)
            self.mean = self._empty(self.layout.rows) if self.a.kind == "layer" else None
        make_copies(self.o.result, to, self.rows_pass, self.stripes_pass, direct=direct, statistics=True)

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float32, device=self.operands.x.device)

    def _read_h(self) -> None:
        """After a pass that stored the sum h, read it in place of what it is made of."""
        self.align = self.align or self.layout.align
        if self.o.residual is not None:
            self.operands = self.operands._replace(x=self.o.residual, residual=None, pre_bias=None, gate=None)
            self.layout = self.layout.of_h()

    def rows_pass(
        self, copy: Copy | None, given: Tensor | None, wants_amax: bool, known: bool
    ) -> Tensor | None:
        if known:
            self._read_h()
        a, operands = self.a, self.operands
        made = _Pass(a.result.format, copy is not None, self.cast, self.static, known)
        launch, grid = _rows_launch(self.layout, a.kind, a.casting, self.target.target, made, self.align)
        partials = self._empty(grid[0]) if wants_amax else None
        y = self.o.result.y if a.result.return_plain and not known else None  # by the first pass
        if copy is None and partials is None and y is None:  # no more than the statistics
            operands = operands._replace(weight=None, bias=None, scale=None, shift=None)
        data, data_scale, *strides = copy_arguments(copy)
        h = None if known else self.o.residual
        launch(
            grid,
            (*operands, self.rstd, self.mean, given if copy else None, y, h, partials, data, data_scale),
            (*self.layout, *strides),
            (a.weight_offset, a.eps),
        )
        return partials

    def stripes_pass(
        self, row: Copy | None, col: Copy | None, given: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        self._read_h()
        layout = self.layout
        tile, num_warps = stripe_tile(self.format.block, self.target.target, norm=True)
        tiles = count_stripes(layout.rows, layout.cols) * -(-layout.cols // tile)
        partials = self._empty(tiles) if wants_amax else None
        data, data_scale, *strides = copy_arguments(row)
        data_t, data_t_scale, *strides_t = copy_arguments(col)
        launch = Launch.of(
            norm_stripe_kernel,
            num_warps=num_warps,
            LAYER=self.a.kind == "layer",
            LLAMA=self.a.casting == "llama",
            FORMAT=self.format,
            CAST=self.cast,
            STATIC=self.static,
            ROWS=STRIPE,
            TILE=tile,
            NESTED=layout.inner > 1,
            ALIGN=self.align,
            COLS_MASKED=layout.cols % tile != 0,
        )
        launch(
            (tiles, 1, 1),
            (
                *self.operands,
                self.rstd,
                self.mean,
                given,
                None,
                None,
                partials,
                data,
                data_scale,
                data_t,
                data_t_scale,
            ),
            (*layout, *strides, *strides_t),
            (self.a.weight_offset,),
        )
        return partials


def _allocate_norm_backward(a: NormBackwardArgs) -> NormGradients:
    like = (a.h, a.weight, a.bias, a.scale, a.scale, a.h, a.residual_gate, a.pre_bias)
    return NormGradients(*empty_where(a.needs, like))


class _BackwardLayout(NamedTuple):
    """Where the rows lie that a backward reads, in the order in which the kernel takes it."""

    inner: int
    h_outer_stride: int
    h_inner_stride: int
    dy_outer_stride: int
    dy_inner_stride: int
    dresidual_stride: int
    modulation_stride: int
    rows_per_sample: int
    x_stride: int
    gate_stride: int
    rows_per_gate: int

    def align(self, cols: int) -> int:
        """Of which all row strides are multiples."""
        return align_of(
            cols,
            self.h_outer_stride,
            self.h_inner_stride,
            self.dy_outer_stride,
            self.dy_inner_stride,
            self.dresidual_stride,
            self.modulation_stride,
            self.x_stride,
            self.gate_stride,
        )


@functools.lru_cache(maxsize=4096)
def _backward_launch(
    rows: int,
    cols: int,
    layout: _BackwardLayout,
    layer: bool,
    casting: str,
    target: str,
    multiprocessors: int,
) -> tuple[Launch, Programs, int]:
    """(launch, how rows are dealt out to programs, how many programs)."""
    config = RowConfig.choose_backward(cols, target)
    # What belongs to single rows is stored by row. Of two sizes of samples the larger is a multiple of the smaller.
    sample_rows = min([rows, *(n for n in (layout.rows_per_sample, layout.rows_per_gate) if n > 1)])
    samples = rows // sample_rows
    wanted = max(1, (multiprocessors * 2) // samples)
    sample_programs = min(-(-sample_rows // config.rows), wanted)
    program_rows = -(-sample_rows // sample_programs)
    program_rows = -(-program_rows // config.rows) * config.rows
    sample_programs = -(-sample_rows // program_rows)
    launch = Launch.of(
        norm_backward_kernel,
        num_warps=config.num_warps,
        LAYER=layer,
        LLAMA=casting == "llama",
        PER_ROW=layout.rows_per_sample == 1,
        GATE_PER_ROW=layout.rows_per_gate == 1,
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.loop,
        NESTED=layout.inner > 1,
        ALIGN=layout.align(cols),
        COLS_MASKED=cols % config.tile != 0,
    )
    programs = Programs(sample_rows, sample_programs, program_rows, cols)
    return launch, programs, samples * sample_programs


def _launch_norm_backward(o: NormGradients, a: NormBackwardArgs) -> None:
    h, inner, h_outer, h_inner = row_strides(a.h)
    dy, dy_nest, dy_outer, dy_inner = row_strides(a.dy)
    if inner != dy_nest:  # two ways to nest rows: both are straightened
        h, inner, h_outer, h_inner = row_strides(h.contiguous())
        dy, _, dy_outer, dy_inner = row_strides(dy.contiguous())
    cols = h.shape[-1]
    rows = h.numel() // cols
    dresidual, dresidual_stride = one_stride(a.dresidual)
    scale, modulation_stride, rows_per_sample = _by_sample(a.scale, rows)
    x, x_stride = one_stride(a.x if a.needs.residual_gate else None)
    gate, gate_stride, rows_per_gate = _by_sample(a.residual_gate, rows)
    layout = _BackwardLayout(
        inner,
        h_outer,
        h_inner,
        dy_outer,
        dy_inner,
        dresidual_stride,
        modulation_stride,
        rows_per_sample,
        x_stride,
        gate_stride,
        rows_per_gate,
    )
    target = capabilities_of(h.device)
    launch, programs, count = _backward_launch(
        rows, cols, layout, a.mean is not None, a.casting, target.target, target.multiprocessors
    )

    def partial(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else torch.empty((count, cols), dtype=torch.float32, device=h.device)

    sums = NormGradients(
        o.x,
        partial(o.weight),
        partial(o.bias),
        o.scale if rows_per_sample == 1 else partial(o.scale),
        o.shift if rows_per_sample == 1 else partial(o.shift),
        o.residual,
        o.residual_gate if rows_per_gate == 1 else partial(o.residual_gate),
        partial(o.pre_bias),
    )
    weight, bias = contiguous(a.weight), contiguous(a.bias) if a.needs.scale else None
    pre_bias = None if x is None else contiguous(a.pre_bias)
    launch(
        (count, 1, 1),
        (h, dy, dresidual, weight, bias, scale, None, a.rstd, a.mean, x, pre_bias, gate, *sums),
        (*programs, *layout),
        (a.weight_offset,),
    )
    for grad, partials in zip(o, sums, strict=True):
        if grad is not partials:
            assert grad is not None
            assert partials is not None
            sum_partials(partials, grad, count // (grad.numel() // cols))


# ---- registration ---------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What a backward reads."""

    h: Tensor
    x: Tensor | None  # if residual_gate wants a gradient
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None  # of a modulation without scale
    rstd: Tensor
    mean: Tensor | None
    weight_offset: float
    casting: str


def _keep(a: NormArgs, o: NormOutputs) -> _Kept:
    assert o.rstd is not None
    return _Kept(
        a.x if o.residual is None else o.residual,
        a.x if a.residual_gate is not None and a.residual_gate.requires_grad else None,
        a.pre_bias,
        a.residual_gate,
        a.weight,
        a.bias,
        a.scale,
        a.shift if a.scale is None else None,
        o.rstd,
        o.mean,
        a.weight_offset,
        a.casting,
    )


def _gradients(b: Backward) -> Gradients:
    kept: _Kept = b.kept
    needs, grads = b.needs, b.grads
    gated = kept.residual_gate is not None  # otherwise x and the residual have the same gradient
    found = norm_backward_op(
        NormBackwardArgs(
            h=kept.h,
            dy=kept.h.new_zeros(1).expand(kept.h.shape) if grads.result.y is None else grads.result.y,
            dresidual=grads.residual,
            x=kept.x,
            pre_bias=kept.pre_bias,
            residual_gate=kept.residual_gate,
            weight=kept.weight,
            bias=kept.bias,
            scale=kept.scale if kept.shift is None else torch.zeros_like(kept.shift),  # as if scaled by 1
            rstd=kept.rstd,
            mean=kept.mean,
            weight_offset=kept.weight_offset,
            casting=kept.casting,
            needs=NormNeeds(
                needs.x or (needs.residual and not gated),
                needs.weight,
                needs.bias,
                needs.scale,
                needs.shift,
                needs.residual and gated,
                needs.residual_gate,
                needs.pre_bias,
            ),
        )
    )
    return {
        "x": found.x if needs.x else None,
        "residual": (found.residual if gated else found.x) if needs.residual else None,
        "pre_bias": found.pre_bias,
        "residual_gate": found.residual_gate,
        "weight": found.weight,
        "bias": found.bias,
        "scale": found.scale,
        "shift": found.shift,
    }


def _shard(a: NormArgs) -> Sharding:
    rows = "... k"
    joint, block = a.result.blocks()
    return Sharding(
        {
            "x": rows,
            "residual": rows,
            "pre_bias": "k",
            "residual_gate": _sample_dims(a.residual_gate),
            "weight": "k",
            "bias": "k",
            "scale": _sample_dims(a.scale),
            "shift": _sample_dims(a.shift),
            "result_scale": "",
        },
        {"result_y": rows, "result_amax": "max:", "residual": rows},
        {"k": "the norm is taken over it", **joint},
        block,
    )


def _sample_dims(part: Tensor | None) -> str:
    """One row for all samples, or one for each, which has the first few of x's dimensions."""
    if part is None or len(part) == 1:
        return "(_) k"
    return f"({' '.join(map(str, range(part.dim() - 1)))}) k"


norm_backward_op = define_op(
    "norm_backward",
    NormBackwardArgs,
    NormGradients,
    allocate=_allocate_norm_backward,
    launch=_launch_norm_backward,
    reference=norm_backward_reference,
    present=lambda a: a.needs,
    variants=32,
)

norm_op = define_op(
    "norm",
    NormArgs,
    NormOutputs,
    allocate=_allocate_norm,
    launch=_launch_norm,
    reference=norm_reference,
    present=_present,
    keep=_keep,
    backward=_gradients,
    differentiable=("result_y", "residual"),
    sharding=_shard,
    variants=72,
)


# ---- public functions -----------------------------------------------------------------------------------


def _norm(
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    pre_bias: Tensor | None = None,
    residual_gate: Tensor | None = None,
    modulation: Modulation | None = None,
    casting: Literal["fp32", "llama"] = "fp32",
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    return_plain: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> NormResult:
    shape, device = x.shape, x.device
    if weight is not None:
        check_tensor("weight", weight, FLOATS, device, shape[-1:], note=_ORDER)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, device, shape[-1:], note=_ORDER)
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), device, shape)
        if residual_gate is not None:
            residual_gate = _flat_samples("residual_gate", residual_gate, x)
    elif residual_out is not None or residual_gate is not None:
        name = "residual_gate" if residual_out is None else "residual_out"
        raise ValueError(f"{name}= needs residual=")
    if pre_bias is not None:
        check_tensor("pre_bias", pre_bias, FLOATS, device, shape[-1:])
    if casting not in ("fp32", "llama"):
        raise ValueError(f"casting must be 'fp32' or 'llama'; got {casting!r}")
    scale = shift = gate = None
    if modulation is not None:
        scale, shift, gate = _split_modulation(modulation, x)
    stats = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (pre_bias is not None and pre_bias.requires_grad)
        or (residual_gate is not None and residual_gate.requires_grad)
        or (scale is not None and scale.requires_grad)
        or (shift is not None and shift.requires_grad)
    )
    options = result_options(
        x,
        quantize,
        rowwise=rowwise,
        columnwise=columnwise,
        quant_scale=quant_scale,
        return_amax=return_amax,
        return_plain=return_plain,
        out_dtype=out_dtype,
    )
    weight_offset = real("weight_offset", weight_offset)
    a = NormArgs(
        x,
        weight,
        bias,
        residual,
        pre_bias,
        residual_gate,
        scale,
        shift,
        eps,
        weight_offset,
        kind,
        casting,
        stats,
        options,
    )
    if out is None and residual_out is None:
        o = norm_op(a)
    else:
        o = result_into(norm_op, a, out, residual=residual_out)
    if residual is None and gate is None and options.format is None:
        return o.result.y
    value, plain = o.result.value(options), o.result.y if return_plain else None
    h = None if residual is None else o.residual
    found = tuple([t for t in (value, plain, h, gate, o.result.amax) if t is not None])
    return value if len(found) == 1 else found


@norm_like(_norm)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    **options: Any,
) -> NormResult:
    """RMSNorm over the last dimension: `y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias`.

    x: [..., K] in bf16, fp16 or fp32, of any strides (heads of a packed QKV included). weight, bias: [K], in any
    of these dtypes. Returns y, or a tuple of y and those of the following that were asked for, in this order.

    - `return_plain` (with `quantize`): y in `out_dtype` beside the quantised one, rounded from the same fp32 numbers.
    - `residual` [..., K]: h = x + residual, rounded to x's dtype, is normalised and also returned. Otherwise h = x.
    - `pre_bias` [K], such as that of the projection before: x + pre_bias takes the place of x. It is not rounded
      before the residual is added.
    - `residual_gate` [..., K], per row or per sample as a modulation: h = residual + (x + pre_bias) * residual_gate.
    - `modulation`: `(scale, shift)`, each [..., K] with the leading dimensions of x (per row) or the first few of
      them (per sample): y = y * (1 + scale) + shift. Packed into one tensor [..., 2K], or [..., 3K] whose last
      third, the gate for the next residual add, is returned.
    - `return_amax` (with `quantize`): the largest |y|, an fp32 scalar on the device, for delayed scaling.

    - `eps`: None is what it is to `torch.nn.RMSNorm`, the eps of fp32 (of fp64 for an x in fp64).
    - `weight_offset`: 1 for weights stored around zero, as Gemma does.
    - `casting`: "fp32" rounds once, at the end; "llama" rounds the normalised h to x's dtype before the weight.
    - `out_dtype`: of y, x's by default. With `return_plain` also that which the `QTensor` stands for.
    - `quantize`: a `Format` or its name; y is then a `QTensor` made from the fp32 y without another rounding.
      `rowwise` and `columnwise` choose its copies; the row-wise one is the same with a column-wise one and without.
      `quant_scale` is a given scale (static or delayed) for block "tensor".
    - `out`, `residual_out`: write into these instead of new tensors; not with autograd. `residual_out` may be
      `residual` itself.

    >>> import torch, weft
    >>> x, weight = torch.randn(8, 256, dtype=torch.bfloat16), torch.ones(256)
    >>> y = weft.rms_norm(x, weight)
    >>> q, h = weft.rms_norm(x, weight, residual=x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([8, 256]), torch.Size([256, 8]))
    """
    check_input("x", x)
    return _norm("rms", x, weight, bias, epsilon(eps, x), **options)


@norm_like(_norm)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, **options: Any
) -> NormResult:
    """LayerNorm over the last dimension: `y = (h - mean(h)) / sqrt(var(h) + eps) * (weight + weight_offset) + bias`.

    Arguments and results are those of `rms_norm`; eps is a number.

    >>> import torch, weft
    >>> x = torch.randn(2, 16, 128)
    >>> modulation = torch.randn(2, 3 * 128)  # scale, shift and gate of each sample
    >>> y, gate = weft.layer_norm(x, modulation=modulation)
    >>> gate.shape
    torch.Size([2, 128])
    """
    check_input("x", x)
    return _norm("layer", x, weight, bias, epsilon(real("eps", eps), x), **options)


# What to do about another library's order of arguments.
_ORDER = "Arguments are (x, weight, bias), and eps= by its name; no shape is given: the last dimension is normalised"


def _split_modulation(
    modulation: Modulation, x: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """scale and shift as [samples, K], and the gate as it was packed."""
    cols = x.shape[-1]
    gate = None
    if is_tensor(modulation):
        check_input("modulation", modulation)
        parts = modulation.shape[-1] // max(cols, 1)
        if modulation.shape[-1] != parts * cols or parts not in (2, 3):
            raise ValueError(
                f"a packed modulation ends in {2 * cols} (scale, shift) or {3 * cols} (scale, shift, gate); "
                f"got {modulation.shape[-1]}"
            )
        scale, shift, *rest = modulation.split(cols, dim=-1)
        gate = rest[0] if rest else None
    elif isinstance(modulation, (tuple, list)) and len(modulation) == 2:
        scale, shift = modulation
    else:
        raise TypeError(
            "modulation must be (scale, shift), two tensors, or one in which they are packed; got "
            f"a {type(modulation).__name__}"
        )
    scale = None if scale is None else _flat_samples("modulation's scale", scale, x)
    shift = None if shift is None else _flat_samples("modulation's shift", shift, x)
    if scale is not None and shift is not None and scale.shape != shift.shape:
        raise ValueError(
            f"scale and shift must have one shape; got {tuple(scale.shape)}, {tuple(shift.shape)}"
        )
    return scale, shift, gate


def _flat_samples(name: str, part: Tensor, x: Tensor) -> Tensor:
    """What has a row for each row of x or for each sample, as [samples, K]."""
    check_tensor(name, part, FLOATS, x.device)
    cols = x.shape[-1]
    lead = list(part.shape[:-1])
    while lead and lead[-1] == 1 and len(lead) > 1:
        lead.pop()
    per_row = list(x.shape[:-1])
    if part.shape[-1:] != x.shape[-1:] or (per_row[: len(lead)] != lead and lead != [1]):
        raise ValueError(
            f"{name} must be [..., {cols}] with leading dimensions {tuple(per_row)} (per row) or the first of them "
            f"(per sample); got {tuple(part.shape)}"
        )
    # Of DTensors the shards are joined into rows, by each rank its own.
    return part.reshape(*(lead if is_distributed(x, part) else [-1]), cols)
