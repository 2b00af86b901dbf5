"""What the rotations must give, in float64 and by autograd, number by number from the documented formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32, ulp

import weft

from ..families.heads import PAGE, prepare, prepare_cached, rotate
from ..problem import Call
from ..truth import ROUNDINGS, Near, arguments

FEW = ROUNDINGS * EPS32
NAMES = ("y", "output1", "output2", "output3")


# ---- the objects of a call, spelled out: a test changes one of many arguments --------------------------------


def spelled_out(
    qkv: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, bias: Tensor | None = None,
    heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None, v_dim: int | None = None,
    packing: Any = "flat", gate: bool = False, qk_norm: Any = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
    eps: float | None = 1e-6, weight_offset: float = 0.0, norm_after: bool = False, cos: Tensor | None = None,
    sin: Tensor | None = None, positions: Tensor | None = None, base: float | None = None, scaling: str = "",
    rope_dim: int | None = None, style: Any = "neox", out_style: Any = None, rope_first: bool = True,
    mrope_sections: Any = None, layout: Any = "bshd", out_layout: Any = None, cache: Any = None,
    slots: Tensor | None = None, cache_scales: Any = None, quantize: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`weft.qkv_prepare`, and its results that there are."""
    cut = None
    if heads is not None or gate:
        at = {"bhsd": 1, "thd": 1}.get(layout, 2)
        cut = weft.Heads(
            q=qkv.shape[at] if heads is None else heads, kv=kv_heads or 0 if k is None else k.shape[at],
            dim=head_dim or (24 if k is None else k.shape[-1]), v_dim=v_dim or (0 if v is None else v.shape[-1]),
            packing=packing, gate=gate,
        )  # fmt: skip
    found = weft.qkv_prepare(
        qkv, k, v, heads=cut, bias=bias,
        norm=None if qk_norm is None else weft.HeadNorm(
            qk_norm, q_weight, k_weight, q_bias, k_bias, eps, weight_offset, norm_after
        ),
        rotation=rotation_of(cos, sin, base, rope_dim, style, out_style, rope_first, mrope_sections, scaling),
        positions=positions,
        cache=None if cache is None else weft.KVCache(*cache, *(cache_scales or ())), slots=slots,
        quantize=quantize, layout=layout, out_layout=out_layout,
    )  # fmt: skip
    return tuple(t for t in found if t is not None)


def spelled_rope(
    x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, positions: Tensor | None = None,
    base: float | None = None, scaling: str = "", rope_dim: int | None = None, style: Any = "neox",
    out_style: Any = None, rope_first: bool = True, mrope_sections: Any = None, layout: Any = "bshd",
    out_layout: Any = None, inverse: bool = False,
) -> Tensor:  # fmt: skip
    """`weft.rope`."""
    rotation = rotation_of(cos, sin, base, rope_dim, style, out_style, rope_first, mrope_sections, scaling)
    return weft.rope(
        x, rotation, positions=positions, layout=layout, out_layout=out_layout, inverse=inverse  # type: ignore[arg-type]
    )  # fmt: skip


def rotation_of(
    cos: Tensor | None, sin: Tensor | None, base: float | None, dim: int | None, style: Any, out_style: Any,
    first: bool, sections: Any, scaling: str,
) -> weft.Rotation | None:  # fmt: skip
    if cos is None and sin is None and base is None:
        return None
    return weft.Rotation(base, cos, sin, dim, style, out_style, first, sections, scaling)


def spelled(call: Call) -> dict[str, Any]:
    """The arguments of a call of `spelled_out` or of a workload, with the names of the former."""
    if call.function not in (prepare, prepare_cached, rotate):
        return arguments(call)
    a = dict(call.kwargs)
    heads, norm, rotation = a.pop("heads", None), a.pop("norm", {}), a.pop("rotation")
    made = {
        **a.pop("layouts"),
        **(
            {"heads": heads.q, "kv_heads": heads.kv, "head_dim": heads.dim, "v_dim": heads.v_dim}
            if heads
            else {}
        ),
        **({"packing": heads.packing, "gate": heads.gate} if heads else {}),
        **({"qk_norm": norm["kind"]} if norm else {}),
        "weight_offset": norm.get("weight_offset", 0.0),
        "norm_after": norm.get("after_rotation", False),
        "base": rotation.get("base"),
        "rope_dim": rotation["dim"],
        "style": rotation.get("style", "neox"),
        "out_style": rotation.get("out_style"),
        "rope_first": rotation.get("first", True),
        "mrope_sections": rotation.get("sections"),
    }
    if call.function is rotate:
        del made["weight_offset"], made["norm_after"]
        return arguments(Call(spelled_rope, {**a, **made}))
    a.pop("slots", None)
    return arguments(Call(spelled_out, {**a, **made}))


# ---- the truth -----------------------------------------------------------------------------------------------


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


Pairs = tuple[Tensor, Tensor]


def read_and_written(a: dict[str, Any], rope_dim: int, dim: int) -> tuple[Pairs, Pairs]:
    """The numbers of a head that are rotated with each other, and where they are written."""
    styles = (a["style"], a["out_style"] or a["style"])
    if a.get("inverse"):
        styles = styles[::-1]
    read, written = (pairs(rope_dim, dim, style, a["rope_first"]) for style in styles)
    return read, written


def pairs(rope_dim: int, dim: int, style: str, first: bool) -> Pairs:
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
        assert not a["scaling"], "see the tests of scaled rotations"
        return angle.cos()[:, :, None], angle.sin()[:, :, None]
    found = []
    for table in (a["cos"], a["sin"]):
        table = table.detach().double()
        if table.dim() == 3:
            found.append(table.expand(batch, tokens, half)[:, :, None])
        else:
            found.append(table[where, torch.arange(half)][:, :, None])
    return found[0], found[1]


def turned(x: Tensor, cos: Tensor, sin: Tensor, read: Pairs, written: Pairs) -> Tensor:
    y = x.clone()
    (i, j), (to_i, to_j) = read, written
    y[..., to_i] = x[..., i] * cos - x[..., j] * sin
    y[..., to_j] = x[..., j] * cos + x[..., i] * sin
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

    def size(self, x: Tensor, back: bool = False) -> Tensor:
        """Of the largest term of a rotation of numbers of these sizes, or back; a cosine is off by an ulp of 1."""
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


def qkv_prepare(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    a = spelled(call)
    apart = a["k"] is not None
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("qkv", "k", "v", "bias", "q_weight", "k_weight", "q_bias", "k_bias")
        if a[name] is not None
    }
    layout = "thd" if a["qkv"].dim() == (3 if apart else 2) else a["layout"]
    out_layout = a["out_layout"] or layout
    x = canonical(leaves["qkv"], layout)
    batch, tokens = x.shape[:2]
    if "bias" in leaves:
        x = x + leaves["bias"]
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
        rotation = (*angles(a, rope_dim, batch, tokens), *read_and_written(a, rope_dim, dim))
    found: dict[str, Near | Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    noises: dict[str, Tensor] = {}
    for name, (part, value) in zip(NAMES, parts.items(), strict=False):
        noise = EPS32 * value.detach().abs() * ("bias" in leaves)  # the sum with the bias is fp32
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
    if "bias" in leaves:  # a sum of numbers that are rounded
        dx = leaves["qkv"].grad
        assert dx is not None
        terms = noises["qkv"] + ulp(dx, a["qkv"].dtype) / 2 + FEW * dx.abs()
        noises["bias"] = terms.flatten(0, -2).sum(0)
    for name, leaf in leaves.items():
        if leaf.grad is not None and name in noises:
            found[f"d{name}"] = Near(leaf.grad, noises[name].detach())
    return found


def qkv_prepare_backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it."""
    a = call.kwargs
    cut = a["cut"]
    upstream = {
        name: a[d] for name, d in zip(NAMES, ("dq", "dk", "dv", "dgate"), strict=True) if a[d] is not None
    }
    tokens = as_canonical(a["dq"], cut.out_layout, a["batch"]).shape[1]
    x = a["dq"].new_zeros(a["batch"], tokens, cut.width) if a["x"] is None else a["x"]
    vectors: dict[str, Any] = {
        name: a[name] for name in ("q_weight", "k_weight", "q_bias", "k_bias", "bias") if name in a
    }
    rotation: dict[str, Any] = {name: a[name] for name in ("cos", "sin", "positions") if name in a}
    forward = Call(
        prepare,
        {
            "qkv": x,
            "heads": weft.Heads(
                q=cut.q, kv=cut.kv, dim=cut.dim, v_dim=cut.v_dim, packing=cut.packing, gate=cut.gate
            ),
            "norm": a["norm"],
            "rotation": a["rotation"],
            "layouts": {"layout": cut.layout, "out_layout": cut.out_layout},
            **vectors,
            **rotation,
        },
    )
    found = qkv_prepare(forward, upstream)
    names = ("y", *(f"output{i}" for i in range(1, 6)))
    return {name: found[f"d{of}"] for name, of in zip(names, ("qkv", *vectors), strict=False)}


def rope(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    a = {**spelled(call), "norm_after": False, "qk_norm": None}
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
    """Of a workload: results as without a cache; each token's codes and scales in its slot, zeros in all others."""
    slots = call["slots"].long()
    plain = Call(prepare, {name: value for name, value in call.kwargs.items() if name != "slots"})
    found = qkv_prepare(plain, gradients)
    pages = -(-len(slots) // PAGE)

    def kept(near: Near) -> Near:
        """The numbers of tokens where a cache has them."""
        empty = torch.zeros(2, pages * PAGE, *near.truth.shape[1:], dtype=torch.float64)
        empty[0, slots], empty[1, slots] = near.truth, near.noise
        return Near(*empty.unflatten(1, (pages, PAGE)))

    for i, name in enumerate(NAMES[1:3]):
        heads = found[name]
        assert isinstance(heads, Near)
        largest = heads.truth.abs().amax(-1, keepdim=True)
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        # That of the largest number, and of a division and a product.
        relative = heads.noise.amax(-1, keepdim=True) / largest + 4 * EPS32
        codes = heads.truth / scale
        found[f"output{3 + i}"] = kept(Near(codes, heads.noise / scale + codes.abs() * relative))
        found[f"output{5 + i}"] = kept(Near(scale[..., 0], (scale * relative)[..., 0]))
    return found


TRUTHS = {f.__name__: f for f in (qkv_prepare, qkv_prepare_backward, qkv_prepare_cached, rope)}
TRUTHS["qkv_prepare_quantized"] = qkv_prepare  # of v: queries and keys are codes


# Tiles of tokens, heads and pairs, which `test_heads_are_moved_128_bits_at_a_time` looks at.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "qkv_kernel": (set(), set()),
    "qkv_backward_kernel": (set(), set()),
}
