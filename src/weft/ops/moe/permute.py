"""Permute and unpermute: the rows of tokens to their experts and back.

A token has `slots` experts; slot s = token * slots + j is its j-th. `row_map` sorts the slots by expert, stably, and
gives each expert's region a multiple of `align` rows; everything else follows two lists of indices:

    slot_of_row[r]    the slot whose row r is, or -1: a pad
    row_of_slot[s]    its inverse; -1 for a slot without a row

    permute:    y[r] = x[token of slot_of_row[r]], 0 in pads          row_probs[r] = probs[slot_of_row[r]]
    unpermute:  y[t] = round(sum over j = 0, 1, ... of probs[t, j] * rows[row_of_slot[t, j]])

Each is the gradient of the other. With probs, unpermute's gradient is

    drows[r] = round(probs[s] * dy[t])     dprobs[t, j] = round(sum over columns of dy[t] * rows[row_of_slot[t, j]])

permute copies bits. Sums are in fp32, one fused multiply-add a slot, in the order of the slots, and rounded once to
the dtype of the result; so is every product. A quantised result has the bytes of `quantize` applied to the permuted
rows, pads included; the scale of a row that comes quantised is moved with it, and pads get codes 0 with scale 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...quant import Copy, Format, QTensor
from ...quant.copies import empty_scale
from ...quant.flat import allocate_flat, quantize_flat, split_copies
from ...quant.reference import dequantize_copy
from ...quant.straight import standing_in, wrap
from ...runtime import Launch, capabilities_of, define_flat_op, kernel, local_rows
from ...tiles import decode, quantize_rows
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, whole
from ..common.copies import (
    STRIPE,
    Codes,
    Encoding,
    Stripe,
    Tile,
    cast_mode,
    copy_arguments,
    count_stripes,
    store_codes,
    store_stripe,
    stripe_tile,
)
from ..common.rows import align_of, compute_dtype, cpu_tile, flat_rows, load_tile, tile_mask

# ---- reference ------------------------------------------------------------------------------------------


def row_map_reference(
    routing: Tensor, experts: int, slots: int, align: int, rows: int, dense: bool
) -> list[Tensor]:
    """routing: experts [..., slots] of each token, or with `dense` a mask [..., experts]."""
    lead = routing.shape[:-1]
    if dense:
        number = torch.arange(experts, device=routing.device)
        ordered = torch.where(routing.reshape(-1, experts) != 0, number, experts).sort(1).values
        missing = ordered.new_full((len(ordered), max(slots - experts, 0)), experts)
        key = torch.cat([ordered[:, :slots], missing], 1).flatten()
    else:
        key = routing.flatten().long()
    count = key.numel()
    valid = (key >= 0) & (key < experts)
    key = torch.where(valid, key, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    # What has no expert comes last.
    rank = torch.empty_like(key)
    rank[key.argsort(stable=True)] = torch.arange(count, device=key.device)
    rank = rank - (counts.cumsum(0) - counts)[key]
    padded = (counts + align - 1) // align * align
    row = (padded.cumsum(0) - padded)[key] + rank
    fits = valid & (row < rows)
    slot_of_row = torch.full((rows + 1,), -1, dtype=torch.int32, device=key.device)
    slot = torch.arange(count, dtype=torch.int32, device=key.device)
    slot_of_row.scatter_(0, torch.where(fits, row, rows), slot)
    outputs = [
        torch.where(fits, row, -1).int().view(*lead, slots),
        slot_of_row[:rows].clone(),
        counts[:experts].int(),
        padded[:experts].cumsum(0).clamp(max=rows).int(),
    ]
    return [*outputs, torch.where(valid, key, -1).int().view(*lead, slots)] if dense else outputs


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] along the first dimension, zero where the index is negative."""
    if rows.shape[0] == 0:
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    found = rows[index.clamp(min=0)]
    gone = (index < 0).view(*index.shape, *[1] * (rows.dim() - 1))
    return found.masked_fill(gone, 0)


def _flat_probs(probs: Tensor, row_of_slot: Tensor, experts: Tensor | None) -> Tensor:
    """The probability of each slot, [tokens * slots]; that of a slot without an expert is anything."""
    if experts is None:
        return probs.flatten()
    return probs.reshape(-1, probs.shape[-1]).gather(1, _flat_slots(experts).long().clamp(min=0)).flatten()


def _flat_slots(per_slot: Tensor) -> Tensor:
    """[tokens, slots]."""
    slots = per_slot.shape[-1]
    return per_slot.reshape(per_slot.numel() // slots, slots)


def permute_reference(
    x: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None, row_of_slot: Tensor,
    slot_of_row: Tensor, experts: Tensor | None, format: str | None, rowwise: bool, columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition; x [..., K]. With `codes` and their scales they are what is moved, and x is not read."""
    cols, rows, slots = x.shape[-1], slot_of_row.shape[0], row_of_slot.shape[-1]
    slot = slot_of_row.long()
    token = torch.where(slot < 0, -1, slot // slots)
    outputs = []
    if codes is not None:
        assert codes_scale is not None
        assert format is not None
        moved = _pick(codes.view(torch.uint8), token).view(codes.dtype)
        scale = empty_scale(Format.of(format), rows, cols, x.device)
        kind = torch.uint8 if scale.element_size() == 1 else torch.float32
        one = 127 if kind is torch.uint8 else 1.0
        picked = _pick(codes_scale.view(kind), token).masked_fill((slot < 0)[:, None], one)
        scale.view(kind).copy_(picked)
        outputs += [_stand_in(x, rows), moved, scale]
    else:
        y = _pick(x.reshape(row_of_slot.numel() // slots, cols), token)
        if format is None:
            outputs.append(y)
        else:
            outputs.append(_stand_in(x, rows))
            outputs += quantize_flat(y, Format.of(format), rowwise=rowwise, columnwise=columnwise)
    if probs is not None:
        outputs.append(_pick(_flat_probs(probs, row_of_slot, experts), slot))
    return outputs


def unpermute_reference(
    rows: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None, carried: Tensor | None,
    row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, expert_count: int, format: str | None,
) -> list[Tensor]:  # fmt: skip
    """The definition; rows [R, K], or `codes` and scales in their place."""
    dtype = compute_dtype(rows)
    values = _values(rows, codes, codes_scale, format, rows.shape[-1], dtype)
    index = _flat_slots(row_of_slot).long()
    weights = None if probs is None else _flat_probs(probs, row_of_slot, experts).view(index.shape).to(dtype)
    y = torch.zeros((len(index), rows.shape[-1]), dtype=dtype, device=rows.device)
    for j in range(index.shape[1]):
        term = _pick(values, index[:, j])
        if weights is not None:
            term = torch.where((index[:, j] < 0)[:, None], term, term * weights[:, j, None])
        y = y + term
    outputs = [y.to(rows.dtype).view(*row_of_slot.shape[:-1], rows.shape[-1])]
    if carried is not None:
        outputs.append(_carried_back(carried, row_of_slot, experts, expert_count))
    return outputs


def _values(
    rows: Tensor | None, codes: Tensor | None, codes_scale: Tensor | None, format: str | None, cols: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The rows' numbers, or those of their codes."""
    if codes is None:
        assert rows is not None
        return rows.to(dtype)
    assert codes_scale is not None
    assert format is not None
    shape = (codes.shape[0], cols)
    return dequantize_copy(Copy(codes, codes_scale), Format.of(format), shape, torch.float32).to(dtype)


def _carried_back(carried: Tensor, row_of_slot: Tensor, experts: Tensor | None, expert_count: int) -> Tensor:
    """carried [R] to the slots, [..., slots], or with `experts` to [..., expert_count]."""
    return _to_experts(_pick(carried, row_of_slot.long()), row_of_slot, experts, expert_count)


def _to_experts(per_slot: Tensor, row_of_slot: Tensor, experts: Tensor | None, expert_count: int) -> Tensor:
    """What slots have, [..., slots], as what experts have, [..., expert_count], if the routing was a mask."""
    if experts is None:
        return per_slot
    # A column more for the slots without a row.
    dense = per_slot.new_zeros((*row_of_slot.shape[:-1], expert_count + 1))
    where = torch.where(row_of_slot < 0, expert_count, experts).long()
    return dense.scatter_(-1, where, per_slot)[..., :expert_count].contiguous()


def unpermute_backward_reference(
    dy: Tensor, rows: Tensor | None, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor,
    row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, format: str | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Of drows and dprobs those that are needed; rows or `codes` are for dprobs."""
    dtype = compute_dtype(dy)
    slots = row_of_slot.shape[-1]
    flat = dy.reshape(row_of_slot.numel() // slots, dy.shape[-1]).to(dtype)
    outputs = []
    if needs[0]:
        slot = slot_of_row.long()
        weight = _pick(_flat_probs(probs, row_of_slot, experts).to(dtype), slot)
        picked = _pick(flat, torch.where(slot < 0, -1, slot // slots))
        outputs.append((picked * weight[:, None]).masked_fill((slot < 0)[:, None], 0).to(dy.dtype))
    if needs[1]:
        values = _values(rows, codes, codes_scale, format, dy.shape[-1], dtype)
        index = _flat_slots(row_of_slot).long()
        dots = torch.stack([(_pick(values, index[:, j]) * flat).sum(1) for j in range(slots)], 1)
        dots = dots.masked_fill(index < 0, 0).to(probs.dtype).view(row_of_slot.shape)
        outputs.append(_to_experts(dots, row_of_slot, experts, probs.shape[-1]))
    return outputs


def _stand_in(x: Tensor, rows: int) -> Tensor:
    return torch.empty_strided((rows, x.shape[-1]), (0, 0), dtype=x.dtype, device=x.device)


# ---- kernels: the row map -------------------------------------------------------------------------------


@triton.jit
def _expert_of(routing_ptr, slot, count, experts):
    """Experts of slots [S] as int32; -1 if there is no such slot, or no such expert."""
    expert = tl.load(routing_ptr + slot, mask=slot < count, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@kernel
def _compact_kernel(
    mask_ptr,  # bytes [tokens, experts]
    experts_ptr,  # int32 [tokens, slots]
    tokens,
    experts,
    slots,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The experts of each token from a mask, in ascending order, then -1."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    there = (token < tokens)[:, None]
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(0, experts, TILE):
        expert = start + tl.arange(0, TILE)
        chosen = tl.load(
            mask_ptr + (token * experts)[:, None] + expert[None, :],
            mask=there & (expert < experts)[None, :],
            other=0,
        )
        chosen = (chosen != 0).to(tl.int32)  # [ROWS, TILE]
        slot = found[:, None] + tl.cumsum(chosen, axis=1) - 1
        fits = (chosen != 0) & (slot < slots)
        number = tl.broadcast_to(expert[None, :], (ROWS, TILE))
        tl.store(experts_ptr + (token * slots)[:, None] + slot, number, mask=fits)
        found += tl.sum(chosen, axis=1)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        left = there & (slot[None, :] >= found[:, None]) & (slot < slots)[None, :]
        tl.store(
            experts_ptr + (token * slots)[:, None] + slot[None, :],
            tl.full((ROWS, TILE), -1, tl.int32),
            mask=left,
        )


@kernel
def _count_kernel(
    routing_ptr,  # int32 or int64 [count]: the expert of each slot
    counts_ptr,  # int32 [2, programs, experts], of which the first half is written
    slot_of_row_ptr,  # int32 [rows]
    count,
    experts,
    rows,
    program_slots,
    program_rows,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """How many of a program's slots each expert has; and every row is a pad until it is given a slot."""
    program = tl.program_id(0)
    for start in range(0, experts, BINS):
        counts = tl.zeros((BINS,), tl.int32)
        for first in range(0, program_slots, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            slot = program.to(tl.int64) * program_slots + lane
            expert = _expert_of(routing_ptr, slot, tl.where(lane < program_slots, count, 0), experts)
            inside = (expert >= start) & (expert < start + BINS)
            counts += tl.histogram(tl.where(inside, expert - start, 0), BINS, mask=inside)
        bin = start + tl.arange(0, BINS)
        tl.store(counts_ptr + program.to(tl.int64) * experts + bin, counts, mask=bin < experts)
    for first in range(0, program_rows, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        row = program.to(tl.int64) * program_rows + lane
        mine = (lane < program_rows) & (row < rows)
        tl.store(slot_of_row_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=mine)


@kernel
def _place_kernel(
    routing_ptr,  # int32 or int64 [count]
    counts_ptr,  # int32 [2, programs, experts]: those of `_count_kernel`, then room for the next row of each expert
    row_of_slot_ptr,  # int32 [count]
    slot_of_row_ptr,  # int32 [rows], -1
    total_ptr,  # int32 [experts]
    offsets_ptr,  # int32 [experts]
    count,
    experts,
    rows,
    align,
    program_slots,
    programs,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Where each expert's rows begin, where this program's rows among them do, and the rows of its slots."""
    program = tl.program_id(0)
    next_ptr = counts_ptr + (programs + program).to(tl.int64) * experts  # [experts]
    begin = 0
    for start in range(0, experts, BINS):
        bin = start + tl.arange(0, BINS)
        total = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        for first in range(0, programs, PIECE):
            other = first + tl.arange(0, PIECE)
            there = (other < programs)[:, None] & (bin < experts)[None, :]
            other_off = (other.to(tl.int64) * experts)[:, None]
            counts = tl.load(counts_ptr + other_off + bin[None, :], mask=there, other=0)
            total += tl.sum(counts, axis=0)  # counts [PIECE, BINS]
            before += tl.sum(tl.where((other < program)[:, None], counts, 0), axis=0)
        padded = ((total + align - 1) // align * align).to(tl.int32)
        end = begin + tl.cumsum(padded, axis=0)
        tl.store(next_ptr + bin, end - padded + before, mask=bin < experts)
        if program == 0:
            tl.store(total_ptr + bin, total, mask=bin < experts)
            tl.store(offsets_ptr + bin, tl.minimum(end, rows), mask=bin < experts)
        begin += tl.sum(padded, axis=0)
    tl.debug_barrier()  # the next rows are read by other threads than wrote them

    lane = tl.arange(0, BLOCK)
    for first in range(0, program_slots, BLOCK):
        slot = program.to(tl.int64) * program_slots + first + lane
        expert = _expert_of(routing_ptr, slot, tl.where(first + lane < program_slots, count, 0), experts)
        next = tl.load(next_ptr + expert, mask=expert >= 0, other=0)
        # How many slots of the block have the same expert: before, and times 2^16 after each slot. [BLOCK, BLOCK]
        side = tl.where(lane[None, :] < lane[:, None], 1, tl.where(lane[None, :] > lane[:, None], 65536, 0))
        same = tl.sum(tl.where(expert[:, None] == expert[None, :], side, 0), axis=1)
        row = next + (same & 0xFFFF)
        fits = (expert >= 0) & (row < rows)
        mine = (first + lane < program_slots) & (slot < count)
        tl.store(row_of_slot_ptr + slot, tl.where(fits, row, -1), mask=mine)
        tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=fits)
        tl.debug_barrier()
        tl.store(next_ptr + expert, row + 1, mask=(expert >= 0) & (same < 65536))
        tl.debug_barrier()


# ---- kernels: there and back ----------------------------------------------------------------------------

PADS = tl.constexpr(32)  # rows of a program that looks for pads


@triton.jit
def _load_probs(probs_ptr, experts_ptr, token, slot, slots, probs_stride, mask):
    """Probabilities of slots, zero where the mask is: from [tokens, slots], or by their experts."""
    if experts_ptr is not None:
        column = tl.load(experts_ptr + token * slots + slot, mask=mask, other=0)
    else:
        column = slot
    return tl.load(probs_ptr + token * probs_stride + column, mask=mask, other=0.0)


@triton.jit
def _write_pads(
    slot_of_row_ptr,
    y_ptr,
    y_scale_ptr,
    row_probs_ptr,
    block,  # number of PADS rows
    rows,
    cols,
    y_stride,
    scale_cols,
    y_scale_row_stride,
    y_scale_col_stride,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Zeros in the pads among PADS rows, as numbers or as codes, and their scales and probabilities."""
    PIECE: tl.constexpr = TILE if TILE < 256 else 256
    row = block.to(tl.int64) * PADS + tl.arange(0, PADS)  # [PADS]
    pad = tl.load(slot_of_row_ptr + row, mask=row < rows, other=0) < 0
    if tl.max(pad.to(tl.int32), axis=0) > 0:
        row = tl.where(pad, row, rows)  # past the last one, where nothing is stored
        for start in range(0, cols, PIECE):
            col = start + tl.arange(0, PIECE)
            if FORMAT is None:
                mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
                y_off = tl.multiple_of(row * y_stride, ALIGN)
                zeros = tl.zeros((PADS, PIECE), y_ptr.dtype.element_ty)
                tl.store(y_ptr + y_off[:, None] + col[None, :], zeros, mask=mask)
            else:
                zeros = tl.zeros((PADS, PIECE), tl.float32)
                codes, scale = quantize_rows(zeros, None, 0.0, INPUT_MAX, FORMAT, CAST)
                _store_row_copy(
                    codes, scale, y_ptr, y_scale_ptr, row, start, rows, cols, y_stride, y_scale_row_stride,
                    y_scale_col_stride, FORMAT, ALIGN, COLS_MASKED,
                )  # fmt: skip
        if FORMAT is None and y_scale_ptr is not None:
            for start in range(0, scale_cols, 4):
                col = start + tl.arange(0, 4)
                scale_off = (row * y_scale_row_stride)[:, None] + (col.to(tl.int64) * y_scale_col_stride)[
                    None, :
                ]
                KIND: tl.constexpr = y_scale_ptr.dtype.element_ty
                ones = tl.full((PADS, 4), 1.0 if tl.float32 == KIND else 127, KIND)  # 127 is e8m0's 1
                tl.store(y_scale_ptr + scale_off, ones, mask=pad[:, None] & (col < scale_cols)[None, :])
        if row_probs_ptr is not None:
            tl.store(row_probs_ptr + row, tl.zeros((PADS,), row_probs_ptr.dtype.element_ty), mask=pad)


@triton.jit
def _store_row_copy(
    codes,  # uint8 [R, C]
    scale,  # [R, C // group]
    y_ptr,
    y_scale_ptr,
    row,  # int64 [R]; `rows` where nothing is to be stored
    start,
    rows,
    cols,
    y_stride,
    scale_row_stride,
    scale_col_stride,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    store_codes(
        codes,
        Codes(y_ptr, y_scale_ptr, y_stride, scale_row_stride, scale_col_stride),
        Tile(row, start, rows, cols, ALIGN, True, COLS_MASKED),
        FORMAT,
    )
    group = start // FORMAT.group + tl.arange(0, codes.shape[1] // FORMAT.group)
    groups = (cols + FORMAT.group - 1) // FORMAT.group
    scale_off = (row * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)[None, :]
    mask = tile_mask(row, group, rows, groups, True, COLS_MASKED)
    tl.store(y_scale_ptr + scale_off, scale, mask=mask)


@kernel
def _permute_kernel(
    x_ptr,  # [tokens, cols]; codes are bytes
    x_scale_ptr,  # [tokens, scale_cols] if x is quantised, or None
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
    FORMAT: tl.constexpr,  # to quantise to, or None
    CAST: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # cols and row strides are multiples of it
    COLS_MASKED: tl.constexpr,
):
    """Each token's row is read once, and written to the rows of its slots; further programs write the pads."""
    cols = (cols // ALIGN) * ALIGN
    if tl.program_id(0) < token_programs:
        tiles = tl.cdiv(cols, TILE)
        tile = tl.program_id(0) % tiles
        token = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        there = token < tokens
        start = tile * TILE
        col = start + tl.arange(0, TILE)  # [TILE]
        mask = tile_mask(token, col, tokens, cols, ROWS > 1, COLS_MASKED)
        x_off = tl.multiple_of(token * x_stride, ALIGN)
        if FORMAT is not None:
            x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
            codes, scale = quantize_rows(x, None, 0.0, INPUT_MAX, FORMAT, CAST)
        elif mask is None:
            x = tl.load(x_ptr + x_off[:, None] + col[None, :])
        else:
            x = tl.load(x_ptr + x_off[:, None] + col[None, :], mask=mask, other=0)
        # The next row's number is on its way while this one's numbers are stored.
        ahead = tl.load(row_of_slot_ptr + token * slots, mask=there, other=-1)
        for slot in range(slots):
            row = tl.where(ahead < 0, rows, ahead).to(tl.int64)  # without a row: past the last one
            ahead = tl.load(
                row_of_slot_ptr + token * slots + slot + 1, mask=there & (slot + 1 < slots), other=-1
            )
            if FORMAT is not None:
                _store_row_copy(
                    codes, scale, y_ptr, y_scale_ptr, row, start, rows, cols, y_stride, y_scale_row_stride,
                    y_scale_col_stride, FORMAT, ALIGN, COLS_MASKED,
                )  # fmt: skip
            else:
                y_off = tl.multiple_of(row * y_stride, ALIGN)
                exists = tile_mask(row, col, rows, cols, True, COLS_MASKED)
                tl.store(y_ptr + y_off[:, None] + col[None, :], x, mask=exists)
        if (row_probs_ptr is not None or x_scale_ptr is not None) and tile == 0:
            for slot in range(slots):
                row = tl.load(row_of_slot_ptr + token * slots + slot, mask=there, other=-1).to(tl.int64)
                if row_probs_ptr is not None:
                    prob = _load_probs(probs_ptr, experts_ptr, token, slot, slots, probs_stride, row >= 0)
                    tl.store(row_probs_ptr + row, prob, mask=row >= 0)
                if x_scale_ptr is not None:
                    for first in range(0, scale_cols, 32):
                        group = first + tl.arange(0, 32)
                        moves = (row >= 0)[:, None] & (group < scale_cols)[None, :]
                        group_off = group.to(tl.int64)
                        moved = tl.load(
                            x_scale_ptr
                            + (token * x_scale_row_stride)[:, None]
                            + (group_off * x_scale_col_stride)[None, :],
                            mask=moves,
                            other=0,
                        )
                        tl.store(
                            y_scale_ptr
                            + (row * y_scale_row_stride)[:, None]
                            + (group_off * y_scale_col_stride)[None, :],
                            moved,
                            mask=moves,
                        )
    else:
        _write_pads(
            slot_of_row_ptr, y_ptr, y_scale_ptr, row_probs_ptr, tl.program_id(0) - token_programs, rows, cols,
            y_stride, scale_cols, y_scale_row_stride, y_scale_col_stride, INPUT_MAX, FORMAT, CAST, TILE, ALIGN,
            COLS_MASKED,
        )  # fmt: skip


@kernel
def _permute_stripe_kernel(
    x_ptr,  # [tokens, cols]
    probs_ptr,  # as in `_permute_kernel`
    experts_ptr,
    slot_of_row_ptr,  # int32 [rows]
    row_probs_ptr,
    data_ptr,  # row-wise codes, or None
    scale_ptr,
    data_t_ptr,  # column-wise codes
    scale_t_ptr,
    rows,
    cols,
    slots,
    x_stride,
    probs_stride,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    data_t_stride,
    scale_t_row_stride,
    scale_t_col_stride,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """The column-wise copy, and the row-wise one from the same read: groups along the rows are those of an expert, so
    a token's row is read once for each of its slots."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * TILE
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = start + tl.arange(0, TILE)  # [TILE]
    slot = tl.load(slot_of_row_ptr + row, mask=row < rows, other=-1)
    taken = slot >= 0
    token = (tl.where(taken, slot, 0) // slots).to(tl.int64)
    mask = taken[:, None] & (col < cols)[None, :]
    x_off = tl.multiple_of(token * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    store_stripe(
        x,
        Codes(data_ptr, scale_ptr, data_stride, scale_row_stride, scale_col_stride),
        Codes(data_t_ptr, scale_t_ptr, data_t_stride, scale_t_row_stride, scale_t_col_stride),
        Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
        Encoding(0.0, INPUT_MAX, FORMAT, CAST, False),
    )
    if row_probs_ptr is not None and start == 0:
        own = slot - (token * slots).to(tl.int32)
        prob = _load_probs(probs_ptr, experts_ptr, token, own, slots, probs_stride, taken)
        tl.store(row_probs_ptr + row, prob, mask=row < rows)


@triton.jit
def _load_values(
    rows_ptr, scale_ptr, row, start, there, cols, rows_stride, scale_row_stride, scale_col_stride,
    FORMAT: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, COLS_MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 [R, TILE] of rows [R], decoded if they are quantised; zero where there is none."""
    col = start + tl.arange(0, TILE)
    row_off = tl.multiple_of(row * rows_stride, ALIGN)
    mask = there[:, None] & (col >= 0)[None, :]
    if COLS_MASKED:
        mask = there[:, None] & (col < cols)[None, :]
    if FORMAT is None:
        return load_tile(rows_ptr + row_off[:, None] + col[None, :], mask)
    else:
        codes = tl.load(rows_ptr + row_off[:, None] + col[None, :], mask=mask, other=0)
        values = decode(codes.to(tl.uint8, bitcast=True), FORMAT)
        if FORMAT.group == 0:
            scale = tl.load(scale_ptr + row * scale_row_stride, mask=there, other=0.0)
            return values * scale[:, None]
        else:
            G: tl.constexpr = FORMAT.group
            group = start // G + tl.arange(0, TILE // G)
            exists = there[:, None] & (group < (cols + G - 1) // G)[None, :]
            scale_off = (row * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)[None, :]
            scale = tl.load(scale_ptr + scale_off, mask=exists, other=0)  # [R, TILE // G]
            if FORMAT.block == "mx":
                bits = scale.to(tl.int32)
                bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x00400000, bits << 23))
                scale = bits.to(tl.float32, bitcast=True)
            groups = tl.reshape(values, (R, TILE // G, G)) * scale[:, :, None]
            return tl.reshape(groups, (R, TILE))


@kernel
def _unpermute_kernel(
    rows_ptr,  # [rows, cols]; codes are bytes
    scale_ptr,  # scales of codes, or None
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
    FORMAT: tl.constexpr,  # of the rows, or None
    AT_ONCE: tl.constexpr,  # slots whose rows are on their way at the same time
    ROWS: tl.constexpr,  # tokens of a program
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """The rows of a token's slots, added up in their order."""
    cols = (cols // ALIGN) * ALIGN
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
            taken = row >= 0
            value = _load_values(
                rows_ptr, scale_ptr, row.to(tl.int64), start, taken, cols, rows_stride, scale_row_stride,
                scale_col_stride, FORMAT, ROWS, TILE, ALIGN, COLS_MASKED,
            )  # fmt: skip
            if probs_ptr is not None:
                weight = _load_probs(probs_ptr, experts_ptr, token, slot, slots, probs_stride, taken)
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
            taken = row >= 0
            carried = tl.load(carried_ptr + row, mask=taken, other=0.0)
            if experts_ptr is not None:
                expert = tl.load(experts_ptr + slot_off, mask=taken, other=0)
                tl.store(back_ptr + (token * back_stride)[:, None] + expert, carried, mask=taken)
            else:
                tl.store(back_ptr + slot_off, carried, mask=exists)


@kernel
def _unpermute_backward_kernel(
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
    """A token's gradient is read once for every AT_ONCE of its slots; further programs write the pads."""
    cols = (cols // ALIGN) * ALIGN
    if tl.program_id(0) < tokens:
        token = tl.program_id(0).to(tl.int64)
        for first in range(0, slots, AT_ONCE):
            slot = first + tl.arange(0, AT_ONCE)  # [AT_ONCE]
            row = tl.load(row_of_slot_ptr + token * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
            taken = row >= 0
            weight = _load_probs(probs_ptr, experts_ptr, token, slot, slots, probs_stride, taken)
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
                        rows_ptr, scale_ptr, row, start, taken, cols, rows_stride, scale_row_stride,
                        scale_col_stride, FORMAT, AT_ONCE, TILE, ALIGN, COLS_MASKED,
                    )  # fmt: skip
                    dots += tl.sum(value * dy, axis=1)  # [AT_ONCE, TILE]
                if drows_ptr is not None:
                    mask = taken[:, None] & (col >= 0)[None, :]
                    if COLS_MASKED:
                        mask = taken[:, None] & (col < cols)[None, :]
                    row_off = tl.multiple_of(row * cols, ALIGN)
                    tl.store(
                        drows_ptr + row_off[:, None] + col[None, :],
                        (weight * dy).to(drows_ptr.dtype.element_ty),
                        mask=mask,
                    )
            if dprobs_ptr is not None:
                dots = dots.to(dprobs_ptr.dtype.element_ty)
                if experts_ptr is not None:
                    expert = tl.load(experts_ptr + token * slots + slot, mask=taken, other=0)
                    tl.store(dprobs_ptr + token * dprobs_stride + expert, dots, mask=taken)
                else:
                    tl.store(dprobs_ptr + token * dprobs_stride + slot, dots, mask=slot < slots)
    elif drows_ptr is not None:
        _write_pads(
            slot_of_row_ptr, drows_ptr, None, None, tl.program_id(0) - tokens, rows, cols, cols, 0, 0, 0, 1.0, None,
            0, TILE, ALIGN, COLS_MASKED,
        )  # fmt: skip


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsConfig:
    """How rows are cut: `rows` of them to a program, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest: int, numbers: int, target: str) -> RowsConfig:
        """Tiles of about so many numbers, 128 threads to each; on a CPU, pieces of one row."""
        if target == "cpu":
            return RowsConfig(1, cpu_tile(cols, smallest), 4)
        tile = min(max(1 << max(cols - 1, 0).bit_length(), smallest, 64), numbers)
        return RowsConfig(numbers // tile, tile, 2 if target.startswith("gfx") else 4)


def _at_once(slots: int) -> int:
    """Up to eight: as many loads of 16 bytes as a thread has registers for."""
    return 1 if slots == 1 else 2 if slots == 2 else 4 if slots <= 4 else 8


def _allocate_row_map(
    routing: Tensor, experts: int, slots: int, align: int, rows: int, dense: bool
) -> list[Tensor]:
    lead, device = routing.shape[:-1], routing.device
    shapes: list[Any] = [(*lead, slots), (rows,), (experts,), (experts,)]
    return [
        torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes + [(*lead, slots)] * dense
    ]


def _launch_row_map(
    outputs: list[Tensor], routing: Tensor, experts: int, slots: int, align: int, rows: int, dense: bool
) -> None:
    row_of_slot, slot_of_row, total, offsets = outputs[:4]
    target = capabilities_of(routing.device)
    if dense:
        mask = routing.contiguous().view(torch.uint8)
        tokens = mask.numel() // experts
        compact = Launch.of(_compact_kernel, num_warps=4, ROWS=16, TILE=128)
        compact((-(-tokens // 16), 1, 1), (mask, outputs[4]), (tokens, experts, slots))
        routing = outputs[4]
    routing = routing.contiguous()
    count = row_of_slot.numel()
    # Every program of the second launch reads the counts of all: no more of them than fill a GPU.
    programs = min(-(-count // 512), 16 if target.target == "cpu" else 128)
    program_slots = -(-count // (programs * 128)) * 128
    programs = -(-count // program_slots)
    counts = torch.empty((2, programs, experts), dtype=torch.int32, device=routing.device)
    Launch.of(_count_kernel, num_warps=8, BLOCK=1024, BINS=256)(
        (programs, 1, 1),
        (routing, counts, slot_of_row),
        (count, experts, rows, program_slots, -(-rows // programs)),
    )
    Launch.of(_place_kernel, num_warps=4, BLOCK=64, BINS=256, PIECE=16)(
        (programs, 1, 1),
        (routing, counts, row_of_slot, slot_of_row, total, offsets),
        (count, experts, rows, align, program_slots, programs),
    )


def _allocate_permute(
    x: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None, row_of_slot: Tensor,
    slot_of_row: Tensor, experts: Tensor | None, format: str | None, rowwise: bool, columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    rows, cols = slot_of_row.shape[0], x.shape[-1]
    outputs = []
    if format is None:
        outputs.append(torch.empty((rows, cols), dtype=x.dtype, device=x.device))
    else:
        f = Format.of(format)
        outputs.append(_stand_in(x, rows))
        outputs += allocate_flat(f, rows, cols, x.device, rowwise=rowwise, columnwise=columnwise)
    if probs is not None:
        outputs.append(torch.empty(rows, dtype=probs.dtype, device=x.device))
    return outputs


def _launch_permute(
    outputs: list[Tensor], x: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None,
    row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, format: str | None, rowwise: bool,
    columnwise: bool,
) -> None:  # fmt: skip
    rows, slots = slot_of_row.shape[0], row_of_slot.shape[-1]
    if rows == 0:
        return
    tokens = row_of_slot.numel() // slots
    target = capabilities_of(x.device)
    probs, probs_stride = _rows_of_probs(probs)
    row_probs = None if probs is None else outputs[-1]
    f = None if format is None else Format.of(format)
    if columnwise:
        assert f is not None
        x = flat_rows(x)
        cols = x.shape[1]
        tile, num_warps = stripe_tile(f.block, target.target)
        if target.target == "sm_89" and f.block == "1x128":
            num_warps = 8  # with 16, the 128 registers of a thread are a few too few for integer codes
        row_copy, col_copy = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=True)
        data, data_scale, *strides = copy_arguments(row_copy)
        data_t, data_t_scale, *strides_t = copy_arguments(col_copy)
        stripes = Launch.of(
            _permute_stripe_kernel, num_warps=num_warps, INPUT_MAX=torch.finfo(x.dtype).max, FORMAT=f,
            CAST=cast_mode(target), ROWS=STRIPE, TILE=tile, ALIGN=align_of(cols, x.stride(0)),
            COLS_MASKED=cols % tile != 0,
        )  # fmt: skip
        stripes(
            (count_stripes(rows, cols) * -(-cols // tile), 1, 1),
            (x, probs, experts, slot_of_row, row_probs, data, data_scale, data_t, data_t_scale),
            (rows, cols, slots, x.stride(0), probs_stride, *strides, *strides_t),
        )
        return
    scale_strides: tuple[int, ...] = (0, 0)
    y_scale_strides: tuple[int, ...] = (0, 0)
    y, y_scale, y_stride, scale_cols = outputs[0], None, x.shape[-1], 0
    input_max = 1.0 if f is None else torch.finfo(x.dtype).max
    if f is not None:
        y, y_scale = outputs[1], outputs[2]
        y_stride, y_scale_strides = y.stride(0), y_scale.stride()
    if codes is not None:
        assert codes_scale is not None
        x, f, input_max = codes, None, 1.0
        scale_strides, scale_cols = codes_scale.stride(), codes_scale.shape[1]
    x = flat_rows(x)
    cols = x.shape[1]
    config = RowsConfig.choose(cols, 1 if f is None else 128, 2048, target.target)
    token_programs = -(-tokens // config.rows) * -(-cols // config.tile)
    launch = Launch.of(
        _permute_kernel, num_warps=config.num_warps, INPUT_MAX=input_max, FORMAT=f,
        CAST=0 if f is None else cast_mode(target), ROWS=config.rows, TILE=config.tile,
        ALIGN=align_of(cols, x.stride(0), y_stride), COLS_MASKED=cols % config.tile != 0,
    )  # fmt: skip
    launch(
        (token_programs - (-rows // 32), 1, 1),
        (x, codes_scale, probs, experts, row_of_slot, slot_of_row, y, y_scale, row_probs),
        (
            tokens, rows, cols, slots, token_programs, scale_cols, x.stride(0), *scale_strides, probs_stride, y_stride,
            *y_scale_strides,
        ),
    )  # fmt: skip


def _rows_of_probs(probs: Tensor | None) -> tuple[Tensor | None, int]:
    if probs is None:
        return None, 0
    probs = probs if probs.is_contiguous() else probs.contiguous()
    return probs, probs.shape[-1]


def _allocate_unpermute(
    rows: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None, carried: Tensor | None,
    row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, expert_count: int, format: str | None,
) -> list[Tensor]:  # fmt: skip
    lead = row_of_slot.shape[:-1]
    outputs = [torch.empty((*lead, rows.shape[-1]), dtype=rows.dtype, device=rows.device)]
    if carried is not None:
        if experts is None:
            back = torch.empty(row_of_slot.shape, dtype=carried.dtype, device=rows.device)
        else:
            back = torch.zeros((*lead, expert_count), dtype=carried.dtype, device=rows.device)
        outputs.append(back)
    return outputs


def _launch_unpermute(
    outputs: list[Tensor], rows: Tensor, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor | None,
    carried: Tensor | None, row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, expert_count: int,
    format: str | None,
) -> None:  # fmt: skip
    slots = row_of_slot.shape[-1]
    tokens = row_of_slot.numel() // slots
    if tokens == 0:
        return
    target = capabilities_of(rows.device)
    f = None if format is None else Format.of(format)
    probs, probs_stride = _rows_of_probs(probs)
    back = None if carried is None else outputs[1]
    scale_strides: tuple[int, ...] = (0, 0)
    if codes is not None:
        assert codes_scale is not None
        rows, scale_strides = codes, codes_scale.stride()
    rows = flat_rows(rows)
    cols = rows.shape[1]
    config = RowsConfig.choose(cols, 1 if f is None else 128, 1024 if f is None else 2048, target.target)
    launch = Launch.of(
        _unpermute_kernel, num_warps=config.num_warps, FORMAT=f, AT_ONCE=_at_once(slots), ROWS=config.rows,
        TILE=config.tile, ALIGN=align_of(cols, rows.stride(0)), COLS_MASKED=cols % config.tile != 0,
    )  # fmt: skip
    launch(
        (-(-tokens // config.rows) * -(-cols // config.tile), 1, 1),
        (
            rows, codes_scale, probs, experts, None if carried is None else carried.contiguous(), row_of_slot,
            outputs[0], back,
        ),
        (
            tokens, cols, slots, rows.stride(0), *scale_strides, probs_stride,
            0 if back is None else back.shape[-1],
        ),
    )  # fmt: skip


def _allocate_unpermute_backward(
    dy: Tensor, rows: Tensor | None, codes: Tensor | None, codes_scale: Tensor | None, probs: Tensor,
    row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, format: str | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    outputs = []
    if needs[0]:
        outputs.append(torch.empty((slot_of_row.shape[0], dy.shape[-1]), dtype=dy.dtype, device=dy.device))
    if needs[1]:
        make = torch.empty if experts is None else torch.zeros
        outputs.append(make(probs.shape, dtype=probs.dtype, device=dy.device))
    return outputs


def _launch_unpermute_backward(
    outputs: list[Tensor], dy: Tensor, rows: Tensor | None, codes: Tensor | None, codes_scale: Tensor | None,
    probs: Tensor, row_of_slot: Tensor, slot_of_row: Tensor, experts: Tensor | None, format: str | None,
    needs: list[bool],
) -> None:  # fmt: skip
    slots, row_count = row_of_slot.shape[-1], slot_of_row.shape[0]
    tokens = row_of_slot.numel() // slots
    target = capabilities_of(dy.device)
    f = None if format is None or not needs[1] else Format.of(format)
    flat_probs, probs_stride = _rows_of_probs(probs)
    rows_stride = 0
    scale_strides: tuple[int, ...] = (0, 0)
    if not needs[1]:
        rows = codes_scale = None
    else:
        if codes is not None:
            assert codes_scale is not None
            rows, scale_strides = codes, codes_scale.stride()
        assert rows is not None
        rows = flat_rows(rows)
        rows_stride = rows.stride(0)
    dy = flat_rows(dy)
    cols = dy.shape[1]
    at_once = _at_once(slots)
    if target.target == "cpu":
        tile, num_warps = cpu_tile(cols, 128), 4
    else:  # 64 numbers of the slots' rows to a thread, and 16 bytes of dy
        tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
        num_warps = 2 if target.target.startswith("gfx") else 4
    launch = Launch.of(
        _unpermute_backward_kernel, num_warps=num_warps, FORMAT=f, AT_ONCE=at_once, TILE=tile,
        ALIGN=align_of(cols, dy.stride(0), rows_stride), COLS_MASKED=cols % tile != 0,
    )  # fmt: skip
    launch(
        (tokens - (-row_count // 32 if needs[0] else 0), 1, 1),
        (
            dy, rows, codes_scale, flat_probs, experts, row_of_slot, slot_of_row, outputs[0] if needs[0] else None,
            outputs[-1] if needs[1] else None,
        ),
        (
            tokens, row_count, cols, slots, dy.stride(0), rows_stride, *scale_strides, probs_stride, probs.shape[-1],
        ),
    )  # fmt: skip


# ---- registration ---------------------------------------------------------------------------------------


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    probs, row_of_slot, slot_of_row, experts = inputs[3:7]
    ctx.save_for_backward(row_of_slot, slot_of_row, experts)
    ctx.expert_count = probs.shape[-1] if probs is not None else 0
    ctx.carries = probs is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 : len(output) - ctx.carries])


def _permute_gradients(ctx: Any, grads: Any) -> Any:
    row_of_slot, slot_of_row, experts = ctx.saved_tensors
    drows = grads[0] if ctx.needs_input_grad[0] else None
    dcarried = grads[-1] if ctx.carries and ctx.needs_input_grad[3] else None
    dx = dprobs = None
    if drows is not None:
        dx, *rest = unpermute_op(
            drows, None, None, None, dcarried, row_of_slot, slot_of_row, experts, ctx.expert_count, None
        )
        dprobs = rest[0] if rest else None
    elif dcarried is not None:
        dprobs = _carried_back(dcarried, row_of_slot, experts, ctx.expert_count)
    return dx, None, None, dprobs, *[None] * 6


def _setup_unpermute(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, codes, codes_scale, probs, carried, row_of_slot, slot_of_row, experts = inputs[:8]
    weighs = probs is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(
        rows if weighs and codes is None else None, codes if weighs else None, codes_scale if weighs else None,
        probs, row_of_slot, slot_of_row, experts,
    )  # fmt: skip
    ctx.format, ctx.carries = inputs[9], carried is not None
    ctx.shape = rows.shape
    ctx.set_materialize_grads(False)


def _unpermute_gradients(ctx: Any, grads: Any) -> Any:
    rows, codes, codes_scale, probs, row_of_slot, slot_of_row, experts = ctx.saved_tensors
    dy = grads[0]
    dback = grads[1] if ctx.carries and ctx.needs_input_grad[4] else None
    needs = [ctx.needs_input_grad[0], probs is not None and ctx.needs_input_grad[3]]
    drows = dprobs = dcarried = None
    if dy is not None and probs is not None and any(needs):
        results = iter(
            unpermute_backward_op(
                dy, rows, codes, codes_scale, probs, row_of_slot, slot_of_row, experts, ctx.format, needs
            )
        )
        drows, dprobs = (next(results) if need else None for need in needs)
    elif dy is not None and needs[0]:
        drows, *rest = permute_op(dy, None, None, dback, row_of_slot, slot_of_row, experts, None, True, False)
        dcarried = rest[0] if rest else None
    if dback is not None and dcarried is None:
        dcarried = _pick(_flat_probs(dback, row_of_slot, experts), slot_of_row.long())
    return drows, None, None, dprobs, dcarried, *[None] * 5


row_map_op = define_flat_op(
    "row_map(Tensor routing, SymInt experts, SymInt slots, SymInt align, SymInt rows, bool dense) -> Tensor[]",
    allocate=_allocate_row_map,
    launch=_launch_row_map,
    reference=row_map_reference,
    variants=4,
)

unpermute_backward_op = define_flat_op(
    "unpermute_backward(Tensor dy, Tensor? rows, Tensor? codes, Tensor? codes_scale, Tensor probs, "
    "Tensor row_of_slot, Tensor slot_of_row, Tensor? experts, str? format, bool[] needs) -> Tensor[]",
    allocate=_allocate_unpermute_backward,
    launch=_launch_unpermute_backward,
    reference=unpermute_backward_reference,
    variants=24,
)

permute_op = define_flat_op(
    "permute(Tensor x, Tensor? codes, Tensor? codes_scale, Tensor? probs, Tensor row_of_slot, Tensor slot_of_row, "
    "Tensor? experts, str? format, bool rowwise, bool columnwise) -> Tensor[]",
    allocate=_allocate_permute,
    launch=_launch_permute,
    reference=permute_reference,
    setup_context=_setup_permute,
    backward=_permute_gradients,
    variants=24,
)

unpermute_op = define_flat_op(
    "unpermute(Tensor rows, Tensor? codes, Tensor? codes_scale, Tensor? probs, Tensor? carried, Tensor row_of_slot, "
    "Tensor slot_of_row, Tensor? experts, SymInt expert_count, str? format) -> Tensor[]",
    allocate=_allocate_unpermute,
    launch=_launch_unpermute,
    reference=unpermute_reference,
    setup_context=_setup_unpermute,
    backward=_unpermute_gradients,
    variants=24,
)


# ---- public functions -----------------------------------------------------------------------------------


class RowMap(NamedTuple):
    """Where the tokens' rows go, all of it on the device. Made by `row_map`.

    - `row_of_slot`: int32 [..., slots], the row of each slot, or -1.
    - `slot_of_row`: int32 [rows], `token * slots + j`, or -1 for a pad.
    - `counts`: int32 [experts], the tokens of each expert, those whose rows did not fit among them.
    - `offsets`: int32 [experts], where each expert's region ends, pads included, and the next one begins; no further
      than the last row that there is.
    - `align`: what the length of each expert's region is a multiple of, unless it is cut off for want of rows.
    - `experts`: int32 [..., slots] if the routing was a mask; then probabilities are [..., experts].
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    counts: Tensor
    offsets: Tensor
    align: int
    experts: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """Where each expert's own rows end and its pads begin: the `offsets` that `glu` takes. Like `offsets` they
        never decrease and never point past the last row, also where rows were dropped."""
        starts = self.offsets.roll(1).index_fill(0, self.offsets.new_zeros(1, dtype=torch.int64), 0)
        return torch.minimum(starts + self.counts, self.offsets)


def row_map(
    routing: Tensor,
    experts: int | None = None,
    *,
    slots: int | None = None,
    align: int = 1,
    rows: int | None = None,
) -> RowMap:
    """Sort tokens by expert, stably, with every expert's region padded to a multiple of `align` rows.

    - `routing`: the experts of each token, int32 or int64 [..., slots], with `experts` of them in all; a number that
      is none of theirs (-1, another rank's expert) is a slot without a row. Or a mask [..., experts], in which
      case a token's slots are its experts in ascending order, at most `slots` of them (by default `experts`).
    - `rows`: how many rows to make room for. By default as many as the worst case takes: the slots, and for each expert
      that can have one of them `align - 1` pads, together rounded down to a multiple of `align`,
      `(tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align`, which is 0 without tokens. It
      may be any upper bound, or the exact number if it is known. Nothing waits for the device: rows beyond it are
      dropped, their slots have row -1, and `offsets` and `ends` stop at the last row. `counts` still has them:
      `result.counts.sum() - (result.slot_of_row >= 0).sum()` rows are missing.

    An expert without tokens has no rows. The result is the same in every run.

    A row map of a DTensor is that of this rank's tokens: plain tensors, with rows that are counted on this rank alone.

    >>> import torch, weft
    >>> rows = weft.row_map(torch.tensor([[2, 0], [2, 1], [0, 2]]), 4, align=2, rows=8)
    >>> rows.counts.tolist(), rows.offsets.tolist()
    ([2, 1, 3, 0], [2, 4, 8, 8])
    >>> rows.slot_of_row.tolist()
    [1, 4, 3, -1, 0, 2, 5, -1]
    >>> rows.row_of_slot.tolist()
    [[4, 0], [5, 2], [1, 6]]
    """
    check_input("routing", routing, (*INTEGERS, torch.bool))
    (routing,) = local_rows("row_map", routing=routing)
    dense = routing.dtype == torch.bool
    last = routing.shape[-1]
    if dense:
        experts = last if experts is None else experts
        slots = last if slots is None else slots
        if experts != last:
            raise ValueError(f"the mask is for {last} experts, not {experts}")
    elif experts is None or (slots is not None and slots != last):
        raise ValueError(
            f"routing has {last} experts a token: give `experts`, the number of all, and no other slots"
        )
    else:
        slots = last
    if min(whole("align", align), whole("slots", slots), whole("experts", experts)) < 1:
        raise ValueError(f"align, slots and experts must be at least 1; got {align}, {slots}, {experts}")
    tokens = 1
    for size in routing.shape[:-1]:
        tokens = tokens * size
    count = tokens * slots
    if count + experts * align >= 2**31:
        raise ValueError(f"rows are numbered in 32 bits: {count} slots of {experts} experts are too many")
    if rows is None:
        most = count + min(experts, count) * (align - 1)
        rows = most // align * align
    if whole("rows", rows) < 0 or rows >= 2**31:
        raise ValueError(f"rows must lie between 0 and 2**31 - 1; got {rows}")
    outputs = row_map_op(routing, experts, slots, align, rows, dense)
    row_of_slot, slot_of_row, counts, offsets = outputs[:4]
    return RowMap(row_of_slot, slot_of_row, counts, offsets, align, outputs[4] if dense else None)


def _check(x: Tensor, rows: RowMap, what: str, leading: tuple[int, ...]) -> None:
    check_input(what, x)
    if tuple(x.shape[:-1]) != leading:
        raise ValueError(
            f"{what} must be [{', '.join(map(str, leading))}, K] for these rows; got {tuple(x.shape)}"
        )
    if x.device != rows.slot_of_row.device:
        raise ValueError(f"{what} is on {x.device}, the row map on {rows.slot_of_row.device}")


def _check_rows(rows: RowMap) -> None:
    if not isinstance(rows, RowMap):
        raise TypeError(
            f"rows must be a weft.RowMap; got a {type(rows).__name__}. Make one of the experts' indices first: "
            "weft.row_map(indices, experts)"
        )


def _check_probs(probs: Tensor | None, rows: RowMap) -> None:
    if probs is None:
        return
    shape = rows.row_of_slot.shape
    if rows.experts is not None:
        shape = torch.Size([*shape[:-1], rows.counts.shape[0]])
    check_tensor("probs", probs, FLOATS, rows.slot_of_row.device, shape)


_MOVED = ("1x128", "mx", "row")  # blocks whose scales belong to one row
_MADE = ("1x128", "mx")


def _taken_apart(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Format | None]:
    """(x or its stand-in, codes, scales, format)."""
    if not isinstance(x, QTensor):
        return x, None, None, None
    if torch.compiler.is_compiling():  # which does not see inside; the dispatcher takes it apart
        return x, None, None, Format.of(x.spec)
    if x.rowwise is None or x.format.block not in _MOVED:
        raise ValueError(
            f"a quantised tensor needs its row-wise copy with blocks {', '.join(_MOVED)}; got {x!r}"
        )
    return standing_in(x), x.rowwise.data, x.rowwise.scale, x.format


def permute(
    x: Tensor,
    rows: RowMap,
    probs: Tensor | None = None,
    *,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Any:
    """The row of each token, once for each of its experts, in the order of the experts: `y[r] = x[token of row r]`.

    x: [..., K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row, whose codes and scales are moved as
    they are. `rows` comes from `row_map`. Pads are zeros. Returns y [rows, K]; with `probs` also that of each row,
    0 in pads. Of DTensors, sharded along tokens, it takes this rank's tokens; y is a plain tensor of this rank.

    - `probs`: [..., slots], or [..., experts] if the rows came from a mask; any float dtype, which the result has.
    - `quantize`: a format with blocks 1x128 or mx; y is then a `QTensor` with the bytes of `quantize(y)`. `rowwise`
      and `columnwise` choose its copies. `columnwise` wants `align` to be a multiple of the block's length, so that
      no group has rows of two experts.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=32)
    >>> y, p = weft.permute(x, rows, torch.rand(4, 2), quantize="mx", columnwise=True)
    >>> y.shape, p.shape, rows.offsets.tolist()
    (torch.Size([96, 256]), torch.Size([96]), [32, 64, 96])
    """
    _check_rows(rows)
    x, probs = local_rows("permute", x=x, probs=probs)
    plain, codes, scale, f = _taken_apart(x)
    _check(plain, rows, "x", tuple(rows.row_of_slot.shape[:-1]))
    _check_probs(probs, rows)
    if quantize is not None:
        if f is not None:
            raise ValueError("x is quantised already: permute it as it is, or dequantise it")
        f = Format.of(quantize)
        if f.block not in _MADE:
            raise ValueError(
                f"permute quantises to blocks {', '.join(_MADE)}; got {f.block!r}: use weft.quantize on its result"
            )
        if not (rowwise or columnwise):
            raise ValueError("rowwise=False needs columnwise=True: a QTensor has at least one copy")
        if columnwise and rows.align % f.group:
            raise ValueError(
                f"a column-wise copy has groups of {f.group} rows, and with align={rows.align} some would have rows of "
                f"two experts: make the row map with align={f.group}"
            )
    elif columnwise or not rowwise:
        raise ValueError("rowwise and columnwise go with quantize=…")
    outputs = permute_op(
        plain, codes, scale, probs, rows.row_of_slot, rows.slot_of_row, rows.experts,
        None if f is None else f.spec, rowwise, columnwise,
    )  # fmt: skip
    y: Tensor = outputs[0]
    if f is not None:
        y = wrap(y, f, *split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise))
    return y if probs is None else (y, outputs[-1])


def unpermute(y: Tensor, rows: RowMap, probs: Tensor | None = None, *, carried: Tensor | None = None) -> Any:
    """The rows of each token's experts, added up: `x[t] = sum over j of probs[t, j] * y[row of slot j of t]`.

    y: [rows, K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row. Without `probs` their place is
    taken by 1. The sum is in fp32, in the order of the slots, rounded once to y's dtype: the same bits every run.
    Returns x [..., K]; with `carried` [rows] also what it holds for each slot, in the shape of probs.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=16)
    >>> probs = torch.tensor([0.75, 0.25]).expand(4, 2)
    >>> torch.equal(weft.unpermute(weft.permute(x, rows), rows, probs), x)
    True
    """
    _check_rows(rows)
    (probs,) = local_rows("unpermute", probs=probs)
    plain, codes, scale, f = _taken_apart(y)
    if f is not None and f.packed == 2:
        raise ValueError(f"unpermute adds up rows of 8-bit codes; dequantise {f.spec} first")
    _check(plain, rows, "y", (rows.slot_of_row.shape[0],))
    _check_probs(probs, rows)
    if carried is not None:
        check_tensor("carried", carried, FLOATS, rows.slot_of_row.device, rows.slot_of_row.shape)
    outputs = unpermute_op(
        plain, codes, scale, probs, carried, rows.row_of_slot, rows.slot_of_row, rows.experts, rows.counts.shape[0],
        None if f is None else f.spec,
    )  # fmt: skip
    return outputs[0] if carried is None else tuple(outputs)
