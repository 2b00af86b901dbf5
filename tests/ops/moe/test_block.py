"""A mixture of experts composed of Weft's ops, forward and backward, against float64 and against bf16 PyTorch."""

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
    """Draw inputs and an upstream gradient in bf16; two of the experts get no tokens."""
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
    """Compute the naive layer in the dtype of its inputs."""
    best = (x @ router.t()).topk(moe_block.TOP_K)
    weights = torch.zeros(len(x), len(router), dtype=x.dtype)
    weights = weights.scatter(1, best.indices, best.values.softmax(-1))
    gate, value = torch.einsum("tk,enk->ten", x, up).chunk(2, -1)
    return torch.einsum("ten,ekn,te->tk", torch.nn.functional.silu(gate) * value, down, weights)


@pytest.mark.parametrize("tokens", [1, 61, 96])
def test_float32_equals_the_naive_layer(tokens: int) -> None:
    inputs, upstream = drawn(tokens)
    truth = results(exact, inputs, upstream, torch.float64)
    mine = results(moe_block.moe, inputs, upstream, torch.float32)
    for name, got, wanted in zip(NAMES, mine, truth, strict=True):
        assert moe_block.relative_error(got.double(), wanted) < 1e-5, name
    idle = mine[NAMES.index("dup")][[2, -1]]
    assert not idle.any(), "an expert without tokens has no gradient"


@pytest.mark.parametrize("tokens", [61, 96])
def test_bfloat16_is_no_further_from_float64_than_pytorch(tokens: int) -> None:
    """PyTorch rounds after every step, Weft only at the end of each op, so Weft's error is smaller."""
    inputs, upstream = drawn(tokens)
    truth = results(exact, inputs, upstream, torch.float64)
    theirs = results(moe_block.naive, inputs, upstream, torch.bfloat16)
    mine = results(moe_block.moe, inputs, upstream, torch.bfloat16)
    for name, got, eager, wanted in zip(NAMES, mine, theirs, truth, strict=True):
        error, allowed = (moe_block.relative_error(t.double(), wanted) for t in (got, eager))
        assert error < 1.05 * allowed, f"{name}: {error:.2e}, PyTorch's {allowed:.2e}"
        assert allowed < 2e-2, name


def draw_fp8_inputs(seed: int, extreme: bool) -> tuple[list[Tensor], Tensor]:
    """Draw inputs as the example does. `extreme`: the last expert's row of the router is forty times as large as the
    others, so a few tokens dominate the gradient of x, and their errors are amplified."""
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
    """Results match float64 with the same roundings. fp32 sums may round one element in thousands differently; with a
    missing or additional rounding, a tensor would differ by a percent or more."""
    inputs, upstream = draw_fp8_inputs(seed, extreme)
    wanted = fp8_block.results(inputs, upstream, moe_block.TOP_K)
    for name, got, expected in zip(NAMES, in_fp8(inputs, upstream), wanted, strict=True):
        assert moe_block.relative_error(got.double(), expected) < 1e-3, name


def test_error_of_fp8_block_follows_from_its_roundings() -> None:
    """The error over eight seeds matches first-order theory: x and up are rounded before the gated unit, which
    amplifies their error by sqrt(1 + E[silu'^2] / E[silu^2]) = 1.44, and h and down after it."""
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
        inputs, upstream = draw_fp8_inputs(seed, extreme=False)
        truth = results(exact, inputs, upstream, torch.float64)
        rounded = fp8_block.results(inputs, upstream, moe_block.TOP_K)
        relative = [moe_block.relative_error(got, wanted) for got, wanted in zip(rounded, truth, strict=True)]
        errors.append(relative[0])
        # The example's tolerance has a small margin: half of it would be below the error of every tensor.
        assert max(relative) < moe_block.ALLOWED["fp8_block"] < 2 * min(relative)
    assert sum(errors) / len(errors) == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_sanitizer_finds_nothing() -> None:
    inputs, upstream = drawn(61)
    with triton_loom.sanitize() as seen:
        results(moe_block.moe, inputs, upstream, torch.bfloat16)
    assert seen.launches > 10
