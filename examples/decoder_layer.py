"""A decoder layer entirely on Weft, with a mixture of experts, beside the same layer in plain PyTorch.

python examples/decoder_layer.py

norm, projection, heads (norm and rotation), attention, output projection and residual, norm, router, experts: eight
calls, each with its backward. The same module runs in fp32, bf16 and FP8 by recipe, eager and compiled to one graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft

BATCH, TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 2, 48, 128, 128, 8, 2
HEADS = weft.Heads(q=4, kv=2, dim=32)
ROTATION = weft.Rotation(10000.0)

# How far y and the gradients may be from those of fp64, as a part of their size.
ALLOWED = {"fp32": 1e-5, "bf16": 0.03, "fp8_block": 0.2}


class DecoderLayer(nn.Module):
    """Pre-norm attention and a mixture of experts, as in Qwen3-MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(HIDDEN))
        self.qkv = nn.Parameter(torch.randn(HEADS.width, HIDDEN) / HIDDEN**0.5)
        self.q_norm = nn.Parameter(torch.ones(HEADS.dim))
        self.k_norm = nn.Parameter(torch.ones(HEADS.dim))
        self.out = nn.Parameter(torch.randn(HIDDEN, HEADS.q * HEADS.dim) / HIDDEN**0.5)
        self.experts_norm = nn.Parameter(torch.ones(HIDDEN))
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN) / FFN**0.5)

    def forward(self, x: Tensor, recipe: str | None = None) -> Tensor:
        """x: [batch, tokens, hidden]."""
        h = weft.rms_norm(x, self.attention_norm)
        qkv = weft.linear(h, self.qkv.to(x.dtype), recipe=recipe)
        norm = weft.HeadNorm("rms", self.q_norm, self.k_norm)
        q, k, v, _ = weft.qkv_prepare(qkv, heads=HEADS, norm=norm, rotation=ROTATION)
        attended = weft.attention(q, k, v, is_causal=True, layout="bshd").flatten(2)
        x = x + weft.linear(attended, self.out.to(x.dtype), recipe=recipe)
        h = weft.rms_norm(x, self.experts_norm).flatten(0, 1)
        routing = weft.route(weft.router_linear(h, self.router), TOP_K)
        return x + weft.experts(h, self.up, self.down, routing, recipe=recipe).view_as(x)

    def plain(self, x: Tensor) -> Tensor:
        """The same in PyTorch's own words, every expert for every token."""
        batch, tokens, _ = x.shape
        h = F.rms_norm(x, (HIDDEN,), self.attention_norm.to(x.dtype), 1e-6)
        split = (HEADS.q * HEADS.dim, HEADS.kv * HEADS.dim, HEADS.kv * HEADS.dim)
        parts = (h @ self.qkv.to(x.dtype).t()).split(split, -1)
        q, k, v = (part.unflatten(-1, (-1, HEADS.dim)).transpose(1, 2) for part in parts)
        q = rotated(F.rms_norm(q, (HEADS.dim,), self.q_norm.to(x.dtype), 1e-6))
        k = rotated(F.rms_norm(k, (HEADS.dim,), self.k_norm.to(x.dtype), 1e-6))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(1, 2).flatten(2) @ self.out.to(x.dtype).t()
        h = F.rms_norm(x, (HIDDEN,), self.experts_norm.to(x.dtype), 1e-6).flatten(0, 1)
        exact = torch.promote_types(h.dtype, torch.float32)
        best = (h.to(exact) @ self.router.to(exact).t()).topk(TOP_K)
        weights = best.values.new_zeros(len(h), EXPERTS).scatter(1, best.indices, best.values.softmax(-1))
        gate, value = torch.einsum("tk,enk->ten", h, self.up.to(x.dtype)).chunk(2, -1)
        hidden = F.silu(gate) * value
        y = torch.einsum("ten,ekn,te->tk", hidden, self.down.to(x.dtype), weights.to(x.dtype))
        return x + y.view(batch, tokens, HIDDEN)


def rotated(x: Tensor) -> Tensor:
    """Heads [batch, heads, tokens, dim] with pairs (i, i + dim / 2) turned by their positions."""
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(half).double() / half
    )
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def main() -> None:
    torch.manual_seed(0)
    layer = DecoderLayer()
    x, upstream = torch.randn(2, BATCH, TOKENS, HIDDEN)
    # Each token is well on the side of two experts: a rounding must not send it elsewhere, or errors say nothing.
    liked = torch.randn(BATCH, TOKENS, EXPERTS).argsort(-1)
    likes = torch.tensor([3.0, 2.0]) * 0.15 * HIDDEN**0.5
    x += F.normalize(layer.router.detach(), dim=-1)[liked[..., :2]].mul(likes[:, None]).sum(-2)
    x = x.bfloat16().float()

    def results(function: object, dtype: torch.dtype, model: DecoderLayer, **options: str) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        parameters = list(model.parameters())
        y = function(leaf, **options)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], upstream.to(dtype))]

    exact = DecoderLayer().double()
    exact.load_state_dict(layer.state_dict())
    wanted = results(exact.plain, torch.float64, exact)
    for recipe, allowed in ALLOWED.items():
        dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
        options = {} if recipe == "fp32" else {"recipe": recipe}
        eager = results(layer, dtype, layer, **options)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        same = all(map(torch.equal, eager, results(compiled, dtype, layer, **options)))
        errors = [relative_error(mine, its) for mine, its in zip(eager, wanted, strict=True)]
        beside = [
            relative_error(t, w) for t, w in zip(results(layer.plain, dtype, layer), wanted, strict=True)
        ]
        print(
            f"{recipe:10s} y {errors[0]:.1e} (PyTorch {beside[0]:.1e})  worst gradient {max(errors[1:]):.1e} "
            f"(PyTorch {max(beside[1:]):.1e})  compiled: {'equal' if same else 'DIFFERENT'}"
        )
        assert same
        assert max(errors) < allowed


if __name__ == "__main__":
    main()
