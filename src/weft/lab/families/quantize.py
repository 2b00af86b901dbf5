"""Workloads of the quantisers: activations, gradients and weights of FP8 training, and what serving quantises."""

from __future__ import annotations

from typing import Any

from ...ops import dequantize, quantize
from ...quant import QTensor
from ..problem import Call, Inputs, Size, Workload

SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/hidden": ("rows", 2048),
    "llama3-8b/hidden": ("rows", 4096),
    "llama3-8b/ffn": ("rows", 14336),
    "deepseek-v3/hidden": ("rows", 7168),
    "deepseek-v3/expert-weight": ("rows", 7168),
    "qwen3-30b-a3b/expert": (4, "rows", 768),
    "odd/33": ("rows", 33),
    "odd/200": ("rows", 200),
    "odd/1": ("rows", 1),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "1x128": {"format": "1x128"},
    "1x128-both": {"format": "1x128", "columnwise": True},
    "1x128-gradient": {"format": "e5m2:1x128:te:pow2", "columnwise": True},
    "1x128-deepgemm": {"format": "e4m3:1x128:deepgemm"},
    "128x128-both": {"format": "128x128", "columnwise": True},
    "mx-both": {"format": "mx", "columnwise": True},
    "nvfp4-both": {"format": "nvfp4", "columnwise": True},
    "nvfp4_16x16-both": {"format": "nvfp4_16x16", "columnwise": True},
    "nvfp4-rotated": {"format": "e2m1:nvfp4:te:hadamard-columnwise", "columnwise": True},
    "row": {"format": "row"},
    "row-both": {"format": "row", "columnwise": True},
    "row-int8": {"format": "int8:row:vllm"},
    "tensor-amax": {"format": "tensor", "return_amax": True},
    "stochastic": {"format": "1x128", "seed": 1234},
}

_TRAINED: dict[str, tuple[str, ...]] = {
    "1x128-both": ("linghe/hidden", "llama3-8b/ffn", "odd/200"),
    "1x128-gradient": ("llama3-8b/hidden",),
    "128x128-both": ("deepseek-v3/expert-weight", "odd/200"),
    "mx-both": ("llama3-8b/hidden", "odd/33"),
    "nvfp4-both": ("llama3-8b/hidden", "odd/33"),
    "nvfp4_16x16-both": ("deepseek-v3/expert-weight", "odd/33"),
    "nvfp4-rotated": ("llama3-8b/hidden", "odd/33"),
    "row-both": ("linghe/hidden",),
    "tensor-amax": ("llama3-8b/hidden", "odd/1"),
    "stochastic": ("llama3-8b/hidden",),
}
_SERVED: dict[str, tuple[str, ...]] = {
    "1x128": ("qwen3-30b-a3b/expert",),
    "1x128-deepgemm": ("deepseek-v3/hidden",),
    "row": ("llama3-8b/hidden", "odd/33"),
    "row-int8": ("llama3-8b/ffn",),
}
# `moves` and `rereads` of quantisers that move more than the least bytes.
_TWICE = {
    "nvfp4-both": (1.65, "the amax of the whole tensor comes before its first code"),
    "nvfp4_16x16-both": (1.65, "the amax of the whole tensor comes before its first code"),
    "nvfp4-rotated": (1.65, "the amax of the whole tensor comes before its first code"),
    "tensor-amax": (1.76, "the amax of the whole tensor comes before its first code"),
    "row-both": (1.52, "the amax of a whole column comes before its first code"),
}


def _rereads(op: str, options: str, rows: int) -> dict[str, Any]:
    moves, why = _TWICE.get(options, (1.02, "")) if op == "quantize" else (1.02, "")
    if options.startswith("1x128") and rows == 1:
        moves, why = 1.04, "the scales of a single row lie 16 bytes apart"
    return {"rereads": why, "moves": moves}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(quantize, {"x": inputs.activation(*shape), **dict(workload.settings)})


def _build_dequantize(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    result = quantize(inputs.activation(*shape), **dict(workload.settings))
    q = result[0] if isinstance(result, tuple) else result
    # It reads one copy.
    return Call(dequantize, {"q": QTensor(q.shape, q.dtype, q.format, q.rowwise)})


def _named(op: str, used: dict[str, tuple[str, ...]], rows: tuple[int, ...], tag: str) -> list[Workload]:
    return [
        Workload(
            op=op,
            name=name,
            options=options,
            shape=SHAPES[name],
            rows=count,
            build=_build if op == "quantize" else _build_dequantize,
            tags=frozenset({tag}),
            settings=tuple(OPTIONS[options].items()),
            **_rereads(op, options, count),
        )
        for options, names in used.items()
        for name in names
        for count in rows
    ]


WORKLOADS: tuple[Workload, ...] = tuple(
    workload
    for op in ("quantize", "dequantize")
    for workload in (
        *_named(op, _TRAINED, (8192,), "training"),
        *_named(op, _SERVED, (1, 8, 64), "inference"),
    )
)
