"""The row map: tokens sorted by expert, and room for their rows.

A token has `slots` experts; slot s = token * slots + j is its j-th. The slots are sorted by expert, stably, and each
expert's region has a multiple of `align` rows. Everything that moves rows follows two lists of indices:

    slot_of_row[r]    the slot that row r belongs to, or -1 if the row is a pad
    row_of_slot[s]    the row that belongs to slot s, or -1 if it has none
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Capabilities, Launch, Op, capabilities_of, choice, kernel, local_rows
from ..common.checks import INTEGERS, check_input, whole

# ---- arguments and outputs ------------------------------------------------------------------------------


class RowMapArgs(NamedTuple):
    routing: Tensor  # experts [..., slots] of each token, or a mask [..., experts]
    experts: int
    slots: int
    align: int
    rows: int

    @property
    def masked(self) -> bool:
        """Whether the routing is a mask."""
        return self.routing.dtype == torch.bool


class RowMapOutputs(NamedTuple):
    row_of_slot: Tensor  # int32 [..., slots]
    slot_of_row: Tensor  # int32 [rows]
    counts: Tensor  # int32 [experts]
    offsets: Tensor  # int32 [experts]
    experts: Tensor | None  # int32 [..., slots], if the routing is a mask


class RowMap(NamedTuple):
    """Where the tokens' rows go, all of it on the device. Made by `row_map`.

    - `row_of_slot`: int32 [..., slots], the row of each slot, or -1.
    - `slot_of_row`: int32 [rows], `token * slots + j`, or -1 for a pad.
    - `counts`: int32 [experts], how many tokens chose each expert, including those whose rows did not fit.
    - `offsets`: int32 [experts], the end of each expert's region with its pads, where the next region begins; at most
      the number of rows.
    - `align`: the length of each expert's region is a multiple of it, except for a region that the last row cuts off.
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
        """Where each expert's own rows end and its pads begin, int32 [experts]: the argument `ends` of `glu`. Like
        `offsets` they never decrease and never exceed the number of rows, also where rows were dropped."""
        starts = self.offsets.roll(1).index_fill(0, self.offsets.new_zeros(1, dtype=torch.int64), 0)
        return torch.minimum(starts + self.counts, self.offsets)


# ---- reference ------------------------------------------------------------------------------------------


# ---- kernels --------------------------------------------------------------------------------------------


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
def _place_kernel(
    routing_ptr,  # int32 or int64 [count]
    counts_ptr,  # int32 [2, programs, experts]: the counts of `_count_kernel`, and scratch for each expert's next row
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


# ---- launch ---------------------------------------------------------------------------------------------


SLOTS = 128  # the slots of a program are a multiple


class MapConfig(NamedTuple):
    """How slots are read: `block` of them at a time."""

    block: int
    num_warps: int


@choice("row_map.compact", block=(1, 256), num_warps=(1, 16))
def compact_config(target: Capabilities) -> MapConfig:
    """A block of tokens, whose rows of the mask are read."""
    return MapConfig(16, 4)


@choice("row_map.count", block=(128, 4096), num_warps=(1, 16))
def count_config(target: Capabilities) -> MapConfig:
    return MapConfig(1024, 8)


@choice("row_map.place", block=(16, SLOTS), num_warps=(1, 16))
def place_config(target: Capabilities) -> MapConfig:
    """Each slot of a block is compared with every other."""
    return MapConfig(64, 4)


# ---- registration ---------------------------------------------------------------------------------------


class RowMapOp(Op[RowMapArgs, RowMapOutputs], name="row_map", variants=4):
    def allocate(self, a: RowMapArgs) -> RowMapOutputs:
        device, shape = a.routing.device, (*a.routing.shape[:-1], a.slots)
        return RowMapOutputs(
            torch.empty(*shape, dtype=torch.int32, device=device),
            torch.empty(a.rows, dtype=torch.int32, device=device),
            torch.empty(a.experts, dtype=torch.int32, device=device),
            torch.empty(a.experts, dtype=torch.int32, device=device),
            torch.empty(*shape, dtype=torch.int32, device=device) if a.masked else None,
        )

    def present(self, a: RowMapArgs) -> Any:
        return RowMapOutputs(True, True, True, True, a.masked)  # type: ignore[arg-type]

    def launch(self, o: RowMapOutputs, a: RowMapArgs) -> None:
        routing, target = a.routing.contiguous(), capabilities_of(a.routing.device)
        if o.experts is not None:
            tokens = routing.numel() // a.experts
            rows, num_warps = compact_config(target)
            compact = Launch.of(_compact_kernel, num_warps=num_warps, ROWS=rows, TILE=128)
            compact(
                (-(-tokens // rows), 1, 1),
                (routing.view(torch.uint8), o.experts),
                (tokens, a.experts, a.slots),
            )
            routing = o.experts
        count = o.row_of_slot.numel()
        # Every program of the second launch reads the counts of all programs: no more programs than fill a GPU.
        programs = min(-(-count // 512), 16 if target.is_cpu else 128)
        program_slots = -(-count // (programs * SLOTS)) * SLOTS
        programs = -(-count // program_slots)
        counts = torch.empty((2, programs, a.experts), dtype=torch.int32, device=routing.device)
        block, num_warps = count_config(target)
        Launch.of(_count_kernel, num_warps=num_warps, BLOCK=block, BINS=256)(
            (programs, 1, 1),
            (routing, counts, o.slot_of_row),
            (count, a.experts, a.rows, program_slots, -(-a.rows // programs)),
        )
        block, num_warps = place_config(target)
        Launch.of(_place_kernel, num_warps=num_warps, BLOCK=block, BINS=256, PIECE=16)(
            (programs, 1, 1),
            (routing, counts, o.row_of_slot, o.slot_of_row, o.counts, o.offsets),
            (count, a.experts, a.rows, a.align, program_slots, programs),
        )

    def reference(self, a: RowMapArgs) -> RowMapOutputs:
        """The definition."""
        routing, experts = a.routing, a.experts
        if a.masked:
            number = torch.arange(experts, device=routing.device)
            ordered = torch.where(routing.reshape(-1, experts) != 0, number, experts).sort(1).values
            missing = ordered.new_full((len(ordered), max(a.slots - experts, 0)), experts)
            key = torch.cat([ordered[:, : a.slots], missing], 1).flatten()
        else:
            key = routing.flatten().long()
        count = key.numel()
        valid = (key >= 0) & (key < experts)
        key = torch.where(valid, key, experts)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        # Slots without an expert are sorted to the end.
        rank = torch.empty_like(key)
        rank[key.argsort(stable=True)] = torch.arange(count, device=key.device)
        rank = rank - (counts.cumsum(0) - counts)[key]
        padded = (counts + a.align - 1) // a.align * a.align
        row = (padded.cumsum(0) - padded)[key] + rank
        fits = valid & (row < a.rows)
        slot_of_row = torch.full((a.rows + 1,), -1, dtype=torch.int32, device=key.device)
        slot = torch.arange(count, dtype=torch.int32, device=key.device)
        slot_of_row.scatter_(0, torch.where(fits, row, a.rows), slot)
        shape = (*routing.shape[:-1], a.slots)
        return RowMapOutputs(
            torch.where(fits, row, -1).int().view(shape),
            slot_of_row[: a.rows].clone(),
            counts[:experts].int(),
            padded[:experts].cumsum(0).clamp(max=a.rows).int(),
            torch.where(valid, key, -1).int().view(shape) if a.masked else None,
        )


row_map_op = RowMapOp()


# ---- public function ------------------------------------------------------------------------------------


def row_map(
    routing: Tensor,
    experts: int | None = None,
    *,
    slots: int | None = None,
    align: int = 1,
    rows: int | None = None,
) -> RowMap:
    """Sort tokens by expert, stably, with every expert's region padded to a multiple of `align` rows.

    - `routing`: the experts of each token, int32 or int64 [..., slots], numbers below `experts`, the number of experts.
      Any other number (-1, another rank's expert) is a slot without a row. Or a mask [..., experts]: then a token's
      slots are its experts in ascending order, at most `slots` of them (by default `experts`).
    - `rows`: how many rows to make room for. By default as many as the worst case takes: the slots, and for each expert
      that can have one of them `align - 1` pads, together rounded down to a multiple of `align`,
      `(tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align`, which is 0 without tokens. It
      may be any upper bound, or the exact number if it is known. Nothing waits for the device: rows beyond it are
      dropped, their slots have row -1, and `offsets` and `ends` stop at the last row. `counts` still has them:
      `result.counts.sum() - (result.slot_of_row >= 0).sum()` is how many were dropped.

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
    last = routing.shape[-1]
    if routing.dtype == torch.bool:
        experts = last if experts is None else experts
        slots = last if slots is None else slots
        if experts != last:
            raise ValueError(f"the mask has {last} experts, but experts={experts}: leave that out")
    elif experts is None or (slots is not None and slots != last):
        raise ValueError(
            f"routing has {last} experts for each token: give `experts`, the number of all experts, and no `slots`"
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
    o = row_map_op(RowMapArgs(routing, experts, slots, align, rows))
    return RowMap(o.row_of_slot, o.slot_of_row, o.counts, o.offsets, align, o.experts)
