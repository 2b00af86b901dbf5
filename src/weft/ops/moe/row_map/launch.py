"""Launches of a row map."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.rows import contiguous
from .arguments import RowMapArgs, RowMapOutputs
from .kernels import compact_kernel, count_kernel, place_kernel

SLOTS = 128  # slots per program are a multiple of it


class MapConfig(NamedTuple):
    """Launch configuration of kernels that read `block` slots at a time."""

    block: int
    num_warps: int


@choice("row_map.compact", block=(1, 256), num_warps=(1, 16))
def compact_config(target: Capabilities) -> MapConfig:
    """Return the configuration of `compact_kernel`; a block counts tokens, each with a row of the mask."""
    return MapConfig(16, 4)


@choice("row_map.count", block=(128, 4096), num_warps=(1, 16))
def count_config(target: Capabilities) -> MapConfig:
    return MapConfig(1024, 8)


@choice("row_map.place", block=(16, SLOTS), num_warps=(1, 16))
def place_config(target: Capabilities) -> MapConfig:
    """Return the configuration of `place_kernel`, which compares each slot of a block with every other."""
    return MapConfig(64, 4)


@remembered
def _map_launches(
    count: int, experts: int, rows: int, align: int, target: Capabilities
) -> tuple[BoundLaunch, BoundLaunch]:
    """Bind the kernels that count the rows of each expert and that place them."""
    # Every program of the second launch reads the counts of all programs, so there are no more than fill a GPU.
    programs = min(-(-count // 512), 16 if target.is_cpu else 128)
    program_slots = -(-count // (programs * SLOTS)) * SLOTS
    programs = -(-count // program_slots)
    block, num_warps = count_config(target)
    counting = Launch.of(count_kernel, num_warps=num_warps, BLOCK=block, BINS=256)
    block, num_warps = place_config(target)
    placing = Launch.of(place_kernel, num_warps=num_warps, BLOCK=block, BINS=256, PIECE=16)
    sizes = {"count": count, "experts": experts, "rows": rows, "program_slots": program_slots}
    return (
        counting.bind((programs, 1, 1), **sizes, program_rows=-(-rows // programs)),
        placing.bind((programs, 1, 1), **sizes, align=align, programs=programs),
    )


def launch_row_map(o: RowMapOutputs, a: RowMapArgs) -> None:
    routing, target = contiguous(a.routing), capabilities_of(a.routing.device)
    if o.experts is not None:
        tokens = routing.numel() // a.experts
        rows, num_warps = compact_config(target)
        compact = Launch.of(compact_kernel, num_warps=num_warps, ROWS=rows, TILE=128)
        compact(
            (-(-tokens // rows), 1, 1),
            *compact_kernel.arguments(
                mask_ptr=routing.view(torch.uint8),
                experts_ptr=o.experts,
                tokens=tokens,
                experts=a.experts,
                slots=a.slots,
            ),
        )
        routing = o.experts
    counting, placing = _map_launches(o.row_of_slot.numel(), a.experts, a.rows, a.align, target)
    counts = scratch((2, counting.grid[0], a.experts), torch.int32, routing.device)
    counting(*count_kernel.tensors(routing_ptr=routing, counts_ptr=counts, slot_of_row_ptr=o.slot_of_row))
    placing(
        *place_kernel.tensors(
            routing_ptr=routing,
            counts_ptr=counts,
            row_of_slot_ptr=o.row_of_slot,
            slot_of_row_ptr=o.slot_of_row,
            total_ptr=o.counts,
            offsets_ptr=o.offsets,
        )
    )
