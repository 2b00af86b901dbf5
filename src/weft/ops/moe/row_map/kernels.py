"""Kernels that count the slots of experts and place their rows; `row_map` documents the result."""

from __future__ import annotations

from ....language import tl, triton
from ....runtime import kernel


@triton.jit
def _expert_of(routing_ptr, slot, count, experts):
    """Load the experts of slots [S] as int32; -1 if the slot or the expert does not exist."""
    expert = tl.load(routing_ptr + slot, mask=slot < count, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@kernel
def compact_kernel(
    mask_ptr,  # bytes [tokens, experts]
    experts_ptr,  # int32 [tokens, slots]
    tokens,
    experts,
    slots,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the experts of each token of a mask in ascending order, then -1."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token_mask = (token < tokens)[:, None]
    slots_before = tl.zeros((ROWS,), tl.int32)
    for start in range(0, experts, TILE):
        expert = start + tl.arange(0, TILE)
        chosen = tl.load(
            mask_ptr + (token * experts)[:, None] + expert[None, :],
            mask=token_mask & (expert < experts)[None, :],
            other=0,
        )
        chosen = (chosen != 0).to(tl.int32)  # [ROWS, TILE]
        slot = slots_before[:, None] + tl.cumsum(chosen, axis=1) - 1
        fits = (chosen != 0) & (slot < slots)
        experts_tile = tl.broadcast_to(expert[None, :], (ROWS, TILE))
        tl.store(experts_ptr + (token * slots)[:, None] + slot, experts_tile, mask=fits)
        slots_before += tl.sum(chosen, axis=1)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        unused = token_mask & (slot[None, :] >= slots_before[:, None]) & (slot < slots)[None, :]
        tl.store(
            experts_ptr + (token * slots)[:, None] + slot[None, :],
            tl.full((ROWS, TILE), -1, tl.int32),
            mask=unused,
        )


@kernel
def count_kernel(
    routing_ptr,  # int32 or int64 [count]: the expert of each slot
    counts_ptr,  # int32 [2, programs, experts]; the first half is written
    slot_of_row_ptr,  # int32 [rows]
    count,
    experts,
    rows,
    program_slots,
    program_rows,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count each expert's slots of a program, and mark all rows as pads until slots are placed."""
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
        owned = (lane < program_rows) & (row < rows)
        tl.store(slot_of_row_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=owned)


@kernel
def place_kernel(
    routing_ptr,  # int32 or int64 [count]
    counts_ptr,  # int32 [2, programs, experts]: counts of `count_kernel`, and scratch for each expert's next row
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
    """Compute the first row of each expert, and this program's first row for it; then place the program's slots."""
    program = tl.program_id(0)
    next_ptr = counts_ptr + (programs + program).to(tl.int64) * experts  # [experts]
    begin = 0
    for start in range(0, experts, BINS):
        bin = start + tl.arange(0, BINS)
        total = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        for first in range(0, programs, PIECE):
            other = first + tl.arange(0, PIECE)
            exists = (other < programs)[:, None] & (bin < experts)[None, :]
            other_off = (other.to(tl.int64) * experts)[:, None]
            counts = tl.load(counts_ptr + other_off + bin[None, :], mask=exists, other=0)
            total += tl.sum(counts, axis=0)  # counts [PIECE, BINS]
            before += tl.sum(tl.where((other < program)[:, None], counts, 0), axis=0)
        padded = ((total + align - 1) // align * align).to(tl.int32)
        end = begin + tl.cumsum(padded, axis=0)
        tl.store(next_ptr + bin, end - padded + before, mask=bin < experts)
        if program == 0:
            tl.store(total_ptr + bin, total, mask=bin < experts)
            tl.store(offsets_ptr + bin, tl.minimum(end, rows), mask=bin < experts)
        begin += tl.sum(padded, axis=0)
    tl.debug_barrier()  # next_ptr is written and read by different threads

    lane = tl.arange(0, BLOCK)
    for first in range(0, program_slots, BLOCK):
        slot = program.to(tl.int64) * program_slots + first + lane
        expert = _expert_of(routing_ptr, slot, tl.where(first + lane < program_slots, count, 0), experts)
        next = tl.load(next_ptr + expert, mask=expert >= 0, other=0)
        # Per slot of the block, the number of slots with the same expert before it (low 16 bits) and after it (high
        # 16 bits). [BLOCK, BLOCK]
        side = tl.where(lane[None, :] < lane[:, None], 1, tl.where(lane[None, :] > lane[:, None], 65536, 0))
        same = tl.sum(tl.where(expert[:, None] == expert[None, :], side, 0), axis=1)
        row = next.to(tl.int64) + (same & 0xFFFF)
        fits = (expert >= 0) & (row < rows) & (row >= 0)
        owned = (first + lane < program_slots) & (slot < count)
        tl.store(row_of_slot_ptr + slot, tl.where(fits, row, -1), mask=owned)
        tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=fits)
        tl.debug_barrier()
        tl.store(next_ptr + expert, row + 1, mask=(expert >= 0) & (same < 65536))
        tl.debug_barrier()
