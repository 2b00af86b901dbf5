"""Kernels that move rows to the experts and back; `permute` documents the formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....language import tl, triton
from ....runtime import kernel
from ....tiles import amax, fp32_scale, larger, quantize_rows, round_to, scaled
from ...common.copies import Encoding, StridedCodes, Stripe, Tile, store_codes, store_stripe
from ...common.loads import load_decoded, load_stored, load_tile, mask_of_rows, tile_mask

PADS = tl.constexpr(32)  # rows that one program searches for pads


class Probs(NamedTuple):
    """Probabilities of slots: [tokens, slots], or with experts_ptr [tokens, experts]."""

    ptr: Any
    experts_ptr: Any  # int32 [tokens, slots], or None
    slots: Any
    stride: Any


@triton.jit
def _load_probs(probs, token, slot, mask):
    """Load the probabilities of slots, zero where the mask is False."""
    column = slot
    if probs.experts_ptr is not None:
        column = tl.load(probs.experts_ptr + token * probs.slots + slot, mask=mask, other=-1)
        mask = mask & (column >= 0)  # -1 stands for no expert
    return tl.load(probs.ptr + token * probs.stride + column, mask=mask, other=0.0)


class Pads(NamedTuple):
    """A block of rows of y; its rows without a slot are pads."""

    block: Any  # index of this block of PADS rows
    slot_of_row_ptr: Any
    row_probs_ptr: Any  # or None
    rows: Any
    cols: Any
    scale_cols: Any
    TILE: Any
    ALIGN: Any
    COLS_MASKED: Any


@triton.jit
def _write_pads(y, pads, encoding):
    """Fill the pads among PADS rows with zeros (for codes: zeros with scales 1), and set their probabilities to 0."""
    FORMAT: tl.constexpr = encoding.FORMAT
    PIECE: tl.constexpr = pads.TILE if pads.TILE < 256 else 256
    row = pads.block.to(tl.int64) * PADS + tl.arange(0, PADS)  # [PADS]
    pad = tl.load(pads.slot_of_row_ptr + row, mask=row < pads.rows, other=0) < 0
    if tl.max(pad.to(tl.int32), axis=0) > 0:
        row = tl.where(pad, row, pads.rows)  # rows past the end are not stored
        for start in range(0, pads.cols, PIECE):
            scale = None
            if FORMAT is None:
                zeros = tl.zeros((PADS, PIECE), y.data.dtype.element_ty)
            elif FORMAT.group == 0:
                zeros = tl.zeros((PADS, PIECE), tl.uint8)
            else:
                zeros = tl.zeros((PADS, PIECE), tl.float32)
                zeros, scale = quantize_rows(zeros, None, 0.0, encoding.INPUT_MAX, FORMAT, encoding.CAST)
            _store(
                zeros,
                scale,
                y,
                Tile(row, start, pads.rows, pads.cols, pads.ALIGN, True, pads.COLS_MASKED),
                FORMAT,
            )
        if FORMAT is None and y.scale is not None:
            for start in range(0, pads.scale_cols, 4):
                col = start + tl.arange(0, 4)
                row_off = (row * y.scale_row_stride)[:, None]
                scale_off = row_off + (col.to(tl.int64) * y.scale_col_stride)[None, :]
                KIND: tl.constexpr = y.scale.dtype.element_ty
                ones = tl.full((PADS, 4), 1.0 if tl.float32 == KIND else 127, KIND)  # 127 is e8m0's 1
                tl.store(y.scale + scale_off, ones, mask=pad[:, None] & (col < pads.scale_cols)[None, :])
        elif FORMAT is not None and FORMAT.group == 0:
            scale, _ = fp32_scale(tl.zeros((PADS,), tl.float32), encoding.INPUT_MAX, FORMAT)
            tl.store(y.scale + row * y.scale_row_stride, scale, mask=pad)
        if pads.row_probs_ptr is not None:
            zero_probs = tl.zeros((PADS,), pads.row_probs_ptr.dtype.element_ty)
            tl.store(pads.row_probs_ptr + row, zero_probs, mask=pad)


@triton.jit
def _store(x, scale, y, tile, FORMAT: tl.constexpr):
    """Store a tile x [R, C] of elements, or with FORMAT of codes, and scales [R, C // group] if it has groups. Rows
    past the end, `tile.row >= tile.rows`, are not stored."""
    if FORMAT is None:
        col = tile.start + tl.arange(0, x.shape[1])
        y_off = tl.multiple_of(tile.row * y.stride, tile.ALIGN)
        exists = tile_mask(tile.row, col, tile.rows, tile.cols, True, tile.COLS_MASKED)
        tl.store(y.data + y_off[:, None] + col[None, :], x, mask=exists)
    else:
        store_codes(x, y, tile, FORMAT)
        if FORMAT.group != 0:
            group = tile.start // FORMAT.group + tl.arange(0, x.shape[1] // FORMAT.group)
            groups = (tile.cols + FORMAT.group - 1) // FORMAT.group
            row_off = (tile.row * y.scale_row_stride)[:, None]
            scale_off = row_off + (group.to(tl.int64) * y.scale_col_stride)[None, :]
            mask = tile_mask(tile.row, group, tile.rows, groups, True, tile.COLS_MASKED)
            tl.store(y.scale + scale_off, scale, mask=mask)


class Tokens(NamedTuple):
    """Tokens of a tile, and the rows of their slots."""

    token: Any  # int64 [R]
    exists: Any  # bool [R]: False past the last token
    row_of_slot_ptr: Any
    slots: Any  # per token


@triton.jit
def _store_to_slots(x, scale, y, tokens, tile, FORMAT: tl.constexpr):
    """Store a tile of tokens to the rows of all their slots; x and scale as in `_store`. `tile.row` is not read."""
    # Load the index of the next row while this row is stored.
    row_ptr = tokens.row_of_slot_ptr + tokens.token * tokens.slots
    next_row = tl.load(row_ptr, mask=tokens.exists, other=-1)
    for slot in range(tokens.slots):
        row = tl.where(next_row < 0, tile.rows, next_row).to(
            tl.int64
        )  # past the end for a slot without a row
        next_row = tl.load(row_ptr + slot + 1, mask=tokens.exists & (slot + 1 < tokens.slots), other=-1)
        _store(
            x,
            scale,
            y,
            Tile(row, tile.start, tile.rows, tile.cols, tile.ALIGN, True, tile.COLS_MASKED),
            FORMAT,
        )


@kernel
def permute_kernel(
    x_ptr,  # [tokens, cols]; codes are bytes
    x_scale_ptr,  # [tokens, scale_cols] if x is quantized, or None
    probs_ptr,  # [tokens, slots], or with experts_ptr [tokens, experts]; or None
    experts_ptr,  # int32 [tokens, slots], or None
    row_of_slot_ptr,  # int32 [tokens, slots]
    slot_of_row_ptr,  # int32 [rows]
    y_ptr,  # [rows, cols]
    y_scale_ptr,  # [rows, scale_cols], or None
    row_probs_ptr,  # [rows], or None
    tokens,
    rows,
    cols,
    slots,
    token_programs,
    scale_cols,
    x_stride,
    x_scale_row_stride,
    x_scale_col_stride,
    probs_stride,
    y_stride,
    y_scale_row_stride,
    y_scale_col_stride,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,  # format to quantize to, or None
    CAST: tl.constexpr,
    ROWS: tl.constexpr,  # tokens per program
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # cols and row strides are multiples of it
    COLS_MASKED: tl.constexpr,
):
    """Read each token's row once and write it to the rows of its slots; further programs write the pads. With one scale
    per row, a program has whole rows and reads them twice, first for their amax."""
    cols = (cols // ALIGN) * ALIGN
    y = StridedCodes(y_ptr, y_scale_ptr, y_stride, y_scale_row_stride, y_scale_col_stride)
    if tl.program_id(0) < token_programs:
        WHOLE: tl.constexpr = FORMAT is not None and FORMAT.group == 0
        tiles = 1 if WHOLE else tl.cdiv(cols, TILE)
        tile = tl.program_id(0) % tiles
        token = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        exists = token < tokens
        x_off = tl.multiple_of(token * x_stride, ALIGN)
        if WHOLE:
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + tl.arange(0, TILE)
                mask = tile_mask(token, col, tokens, cols, ROWS > 1, COLS_MASKED)
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
                largest = larger(largest, amax(x, axis=1))
            scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            for start in range(0, cols, TILE):
                start = tl.multiple_of(start, TILE)
                col = start + tl.arange(0, TILE)
                mask = tile_mask(token, col, tokens, cols, ROWS > 1, COLS_MASKED)
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
                codes = round_to(scaled(x, factor[:, None], FORMAT), None, FORMAT, CAST)
                _store_to_slots(
                    codes,
                    None,
                    y,
                    Tokens(token, exists, row_of_slot_ptr, slots),
                    Tile(None, start, rows, cols, ALIGN, True, COLS_MASKED),
                    FORMAT,
                )
        else:
            start = tile * TILE
            col = start + tl.arange(0, TILE)  # [TILE]
            mask = tile_mask(token, col, tokens, cols, ROWS > 1, COLS_MASKED)
            scale = None
            if FORMAT is not None:
                x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
                x, scale = quantize_rows(x, None, 0.0, INPUT_MAX, FORMAT, CAST)
            else:
                x = load_stored(x_ptr + x_off[:, None] + col[None, :], mask)
            _store_to_slots(
                x,
                scale,
                y,
                Tokens(token, exists, row_of_slot_ptr, slots),
                Tile(None, start, rows, cols, ALIGN, True, COLS_MASKED),
                FORMAT,
            )
        if (row_probs_ptr is not None or x_scale_ptr is not None or WHOLE) and tile == 0:
            for slot in range(slots):
                row = tl.load(row_of_slot_ptr + token * slots + slot, mask=exists, other=-1).to(tl.int64)
                if row_probs_ptr is not None:
                    probs = Probs(probs_ptr, experts_ptr, slots, probs_stride)
                    prob = _load_probs(probs, token, slot, row >= 0)
                    tl.store(row_probs_ptr + row, prob, mask=row >= 0)
                if WHOLE:
                    tl.store(y_scale_ptr + row * y_scale_row_stride, scale, mask=row >= 0)
                if x_scale_ptr is not None:
                    for first in range(0, scale_cols, 32):
                        group = first + tl.arange(0, 32)
                        scale_mask = (row >= 0)[:, None] & (group < scale_cols)[None, :]
                        group_off = group.to(tl.int64)
                        scales = tl.load(
                            x_scale_ptr
                            + (token * x_scale_row_stride)[:, None]
                            + (group_off * x_scale_col_stride)[None, :],
                            mask=scale_mask,
                            other=0,
                        )
                        tl.store(
                            y_scale_ptr
                            + (row * y_scale_row_stride)[:, None]
                            + (group_off * y_scale_col_stride)[None, :],
                            scales,
                            mask=scale_mask,
                        )
    else:
        block = tl.program_id(0) - token_programs
        _write_pads(
            y,
            Pads(block, slot_of_row_ptr, row_probs_ptr, rows, cols, scale_cols, TILE, ALIGN, COLS_MASKED),
            Encoding(0.0, INPUT_MAX, FORMAT, CAST, False),
        )


@kernel
def permute_stripe_kernel(
    x_ptr,  # [tokens, cols]
    probs_ptr,  # as in `permute_kernel`
    experts_ptr,
    slot_of_row_ptr,  # int32 [rows]
    row_probs_ptr,
    rows,
    cols,
    slots,
    x_stride,
    probs_stride,
    copy: StridedCodes,  # rowwise
    copy_t: StridedCodes,  # columnwise
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Write the columnwise copy, and the rowwise one from the same read. Columnwise blocks hold rows of one expert, so
    a token's row is read once for each of its slots."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * TILE
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = start + tl.arange(0, TILE)  # [TILE]
    slot = tl.load(slot_of_row_ptr + row, mask=row < rows, other=-1)
    has_slot = slot >= 0
    token = (tl.where(has_slot, slot, 0) // slots).to(tl.int64)
    mask = has_slot[:, None] & (col < cols)[None, :]
    x_off = tl.multiple_of(token * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    store_stripe(
        x,
        copy,
        copy_t,
        Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
        Encoding(0.0, INPUT_MAX, FORMAT, CAST, False),
    )
    if row_probs_ptr is not None and start == 0:
        slot_in_token = slot - (token * slots).to(tl.int32)
        prob = _load_probs(Probs(probs_ptr, experts_ptr, slots, probs_stride), token, slot_in_token, has_slot)
        tl.store(row_probs_ptr + row, prob, mask=row < rows)


@triton.jit
def _load_values(source, tile, row_mask, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of rows as fp32 [R, TILE], decoding quantized rows; zero where `row_mask`, bool [R], is False."""
    if FORMAT is None:
        col = tile.start + tl.arange(0, TILE)
        row_off = tl.multiple_of(tile.row * source.stride, tile.ALIGN)
        mask = mask_of_rows(row_mask, col, tile.cols, True, tile.COLS_MASKED)
        return load_tile(source.data + row_off[:, None] + col[None, :], mask)
    else:
        return load_decoded(
            source,
            None,
            tile.row,
            row_mask,
            tile.start,
            tile.cols,
            FORMAT,
            TILE,
            tile.ALIGN,
            tile.COLS_MASKED,
        )


@kernel
def unpermute_kernel(
    rows_ptr,  # [rows, cols]; codes are bytes
    scale_ptr,  # scales of the codes, or None
    probs_ptr,  # [tokens, slots], or with experts_ptr [tokens, experts]; or None
    experts_ptr,  # int32 [tokens, slots], or None
    carried_ptr,  # [rows], or None
    row_of_slot_ptr,  # int32 [tokens, slots]
    y_ptr,  # [tokens, cols]
    back_ptr,  # [tokens, slots], or with experts_ptr [tokens, experts], zero; or None
    tokens,
    cols,
    slots,
    rows_stride,
    scale_row_stride,
    scale_col_stride,
    probs_stride,
    back_stride,
    FORMAT: tl.constexpr,  # format of the rows, or None
    AT_ONCE: tl.constexpr,  # slots whose rows are loaded together
    ROWS: tl.constexpr,  # tokens per program
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Sum the rows of each token's slots, in the order of the slots."""
    cols = (cols // ALIGN) * ALIGN
    source = StridedCodes(rows_ptr, scale_ptr, rows_stride, scale_row_stride, scale_col_stride)
    probs = Probs(probs_ptr, experts_ptr, slots, probs_stride)
    tiles = tl.cdiv(cols, TILE)
    tile = tl.program_id(0) % tiles
    token = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = tile * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for first in range(0, slots, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            slot = first + j
            exists = (token < tokens) & (slot < slots)
            row = tl.load(row_of_slot_ptr + token * slots + slot, mask=exists, other=-1)
            has_row = row >= 0
            value = _load_values(
                source,
                Tile(row.to(tl.int64), start, None, cols, ALIGN, True, COLS_MASKED),
                has_row,
                FORMAT,
                TILE,
            )
            if probs_ptr is not None:
                weight = _load_probs(probs, token, slot, has_row)
                weight = tl.broadcast_to(weight.to(tl.float32)[:, None], (ROWS, TILE))
                total = tl.fma(value, weight, total)
            else:
                total += value
    mask = tile_mask(token, col, tokens, cols, ROWS > 1, COLS_MASKED)
    y_off = tl.multiple_of(token * cols, ALIGN)
    tl.store(y_ptr + y_off[:, None] + col[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)
    if back_ptr is not None and tile == 0:
        for first in range(0, slots, AT_ONCE):
            slot = first + tl.arange(0, AT_ONCE)
            exists = (token < tokens)[:, None] & (slot < slots)[None, :]
            slot_off = (token * slots)[:, None] + slot[None, :]
            row = tl.load(row_of_slot_ptr + slot_off, mask=exists, other=-1)  # [ROWS, AT_ONCE]
            has_row = row >= 0
            carried = tl.load(carried_ptr + row, mask=has_row, other=0.0)
            if experts_ptr is not None:
                expert = tl.load(experts_ptr + slot_off, mask=has_row, other=-1)
                tl.store(back_ptr + (token * back_stride)[:, None] + expert, carried, mask=expert >= 0)
            else:
                tl.store(back_ptr + slot_off, carried, mask=exists)


@kernel
def unpermute_backward_kernel(
    dy_ptr,  # [tokens, cols]
    rows_ptr,  # [rows, cols] as in the forward, for dprobs; or None
    scale_ptr,
    probs_ptr,  # [tokens, slots], or with experts_ptr [tokens, experts]
    experts_ptr,
    row_of_slot_ptr,  # int32 [tokens, slots]
    slot_of_row_ptr,  # int32 [rows]
    drows_ptr,  # [rows, cols], or None
    dprobs_ptr,  # like probs, zero if dense; or None
    tokens,
    rows,
    cols,
    slots,
    dy_stride,
    rows_stride,
    scale_row_stride,
    scale_col_stride,
    probs_stride,
    dprobs_stride,
    FORMAT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Read each token's gradient once per AT_ONCE of its slots; further programs write the pads."""
    cols = (cols // ALIGN) * ALIGN
    source = StridedCodes(rows_ptr, scale_ptr, rows_stride, scale_row_stride, scale_col_stride)
    probs = Probs(probs_ptr, experts_ptr, slots, probs_stride)
    if tl.program_id(0) < tokens:
        token = tl.program_id(0).to(tl.int64)
        for first in range(0, slots, AT_ONCE):
            slot = first + tl.arange(0, AT_ONCE)  # [AT_ONCE]
            row = tl.load(row_of_slot_ptr + token * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
            has_row = row >= 0
            weight = _load_probs(probs, token, slot, has_row)
            weight = weight.to(tl.float32)[:, None]
            dots = tl.zeros((AT_ONCE,), tl.float32)
            dy_off = tl.multiple_of(token * dy_stride, ALIGN)
            for start in range(0, cols, TILE):
                start = tl.multiple_of(start, TILE)
                col = start + tl.arange(0, TILE)  # [TILE]
                if COLS_MASKED:
                    dy = tl.load(dy_ptr + dy_off + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
                else:
                    dy = tl.load(dy_ptr + dy_off + col).to(tl.float32)[None, :]
                if dprobs_ptr is not None:
                    value = _load_values(
                        source, Tile(row, start, None, cols, ALIGN, True, COLS_MASKED), has_row, FORMAT, TILE
                    )
                    dots += tl.sum(value * dy, axis=1)  # [AT_ONCE, TILE]
                if drows_ptr is not None:
                    mask = has_row[:, None] & (col >= 0)[None, :]
                    if COLS_MASKED:
                        mask = has_row[:, None] & (col < cols)[None, :]
                    row_off = tl.multiple_of(row * cols, ALIGN)
                    tl.store(
                        drows_ptr + row_off[:, None] + col[None, :],
                        (weight * dy).to(drows_ptr.dtype.element_ty),
                        mask=mask,
                    )
            if dprobs_ptr is not None:
                dots = dots.to(dprobs_ptr.dtype.element_ty)
                if experts_ptr is not None:
                    expert = tl.load(experts_ptr + token * slots + slot, mask=has_row, other=-1)
                    tl.store(dprobs_ptr + token * dprobs_stride + expert, dots, mask=expert >= 0)
                else:
                    tl.store(dprobs_ptr + token * dprobs_stride + slot, dots, mask=slot < slots)
    elif drows_ptr is not None:
        drows = StridedCodes(drows_ptr, None, cols, 0, 0)
        block = tl.program_id(0) - tokens
        _write_pads(
            drows,
            Pads(block, slot_of_row_ptr, None, rows, cols, 0, TILE, ALIGN, COLS_MASKED),
            Encoding(0.0, 1.0, None, 0, False),
        )
