"""Inputs and truth of normalized and rotated heads, shared by `qkv` and `rope`.

Among the options of a workload are

- `norm`: the arguments of `HeadNorm`, and `vectors`: which of its weights and biases to draw.
- `rotation`: the arguments of `Rotation` except its tables; `turned`: how many quarters of a head are rotated.
- `angles`: "table": cos and sin of all positions; "samples": tables per sample; "packed": a base, with positions that
  restart; "three": a base, with positions of three axes; "none": only a base.
- `layouts`: the layouts of input and results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.heads.angles import Rotation
from ..problem import Inputs
from ..truth import EPS32, ROUNDINGS

# ---- inputs ---------------------------------------------------------------------------------------------------


def _positions(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Return positions of several packed sequences of odd lengths, some of them large."""
    tokens = shape[-1]
    positions = torch.arange(tokens, dtype=torch.int32) % 1021
    positions[tokens // 2 :] += 1 << 19
    return positions.expand(shape).contiguous().to(inputs.device)


def sizes_of(settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (batch, sequence, dim); a head has an even number of elements, at least four."""
    *lead, cols = shape
    if settings.get("layouts", {}).get("layout") == "sbhd":
        lead.reverse()
    batch, tokens = lead if len(lead) == 2 else (1, *lead)
    return batch, tokens, max(4, cols + cols % 2)


def draw_objects(
    inputs: Inputs, settings: dict[str, Any], batch: int, tokens: int, dim: int
) -> dict[str, Any]:
    """Draw the arguments from which norm and rotation are built: their options and tensors."""
    norm = settings.get("norm", {})
    mean = 1.0 - norm.get("weight_offset", 0.0)
    tensors: dict[str, Any] = {
        name: inputs.normal(dim, mean=mean if "weight" in name else 0.0, std=0.2)
        for name in settings.get("vectors", ())
    }
    rotation = dict(settings.get("rotation", {}))
    rope_dim = min(rotation.get("dim") or max(2, dim * settings.get("turned", 4) // 8 * 2), dim)
    rotation["dim"], kind = rope_dim, settings["angles"]
    if kind in ("table", "samples"):
        lead = (tokens,) if kind == "table" else (batch, tokens)
        angle = inputs.normal(*lead, rope_dim // 2, std=10.0, dtype=torch.float32)
        tensors |= {"cos": torch.cos(angle), "sin": torch.sin(angle)}
    elif kind == "packed":
        tensors["positions"] = _positions(inputs, (batch, tokens))
    elif kind == "three":
        tensors["positions"] = _positions(inputs, (3, tokens))
        first = rope_dim // 8
        rotation["sections"] = (first, first, rope_dim // 2 - 2 * first)
    return {**tensors, "norm": norm, "rotation": rotation}


def rotation_with(options: dict[str, Any], tensors: dict[str, Any]) -> Rotation:
    """Build a rotation from its options and, if there are any, its tables."""
    return Rotation(**options, cos=tensors.get("cos"), sin=tensors.get("sin"))


# ---- truth ----------------------------------------------------------------------------------------------------

FEW = ROUNDINGS * EPS32


def spelled_rotation(rotation: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a rotation, by the names of the spelled-out arguments."""
    return {
        "base": rotation.get("base"),
        "rope_dim": rotation["dim"],
        "style": rotation.get("style", "neox"),
        "out_style": rotation.get("out_style"),
        "rope_first": rotation.get("first", True),
        "mrope_sections": rotation.get("sections"),
    }


def rotation_of(
    cos: Tensor | None, sin: Tensor | None, base: float | None, dim: int | None, style: Any, out_style: Any,
    first: bool, sections: Any, scaling: str,
) -> Rotation | None:  # fmt: skip
    """Build a rotation, or return None if no angles are given."""
    if cos is None and sin is None and base is None:
        return None
    return Rotation(base, cos, sin, dim, style, out_style, first, sections, scaling)


Pairs = tuple[Tensor, Tensor]


def read_and_written(a: dict[str, Any], rope_dim: int, dim: int) -> tuple[Pairs, Pairs]:
    """Return the indices of the rotated pairs, and the indices they are written to."""
    styles = (a["style"], a["out_style"] or a["style"])
    if a.get("inverse"):
        styles = styles[::-1]
    read, written = (_pairs(rope_dim, dim, style, a["rope_first"]) for style in styles)
    return read, written


def _pairs(rope_dim: int, dim: int, style: str, first: bool) -> Pairs:
    """Return the indices of the first and of the second elements of all pairs."""
    start = 0 if first else dim - rope_dim
    i = torch.arange(rope_dim // 2)
    if style == "neox":
        return start + i, start + i + rope_dim // 2
    return start + 2 * i, start + 2 * i + 1


def angles(a: dict[str, Any], rope_dim: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [batch, sequence, 1, pairs]."""
    half = rope_dim // 2
    where = torch.arange(tokens).expand(batch, tokens)[..., None].expand(batch, tokens, half)
    if a["positions"] is not None:
        positions = a["positions"].long()
        if a["mrope_sections"] is not None:
            axes = [axis for axis, count in enumerate(a["mrope_sections"]) for _ in range(count)]
            positions = positions.view(3, -1, tokens).expand(3, batch, tokens)
            where = torch.stack([positions[axis] for axis in axes], -1)
        else:
            where = positions.view(-1, tokens).expand(batch, tokens)[..., None].expand(batch, tokens, half)
    if a["base"] is not None:
        angle = where.double() * a["base"] ** (-2.0 * torch.arange(half).double() / rope_dim)
        assert not a["scaling"], "see the tests of scaled rotations"
        return angle.cos()[:, :, None], angle.sin()[:, :, None]
    tables = []
    for table in (a["cos"], a["sin"]):
        table = table.detach().double()
        if table.dim() == 3:
            tables.append(table.expand(batch, tokens, half)[:, :, None])
        else:
            tables.append(table[where, torch.arange(half)][:, :, None])
    return tables[0], tables[1]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, read: Pairs, written: Pairs) -> Tensor:
    """Rotate pairs of elements given by their indices."""
    y = x.clone()
    (i, j), (to_i, to_j) = read, written
    y[..., to_i] = x[..., i] * cos - x[..., j] * sin
    y[..., to_j] = x[..., j] * cos + x[..., i] * sin
    return y


def canonical(x: Tensor, layout: str) -> Tensor:
    """Permute to [batch, sequence, heads, dim]."""
    return {
        "bshd": lambda: x,
        "sbhd": lambda: x.transpose(0, 1),
        "bhsd": lambda: x.transpose(1, 2),
        "thd": lambda: x[None],
    }[layout]()


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Permute [batch, sequence, heads, dim] to a layout."""
    return x.flatten(0, 1) if layout == "thd" else canonical(x, layout)


def as_canonical(x: Tensor, layout: str, batch: int) -> Tensor:
    """Bring a result back to [batch, sequence, heads, dim]."""
    return x.unflatten(0, (batch, -1)) if layout == "thd" else canonical(x, layout)


class Head:
    """Norm and rotation of one part of the projection, with the sizes of the terms that are summed."""

    def __init__(self, a: dict[str, Any], weight: Tensor | None, bias: Tensor | None, rotation: Any) -> None:
        self.a, self.weight, self.bias, self.rotation = a, weight, bias, rotation

    def rotated(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else rotate_pairs(x, *self.rotation)

    def size(self, x: Tensor, back: bool = False) -> Tensor:
        """Return the sizes of rotated elements from the sizes of the inputs, or with `back` of the inverse rotation.

        A computed cosine is off by an ulp of 1."""
        if self.rotation is None:
            return x
        cos, sin, *places = self.rotation
        (i, j), (to_i, to_j) = reversed(places) if back else places
        largest = torch.ones_like(cos) if self.a["base"] is not None else cos.abs()
        other = torch.ones_like(sin) if self.a["base"] is not None else sin.abs()
        y = x.clone()
        y[..., to_i] = x[..., i] * largest + x[..., j] * other
        y[..., to_j] = x[..., j] * largest + x[..., i] * other
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and its noise."""
        a = self.a
        after, layer = a["norm_after"], a["qk_norm"] == "layer"
        value, size = x, x.detach().abs()
        if after:
            value, size = self.rotated(value), self.size(size)
        self.z = self.r = None
        if a["qk_norm"] is not None:
            mean = value.mean(-1, keepdim=True) if layer else torch.zeros_like(value[..., :1])
            self.r = 1 / (value - mean).square().mean(-1, keepdim=True).add(a["eps"]).sqrt()
            value = (value - mean) * self.r
            size = (size + mean.detach().abs()) * self.r.detach()
            self.z = size
            if self.weight is not None:
                weight = self.weight + a["weight_offset"]
                value, size = value * weight, size * weight.detach().abs()
            if self.bias is not None:
                value, size = value + self.bias, size + self.bias.detach().abs()
        if not after:
            value, size = self.rotated(value), self.size(size)
        return value, FEW * size

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noises of the gradients of x, weight and bias."""
        a = self.a
        size = dy.abs()
        if not a["norm_after"]:
            size = self.size(size, back=True)
        weight_noise = bias_noise = torch.zeros(())
        if self.z is not None and self.r is not None:
            weight_noise, bias_noise = ((size * self.z).sum((0, 1, 2)), size.sum((0, 1, 2)))
            if self.weight is not None:
                size = size * (self.weight.detach() + a["weight_offset"]).abs()
            mean = size.mean(-1, keepdim=True) if a["qk_norm"] == "layer" else 0.0
            size = self.r.detach() * (size + self.z * (size * self.z).mean(-1, keepdim=True) + mean)
        if a["norm_after"]:
            size = self.size(size, back=True)
        return FEW * size, FEW * weight_noise, FEW * bias_noise
