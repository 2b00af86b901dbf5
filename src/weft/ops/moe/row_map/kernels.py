"""The kernels that count the slots of experts and place their rows; see `row_map` for what they compute."""

from __future__ import annotations

from ....language import tl, triton
from ....runtime import kernel


@triton.jit
def _expert_of(routing_ptr, slot, count, experts):
    """Experts of slots [S] as int32; -1 if there is no such slot, or no such expert."""
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
def count_kernel(
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
    """Count how many of a program's slots each expert has, and mark all rows as pads until slots are placed."""
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
def place_kernel(
    routing_ptr,  # int32 or int64 [count]
    counts_ptr,  # int32 [2, programs, experts]: the counts of `count_kernel`, and scratch for each expert's next row
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
    """Find where the rows of each expert begin, and where this program's rows begin among them; then place its
    slots."""
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
    tl.debug_barrier()  # next_ptr is read by other threads than those that wrote it

    lane = tl.arange(0, BLOCK)
    for first in range(0, program_slots, BLOCK):
        slot = program.to(tl.int64) * program_slots + first + lane
        expert = _expert_of(routing_ptr, slot, tl.where(first + lane < program_slots, count, 0), experts)
        next = tl.load(next_ptr + expert, mask=expert >= 0, other=0)
        # For each slot of the block, how many slots with the same expert come before it (low 16 bits) and after it
        # (high 16 bits). [BLOCK, BLOCK]
        side = tl.where(lane[None, :] < lane[:, None], 1, tl.where(lane[None, :] > lane[:, None], 65536, 0))
        same = tl.sum(tl.where(expert[:, None] == expert[None, :], side, 0), axis=1)
        row = next.to(tl.int64) + (same & 0xFFFF)
        fits = (expert >= 0) & (row < rows) & (row >= 0)
        mine = (first + lane < program_slots) & (slot < count)
        tl.store(row_of_slot_ptr + slot, tl.where(fits, row, -1), mask=mine)
        tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=fits)
        tl.debug_barrier()
        tl.store(next_ptr + expert, row + 1, mask=(expert >= 0) & (same < 65536))
        tl.debug_barrier()
