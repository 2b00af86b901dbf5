"""Contenders of `weft bench`: PyTorch chains and Liger's functions are run; TransformerEngine's are stand-ins that
accept only the documented arguments."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft.lab.bench.contenders import ENGINES, PEERS, Lacks, contender, difference
from weft.lab.families import FAMILIES, WORKLOADS, Call, Workload, for_op

ROWS = 128  # a multiple of the blocks
CHAINS = [key for family in FAMILIES for key in family.chains]


def workload(op: str, options: str) -> Workload:
    return next(w for w in WORKLOADS if (w.op, w.options) == (op, options) and not w.name.startswith("odd"))


def small(op: str, options: str) -> tuple[Workload, Call]:
    chosen = workload(op, options)
    rows = ROWS if "128" in options or op.startswith(("quantize", "gated_norm", "qkv")) else 2
    return chosen, chosen.make(rows=rows)


def check(name: str, op: str, options: str) -> None:
    chosen, call = small(op, options)
    with torch.no_grad():
        prepared = contender(name, chosen)(call)
        assert difference(prepared.run(), prepared.truth()) is None


@pytest.mark.parametrize(("op", "options"), [key for key in CHAINS if "experts" not in key[1]])
def test_chains_compute_what_the_op_computes(op: str, options: str) -> None:
    check("eager", op, options)


@pytest.mark.parametrize("op", ["glu", "glu_backward"])
def test_chains_of_experts_take_full_blocks(op: str) -> None:
    chosen, call = small(op, "1x128-both-experts")
    even = call.with_(ends=torch.tensor([ROWS], dtype=torch.int32), align=128)
    prepared = contender("eager", chosen)(even)
    assert difference(prepared.run(), prepared.truth()) is None


def test_a_reference_of_several_ops_is_not_compiled() -> None:
    chosen, call = small("rope", "last-third")
    twice = Call(lambda **kwargs: (call.function(**kwargs), call.function(**kwargs)), call.kwargs)
    with pytest.raises(Lacks, match="2 ops are reached"):
        contender("compile", chosen)(twice)


# ---- comparing results ------------------------------------------------------------------------------------


def test_roundings_do_not_count_as_a_difference() -> None:
    truth = torch.randn(64, 64)
    assert difference(truth.bfloat16(), truth) is None
    assert difference((truth,), [truth]) is None
    q = weft.quantize(truth, "1x128")
    assert difference(weft.quantize(truth * 1.0001, "1x128"), q) is None


def test_wrong_results_differ() -> None:
    truth = torch.randn(64, 64)
    for wrong in (
        torch.zeros(64, 64),
        truth.roll(1, 0),
        truth * 1.1,
        truth.t(),
        truth[:32],
        (truth, truth),
        None,
    ):
        assert difference(wrong, truth) is not None
    holes = truth.clone()
    holes[0] = float("nan")
    assert difference(holes, truth) is not None


# ---- libraries --------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
@pytest.mark.parametrize(("op", "options"), PEERS["liger"].calls)
def test_liger_computes_the_same(op: str, options: str) -> None:
    check("liger", op, options)


def test_missing_libraries_are_reported() -> None:
    with pytest.raises(Lacks, match="TransformerEngine is not installed"):
        contender("te", for_op("norm")[0])
    chosen, call = small("matmul", "fp8-blocks")
    with pytest.raises(Lacks, match="lacks an installation"):
        contender("deepgemm", chosen)(call)
    with pytest.raises(Lacks, match="FlashAttention is not an engine of matmul"):
        contender("fa", chosen)
    chosen, call = small("attention", "causal")
    with pytest.raises(Lacks, match=r"fa4.*fa3.*fa2"):
        contender("fa", chosen)(call)


def test_libraries_behind_an_engine_are_required() -> None:
    chosen, call = small("matmul", "bf16")
    with weft.record_engines() as used:
        contender("torch", chosen)(call).run()
    assert {one.engine for one in used} == {"torch"}
    assert set(ENGINES["fa"].names) <= {"fa2", "fa3", "fa4"}


def test_a_peer_without_the_options_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(Lacks, match="TransformerEngine has no rope with the options last-third"):
        contender("te", for_op("rope")[0])


# ---- TransformerEngine, by stand-ins ----------------------------------------------------------------------


class Norm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.full((normalized_shape,), 3.0, device=device, dtype=dtype))


class RMSNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float() + self.offset, self.eps).to(x.dtype)


class LayerNorm(Norm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.full_like(self.weight, 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class SwiGLU:
    def __call__(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return F.silu(first.float()).to(x.dtype) * second


class DotProductAttention:
    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
    ) -> None:  # fmt: skip
        assert qkv_format == "bshd"
        self.heads, self.groups, self.dim = num_attention_heads, num_gqa_groups, kv_channels
        self.causal = attn_mask_type == "causal"

    def __call__(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        """Attend: [b, s, h, d] -> [b, s, h * d]."""
        assert query_layer.shape[2:] == (self.heads, self.dim)
        assert key_layer.shape[2] == self.groups
        q, k, v = (x.transpose(1, 2) for x in (query_layer, key_layer, value_layer))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class Quantizer:
    def __init__(self, block: str, *, rowwise: bool, columnwise: bool) -> None:
        assert rowwise
        self.block, self.columnwise = block, columnwise

    def quantize(self, tensor: Tensor) -> Any:
        return weft.quantize(tensor, self.block, columnwise=self.columnwise)


def block_quantizer(
    fp8_dtype: str, *, rowwise: bool, columnwise: bool, block_scaling_dim: int = 2
) -> Quantizer:
    assert (fp8_dtype, block_scaling_dim) == ("e4m3", 1)
    return Quantizer("1x128", rowwise=rowwise, columnwise=columnwise)


def mx_quantizer(fp8_dtype: str, *, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
    assert fp8_dtype == "e4m3"
    return Quantizer("mx", rowwise=rowwise, columnwise=columnwise)


def parallel_cross_entropy(
    inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False, group: Any = None
) -> Tensor:
    """Compute the loss of logits [b, s, v] and targets [b, s]."""
    reduction = "mean" if reduce_loss else "none"
    return F.cross_entropy(
        inp.flatten(0, 1).float(), target.flatten(), label_smoothing=label_smoothing, reduction=reduction
    )


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ModuleType("transformer_engine.pytorch.ops")
    vars(ops).update(SwiGLU=SwiGLU)
    top = ModuleType("transformer_engine.pytorch")
    vars(top).update(
        RMSNorm=RMSNorm, LayerNorm=LayerNorm, DotProductAttention=DotProductAttention, ops=ops,
        parallel_cross_entropy=parallel_cross_entropy, Float8BlockQuantizer=block_quantizer,
        MXFP8Quantizer=mx_quantizer, DType=SimpleNamespace(kFloat8E4M3="e4m3"),
    )  # fmt: skip
    for name, module in (("transformer_engine.pytorch", top), ("transformer_engine.pytorch.ops", ops)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(("op", "options"), PEERS["te"].calls)
def test_transformer_engine_is_called_as_documented(op: str, options: str) -> None:
    check("te", op, options)
