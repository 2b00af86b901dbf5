"""Packed projections of real models, prepared for attention: forward, backward, and into a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.common.heads import Cut, Heads, shape_of
from ...ops.common.kv_cache import KVCache
from ...ops.heads.arguments import PrepareBackward, PrepareGradients
from ...ops.heads.norm import NO_NORM, HeadNorm
from ...ops.heads.qkv import qkv_prepare
from ...runtime import catalogue
from ..chain import EPS, chain
from ..family import Family, Moved
from ..problem import Call, Inputs, Size, Workload
from ..truth import EPS32, Near, arguments
from ._heads import (
    FEW,
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
    "linghe/qkv": ("rows", 2, 128),
    "qwen3-30b-a3b/qkv": (2, "rows", 128),
    "qwen3-next/qkv": (2, "rows", 256),
    "llama3-8b/qkv": (2, "rows", 128),
    "qwen2-7b/qkv": (2, "rows", 128),
    "qwen3-30b-a3b/decode": ("rows", 128),
    "odd/qkv": (3, "rows", 90),
}

# The sets of options: those of `_heads`, and
#   heads      the arguments of `Heads` except `dim`
#   bias       whether to draw the projection's bias
#   quantize   the format of queries and keys
BOTH = ("q_weight", "k_weight")
OPTIONS: dict[str, dict[str, Any]] = {
    "groups-half": {
        "heads": {"q": 16, "kv": 4, "packing": "groups"},
        "norm": {"kind": "rms"},
        "vectors": BOTH,
        "angles": "table",
        "turned": 2,
        "layouts": {"layout": "sbhd", "out_layout": "bshd"},
    },
    "packed": {
        "heads": {"q": 32, "kv": 4},
        "norm": {"kind": "rms"},
        "vectors": BOTH,
        "angles": "packed",
        "rotation": {"base": 1e6},
        "layouts": {"out_layout": "bhsd"},
    },
    "gate": {
        "heads": {"q": 16, "kv": 2, "gate": True},
        "norm": {"kind": "rms", "weight_offset": 1.0},
        "vectors": BOTH,
        "angles": "table",
        "turned": 1,
        "layouts": {"out_layout": "thd"},
    },
    "plain": {"heads": {"q": 32, "kv": 8}, "angles": "table"},
    "bias": {"heads": {"q": 28, "kv": 4}, "bias": True, "angles": "packed", "rotation": {"base": 1e6}},
    "bias-norm": {
        "heads": {"q": 8, "kv": 4, "packing": "groups", "gate": True},
        "bias": True,
        "norm": {"kind": "rms"},
        "vectors": BOTH,
        "angles": "table",
    },
    "cache-fp8": {
        "heads": {"q": 32, "kv": 4},
        "norm": {"kind": "rms"},
        "vectors": BOTH,
        "angles": "packed",
        "rotation": {"base": 1e6},
    },
    "codes": {
        "heads": {"q": 32, "kv": 4},
        "norm": {"kind": "rms"},
        "vectors": BOTH,
        "angles": "packed",
        "rotation": {"base": 1e6},
        "layouts": {"out_layout": "bhsd"},
        "quantize": "int8:row",
    },
    "layer-after": {
        "heads": {"q": 5, "kv": 1, "v_dim": 35},
        "norm": {"kind": "layer", "after_rotation": True},
        "vectors": (*BOTH, "q_bias", "k_bias"),
        "angles": "samples",
        "turned": 2,
        "rotation": {"style": "interleaved", "first": False},
        "layouts": {"out_layout": "sbhd"},
    },
}


# ---- calls ----------------------------------------------------------------------------------------------------
#
# The functions below take the tensors of norms, rotations and caches as arguments, so that all tensors of a workload
# are arguments of its call.

PAGE = 16

VECTORS = ("q_weight", "k_weight", "q_bias", "k_bias")


def prepare(
    qkv: Tensor,
    *,
    heads: Heads,
    bias: Tensor | None = None,
    norm: dict[str, Any],
    rotation: dict[str, Any],
    positions: Tensor | None = None,
    layouts: dict[str, Any],
    cache: dict[str, Any] | None = None,
    quantize: str | None = None,
    out: Any = None,
    **tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Call `qkv_prepare`; return its results that are not None."""
    outputs = qkv_prepare(
        qkv,
        heads=heads,
        bias=bias,
        norm=_norm(norm, tensors),
        rotation=rotation_with(rotation, tensors),
        positions=positions,
        **(cache or {}),
        quantize=quantize,
        out=out,
        **layouts,
    )
    return tuple(t for t in outputs if t is not None)


def prepare_cached(slots: Tensor, heads: Heads, out: Any = None, **kwargs: Any) -> tuple[Tensor, ...]:
    """Call `qkv_prepare` with paged caches in FP8, one slot for each token; return them with the other results."""
    shape, device = (2, -(-slots.shape[0] // PAGE), PAGE, heads.kv), slots.device
    codes = torch.zeros((*shape, heads.dim), dtype=torch.uint8, device=device).unbind()
    scales = torch.zeros(shape, dtype=torch.float32, device=device).unbind()
    with torch.no_grad():
        cache = {"cache": KVCache(*codes, *scales), "slots": slots}
        results = prepare(heads=heads, cache=cache, out=out and out[:-4], **kwargs)
    return (*results, *codes, *scales)


def prepare_backward(
    cut: Cut, norm: dict[str, Any], rotation: dict[str, Any], batch: int, **tensors: Any
) -> tuple[Tensor, ...]:
    """Call the backward op; return the gradients of the packed projection and of all weights and biases."""
    bias, head_norm, head_rotation = (
        tensors.get("bias"),
        _norm(norm, tensors),
        rotation_with(rotation, tensors),
    )
    a = PrepareBackward(
        dq=tensors["dq"],
        dk=tensors["dk"],
        dv=tensors["dv"],
        dgate=tensors["dgate"],
        x=tensors["x"],
        k=None,
        bias=bias,
        norm=head_norm.argument if head_norm else NO_NORM,
        turning=head_rotation.argument._replace(positions=tensors.get("positions")),
        cut=cut,
        batch=batch,
        needs=PrepareGradients(
            True, False, False, *(tensors.get(name) is not None for name in (*VECTORS, "bias"))
        ),
    )
    return tuple(t for t in catalogue["qkv_prepare_backward"](a) if t is not None)


def _norm(options: dict[str, Any], tensors: dict[str, Any]) -> HeadNorm | None:
    """Build a norm from its options and tensors, or None without options."""
    vectors: dict[str, Any] = {name: tensors.get(name) for name in VECTORS}
    return HeadNorm(**options, **vectors) if options else None


# ---- inputs ---------------------------------------------------------------------------------------------------


def _bias(inputs: Inputs, settings: dict[str, Any], width: int) -> dict[str, Any]:
    return {"bias": inputs.normal(width)} if "bias" in settings else {}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = OPTIONS[workload.options]
    batch, tokens, dim = sizes_of(settings, shape)
    heads = Heads(**settings["heads"], dim=dim)
    return Call(
        prepare,
        {
            "qkv": inputs.normal(*shape[:-1], heads.width),
            **_bias(inputs, settings, heads.width),
            **draw_objects(inputs, settings, batch, tokens, dim),
            "heads": heads,
            "layouts": settings.get("layouts", {}),
            **({"quantize": settings["quantize"]} if "quantize" in settings else {}),
        },
    )


def _build_cached(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    call = _build(workload, inputs, shape)
    # Slots descend, as if pages were allocated from the end.
    slots = torch.arange(shape[0] - 1, -1, -1, dtype=torch.int32, device=inputs.device)
    return Call(prepare_cached, {**call.kwargs, "slots": slots})


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call."""
    settings = OPTIONS[workload.options]
    batch, tokens, dim = sizes_of(settings, shape)
    heads = Heads(**settings["heads"], dim=dim)
    layouts = {"layout": "bshd", "out_layout": "bshd", **settings.get("layouts", {})}
    cut = Cut(heads.q, heads.kv, dim, heads.v_dim, heads.packing, heads.gate, **layouts)
    objects = draw_objects(inputs, settings, batch, tokens, dim)

    def gradient(count: int, width: int) -> Tensor:
        return inputs.normal(*shape_of(cut.out_layout, batch, tokens, count, width))

    kwargs: dict[str, Any] = {
        "dq": gradient(heads.q, dim),
        "dk": gradient(heads.kv, dim),
        "dv": gradient(heads.kv, heads.v_dim),
        "dgate": gradient(heads.q, dim) if heads.gate else None,
        "x": inputs.normal(*shape[:-1], heads.width) if objects["norm"] else None,
    }
    bias = _bias(inputs, settings, heads.width)
    return Call(prepare_backward, {**kwargs, **bias, **objects, "cut": cut, "batch": batch})


class Backward(Workload):
    """Backward that reads only the normalized part of x, neither the value heads nor the gates."""

    def least_bytes(self, rows: int | None = None, dtype: torch.dtype | None = None) -> int:
        call = self.make("meta", dtype, rows)
        unread = (
            0 if call["x"] is None else sum(t.numel() for t in (call["dv"], call["dgate"]) if t is not None)
        )
        size: int = call["dq"].element_size()
        return super().least_bytes(rows, dtype) - unread * size


_SECTORS = (
    "parts of a row begin inside sectors, which count for each; partial sums of four vectors for few tokens"
)

_BIAS = "the gradient of the projection is read once more for that of its bias"


def _rereads(op: str, name: str, options: str) -> dict[str, Any]:
    """Return how often the minimum of bytes moves, and why, where it moves more than once."""
    if op == "qkv_prepare_backward" and "bias" in OPTIONS[options]:
        return {"rereads": _BIAS, "moves": 1.6}
    if name == "odd/qkv":
        return {"rereads": _SECTORS, "moves": 1.12 if op == "qkv_prepare_backward" else 1.07}
    return {}


def _named(
    op: str, build: Any, kind: Any, tags: tuple[str, ...], *names: tuple[str, str, int]
) -> list[Workload]:
    return [
        kind(
            op, name, options, SHAPES[name], rows, build, frozenset(tags), **_rereads(op, name, options),
        )
        for name, options, rows in names
    ]  # fmt: skip


WORKLOADS: tuple[Workload, ...] = (
    *_named(
        "qkv_prepare", _build, Workload, ("training",),
        ("linghe/qkv", "groups-half", 4096), ("qwen3-30b-a3b/qkv", "packed", 4096),
        ("qwen3-next/qkv", "gate", 4096), ("qwen2-7b/qkv", "bias", 4096), ("odd/qkv", "layer-after", 1000),
        ("odd/qkv", "bias-norm", 1000),
    ),
    *_named("qkv_prepare", _build, Workload, ("inference",), ("llama3-8b/qkv", "plain", 32)),
    *_named(
        "qkv_prepare_cached", _build_cached, Workload, ("inference",), ("qwen3-30b-a3b/decode", "cache-fp8", 64)
    ),
    *_named("qkv_prepare_quantized", _build, Workload, ("inference",), ("qwen3-30b-a3b/qkv", "codes", 1024)),
    *_named(
        "qkv_prepare_backward", _build_backward, Backward, ("training", "backward"),
        ("linghe/qkv", "groups-half", 4096), ("qwen2-7b/qkv", "bias", 4096), ("odd/qkv", "layer-after", 1000),
        ("odd/qkv", "bias-norm", 1000),
    ),
)  # fmt: skip


# ---- truth ----------------------------------------------------------------------------------------------------

NAMES = ("y", "output1", "output2", "output3")


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
    """Call `qkv_prepare` with the options of heads, norm and rotation one by one; return its results that are not None.

    A test changes one of many arguments."""
    cut = None
    if heads is not None or gate:
        at = {"bhsd": 1, "thd": 1}.get(layout, 2)
        cut = Heads(
            q=qkv.shape[at] if heads is None else heads, kv=kv_heads or 0 if k is None else k.shape[at],
            dim=head_dim or (24 if k is None else k.shape[-1]), v_dim=v_dim or (0 if v is None else v.shape[-1]),
            packing=packing, gate=gate,
        )  # fmt: skip
    outputs = qkv_prepare(
        qkv, k, v, heads=cut, bias=bias,
        norm=None if qk_norm is None else HeadNorm(
            qk_norm, q_weight, k_weight, q_bias, k_bias, eps, weight_offset, norm_after
        ),
        rotation=rotation_of(cos, sin, base, rope_dim, style, out_style, rope_first, mrope_sections, scaling),
        positions=positions,
        cache=None if cache is None else KVCache(*cache, *(cache_scales or ())), slots=slots,
        quantize=quantize, layout=layout, out_layout=out_layout,
    )  # fmt: skip
    return tuple(t for t in outputs if t is not None)


def _spelled(call: Call) -> dict[str, Any]:
    """Return the arguments of a call of `spelled_out`, or of a workload by the same names."""
    if call.function not in (prepare, prepare_cached):
        return arguments(call)
    a = dict(call.kwargs)
    a.pop("slots", None)
    heads, norm = a.pop("heads"), a.pop("norm", {})
    spelled = {
        **a.pop("layouts"),
        "heads": heads.q,
        "kv_heads": heads.kv,
        "head_dim": heads.dim,
        "v_dim": heads.v_dim,
        "packing": heads.packing,
        "gate": heads.gate,
        **({"qk_norm": norm["kind"]} if norm else {}),
        "weight_offset": norm.get("weight_offset", 0.0),
        "norm_after": norm.get("after_rotation", False),
        **spelled_rotation(a.pop("rotation")),
    }
    return arguments(Call(spelled_out, {**a, **spelled}))


def _columns(a: dict[str, Any]) -> dict[str, Tensor]:
    """Return the columns of a packed projection that hold q, k, v and the gate: [heads, dim] each."""
    heads, kv_heads, dim = a["heads"], a["kv_heads"] or a["heads"], a["head_dim"]
    v_dim = a["v_dim"] or dim
    columns_of: dict[str, list[list[int]]] = {"q": [], "k": [], "v": [], "gate": []}
    at = 0

    def take(name: str, width: int) -> None:
        nonlocal at
        columns_of[name].append(list(range(at, at + width)))
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
    return {name: torch.tensor(columns) for name, columns in columns_of.items() if columns}


def qkv_prepare_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the prepared heads, and with upstream gradients those of all inputs."""
    from triton_loom.testing import ulp

    a = _spelled(call)
    unpacked = a["k"] is not None
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("qkv", "k", "v", "bias", "q_weight", "k_weight", "q_bias", "k_bias")
        if a[name] is not None
    }
    layout = "thd" if a["qkv"].dim() == (3 if unpacked else 2) else a["layout"]
    out_layout = a["out_layout"] or layout
    x = canonical(leaves["qkv"], layout)
    batch, tokens = x.shape[:2]
    if "bias" in leaves:
        x = x + leaves["bias"]
    columns: dict[str, Tensor] = {}
    if unpacked:
        dim = a["k"].shape[-1]
        parts = {"q": x[..., :dim], "k": canonical(leaves["k"], layout)}
        if "v" in leaves:
            parts["v"] = canonical(leaves["v"], layout)
        if a["gate"]:
            parts["gate"] = x[..., dim:]
    else:
        dim, columns = a["head_dim"], _columns(a)
        parts = {name: x[..., where] for name, where in columns.items()}
    rotation = None
    if a["cos"] is not None or a["base"] is not None:
        rope_dim = a["rope_dim"] or (dim if a["cos"] is None else 2 * a["cos"].shape[-1])
        rotation = (*angles(a, rope_dim, batch, tokens), *read_and_written(a, rope_dim, dim))
    expected: dict[str, Near | Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    noises: dict[str, Tensor] = {}
    for name, (part, value) in zip(NAMES, parts.items(), strict=False):
        noise = EPS32 * value.detach().abs() * ("bias" in leaves)  # the sum with the bias is fp32
        head = Head(a, leaves.get(f"{part}_weight"), leaves.get(f"{part}_bias"), rotation)
        y = value
        if part in ("q", "k"):
            y, noise = head.forward(value)
        expected[name] = Near(laid_out(y.detach(), out_layout), laid_out(noise.detach(), out_layout))
        if name in gradients:
            dy = as_canonical(gradients[name].detach().double(), out_layout, batch)
            total = total + (y * dy).sum()
            noises[part] = torch.zeros_like(value)
            if part in ("q", "k"):
                noises[part], noises[f"{part}_weight"], noises[f"{part}_bias"] = head.backward(dy)
    if not gradients:
        return expected
    total.backward()
    if unpacked:
        noises["qkv"] = laid_out(noises["q"], layout)
        noises |= {name: laid_out(noises[name], layout) for name in ("k", "v") if name in noises}
    else:
        packed = torch.zeros_like(x)
        for name, where in columns.items():
            if name in noises:
                packed[..., where] = noises[name]
        noises["qkv"] = packed[0] if layout == "thd" else canonical(packed, layout)
    if "bias" in leaves:  # a sum of rounded elements
        dx = leaves["qkv"].grad
        assert dx is not None
        terms = noises["qkv"] + ulp(dx, a["qkv"].dtype) / 2 + FEW * dx.abs()
        noises["bias"] = terms.flatten(0, -2).sum(0)
    for name, leaf in leaves.items():
        if leaf.grad is not None and name in noises:
            expected[f"d{name}"] = Near(leaf.grad, noises[name].detach())
    return expected


def qkv_prepare_backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the formula for a call of the op the way autograd does."""
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
            "heads": Heads(
                q=cut.q, kv=cut.kv, dim=cut.dim, v_dim=cut.v_dim, packing=cut.packing, gate=cut.gate
            ),
            "norm": a["norm"],
            "rotation": a["rotation"],
            "layouts": {"layout": cut.layout, "out_layout": cut.out_layout},
            **vectors,
            **rotation,
        },
    )
    expected = qkv_prepare_truth(forward, upstream)
    names = ("y", *(f"output{i}" for i in range(1, 6)))
    return {name: expected[f"d{of}"] for name, of in zip(names, ("qkv", *vectors), strict=False)}


def qkv_prepare_cached_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the results without a cache, each token's codes and scales in its slot, and zeros in other slots."""
    slots = call["slots"].long()
    plain = Call(prepare, {name: value for name, value in call.kwargs.items() if name != "slots"})
    expected = qkv_prepare_truth(plain, gradients)
    pages = -(-len(slots) // PAGE)

    def in_slots(near: Near) -> Near:
        """Scatter the elements of tokens to their slots in a cache."""
        empty = torch.zeros(2, pages * PAGE, *near.truth.shape[1:], dtype=torch.float64)
        empty[0, slots], empty[1, slots] = near.truth, near.noise
        return Near(*empty.unflatten(1, (pages, PAGE)))

    for i, name in enumerate(NAMES[1:3]):
        heads = expected[name]
        assert isinstance(heads, Near)
        largest = heads.truth.abs().amax(-1, keepdim=True)
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        # Errors of the largest element, of a division and of a product.
        relative = heads.noise.amax(-1, keepdim=True) / largest + 4 * EPS32
        codes = heads.truth / scale
        expected[f"output{3 + i}"] = in_slots(Near(codes, heads.noise / scale + codes.abs() * relative))
        expected[f"output{5 + i}"] = in_slots(Near(scale[..., 0], (scale * relative)[..., 0]))
    return expected


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of heads [S, B, heads, d] by angles of S."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def _heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split groups [q q q q k v] into q [S, B, 16, 128] and k, v [S, B, 4, 128]."""
    groups = qkv.unflatten(-1, (4, 6, 128))
    return groups[..., :4, :].flatten(-3, -2), groups[..., 4, :], groups[..., 5, :]


def _qkv(x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads_of(x)
    prepared = []
    for part, weight in ((q, q_weight), (k, k_weight)):
        h = part.float()
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float()
        prepared.append(_rotated(normed, cos, sin).to(x.dtype))
    return tuple(part.transpose(0, 1).contiguous() for part in (*prepared, v))


def _qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, _ = _heads_of(x)
    parts, sums = [], []
    for gradient, part, weight in ((dq, q, q_weight), (dk, k, k_weight)):
        h, d = part.float(), _rotated(gradient.transpose(0, 1).float(), cos, -sin)
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        z, t = h * rstd, d * weight.float()
        parts.append((rstd * (t - z * (t * z).mean(-1, keepdim=True))).to(x.dtype))
        sums.append((d * z).flatten(0, -2).sum(0).to(weight.dtype))
    parts.append(dv.transpose(0, 1))
    groups = [part.unflatten(-2, (4, -1)) for part in parts]
    return torch.cat(groups, -2).flatten(-3), *sums


FAMILY = Family(
    workloads=WORKLOADS,
    truths={
        "qkv_prepare": qkv_prepare_truth,
        "qkv_prepare_backward": qkv_prepare_backward_truth,
        "qkv_prepare_cached": qkv_prepare_cached_truth,
        "qkv_prepare_quantized": qkv_prepare_truth,  # checks v; queries and keys are codes
    },
    chains={
        ("qkv_prepare", "groups-half"): chain(
            _qkv, "qkv", "q_weight", "k_weight", "cos", "sin", view=lambda result: tuple(result)[:3]
        ),
        ("qkv_prepare_backward", "groups-half"): chain(
            _qkv_backward, "dq", "dk", "dv", "x", "q_weight", "k_weight", "cos", "sin"
        ),
    },
    # Tiles of tokens, heads and pairs, checked by `test_heads_are_moved_128_bits_at_a_time`.
    moved={"qkv_kernel": Moved(set(), set()), "qkv_backward_kernel": Moved(set(), set())},
)
