"""Rotations of single tensors of heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops.heads.rope import rope
from ..family import Family
from ..problem import Call, Inputs, Size, Workload
from ..truth import Near, arguments
from ._heads import (
    Head,
    angles,
    as_canonical,
    canonical,
    draw_objects,
    laid_out,
    read_and_written,
    rotation_of,
    rotation_with,
    sizes_of,
    spelled_rotation,
)

# (batch and sequence, elements of a head), by the model it comes from. "rows" are the positions of a sequence.
SHAPES: dict[str, tuple[Size, ...]] = {
    "deepseek-v3/q": (2, "rows", 192),
    "deepseek-v3/q-rope": (2, "rows", 64),
    "odd/heads": ("rows", 66),
}

# The sets of options: `heads`, the number of heads, and those of `_heads`.
OPTIONS: dict[str, dict[str, Any]] = {
    "last-third": {
        "heads": 32,
        "angles": "none",
        "rotation": {"base": 1e4, "style": "interleaved", "first": False, "dim": 64},
    },
    "halves-of-pairs": {
        "heads": 16,
        "angles": "table",
        "rotation": {"style": "interleaved", "out_style": "neox"},
    },
    "three-axes": {"heads": 12, "angles": "three", "rotation": {"base": 1e6}},
}


def rotate(
    x: Tensor,
    *,
    rotation: dict[str, Any],
    positions: Tensor | None = None,
    layouts: dict[str, Any],
    out: Tensor | None = None,
    **tensors: Tensor,
) -> Tensor:
    """Call `rope` with the tables of its rotation as arguments, so that they are tensors of a workload's call."""
    return rope(x, rotation_with(rotation, tensors), positions=positions, out=out, **layouts)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = OPTIONS[workload.options]
    batch, tokens, dim = sizes_of(settings, shape)
    x = inputs.normal(*shape[:-1], settings["heads"], dim)
    objects = draw_objects(inputs, settings, batch, tokens, dim)
    del objects["norm"]
    return Call(rotate, {"x": x, **objects, "layouts": {}})


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload("rope", name, options, SHAPES[name], rows, _build)
    for name, options, rows in (
        ("deepseek-v3/q", "last-third", 4096),
        ("deepseek-v3/q-rope", "halves-of-pairs", 4096),
        ("odd/heads", "three-axes", 1000),
    )
)


# ---- truth ----------------------------------------------------------------------------------------------------


def spelled_rope(
    x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, positions: Tensor | None = None,
    base: float | None = None, scaling: str = "", rope_dim: int | None = None, style: Any = "neox",
    out_style: Any = None, rope_first: bool = True, mrope_sections: Any = None, layout: Any = "bshd",
    out_layout: Any = None, inverse: bool = False,
) -> Tensor:  # fmt: skip
    """Call `rope` with the options of its rotation spelled out, so that a test can change one of them."""
    rotation = rotation_of(cos, sin, base, rope_dim, style, out_style, rope_first, mrope_sections, scaling)
    return rope(
        x, rotation, positions=positions, layout=layout, out_layout=out_layout, inverse=inverse  # type: ignore[arg-type]
    )  # fmt: skip


def _spelled(call: Call) -> dict[str, Any]:
    """Return the arguments of a call of `spelled_rope`, or of a workload by the same names."""
    if call.function is not rotate:
        return arguments(call)
    a = dict(call.kwargs)
    spelled = {**a.pop("layouts"), **spelled_rotation(a.pop("rotation"))}
    return arguments(Call(spelled_rope, {**a, **spelled}))


def rope_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the rotated heads, and with an upstream gradient that of x."""
    a = {**_spelled(call), "norm_after": False, "qk_norm": None}
    layout = "thd" if a["x"].dim() == 3 else a["layout"]
    out_layout = a["out_layout"] or layout
    leaf = a["x"].detach().double().requires_grad_()
    x = canonical(leaf, layout)
    batch, tokens, _, dim = x.shape
    rope_dim = a["rope_dim"] or (dim if a["cos"] is None else 2 * a["cos"].shape[-1])
    cos, sin = angles(a, rope_dim, batch, tokens)
    sin = -sin if a["inverse"] else sin
    head = Head(a, None, None, (cos, sin, *read_and_written(a, rope_dim, dim)))
    y, noise = head.forward(x)
    expected: dict[str, Near | Tensor] = {
        "y": Near(laid_out(y.detach(), out_layout), laid_out(noise, out_layout))
    }
    if "y" in gradients:
        dy = as_canonical(gradients["y"].detach().double(), out_layout, batch)
        (y * dy).sum().backward()
        assert leaf.grad is not None
        expected["dx"] = Near(leaf.grad, laid_out(head.backward(dy)[0], layout))
    return expected


FAMILY = Family(workloads=WORKLOADS, truths={"rope": rope_truth})
