"""A mixture of experts: router, permutation, SwiGLU experts, and back, beside the same layer written naively.

python examples/moe_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import weft

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K, ALIGN = 96, 128, 64, 8, 2, 16


def expert_products(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [rows, K] times the matrix of each row's expert, weights [E, K, N]; `ends` says where their regions end.

    A stand-in for `torch.nn.functional.grouped_mm`, which torch.compile takes in bf16 alone. In fp32, so that the
    gradient of a weight is not rounded after every row."""
    expert = torch.bucketize(torch.arange(len(x)), ends, right=True).clamp(max=len(weights) - 1)
    return torch.bmm(x[:, None].float(), weights.float()[expert])[:, 0].to(x.dtype)


def moe(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    routing = weft.route(weft.router_linear(x, router), TOP_K)
    rows = weft.row_map(routing.indices, EXPERTS, align=ALIGN)
    permuted, probs = weft.permute(x, rows, routing.weights)
    h = weft.glu(expert_products(permuted, up, rows.offsets), probs=probs, ends=rows.ends, align=ALIGN)
    return weft.unpermute(expert_products(h, down, rows.offsets), rows)


def naive(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert for every token, weighed by what the router says (0 for most)."""
    best = (x.float() @ router.float().t()).topk(TOP_K)
    weights = torch.zeros(len(x), EXPERTS).scatter(1, best.indices, best.values.softmax(-1)).to(x.dtype)
    gate, value = torch.einsum("tk,ekn->ten", x, up).chunk(2, -1)
    return torch.einsum("ten,enk,te->tk", torch.nn.functional.silu(gate) * value, down, weights)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def main() -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(TOKENS, HIDDEN),
        torch.randn(EXPERTS, HIDDEN) / 4,
        torch.randn(EXPERTS, HIDDEN, 2 * FFN) / HIDDEN**0.5,
        torch.randn(EXPERTS, FFN, HIDDEN) / FFN**0.5,
    ]
    inputs[1][-1] = -10.0 * torch.sign(inputs[0].mean(0))  # an expert that hardly anybody wants
    upstream = torch.randn(TOKENS, HIDDEN)
    results = []
    for layer in (naive, moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        y = layer(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, upstream)])
    names = ("y", "dx", "drouter", "dup", "ddown")
    for name, wanted, eager, compiled in zip(names, *results, strict=True):
        error = relative_error(eager, wanted)
        print(
            f"{name:8s} relative error {error:.1e}, compiled {'equal' if torch.equal(eager, compiled) else 'differs'}"
        )
        assert error < 1e-5
        assert torch.equal(eager, compiled)


if __name__ == "__main__":
    main()
