"""Weft's ops found in the graphs of models that know nothing of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from tests.integrations.tiny import build, distance, step
from weft.integrations.fusion import fuse


def compiled(model: Any, counts: Counter[str]) -> Any:
    """Return a model whose graph is fused and then computed by PyTorch as is."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(module: Any, inputs: Any) -> Any:
        fuse(module.graph, counts)
        module.recompile()
        return aot_eager(module, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


# How often each rule matches in a model of two layers. Qwen3 and Gemma3 normalize queries and keys.
FOUND = {
    "llama": {"residual + norm": 4, "norm": 1, "glu": 2},
    "qwen3": {"residual + norm": 4, "norm": 5, "glu": 2},
    "gemma3": {"residual + norm": 4, "norm": 9, "glu": 2},
}


CASES = [(name, dtype) for dtype in (torch.float32, torch.bfloat16) for name in FOUND]
QUICK = [("gemma3", torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_fused_models_match_the_unchanged_ones(name: str, dtype: torch.dtype) -> None:
    model, counts = build(name, dtype), Counter[str]()
    loss, gradients = step(model)
    fused_loss, fused_gradients = step(compiled(model, counts))
    assert counts == FOUND[name]
    bound = 5e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(fused_loss, loss, rtol=bound, atol=bound)
    assert (
        distance({path.removeprefix("_orig_mod."): g for path, g in fused_gradients.items()}, gradients)
        < bound
    )


def of_rms(x: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.rsqrt(power(x).mean(-1, keepdim=True) + 1e-5)


WEIGHT = torch.linspace(0.5, 1.5, 64)
# Ways to write the same operations.
SPELLED: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "pow": ("norm", lambda x, y: x * of_rms(x, lambda x: x.pow(2)) * WEIGHT),
    "a product": ("norm", lambda x, y: WEIGHT * (of_rms(x, lambda x: x * x) * x)),
    "mean by name": (
        "norm",
        lambda x, y: x * torch.square(x).mean(dim=-1, keepdim=True).add(1e-5).rsqrt() * WEIGHT,
    ),
    "pow -0.5": ("norm", lambda x, y: x * (x.pow(2).mean([-1], True) + 1e-5).pow(-0.5) * WEIGHT),
    "of torch": ("norm", lambda x, y: functional.rms_norm(x, (64,), WEIGHT, 1e-5)),
    "a sum": ("residual + norm", lambda x, y: (functional.rms_norm(x + y, (64,), WEIGHT, 1e-5), x + 1)),
    "swiglu": ("glu", lambda x, y: functional.silu(x) * y),
    "the other order": ("glu", lambda x, y: y * functional.silu(x)),
    "geglu": ("glu", lambda x, y: functional.gelu(x) * y),
}
# Ways to write something else that looks similar.
OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "another dimension": lambda x, y: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5) * WEIGHT,
    "cubes": lambda x, y: x * of_rms(x, lambda x: x.abs().pow(3)) * WEIGHT,
    "rms of another": lambda x, y: x * of_rms(y, lambda y: y.pow(2)) * WEIGHT,
    "weight is a matrix": lambda x, y: x * of_rms(x, lambda x: x.pow(2)) * y,
    "somebody reads the inside": lambda x, y: [rms := of_rms(x, lambda x: x.pow(2)), x * rms * WEIGHT],
    "a number": lambda x, y: functional.silu(x) * 2.0,
}


@pytest.mark.parametrize("name", [*SPELLED, *OTHERS])
def test_every_spelling_is_matched_and_lookalikes_are_not(name: str) -> None:
    wanted, function = SPELLED.get(name) or ("", OTHERS[name])
    x, y = torch.randn(2, 5, 64, requires_grad=True).unbind(0)
    counts = Counter[str]()
    fused, reference = compiled(function, counts)(x, y), function(x, y)
    assert counts == ({wanted: 1} if wanted else {})
    for one, other in zip(
        torch.utils._pytree.tree_leaves(fused), torch.utils._pytree.tree_leaves(reference), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_the_pass_works_through_inductor() -> None:
    """Users enable the pass with this setting; forward and backward must match."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64))
    x = torch.randn(4, 64)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    fused = weft.compile_pass()
    torch._dynamo.reset()
    # A graph in Inductor's cache is not searched again.
    with torch.compiler.config.patch(force_disable_caches=True):
        y = torch.compile(model, options={"pre_grad_custom_pass": fused})(x)
    assert fused.found == {"norm": 1}
    for actual, expected in zip(
        torch.autograd.grad(y.square().sum(), list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- quantized results ----------------------------------------------------------------------------------


def by_rows_as_torchao(y: Tensor, largest: float = 448.0) -> tuple[Tensor, Tensor]:
    amax = y.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    scale = largest / amax
    return (y.float() * scale).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn), scale.reciprocal()


def by_blocks_as_deepseek(y: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = y.shape
    blocks = y.view(rows, -1, 128)
    amax = blocks.abs().float().amax(dim=2).view(rows, -1).clamp(1e-4)
    codes = (blocks * (448.0 / amax.unsqueeze(2))).to(torch.float8_e4m3fn).view(rows, columns)
    return codes, (amax / 448.0).view(rows, -1)


WIDE = {dtype: torch.linspace(0.5, 1.5, 256).to(dtype) for dtype in (torch.bfloat16, torch.float32)}


def normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (256,), WIDE[x.dtype], 1e-5)


QUANTIZED: dict[str, tuple[dict[str, int], Callable[[Tensor, Tensor], Any]]] = {
    "norm by rows": ({"norm + quantize": 1}, lambda x, y: by_rows_as_torchao(normed(x))),
    "norm by blocks": ({"norm + quantize": 1}, lambda x, y: by_blocks_as_deepseek(normed(x))),
    "after a sum": (
        {"residual + norm + quantize": 1},
        lambda x, y: (*by_blocks_as_deepseek(normed(total := x + y)), total),
    ),
    "glu": ({"glu + quantize": 1}, lambda x, y: by_blocks_as_deepseek(functional.silu(x) * y)),
    "another number": ({"norm": 1}, lambda x, y: by_rows_as_torchao(normed(x), 447.0)),
    "read by others": ({"norm": 1}, lambda x, y: (*by_rows_as_torchao(z := normed(x)), z @ y.t())),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_results_match(name: str, dtype: torch.dtype) -> None:
    wanted, function = QUANTIZED[name]
    x, y = torch.randn(2, 24, 256, generator=torch.Generator().manual_seed(3)).to(dtype).unbind(0)
    counts = Counter[str]()
    codes, scale, *others = compiled(function, counts)(x, y)
    assert counts == wanted
    their_codes, their_scale, *their_others = function(x, y)
    # Codes come from values that were never rounded to bf16, while a gated unit rounds twice.
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(scale, their_scale, rtol=bound, atol=0)
    differ = codes.view(torch.uint8) != their_codes.view(torch.uint8)
    assert differ.float().mean() < (1e-3 if dtype == torch.float32 else 0.1)
    assert (codes.view(torch.int8).int() - their_codes.view(torch.int8).int()).abs().max() <= 1
    for actual, expected in zip(others, their_others, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_nothing_is_quantized_in_training() -> None:
    x = torch.randn(8, 256, requires_grad=True)
    counts = Counter[str]()
    compiled(lambda x: by_rows_as_torchao(normed(x)), counts)(x)
    assert counts == {"norm": 1}
