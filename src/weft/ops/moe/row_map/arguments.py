"""Arguments and outputs of a row map."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowMapArgs(NamedTuple):
    routing: Tensor  # experts [..., slots] of each token, or a mask [..., experts]
    experts: int
    slots: int
    align: int
    rows: int

    @property
    def masked(self) -> bool:
        """True if the routing is a mask."""
        return self.routing.dtype == torch.bool


class RowMapOutputs(NamedTuple):
    row_of_slot: Tensor  # int32 [..., slots]
    slot_of_row: Tensor  # int32 [rows]
    counts: Tensor  # int32 [experts]
    offsets: Tensor  # int32 [experts]
    experts: Tensor | None  # int32 [..., slots], if the routing is a mask


class RowMap(NamedTuple):
    """Positions of the tokens' rows, as tensors on the device. Made by `row_map`.

    - `row_of_slot`: int32 [..., slots], the row of each slot, or -1.
    - `slot_of_row`: int32 [rows], `token * slots + j`, or -1 for a pad.
    - `counts`: int32 [experts], the tokens that chose each expert, including those whose rows did not fit.
    - `offsets`: int32 [experts], the end of each expert's region including pads, where the next region begins; at most
      the number of rows.
    - `align`: the length of each expert's region is a multiple of it, except for a region truncated at the last row.
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
        """End of each expert's own rows, where its pads begin, int32 [experts]: the argument `ends` of `glu`. Like
        `offsets` they never decrease and never exceed the number of rows, even if rows were dropped."""
        starts = self.offsets.roll(1).index_fill(0, self.offsets.new_zeros(1, dtype=torch.int64), 0)
        return torch.minimum(starts + self.counts, self.offsets)
