"""Reference of the row map in plain PyTorch."""

from __future__ import annotations

import torch

from .arguments import RowMapArgs, RowMapOutputs


def row_map_reference(a: RowMapArgs) -> RowMapOutputs:
    """Define the outputs of the op."""
    routing, experts = a.routing, a.experts
    if a.masked:
        column = torch.arange(experts, device=routing.device)
        ordered = torch.where(routing.reshape(-1, experts) != 0, column, experts).sort(1).values
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
