"""What the rotations must give, in float64 and by autograd, number by number from the documented formulas."""

from __future__ import annotations

from typing import Any

import torch
from accuracy import EPS32
from torch import Tensor

import weft
from tests.ops.norm.truth import ROUNDINGS, Near, arguments
from tests.quant import oracle
from weft.workloads import Call
from weft.workloads.rope import PAGE

FEW = ROUNDINGS * EPS32
NAMES = ("y", "output1", "output2", "output3")


def places(a: dict[str, Any]) -> dict[str, Tensor]:
    """Which column of a packed projection each number of q, k, v and the gate is: [heads, dim] each."""
    heads, kv_heads, dim = a["heads"], a["kv_heads"] or a["heads"], a["head_dim"]
    v_dim = a["v_dim"] or dim
    found: dict[str, list[list[int]]] = {"q": [], "k": [], "v": [], "gate": []}
    at = 0

    def take(name: str, width: int) -> None:
        nonlocal at
        found[name].append(list(range(at, at + width)))
        at += width

    def queries(count: int) -> None:
        for _ in range(count):
            take("q", dim)
            if a["gate"]:
                take("gate", dim)

    if a["packing"] == "groups":
        for _ in range(kv_heads):
            queries(heads // kv_heads)
            take("k", dim)
            take("v", v_dim)
    else:
        queries(heads)
        for name, width in (("k", dim), ("v", v_dim)):
            for _ in range(kv_heads):
                take(name, width)
    return {name: torch.tensor(columns) for name, columns in found.items() if columns}


def pairs(rope_dim: int, dim: int, style: str, first: bool) -> tuple[Tensor, Tensor]:
    """The numbers of a head that are rotated with each other."""
    start = 0 if first else dim - rope_dim
    i = torch.arange(rope_dim // 2)
    if style == "neox":
        return start + i, start + i + rope_dim // 2
    return start + 2 * i, start + 2 * i + 1


def angles(a: dict[str, Any], rope_dim: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin [batch, sequence, 1, pairs]."""
    half = rope_dim // 2
    where = torch.arange(tokens).expand(batch, tokens)[..., None].expand(batch, tokens, half)
    if a["positions"] is not None:
        given = a["positions"].long()
        if a["mrope_sections"] is not None:
            axes = [axis for axis, count in enumerate(a["mrope_sections"]) for _ in range(count)]
            given = given.view(3, -1, tokens).expand(3, batch, tokens)
            where = torch.stack([given[axis] for axis in axes], -1)
        else:
            where = given.view(-1, tokens).expand(batch, tokens)[..., None].expand(batch, tokens, half)
    if a["base"] is not None:
        angle = where.double() * a["base"] ** (-2.0 * torch.arange(half).double() / rope_dim)
        return angle.cos()[:, :, None], angle.sin()[:, :, None]
    found = []
    for table in (a["cos"], a["sin"]):
        table = table.detach().double()
        if table.dim() == 3:
            found.append(table.expand(batch, tokens, half)[:, :, None])
        else:
            found.append(table[where, torch.arange(half)][:, :, None])
    return found[0], found[1]


def turned(x: Tensor, cos: Tensor, sin: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x.clone()
    y[..., i] = x[..., i] * cos - x[..., j] * sin
    y[..., j] = x[..., j] * cos + x[..., i] * sin
    return y


def canonical(x: Tensor, layout: str) -> Tensor:
    return {
        "bshd": lambda: x,
        "sbhd": lambda: x.transpose(0, 1),
        "bhsd": lambda: x.transpose(1, 2),
        "thd": lambda: x[None],
    }[layout]()


def laid_out(x: Tensor, layout: str) -> Tensor:
    return x.flatten(0, 1) if layout == "thd" else canonical(x, layout)


def as_canonical(x: Tensor, layout: str, batch: int) -> Tensor:
    """A result back to [batch, sequence, heads, dim]."""
    return x.unflatten(0, (batch, -1)) if layout == "thd" else canonical(x, layout)


class Head:
    """One part of the projection through norm and rotation, and the sizes of what is added up on the way."""

    def __init__(self, a: dict[str, Any], weight: Tensor | None, bias: Tensor | None, rotation: Any) -> None:
        self.a, self.weight, self.bias, self.rotation = a, weight, bias, rotation

    def rotated(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else turned(x, *self.rotation)

    def size(self, x: Tensor) -> Tensor:
        """Of the largest term of a rotation of numbers of these sizes; a cosine is off by an ulp of 1."""
        if self.rotation is None:
            return x
        cos, sin, i, j = self.rotation
        largest = torch.ones_like(cos) if self.a["base"] is not None else cos.abs()
        other = torch.ones_like(sin) if self.a["base"] is not None else sin.abs()
        y = x.clone()
        y[..., i] = x[..., i] * largest + x[..., j] * other
        y[..., j] = x[..., j] * largest + x[..., i] * other
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y, its noise)"""
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
        """Noises of the gradients of x, weight and bias."""
        a = self.a
        size = dy.abs()
        if not a["norm_after"]:
            size = self.size(size)
        weight_noise = bias_noise = torch.zeros(())
        if self.z is not None and self.r is not None:
            weight_noise, bias_noise = ((size * self.z).sum((0, 1, 2)), size.sum((0, 1, 2)))
            if self.weight is not None:
                size = size * (self.weight.detach() + a["weight_offset"]).abs()
            mean = size.mean(-1, keepdim=True) if a["qk_norm"] == "layer" else 0.0
            size = self.r.detach() * (size + self.z * (size * self.z).mean(-1, keepdim=True) + mean)
        if a["norm_after"]:
            size = self.size(size)
        return FEW * size, FEW * weight_noise, FEW * bias_noise


def qkv_prepare(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    a = arguments(call)
    apart = a["k"] is not None
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("qkv", "k", "v", "q_weight", "k_weight", "q_bias", "k_bias")
        if a[name] is not None
    }
    layout = "thd" if a["qkv"].dim() == (3 if apart else 2) else a["layout"]
    out_layout = a["out_layout"] or layout
    x = canonical(leaves["qkv"], layout)
    batch, tokens = x.shape[:2]
    columns: dict[str, Tensor] = {}
    if apart:
        dim = a["k"].shape[-1]
        parts = {"q": x[..., :dim], "k": canonical(leaves["k"], layout)}
        if "v" in leaves:
            parts["v"] = canonical(leaves["v"], layout)
        if a["gate"]:
            parts["gate"] = x[..., dim:]
    else:
        dim, columns = a["head_dim"], places(a)
        parts = {name: x[..., where] for name, where in columns.items()}
    rotation = None
    if a["cos"] is not None or a["base"] is not None:
        rope_dim = a["rope_dim"] or (dim if a["cos"] is None else 2 * a["cos"].shape[-1])
        rotation = (
            *angles(a, rope_dim, batch, tokens),
            *pairs(rope_dim, dim, a["style"], a["rope_first"]),
        )
    found: dict[str, Near | Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    noises: dict[str, Tensor] = {}
    for name, (part, value) in zip(NAMES, parts.items(), strict=False):
        noise = torch.zeros_like(value)
        head = Head(a, leaves.get(f"{part}_weight"), leaves.get(f"{part}_bias"), rotation)
        y = value
        if part in ("q", "k"):
            y, noise = head.forward(value)
        found[name] = Near(laid_out(y.detach(), out_layout), laid_out(noise.detach(), out_layout))
        if name in gradients:
            dy = as_canonical(gradients[name].detach().double(), out_layout, batch)
            total = total + (y * dy).sum()
            noises[part] = torch.zeros_like(value)
            if part in ("q", "k"):
                noises[part], noises[f"{part}_weight"], noises[f"{part}_bias"] = head.backward(dy)
    if not gradients:
        return found
    total.backward()
    if apart:
        noises["qkv"] = laid_out(noises["q"], layout)
        noises |= {name: laid_out(noises[name], layout) for name in ("k", "v") if name in noises}
    else:
        packed = torch.zeros_like(x)
        for name, where in columns.items():
            if name in noises:
                packed[..., where] = noises[name]
        noises["qkv"] = packed[0] if layout == "thd" else canonical(packed, layout)
    for name, leaf in leaves.items():
        if leaf.grad is not None and name in noises:
            found[f"d{name}"] = Near(leaf.grad, noises[name].detach())
    return found


def qkv_prepare_backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it."""
    a = call.kwargs
    dim, heads, kv_heads = a["head_dim"], a["heads"], a["kv_heads"]
    width = heads * dim * (1 + a["gate"]) + kv_heads * (dim + a["v_dim"])
    upstream = {
        name: a[d] for name, d in zip(NAMES, ("dq", "dk", "dv", "dgate"), strict=True) if a[d] is not None
    }
    tokens = as_canonical(a["dq"], a["out_layout"], a["batch"]).shape[1]
    x = torch.zeros(a["batch"], tokens, width) if a["x"] is None else a["x"]
    forward = Call(
        weft.qkv_prepare,
        {
            "qkv": x,
            **{
                name: a[name]
                for name in (
                    *(
                        "q_weight",
                        "k_weight",
                        "q_bias",
                        "k_bias",
                        "cos",
                        "sin",
                        "positions",
                        "eps",
                        "weight_offset",
                    ),
                    *("heads", "kv_heads", "head_dim", "v_dim", "packing", "gate", "layout", "out_layout"),
                    *("norm_after", "rope_dim", "style", "rope_first"),
                )
            },
            "qk_norm": None if a["norm"] == "none" else a["norm"],
            "base": a["base"] or None,
        },
    )
    found = qkv_prepare(forward, upstream)
    wanted = ["qkv", "q_weight", "k_weight", "q_bias", "k_bias"]
    needed = [name for name, need in zip(wanted, a["needs"], strict=True) if need]
    return {
        ("y", "output1", "output2", "output3", "output4")[i]: found[f"d{name}"]
        for i, name in enumerate(needed)
    }


def rope(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    a = {**arguments(call), "norm_after": False, "qk_norm": None}
    layout = "thd" if a["x"].dim() == 3 else a["layout"]
    out_layout = a["out_layout"] or layout
    leaf = a["x"].detach().double().requires_grad_()
    x = canonical(leaf, layout)
    batch, tokens, _, dim = x.shape
    rope_dim = a["rope_dim"] or (dim if a["cos"] is None else 2 * a["cos"].shape[-1])
    cos, sin = angles(a, rope_dim, batch, tokens)
    head = Head(
        a,
        None,
        None,
        (cos, -sin if a["inverse"] else sin, *pairs(rope_dim, dim, a["style"], a["rope_first"])),
    )
    y, noise = head.forward(x)
    found: dict[str, Near | Tensor] = {
        "y": Near(laid_out(y.detach(), out_layout), laid_out(noise, out_layout))
    }
    if "y" in gradients:
        dy = as_canonical(gradients["y"].detach().double(), out_layout, batch)
        (y * dy).sum().backward()
        assert leaf.grad is not None
        found["dx"] = Near(leaf.grad, laid_out(head.backward(dy)[0], layout))
    return found


def qkv_prepare_cached(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Of a workload: results as without a cache; codes and scales from its own fp32 numbers, each token in its slot."""
    slots = call["slots"].long()
    plain = Call(weft.qkv_prepare, {name: value for name, value in call.kwargs.items() if name != "slots"})
    found = qkv_prepare(plain, gradients)
    wide = plain.with_(qkv=plain["qkv"].float())()
    pages = -(-len(slots) // PAGE)
    for i, heads in enumerate(wide[1:3]):
        made = oracle.quantize(
            heads.flatten(0, 1), block="row", element="e4m3", convention="te", power_of_two=False
        )
        codes = torch.zeros(pages * PAGE, *heads.shape[1:], dtype=torch.uint8)
        scales = torch.zeros(pages * PAGE, heads.shape[1])
        codes[slots], scales[slots] = made.data.view(heads.shape), made.scale.view(heads.shape[:2])
        found[f"output{3 + i}"] = codes.unflatten(0, (pages, PAGE))
        found[f"output{5 + i}"] = scales.unflatten(0, (pages, PAGE))
    return found


TRUTHS = {f.__name__: f for f in (qkv_prepare, qkv_prepare_backward, qkv_prepare_cached, rope)}
