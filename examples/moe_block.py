"""A mixture of experts: router, permutation, SwiGLU experts, and back, compared with the same layer written naively.

python examples/moe_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import weft

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 96, 128, 128, 8, 2

# Allowed relative error of y and the gradients, compared with fp32. Rounding a tensor to e4m3 in blocks changes it by
# 2.65 %. y combines the roundings of x, up, h and down, the first two amplified by 1.44 in the gated unit: 6.6 %.
# Gradients have up to two roundings more, 7 to 9 %: four times 2.65 % are allowed.
ALLOWED = {"fp32": 1e-5, "bf16": 0.02, "fp8_block": 0.106}


def moe(x: Tensor, router: Tensor, up: Tensor, down: Tensor, recipe: str | None = None) -> Tensor:
    routing = weft.route(weft.router_linear(x, router), TOP_K)
    return weft.experts(x, up, down, routing, recipe=recipe)


def step_by_step(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute what `weft.experts` does in separate steps, for those who want to change one."""
    routing = weft.route(weft.router_linear(x, router), TOP_K)
    rows = weft.row_map(routing.indices, EXPERTS, align=16)
    groups = {"ends": rows.ends, "align": rows.align}
    permuted, probs = weft.permute(x, rows, routing.weights)
    h = weft.glu(weft.grouped_matmul(permuted, up, **groups), probs=probs, **groups)
    return weft.unpermute(weft.grouped_matmul(h, down, **groups), rows)


def naive(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute every expert for every token, weighted by the router (0 for most)."""
    best = (x.float() @ router.float().t()).topk(TOP_K)
    weights = torch.zeros(len(x), EXPERTS).scatter(1, best.indices, best.values.softmax(-1)).to(x.dtype)
    gate, value = torch.einsum("tk,enk->ten", x, up).chunk(2, -1)
    return torch.einsum("ten,ekn,te->tk", torch.nn.functional.silu(gate) * value, down, weights)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def main() -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(TOKENS, HIDDEN)
        .bfloat16()
        .float(),  # so that the router sees the same values in every dtype
        torch.randn(EXPERTS, HIDDEN) / 4,
        torch.randn(EXPERTS, 2 * FFN, HIDDEN) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, FFN) / FFN**0.5,
    ]
    inputs[1][-1] = 0.0  # few tokens choose this expert: its logit is 0, the best others are far above
    upstream = torch.randn(TOKENS, HIDDEN)

    def results(layer: object, recipe: str = "fp32") -> list[Tensor]:
        dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
        leaves = [tensor.clone().requires_grad_() for tensor in (inputs[0].to(dtype), *inputs[1:])]
        options = {} if recipe == "fp32" else {"recipe": recipe}
        y = layer(*leaves, **options)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(dtype))]

    wanted = results(naive)
    for recipe, allowed in ALLOWED.items():
        eager = results(moe, recipe)
        compiled = results(torch.compile(moe, fullgraph=True, backend="aot_eager"), recipe)
        errors = [relative_error(got, expected) for got, expected in zip(eager, wanted, strict=True)]
        assert max(errors) < allowed
        assert all(torch.equal(got, expected) for got, expected in zip(eager, compiled, strict=True))
        named = zip(("y", "dx", "drouter", "dup", "ddown"), errors, strict=True)
        print(f"{recipe:10s}", "  ".join(f"{name} {error:.1e}" for name, error in named), " compiled: equal")
    stepwise = results(step_by_step)
    assert all(torch.equal(got, expected) for got, expected in zip(stepwise, results(moe), strict=True))


if __name__ == "__main__":
    main()
