"""Groups of rows, one per expert, whose bounds are known only on the device.

`ends` [groups], int32 or int64 and never decreasing, says where the rows of each group end. A group begins where the
one before it ends, rounded up to a multiple of `align`. The rows between groups and after the last one are padding.
With align=1 these are the offsets of `torch.nn.functional.grouped_mm`, with a larger align those of DeepGEMM.

    group e: rows start_e <= r < ends[e]        start_0 = 0        start_e = ceil(ends[e - 1] / align) * align

In column-wise copies a block of 128 rows never has rows of two groups. If `align` is a multiple of 128, blocks lie
where they would without groups. Otherwise the blocks of a group start at its first row, and the first of them has the
number start_e // 128 + e. That leaves at most one number unused between groups, and no number reaches `count_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...quant.copies import scale_room
from ...quant.reference import quantize_copies
from .rows import STRIPE


class Groups(NamedTuple):
    """Groups of an op's rows; `ends` is None without groups."""

    ends: Tensor | None  # [groups]
    align: int

    def blocks_restart(self) -> bool:
        """Return whether blocks of rows start at the first row of each group instead of at multiples of 128."""
        return self.ends is not None and self.align % STRIPE != 0

    def have_slots(self, format: Format, columnwise: bool) -> bool:
        """Return whether the blocks of a column-wise copy in this format restart at each group: its scales then take
        `count_slots` slots."""
        return columnwise and format.group != 0 and self.blocks_restart()


NO_GROUPS = Groups(None, 1)


def count_slots(rows: int, groups: int) -> int:
    """Return an upper bound of the block numbers when blocks restart at each group."""
    return -(-rows // STRIPE) + groups


def empty_slots(format: Format, rows: int, cols: int, ends: Tensor) -> Tensor:
    """Allocate the scales of a column-wise copy whose blocks restart at each group."""
    return scale_room(format, cols, count_slots(rows, ends.numel()) * STRIPE).allocate(ends.device)


def clear_slots(scale: Tensor) -> None:
    """Zero all scales, since no kernel writes those of blocks without rows."""
    (scale if scale.element_size() > 1 else scale.view(torch.uint8)).zero_()


# ---- reference ------------------------------------------------------------------------------------------


def real_rows_reference(ends: Tensor, rows: int, align: int) -> Tensor:
    """Return bool [rows]: True for rows that belong to a group, False for padding."""
    row = torch.arange(rows, device=ends.device)
    ends = ends.long()
    bounds = torch.cat([ends.new_zeros(1), ends])
    passed = group_of_reference(ends, rows)
    start = (bounds[passed] + align - 1) // align * align
    return (row >= start) & (passed < ends.numel())


def group_of_reference(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each row, int64 [rows]; a row of padding gets any group, or the number of groups."""
    return torch.searchsorted(ends.long(), torch.arange(rows, device=ends.device), right=True)


def slot_rows_reference(ends: Tensor, rows: int, align: int) -> Tensor:
    """Return the position of each row, int64 [rows], in a tensor whose blocks are ordered by number."""
    row = torch.arange(rows, device=ends.device)
    starts = torch.cat([ends.new_zeros(1), ends]).long()
    starts = ((starts + align - 1) // align * align).clamp(max=rows)
    group = torch.searchsorted(starts, row, right=True) - 1
    begin = starts[group]
    return (begin // STRIPE + group) * STRIPE + row - begin


def slots_reference(y: Tensor, format: Format, groups: Groups, plain: Codes, **options: Any) -> Codes:
    """Return the column-wise copy of y [M, K] with blocks that restart at each group. `plain` is the copy whose blocks
    do not, and `options` go to `quantize_copies`."""
    assert groups.ends is not None
    rows, cols = y.shape
    slot = slot_rows_reference(groups.ends, rows, groups.align)
    spread = y.new_zeros(count_slots(rows, groups.ends.numel()) * STRIPE, cols)
    used = torch.zeros(len(spread), dtype=torch.bool, device=y.device)
    spread[slot], used[slot] = y, True
    _, copy = quantize_copies(spread, format, rowwise=False, columnwise=True, **options)
    assert copy is not None
    codes = copy.data.view(torch.uint8)
    if format.packed == 2:
        codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(1)
    codes = codes[:, slot]
    if format.packed == 2:
        codes = torch.nn.functional.pad(codes, (0, rows % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    plain.data.view(torch.uint8).copy_(codes)
    # Blocks without rows have the scale zero.
    scale, empty = copy.scale, ~used.view(-1, format.group).any(1)
    (scale if scale.element_size() > 1 else scale.view(torch.uint8))[:, empty] = 0
    return plain._replace(scale=scale)


def group_spans(ends: Tensor, rows: int, align: int) -> Iterator[tuple[int, int, int]]:
    """Yield (group, first row, row after the last) for each group that has rows. Waits for the device."""
    begin = 0
    for group, group_end in enumerate(ends.tolist()):
        end = min(group_end, rows)
        if end > begin:
            yield group, begin, end
        begin = -(-group_end // align) * align


# ---- kernels --------------------------------------------------------------------------------------------


class GroupEnds(NamedTuple):
    """Groups as kernel arguments; `ends` is None without groups."""

    ends: Tensor | None  # [number]
    number: int
    align: int


NO_ENDS = GroupEnds(None, 0, 1)
