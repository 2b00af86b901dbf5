"""The row map: tokens sorted by expert, with space for their rows.

A token has `slots` experts; slot s = token * slots + j is its j-th. The slots are stably sorted by expert, and each
expert's region has a multiple of `align` rows. All ops that move rows use two lists of indices:

    slot_of_row[r]    the slot that row r belongs to, or -1 if the row is a pad
    row_of_slot[s]    the row that belongs to slot s, or -1 if it has none
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ....runtime import Op, Present, local_rows
from ...common.checks import INTEGERS, check_input, whole
from .arguments import RowMap, RowMapArgs, RowMapOutputs
from .reference import row_map_reference


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

    def present(self, a: RowMapArgs) -> Present:
        return True, True, True, True, a.masked

    @cached_property
    def launch(self) -> Callable[[RowMapOutputs, RowMapArgs], None]:
        from .launch import launch_row_map

        return launch_row_map

    def reference(self, a: RowMapArgs) -> RowMapOutputs:
        return row_map_reference(a)


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
    """Stably sort tokens by expert, with every expert's region padded to a multiple of `align` rows.

    - `routing`: the experts of each token, int32 or int64 [..., slots], from 0 to `experts - 1`. Any other value (-1,
      another rank's expert) is a slot without a row. Or a mask [..., experts]: then a token's slots are its experts in
      ascending order, at most `slots` of them (by default `experts`).
    - `rows`: the number of rows to allocate. By default enough for the worst case: the slots, and `align - 1` pads for
      each expert that can have one of them, together rounded down to a multiple of `align`,
      `(tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align`, which is 0 without tokens. It
      may be any upper bound, or the exact number if known. Nothing synchronizes with the device: rows beyond it are
      dropped, their slots have row -1, and `offsets` and `ends` stop at the last row. `counts` still includes them:
      `result.counts.sum() - (result.slot_of_row >= 0).sum()` rows were dropped.

    An expert without tokens has no rows. The result is the same in every run.

    A row map of a DTensor covers this rank's tokens: plain tensors, with rows numbered on this rank alone.

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
            raise ValueError(f"the mask has {last} experts, but experts={experts}: omit `experts`")
    elif experts is None or (slots is not None and slots != last):
        raise ValueError(
            f"routing has {last} experts per token: pass `experts`, the number of all experts, and no `slots`"
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
        worst_case = count + min(experts, count) * (align - 1)
        rows = worst_case // align * align
    if whole("rows", rows) < 0 or rows >= 2**31:
        raise ValueError(f"rows must be from 0 to 2**31 - 1; got {rows}")
    o = row_map_op(RowMapArgs(routing, experts, slots, align, rows))
    return RowMap(o.row_of_slot, o.slot_of_row, o.counts, o.offsets, align, o.experts)
