"""Weft as the backend "plugin" of SGLang's ops, compared with SGLang's own."""

# ruff: noqa: E402, since SGLang cannot be imported before there is a stand-in for torchvision
from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

from tests.integrations import without_gpu
from tests.integrations.page import run_script

pytest.importorskip("sglang.kernels.fused_op", reason="needs sglang: pip install 'weft[sglang]'")

without_gpu.for_sglang()

from sglang.kernels.spec import KernelBackend
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

from weft.integrations import sglang as integration


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def compared(op: Any, *args: Any) -> list[float]:
    """Return the share of elements in which the results of Weft and of SGLang's reference differ."""
    actual, expected = (
        op.forward(*args, backend=backend) for backend in (KernelBackend.PLUGIN, KernelBackend.TORCH)
    )
    if isinstance(actual, torch.Tensor):
        actual, expected = (actual,), (expected,)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    return [(a != b).float().mean().item() for a, b in zip(actual, expected, strict=True)]


def with_weight(norm: Any) -> Any:
    norm.weight.data = torch.randn(256).to(torch.bfloat16)
    return norm


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_matches_sglang(residual: bool, cast_first: bool) -> None:
    x, h = torch.randn(2, 33, 256).to(torch.bfloat16)
    norm = with_weight(RMSNorm(256, cast_x_before_out_mul=cast_first))
    assert max(compared(norm, x, h if residual else None)) < 1e-3


@pytest.mark.parametrize("residual", [False, True])
def test_gemma_rms_norm_matches_sglang(residual: bool) -> None:
    x, h = torch.randn(2, 33, 256).to(torch.bfloat16)
    assert max(compared(with_weight(GemmaRMSNorm(256)), x, h if residual else None)) < 1e-3


@pytest.mark.parametrize("op", [SiluAndMul, GeluAndMul, lambda: GeluAndMul("none")])
def test_gated_units_match_sglang_up_to_a_rounding(op: Any) -> None:
    compared(op(), torch.randn(33, 512, dtype=torch.bfloat16))


def test_calls_without_a_kernel_are_left_to_sglang() -> None:
    norm = with_weight(RMSNorm(256))
    x = torch.randn(33, 256, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="promoted dtype"):
        norm.forward(x, x.float(), backend=KernelBackend.PLUGIN)
    with pytest.raises(NotImplementedError, match="full rows"):
        RMSNorm(256, var_hidden_size=128).forward(x, backend=KernelBackend.PLUGIN)


def test_registering_selects_nothing() -> None:
    assert RMSNorm(256).auto_selected_backend() is None


def test_sglang_finds_the_entry_point() -> None:
    (entry_point,) = (point for point in entry_points(group="sglang.srt.plugins") if point.name == "weft")
    assert entry_point.load() is integration.register


def test_the_page_runs() -> None:
    assert "backend='plugin'" in run_script(
        "SGLang", "from tests.integrations import without_gpu; without_gpu.for_sglang()\n"
    )
