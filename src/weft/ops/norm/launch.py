"""Launches of norms, and the choice of their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import (
    BoundLaunch,
    Capabilities,
    Launch,
    capabilities_of,
    choice,
    contiguous_copy,
    remembered,
    scratch,
)
from ..common.copies import cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.passes import make_copies
from ..common.rows import STRIPE, align_of, contiguous, cpu_tile, one_stride, row_strides, tile_warps
from ..common.sums import sum_partials
from .arguments import NormArgs, NormBackwardArgs, NormGradients, NormOutputs
from .kernels import (
    Added,
    Formula,
    Programs,
    Samples,
    Size,
    Source,
    Stored,
    Upstream,
    norm_backward_kernel,
    norm_kernel,
    norm_stripe_kernel,
)


class RowConfig(NamedTuple):
    """Tiling of rows: `rows` per program, `tile` columns at a time, in a loop over longer rows."""

    rows: int
    tile: int
    num_warps: int


@choice("norm.rows", rows=(1, 64), tile=(64, 16384), num_warps=(1, 16))
def row_config(cols: int, smallest_tile: int, target: Capabilities) -> RowConfig:
    # The smallest power of two that holds the row, as far as registers allow.
    tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
    if target.is_cpu:
        # Quantized rows in chunks of 1024, plain rows in chunks of 512: 1.05 times as fast as the other way round.
        return RowConfig(1, cpu_tile(cols, smallest_tile, 1024 if smallest_tile > 1 else 512), 4)
    tile = min(tile, 8192 if tile > 16384 else 16384)
    rows = max(1, 2048 // tile)
    # Compiled for sm_90: 32 to 48 registers.
    return RowConfig(rows, tile, tile_warps(rows * tile, target))


@choice("norm.backward", rows=(1, 64), tile=(64, 8192), num_warps=(1, 16))
def backward_config(cols: int, target: Capabilities) -> RowConfig:
    # Two tiles and up to six sums are live at once: use half the columns of the forward.
    tile = max(1 << max(cols - 1, 0).bit_length(), 64)
    if target.is_cpu:
        return RowConfig(1, cpu_tile(cols, largest=4096), 4)
    loop = tile > 8192
    tile = min(tile, 4096 if loop else 8192)
    rows = max(1, 1024 // tile)
    # A loop holds more, so it gets 8 elements per thread (40 registers on sm_90 instead of 80). Compiled for sm_90
    # without a loop: 64 to 123 registers, and 185 with a gate.
    return RowConfig(rows, tile, tile_warps(rows * tile * (2 if loop else 1), target))


class _Operands(NamedTuple):
    """Tensors that the kernels read."""

    x: Tensor
    residual: Tensor | None
    pre_bias: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def members(self, weight_offset: float) -> dict[str, Any]:
        """Return the operands grouped by the kernel structs they belong to."""
        x, residual, pre_bias, gate, weight, bias, scale, shift = self
        return {
            "source": (x, residual, pre_bias, gate),
            "formula": (weight, bias, scale, shift, weight_offset),
        }


class _Layout(NamedTuple):
    """Row strides of the operands: row r of x lies at (r // inner) * outer_stride + (r % inner) * inner_stride."""

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
        """Alignment that divides cols and every row stride: 16, 8 or 1."""
        strides = (self.outer_stride, self.inner_stride, self.residual_stride)
        return align_of(self.cols, *strides, self.gate_stride, self.modulation_stride)

    def members(self) -> dict[str, Any]:
        """Return sizes and strides grouped by the kernel structs they belong to."""
        gated = self.gate_stride, self.rows_per_gate
        return {
            "size": (self.rows, self.cols),
            "source": (self.inner, self.outer_stride, self.inner_stride, self.residual_stride, gated),
            "formula": (self.modulation_stride, self.rows_per_sample),
        }

    def of_h(self) -> _Layout:
        """Return the layout of h, which is contiguous, without a residual or gate."""
        return self._replace(
            inner=1, outer_stride=self.cols, inner_stride=0, residual_stride=0, gate_stride=0, rows_per_gate=1
        )


def _by_sample(part: Tensor | None, rows: int) -> tuple[Tensor | None, int, int]:
    """Return (tensor [samples, K], stride, rows per sample); for None, a sample has at least two rows."""
    if part is None:
        return None, 0, max(rows, 2)
    flat, stride = one_stride(part)
    return flat, stride, rows // part.shape[0]


def _operands_and_layout(a: NormArgs) -> tuple[_Operands, _Layout]:
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
            scale, shift = contiguous(scale), contiguous(shift)
        either = scale if scale is not None else shift
        assert either is not None
        modulation_stride, rows_per_sample = either.stride(0), rows // either.shape[0]
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
    """Options of a pass over rows that determine its launch."""

    format: str | None = None  # of the result
    copy: bool = False  # the row-wise copy is stored
    cast: int = 0
    static: bool = False  # the caller passed the scale
    has_stats: bool = False  # an earlier pass has stored the statistics
    strides: tuple[int, ...] = (0, 0, 0)  # of the codes and scales of the copy


_PLAIN = _Pass()


@remembered
def _rows_launch(
    layout: _Layout,
    kind: str,
    casting: str,
    unrounded: bool,
    target: Capabilities,
    pass_: _Pass = _PLAIN,
    align: int | None = None,
) -> BoundLaunch:
    """Return the launch of a pass over rows; `align` overrides the layout's."""
    format = None if pass_.format is None else Format.of(pass_.format)
    config = row_config(layout.cols, 1 if format is None else format.group, target)
    launch = Launch.of(
        norm_kernel,
        num_warps=config.num_warps,
        LAYER=kind == "layer",
        LLAMA=casting == "llama",
        UNROUNDED=unrounded,
        FORMAT=format if pass_.copy else None,
        CAST=pass_.cast,
        STATIC=pass_.static,
        KNOWN=pass_.has_stats,
        ROWS=config.rows,
        TILE=config.tile,
        # Measured on a CPU with 2048 columns: reading a row twice is 1.1 times as fast as holding it.
        LOOP=target.is_cpu or config.tile < layout.cols,
        NESTED=layout.inner > 1,
        ALIGN=align or layout.align,
        COLS_MASKED=layout.cols % config.tile != 0,
    )
    return launch.bind((-(-layout.rows // config.rows), 1, 1), **layout.members(), stored=pass_.strides)


def launch_norm(o: NormOutputs, a: NormArgs) -> None:
    operands, layout = _operands_and_layout(a)
    if a.result.format is not None:
        _Quantized(o, a, operands, layout).run()
        return
    target = capabilities_of(a.x.device)
    x, residual, pre_bias, gate, weight, bias, scale, shift = operands
    _rows_launch(layout, a.kind, a.casting, a.unrounded_sum, target)(
        *norm_kernel.tensors(
            source=(x, residual, pre_bias, gate),
            formula=(weight, bias, scale, shift, a.weight_offset),
            statistics=(o.rstd, o.mean),
            stored=(None, o.result.y, o.residual, None, (None, None)),
            eps=a.eps,
        )
    )


class _Quantized:
    """Passes of a call with a quantized result."""

    def __init__(self, o: NormOutputs, a: NormArgs, operands: _Operands, layout: _Layout) -> None:
        assert a.result.format is not None
        self.o, self.a, self.operands, self.layout = o, a, operands, layout
        self.align: int | None = None  # of the first pass, for the others too: that of h may be larger
        self.format = Format.of(a.result.format)
        self.target = capabilities_of(a.x.device)
        self.cast, self.static = cast_mode(self.target), a.result.scale is not None
        self.rstd, self.mean = o.rstd, o.mean

    def run(self) -> None:
        f, options = self.format, self.a.result
        direct = f.block != "128x128"
        several = (f.needs_tensor_amax and not self.static) or options.columnwise or not direct
        if several and self.rstd is None:  # the later passes read the statistics
            self.rstd = self._empty(self.layout.rows)
            self.mean = self._empty(self.layout.rows) if self.a.kind == "layer" else None
        if several and self.a.unrounded_sum:
            self._copy_overwritten()
        make_copies(self.o.result, options, self.rows_pass, self.stripes_pass, direct=direct, statistics=True)

    def _empty(self, count: int) -> Tensor:
        return scratch((count,), torch.float32, self.operands.x.device)

    def _copy_overwritten(self) -> None:
        """Copy the terms that the first pass would overwrite with the rounded h, since later passes add them again."""
        h, x, residual = self.o.residual, self.operands.x, self.operands.residual
        assert h is not None
        assert residual is not None
        self.operands = self.operands._replace(
            x=contiguous_copy(x) if x.data_ptr() == h.data_ptr() else x,
            residual=contiguous_copy(residual) if residual.data_ptr() == h.data_ptr() else residual,
        )

    def _read_h(self) -> None:
        """After a pass that stored h, read h instead of its terms."""
        self.align = self.align or self.layout.align
        if self.o.residual is not None and not self.a.unrounded_sum:
            self.operands = self.operands._replace(x=self.o.residual, residual=None, pre_bias=None, gate=None)
            self.layout = self.layout.of_h()

    def rows_pass(
        self, copy: Codes | None, scale_source: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        if has_stats:
            self._read_h()
        a, operands = self.a, self.operands
        data, data_scale, *strides = copy_arguments(copy)
        pass_ = _Pass(a.result.format, copy is not None, self.cast, self.static, has_stats, tuple(strides))
        launch = _rows_launch(self.layout, a.kind, a.casting, a.unrounded_sum, self.target, pass_, self.align)
        partials = self._empty(launch.grid[0]) if wants_amax else None
        # The first pass stores the plain result.
        y = self.o.result.y if a.result.return_plain and not has_stats else None
        if copy is None and partials is None and y is None:  # only the statistics
            operands = operands._replace(weight=None, bias=None, scale=None, shift=None)
        h = None if has_stats else self.o.residual
        launch(
            *norm_kernel.tensors(
                **operands.members(a.weight_offset),
                statistics=(self.rstd, self.mean),
                stored=(scale_source if copy else None, y, h, partials, (data, data_scale)),
                eps=a.eps,
            )
        )
        return partials

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, scale_source: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        self._read_h()
        layout = self.layout
        tile, num_warps = stripe_config("norm", self.format.block, self.align or layout.align, self.target)
        tiles = count_stripes(layout.rows, layout.cols) * -(-layout.cols // tile)
        partials = self._empty(tiles) if wants_amax else None
        launch = Launch.of(
            norm_stripe_kernel,
            num_warps=num_warps,
            LAYER=self.a.kind == "layer",
            LLAMA=self.a.casting == "llama",
            UNROUNDED=self.a.unrounded_sum,
            FORMAT=self.format,
            CAST=self.cast,
            STATIC=self.static,
            ROWS=STRIPE,
            TILE=tile,
            NESTED=layout.inner > 1,
            ALIGN=self.align,
            COLS_MASKED=layout.cols % tile != 0,
        )
        x, residual, pre_bias, gate, weight, bias, scale, shift = self.operands
        gated = Samples(layout.gate_stride, layout.rows_per_gate)
        modulated = Samples(layout.modulation_stride, layout.rows_per_sample)
        launch(
            (tiles, 1, 1),
            *norm_stripe_kernel.arguments(
                size=Size(layout.rows, layout.cols),
                source=Source(
                    x,
                    residual,
                    pre_bias,
                    gate,
                    layout.inner,
                    layout.outer_stride,
                    layout.inner_stride,
                    layout.residual_stride,
                    gated,
                ),
                formula=Formula(weight, bias, scale, shift, modulated, self.a.weight_offset),
                statistics=(self.rstd, self.mean),
                stored=Stored(scale_source, None, None, partials, copy_arguments(row)),
                codes_t=copy_arguments(col),
            ),
        )
        return partials


class _BackwardLayout(NamedTuple):
    """Row strides of the tensors that a backward reads."""

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
        """Alignment that divides cols and every row stride: 16, 8 or 1."""
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


@remembered
def _backward_launch(
    rows: int,
    cols: int,
    layout: _BackwardLayout,
    layer: bool,
    casting: str,
    unrounded: bool,
    target: Capabilities,
) -> tuple[Launch, Programs, int]:
    """Return (launch, assignment of rows to programs, number of programs)."""
    config = backward_config(cols, target)
    # Per-row gradients are stored directly. If there are two sample sizes, the larger is a multiple of the smaller.
    sample_rows = min([rows, *(n for n in (layout.rows_per_sample, layout.rows_per_gate) if n > 1)])
    samples = rows // sample_rows
    wanted = max(1, (target.multiprocessors * 2) // samples)
    sample_programs = min(-(-sample_rows // config.rows), wanted)
    program_rows = -(-sample_rows // sample_programs)
    program_rows = -(-program_rows // config.rows) * config.rows
    sample_programs = -(-sample_rows // program_rows)
    launch = Launch.of(
        norm_backward_kernel,
        num_warps=config.num_warps,
        LAYER=layer,
        LLAMA=casting == "llama",
        UNROUNDED=unrounded,
        PER_ROW=layout.rows_per_sample == 1,
        GATE_PER_ROW=layout.rows_per_gate == 1,
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.tile < cols,
        NESTED=layout.inner > 1,
        ALIGN=layout.align(cols),
        COLS_MASKED=cols % config.tile != 0,
    )
    programs = Programs(sample_rows, sample_programs, program_rows, cols)
    return launch, programs, samples * sample_programs


def launch_norm_backward(o: NormGradients, a: NormBackwardArgs) -> None:
    h, inner, h_outer, h_inner = row_strides(a.h)
    dy, dy_nest, dy_outer, dy_inner = row_strides(a.dy)
    if inner != dy_nest:  # rows are nested in two ways: make both contiguous
        h, inner, h_outer, h_inner = row_strides(contiguous(h))
        dy, _, dy_outer, dy_inner = row_strides(contiguous(dy))
    cols = h.shape[-1]
    rows = h.numel() // cols
    dresidual, dresidual_stride = one_stride(a.dresidual)
    scale, modulation_stride, rows_per_sample = _by_sample(a.scale, rows)
    x, x_stride = one_stride(a.x if a.needs.residual_gate or a.unrounded_sum else None)
    gate, gate_stride, rows_per_gate = _by_sample(a.residual_gate, rows)
    if gate is not None and gate.shape[0] == 1:
        # One gate for all rows, even for a single row, so that the variant does not depend on the number of rows.
        rows_per_gate = max(rows, 2)
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
        rows, cols, layout, a.mean is not None, a.casting, a.unrounded_sum, target
    )

    def partial(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else scratch((count, cols), torch.float32, h.device)

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
    modulated, gated = Samples(modulation_stride, rows_per_sample), Samples(gate_stride, rows_per_gate)
    launch(
        (count, 1, 1),
        *norm_backward_kernel.arguments(
            programs=programs,
            upstream=Upstream(
                h, dy, dresidual, inner, h_outer, h_inner, dy_outer, dy_inner, dresidual_stride
            ),
            formula=Formula(weight, bias, scale, None, modulated, a.weight_offset),
            statistics=(a.rstd, a.mean),
            added=Added(x, pre_bias, gate, x_stride, gated),
            gradients=sums,
        ),
    )
    for grad, partials in zip(o, sums, strict=True):
        if grad is not partials:
            assert grad is not None
            assert partials is not None
            sum_partials(partials, grad, count // (grad.numel() // cols))
