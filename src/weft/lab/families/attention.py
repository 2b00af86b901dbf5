"""Workloads of attention: heads of real models over many short sequences, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...ops.attention.arguments import AttentionBackwardArgs, AttentionNeeds, Mask, Packed
from ...ops.attention.attention import attention
from ...ops.quantize import quantize
from ...runtime import catalogue, recording
from ..problem import Call, Inputs, Workload

# Query heads, how many of them share one of keys, and the numbers of heads of queries and of values. Two groups of each
# model's heads, since the others are the same: few heads and many sequences move as many bytes.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "qwen3-30b-a3b/heads": (16, 8, 128, 128),
    "llama3-8b/heads": (8, 4, 128, 128),
    "gpt-oss-20b/heads": (16, 8, 64, 64),
    "gemma2-9b/heads": (4, 2, 256, 256),
    "deepseek-v3/heads": (4, 1, 192, 128),
    "odd/heads": (10, 5, 72, 24),
}

# Further arguments of `attention`, and: tokens, the queries of each sequence; keys, how many keys it has if that is
# another number; sinks, packed and kv_lengths say that such tensors are made; codes, the format of queries and keys.
# Tokens and keys become settings of the workloads: numbers that may be others, as those of its shape.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"tokens": 100, "is_causal": True},
    "packed": {"tokens": 90, "packed": True, "is_causal": True, "return_lse": True},
    "window-sinks": {"tokens": 130, "window": (40, 0), "sinks": True, "layout": "bshd", "return_lse": True},
    "softcap": {"tokens": 70, "is_causal": True, "softcap": 50.0, "layout": "sbhd"},
    "cross": {"tokens": 33, "keys": 75, "kv_lengths": True, "return_max": True},
    "1x128": {"tokens": 70, "is_causal": True, "layout": "bshd", "quantize": "1x128"},
    "eight-bits": {
        "tokens": 100,
        "is_causal": True,
        "codes": "e4m3:row",
        "values": "e4m3",
        "return_lse": True,
    },
    "packed-eight-bits": {"tokens": 60, "packed": True, "codes": "e4m3:row", "values": "e4m3"},
    "both-copies": {"tokens": 40, "packed": True, "is_causal": True, "quantize": "mx", "columnwise": True},
}

_FORWARD: dict[str, tuple[str, ...]] = {
    "causal": ("llama3-8b/heads", "deepseek-v3/heads"),
    "packed": ("qwen3-30b-a3b/heads",),
    "window-sinks": ("gpt-oss-20b/heads",),
    "softcap": ("gemma2-9b/heads",),
    "cross": ("odd/heads",),
    "1x128": ("llama3-8b/heads",),
    "both-copies": ("odd/heads",),
}
_EIGHT_BITS: dict[str, tuple[str, ...]] = {
    "eight-bits": ("llama3-8b/heads",),
    "packed-eight-bits": ("odd/heads",),
}
_BACKWARD: dict[str, tuple[str, ...]] = {
    "causal": ("llama3-8b/heads",),
    "packed": ("qwen3-30b-a3b/heads",),
    "window-sinks": ("gpt-oss-20b/heads",),
    "softcap": ("gemma2-9b/heads",),
    "cross": ("odd/heads",),
}
_TILES = "keys and values are read once for each tile of queries and each head, and the other way round in backward"


def _starts(rows: int, tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Where sequences begin, and how many tokens they have: of four, one has all tokens, one none, one a single token,
    and one half of them. The sum is computed from the sizes, which may be symbols, and not read from the tensor."""
    kind = torch.arange(rows, device=device) % 4
    lengths = (kind == 0) * tokens + (kind == 2) * 1 + (kind == 3) * (tokens // 2)
    first = torch.zeros(1, dtype=torch.long, device=device)
    starts = torch.cat([first, lengths.cumsum(0)]).to(torch.int32)
    return starts, tokens * ((rows + 3) // 4) + (rows + 1) // 4 + tokens // 2 * (rows // 4)


def _shaped(layout: str, rows: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    whole = {
        "bhsd": (rows, heads, tokens, dim),
        "bshd": (rows, tokens, heads, dim),
        "sbhd": (tokens, rows, heads, dim),
    }
    return whole[layout]


def _heads(workload: Workload, width: int) -> tuple[int, int, int, int]:
    """(heads, key heads, dim, v_dim) of a token whose query heads have that many numbers."""
    settings = dict(workload.settings)
    group, dim = settings["group"], settings["dim"]
    key_heads = max(1, width // (dim * group))
    return key_heads * group, key_heads, dim, settings["v_dim"]


def _tensors(
    workload: Workload, inputs: Inputs, shape: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by name, further arguments)."""
    (rows, width), options = shape, dict(OPTIONS[workload.options])
    heads, key_heads, dim, v_dim = _heads(workload, width)
    settings, device = dict(workload.settings), inputs.device
    tokens = settings["tokens"]
    keys = settings.get("keys", tokens)
    options = {name: value for name, value in options.items() if name not in ("tokens", "keys")}
    made: dict[str, Any] = {}
    if options.pop("packed", False):
        made["cu_seqlens"], total = _starts(rows, tokens, device)
        shapes: list[tuple[int, ...]] = [
            (total, heads, dim),
            (total, key_heads, dim),
            (total, key_heads, v_dim),
        ]
    else:
        layout = options.get("layout", "bhsd")
        shapes = [
            _shaped(layout, rows, tokens, heads, dim),
            _shaped(layout, rows, keys, key_heads, dim),
            _shaped(layout, rows, keys, key_heads, v_dim),
        ]
    if options.pop("sinks", False):
        made["sinks"] = inputs.normal(heads)
    if options.pop("kv_lengths", False):
        made["kv_lengths"] = torch.arange(rows, dtype=torch.int32, device=device) * 23 % (keys + 1)
    codes = options.pop("codes", None)
    for name, size in zip(("query", "key", "value"), shapes, strict=True):
        drawn = inputs.normal(*size)
        made[name] = drawn if codes is None or name == "value" else quantize(drawn, codes)
    return made, options


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    made, options = _tensors(workload, inputs, shape)
    return Call(attention, made | options | {"engine": "weft"})


def attention_backward(
    dy: Tensor, dlse: Tensor | None, y: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    sinks: Tensor | None = None, cu_seqlens: Tensor | None = None, kv_lengths: Tensor | None = None, *, mask: Mask,
    softcap: float, layout: str,
) -> Any:  # fmt: skip
    """The backward op, with its tensors as arguments."""
    needs = AttentionNeeds(True, True, sinks is not None)
    packed = Packed(cu_seqlens, cu_seqlens, kv_lengths)
    scale = query.shape[-1] ** -0.5
    return catalogue["attention_backward"](
        AttentionBackwardArgs(
            dy, dlse, y, lse, query, key, value, sinks, packed, mask, scale, softcap, layout, "weft",
            needs,
        )
    )  # fmt: skip


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call, of results as the forward leaves them."""
    made, options = _tensors(workload, inputs, shape)
    layout = "thd" if "cu_seqlens" in made else options.get("layout", "bhsd")
    on_meta = inputs.device.type == "meta"
    with torch.no_grad(), recording("sm_90") if on_meta else nullcontext():
        forward = attention(**made, **options | {"return_lse": True, "engine": "weft"})
    y, lse = forward.out, forward.lse
    y = y.transpose(1, 2) if layout == "bhsd" else y
    left, right = options.get("window", (None, None))
    return Call(
        attention_backward,
        {
            "dy": inputs.normal(*y.shape),
            "dlse": inputs.normal(*lse.shape, dtype=lse.dtype) if options.get("return_lse") else None,
            "y": y,
            "lse": lse,
            **made,
            "mask": Mask(left, 0 if options.get("is_causal") else right, True),
            "softcap": options.get("softcap", 0.0),
            "layout": layout,
        },
    )


def _workloads(op: str, used: dict[str, tuple[str, ...]], build: Any, *tags: str) -> list[Workload]:
    return [
        Workload(
            op=op,
            name=name,
            options=options,
            shape=("rows", heads * dim),
            rows=256,
            build=build,
            tags=frozenset(tags),
            settings=(
                *(("group", group), ("dim", dim), ("v_dim", v_dim)),
                *((name, OPTIONS[options][name]) for name in ("tokens", "keys") if name in OPTIONS[options]),
            ),
            fp8_dot="codes" in OPTIONS[options],
            rereads=_TILES,
            moves=2.7,
        )
        for options, names in used.items()
        for name in names
        for heads, group, dim, v_dim in (HEADS[name],)
    ]


WORKLOADS: tuple[Workload, ...] = (
    *_workloads("attention", _FORWARD, _build, "training"),
    *_workloads("attention", _EIGHT_BITS, _build, "inference"),
    *_workloads("attention_backward", _BACKWARD, _build_backward, "training", "backward"),
)


def _flops(workload: Workload) -> int:
    """Of two products, with half of the pairs if later keys are not seen; windows and lengths are left out."""
    options = OPTIONS[workload.options]
    heads, _, dim, v_dim = _heads(workload, workload.cols)
    pairs = workload.rows * heads * options["tokens"] * options.get("keys", options["tokens"])
    return int(2 * pairs * (dim + v_dim) // (2 if options.get("is_causal") else 1))


# Backward has the scores once more, and the gradients of scores, queries, keys and values: seven products for two.
FLOPS = {"attention": _flops, "attention_backward": lambda workload: _flops(workload) * 7 // 2}
