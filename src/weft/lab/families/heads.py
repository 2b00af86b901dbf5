"""Workloads of heads: packed projections of real models, forward and backward, with a cache, and single tensors
of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.heads.angles import Rotation
from ...ops.heads.arguments import PrepareBackward, PrepareNeeds
from ...ops.heads.cache import KVCache
from ...ops.heads.layout import Cut, Heads, shape_of
from ...ops.heads.norm import NO_NORM, HeadNorm
from ...ops.heads.qkv import qkv_prepare
from ...ops.heads.rope import rope
from ...runtime import catalogue
from ..problem import Call, Inputs, Size, Workload

# (batch and sequence, numbers of a head), by the model it comes from. "rows" are the positions of a sequence.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/qkv": ("rows", 2, 128),
    "qwen3-30b-a3b/qkv": (2, "rows", 128),
    "qwen3-next/qkv": (2, "rows", 256),
    "llama3-8b/qkv": (2, "rows", 128),
    "qwen2-7b/qkv": (2, "rows", 128),
    "qwen3-30b-a3b/decode": ("rows", 128),
    "odd/qkv": (3, "rows", 90),
    "deepseek-v3/q": (2, "rows", 192),
    "deepseek-v3/q-rope": (2, "rows", 64),
    "qwen2-vl/q": ("rows", 128),
    "odd/heads": ("rows", 66),
}

# The sets of options:
#   heads      the arguments of `Heads` except `dim`; for a single tensor of heads, their number
#   bias       whether that of the projection is made
#   norm       the arguments of `HeadNorm`, and `vectors`: which of its weights and biases to make
#   rotation   the arguments of `Rotation` except its tables; `turned`: how many quarters of a head are rotated
#   angles     "table": cos and sin of all positions; "samples": tables of their own for every sample; "packed": a base,
#              with positions that begin again; "three": a base, with positions of three axes; "none": a base alone
#   layouts    the layouts of input and results
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


# ---- calls ----------------------------------------------------------------------------------------------------
#
# The functions below take the tensors of norms, rotations and caches as arguments, so that the tensors of a workload
# are arguments of its call.


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
    **tensors: Tensor,
) -> tuple[Tensor, ...]:
    """The results of `qkv_prepare` that are not None."""
    found = qkv_prepare(
        qkv,
        heads=heads,
        bias=bias,
        norm=_norm(norm, tensors),
        rotation=_rotation(rotation, tensors),
        positions=positions,
        **(cache or {}),
        quantize=quantize,
        **layouts,
    )
    return tuple(t for t in found if t is not None)


def prepare_cached(slots: Tensor, heads: Heads, **kwargs: Any) -> tuple[Tensor, ...]:
    """`qkv_prepare` with paged caches in FP8, one slot for each token, which are returned with the other results."""
    shape, device = (2, -(-slots.shape[0] // PAGE), PAGE, heads.kv), slots.device
    codes = torch.zeros((*shape, heads.dim), dtype=torch.uint8, device=device).unbind()
    scales = torch.zeros(shape, dtype=torch.float32, device=device).unbind()
    with torch.no_grad():
        results = prepare(heads=heads, cache={"cache": KVCache(*codes, *scales), "slots": slots}, **kwargs)
    return (*results, *codes, *scales)


def prepare_backward(
    cut: Cut, norm: dict[str, Any], rotation: dict[str, Any], batch: int, **tensors: Any
) -> tuple[Tensor, ...]:
    """The gradients of the packed projection and of all weights and biases."""
    bias, made, turning = tensors.get("bias"), _norm(norm, tensors), _rotation(rotation, tensors)
    a = PrepareBackward(
        dq=tensors["dq"],
        dk=tensors["dk"],
        dv=tensors["dv"],
        dgate=tensors["dgate"],
        x=tensors["x"],
        k=None,
        bias=bias,
        norm=made.argument if made else NO_NORM,
        turning=turning.argument._replace(positions=tensors.get("positions")),
        cut=cut,
        batch=batch,
        needs=PrepareNeeds(
            True, False, False, *(tensors.get(name) is not None for name in (*VECTORS, "bias"))
        ),
    )
    return tuple(t for t in catalogue["qkv_prepare_backward"](a) if t is not None)


def rotate(
    x: Tensor,
    *,
    rotation: dict[str, Any],
    positions: Tensor | None = None,
    layouts: dict[str, Any],
    **tensors: Tensor,
) -> Tensor:
    """`rope`."""
    return rope(x, _rotation(rotation, tensors), positions=positions, **layouts)


PAGE = 16
VECTORS = ("q_weight", "k_weight", "q_bias", "k_bias")


def _norm(options: dict[str, Any], tensors: dict[str, Any]) -> HeadNorm | None:
    vectors: dict[str, Any] = {name: tensors.get(name) for name in VECTORS}
    return HeadNorm(**options, **vectors) if options else None


def _rotation(options: dict[str, Any], tensors: dict[str, Any]) -> Rotation:
    return Rotation(**options, cos=tensors.get("cos"), sin=tensors.get("sin"))


# ---- inputs -------------------------------------------------------------------------------------------------


def _positions(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Positions of several sequences one after the other, of odd lengths; some are far from the beginning."""
    tokens = shape[-1]
    made = torch.arange(tokens, dtype=torch.int32) % 1021
    made[tokens // 2 :] += 1 << 19
    return made.expand(shape).contiguous().to(inputs.device)


def _sizes(settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, sequence, numbers of a head); a head has an even number of them, at least four."""
    *lead, cols = shape
    if settings.get("layouts", {}).get("layout") == "sbhd":
        lead.reverse()
    batch, tokens = lead if len(lead) == 2 else (1, *lead)
    return batch, tokens, max(4, cols + cols % 2)


def _objects(inputs: Inputs, settings: dict[str, Any], batch: int, tokens: int, dim: int) -> dict[str, Any]:
    """The arguments that norm and rotation are made of: their options, and their tensors."""
    norm = settings.get("norm", {})
    mean = 1.0 - norm.get("weight_offset", 0.0)
    made: dict[str, Any] = {
        name: inputs.normal(dim, mean=mean if "weight" in name else 0.0, std=0.2)
        for name in settings.get("vectors", ())
    }
    rotation = dict(settings.get("rotation", {}))
    turned = min(rotation.get("dim") or max(2, dim * settings.get("turned", 4) // 8 * 2), dim)
    rotation["dim"], kind = turned, settings["angles"]
    if kind in ("table", "samples"):
        lead = (tokens,) if kind == "table" else (batch, tokens)
        angle = inputs.normal(*lead, turned // 2, std=10.0, dtype=torch.float32)
        made |= {"cos": torch.cos(angle), "sin": torch.sin(angle)}
    elif kind == "packed":
        made["positions"] = _positions(inputs, (batch, tokens))
    elif kind == "three":
        made["positions"] = _positions(inputs, (3, tokens))
        first = turned // 8
        rotation["sections"] = (first, first, turned // 2 - 2 * first)
    return {**made, "norm": norm, "rotation": rotation}


def _bias(inputs: Inputs, settings: dict[str, Any], width: int) -> dict[str, Any]:
    return {"bias": inputs.normal(width)} if "bias" in settings else {}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = OPTIONS[workload.options]
    batch, tokens, dim = _sizes(settings, shape)
    heads = Heads(**settings["heads"], dim=dim)
    return Call(
        prepare,
        {
            "qkv": inputs.normal(*shape[:-1], heads.width),
            **_bias(inputs, settings, heads.width),
            **_objects(inputs, settings, batch, tokens, dim),
            "heads": heads,
            "layouts": settings.get("layouts", {}),
            **({"quantize": settings["quantize"]} if "quantize" in settings else {}),
        },
    )


def _build_cached(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    call = _build(workload, inputs, shape)
    # The last slot comes first, as if pages were handed out from the end.
    slots = torch.arange(shape[0] - 1, -1, -1, dtype=torch.int32, device=inputs.device)
    return Call(prepare_cached, {**call.kwargs, "slots": slots})


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call."""
    settings = OPTIONS[workload.options]
    batch, tokens, dim = _sizes(settings, shape)
    heads = Heads(**settings["heads"], dim=dim)
    layouts = {"layout": "bshd", "out_layout": "bshd", **settings.get("layouts", {})}
    cut = Cut(heads.q, heads.kv, dim, heads.v_dim, heads.packing, heads.gate, **layouts)
    objects = _objects(inputs, settings, batch, tokens, dim)

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
    """A backward that reads only the part of x that was normed: not the value heads, and not the gates."""

    def least_bytes(self, rows: int | None = None, dtype: torch.dtype | None = None) -> int:
        call = self.make("meta", dtype, rows)
        unread = (
            0 if call["x"] is None else sum(t.numel() for t in (call["dv"], call["dgate"]) if t is not None)
        )
        size: int = call["dq"].element_size()
        return super().least_bytes(rows, dtype) - unread * size


def _build_rope(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = OPTIONS[workload.options]
    batch, tokens, dim = _sizes(settings, shape)
    x = inputs.normal(*shape[:-1], settings["heads"], dim)
    objects = _objects(inputs, settings, batch, tokens, dim)
    del objects["norm"]
    return Call(rotate, {"x": x, **objects, "layouts": {}})


_SECTORS = (
    "parts of a row begin inside sectors, which count for each; partial sums of four vectors for few tokens"
)
_BIAS = "the gradient of the projection is read once more for that of its bias"


def _rereads(op: str, name: str, options: str) -> dict[str, Any]:
    """How many times the least bytes move, and why, where that is more than once."""
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
    *_named(
        "rope", _build_rope, Workload, ("training",),
        ("deepseek-v3/q", "last-third", 4096), ("deepseek-v3/q-rope", "halves-of-pairs", 4096),
        ("odd/heads", "three-axes", 1000),
    ),
)  # fmt: skip
