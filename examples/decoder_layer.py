"""A decoder layer of `weft.nn` with a mixture of experts, compared with the same layer in plain PyTorch.

python examples/decoder_layer.py

norm, projections, heads (norm and rotation), attention, output projection, residual and norm, router, experts: each is
a kernel with a backward. The same module runs in fp32, bf16 and FP8 by recipe, eager and compiled to one graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import weft.nn

BATCH, TOKENS, HIDDEN, FFN, EXPERTS, TOP_K, HEADS, KV_HEADS, DIM = 2, 48, 128, 128, 8, 2, 4, 2, 32

# Allowed relative error of y and the gradients, compared with fp64.
ALLOWED = {"fp32": 1e-5, "bf16": 0.03, "fp8_block": 0.2}


def decoder_layer() -> weft.nn.DecoderLayer:
    """Return a layer with pre-norm attention and a mixture of experts, as in Qwen3-MoE."""
    attention = weft.nn.Attention(
        HIDDEN, HEADS, KV_HEADS, head_dim=DIM, rotary=weft.nn.Rotary(10000.0), qk_norm=1e-6
    )
    moe = weft.nn.MoE(weft.nn.Router(HIDDEN, EXPERTS, TOP_K), weft.nn.Experts(EXPERTS, HIDDEN, FFN))
    return weft.nn.DecoderLayer(attention, moe)


def plain(layer: weft.nn.DecoderLayer, x: Tensor) -> Tensor:
    """Compute the same layer in plain PyTorch, every expert for every token."""
    weights = {name: parameter.to(x.dtype) for name, parameter in layer.named_parameters()}

    def project(h: Tensor, name: str) -> Tensor:
        return h @ weights[f"self_attn.{name}_proj.weight"].t()

    def normed(h: Tensor, name: str) -> Tensor:
        return F.rms_norm(h, h.shape[-1:], weights[f"{name}.weight"], 1e-6)

    h = normed(x, "input_layernorm")
    q, k, v = (project(h, name).unflatten(-1, (-1, DIM)).transpose(1, 2) for name in "qkv")
    q, k = rotated(normed(q, "self_attn.q_norm")), rotated(normed(k, "self_attn.k_norm"))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + project(attended.transpose(1, 2).flatten(2), "o")
    h = normed(x, "post_attention_layernorm").flatten(0, 1)
    exact = torch.promote_types(h.dtype, torch.float32)
    best = (h.to(exact) @ layer.mlp.gate.weight.to(exact).t()).topk(TOP_K)
    routing_weights = best.values.new_zeros(len(h), EXPERTS).scatter(1, best.indices, best.values.softmax(-1))
    gate, value = torch.einsum("tk,enk->ten", h, weights["mlp.experts.gate_up_proj"]).chunk(2, -1)
    hidden = F.silu(gate) * value
    y = torch.einsum("ten,ekn,te->tk", hidden, weights["mlp.experts.down_proj"], routing_weights.to(x.dtype))
    return x + y.view_as(x)


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim / 2) of heads [batch, heads, tokens, dim] by their positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(half).double() / half
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def main() -> None:
    torch.manual_seed(0)
    layer, exact = decoder_layer(), decoder_layer().double()
    torch.nn.init.normal_(layer.mlp.gate.weight, std=0.25)
    exact.load_state_dict(layer.state_dict())
    x, upstream = torch.randn(2, BATCH, TOKENS, HIDDEN)
    # Each token clearly prefers two experts: if a rounding sent it elsewhere, errors would mean nothing.
    preferred = torch.randn(BATCH, TOKENS, EXPERTS).argsort(-1)
    strengths = torch.tensor([3.0, 2.0]) * 0.15 * HIDDEN**0.5
    x += (
        F.normalize(layer.mlp.gate.weight.detach(), dim=-1)[preferred[..., :2]]
        .mul(strengths[:, None])
        .sum(-2)
    )
    x = x.bfloat16().float()

    def results(function: object, dtype: torch.dtype, model: weft.nn.DecoderLayer) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        y = function(leaf)  # type: ignore[operator]
        return [
            y.detach(),
            *torch.autograd.grad(y, [leaf, *model.parameters()], upstream.to(dtype)),
        ]

    wanted = results(lambda leaf: plain(exact, leaf), torch.float64, exact)
    for recipe, allowed in ALLOWED.items():
        dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
        weft.nn.convert(layer, None if recipe == "fp32" else recipe)
        eager = results(layer, dtype, layer)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        same = all(map(torch.equal, eager, results(compiled, dtype, layer)))
        errors = [relative_error(got, expected) for got, expected in zip(eager, wanted, strict=True)]
        plain_results = results(lambda leaf: plain(layer, leaf), dtype, layer)
        plain_errors = [relative_error(t, w) for t, w in zip(plain_results, wanted, strict=True)]
        print(
            f"{recipe:10s} y {errors[0]:.1e} (PyTorch {plain_errors[0]:.1e})  worst gradient {max(errors[1:]):.1e} "
            f"(PyTorch {max(plain_errors[1:]):.1e})  compiled: {'equal' if same else 'DIFFERENT'}"
        )
        assert same
        assert max(errors) < allowed


if __name__ == "__main__":
    main()
