"""The largest elements of rows, exactly.

    order of elements: the larger first, of equal ones the lower column; zeros of both signs are equal, NaN is last

Values are compared as integers of the same order. A tile finds its k-th largest bit by bit: the largest integer that at
least k of its elements reach. Each pass keeps k columns of every tile, until one tile is left, which is sorted. Nothing
is rounded, so the result does not depend on the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Backward, Gradients, Op, Sharding
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, whole
from .arguments import LONGEST_SELECTION, TopK, TopKArgs
from .reference import top_k_reference


class Selected(NamedTuple):
    """What the backward of a selection needs."""

    indices: Tensor
    cols: int


class TopKOp(Op[TopKArgs, TopK], name="top_k", variants=32, differentiable=("values",)):
    def validate(self, a: TopKArgs) -> None:
        if not 1 <= a.k <= LONGEST_SELECTION:
            raise ValueError(f"k must be from 1 to {LONGEST_SELECTION}; got {a.k}. For more use torch.sort")
        if a.x.dim() == 0 or a.x.shape[-1] >= 2**31:
            raise ValueError(f"x must have rows of less than 2**31 elements; got {tuple(a.x.shape)}")
        for name, t in (("starts", a.starts), ("ends", a.ends)):
            if t is not None:
                check_tensor(name, t, INTEGERS, a.x.device, a.x.shape[:-1])

    def allocate(self, a: TopKArgs) -> TopK:
        shape = (*a.x.shape[:-1], a.k)
        return TopK(a.x.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=a.x.device))

    @cached_property
    def launch(self) -> Callable[[TopK, TopKArgs], None]:
        from .launch import launch_top_k

        return launch_top_k

    def reference(self, a: TopKArgs) -> TopK:
        return top_k_reference(a)

    def keep(self, a: TopKArgs, o: TopK) -> Selected:
        return Selected(o.indices, a.x.shape[-1])

    def backward(self, b: Backward) -> Gradients:
        indices, cols = b.kept
        real = indices >= 0
        room = b.grads.values.new_zeros(*indices.shape[:-1], cols + 1)  # the last column is of no element
        room.scatter_(-1, torch.where(real, indices, cols), b.grads.values.masked_fill(~real, 0.0))
        return {"x": room[..., :cols]}

    def shard(self, a: TopKArgs) -> Sharding:
        return Sharding(
            {"x": "... v", "starts": "...", "ends": "..."},
            {"values": "... k", "indices": "... k"},
            {"v": "the largest of a row are chosen among all of its elements", "k": "it is the result"},
        )


top_k_op = TopKOp()


def top_k(x: Tensor, k: int, *, starts: Tensor | None = None, ends: Tensor | None = None) -> TopK:
    """Return the k largest elements of each row, in descending order, and their columns.

    Of equal elements the lowest columns are chosen, and come first; NaN comes after minus infinity. So the result is
    the same in every run, in every batch, and on every device.

    - `x`: [..., V] in bf16, fp16 or fp32, of any length V.
    - `k`: from 1 to 2048. Where a row has fewer elements, values are minus infinity and indices -1.
    - `starts`, `ends`: int32 or int64 [...]: only columns from `starts` to `ends - 1` of a row count.

    The gradient of x is that of the values, zero elsewhere.

    >>> import torch, weft
    >>> weft.top_k(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3).indices
    tensor([1, 3, 2])
    """
    check_input("x", x, FLOATS)
    for name, t in (("starts", starts), ("ends", ends)):
        if t is not None:
            check_tensor(name, t, INTEGERS, x.device, x.shape[:-1])
    return top_k_op(TopKArgs(x, whole("k", k), starts, ends))
