"""Kernels of RMSNorm and LayerNorm. The docstring of `norm.py` has the formulas and their names."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles import amax, encode, fp32_scale, larger, merge_moments, scaled
from ..common.copies import (
    Encoding,
    StridedCodes,
    Stripe,
    Tile,
    load_scale_source,
    store_codes,
    store_rows,
    store_stripe,
    tensor_factor,
)
from ..common.loads import load_tile, load_vector, round_promoted, row_offset, tile_mask
from ..common.passes import FP32_MAX
from ..common.sums import add_to

# ---- kernel arguments -----------------------------------------------------------------------------------


class Size(NamedTuple):
    rows: int
    cols: int


class Samples(NamedTuple):
    """Mapping from the rows of x to the rows of a tensor [samples, cols]. A sample may be one row."""

    stride: int
    rows: int  # rows of x per sample


class Source(NamedTuple):
    """Terms of h. Row r of x lies at (r // inner) * outer_stride + (r % inner) * inner_stride."""

    x: Tensor  # [rows, cols]
    residual: Tensor | None  # [rows, cols]
    pre_bias: Tensor | None  # [cols]
    gate: Tensor | None  # [samples, cols], with a residual
    inner: int
    outer_stride: int
    inner_stride: int
    residual_stride: int
    gated: Samples


class Formula(NamedTuple):
    """Tensors that turn the normalized h into y."""

    weight: Tensor | None  # [cols]
    bias: Tensor | None  # [cols]
    scale: Tensor | None  # [samples, cols]
    shift: Tensor | None  # [samples, cols]
    modulated: Samples
    weight_offset: float


class Statistics(NamedTuple):
    rstd: Tensor | None  # [rows]: 1 / rms or 1 / deviation of each row
    mean: Tensor | None  # [rows]: mean of each row of a LayerNorm


class Stored(NamedTuple):
    """Outputs that are computed from h and y."""

    given: Tensor | None  # a scalar: amax of y, or the scale with STATIC
    y: Tensor | None  # [rows, cols]
    h: Tensor | None  # [rows, cols]
    amax: Tensor | None  # [programs]: the largest |y| of each program
    codes: StridedCodes  # row-wise


class Programs(NamedTuple):
    """Assignment of rows to the programs of a backward. All rows of a program belong to one sample."""

    sample_rows: int  # rows of a sample; without per-sample tensors all rows are one sample
    sample_programs: int  # programs per sample
    program_rows: int  # rows per program
    cols: int


class Upstream(NamedTuple):
    """Inputs of the gradient of h."""

    h: Tensor  # [rows, cols]; with UNROUNDED the residual, to which the other terms are added again
    dy: Tensor  # [rows, cols]
    dresidual: Tensor | None  # [rows, cols], the gradient of h itself
    inner: int
    h_outer_stride: int
    h_inner_stride: int
    dy_outer_stride: int
    dy_inner_stride: int
    dresidual_stride: int


class Added(NamedTuple):
    """Terms that were multiplied by the gate and added to the residual: read for the gradient of the gate, and to
    recompute the sum."""

    x: Tensor | None  # [rows, cols]
    pre_bias: Tensor | None  # [cols]
    gate: Tensor | None  # [samples, cols]
    x_stride: int
    gated: Samples


class StoredGradients(NamedTuple):
    """Gradients [rows, cols], and fp32 partial sums [programs, cols]. Gradients of per-sample tensors are partial sums,
    unless each row is a sample."""

    x: Tensor | None  # [rows, cols]
    weight: Tensor | None  # partial sums
    bias: Tensor | None  # partial sums
    scale: Tensor | None  # per sample
    shift: Tensor | None  # per sample
    residual: Tensor | None  # [rows, cols]; None without a gate, if it equals the gradient of x
    gate: Tensor | None  # per sample
    pre_bias: Tensor | None  # partial sums


# ---- arguments of device functions ----------------------------------------------------------------------


class Columns(NamedTuple):
    """Columns of a tile, and the mask of its elements."""

    col: Any  # [C]
    mask: Any  # [R, C], or None if all do
    cols: Any  # number of columns of the tensor; None if no column needs a mask


class Offsets(NamedTuple):
    """Offsets of the rows of a tile in each tensor, int64 [R]."""

    x: Any
    residual: Any
    gate: Any
    modulation: Any
    y: Any  # in contiguous tensors


class BackwardOffsets(NamedTuple):
    h: Any
    dy: Any
    dresidual: Any
    x: Any
    gate: Any
    modulation: Any
    dx: Any  # in contiguous tensors


class Moments(NamedTuple):
    """Statistics of the rows of a tile, [R]."""

    mean: Any  # None for an RMSNorm
    rstd: Any


class Sums(NamedTuple):
    """Location of a program's partial sums."""

    off: Any  # offset in memory, or None if they are in registers
    more: Any  # earlier rows have been added already
    col: Any
    cols: Any


@triton.jit
def _load_vector(ptr, tile):
    """Load this tile's columns of a length-`cols` vector as fp32 [1, C]."""
    return load_vector(ptr, tile.col, tile.cols, tile.cols is not None)


@triton.jit
def _store_tile(ptr, value, mask):
    """Store fp32 values, rounded once to the dtype that ptr points to."""
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


# ---- forward --------------------------------------------------------------------------------------------


@triton.jit
def _load_h(source, at, tile, UNROUNDED: tl.constexpr):
    """Load h [R, C] as fp32, rounded to its dtype if it is a sum, unless UNROUNDED."""
    h = load_tile(source.x + at.x[:, None] + tile.col[None, :], tile.mask)
    if source.pre_bias is not None:
        h += _load_vector(source.pre_bias, tile)
    if source.gate is not None:
        h *= load_tile(source.gate + at.gate[:, None] + tile.col[None, :], tile.mask)
    if source.residual is not None:
        h += load_tile(source.residual + at.residual[:, None] + tile.col[None, :], tile.mask)
    if (source.residual is not None or source.pre_bias is not None) and not UNROUNDED:
        h = round_promoted(h, source.x, source.residual)
    return h


@triton.jit
def _load_again(source, stored, at, tile, UNROUNDED: tl.constexpr):
    """Reload h, from its stored copy if there is one and the rounded h is wanted."""
    if stored.h is not None and not UNROUNDED:
        return load_tile(stored.h + at.y[:, None] + tile.col[None, :], tile.mask)
    else:
        return _load_h(source, at, tile, UNROUNDED)


@triton.jit
def _sample_offset(row, samples, ALIGN: tl.constexpr):
    return tl.multiple_of((row // samples.rows) * samples.stride, ALIGN)


@triton.jit
def _statistics(h, mask, count, LAYER: tl.constexpr):
    """Return (mean, sum of squared deviations) of each row of a tile with `count` elements; rms deviates from 0."""
    if LAYER:
        mean = tl.sum(h, axis=1) / count
        centered = h - mean[:, None]
        if mask is not None:
            centered = tl.where(mask, centered, 0.0)  # a masked lane would add mean^2
        return mean, tl.sum(centered * centered, axis=1)
    else:
        return tl.zeros((h.shape[0],), tl.float32), tl.sum(h * h, axis=1)


@triton.jit
def _affine(h, moments, formula, modulation_off, tile, source, LLAMA: tl.constexpr):
    """Compute y [R, C] from h, zero where there is no element. `source` supplies the dtype of h."""
    y = h
    if moments.mean is not None:
        y = y - moments.mean[:, None]
    y = y * moments.rstd[:, None]
    if LLAMA:
        y = round_promoted(y, source.x, source.residual)
    if formula.weight is not None:
        y = y * (_load_vector(formula.weight, tile) + formula.weight_offset)
    if formula.bias is not None:
        y = y + _load_vector(formula.bias, tile)
    if formula.scale is not None:
        y = y * (1.0 + load_tile(formula.scale + modulation_off[:, None] + tile.col[None, :], tile.mask))
    if formula.shift is not None:
        y = y + load_tile(formula.shift + modulation_off[:, None] + tile.col[None, :], tile.mask)
    if tile.mask is not None:
        y = tl.where(tile.mask, y, 0.0)
    return y


@kernel
def norm_kernel(
    size: Size,
    source: Source,
    formula: Formula,
    statistics: Statistics,  # written, or read if KNOWN
    stored: Stored,
    eps: float,
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    UNROUNDED: tl.constexpr,  # the sum is normalized before its rounding to h
    FORMAT: tl.constexpr,  # of the quantized copy, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    KNOWN: tl.constexpr,  # the statistics are read
    ROWS: tl.constexpr,  # rows per program
    TILE: tl.constexpr,  # columns at a time; all of them unless LOOP
    LOOP: tl.constexpr,
    NESTED: tl.constexpr,  # x has two row strides
    ALIGN: tl.constexpr,  # divides cols and all row strides
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """Normalize ROWS whole rows per program: store y or its row-wise copy, or only h and the statistics."""
    rows = size.rows
    cols = (size.cols // ALIGN) * ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    at = Offsets(
        row_offset(row, source.inner, source.outer_stride, source.inner_stride, NESTED, ALIGN),
        tl.multiple_of(row * source.residual_stride, ALIGN),
        _sample_offset(row, source.gated, ALIGN),
        _sample_offset(row, formula.modulated, ALIGN),
        tl.multiple_of(row * cols, ALIGN),
    )
    lane = tl.arange(0, TILE)
    # Without any output computed from y, only the statistics are stored.
    NEEDS_Y: tl.constexpr = stored.y is not None or stored.amax is not None or FORMAT is not None
    # If the sum is recomputed, h must not be stored before that: it may overwrite x or the residual.
    LATE: tl.constexpr = UNROUNDED and NEEDS_Y

    mean = None
    if KNOWN:
        rstd = tl.load(statistics.rstd + row, mask=row < rows, other=0.0)
        if LAYER:
            mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0)
    elif LOOP:
        mean = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols, TILE):
            col = start + lane
            mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            h = _load_h(source, at, Columns(col, mask, cols if COLS_MASKED else None), UNROUNDED)
            if stored.h is not None and not LATE:
                _store_tile(stored.h + at.y[:, None] + col[None, :], h, mask)
            count = tl.minimum(cols - start, TILE).to(tl.float32)
            tile_mean, tile_squares = _statistics(h, mask, count, LAYER)
            if LAYER:
                _, mean, squares = merge_moments(
                    tl.cast(start, tl.float32), mean, squares, count, tile_mean, tile_squares
                )
            else:
                squares += tile_squares
    if not LOOP:
        mask = tile_mask(row, lane, rows, cols, ROWS_MASKED, COLS_MASKED)
        h = _load_h(source, at, Columns(lane, mask, cols if COLS_MASKED else None), UNROUNDED)  # [ROWS, TILE]
        if stored.h is not None:
            _store_tile(stored.h + at.y[:, None] + lane[None, :], h, mask)
        if not KNOWN:
            mean, squares = _statistics(h, mask, cols.to(tl.float32), LAYER)
    if not KNOWN:
        rstd = tl.div_rn(
            tl.full((ROWS,), 1.0, tl.float32),
            tl.sqrt_rn(tl.div_rn(squares, tl.zeros((ROWS,), tl.float32) + cols.to(tl.float32)) + eps),
        )
        if statistics.rstd is not None:
            tl.store(statistics.rstd + row, rstd, mask=row < rows)
        if statistics.mean is not None:
            tl.store(statistics.mean + row, mean, mask=row < rows)

    if NEEDS_Y:
        moments = Moments(mean if LAYER else None, rstd)
        scale_source = load_scale_source(stored.given, stored.codes.scale, None, STATIC)

        BY_ROW: tl.constexpr = False if FORMAT is None else FORMAT.block == "row"
        BY_TENSOR: tl.constexpr = False if FORMAT is None else FORMAT.block == "tensor"
        if LOOP and stored.h is not None and not LATE:
            tl.debug_barrier()  # below, h is read back from where it was stored
        if BY_ROW and LOOP:  # the codes of a row need its largest |y| first
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                tile = Columns(col, mask, cols if COLS_MASKED else None)
                h = _load_again(source, stored, at, tile, UNROUNDED)
                y = _affine(h, moments, formula, at.modulation, tile, source, LLAMA)
                largest = larger(largest, amax(y, axis=1))

        program_amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols if LOOP else 1, TILE):
            col = start + lane
            exists = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
            tile = Columns(col, exists, cols if COLS_MASKED else None)
            if LOOP:
                value = _load_again(source, stored, at, tile, UNROUNDED)
                if stored.h is not None and LATE:
                    _store_tile(stored.h + at.y[:, None] + col[None, :], value, exists)
            else:
                value = h
            y = _affine(value, moments, formula, at.modulation, tile, source, LLAMA)
            if stored.amax is not None:
                program_amax = larger(program_amax, amax(y, axis=1))
            if stored.y is not None:
                _store_tile(stored.y + at.y[:, None] + col[None, :], y, exists)
            if BY_ROW or BY_TENSOR:
                if BY_TENSOR:
                    factor = tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC))
                    codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
                else:
                    if not LOOP:
                        largest = amax(y, axis=1)
                    row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
                    codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
                    tl.store(stored.codes.scale + row, row_scale, mask=row < rows)
                store_codes(
                    codes, stored.codes, Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED), FORMAT
                )
            elif FORMAT is not None:
                store_rows(
                    y,
                    stored.codes,
                    Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                    Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC),
                )
        if stored.amax is not None:
            tl.store(stored.amax + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def norm_stripe_kernel(
    size: Size,
    source: Source,  # x, or h instead of x; with a residual only if UNROUNDED
    formula: Formula,
    statistics: Statistics,
    stored: Stored,  # neither y nor h
    codes_t: StridedCodes,  # column-wise
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    UNROUNDED: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    ROWS: tl.constexpr,  # rows of a stripe: the longest group along M
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Store both copies of a tile as tall as the longest group, from the same registers. An earlier pass has stored the
    statistics of the rows."""
    rows = size.rows
    cols = (size.cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    tile = Columns(col, mask, cols if COLS_MASKED else None)
    at = Offsets(
        row_offset(row, source.inner, source.outer_stride, source.inner_stride, NESTED, ALIGN),
        tl.multiple_of(row * source.residual_stride, ALIGN),
        _sample_offset(row, source.gated, ALIGN),
        _sample_offset(row, formula.modulated, ALIGN),
        None,
    )
    h = _load_h(source, at, tile, UNROUNDED)  # [ROWS, TILE]
    rstd = tl.load(statistics.rstd + row, mask=row < rows, other=0.0)
    if LAYER:
        mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0)
    else:
        mean = None
    y = _affine(h, Moments(mean, rstd), formula, at.modulation, tile, source, LLAMA)
    scale_source = load_scale_source(stored.given, stored.codes.scale, codes_t.scale, STATIC)
    store_stripe(
        y,
        stored.codes,
        codes_t,
        Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
        Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC),
    )
    if stored.amax is not None:
        tl.store(stored.amax + tl.program_id(0), amax(amax(y, axis=1), axis=0))


# ---- backward -------------------------------------------------------------------------------------------


@kernel
def norm_backward_kernel(
    programs: Programs,
    upstream: Upstream,
    formula: Formula,  # the bias is read only for the gradient of scale, and shift is not read
    statistics: Statistics,
    added: Added,
    gradients: StoredGradients,
    LAYER: tl.constexpr,
    LLAMA: tl.constexpr,
    UNROUNDED: tl.constexpr,  # the sum was normalized before its rounding to h
    PER_ROW: tl.constexpr,  # each row has its own modulation
    GATE_PER_ROW: tl.constexpr,  # each row has its own gate
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LOOP: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute the gradients of a run of rows of one sample, and the sums over them.

    Without LOOP the sums stay in registers until the last row. With LOOP they are in the program's own row of the
    partial sums, which it reads and writes for each of its rows.
    """
    cols = (programs.cols // ALIGN) * ALIGN
    program = tl.program_id(0).to(tl.int64)
    sample = program // programs.sample_programs
    sample_begin = sample * programs.sample_rows
    gate_row = sample_begin // added.gated.rows
    modulation_row = sample_begin // formula.modulated.rows
    sums_off = tl.multiple_of(program * cols, ALIGN)
    first = (program % programs.sample_programs) * programs.program_rows
    last = tl.minimum(first + programs.program_rows, programs.sample_rows)
    lane = tl.arange(0, TILE)
    ROWS_MASKED: tl.constexpr = ROWS > 1
    count = cols.to(tl.float32)

    sum_weight = tl.zeros((TILE,), tl.float32)
    sum_bias = tl.zeros((TILE,), tl.float32)
    sum_scale = tl.zeros((TILE,), tl.float32)
    sum_shift = tl.zeros((TILE,), tl.float32)
    sum_gate = tl.zeros((TILE,), tl.float32)
    sum_pre_bias = tl.zeros((TILE,), tl.float32)
    for begin in range(first, last, ROWS):
        local_row = begin + tl.arange(0, ROWS)  # [ROWS], within the sample
        row = sample_begin + local_row
        at = BackwardOffsets(
            row_offset(row, upstream.inner, upstream.h_outer_stride, upstream.h_inner_stride, NESTED, ALIGN),
            row_offset(
                row, upstream.inner, upstream.dy_outer_stride, upstream.dy_inner_stride, NESTED, ALIGN
            ),
            tl.multiple_of(row * upstream.dresidual_stride, ALIGN),
            tl.multiple_of(row * added.x_stride, ALIGN),
            tl.multiple_of((row if GATE_PER_ROW else row * 0 + gate_row) * added.gated.stride, ALIGN),
            tl.multiple_of((row if PER_ROW else row * 0 + modulation_row) * formula.modulated.stride, ALIGN),
            tl.multiple_of(row * cols, ALIGN),
        )
        rstd = tl.load(statistics.rstd + row, mask=local_row < last, other=0.0)
        if LAYER:
            mean = tl.load(statistics.mean + row, mask=local_row < last, other=0.0)
        else:
            mean = None
        moments = Moments(mean, rstd)

        tz = tl.zeros((ROWS,), tl.float32)  # sum over the row of t * z
        ts = tl.zeros((ROWS,), tl.float32)  # sum over the row of t
        if LOOP:
            for start in range(0, cols, TILE):
                col = start + lane
                mask = tile_mask(local_row, col, last, cols, ROWS_MASKED, COLS_MASKED)
                tile = Columns(col, mask, cols if COLS_MASKED else None)
                z, _, _, t = _gradient_of_z(upstream, at, formula, moments, added, tile, UNROUNDED)
                tz += tl.sum(t * z, axis=1)
                if LAYER:
                    ts += tl.sum(t, axis=1)

        for start in range(0, cols if LOOP else 1, TILE):
            col = start + lane
            mask = tile_mask(local_row, col, last, cols, ROWS_MASKED, COLS_MASKED)
            tile = Columns(col, mask, cols if COLS_MASKED else None)
            z, dy, d, t = _gradient_of_z(upstream, at, formula, moments, added, tile, UNROUNDED)
            if not LOOP:
                tz = tl.sum(t * z, axis=1)
                if LAYER:
                    ts = tl.sum(t, axis=1)
            dx_off = at.dx[:, None] + col[None, :]
            sums = Sums(sums_off if LOOP else None, begin > first, col, cols)

            dh = t - z * (tz / count)[:, None]
            if LAYER:
                dh -= (ts / count)[:, None]
            dh = dh * rstd[:, None]
            if upstream.dresidual is not None:
                dh += load_tile(upstream.dresidual + at.dresidual[:, None] + col[None, :], mask)
            if gradients.residual is not None:
                _store_tile(gradients.residual + dx_off, dh, mask)
            if gradients.gate is not None:
                v = _load_added(added, at, tile)
                sum_gate = _add_or_store(sum_gate, dh * v, gradients.gate, dx_off, mask, sums, GATE_PER_ROW)
            dv = dh
            if added.gate is not None:
                dv = dh * load_tile(added.gate + at.gate[:, None] + col[None, :], mask)
            if gradients.x is not None:
                _store_tile(gradients.x + dx_off, dv, mask)
            sum_pre_bias = _add_rows(sum_pre_bias, dv, gradients.pre_bias, sums)

            if LLAMA:  # if added.x has another dtype than h, h is fp32
                z = round_promoted(z, upstream.h, added.x)
            sum_weight = _add_rows(sum_weight, d * z, gradients.weight, sums)
            sum_bias = _add_rows(sum_bias, d, gradients.bias, sums)
            if gradients.scale is not None:
                y = z
                if formula.weight is not None:
                    y = y * (_load_vector(formula.weight, tile) + formula.weight_offset)
                if formula.bias is not None:
                    y = y + _load_vector(formula.bias, tile)
                sum_scale = _add_or_store(sum_scale, dy * y, gradients.scale, dx_off, mask, sums, PER_ROW)
            if gradients.shift is not None:
                sum_shift = _add_or_store(sum_shift, dy, gradients.shift, dx_off, mask, sums, PER_ROW)
    if not LOOP:
        at_sums = sums_off + lane
        exists = lane < cols
        _store_sum(gradients.weight, at_sums, sum_weight, exists)
        _store_sum(gradients.bias, at_sums, sum_bias, exists)
        _store_sum(gradients.pre_bias, at_sums, sum_pre_bias, exists)
        if not PER_ROW:
            _store_sum(gradients.scale, at_sums, sum_scale, exists)
            _store_sum(gradients.shift, at_sums, sum_shift, exists)
        if not GATE_PER_ROW:
            _store_sum(gradients.gate, at_sums, sum_gate, exists)


@triton.jit
def _load_added(added, at, tile):
    """Load v [R, C], as named in the formulas of `norm.py`."""
    v = load_tile(added.x + at.x[:, None] + tile.col[None, :], tile.mask)
    if added.pre_bias is not None:
        v += _load_vector(added.pre_bias, tile)
    return v


@triton.jit
def _gradient_of_z(upstream, at, formula, moments, added, tile, UNROUNDED: tl.constexpr):
    """Return (z, dy, d, t) [R, C], as named in the formulas of `norm.py`, zero where there is no element."""
    z = load_tile(upstream.h + at.h[:, None] + tile.col[None, :], tile.mask)
    if UNROUNDED:
        v = _load_added(added, at, tile)
        if added.gate is not None:
            v *= load_tile(added.gate + at.gate[:, None] + tile.col[None, :], tile.mask)
        z += v
    if moments.mean is not None:
        z = z - moments.mean[:, None]
    z = z * moments.rstd[:, None]
    if moments.mean is not None and tile.mask is not None:
        z = tl.where(tile.mask, z, 0.0)
    dy = load_tile(upstream.dy + at.dy[:, None] + tile.col[None, :], tile.mask)
    d = dy
    if formula.scale is not None:
        d = d * (1.0 + load_tile(formula.scale + at.modulation[:, None] + tile.col[None, :], tile.mask))
    t = d
    if formula.weight is not None:
        t = t * (_load_vector(formula.weight, tile) + formula.weight_offset)
    return z, dy, d, t


@triton.jit
def _add_rows(total, value, sums_ptr, sums):
    """Add the sum over the rows of a tile to `total`, or to the partial sums if they are in memory."""
    if sums_ptr is not None:
        if sums.off is not None:
            add_to(sums_ptr + sums.off, tl.sum(value, axis=0), sums.more, sums.col, sums.cols)
        else:
            total += tl.sum(value, axis=0)
    return total


@triton.jit
def _add_or_store(total, value, ptr, off, mask, sums, PER_ROW: tl.constexpr):
    """Add up the gradient of a per-sample tensor, or store it if each row is a sample."""
    if PER_ROW:
        _store_tile(ptr + off, value, mask)
    else:
        total = _add_rows(total, value, ptr, sums)
    return total


@triton.jit
def _store_sum(sums_ptr, off, total, exists):
    if sums_ptr is not None:
        tl.store(sums_ptr + off, total, mask=exists)
