"""Quantize and dequantize: activations, gradients and weights of training in 8 and 4 bits, and tensors of serving."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import dequantize, quantize
from ...quant import QTensor
from ..chain import chain, codes_and_scales
from ..family import Family, Moved
from ..problem import Call, Inputs, Size, Workload
from ..truth import EPS32, Near

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
# `moves` and `rereads` of quantizers that move more than the minimum bytes.
_TWICE = {
    "nvfp4-both": (1.65, "the amax of the whole tensor comes before its first code"),
    "nvfp4_16x16-both": (1.65, "the amax of the whole tensor comes before its first code"),
    "nvfp4-rotated": (1.65, "the amax of the whole tensor comes before its first code"),
    "tensor-amax": (1.76, "the amax of the whole tensor comes before its first code"),
    "row-both": (1.52, "the amax of a whole column comes before its first code"),
}


def _rereads(op: str, options: str, rows: int) -> dict[str, Any]:
    """Return `moves` and `rereads` of a workload."""
    moves, reason = _TWICE.get(options, (1.02, "")) if op == "quantize" else (1.02, "")
    if options.startswith("1x128") and rows == 1:
        moves, reason = 1.04, "the scales of a single row lie 16 bytes apart"
    return {"rereads": reason, "moves": moves}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(quantize, {"x": inputs.activation(*shape), **dict(workload.settings)})


def _build_dequantize(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    result = quantize(inputs.activation(*shape), **dict(workload.settings))
    q = result[0] if isinstance(result, tuple) else result
    # Dequantize reads one copy.
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


# ---- truth ----------------------------------------------------------------------------------------------------


def quantize_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the amax, and y's gradient as x's. The oracle judges codes and scales; see `Family.encoded`."""
    exact: dict[str, Near | Tensor] = {"amax": call["x"].detach().abs().amax().float()}
    return exact | {f"d{name}": gradients["y"] for name in ("x",) if "y" in gradients}


def dequantize_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the values that the oracle decodes."""
    from .. import oracle

    q = call["q"]
    copy = oracle.Quantized(q.rowwise.data.view(torch.uint8), q.rowwise.scale, q.rowwise.global_scale)
    flat = (q.numel() // q.shape[-1], q.shape[-1])
    exact = oracle.dequantize(copy, block=q.format.block, element=q.format.element, shape=flat).view(q.shape)
    return {"y": Near(exact, 2 * EPS32 * exact.abs())}


def y_and_amax(call: Call) -> list[str]:
    """Return the names of the results of a quantizing function: y, and its amax if requested."""
    return ["y", "amax"] if call["return_amax"] else ["y"]


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def quantize_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to 1x128 e4m3 with TransformerEngine's power-of-two scales."""
    groups = y.float().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1)
    factor = torch.where(amax > 0, 448.0 / amax, 1.0)
    factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    codes = (groups * factor[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)
    return codes, (1.0 / factor).t().contiguous().t()


def quantize_both(y: Tensor) -> tuple[Tensor, ...]:
    """Quantize along rows and along columns."""
    return *quantize_rows(y), *quantize_rows(y.t())


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"quantize": quantize_truth, "dequantize": dequantize_truth},
    encoded={"quantize": lambda call, compute: {"y": call["x"]}},
    results={quantize: y_and_amax},
    chains={("quantize", "1x128-both"): chain(quantize_both, "x", view=codes_and_scales)},
    moved={"dequantize_kernel": Moved({"codes.data"}, {"out_ptr"})},
)
