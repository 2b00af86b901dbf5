"""Linear layers with recipes: their three products against float64 products of the quantized operands, memory kept for
backward, and experts built from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.support.examples import example
from weft import QTensor, Recipe
from weft.lab.families.product import numbers, product_truth
from weft.lab.truth import near
from weft.ops.product.recipes import RECIPES

M, N, K = 72, 128, 256
train_moe = example("train_moe")
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.is_quantized]


def layer(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias and dy; the weight is fp32, as optimizers keep it."""
    draw = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(*shape, generator=draw) for shape in ((M, K), (N, K), (M, N)))
    return x.to(dtype), w / 16, torch.randn(N, generator=draw), dy.to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def both(x: Tensor, spec: str, seed: int | None = None) -> QTensor:
    return weft.quantize(x, spec, columnwise=True, seed=seed)


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_three_products(name: str) -> None:
    """Each product reads operands quantized along its summed dimension, from unrounded values."""
    recipe = RECIPES[name]
    assert recipe.x
    assert recipe.weight
    assert recipe.grad
    x, w, bias, dy = layer()
    mine = leaves(x, w, bias)
    torch.manual_seed(7)
    y = weft.linear(*mine, recipe=name)
    y.backward(dy)  # type: ignore[no-untyped-call]
    torch.manual_seed(7)
    seed = int(torch.randint(2**62, ())) if recipe.stochastic else None
    xq, wq, dyq = both(x, recipe.x), both(w, recipe.weight), both(dy, recipe.grad, seed)
    wanted = product_truth(numbers(xq), numbers(wq.T, of_b=True))
    near(y, type(wanted)(wanted.truth + bias.double(), wanted.noise + 2.0**-23 * bias.abs()))
    near(mine[0].grad, product_truth(numbers(dyq), numbers(wq, of_b=True)))  # type: ignore[arg-type]
    near(mine[1].grad, product_truth(numbers(dyq.T), numbers(xq, of_b=True)))  # type: ignore[arg-type]
    assert torch.allclose(mine[2].grad, dy.float().sum(0), rtol=1e-5, atol=1e-4)  # type: ignore[arg-type]
    assert mine[0].grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert mine[1].grad.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_plain_products(recipe: str | None) -> None:
    x, w, bias, dy = layer()
    mine = leaves(x, w, bias)
    weft.linear(*mine, recipe=recipe).backward(dy)  # type: ignore[no-untyped-call]
    near(mine[0].grad, product_truth(dy.double(), w.bfloat16().double()))  # type: ignore[arg-type]
    near(mine[1].grad, product_truth(dy.double().T, x.double()))  # type: ignore[arg-type]


def test_gradients_without_rounding() -> None:
    x, w, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(lambda *inputs: weft.linear(*inputs), leaves(x, w, bias))
    y = weft.linear(x, w, bias)
    assert torch.allclose(y, torch.nn.functional.linear(x, w, bias))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_quantized_rows(name: str) -> None:
    """Quantized rows give the bits of plain rows without a second rounding, and pass the gradient on."""
    x, w, _, dy = layer()
    spec = RECIPES[name].x
    assert spec
    results = []
    for convert in (lambda x: x, lambda x: both(x, spec)):
        mine = leaves(x, w)
        y = weft.linear(convert(mine[0]), mine[1], recipe=name)
        y.backward(dy)  # type: ignore[no-untyped-call]
        results.append([y, *(leaf.grad for leaf in mine)])
    for plain, quantized in zip(*results, strict=True):
        assert torch.equal(plain, quantized)  # type: ignore[arg-type]


def test_quantized_gradients() -> None:
    """Gradients that arrive quantized, as from `glu`, are not quantized again."""
    x, w, _, dy = layer()
    plain, leaves_ = leaves(x, w), leaves(x, w)
    weft.linear(*plain, recipe="fp8_block").backward(dy)  # type: ignore[no-untyped-call]
    y = weft.linear(*leaves_, recipe="fp8_block")
    dx, dw = torch.autograd.grad(y, leaves_, both(dy, "1x128"))
    assert torch.equal(dx, plain[0].grad)  # type: ignore[arg-type]
    assert torch.equal(dw, plain[1].grad)  # type: ignore[arg-type]


def test_seeds() -> None:
    """Stochastic rounding draws from PyTorch's generator: new bits in every call, reproducible by seed."""
    x, w, _, dy = layer()

    def gradient() -> Tensor:
        (mine,) = leaves(w)
        weft.linear(x, mine, recipe="nvfp4").backward(dy)  # type: ignore[no-untyped-call]
        assert mine.grad is not None
        return mine.grad

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    torch.manual_seed(3)
    assert torch.equal(first, gradient())
    assert not torch.equal(first, second)


# ---- memory and weights -------------------------------------------------------------------------------------


def saved_bytes(function: Any) -> int:
    """Return the bytes that autograd saves in a call, except parameters."""
    with train_moe.count_saved() as sizes:
        output = function()
    del output
    return sum(sizes.values())


def test_autograd_saves_codes() -> None:
    """A layer saves one 8-bit copy of x and one of the weight, with scales."""
    x, w, *_ = layer()
    codes = saved_bytes(lambda: weft.linear(*leaves(x, w), recipe="fp8_block"))
    plain = saved_bytes(lambda: weft.linear(*leaves(x, w), recipe="bf16"))
    scales = 4 * (K * (-(-M // 128)) + (N // 128) * (K // 128))
    padded = -(-M // 16) * 16  # column-wise codes are padded to 16 bytes
    assert codes <= padded * K + N * K + scales
    assert plain >= 2 * (M * K + N * K)


@pytest.mark.slow
def test_experts_keep_few_bytes() -> None:
    """Norm, router and experts of the layer in docs/training.md save at most 0.6 of the bytes of bf16."""
    shapes = ((2048, 2048), (16, 2048), (16, 2 * 768, 2048), (16, 2048, 768))
    draw = torch.Generator().manual_seed(2)
    x, router, up, down = (torch.randn(*shape, generator=draw) / shape[-1] ** 0.5 for shape in shapes)

    def layer_of(recipe: str) -> Tensor:
        rows, gain, *weights = leaves(x.bfloat16(), torch.ones(2048), router, up, down)
        normed = weft.rms_norm(rows, gain)
        routing = weft.route(weft.router_linear(normed, weights[0]), 8)
        return weft.experts(normed, *map(nn.Parameter, weights[1:]), routing, recipe=recipe)

    plain, codes = (saved_bytes(lambda r=recipe: layer_of(r)) for recipe in ("bf16", "fp8_block"))
    assert codes <= 0.6 * plain, codes / plain


def test_main_grad() -> None:
    x, w, _, dy = layer()
    (plain,) = leaves(w)
    weft.linear(x, plain, recipe="fp8_block").backward(dy)  # type: ignore[no-untyped-call]
    (mine,) = leaves(w)
    mine.main_grad = torch.ones(N, K)  # type: ignore[attr-defined]
    weft.linear(x, mine, recipe="fp8_block").backward(dy)  # type: ignore[no-untyped-call]
    assert mine.grad is None
    assert plain.grad is not None
    assert torch.allclose(mine.main_grad, plain.grad + 1, rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]


def test_reused_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is quantized once inside the block, again after a change, and in every call outside."""
    from weft.ops.product import linear as module

    calls: list[int] = []
    original = module._weights
    monkeypatch.setattr(module, "_weights", lambda *a: calls.append(1) or original(*a))
    x, w, _, dy = layer()
    (mine,) = leaves(w)
    with weft.reuse_weights():
        first = weft.linear(x, mine, recipe="fp8_block")
        assert torch.equal(first, weft.linear(x, mine, recipe="fp8_block"))
        assert len(calls) == 1
        with torch.no_grad():
            mine.mul_(2.0)
        second = weft.linear(x, mine, recipe="fp8_block")
        assert len(calls) == 2
    assert torch.equal(second, first * 2)
    weft.linear(x, mine, recipe="fp8_block").backward(dy)  # type: ignore[no-untyped-call]
    assert len(calls) == 3


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_frozen_weight_with_plain_rows(recipe: str | None) -> None:
    """Weight-only products and the gradient of x use the decoded weight."""
    x, w, bias, dy = layer(torch.bfloat16 if recipe is None else torch.float32)
    frozen = weft.quantize(w, "int4:1x128")
    (mine,) = leaves(x)
    y = weft.linear(mine.view(2, M // 2, K), frozen, bias, recipe=recipe)
    assert y.shape == (2, M // 2, N)
    assert y.dtype == x.dtype
    rounded = x.bfloat16().double()
    wanted = product_truth(rounded, numbers(frozen.T, of_b=True))
    near(y.view(M, N), type(wanted)(wanted.truth + bias.double(), wanted.noise + 2.0**-23 * bias.abs()))
    y.view(M, N).backward(dy)  # type: ignore[no-untyped-call]
    # The decoded weight is rounded to dy's dtype, the gradient to x's.
    error = mine.grad.double() - dy.double() @ frozen.dequantize().double()  # type: ignore[union-attr]
    assert float(error.norm() / mine.grad.double().norm()) < 2.0**-8  # type: ignore[union-attr]
    compiled = torch.compile(weft.linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, frozen, bias, recipe=recipe), weft.linear(x, frozen, bias, recipe=recipe))


def test_gradients_pass_straight_through_a_quantized_weight() -> None:
    """A weight that FSDP gathered as codes gives the bits of the plain weight."""
    x, w, bias, dy = layer(torch.bfloat16)
    results = []
    for rounded in (False, True):
        mine, plain = leaves(x, w)
        weight = weft.quantize(plain, "128x128") if rounded else plain
        y = weft.linear(mine, weight, bias, recipe="fp8_block")
        results.append([y.detach(), *torch.autograd.grad(y, (mine, plain), dy)])
    assert all(map(torch.equal, *results))


def test_frozen_experts_with_plain_rows() -> None:
    x, router, up, down = moe_layer(torch.float32)
    frozen = [weft.quantize(w, "int4:1x128") for w in (up, down)]
    (mine,) = leaves(x)
    (its,) = leaves(x)
    y = experts(mine, router, *frozen)
    wanted = naive(its, router, *(w.dequantize() for w in frozen))
    dy = torch.randn(TOKENS, K)
    for got, right in (
        (y, wanted),
        (torch.autograd.grad(y, mine, dy)[0], torch.autograd.grad(wanted, its, dy.double())[0]),
    ):
        assert float((got - right).detach().norm() / right.detach().norm()) < 2e-6  # as of plain weights


def test_frozen_weight_with_an_adapter() -> None:
    """A frozen quantized base works with a trained low-rank adapter."""
    x, w, _, dy = layer()
    base = weft.quantize(w.bfloat16(), "128x128")
    down, up = leaves(torch.randn(8, K).bfloat16() / 16, torch.zeros(N, 8).bfloat16())
    (rows,) = leaves(x)
    y = weft.matmul(weft.linear(rows, down), up.T, residual=weft.linear(rows, base, recipe="fp8_block"))
    assert torch.equal(y, weft.linear(x, base, recipe="fp8_block"))
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert up.grad is not None
    assert rows.grad is not None
    near(rows.grad, product_truth(numbers(both(dy, "1x128")), numbers(base, of_b=True)))


# ---- with the rest of PyTorch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "fp8_tensor"])
def test_compiled_and_checkpointed_are_eager(name: str) -> None:
    x, w, bias, dy = layer()

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        spec = RECIPES[name].x
        normed = weft.rms_norm(x, quantize=spec, columnwise=spec is not None)
        return weft.linear(normed, w, bias, recipe=name)

    def checkpointed(*inputs: Tensor) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled, checkpointed):
        mine = leaves(x, w, bias)
        y = call(*mine)
        results.append([y, *torch.autograd.grad(y, mine, dy)])
    for eager, *others in zip(*results, strict=True):
        assert all(torch.equal(eager, other) for other in others)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: weft.linear(x, w.T), "one K"),
        (lambda x, w: weft.linear(x, w, recipe="fp8"), "must be one of bf16, fp8_block"),
        (lambda x, w: weft.linear(x, w, recipe=8), "weft.Recipe"),
        (lambda x, w: weft.linear(x, w, w[0]), "bias"),
        (lambda x, w: weft.linear(both(x, "mx"), w, recipe="fp8_block"), "quantize it like that"),
        (lambda x, w: weft.linear(both(x, "mx"), w), "unquantized tensors"),
        (lambda x, w: weft.linear(x.double(), w.double(), recipe="mxfp8"), "round bf16, fp16 and fp32"),
        (
            lambda x, w: weft.linear(weft.quantize(x, "1x128"), w.requires_grad_(), recipe="fp8_block"),
            "columnwise=True",
        ),
        (
            lambda x, w: weft.linear(x, weft.quantize(w.requires_grad_(), "128x128"), recipe="bf16"),
            "frozen",
        ),
        (
            lambda x, w: weft.linear(x.requires_grad_(), weft.quantize(w, "mx"), recipe="mxfp8"),
            "weight has no column-wise copy",
        ),
        (lambda x, w: Recipe("mx", "mx"), "or for none"),
        (lambda x, w: Recipe("int8:row", "int8:row", "int8:row", stochastic=True), "float format"),
        (lambda x, w: weft.experts(x, w, w, weft.route(x[:, :4].float(), 2)), "experts, 2H, K"),
    ],
)  # fmt: skip
def test_mistakes_raise_clear_errors(call: Any, message: str) -> None:
    x, w, *_ = layer()
    with pytest.raises((ValueError, TypeError), match=message):
        call(x, w)


def test_a_bias_with_dynamic_sizes() -> None:
    """A graph that has seen several weight sizes checks the bias against symbolic sizes."""
    compiled = torch.compile(weft.linear, fullgraph=True, backend="aot_eager")
    for rows, n, k in ((24, 40, 64), (30, 48, 96)):
        compiled(torch.randn(rows, k), torch.randn(n, k))
    x, w, bias = torch.randn(36, 32), torch.randn(56, 32), torch.randn(56)
    assert torch.equal(compiled(x, w, bias), weft.linear(x, w, bias))


def test_seeds_do_not_compile() -> None:
    x, w, *_ = layer()
    function = torch.compile(weft.linear, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="new seed in every call"):
        function(x, w.requires_grad_(), recipe="nvfp4")


# ---- experts ------------------------------------------------------------------------------------------------

EXPERTS, WIDTH, TOKENS = 4, 128, 60


def moe_layer(dtype: torch.dtype) -> list[Tensor]:
    """Return x, router, up and down; one expert gets no tokens."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, K), (EXPERTS, K), (EXPERTS, 2 * WIDTH, K), (EXPERTS, K, WIDTH))
    x, router, up, down = (torch.randn(*shape, generator=draw) / shape[-1] ** 0.5 for shape in shapes)
    x = x * K**0.5
    x[:, 0] = 3.0
    router[2, 0] = -100.0
    return [x.to(dtype), router, up, down]


def experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor, recipe: str | None = None) -> Tensor:
    return weft.experts(x, up, down, weft.route(weft.router_linear(x, router), 2), recipe=recipe)


def naive(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute every expert for every token in float64, weighted by the router (0 for most)."""
    x, router, up, down = (t.double() for t in (x, router, up, down))
    best = (x @ router.T).topk(2)
    weights = torch.zeros(len(x), EXPERTS, dtype=torch.float64).scatter(
        1, best.indices, best.values.softmax(-1)
    )
    gate, value = torch.einsum("tk,enk->ten", x, up).chunk(2, -1)
    return torch.einsum("ten,ekn,te->tk", torch.nn.functional.silu(gate) * value, down, weights)


def gradients(function: Any, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    mine = leaves(*inputs)
    y = function(*mine)
    return [y, *torch.autograd.grad(y, mine, dy.to(y.dtype))]


# Errors of y and of all gradients against float64 on such data: twice the observed errors.
ERRORS = {
    None: 2e-6, "bf16": 0.012, "fp8_block": 0.18, "fp8_row": 0.16, "fp8_tensor": 0.2, "mxfp8": 0.18, "nvfp4": 0.6,
    "int8_row": 0.06,
}  # fmt: skip


@pytest.mark.parametrize("recipe", ERRORS)
def test_experts(recipe: str | None) -> None:
    inputs = moe_layer(torch.float32 if recipe is None else torch.bfloat16)
    dy = torch.randn(TOKENS, K)
    wanted = gradients(naive, inputs, dy)
    got = gradients(lambda *t: experts(*t, recipe=recipe), inputs, dy)
    for name, mine, its in zip(("y", "dx", "drouter", "dup", "ddown"), got, wanted, strict=True):
        error = float((mine - its).detach().norm() / its.detach().norm())
        assert error < ERRORS[recipe], f"{name}: {error}"
        # Rounding an operand to this format must leave a trace: the recipe was followed.
        assert recipe is None or error > ERRORS[recipe] / 40, f"{name}: {error}"
    assert not got[3][2].any()
    assert not got[4][2].any()


GPT_OSS: dict[str, Any] = {"layout": "interleaved", "limit": 3.0, "alpha": 1.702, "up_offset": 1.0}


def naive_gpt_oss(
    x: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """Experts with biases and gpt-oss's gated unit, in float64; weights are stored [experts, K, N]."""
    x, weights, up, up_bias, down, down_bias = (
        t.double() for t in (x, weights, up, up_bias, down, down_bias)
    )
    z = torch.einsum("tk,ekn->ten", x, up) + up_bias
    gate, value = z[..., ::2].clamp(max=3.0), z[..., 1::2].clamp(-3.0, 3.0)
    h = gate * torch.sigmoid(1.702 * gate) * (value + 1.0)
    y = torch.einsum("ten,enk->tek", h, down) + down_bias
    by_expert = torch.zeros(len(x), EXPERTS, dtype=torch.float64).scatter(1, chosen, weights)
    return torch.einsum("tek,te->tk", y, by_expert)


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_experts_with_biases(recipe: str | None) -> None:
    """gpt-oss multiplies by the slot's weight after the second bias, and stores matrices transposed."""
    x, router, up, down = moe_layer(torch.float32 if recipe is None else torch.bfloat16)
    best = (x.float() @ router.T).topk(2)
    biases = [torch.randn(EXPERTS, 2 * WIDTH) / 4, torch.randn(EXPERTS, K) / 4]
    up, down = up.mT.contiguous(), down.mT.contiguous()
    inputs = [x, best.values.softmax(-1), up, biases[0], down, biases[1]]
    dy = torch.randn(TOKENS, K)

    def layer(x: Tensor, weights: Tensor, *others: Tensor) -> Tensor:
        up, up_bias, down, down_bias = others
        return weft.experts(
            x,
            up.mT,
            down.mT,
            (weights, best.indices),
            recipe=recipe,
            up_bias=up_bias,
            down_bias=down_bias,
            **GPT_OSS,
        )

    got = gradients(layer, inputs, dy)
    wanted = gradients(lambda x, weights, *w: naive_gpt_oss(x, weights, best.indices, *w), inputs, dy)
    for name, mine, its in zip(
        ("y", "dx", "dw", "dup", "dup_bias", "ddown", "ddown_bias"), got, wanted, strict=True
    ):
        error = float((mine - its).detach().norm() / its.detach().norm())
        assert error < ERRORS[recipe], f"{name}: {error}"


def test_experts_without_a_gate() -> None:
    x, router, up, down = moe_layer(torch.float32)
    routing, dy = weft.route(x @ router.T, 2), torch.randn(TOKENS, K)
    chosen, by_expert = routing.indices.long(), torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    by_expert.scatter_(1, chosen, routing.weights.double())
    inputs = [x, up[:, :WIDTH], down]
    got = gradients(lambda *t: weft.experts(*t, routing, act="relu2", layout="none"), inputs, dy)
    wanted = gradients(
        lambda x, up, down: torch.einsum(
            "ten,ekn,te->tk",
            torch.einsum("tk,enk->ten", x.double(), up.double()).relu() ** 2,
            down.double(),
            by_expert,
        ),
        inputs,
        dy,
    )
    for mine, its in zip(got, wanted, strict=True):
        assert float((mine - its).detach().norm() / its.detach().norm()) < ERRORS[None]


def test_experts_compiled() -> None:
    inputs, dy = moe_layer(torch.bfloat16), torch.randn(TOKENS, K)
    call = lambda *t: experts(*t, recipe="fp8_block")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for eager, other in zip(gradients(call, inputs, dy), gradients(compiled, inputs, dy), strict=True):
        assert torch.equal(eager, other)


def test_experts_of_sequences() -> None:
    x, router, up, down = moe_layer(torch.bfloat16)
    batch = x.view(2, TOKENS // 2, K)
    routing = weft.route(weft.router_linear(batch, router), 2)
    y = weft.experts(batch, up, down, routing, recipe="fp8_block")
    assert torch.equal(y.view(TOKENS, K), experts(x, router, up, down, recipe="fp8_block"))


def test_experts_of_no_tokens() -> None:
    x, router, up, down = moe_layer(torch.bfloat16)
    got = gradients(lambda *t: experts(*t, recipe="fp8_block"), [x[:0], router, up, down], x[:0])
    assert [g.shape for g in got] == [x[:0].shape, x[:0].shape, router.shape, up.shape, down.shape]
    assert not any(g.any() for g in got)


def test_the_british_name_of_is_quantized_warns() -> None:
    with pytest.warns(DeprecationWarning, match="now Recipe.is_quantized"):
        assert weft.Recipe.of("fp8_block").is_quantised
