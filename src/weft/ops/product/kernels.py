"""Kernels of products: [M, N] tiles summed over K.

One kernel serves all formats. A constant `Product` describes the operands; `operands` explains the three bodies of the
loop. Tiles of both operands are [rows, K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles import decode, decode_e4m3, decode_e8m0, unpack_pairs
from ...tiles.activations import activate
from ...tiles.split import dot_fp32
from ..common.copies import Encoding, StridedCodes, Tile, store_rows
from ..common.groups import GroupEnds
from ..common.spans import group_rows, group_tile

# ---- structs --------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """Operand [batch, rows, K]: elements or codes, scales and strides. Either K or the rows are contiguous."""

    data: Tensor | None
    scale: Tensor | None
    global_scale: Tensor | None  # one per tensor; nvfp4 only
    stride: int  # between rows if K is contiguous, else along K
    batch_stride: int
    scale_row_stride: int  # between rows of scales
    scale_stride: int  # along K
    scale_batch_stride: int


class Finish(NamedTuple):
    """Epilogue of the sums: times alpha and factor, plus bias, activation, plus residual."""

    bias: Tensor | None  # [N], or [batch, N]
    residual: Tensor | None  # [batch, M, N]
    alpha: Tensor | None  # fp32, one element
    bias_stride: int
    residual_stride: int
    residual_batch_stride: int
    factor: float


class Sizes(NamedTuple):
    """Sizes of a product [batch, M, K] x [batch, K, N]. With a gated unit, b has 2N columns."""

    m: int
    n: int
    k: int
    span: int  # number of steps of K, TILE.k long, that are summed separately


class Gather(NamedTuple):
    """Map from rows of the product to rows of a: row r reads token `slot_of_row[r] // slots`, none if negative."""

    slot_of_row: Tensor | None  # int32 [M]; None if a's rows are the product's
    slots: int
    tokens: int  # rows of a


class Rows(NamedTuple):
    """Range of an operand that a program reads: its rows, and the end of K."""

    row: Any  # int64 [ROWS]
    first: Any  # first row of the tile
    count: Any  # rows of the operand
    depth: Any  # end of K
    scale_depth: Any  # end of K in the scales' coordinates


class Step(NamedTuple):
    """Start of a loop step along K, and the start of its scales, which may be counted from another origin."""

    start: Any
    scale_start: Any


class Depth(NamedTuple):
    """Range of K that is summed. If groups lie along K and scale blocks restart at groups, scales have an origin of
    their own."""

    origin: Any
    end: Any
    scale_origin: Any


class Location(NamedTuple):
    """Location of a tile of the result, and of the operands' rows that it reads."""

    row: Any  # int64 [M]
    first_row: Any
    rows: Any  # end of the rows to compute; rows from there on are zero in the result
    written: Any  # end of the rows that this program writes
    a_row: Any  # int64 [M], the rows of a to read
    a_rows: Any  # end of the rows of a that may be read
    col: Any  # int64 [N]
    first_col: Any
    batch: Any  # int64, of the result and of a
    b_batch: Any  # int64, of b


# ---- reading --------------------------------------------------------------------------------------------


@triton.jit
def _typed(ptr, FORM: tl.constexpr, PRODUCT: tl.constexpr):
    """Cast a pointer to codes to the type that is multiplied. Casting loaded values instead would route them through
    registers on sm_90 and sm_100."""
    if PRODUCT.multiplied == "stored" and FORM.element == "e4m3":
        return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif PRODUCT.multiplied == "stored" and FORM.element == "e5m2":
        return ptr.to(tl.pointer_type(tl.float8e5), bitcast=True)
    else:
        return ptr


@triton.jit
def _select_batch(operand, batch, FORM: tl.constexpr):
    """Return the operand [rows, K] of one batch."""
    ALIGN: tl.constexpr = FORM.align
    scale = operand.scale
    if operand.scale is not None:
        scale = operand.scale + batch * operand.scale_batch_stride
    return Operand(
        operand.data + tl.multiple_of(batch * operand.batch_stride, ALIGN),
        scale,
        operand.global_scale,
        operand.stride,
        operand.batch_stride,
        operand.scale_row_stride,
        operand.scale_stride,
        operand.scale_batch_stride,
    )


@triton.jit
def _source(operand, rows, FORM: tl.constexpr, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """Return the source of an operand's tiles [rows, K]: a pointer, or a descriptor for bulk copies."""
    ALIGN: tl.constexpr = FORM.align
    ptr = _typed(operand.data, FORM, PRODUCT)
    if FORM.bulk:
        ROWS: tl.constexpr = rows.row.shape[0]
        STEP: tl.constexpr = TILE.k // FORM.packed
        width = (rows.depth + FORM.packed - 1) // FORM.packed
        stride = tl.multiple_of(operand.stride.to(tl.int64), ALIGN)
        return tl.make_tensor_descriptor(ptr, [rows.count, width], [stride, 1], [ROWS, STEP])
    else:
        return ptr


@triton.jit
def _stored(operand, source, rows, start, FORM: tl.constexpr, TILE: tl.constexpr):
    """Load a tile [ROWS, K] as stored, starting at `start` along K; zero out of bounds."""
    ALIGN: tl.constexpr = FORM.align
    STEP: tl.constexpr = TILE.k // FORM.packed
    first = start // FORM.packed
    if FORM.bulk:
        return source.load([rows.first, first])
    else:
        k = first + tl.arange(0, STEP)  # [K]
        width = (rows.depth + FORM.packed - 1) // FORM.packed
        if FORM.along_k:
            source += tl.multiple_of(rows.row * operand.stride, ALIGN)[:, None] + k[None, :]
            mask = (rows.row < rows.count)[:, None]
            if TILE.k_masked:
                mask = mask & (k < tl.cdiv(width, ALIGN) * ALIGN)[None, :]
            return tl.load(source, mask=mask, other=0.0)
        else:
            source += tl.multiple_of(k.to(tl.int64) * operand.stride, ALIGN)[:, None] + rows.row[None, :]
            mask = (rows.row < (rows.count // ALIGN) * ALIGN)[None, :]
            if TILE.k_masked:
                mask = mask & (k < width)[:, None]
            return tl.trans(tl.load(source, mask=mask, other=0.0))


@triton.jit
def _group_scales(operand, rows, step, FORM: tl.constexpr, TILE: tl.constexpr):
    """Load the codes of group scales [ROWS, groups] along K. Beyond K they are 0, which is not NaN."""
    GROUP: tl.constexpr = FORM.group
    GROUPS: tl.constexpr = TILE.k // GROUP
    group = step.scale_start // GROUP + tl.arange(0, GROUPS)
    exists = group < (rows.scale_depth + GROUP - 1) // GROUP
    row_off, group_off = rows.row * operand.scale_row_stride, group.to(tl.int64) * operand.scale_stride
    mask = (rows.row < rows.count)[:, None] & exists[None, :]
    return tl.load(operand.scale + row_off[:, None] + group_off[None, :], mask=mask, other=0)


@triton.jit
def _block_scales(operand, rows, step, FORM: tl.constexpr, ONE: tl.constexpr):
    """Load the scales of a block of 128 along K: [ROWS], or a scalar if ONE square holds all rows of the tile."""
    off = (step.scale_start // 128).to(tl.int64) * operand.scale_stride
    if ONE:
        return tl.load(operand.scale + (rows.first // 128).to(tl.int64) * operand.scale_row_stride + off)
    else:
        block = rows.row if FORM.block == "1x128" else rows.row // 128
        ptr = operand.scale + block * operand.scale_row_stride + off
        return tl.load(ptr, mask=rows.row < rows.count, other=0.0)


@triton.jit
def _scales(operand, rows, step, FORM: tl.constexpr, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """Load the scales of a step of K: block scales, codes of group scales, or None."""
    if PRODUCT.body == "scaled":
        codes = _group_scales(operand, rows, step, FORM, TILE)
        return codes.to(tl.float8e4nv, bitcast=True) if FORM.block == "nvfp4" else codes
    elif FORM.in_blocks:
        return _block_scales(operand, rows, step, FORM, FORM.block == "128x128" and TILE.in_squares)
    else:
        return None


@triton.jit
def _times(values, scales):
    """Multiply values [ROWS, K] by group scales [ROWS, groups]."""
    grouped = tl.reshape(values, (values.shape[0], scales.shape[1], values.shape[1] // scales.shape[1]))
    return tl.reshape(grouped * scales[:, :, None], values.shape)


@triton.jit
def _decoded(codes, operand, rows, step, FORM: tl.constexpr, TILE: tl.constexpr):
    """Decode codes [ROWS, K] to fp32, exactly; multiply by group scales if there are any."""
    values = decode(unpack_pairs(codes) if FORM.packed == 2 else codes, FORM)
    if FORM.block == "mx":
        return _times(values, decode_e8m0(_group_scales(operand, rows, step, FORM, TILE)))
    elif FORM.block == "nvfp4":
        return _times(values, decode_e4m3(_group_scales(operand, rows, step, FORM, TILE)))
    else:
        return values


@triton.jit
def _fnuz(codes, ELEMENT: tl.constexpr):
    """Reinterpret codes as gfx942's 8-bit types, whose bias is one larger, so values are halved. There 0x80 is NaN: -0
    becomes +0, and NaN and infinity become that NaN."""
    if ELEMENT == "e4m3":
        codes = tl.where((codes & 0x7F) == 0x7F, 0x80, tl.where(codes == 0x80, 0, codes)).to(tl.uint8)
        return codes.to(tl.float8e4b8, bitcast=True)
    else:
        codes = tl.where((codes & 0x7F) >= 0x7C, 0x80, tl.where(codes == 0x80, 0, codes)).to(tl.uint8)
        return codes.to(tl.float8e5b16, bitcast=True)


@triton.jit
def _operand(operand, source, rows, step, FORM: tl.constexpr, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """Load a tile [ROWS, K] in the type in which it is multiplied."""
    stored = _stored(operand, source, rows, step.start, FORM, TILE)
    if PRODUCT.multiplied == "stored":
        return stored
    elif PRODUCT.multiplied == "fnuz":
        return _fnuz(stored.to(tl.uint8, bitcast=True), FORM.element)
    else:
        if FORM.block is not None:
            stored = _decoded(stored.to(tl.uint8, bitcast=True), operand, rows, step, FORM, TILE)
        if PRODUCT.multiplied == "bf16":
            return stored.to(tl.bfloat16)
        elif PRODUCT.multiplied == "fp16":
            return stored.to(tl.float16)
        else:
            return stored.to(tl.float32)


# ---- multiplying ----------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, total, PRODUCT: tl.constexpr):
    """Return total + a [M, K] @ b [N, K]^T, added in the matrix unit's order; from zero if total is None."""
    b = tl.trans(b)
    if PRODUCT.sums == "int32":
        return tl.dot(a, b, total, out_dtype=tl.int32)
    elif PRODUCT.sums == "fp16":
        return tl.dot(a, b, total, out_dtype=tl.float16)
    elif PRODUCT.multiplied == "fp32":
        if PRODUCT.precision == "tf32":
            return tl.dot(a, b, total, input_precision="tf32")
        else:
            return tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype.is_fp8():
        # sm_90 accumulates 8-bit products with 14 bits, unless sums are promoted to fp32 every 128 of K.
        PROMOTED: tl.constexpr = a.shape[1] if a.shape[1] < 128 else 128
        return tl.dot(a, b, total, max_num_imprecise_acc=PROMOTED)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _step(total, a, b, a_scale, b_scale, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """Add the product of tiles a [M, K] and b [N, K], with scales from `_scales`, to the sums."""
    A: tl.constexpr = PRODUCT.a.element
    B: tl.constexpr = PRODUCT.b.element
    A_ONE: tl.constexpr = PRODUCT.a.block == "128x128" and TILE.in_squares
    B_ONE: tl.constexpr = PRODUCT.b.block == "128x128" and TILE.in_squares
    if PRODUCT.body == "scaled":
        return tl.dot_scaled(a, a_scale, A, tl.trans(b), b_scale, B, total)
    elif PRODUCT.body == "blocks":
        part = _dot(a, b, None, PRODUCT).to(tl.float32)
        if PRODUCT.a.in_blocks:
            a_scale = a_scale if A_ONE else a_scale[:, None]
        if PRODUCT.b.in_blocks:
            b_scale = b_scale if B_ONE else b_scale[None, :]
        if PRODUCT.a.in_blocks and PRODUCT.b.in_blocks:
            if A_ONE or B_ONE:
                return total + part * (a_scale * b_scale)
            else:
                return total + part * a_scale * b_scale
        elif PRODUCT.a.in_blocks:
            return total + part * a_scale
        elif PRODUCT.b.in_blocks:
            return total + part * b_scale
        else:
            return total + part
    elif PRODUCT.precision == "bf16x3":
        # Subtract the negated dot: Triton would fuse `total + dot(...)` into one chain of additions over all of K.
        return total - dot_fp32(-a, tl.trans(b), True)
    else:
        return _dot(a, b, total, PRODUCT)


@triton.jit
def _zeros(PRODUCT: tl.constexpr, TILE: tl.constexpr):
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    if PRODUCT.sums == "int32" and PRODUCT.body == "sum":
        return tl.zeros((M, N), tl.int32)
    else:
        return tl.zeros((M, N), tl.float32)


@triton.jit
def _sums(
    a, b, location, depth, n, begin, end, PRODUCT: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr
):
    """Sum [M, N] over the steps of K in [begin, end). With GATED return the sums of gate and up, else one sum twice."""
    STEP: tl.constexpr = TILE.k
    START: tl.constexpr = TILE.start_align
    count = n * 2 if GATED else n
    scale_end = depth.scale_origin + (depth.end - depth.origin)
    rows = Rows(location.a_row, location.first_row, location.a_rows, depth.end, scale_end)
    cols = Rows(location.col, location.first_col, count, depth.end, scale_end)
    ups = Rows(location.col + n, location.first_col + n, count, depth.end, scale_end)
    a_source, b_source = (
        _source(a, rows, PRODUCT.a, PRODUCT, TILE),
        _source(b, cols, PRODUCT.b, PRODUCT, TILE),
    )
    total = _zeros(PRODUCT, TILE)
    total_up = total
    for index in range(begin, end):
        start = tl.multiple_of(depth.origin + index * STEP, START)
        step = Step(start, depth.scale_origin + index * STEP)
        left = _operand(a, a_source, rows, step, PRODUCT.a, PRODUCT, TILE)
        a_scale = _scales(a, rows, step, PRODUCT.a, PRODUCT, TILE)
        right = _operand(b, b_source, cols, step, PRODUCT.b, PRODUCT, TILE)
        b_scale = _scales(b, cols, step, PRODUCT.b, PRODUCT, TILE)
        total = _step(total, left, right, a_scale, b_scale, PRODUCT, TILE)
        if GATED:
            if TILE.meets and (PRODUCT.body == "blocks" or PRODUCT.precision == "bf16x3"):
                tl.debug_barrier()
            right = _operand(b, b_source, ups, step, PRODUCT.b, PRODUCT, TILE)
            b_scale = _scales(b, ups, step, PRODUCT.b, PRODUCT, TILE)
            total_up = _step(total_up, left, right, a_scale, b_scale, PRODUCT, TILE)
    return total, total_up


# ---- finishing ------------------------------------------------------------------------------------------


@triton.jit
def _scaled(total, a, b, row, rows, col, cols, PRODUCT: tl.constexpr):
    """Multiply sums [M, N] by row and tensor scales. Two tensor scales are multiplied with each other first."""
    value = total.to(tl.float32)
    if PRODUCT.multiplied == "fnuz":
        value = value * 4.0
    if PRODUCT.a.block == "tensor" and PRODUCT.b.block == "tensor":
        value = value * (tl.load(a.scale) * tl.load(b.scale))
    else:
        if PRODUCT.a.block == "row":
            value = value * tl.load(a.scale + row * a.scale_row_stride, mask=row < rows, other=0.0)[:, None]
        elif PRODUCT.a.block == "tensor":
            value = value * tl.load(a.scale)
        if PRODUCT.b.block == "row":
            value = value * tl.load(b.scale + col * b.scale_row_stride, mask=col < cols, other=0.0)[None, :]
        elif PRODUCT.b.block == "tensor":
            value = value * tl.load(b.scale)
    if PRODUCT.a.block == "nvfp4" and PRODUCT.b.block == "nvfp4":
        value = value * (tl.load(a.global_scale) * tl.load(b.global_scale))
    elif PRODUCT.a.block == "nvfp4":
        value = value * tl.load(a.global_scale)
    elif PRODUCT.b.block == "nvfp4":
        value = value * tl.load(b.global_scale)
    return value


@triton.jit
def _epilogue(
    sums,
    a,
    b,
    finish,
    location,
    sizes,
    PRODUCT: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Apply scales and epilogue to the sums [M, N]; the result is not rounded yet."""
    total, total_up = sums
    cols = sizes.n * 2 if GATED else sizes.n
    up_col = location.col + sizes.n
    alpha = finish.factor
    if finish.alpha is not None:
        alpha = alpha * tl.load(finish.alpha)
    exists = location.col < sizes.n
    value = _scaled(total, a, b, location.a_row, location.a_rows, location.col, cols, PRODUCT) * alpha
    bias = finish.bias
    if finish.bias is not None:
        bias = finish.bias + location.b_batch * finish.bias_stride
        value += tl.load(bias + location.col, mask=exists, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        value = activate(value, 1.0, ACT)
    if GATED:
        up = _scaled(total_up, a, b, location.a_row, location.a_rows, up_col, cols, PRODUCT) * alpha
        if finish.bias is not None:
            up += tl.load(bias + up_col, mask=exists, other=0.0).to(tl.float32)[None, :]
        value = value * up
    if finish.residual is not None:
        off = location.batch * finish.residual_batch_stride + location.row * finish.residual_stride
        mask = (location.row < location.rows)[:, None] & exists[None, :]
        residual = tl.load(finish.residual + off[:, None] + location.col[None, :], mask=mask, other=0.0)
        value += residual.to(tl.float32)
    if GROUPED == "rows":
        value = tl.where((location.row < location.rows)[:, None], value, 0.0)
    return value


@triton.jit
def _store(value, y_ptr, copy, location, sizes, encoding, ALIGN: tl.constexpr):
    """Round a tile to y's dtype and store it, or store codes and scales of the rounded tile."""
    n = (sizes.n // ALIGN) * ALIGN
    mask = (location.row < location.written)[:, None] & (location.col < n)[None, :]
    rounded = value.to(y_ptr.dtype.element_ty)
    if encoding.FORMAT is None:
        off = tl.multiple_of((location.batch * sizes.m + location.row) * n, ALIGN)
        tl.store(y_ptr + off[:, None] + location.col[None, :], rounded, mask=mask)
    else:
        # Rows past the end of a batch or group must not overwrite the first rows of the next.
        before = location.batch * sizes.m
        store_rows(
            tl.where(mask, rounded.to(tl.float32), 0.0),
            copy,
            Tile(before + location.row, location.first_col, before + location.written, n, ALIGN, True, True),
            encoding,
        )


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _locate(tile_row, tile_col, batch, sizes, groups, gather, TILE: tl.constexpr, GROUPED: tl.constexpr):
    """Return the location of a tile. With groups of rows, no tile spans two groups, b's batch is the group, and some
    program indices belong to no tile."""
    col = (tile_col * TILE.n).to(tl.int64) + tl.arange(0, TILE.n)
    if GROUPED == "rows":
        group, first, exist, real = group_tile(tile_row.to(tl.int64), groups, sizes.m, TILE.m)
        row = first + tl.arange(0, TILE.m)
        rows = first + real
        first_row = first.to(tl.int32)
        written, b_batch = first + exist, tl.minimum(group, groups.number - 1)
    else:
        first_row = tile_row * TILE.m
        row = first_row.to(tl.int64) + tl.arange(0, TILE.m)
        rows = sizes.m
        written, b_batch = sizes.m, batch
    a_row = row
    a_rows = rows
    if gather.slot_of_row is not None:
        slot = tl.load(gather.slot_of_row + row, mask=row < rows, other=-1)
        a_row = tl.where(slot >= 0, slot // gather.slots, gather.tokens).to(tl.int64)
        a_rows = gather.tokens
    return Location(row, first_row, rows, written, a_row, a_rows, col, tile_col * TILE.n, batch, b_batch)


@triton.jit
def _depth(location, sizes, groups, TILE: tl.constexpr, GROUPED: tl.constexpr):
    """Return the range of K to sum; with groups along K, the range of the location's batch."""
    if GROUPED == "depth":
        START: tl.constexpr = TILE.start_align
        origin, end = group_rows(location.batch, groups, sizes.k)
        length = tl.maximum(end - origin, 0).to(tl.int32)
        # An empty group may begin past the last row. It has no steps, but its descriptors must stay inside K.
        origin = tl.minimum(origin, sizes.k // START * START).to(tl.int32)
        origin = tl.multiple_of(origin, START)
        scale_origin = origin
        if TILE.scale_slots:
            scale_origin = (origin // 128 + location.batch.to(tl.int32)) * 128
        return Depth(origin, origin + length, scale_origin)
    else:
        return Depth(0, sizes.k, 0)


@kernel
def matmul_kernel(
    a: Operand,  # [batch, M, K]
    b: Operand,  # [batch, N, K]; with a gated unit [batch, 2N, K]; with groups of rows [groups, N, K]
    finish: Finish,
    y_ptr,  # [batch, M, N]; only its dtype is used if there are partial sums or a copy
    partial_ptr,  # [spans, 1 or 2, batch, M, N] sums that `finish_kernel` completes, or None
    copy: StridedCodes,  # row-wise copy of the result, or absent
    sizes: Sizes,
    groups: GroupEnds,
    gather: Gather,
    PRODUCT: tl.constexpr,
    TILE: tl.constexpr,
    ACT: tl.constexpr,  # activation, or None
    GATED: tl.constexpr,  # the activation's result is multiplied by the product with the second half of b's columns
    GROUPED: tl.constexpr,  # None; "rows": each group of rows has its own b; "depth": each batch sums a group of K
    INVARIANT: tl.constexpr,  # sum spans separately even if one program has them all; also for deep products
    FORMAT: tl.constexpr,  # format of the copy, or None
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,  # largest value of y's dtype
    ALIGN: tl.constexpr,  # divides N
):
    """Compute a tile of a product. Programs are grouped so that eight tiles of rows share the columns they read."""
    tiles_m, tiles_n = tl.cdiv(sizes.m, TILE.m), tl.cdiv(sizes.n, TILE.n)
    if GROUPED == "rows":
        tiles_m += groups.number
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    number = tl.program_id(0) % (tiles_m * tiles_n)
    stack = number // (8 * tiles_n)
    height = tl.minimum(tiles_m - stack * 8, 8)
    tile_row = stack * 8 + number % (8 * tiles_n) % height
    tile_col = number % (8 * tiles_n) // height
    location = _locate(tile_row, tile_col, batch.to(tl.int64), sizes, groups, gather, TILE, GROUPED)
    depth = _depth(location, sizes, groups, TILE, GROUPED)
    a, b = _select_batch(a, location.batch, PRODUCT.a), _select_batch(b, location.b_batch, PRODUCT.b)
    steps = tl.cdiv(depth.end - depth.origin, TILE.k)
    if GROUPED == "rows":
        steps = tl.where(location.first_row < location.rows, steps, 0)
    if INVARIANT:
        total = _zeros(PRODUCT, TILE)
        if PRODUCT.deep:
            total = total.to(tl.float32)
        total_up = total
        for begin in range(0, steps, sizes.span):
            end = tl.minimum(begin + sizes.span, steps)
            part, part_up = _sums(a, b, location, depth, sizes.n, begin, end, PRODUCT, TILE, GATED)
            total += part.to(total.dtype)
            total_up += part_up.to(total.dtype)
    else:
        begin = tl.program_id(1) * sizes.span
        end = tl.minimum(begin + sizes.span, steps)
        total, total_up = _sums(a, b, location, depth, sizes.n, begin, end, PRODUCT, TILE, GATED)
    if partial_ptr is not None:
        batches = tl.num_programs(0) // (tiles_m * tiles_n)
        plane = tl.program_id(1).to(tl.int64) * (2 if GATED else 1) * batches + location.batch
        mask = (location.row < sizes.m)[:, None] & (location.col < sizes.n)[None, :]
        off = (plane * sizes.m + location.row)[:, None] * sizes.n + location.col[None, :]
        tl.store(partial_ptr + off, total, mask=mask)
        if GATED:
            tl.store(partial_ptr + off + batches.to(tl.int64) * sizes.m * sizes.n, total_up, mask=mask)
    else:
        value = _epilogue((total, total_up), a, b, finish, location, sizes, PRODUCT, ACT, GATED, GROUPED)
        _store(value, y_ptr, copy, location, sizes, Encoding(0.0, INPUT_MAX, FORMAT, CAST, False), ALIGN)


@kernel
def finish_kernel(
    a: Operand,
    b: Operand,
    finish: Finish,
    y_ptr,  # [batch, M, N]
    partial_ptr,  # [spans, 1 or 2, batch, M, N]
    copy: StridedCodes,
    sizes: Sizes,
    groups: GroupEnds,
    gather: Gather,
    spans,
    PRODUCT: tl.constexpr,
    TILE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,  # None: grouped products are not cut into spans
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Add the partial sums of a tile's spans in order, and finish the tile."""
    tiles_m, tiles_n = tl.cdiv(sizes.m, TILE.m), tl.cdiv(sizes.n, TILE.n)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    batches = tl.num_programs(0) // (tiles_m * tiles_n)
    number = tl.program_id(0) % (tiles_m * tiles_n)
    location = _locate(
        number // tiles_n, number % tiles_n, batch.to(tl.int64), sizes, groups, gather, TILE, GROUPED
    )
    mask = (location.row < sizes.m)[:, None] & (location.col < sizes.n)[None, :]
    plane = batches.to(tl.int64) * sizes.m * sizes.n
    off = (location.batch * sizes.m + location.row)[:, None] * sizes.n + location.col[None, :]
    total = _zeros(PRODUCT, TILE)
    total_up = total
    for _ in range(spans):
        total += tl.load(partial_ptr + off, mask=mask, other=0)
        off += plane
        if GATED:
            total_up += tl.load(partial_ptr + off, mask=mask, other=0)
            off += plane
    a, b = _select_batch(a, location.batch, PRODUCT.a), _select_batch(b, location.b_batch, PRODUCT.b)
    value = _epilogue((total, total_up), a, b, finish, location, sizes, PRODUCT, ACT, GATED, GROUPED)
    _store(value, y_ptr, copy, location, sizes, Encoding(0.0, INPUT_MAX, FORMAT, CAST, False), ALIGN)
