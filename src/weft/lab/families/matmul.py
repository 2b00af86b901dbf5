"""Workloads of products: projections of models in every pair of formats, and what follows them in one kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...ops import matmul, quantize
from ..problem import Call, Inputs, Workload

# The columns of the result and K, of a projection of a model.
PROJECTIONS: dict[str, tuple[int, int]] = {
    "qwen3-30b-a3b/gate_up": (1536, 2048),
    "qwen3-30b-a3b/key": (512, 2048),
    "gpt-oss-20b/key": (512, 2880),
    "odd/33": (47, 33),
}

# The formats of a and b, None for plain numbers; dtype: that of plain numbers.
PAIRS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16-sums": {"dtype": torch.float16, "precision": "fp16"},
    "fp32": {"dtype": torch.float32},
    "bf16x3": {"dtype": torch.float32, "precision": "bf16x3"},
    "int8-row": {"a": "int8:row:te", "b": "int8:row:te"},
    "fp8-tensor": {"a": "e5m2:tensor:te", "b": "tensor"},
    "fp8-row": {"a": "row", "b": "row"},
    "fp8-blocks": {"a": "1x128", "b": "128x128"},
    "fp8-blocks-wgrad": {"a": "1x128", "b": "1x128"},
    "mxfp8": {"a": "mx", "b": "mx"},
    "mxfp4": {"a": "e2m1:mx:te", "b": "e2m1:mx:te"},
    "nvfp4": {"a": "nvfp4", "b": "nvfp4_16x16"},
    "weight-fp8": {"b": "128x128"},
    "weight-int8": {"b": "int8:row:te"},
    "weight-int4": {"b": "int4:1x128:te"},
    "weight-mxfp4": {"b": "e2m1:mx:te"},
}

# Further arguments of `matmul`; bias and residual say that one is made.
FINISHES: dict[str, dict[str, Any]] = {
    "bias-gelu": {"bias": True, "activation": "gelu_tanh"},
    "residual": {"residual": True, "alpha": 0.5},
    "glu": {"glu": "silu"},
    "glu-1x128": {"a": "1x128", "b": "128x128", "glu": "silu", "quantize": "1x128"},
    "invariant": {"batch_invariant": True},
}
OPTIONS = PAIRS | FINISHES

_MANY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OPTIONS, ("qwen3-30b-a3b/key",)),
    "bf16": ("qwen3-30b-a3b/gate_up", "odd/33"),
    "fp8-blocks": ("qwen3-30b-a3b/gate_up", "gpt-oss-20b/key", "odd/33"),
    "mxfp4": ("gpt-oss-20b/key", "odd/33"),
    "weight-int4": ("qwen3-30b-a3b/key", "odd/33"),
    "bias-gelu": ("qwen3-30b-a3b/key", "odd/33"),
}
_SHARED = "tiles of rows share b, and tiles of columns a; partial sums of few rows are written and read back"


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    n = settings.pop("columns")
    dtype = inputs.dtype if inputs.dtype == torch.float64 else settings.pop("dtype", inputs.dtype)
    settings.pop("dtype", None)
    width = 2 * n if "glu" in settings else n
    weight = inputs.normal(width, k, std=k**-0.5, dtype=dtype)
    b = settings.pop("b", None)
    kwargs: dict[str, Any] = {"a": inputs.activation(rows, k).to(dtype)}
    if "a" in settings:
        kwargs["a"] = quantize(kwargs["a"], settings.pop("a"))
    kwargs["b"] = (weight if b is None else quantize(weight, b)).T
    if settings.pop("bias", False):
        kwargs["bias"] = inputs.normal(width, std=0.1, dtype=dtype)
    if settings.pop("residual", False):
        kwargs["residual"] = inputs.normal(rows, n, dtype=dtype)
    return Call(matmul, kwargs | settings | {"engine": "weft"})


def _workloads(used: dict[str, tuple[str, ...]], rows: int, *tags: str) -> list[Workload]:
    return [
        Workload(
            op="matmul",
            name=name,
            options=options,
            shape=("rows", k),
            rows=rows,
            build=_build,
            tags=frozenset(tags),
            settings=(("columns", n), *OPTIONS[options].items()),
            rereads=_SHARED,
            moves=1.5,
        )
        for options, names in used.items()
        for name in names
        for n, k in (PROJECTIONS[name],)
    ]


WORKLOADS: tuple[Workload, ...] = (
    *_workloads(_MANY, 512, "training"),
    *_workloads(dict.fromkeys(PAIRS, ("qwen3-30b-a3b/key",)), 16, "inference"),
)


def _flops(workload: Workload) -> int:
    n = dict(workload.settings)["columns"] * (2 if "glu" in dict(workload.settings) else 1)
    return int(2 * workload.rows * n * workload.cols)


FLOPS = {"matmul": _flops}


def product(pair: str, m: int, n: int, k: int) -> Workload:
    """A product of m x n over k in a pair of formats, for who measures products of any size."""
    (made,) = _workloads({pair: ("qwen3-30b-a3b/key",)}, m, "training")
    return replace(
        made, name=f"{m}x{n}x{k}", shape=("rows", k), settings=(("columns", n), *PAIRS[pair].items())
    )
