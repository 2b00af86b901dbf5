"""Contenders that are timed against Weft, and the check of their results: wrong results get no time.

- `eager` and `compile`: the same maths in plain PyTorch: the chain of the op's family, or else the op's reference.
- `torch`, `deepgemm` and `fa`: kernels of PyTorch, DeepGEMM and FlashAttention, which Weft's own functions call with
  `engine=`.
- `liger` and `te`: functions of Liger-Kernel and TransformerEngine, from the two tables below.

A contender that is not installed, lacks an option or fails is left out, and the reason is reported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ... import backend
from ...quant import QTensor
from ...runtime.ops import Op
from ..families import Call, Workload, chain_of
from ..truth import arguments
from .clocks import Run

DEFAULT = ("eager", "compile")
NAMES = ("eager", "compile", "torch", "liger", "te", "deepgemm", "fa")


class Lacks(Exception):
    """Reason that a contender is left out."""


class Contender(NamedTuple):
    """A contender ready to run on a call's inputs."""

    run: Run
    truth: Run  # computes the results that its own are compared with


Prepare = Callable[[Call], Contender]


def contender(name: str, workload: Workload) -> Prepare:
    """Return the function that prepares calls of a workload for a contender. Raise `Lacks` if it cannot take part."""
    key = workload.op, workload.options
    if name == "weft":
        return lambda call: Contender(call, reference(call))
    if name == "eager":
        return lambda call: _eager(key, call)
    if name == "compile":
        return _Compiled(key)
    if name in ENGINES:
        if workload.op not in ENGINES[name].ops:
            raise Lacks(f"{ENGINES[name].title} is not an engine of {workload.op}")
        return lambda call: _by_engine(ENGINES[name], call)
    peer = PEERS[name]
    if not any(importlib.util.find_spec(module) for module in peer.modules):
        raise Lacks(f"{peer.title} is not installed")
    if key not in peer.calls:
        raise Lacks(f"{peer.title} has no {workload.op} with the options {workload.options}")
    return lambda call: Contender(peer.calls[key](call), reference(call))


# ---- plain PyTorch ----------------------------------------------------------------------------------------


def reference(call: Call) -> Run:
    """Return a run of the op's definition in plain PyTorch, with which results are compared."""

    def run() -> Any:
        with backend("reference"):
            return call()

    return run


def _eager(key: tuple[str, str], call: Call) -> Contender:
    build = chain_of(*key)
    if build is None:
        return Contender(reference(call), reference(call))
    chain = build(call)
    return Contender(chain.prepared(chain.function), chain.wanted(reference(call)))


class _Compiled:
    """The chain or the reference under torch.compile, one graph for all copies of the inputs."""

    def __init__(self, key: tuple[str, str]) -> None:
        torch._dynamo.reset()
        self.key = key
        self.function: Callable[..., Any] | None = None

    def __call__(self, call: Call) -> Contender:
        build = chain_of(*self.key)
        if build is not None:
            chain = build(call)
            return Contender(chain.prepared(self.compiled(chain.function)), chain.wanted(reference(call)))
        ops = reached(call)
        if len(ops) != 1:
            raise Lacks(f"{len(ops)} ops are reached, whose references are not one graph")
        op, a = ops[0]
        compiled = self.compiled(op.reference)
        return Contender(lambda: compiled(a), lambda: op.reference(a))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.function is None:
            self.function = torch.compile(function, dynamic=False)
        return self.function


def reached(call: Call) -> list[tuple[Op[Any, Any], Any]]:
    """Return the ops that a call reaches, each with its arguments."""
    seen: list[tuple[Op[Any, Any], Any]] = []
    original = Op.__call__

    def spy(self: Op[Any, Any], a: Any) -> Any:
        seen.append((self, a))
        return original(self, a)

    with patch.object(Op, "__call__", spy):
        call()
    return seen


# ---- libraries behind engine= -----------------------------------------------------------------------------


class Engines(NamedTuple):
    """A library that Weft calls: for which ops, and its engine names, of which the first that accepts a call runs."""

    title: str
    ops: tuple[str, ...]
    names: tuple[str, ...]


ENGINES = {
    "torch": Engines("PyTorch", ("matmul", "grouped_matmul", "grouped_wgrad", "attention"), ("torch",)),
    "deepgemm": Engines("DeepGEMM", ("matmul", "grouped_matmul"), ("deep_gemm",)),
    "fa": Engines("FlashAttention", ("attention",), ("fa4", "fa3", "fa2")),
}


def _by_engine(engines: Engines, call: Call) -> Contender:
    problems = []
    for name in engines.names:
        with_engine = call.with_(engine=name)
        try:
            with_engine()
        except (ImportError, RuntimeError, ValueError) as error:
            problems.append(str(error).splitlines()[0].partition(": leave out")[0])
        else:
            return Contender(with_engine, reference(call))
    raise Lacks("; ".join(problems))


# ---- Liger-Kernel and TransformerEngine -------------------------------------------------------------------

Adapter = Callable[[Call], Run]
"""Function of a Weft call that returns the peer's call with the same results, on the same inputs."""


class Peer(NamedTuple):
    """A library whose functions compute what ops of Weft compute."""

    title: str
    modules: tuple[str, ...]
    calls: dict[tuple[str, str], Adapter]  # by the op and the name of its set of options


def _liger(module: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{module}")


def _liger_norm(casting: str) -> Adapter:
    def prepare(call: Call) -> Run:
        a, function = arguments(call), _liger("rms_norm").LigerRMSNormFunction
        return lambda: function.apply(a["x"], a["weight"], a["eps"], a["weight_offset"], casting)

    return prepare


def _liger_residual_norm(casting: str) -> Adapter:
    def prepare(call: Call) -> Run:
        a, function = arguments(call), _liger("fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return lambda: function.apply(
            a["x"], a["residual"], a["weight"], a["eps"], a["weight_offset"], casting
        )

    return prepare


def _liger_layer_norm(call: Call) -> Run:
    a, function = arguments(call), _liger("layer_norm").LigerLayerNormFunction
    return lambda: function.apply(a["x"], a["weight"], a["bias"], a["eps"])


def _liger_norm_backward(call: Call) -> Run:
    """Walk the graph of one forward repeatedly. `in_place` would overwrite dy."""
    x, weight = (call[name].detach().requires_grad_() for name in ("h", "weight"))
    offset, function = call["weight_offset"], _liger("rms_norm").LigerRMSNormFunction
    with torch.enable_grad():
        y = function.apply(x, weight, 1e-6, offset, "gemma", False)
    return lambda: torch.autograd.grad(y, (x, weight), call["dy"], retain_graph=True)


def _liger_swiglu(call: Call) -> Run:
    function = _liger("swiglu").swiglu_fused_gate_up_forward
    return lambda: function(call["x"])[1]


def _liger_swiglu_backward(call: Call) -> Run:
    function = _liger("swiglu").swiglu_fused_gate_up_backward
    return lambda: function(call["x"], call["dy"])


def _liger_geglu(call: Call) -> Run:
    function = _liger("geglu").LigerGELUMulFunction
    return lambda: function.apply(call["x"], call["up"])


def _liger_cross_entropy(call: Call) -> Run:
    function = _liger("cross_entropy").LigerCrossEntropyFunction
    return lambda: function.apply(call["logits"], call["target"], None)[0]


def _liger_loss_head(call: Call) -> Run:
    function = _liger("fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    return lambda: function.apply(call["hidden"], call["weight"], call["target"])[0]


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _te_norm(kind: str) -> Adapter:
    def prepare(call: Call) -> Run:
        a, x = arguments(call), call["x"]
        module = getattr(_te(), kind)(
            x.shape[-1],
            eps=a["eps"],
            zero_centered_gamma=a["weight_offset"] == 1.0,
            device=x.device,
            dtype=x.dtype,
        )
        with torch.no_grad():
            for name in ("weight", "bias") if kind == "LayerNorm" else ("weight",):
                getattr(module, name).copy_(call[name])
        return lambda: module(x)

    return prepare


def _te_swiglu(call: Call) -> Run:
    operation = importlib.import_module("transformer_engine.pytorch.ops").SwiGLU()
    return lambda: operation(call["x"])


def _te_cross_entropy(call: Call) -> Run:
    """Call it on a batch of sequences; the arguments after the target are label_smoothing and reduce_loss."""
    logits, target, function = call["logits"][None], call["target"][None], _te().parallel_cross_entropy
    return lambda: function(logits, target, 0.0, True)


def _te_attention(call: Call) -> Run:
    q, k, v = (call[name].transpose(1, 2).contiguous() for name in ("query", "key", "value"))
    module = _te().DotProductAttention(
        q.shape[2], q.shape[3], num_gqa_groups=k.shape[2], qkv_format="bshd", attn_mask_type="causal"
    )
    return lambda: module(q, k, v).view(*q.shape[:3], -1).transpose(1, 2)


def _te_blocks(call: Call) -> Run:
    te = _te()
    quantizer = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=bool(call["columnwise"]), block_scaling_dim=1
    )
    return lambda: quantizer.quantize(call["x"])


def _te_mx(call: Call) -> Run:
    te = _te()
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=bool(call["columnwise"]))
    return lambda: quantizer.quantize(call["x"])


# Liger at 0.8.5, run on a CPU. TransformerEngine as in docs/api/pytorch.rst at commit 007b477 of
# NVIDIA/TransformerEngine and the sources it names: tested with stand-ins, never run. Its backwards free saved tensors
# and can't be walked twice, and its moe_permute makes the row map each time: neither is timed.
PEERS: dict[str, Peer] = {
    "liger": Peer(
        "Liger-Kernel",
        ("liger_kernel",),
        {
            ("norm", "plain"): _liger_norm("gemma"),
            ("norm", "gemma"): _liger_norm("gemma"),
            ("norm", "residual"): _liger_residual_norm("gemma"),
            ("norm", "llama"): _liger_residual_norm("llama"),
            ("norm", "layer"): _liger_layer_norm,
            ("norm_backward", "plain"): _liger_norm_backward,
            ("norm_backward", "gemma"): _liger_norm_backward,
            ("glu", "swiglu"): _liger_swiglu,
            ("glu", "geglu-tanh"): _liger_geglu,
            ("glu_backward", "swiglu"): _liger_swiglu_backward,
            ("cross_entropy", "plain"): _liger_cross_entropy,
            ("linear_logprobs", "plain"): _liger_loss_head,
        },
    ),
    "te": Peer(
        "TransformerEngine",
        ("transformer_engine",),
        {
            ("norm", "plain"): _te_norm("RMSNorm"),
            ("norm", "gemma"): _te_norm("RMSNorm"),
            ("norm", "layer"): _te_norm("LayerNorm"),
            ("glu", "swiglu"): _te_swiglu,
            ("cross_entropy", "plain"): _te_cross_entropy,
            ("attention", "causal"): _te_attention,
            ("quantize", "1x128"): _te_blocks,
            ("quantize", "1x128-both"): _te_blocks,
            ("quantize", "mx-both"): _te_mx,
        },
    ),
}


# ---- comparison of results --------------------------------------------------------------------------------


def numbers(result: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield a result's tensors as fp32 values, each with whether it has few bits (codes or decoded codes)."""
    if isinstance(result, QTensor):
        yield result.dequantize().float(), True
    elif isinstance(result, Tensor):
        plain = type(result) is Tensor
        yield (result if plain else result.dequantize()).float(), not plain or result.element_size() == 1
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from numbers(part)


def difference(result: Any, truth: Any) -> str | None:
    """Return how results differ by more than roundings, or None. Roundings are bf16's, or one FP8 step for results with
    few bits; one element in a thousand may be further off, since an earlier rounding may go either way."""
    ours, theirs = list(numbers(result)), list(numbers(truth))
    if [one.shape for one, _ in ours] != [one.shape for one, _ in theirs]:
        return f"other results: {_shapes(ours)} where {_shapes(theirs)} are wanted"
    for (one, _), (other, few_bits) in zip(ours, theirs, strict=True):
        finite = other.nan_to_num(0.0, 0.0, 0.0).abs()
        size = float(finite.amax()) if other.numel() else 0.0
        near = torch.isclose(one, other, rtol=0.13 if few_bits else 0.02, atol=1e-2 * size, equal_nan=True)
        if other.numel() and near.float().mean() < 0.999:
            return f"other results: {1 - float(near.float().mean()):.1%} of {_shapes([(other, few_bits)])} differ"
    return None


def _shapes(tensors: Sequence[tuple[Tensor, bool]]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor, _ in tensors) or "nothing"
