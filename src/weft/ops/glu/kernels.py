"""Kernels of gated linear units: the result and its copies, and the gradients of gate, up, probs and bias."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles import (
    activate,
    activate_with_slope,
    amax,
    at_least,
    at_most,
    encode,
    fp32_scale,
    larger,
    scaled,
)
from ..common.copies import (
    Encoding,
    StridedCodes,
    Stripe,
    Tile,
    from_row,
    load_scale_source,
    store_codes,
    store_rows,
    store_stripe,
    tensor_factor,
)
from ..common.groups import GroupEnds
from ..common.loads import load_stored, mask_of_rows, row_offset
from ..common.passes import FP32_MAX
from ..common.rows import STRIPE
from ..common.spans import group_of, group_stripe, real_rows

STRIPE_ROWS = tl.constexpr(STRIPE)

# ---- structs --------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Rows of a tensor: row r lies at (r // inner) * outer_stride + (r % inner) * inner_stride."""

    ptr: Tensor | None
    outer_stride: int
    inner_stride: int


class UpCodes(NamedTuple):
    """Copies of up's gradient, with the strides of the gate's."""

    data: Tensor | None
    scale: Tensor | None
    data_t: Tensor | None
    scale_t: Tensor | None


class Inputs(NamedTuple):
    """Inputs of a program: gate and up of its rows; or their bias, one for each of its rows or one for all of
    them."""

    gate: Any  # pointer
    gate_off: Any  # [R], row offsets
    up: Any  # pointer, or None if up alternates with the gate or there is no gate
    up_off: Any
    prob: Any  # fp32 [R], or None
    read: Any  # bool [R]: rows that have inputs


class Unit(NamedTuple):
    """Definition of the gated linear unit."""

    alpha: Any
    limit: Any
    up_offset: Any
    ACT: Any
    LIMITED: Any
    INTERLEAVED: Any


class Cut(NamedTuple):
    """Tiling of the columns, and the masks it needs."""

    TILE: Any
    ROWS_MASKED: Any
    COLS_MASKED: Any


class Destination(NamedTuple):
    """Destination of a program's results."""

    row: Any  # int64 [R]
    written: Any  # bool [R]: rows that have results
    stripe: Any  # index of the stripe, for copies stored by stripes
    rows: Any  # end of the tensor's rows, or of the program's
    bound: Any  # end of the rows of the stripe's copies


class Results(NamedTuple):
    """Tensors of one result: plain, or its copies."""

    plain: Any  # pointer, or None
    stride: Any  # of the rows
    copy: Any  # StridedCodes
    copy_t: Any


# ---- reading --------------------------------------------------------------------------------------------


@triton.jit
def _block_of(block, groups, rows, ROWS: tl.constexpr, PLACES: tl.constexpr, STRIPES: tl.constexpr):
    """Return (first row, rows with results, rows with inputs) of a program of up to ROWS rows, int64 scalars."""
    if groups.ends is not None and PLACES != "rows":
        first, exist, real = group_stripe(block, groups, rows, ROWS, PLACES == "slots")
        if PLACES == "slots" and STRIPES:
            first = (first // 16) * 16  # unchanged, but now known to be a multiple of 16
        return first, exist, real
    else:
        first = block * ROWS
        return first, rows - first, rows - first


@triton.jit
def _rows_of_block(first, exist, real, begin, groups, rows, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """Return (row int64 [ROWS], mask of results, mask of inputs) of a program, from its row `begin` on."""
    local_row = begin + tl.arange(0, ROWS)
    if groups.ends is not None and PLACES != "rows":
        return first + local_row, local_row < exist, local_row < real
    else:
        row = first + local_row
        written = row < rows
        read = written
        if groups.ends is not None:
            read = written & real_rows(row, groups)
        return row, written, read


@triton.jit
def _bias_of(
    bias_ptr, first, groups, cols, up_shift, up_ptr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PLACES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the bias of the rows from `first` on, or None: one for each of ROWS rows if they may belong to several
    groups, otherwise one for all."""
    if bias_ptr is None:
        return None
    else:
        width = 2 * cols if INTERLEAVED else cols + up_shift
        if groups.ends is None:
            group = tl.zeros((1,), tl.int64)
            has_bias = group == 0
        else:
            # A stripe within one group has the group of its first row, unless no row is read.
            group = group_of(first + tl.arange(0, ROWS if PLACES == "rows" else 1), groups)
            has_bias = group < groups.number
        off = tl.multiple_of(group * width, ALIGN)
        if up_ptr is None:
            return Inputs(bias_ptr, off, None, off, None, has_bias)
        else:
            return Inputs(bias_ptr, off, bias_ptr, tl.multiple_of(off + up_shift, ALIGN), None, has_bias)


@triton.jit
def _load_prob(prob_ptr, prob_stride, row, read):
    """Load the weights of the rows as fp32 [R], or return None."""
    if prob_ptr is None:
        return None
    else:
        return tl.load(prob_ptr + row * prob_stride, mask=read, other=0.0).to(tl.float32)


@triton.jit
def _load_biased(inputs, bias, start, cols, mask, INTERLEAVED: tl.constexpr, cut):
    """Load (gate, up) [R, C] as fp32 and add their bias, also to rows without input."""
    gate, up = _load_parts(inputs, start, cols, mask, INTERLEAVED, cut)
    if bias is not None:
        col = start + tl.arange(0, cut.TILE)
        mask = mask_of_rows(bias.read, col, cols, True, cut.COLS_MASKED)
        gate_bias, up_bias = _load_parts(
            bias, start, cols, mask, INTERLEAVED, Cut(cut.TILE, True, cut.COLS_MASKED)
        )
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


@triton.jit
def _load_parts(inputs, start, cols, mask, INTERLEAVED: tl.constexpr, cut):
    """Load (gate, up) [R, C] as fp32, zero where there is no input; without a gate, up is unused."""
    if INTERLEAVED:
        ROWS: tl.constexpr = inputs.read.shape[0]
        pair = 2 * start + tl.arange(0, 2 * cut.TILE)
        pairs_mask = mask_of_rows(inputs.read, pair, 2 * cols, cut.ROWS_MASKED, cut.COLS_MASKED)
        pairs = load_stored(inputs.gate + inputs.gate_off[:, None] + pair[None, :], pairs_mask)  # [R, 2 C]
        gate, up = tl.split(tl.reshape(pairs, (ROWS, cut.TILE, 2)))
    else:
        col = start + tl.arange(0, cut.TILE)
        gate = load_stored(inputs.gate + inputs.gate_off[:, None] + col[None, :], mask)
        up = gate
        if inputs.up is not None:
            up = load_stored(inputs.up + inputs.up_off[:, None] + col[None, :], mask)
    return gate.to(tl.float32), up.to(tl.float32)


# ---- forward --------------------------------------------------------------------------------------------


@triton.jit
def _value(inputs, bias, start, cols, unit, cut):
    """Compute y [R, C] in fp32, zero where there is no input."""
    col = start + tl.arange(0, cut.TILE)
    mask = mask_of_rows(inputs.read, col, cols, cut.ROWS_MASKED, cut.COLS_MASKED)
    gate, up = _load_biased(inputs, bias, start, cols, mask, unit.INTERLEAVED, cut)
    if unit.LIMITED:
        gate = at_most(gate, unit.limit)
        up = at_least(at_most(up, unit.limit), -unit.limit)
    y = activate(gate, unit.alpha, unit.ACT)
    if unit.INTERLEAVED or inputs.up is not None:
        y = y * (up + unit.up_offset)
    if inputs.prob is not None:
        y = y * inputs.prob[:, None]
    if mask is not None:
        y = tl.where(mask, y, 0.0)
    return y


@triton.jit
def _store(
    y, to, dest, start, cols, encoding, STRIPES: tl.constexpr, ALIGN: tl.constexpr, COLS_MASKED: tl.constexpr
):
    """Store a tile of a result [rows, cols], fp32 and zero where there is no input: plain, or as copies whose groups
    lie within the tile."""
    ROWS_MASKED: tl.constexpr = y.shape[0] > 1
    if to.plain is not None:
        col = start + tl.arange(0, y.shape[1])
        mask = mask_of_rows(dest.written, col, cols, ROWS_MASKED, COLS_MASKED)
        off = tl.multiple_of(dest.row * to.stride, ALIGN)
        tl.store(to.plain + off[:, None] + col[None, :], y.to(to.plain.dtype.element_ty), mask=mask)
    if to.copy.data is not None or to.copy_t.data is not None:
        if STRIPES:
            store_stripe(
                y,
                to.copy,
                to.copy_t,
                Stripe(dest.stripe, start, dest.bound, cols, ALIGN, COLS_MASKED),
                encoding,
            )
        else:
            store_rows(
                y,
                to.copy,
                Tile(dest.row, start, dest.rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                encoding,
            )


@triton.jit
def _from_slot(copy_t, first, slot, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Return the column-wise copy from a slot on, whose first row is `first`."""
    if copy_t.data is None:
        return copy_t
    else:
        return StridedCodes(
            copy_t.data + first // FORMAT.packed,
            copy_t.scale + slot * (ROWS // FORMAT.group) * copy_t.scale_col_stride,
            copy_t.stride,
            copy_t.scale_row_stride,
            copy_t.scale_col_stride,
        )


@kernel
def glu_kernel(
    rows,
    cols,
    up_shift,  # from the pointer to the first element of up: cols if up follows the gate in one tensor
    inner,
    gate: Rows,  # [rows, cols]; with INTERLEAVED [rows, 2 cols], gate and up alternating
    up: Rows,  # [rows, cols]; absent with INTERLEAVED, and without a gate
    prob_ptr,  # [rows], or None
    prob_stride,
    groups: GroupEnds,
    bias_ptr,  # as wide as gate and up together: [width], with groups [groups, width]; or None
    given_ptr,  # a scalar: amax of y, or the scale with STATIC; or None
    y_ptr,  # [rows, cols], or None
    amax_ptr,  # [programs], or None
    row_programs,
    copy: StridedCodes,  # row-wise
    copy_t: StridedCodes,  # column-wise
    alpha: float,
    limit: float,
    up_offset: float,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    FORMAT: tl.constexpr,  # of the quantized copies, or None
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # the caller passed the tensor's scale
    STRIPES: tl.constexpr,  # ROWS is the longest group of a format along M: column-wise copies are possible
    PLACES: tl.constexpr,  # of padding: any "rows", the end of "stripes", or of "slots" that restart at each group
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ONCE: tl.constexpr,  # one program per tile of the columns
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and all row strides
    COLS_MASKED: tl.constexpr,
):
    """Compute ROWS rows, with tiles dealt to `row_programs` programs; to one if a scale spans a whole row."""
    cols = (cols // ALIGN) * ALIGN
    block = (tl.program_id(0) // row_programs).to(tl.int64)
    first, exist, real = _block_of(block, groups, rows, ROWS, PLACES, STRIPES)
    row, written, read = _rows_of_block(first, exist, real, 0, groups, rows, ROWS, PLACES)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1 or groups.ends is not None
    gate_off = row_offset(row, inner, gate.outer_stride, gate.inner_stride, NESTED, ALIGN)
    up_off = row_offset(row, inner, up.outer_stride, up.inner_stride, NESTED, ALIGN)
    up_off = tl.multiple_of(up_off + up_shift, ALIGN)
    prob = _load_prob(prob_ptr, prob_stride, row, read)
    inputs = Inputs(gate.ptr, gate_off, up.ptr, up_off, prob, read)
    bias = _bias_of(bias_ptr, first, groups, cols, up_shift, up.ptr, ROWS, INTERLEAVED, PLACES, ALIGN)
    stripe = block
    bound = rows.to(tl.int64)
    if PLACES == "slots":  # the copies start at this stripe, which then counts as the first
        copy = from_row(copy, first)
        copy_t = _from_slot(copy_t, first, block, ROWS, FORMAT)
        stripe = block * 0
        bound = exist
    dest = Destination(row, written, stripe, rows, bound)

    BY_ROW: tl.constexpr = False if FORMAT is None else FORMAT.block == "row"
    BY_TENSOR: tl.constexpr = False if FORMAT is None else FORMAT.block == "tensor" and not STRIPES
    scale_source = load_scale_source(given_ptr, copy.scale, copy_t.scale, STATIC)
    if BY_ROW:  # the codes of a row need its largest |y| first
        largest = tl.zeros((ROWS,), tl.float32)
        for start in range(0, cols, TILE):
            y = _value(
                inputs,
                bias,
                start,
                cols,
                Unit(alpha, limit, up_offset, ACT, LIMITED, INTERLEAVED),
                Cut(TILE, ROWS_MASKED, COLS_MASKED),
            )
            largest = larger(largest, amax(y, axis=1))
        row_scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
        tl.store(copy.scale + row, row_scale, mask=written)

    program_amax = tl.zeros((ROWS,), tl.float32)
    part = tl.program_id(0) % row_programs
    for step in range(1 if ONCE else tl.cdiv(tl.cdiv(cols, TILE) - part, row_programs)):
        start = (part + step * row_programs) * TILE
        y = _value(
            inputs,
            bias,
            start,
            cols,
            Unit(alpha, limit, up_offset, ACT, LIMITED, INTERLEAVED),
            Cut(TILE, ROWS_MASKED, COLS_MASKED),
        )
        if amax_ptr is not None:
            program_amax = larger(program_amax, amax(y, axis=1))
        if BY_ROW or BY_TENSOR:
            if BY_ROW:
                codes = encode(scaled(y, factor[:, None], FORMAT), FORMAT, CAST)
            else:
                factor = tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC))
                codes = encode(scaled(y, factor, FORMAT), FORMAT, CAST)
            store_codes(codes, copy, Tile(row, start, rows, cols, ALIGN, ROWS > 1, COLS_MASKED), FORMAT)
        else:
            _store(
                y,
                Results(y_ptr, cols, copy, copy_t),
                dest,
                start,
                cols,
                Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC),
                STRIPES,
                ALIGN,
                COLS_MASKED,
            )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


# ---- backward -------------------------------------------------------------------------------------------


@triton.jit
def _gradients_of(
    gate, up, dy, prob, mask, unit, GATED: tl.constexpr, GROUPED: tl.constexpr, BIASED: tl.constexpr
):
    """Return (dgate, dup, terms of dprob) [R, C] in fp32, zero where there is no dy, and never a negative zero in
    padding. Rows without dy still have a bias, whose activation need not be finite."""
    a, g = gate, up
    if unit.LIMITED:
        a = at_most(gate, unit.limit)
        g = at_least(at_most(up, unit.limit), -unit.limit)
    f, slope = activate_with_slope(a, unit.alpha, unit.ACT)
    w = dy
    if prob is not None:
        w = dy * prob[:, None]
    if GATED:
        g = g + unit.up_offset
        dgate, dup, terms = w * g * slope, w * f, dy * (f * g)
    else:
        dgate, dup, terms = w * slope, w, dy * f
    if unit.LIMITED:
        dgate = tl.where(gate > unit.limit, 0.0, dgate)
        dup = tl.where(tl.abs(up) > unit.limit, 0.0, dup)
    if GROUPED or (BIASED and mask is not None):
        dgate = tl.where(mask, dgate, 0.0)
        dup = tl.where(mask, dup, 0.0)
    if BIASED and mask is not None:
        terms = tl.where(mask, terms, 0.0)
    return dgate, dup, terms


@triton.jit
def _store_sums(sums_ptr, sums, start, cols):
    col = start + tl.arange(0, sums.shape[0])
    tl.store(sums_ptr + col, sums, mask=col < cols)


@kernel
def glu_backward_kernel(
    rows,
    cols,
    up_shift,  # from here to `groups` as in the forward
    inner,
    gate: Rows,
    up: Rows,
    dy: Rows,  # [rows, cols]
    prob_ptr,
    prob_stride,
    groups: GroupEnds,
    bias_ptr,
    dgate_ptr,  # [rows, stride], or None; with INTERLEAVED dgate and dup alternate
    dup_ptr,  # the same tensor if gate and up share one, or None
    dprob_ptr,  # [row_programs, rows], or None
    dbias_ptr,  # fp32 [blocks, stride], or None; with it, a program has one tile of all rows of a stripe
    row_programs,
    stride,
    copy: StridedCodes,  # of dgate, row-wise
    copy_t: StridedCodes,  # of dgate, column-wise
    up_codes: UpCodes,  # the same copies if gate and up share one tensor
    alpha: float,
    limit: float,
    up_offset: float,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STRIPES: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ONCE: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute the gradients of gate and up from one read of them and of dy; dprob is summed over a program's tiles, and
    the gradient of the bias over its rows."""
    cols = (cols // ALIGN) * ALIGN
    block = (tl.program_id(0) // row_programs).to(tl.int64)
    part = tl.program_id(0) % row_programs
    GROUPED: tl.constexpr = groups.ends is not None
    GATED: tl.constexpr = INTERLEAVED or up.ptr is not None
    ROWS_MASKED: tl.constexpr = ROWS > 1 or GROUPED
    CHUNKS: tl.constexpr = dbias_ptr is not None and not STRIPES  # a program loops over chunks of ROWS rows
    first, exist, real = _block_of(block, groups, rows, STRIPE_ROWS if CHUNKS else ROWS, PLACES, STRIPES)
    up_copy = _with_strides_of(copy, up_codes.data, up_codes.scale)
    up_copy_t = _with_strides_of(copy_t, up_codes.data_t, up_codes.scale_t)
    stripe = block
    bound = rows.to(tl.int64)
    if PLACES == "slots" and STRIPES:
        copy = from_row(copy, first)
        copy_t = _from_slot(copy_t, first, block, ROWS, FORMAT)
        up_copy = from_row(up_copy, first)
        up_copy_t = _from_slot(up_copy_t, first, block, ROWS, FORMAT)
        stripe = block * 0
        bound = exist
    bias = _bias_of(bias_ptr, first, groups, cols, up_shift, up.ptr, ROWS, INTERLEAVED, PLACES, ALIGN)
    rows_end = rows
    if CHUNKS:
        exist = tl.minimum(exist, STRIPE_ROWS)
        rows_end = first + exist
    shift = (up_shift // ALIGN) * ALIGN
    if dbias_ptr is not None:
        sums_ptr = dbias_ptr + tl.multiple_of(block * stride, ALIGN)
    WIDTH: tl.constexpr = 2 * TILE if INTERLEAVED else TILE
    gate_sum = tl.zeros((WIDTH,), tl.float32)
    up_sum = tl.zeros((TILE,), tl.float32)
    for begin in range(0, exist if CHUNKS else 1, ROWS):
        row, written, read = _rows_of_block(first, exist, real, begin, groups, rows, ROWS, PLACES)  # [ROWS]
        gate_off = row_offset(row, inner, gate.outer_stride, gate.inner_stride, NESTED, ALIGN)
        up_off = row_offset(row, inner, up.outer_stride, up.inner_stride, NESTED, ALIGN)
        up_off = tl.multiple_of(up_off + up_shift, ALIGN)
        dy_off = row_offset(row, inner, dy.outer_stride, dy.inner_stride, NESTED, ALIGN)
        prob = _load_prob(prob_ptr, prob_stride, row, read)
        inputs = Inputs(gate.ptr, gate_off, up.ptr, up_off, prob, read)
        dest = Destination(row, written, stripe, rows_end, bound)
        dprob = tl.zeros((ROWS,), tl.float32)
        for step in range(1 if ONCE else tl.cdiv(tl.cdiv(cols, TILE) - part, row_programs)):
            start = (part + step * row_programs) * TILE
            col = start + tl.arange(0, TILE)
            mask = mask_of_rows(read, col, cols, ROWS_MASKED, COLS_MASKED)
            gate_value, up_value = _load_biased(
                inputs, bias, start, cols, mask, INTERLEAVED, Cut(TILE, ROWS_MASKED, COLS_MASKED)
            )
            upstream = load_stored(dy.ptr + dy_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
            dgate, dup, terms = _gradients_of(
                gate_value,
                up_value,
                upstream.to(tl.float32),
                prob,
                mask,
                Unit(alpha, limit, up_offset, ACT, LIMITED, INTERLEAVED),
                GATED,
                GROUPED,
                bias_ptr is not None,
            )
            if dprob_ptr is not None:
                dprob += tl.sum(terms, axis=1)
            out_start, width = start, cols
            if INTERLEAVED:
                dgate = tl.interleave(dgate, dup)  # [ROWS, 2 TILE]
                out_start, width = 2 * start, 2 * cols
            if dbias_ptr is not None:
                gate_sum += tl.sum(dgate, axis=0)
                up_sum += tl.sum(dup, axis=0)
                if STRIPES:  # a single chunk: free the registers of the sums before encoding
                    _store_sums(sums_ptr, gate_sum, out_start, width)
                    if GATED and not INTERLEAVED:
                        _store_sums(sums_ptr + shift, up_sum, start, cols)
            _store(
                dgate,
                Results(dgate_ptr, stride, copy, copy_t),
                dest,
                out_start,
                width,
                Encoding(0.0, FP32_MAX, FORMAT, CAST, False),
                STRIPES,
                ALIGN,
                COLS_MASKED,
            )
            if GATED and not INTERLEAVED:
                _store(
                    dup,
                    Results(dup_ptr, stride, up_copy, up_copy_t),
                    dest,
                    shift + start,
                    shift + cols,
                    Encoding(0.0, FP32_MAX, FORMAT, CAST, False),
                    STRIPES,
                    ALIGN,
                    COLS_MASKED,
                )
        if dprob_ptr is not None:
            sums_off = part.to(tl.int64) * rows + row
            tl.store(dprob_ptr + sums_off, dprob.to(dprob_ptr.dtype.element_ty), mask=written)
    if CHUNKS:
        _store_sums(sums_ptr, gate_sum, part * WIDTH, 2 * cols if INTERLEAVED else cols)
        if GATED and not INTERLEAVED:
            _store_sums(sums_ptr + shift, up_sum, part * TILE, cols)


@triton.jit
def _with_strides_of(copy, data, scale):
    """Return another tensor's codes and scales with the strides of `copy`."""
    return StridedCodes(data, scale, copy.stride, copy.scale_row_stride, copy.scale_col_stride)
