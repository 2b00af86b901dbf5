"""SGLang's kernels against the same mathematics in PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from conformance.cases.support import agrees, bare_package

for package in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.srt"):
    bare_package(package)
for group in (
    "activation",
    "attention",
    "attention.linear",
    "layernorm",
    "moe",
    "quantization",
    "sampling",
    "speculative",
):
    bare_package(f"sglang.kernels.ops.{group}")
bare_package("sglang.srt.utils", is_cuda=lambda: False, is_hip=lambda: False)


def ops(module: str) -> Any:
    return importlib.import_module(f"sglang.kernels.ops.{module}")


def upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = upcast(x)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def test_rmsnorm_fp32() -> None:
    def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return (w * rms(x, eps)).to(x.dtype)

    agrees(
        ops("layernorm.rmsnorm_fp32").rmsnorm_fp32,
        reference,
        torch.randn(5, 300),
        torch.rand(300) + 0.5,
        1e-6,
    )


def test_gemma_rmsnorm() -> None:
    def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return (rms(x, eps) * (1 + upcast(w))).to(x.dtype)

    inputs = torch.randn(5, 300).bfloat16(), torch.randn(300).bfloat16(), 1e-6
    agrees(ops("layernorm.minimax_m3_rmsnorm").gemma_rmsnorm, reference, *inputs)


def test_gemma_fused_add_rmsnorm() -> None:
    def reference(
        x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = upcast(x) + upcast(r)
        return (rms(s, eps) * (1 + upcast(w))).to(x.dtype), s.to(x.dtype)

    inputs = torch.randn(5, 300), torch.randn(5, 300), torch.randn(300), 1e-6
    agrees(ops("layernorm.minimax_m3_rmsnorm").gemma_fused_add_rmsnorm, reference, *inputs)


def test_temperature_softmax() -> None:
    def reference(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits / temperatures, -1)

    inputs = torch.randn(2, 40000) * 3, torch.rand(2, 1) + 0.5
    agrees(ops("sampling.temperature_softmax").temperature_softmax, reference, *inputs)


def test_top_k_renorm() -> None:
    def reference(probs: torch.Tensor, k: int) -> torch.Tensor:
        kept = torch.where(probs >= probs.topk(k).values[:, -1:], probs, 0)
        return kept / kept.sum(-1, keepdim=True)

    agrees(
        ops("sampling.renorm_triton").top_k_renorm_probs_triton,
        reference,
        torch.randn(3, 5000).softmax(-1),
        40,
    )


def test_merge_state() -> None:
    def reference(
        prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        parts = prefix * (prefix_lse - lse).exp()[..., None] + suffix * (suffix_lse - lse).exp()[..., None]
        return parts, lse

    inputs = torch.randn(6, 4, 80), torch.randn(6, 4), torch.randn(6, 4, 80), torch.randn(6, 4)
    agrees(ops("attention.merge_state").merge_state_triton, reference, *inputs)


def test_awq_dequantize() -> None:
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4  # where a word holds the eight numbers of AWQ

    def unpack(words: torch.Tensor) -> torch.Tensor:
        return ((words[..., None] >> order) & 15).flatten(-2)

    def reference(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        size = words.shape[0] // scales.shape[0]
        difference = unpack(words) - unpack(zeros).repeat_interleave(size, 0)
        return difference * scales.repeat_interleave(size, 0)

    limit = 2**31 - 1
    inputs = (
        torch.randint(-limit, limit, (192, 16), dtype=torch.int32),
        torch.rand(3, 128).half(),
        torch.randint(-limit, limit, (3, 16), dtype=torch.int32),
    )
    agrees(ops("quantization.awq_triton").awq_dequantize_triton, reference, *inputs)


def test_act_quant() -> None:
    x = torch.randn(40, 384).bfloat16()
    quantized, scales = ops("quantization.act_quant_triton").act_quant(x)
    groups = x.float().view(40, 3, 128)
    assert torch.equal(scales, groups.abs().amax(-1).clamp(min=1e-4) * torch.tensor(1 / 448))
    expected = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(40, 384)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


def test_gdn_gating() -> None:
    def reference(
        a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (-a_log.exp() * F.softplus(a + bias))[None], b.sigmoid()[None]

    inputs = torch.randn(12), torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    agrees(ops("attention.linear.fused_gdn_gating").fused_gdn_gating, reference, *inputs)


def test_positions() -> None:
    prefixes, lengths = torch.tensor([3, 0, 700]), torch.tensor([5, 600, 2])
    positions, starts = ops("attention.position").compute_position_triton(prefixes, lengths, 607)
    expected = [torch.arange(int(length)) + prefix for prefix, length in zip(prefixes, lengths, strict=True)]
    assert torch.equal(positions, torch.cat(expected))
    assert torch.equal(starts, torch.tensor([0, 5, 605], dtype=torch.int32))


def test_softcap() -> None:
    operator = ops("activation.softcap").softcap_inplace_logits
    agrees(operator, lambda x, cap: cap * torch.tanh(x / cap), torch.randn(3, 3000) * 20, 30.0)


def test_split_into_three() -> None:
    w = torch.randn(7, 200)
    high = w.bfloat16()
    middle = (w - high.float()).bfloat16()
    low = (w - high.float() - middle.float()).bfloat16()
    got = ops("quantization.bf16x3_split").split_fp32_to_bf16x3(w)
    assert torch.equal(got, torch.cat([high, middle, low]))


def test_row_argmax() -> None:
    agrees(ops("speculative.row_argmax").row_argmax, lambda x: x.argmax(-1), torch.randn(5, 30000))


def test_swiglu_oai() -> None:
    def reference(x: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    inputs = torch.randn(4, 600) * 4, 1.702, 1.0, 7.0
    agrees(ops("activation.minimax_m3_swiglu").swiglu_oai_split, reference, *inputs)


def test_gemma_routing() -> None:
    def reference(
        logits: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.softmax(-1) * scale[ids], ids

    inputs = torch.randn(9, 6), torch.randint(0, 32, (9, 6)), torch.rand(32) + 0.5
    agrees(ops("moe.gemma4_routing").gemma_routing_post_topk, reference, *inputs)


def test_per_token_group_quant_int8() -> None:
    """The kernel truncates, where quantization usually rounds: see docs/found.md."""
    x = torch.randn(6, 256).bfloat16()
    quantized, scales = ops("quantization.int8_kernel").per_token_group_quant_int8(x, 128)
    groups = x.float().view(6, 2, 128)
    expected = groups.abs().amax(-1) / 127
    assert torch.equal(scales, expected)
    assert torch.equal(quantized, (groups / expected[..., None]).to(torch.int8).view(6, 256))


def test_to_mxfp8() -> None:
    x = torch.randn(70, 96).bfloat16()
    got = ops("quantization.mxfp8_quant").to_mxfp8(x)
    scale = torch.exp2(got.scale.double() - 127)[..., None]
    value, groups = got.data.double().view(70, 3, 32), x.double().view(70, 3, 32)
    # Within half a step of E4M3 at the value's own size, or half of its smallest step.
    step = torch.exp2(torch.floor(torch.log2((groups / scale).abs().clamp(min=2.0**-6))) - 3)
    assert ((value - groups / scale).abs() <= step / 2).all()
    assert (groups.abs().amax(-1, keepdim=True) / scale <= 448 * 1.0625).all()
