"""A mixture of experts put together from Weft's ops, forward and backward, beside float64 and beside bf16 PyTorch."""

from __future__ import annotations

import pytest
import torch
import triton_loom
from torch import Tensor

from tests.ops.moe import fp8_block
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


def drawn_for_fp8(seed: int, extreme: bool) -> tuple[list[Tensor], Tensor]:
    """Inputs as the example draws them. `extreme`: the last expert's row of the router is forty times as large as the
    others, so that a few tokens decide the gradient of x, and amplify the errors of theirs."""
    torch.manual_seed(seed)
    hidden, ffn, experts, tokens = moe_block.HIDDEN, moe_block.FFN, moe_block.EXPERTS, moe_block.TOKENS
    x, router = torch.randn(tokens, hidden).bfloat16().float(), torch.randn(experts, hidden) / 4
    router[-1] = -10.0 * torch.sign(x.mean(0)) if extreme else 0.0
    up = torch.randn(experts, 2 * ffn, hidden) / hidden**0.5
    return [x, router, up, torch.randn(experts, hidden, ffn) / ffn**0.5], torch.randn(tokens, hidden)


def in_fp8(inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [inputs[0].bfloat16(), *(tensor.clone() for tensor in inputs[1:])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = moe_block.moe(*leaves, recipe="fp8_block")
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.bfloat16())]


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fp8_block_has_the_roundings_of_its_recipe_and_no_others(seed: int, extreme: bool) -> None:
    """Beside every rounding of the recipe in float64. Sums in fp32 may round one number in thousands the other way;
    without one of the roundings, or with another one, a tensor would be off by a percent and more."""
    inputs, upstream = drawn_for_fp8(seed, extreme)
    wanted = fp8_block.results(inputs, upstream, moe_block.TOP_K)
    for name, got, its in zip(NAMES, in_fp8(inputs, upstream), wanted, strict=True):
        assert moe_block.relative_error(got.double(), its) < 1e-3, name


def test_the_error_of_fp8_block_is_the_one_that_its_roundings_make() -> None:
    """To first order, over eight seeds: x and up are rounded before the gated unit, which amplifies what they change by
    sqrt(1 + E[silu'^2] / E[silu^2]) = 1.44, and h and down behind it."""
    z = torch.randn(
        1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    silu = torch.nn.functional.silu(z)
    (slope,) = torch.autograd.grad(silu.sum(), z)
    amplified = 1 + float(slope.square().mean() / silu.detach().square().mean())
    predicted = fp8_block.E4M3 * (2 * amplified + 2) ** 0.5
    assert predicted == pytest.approx(0.0656, rel=0.01)
    drawn = torch.randn(500, 128, dtype=torch.float64)
    rounding = moe_block.relative_error(fp8_block.along_rows(drawn), drawn)
    assert rounding == pytest.approx(fp8_block.E4M3, rel=0.01)
    errors = []
    for seed in range(8):
        inputs, upstream = drawn_for_fp8(seed, extreme=False)
        truth = results(exact, inputs, upstream, torch.float64)
        made = fp8_block.results(inputs, upstream, moe_block.TOP_K)
        found = [moe_block.relative_error(got, wanted) for got, wanted in zip(made, truth, strict=True)]
        errors.append(found[0])
        # What the example allows leaves room, and not much: half of it is less than any of the tensors has.
        assert max(found) < moe_block.ALLOWED["fp8_block"] < 2 * min(found)
    assert sum(errors) / len(errors) == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_no_finding() -> None:
    inputs, upstream = drawn(61)
    with triton_loom.sanitize() as seen:
        results(moe_block.moe, inputs, upstream, torch.bfloat16)
    assert seen.launches > 10
