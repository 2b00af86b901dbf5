"""Workloads of the rotations: packed projections of real models, forward and backward, with a cache, and single tensors
of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.rope import qkv_prepare, rope
from ..runtime import catalogue
from .problem import Call, Inputs, Size, Workload

# Where a shape comes from -> (batch and sequence, numbers of a head). "rows" are the positions of a sequence.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/qkv": ("rows", 2, 128),
    "qwen3-30b-a3b/qkv": (2, "rows", 128),
    "qwen3-next/qkv": (2, "rows", 256),
    "llama3-8b/qkv": (2, "rows", 128),
    "qwen3-30b-a3b/decode": ("rows", 128),
    "odd/qkv": (3, "rows", 90),
    "deepseek-v3/q": (2, "rows", 192),
    "qwen2-vl/q": ("rows", 128),
    "odd/heads": ("rows", 66),
}

# The sets of options. Besides arguments that go to the function as they are:
#   heads      query heads, and key heads
#   tensors    which weights and biases of the norms to make
#   angles     "table": cos and sin of all positions; "samples": those of every sample; "packed": positions that begin
#              again, with a base; "three": positions of three axes
#   turned     share of a head that is rotated, in quarters
OPTIONS: dict[str, dict[str, Any]] = {
    "groups-half": {
        "heads": (16, 4), "tensors": ("q_weight", "k_weight"), "angles": "table", "turned": 2, "packing": "groups",
        "qk_norm": "rms", "layout": "sbhd", "out_layout": "bshd",
    },
    "packed": {
        "heads": (32, 4), "tensors": ("q_weight", "k_weight"), "angles": "packed", "base": 1e6, "qk_norm": "rms",
        "out_layout": "bhsd",
    },
    "gate": {
        "heads": (16, 2), "tensors": ("q_weight", "k_weight"), "angles": "table", "turned": 1, "qk_norm": "rms",
        "weight_offset": 1.0, "gate": True, "out_layout": "thd",
    },
    "plain": {"heads": (32, 8), "tensors": (), "angles": "table"},
    "cache-fp8": {
        "heads": (32, 4), "tensors": ("q_weight", "k_weight"), "angles": "packed", "base": 1e6, "qk_norm": "rms",
    },
    "layer-after": {
        "heads": (5, 1), "tensors": ("q_weight", "k_weight", "q_bias", "k_bias"), "angles": "samples", "turned": 2,
        "qk_norm": "layer", "norm_after": True, "style": "interleaved", "rope_first": False, "v_dim": 35,
        "out_layout": "sbhd",
    },
    "last-third": {
        "heads": (32, 0), "tensors": (), "angles": "none", "base": 1e4, "style": "interleaved", "rope_first": False,
        "rope_dim": 64,
    },
    "three-axes": {"heads": (12, 0), "tensors": (), "angles": "three", "base": 1e6},
}  # fmt: skip
_PASSED = (
    *(
        "packing",
        "qk_norm",
        "norm_after",
        "weight_offset",
        "gate",
        "style",
        "rope_first",
        "layout",
        "out_layout",
    ),
    *("base", "v_dim"),
)


def _positions(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Sequences one after the other, of lengths that nothing divides; far from the beginning too."""
    tokens = shape[-1]
    made = torch.arange(tokens, dtype=torch.int32) % 1021
    made[tokens // 2 :] += 1 << 19
    return made.expand(shape).contiguous().to(inputs.device)


def _angles(inputs: Inputs, settings: dict[str, Any], batch: int, tokens: int, dim: int) -> dict[str, Any]:
    turned = settings.get("rope_dim") or max(2, dim * settings.get("turned", 4) // 8 * 2)
    kind, made = settings["angles"], {"rope_dim": min(turned, dim)}
    if kind in ("table", "samples"):
        lead = (tokens,) if kind == "table" else (batch, tokens)
        angle = inputs.normal(*lead, turned // 2, std=10.0, dtype=torch.float32)
        made |= {"cos": torch.cos(angle), "sin": torch.sin(angle)}
    elif kind == "packed":
        made["positions"] = _positions(inputs, (batch, tokens))
    elif kind == "three":
        made["positions"] = _positions(inputs, (3, tokens))
        first = turned // 8
        made["mrope_sections"] = (first, first, turned // 2 - 2 * first)
    return made


def _sizes(settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, sequence, numbers of a head); those of a head are even, and four or more."""
    *lead, cols = shape
    if settings.get("layout") == "sbhd":
        lead.reverse()
    batch, tokens = lead if len(lead) == 2 else (1, *lead)
    return batch, tokens, max(4, cols + cols % 2)


def _vectors(inputs: Inputs, settings: dict[str, Any], dim: int) -> dict[str, Tensor]:
    mean = 1.0 - settings.get("weight_offset", 0.0)
    return {
        name: inputs.normal(dim, mean=mean if "weight" in name else 0.0, std=0.2)
        for name in settings["tensors"]
    }


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    batch, tokens, dim = _sizes(settings, shape)
    heads, kv_heads = settings["heads"]
    values = kv_heads * settings.get("v_dim", dim)
    width = heads * dim * (1 + settings.get("gate", False)) + kv_heads * dim + values
    kwargs: dict[str, Any] = {
        "qkv": inputs.normal(*shape[:-1], width),
        **_vectors(inputs, settings, dim),
        **_angles(inputs, settings, batch, tokens, dim),
        **{name: settings[name] for name in _PASSED if name in settings},
    }
    return Call(qkv_prepare, {**kwargs, "heads": heads, "kv_heads": kv_heads, "head_dim": dim})


PAGE = 16


def prepare_cached(**kwargs: Any) -> tuple[Tensor, ...]:
    """With paged caches in FP8 of its own, which are results like the others: as many slots as there are tokens."""
    pages, device = -(-kwargs["slots"].shape[0] // PAGE), kwargs["qkv"].device
    shape = (2, pages, PAGE, kwargs["kv_heads"])
    cache = torch.zeros((*shape, kwargs["head_dim"]), dtype=torch.uint8, device=device).unbind()
    scales = torch.zeros(shape, dtype=torch.float32, device=device).unbind()
    with torch.no_grad():
        results = qkv_prepare(**kwargs, cache=cache, cache_scales=scales)
    return (*results, *cache, *scales)


def _build_cached(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    call = _build(workload, inputs, shape)
    # in the last place first, as if pages were handed out from behind
    slots = torch.arange(shape[0] - 1, -1, -1, dtype=torch.int32, device=inputs.device)
    return Call(prepare_cached, {**call.kwargs, "slots": slots})


def _backward(**kwargs: Any) -> Any:
    """The op takes its arguments by position."""
    return catalogue["qkv_prepare_backward"](*kwargs.values())


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """What the backward of the same call reads."""
    settings = dict(workload.settings)
    batch, tokens, dim = _sizes(settings, shape)
    heads, kv_heads = settings["heads"]
    v_dim = settings.get("v_dim", dim)
    gate = settings.get("gate", False)
    out = settings.get("out_layout", "bshd")
    normed = settings.get("qk_norm", "none")
    vectors = _vectors(inputs, settings, dim)
    angles = _angles(inputs, settings, batch, tokens, dim)

    def gradient(count: int, width: int) -> Tensor:
        lead = {
            "bshd": (batch, tokens, count),
            "sbhd": (tokens, batch, count),
            "bhsd": (batch, count, tokens),
        }
        return inputs.normal(*lead.get(out, (batch * tokens, count)), width)

    kwargs: dict[str, Any] = {
        "dq": gradient(heads, dim),
        "dk": gradient(kv_heads, dim),
        "dv": gradient(kv_heads, v_dim),
        "dgate": gradient(heads, dim) if gate else None,
        "x": None
        if normed == "none"
        else inputs.normal(*shape[:-1], heads * dim * (1 + gate) + kv_heads * (dim + v_dim)),
        "k": None,
        **{name: vectors.get(name) for name in ("q_weight", "k_weight", "q_bias", "k_bias")},
        **{name: angles.get(name) for name in ("cos", "sin", "positions")},
        "base": settings.get("base", 0.0),
        "eps": 1e-6,
        "weight_offset": settings.get("weight_offset", 0.0),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "v_dim": v_dim,
        "packing": settings.get("packing", "flat"),
        "gate": gate,
        "layout": settings.get("layout", "bshd"),
        "out_layout": out,
        "norm": normed,
        "norm_after": settings.get("norm_after", False),
        "rope_dim": angles["rope_dim"],
        "style": settings.get("style", "neox"),
        "rope_first": settings.get("rope_first", True),
        "sections": "",
        "batch": batch,
        "needs": [True, *(name in vectors for name in ("q_weight", "k_weight", "q_bias", "k_bias"))],
    }
    return Call(_backward, kwargs)


class Backward(Workload):
    """A backward whose x is read as far as it was normed: the values of the heads and the gates are not."""

    def least_bytes(self, rows: int | None = None, dtype: torch.dtype | None = None) -> int:
        call = self.make("meta", dtype, rows)
        unread = (
            0 if call["x"] is None else sum(t.numel() for t in (call["dv"], call["dgate"]) if t is not None)
        )
        size: int = call["dq"].element_size()
        return super().least_bytes(rows, dtype) - unread * size


def _build_rope(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    batch, tokens, dim = _sizes(settings, shape)
    kwargs: dict[str, Any] = {
        "x": inputs.normal(*shape[:-1], settings["heads"][0], dim),
        **_angles(inputs, settings, batch, tokens, dim),
        **{name: settings[name] for name in _PASSED if name in settings},
    }
    return Call(rope, kwargs)


_SECTORS = (
    "parts of a row begin inside sectors, which count for each; partial sums of four vectors for few tokens"
)


def _named(
    op: str, build: Any, kind: Any, tags: tuple[str, ...], *names: tuple[str, str, int]
) -> list[Workload]:
    return [
        kind(
            op, name, options, SHAPES[name], rows, build, frozenset(tags), settings=tuple(OPTIONS[options].items()),
            **({"rereads": _SECTORS, "moves": 1.12 if build is _build_backward else 1.07} if name == "odd/qkv" else {}),
        )
        for name, options, rows in names
    ]  # fmt: skip


WORKLOADS: tuple[Workload, ...] = (
    *_named(
        "qkv_prepare", _build, Workload, ("training",),
        ("linghe/qkv", "groups-half", 4096), ("qwen3-30b-a3b/qkv", "packed", 4096),
        ("qwen3-next/qkv", "gate", 4096), ("odd/qkv", "layer-after", 1000),
    ),
    *_named("qkv_prepare", _build, Workload, ("inference",), ("llama3-8b/qkv", "plain", 32)),
    *_named(
        "qkv_prepare_cached", _build_cached, Workload, ("inference",), ("qwen3-30b-a3b/decode", "cache-fp8", 64)
    ),
    *_named(
        "qkv_prepare_backward", _build_backward, Backward, ("training", "backward"),
        ("linghe/qkv", "groups-half", 4096), ("odd/qkv", "layer-after", 1000),
    ),
    *_named(
        "rope", _build_rope, Workload, ("training",),
        ("deepseek-v3/q", "last-third", 4096), ("odd/heads", "three-axes", 1000),
    ),
)  # fmt: skip
