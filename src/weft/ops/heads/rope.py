"""Rotation of one tensor of heads.

    (a, b) = (a cos - b sin, b cos + a sin)    of each pair (a, b) of the rotated part of a head
    y = round(.)                               to the dtype of x, in the layout of the output

Pairs, styles and angles are as in `qkv`. All arithmetic is fp32, with one rounding. Backward rotates by -sin:

    (da, db) = (da cos + db sin, db cos - da sin)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ...runtime import Backward, Op, Sharding
from ..common.checks import check_input
from ..common.heads import LAYOUTS, Layout, layout_of, shape_of, sizes
from ..common.into import run_into
from .angles import Rotation, check_rotation
from .arguments import Rope, Rotated
from .reference import rope_reference
from .sharding import shard_rope


class RopeOp(Op[Rope, Rotated], name="rope", variants=64):
    def allocate(self, a: Rope) -> Rotated:
        batch, tokens = sizes(a.x, a.layout)
        shape = shape_of(a.out_layout, batch, tokens, a.x.shape[LAYOUTS[a.layout][2]], a.x.shape[-1])
        return Rotated(torch.empty(*shape, dtype=a.x.dtype, device=a.x.device))

    @cached_property
    def launch(self) -> Callable[[Rotated, Rope], None]:
        from .launch import launch_rope

        return launch_rope

    def reference(self, a: Rope) -> Rotated:
        return rope_reference(a)

    def keep(self, a: Rope, outputs: Rotated) -> Rope:
        return a._replace(x=None)  # type: ignore[arg-type]

    def backward(self, b: Backward) -> dict[str, Tensor | None]:
        a: Rope = b.kept
        back = Rope(b.grads.y, a.turning, a.out_layout, a.layout, not a.inverse)
        return {"x": rope_op(back).y}

    def shard(self, a: Rope) -> Sharding:
        return shard_rope(a)


rope_op = RopeOp()


def rope(
    x: Tensor,
    rotation: Rotation,
    *,
    positions: Tensor | None = None,
    layout: Layout = "bshd",
    out_layout: Layout | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate one tensor of heads as `qkv_prepare` does.

    Also known as rotary embedding, rotary position embedding.

    x: [batch, sequence, heads, dim], or in `layout`, "bshd", "sbhd" or "thd". `rotation` and `positions` are as in
    `qkv_prepare`.

    - `inverse`: rotate the other way, as backward does, and write pairs where the rotation reads them.
    - `out_layout`: the layout of the result, by default that of x.
    - `out`: write the result here; not with autograd. It may be a slice of a longer sequence, any other view whose
      heads are contiguous, or x itself if layout and pairs stay as they are.

    >>> import torch, weft
    >>> x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])  # two tokens of one head
    >>> weft.rope(x, weft.Rotation(10000.0))
    tensor([[[1.0000, 0.0000]],
    <BLANKLINE>
            [[0.5403, 0.8415]]])
    """
    check_input("x", x)
    in_layout = layout_of(x, layout, 4)
    result_layout = in_layout if out_layout is None else out_layout
    if result_layout not in LAYOUTS or (in_layout == "thd") != (result_layout == "thd"):
        raise ValueError(f"out_layout {result_layout!r} does not go with an x in {in_layout!r}")
    if rotation is None:
        raise ValueError("a rotation is needed: pass weft.Rotation(base) or weft.Rotation(cos=..., sin=...)")
    turning = check_rotation(rotation, positions, x, x.shape[-1], *sizes(x, in_layout))
    a = Rope(x, turning, in_layout, result_layout, inverse)
    if out is None:
        return rope_op(a).y
    unmoved = in_layout == result_layout and turning.style == turning.out_style
    in_place = ("x",) if unmoved and x.stride(-1) == 1 else ()
    run_into(rope_op, a, {"y": out}, names={"y": "out"}, in_place=in_place, strided=("y",))
    return out
