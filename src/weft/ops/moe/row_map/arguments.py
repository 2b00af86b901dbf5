"""The arguments and outputs of a map of rows."""

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
