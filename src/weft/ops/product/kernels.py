"""The kernels of products: tiles of [M, N], summed over K.

One kernel serves all formats. What the operands are is a `Product`, a constant; `operands` describes the three bodies
of its loop. Tiles of both operands are [rows, K].
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
    """An operand [batch, rows, K]: its numbers or codes, and where they lie. Either K or the rows are contiguous."""

    data: Tensor | None
    scale: Tensor | None
    global_scale: Tensor | None  # nvfp4's, one for the tensor
    stride: int  # from row to row if K is contiguous, else from one index of K to the next
    batch_stride: int
    scale_row_stride: int  # from one row of scales to the next
    scale_stride: int  # from one scale to the next along K
    scale_batch_stride: int


class Finish(NamedTuple):
    """What is done to the sums: times alpha and factor, plus bias, activation, plus residual."""

    bias: Tensor | None  # [N], or [batch, N]
    residual: Tensor | None  # [batch, M, N]
    alpha: Tensor | None  # fp32, one number
    bias_stride: int
    residual_stride: int
    residual_batch_stride: int
    factor: float


class Sizes(NamedTuple):
    """Those of a product [batch, M, K] x [batch, K, N]. With a gated unit, b has 2N columns."""

    m: int
    n: int
    k: int
    span: int  # steps of K, of TILE.k each, that are summed before they are added to the rest


class Gather(NamedTuple):
    """Which row of a stands for a row of the product: that of the token `slot_of_row // slots`, none if negative."""

    slot_of_row: Tensor | None  # int32 [M], or None: a's rows are those of the product
    slots: int
    tokens: int  # rows of a


class Rows(NamedTuple):
    """Rows of an operand that a program reads."""

    row: Any  # int64 [ROWS]
    first: Any  # the first of them
    count: Any  # how many the operand has
    depth: Any  # where K ends
    scale_depth: Any  # the same, counted along the scales


class Step(NamedTuple):
    """A step of the loop: where it begins along K, and where along K the scales of that are counted."""

    start: Any
    scale_start: Any


class Depth(NamedTuple):
    """The part of K that is summed. Where groups lie along K, and blocks of scales begin with groups, the scales are
    counted from another origin than the codes."""

    origin: Any
    end: Any
    scale_origin: Any


class Place(NamedTuple):
    """Where a tile of the result lies."""

    row: Any  # int64 [M]
    first_row: Any
    rows: Any  # the row after the last that there is to compute: those from there on are zero in the result
    written: Any  # the row after the last that this program writes
    a_row: Any  # int64 [M], the rows of a that are read
    a_rows: Any  # the row of a after the last that there is to read
    col: Any  # int64 [N]
    first_col: Any
    batch: Any  # int64, of the result and of a
    b_batch: Any  # int64, of b


# ---- reading --------------------------------------------------------------------------------------------


@triton.jit
def _typed(ptr, FORM: tl.constexpr, PRODUCT: tl.constexpr):
    """A pointer to codes as one to the type that is multiplied. The pointer is cast, not the values: a cast between a
    load and a dot would take the way through registers on sm_90 and sm_100."""
    if PRODUCT.multiplied == "stored" and FORM.element == "e4m3":
        return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif PRODUCT.multiplied == "stored" and FORM.element == "e5m2":
        return ptr.to(tl.pointer_type(tl.float8e5), bitcast=True)
    else:
        return ptr


@triton.jit
def _of_batch(operand, batch, FORM: tl.constexpr):
    """The operand [rows, K] of a batch."""
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
    """What tiles of an operand [rows, K] are read from: a pointer to its numbers, or a descriptor."""
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
    """A tile [ROWS, K] as it is stored, from `start` on along K; zero where there is nothing."""
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
    """Codes of the scales [ROWS, groups] of groups along K. Beyond K they are 0, which is no NaN."""
    GROUP: tl.constexpr = FORM.group
    GROUPS: tl.constexpr = TILE.k // GROUP
    group = step.scale_start // GROUP + tl.arange(0, GROUPS)
    exists = group < (rows.scale_depth + GROUP - 1) // GROUP
    row_off, group_off = rows.row * operand.scale_row_stride, group.to(tl.int64) * operand.scale_stride
    mask = (rows.row < rows.count)[:, None] & exists[None, :]
    return tl.load(operand.scale + row_off[:, None] + group_off[None, :], mask=mask, other=0)


@triton.jit
def _block_scales(operand, rows, step, FORM: tl.constexpr, ONE: tl.constexpr):
    """The scales of a block of 128 along K: [ROWS], or one number if ONE square holds all rows of the tile."""
    off = (step.scale_start // 128).to(tl.int64) * operand.scale_stride
    if ONE:
        return tl.load(operand.scale + (rows.first // 128).to(tl.int64) * operand.scale_row_stride + off)
    else:
        block = rows.row if FORM.block == "1x128" else rows.row // 128
        ptr = operand.scale + block * operand.scale_row_stride + off
        return tl.load(ptr, mask=rows.row < rows.count, other=0.0)


@triton.jit
def _scales(operand, rows, step, FORM: tl.constexpr, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """The scales that a step of K takes: of blocks, codes of those of groups, or none."""
    if PRODUCT.body == "scaled":
        codes = _group_scales(operand, rows, step, FORM, TILE)
        return codes.to(tl.float8e4nv, bitcast=True) if FORM.block == "nvfp4" else codes
    elif FORM.in_blocks:
        return _block_scales(operand, rows, step, FORM, FORM.block == "128x128" and TILE.in_squares)
    else:
        return None


@triton.jit
def _times(values, scales):
    """[ROWS, K] times [ROWS, groups]."""
    grouped = tl.reshape(values, (values.shape[0], scales.shape[1], values.shape[1] // scales.shape[1]))
    return tl.reshape(grouped * scales[:, :, None], values.shape)


@triton.jit
def _decoded(codes, operand, rows, step, FORM: tl.constexpr, TILE: tl.constexpr):
    """The numbers of codes [ROWS, K] in fp32, exactly; with groups, times their scales."""
    values = decode(unpack_pairs(codes) if FORM.packed == 2 else codes, FORM)
    if FORM.block == "mx":
        return _times(values, decode_e8m0(_group_scales(operand, rows, step, FORM, TILE)))
    elif FORM.block == "nvfp4":
        return _times(values, decode_e4m3(_group_scales(operand, rows, step, FORM, TILE)))
    else:
        return values


@triton.jit
def _fnuz(codes, ELEMENT: tl.constexpr):
    """Codes as numbers of gfx942's own 8-bit types, which are half as large, since their bias is one more. There 0x80
    is NaN: -0 becomes +0, and what is NaN or infinite becomes that NaN."""
    if ELEMENT == "e4m3":
        codes = tl.where((codes & 0x7F) == 0x7F, 0x80, tl.where(codes == 0x80, 0, codes)).to(tl.uint8)
        return codes.to(tl.float8e4b8, bitcast=True)
    else:
        codes = tl.where((codes & 0x7F) >= 0x7C, 0x80, tl.where(codes == 0x80, 0, codes)).to(tl.uint8)
        return codes.to(tl.float8e5b16, bitcast=True)


@triton.jit
def _operand(operand, source, rows, step, FORM: tl.constexpr, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """A tile [ROWS, K] of numbers as they are multiplied."""
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
    """total + a [M, K] @ b [N, K]^T, in the order of the matrix unit; from zero if total is None."""
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
        # sm_90 keeps 14 bits of the sums of 8-bit products, unless it adds them up elsewhere every 128 of K.
        PROMOTED: tl.constexpr = a.shape[1] if a.shape[1] < 128 else 128
        return tl.dot(a, b, total, max_num_imprecise_acc=PROMOTED)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _step(total, a, b, a_scale, b_scale, PRODUCT: tl.constexpr, TILE: tl.constexpr):
    """Add the product of tiles a [M, K] and b [N, K] to the sums. The scales are those of `_scales`."""
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
        # Not `total + dot(...)`: Triton would fuse that into one chain of additions over all of K.
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
def _sums(a, b, place, depth, n, begin, end, PRODUCT: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr):
    """Sums [M, N] over the steps of K from `begin` up to `end`: with GATED those of gate and up, else one twice."""
    STEP: tl.constexpr = TILE.k
    START: tl.constexpr = TILE.start_align
    count = n * 2 if GATED else n
    scale_end = depth.scale_origin + (depth.end - depth.origin)
    rows = Rows(place.a_row, place.first_row, place.a_rows, depth.end, scale_end)
    cols = Rows(place.col, place.first_col, count, depth.end, scale_end)
    ups = Rows(place.col + n, place.first_col + n, count, depth.end, scale_end)
    a_source, b_source = (
        _source(a, rows, PRODUCT.a, PRODUCT, TILE),
        _source(b, cols, PRODUCT.b, PRODUCT, TILE),
    )
    total = _zeros(PRODUCT, TILE)
    total_up = total
    for number in range(begin, end):
        start = tl.multiple_of(depth.origin + number * STEP, START)
        step = Step(start, depth.scale_origin + number * STEP)
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
    """Sums [M, N] times the scales of rows and of whole tensors. Two scales of tensors are multiplied first."""
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
def _finished(
    sums,
    a,
    b,
    finish,
    place,
    sizes,
    PRODUCT: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """What is stored of the sums [M, N], before it is rounded."""
    total, total_up = sums
    cols = sizes.n * 2 if GATED else sizes.n
    up_col = place.col + sizes.n
    alpha = finish.factor
    if finish.alpha is not None:
        alpha = alpha * tl.load(finish.alpha)
    exists = place.col < sizes.n
    value = _scaled(total, a, b, place.a_row, place.a_rows, place.col, cols, PRODUCT) * alpha
    bias = finish.bias
    if finish.bias is not None:
        bias = finish.bias + place.b_batch * finish.bias_stride
        value += tl.load(bias + place.col, mask=exists, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        value = activate(value, 1.0, ACT)
    if GATED:
        up = _scaled(total_up, a, b, place.a_row, place.a_rows, up_col, cols, PRODUCT) * alpha
        if finish.bias is not None:
            up += tl.load(bias + up_col, mask=exists, other=0.0).to(tl.float32)[None, :]
        value = value * up
    if finish.residual is not None:
        off = place.batch * finish.residual_batch_stride + place.row * finish.residual_stride
        mask = (place.row < place.rows)[:, None] & exists[None, :]
        residual = tl.load(finish.residual + off[:, None] + place.col[None, :], mask=mask, other=0.0)
        value += residual.to(tl.float32)
    if GROUPED == "rows":
        value = tl.where((place.row < place.rows)[:, None], value, 0.0)
    return value


@triton.jit
def _store(value, y_ptr, copy, place, sizes, encoding, ALIGN: tl.constexpr):
    """Round a tile and store it; or round it to y's dtype and store codes and scales of that."""
    n = (sizes.n // ALIGN) * ALIGN
    mask = (place.row < place.written)[:, None] & (place.col < n)[None, :]
    rounded = value.to(y_ptr.dtype.element_ty)
    if encoding.FORMAT is None:
        off = tl.multiple_of((place.batch * sizes.m + place.row) * n, ALIGN)
        tl.store(y_ptr + off[:, None] + place.col[None, :], rounded, mask=mask)
    else:
        # Rows past the last of a batch or a group must not become the first of the next.
        before = place.batch * sizes.m
        store_rows(
            tl.where(mask, rounded.to(tl.float32), 0.0),
            copy,
            Tile(before + place.row, place.first_col, before + place.written, n, ALIGN, True, True),
            encoding,
        )


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _place(tile_row, tile_col, batch, sizes, groups, gather, TILE: tl.constexpr, GROUPED: tl.constexpr):
    """The place of a tile. With groups of rows, tiles are numbered so that none has rows of two groups; b's batch is
    then the group, and there are numbers that belong to no tile."""
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
    return Place(row, first_row, rows, written, a_row, a_rows, col, tile_col * TILE.n, batch, b_batch)


@triton.jit
def _depth(place, sizes, groups, TILE: tl.constexpr, GROUPED: tl.constexpr):
    """The part of K that is summed: with groups along K, that of the place's batch."""
    if GROUPED == "depth":
        START: tl.constexpr = TILE.start_align
        origin, end = group_rows(place.batch, groups, sizes.k)
        length = tl.maximum(end - origin, 0).to(tl.int32)
        # A group without rows may begin past the last row. It has no steps, but its descriptors must stay inside of K.
        origin = tl.minimum(origin, sizes.k // START * START).to(tl.int32)
        origin = tl.multiple_of(origin, START)
        scale_origin = origin
        if TILE.scale_slots:
            scale_origin = (origin // 128 + place.batch.to(tl.int32)) * 128
        return Depth(origin, origin + length, scale_origin)
    else:
        return Depth(0, sizes.k, 0)


@kernel
def matmul_kernel(
    a: Operand,  # [batch, M, K]
    b: Operand,  # [batch, N, K]; with a gated unit [batch, 2N, K]; with groups of rows [groups, N, K]
    finish: Finish,
    y_ptr,  # [batch, M, N]; its dtype alone is read if there are partial sums or a copy
    partial_ptr,  # [spans, 1 or 2, batch, M, N] of sums that another kernel finishes, or None
    copy: StridedCodes,  # the row-wise copy of the result, or absent
    sizes: Sizes,
    groups: GroupEnds,
    gather: Gather,
    PRODUCT: tl.constexpr,
    TILE: tl.constexpr,
    ACT: tl.constexpr,  # activation, or None
    GATED: tl.constexpr,  # the result of the activation is multiplied by that of a second half of b's columns
    GROUPED: tl.constexpr,  # None; "rows": each group of rows has its own b; "depth": each batch sums a group of K
    INVARIANT: tl.constexpr,  # sum spans apart also where one program has all of them; so it is for deep products
    FORMAT: tl.constexpr,  # of the copy, or None
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,  # the largest number of y's dtype
    ALIGN: tl.constexpr,  # N is a multiple of it
):
    """A tile of a product. Programs are grouped so that eight tiles of rows share the columns that they read."""
    tiles_m, tiles_n = tl.cdiv(sizes.m, TILE.m), tl.cdiv(sizes.n, TILE.n)
    if GROUPED == "rows":
        tiles_m += groups.number
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    number = tl.program_id(0) % (tiles_m * tiles_n)
    stack = number // (8 * tiles_n)
    height = tl.minimum(tiles_m - stack * 8, 8)
    tile_row = stack * 8 + number % (8 * tiles_n) % height
    tile_col = number % (8 * tiles_n) // height
    place = _place(tile_row, tile_col, batch.to(tl.int64), sizes, groups, gather, TILE, GROUPED)
    depth = _depth(place, sizes, groups, TILE, GROUPED)
    a, b = _of_batch(a, place.batch, PRODUCT.a), _of_batch(b, place.b_batch, PRODUCT.b)
    steps = tl.cdiv(depth.end - depth.origin, TILE.k)
    if GROUPED == "rows":
        steps = tl.where(place.first_row < place.rows, steps, 0)
    if INVARIANT:
        total = _zeros(PRODUCT, TILE)
        if PRODUCT.deep:
            total = total.to(tl.float32)
        total_up = total
        for begin in range(0, steps, sizes.span):
            end = tl.minimum(begin + sizes.span, steps)
            part, part_up = _sums(a, b, place, depth, sizes.n, begin, end, PRODUCT, TILE, GATED)
            total += part.to(total.dtype)
            total_up += part_up.to(total.dtype)
    else:
        begin = tl.program_id(1) * sizes.span
        end = tl.minimum(begin + sizes.span, steps)
        total, total_up = _sums(a, b, place, depth, sizes.n, begin, end, PRODUCT, TILE, GATED)
    if partial_ptr is not None:
        batches = tl.num_programs(0) // (tiles_m * tiles_n)
        plane = tl.program_id(1).to(tl.int64) * (2 if GATED else 1) * batches + place.batch
        mask = (place.row < sizes.m)[:, None] & (place.col < sizes.n)[None, :]
        off = (plane * sizes.m + place.row)[:, None] * sizes.n + place.col[None, :]
        tl.store(partial_ptr + off, total, mask=mask)
        if GATED:
            tl.store(partial_ptr + off + batches.to(tl.int64) * sizes.m * sizes.n, total_up, mask=mask)
    else:
        value = _finished((total, total_up), a, b, finish, place, sizes, PRODUCT, ACT, GATED, GROUPED)
        _store(value, y_ptr, copy, place, sizes, Encoding(0.0, INPUT_MAX, FORMAT, CAST, False), ALIGN)


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
    GROUPED: tl.constexpr,  # None: products of groups are not cut into spans
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A tile of a product from the sums of its spans, added up in order."""
    tiles_m, tiles_n = tl.cdiv(sizes.m, TILE.m), tl.cdiv(sizes.n, TILE.n)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    batches = tl.num_programs(0) // (tiles_m * tiles_n)
    number = tl.program_id(0) % (tiles_m * tiles_n)
    place = _place(
        number // tiles_n, number % tiles_n, batch.to(tl.int64), sizes, groups, gather, TILE, GROUPED
    )
    mask = (place.row < sizes.m)[:, None] & (place.col < sizes.n)[None, :]
    plane = batches.to(tl.int64) * sizes.m * sizes.n
    off = (place.batch * sizes.m + place.row)[:, None] * sizes.n + place.col[None, :]
    total = _zeros(PRODUCT, TILE)
    total_up = total
    for _ in range(spans):
        total += tl.load(partial_ptr + off, mask=mask, other=0)
        off += plane
        if GATED:
            total_up += tl.load(partial_ptr + off, mask=mask, other=0)
            off += plane
    a, b = _of_batch(a, place.batch, PRODUCT.a), _of_batch(b, place.b_batch, PRODUCT.b)
    value = _finished((total, total_up), a, b, finish, place, sizes, PRODUCT, ACT, GATED, GROUPED)
    _store(value, y_ptr, copy, place, sizes, Encoding(0.0, INPUT_MAX, FORMAT, CAST, False), ALIGN)
