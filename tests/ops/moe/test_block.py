"""A mixture of experts put together from Weft's ops, forward and backward, beside float64 and beside bf16 PyTorch."""

from __future__ import annotations

import pytest
import torch
import triton_loom
from torch import Tensor

from tests.support.examples import example

NAMES = ("y", "dx", "drouter", "dup", "ddown")


moe_block = example("moe_block")


def drawn(tokens: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Inputs and an upstream gradient, of numbers that bf16 has; two of the experts get no token."""
    torch.manual_seed(seed)
    hidden, ffn, experts = moe_block.HIDDEN, moe_block.FFN, moe_block.EXPERTS
    x = torch.randn(tokens, hidden)
    x[:, 0] = 4.0
    router = torch.randn(experts, hidden) / 4
    router[:, 0] = 0.0
    router[2, 0] = router[-1, 0] = -1000.0
    up, down = (
        torch.randn(experts, 2 * ffn, hidden) / hidden**0.5,
        torch.randn(experts, hidden, ffn) / ffn**0.5,
    )
    inputs = [tensor.bfloat16() for tensor in (x, router, up, down)]
    return inputs, torch.randn(tokens, hidden).bfloat16()


def results(layer: object, inputs: list[Tensor], upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    y = layer(*leaves)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(dtype))]


def exact(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The naive layer in the dtype that it gets."""
    best = (x @ router.t()).topk(moe_block.TOP_K)
    weights = torch.zeros(len(x), len(router), dtype=x.dtype)
    weights = weights.scatter(1, best.indices, best.values.softmax(-1))
    gate, value = torch.einsum("tk,enk->ten", x, up).chunk(2, -1)
    return torch.einsum("ten,ekn,te->tk", torch.nn.functional.silu(gate) * value, down, weights)


@pytest.mark.parametrize("tokens", [1, 61, 96])
def test_float32_is_the_naive_layer(tokens: int) -> None:
    inputs, upstream = drawn(tokens)
    truth = results(exact, inputs, upstream, torch.float64)
    mine = results(moe_block.moe, inputs, upstream, torch.float32)
    for name, got, wanted in zip(NAMES, mine, truth, strict=True):
        assert moe_block.relative_error(got.double(), wanted) < 1e-5, name
    idle = mine[NAMES.index("dup")][[2, -1]]
    assert not idle.any(), "an expert without tokens has no gradient"


@pytest.mark.parametrize("tokens", [61, 96])
def test_bfloat16_is_no_further_from_float64_than_pytorch(tokens: int) -> None:
    """PyTorch rounds after every step, Weft at the end of each op: its error is the smaller one."""
    inputs, upstream = drawn(tokens)
    truth = results(exact, inputs, upstream, torch.float64)
    theirs = results(moe_block.naive, inputs, upstream, torch.bfloat16)
    mine = results(moe_block.moe, inputs, upstream, torch.bfloat16)
    for name, got, beside, wanted in zip(NAMES, mine, theirs, truth, strict=True):
        error, allowed = (moe_block.relative_error(t.double(), wanted) for t in (got, beside))
        assert error < 1.05 * allowed, f"{name}: {error:.2e}, PyTorch's {allowed:.2e}"
        assert allowed < 2e-2, name


@pytest.mark.slow
def test_no_finding() -> None:
    inputs, upstream = drawn(61)
    with triton_loom.sanitize() as seen:
        results(moe_block.moe, inputs, upstream, torch.bfloat16)
    assert seen.launches > 10
