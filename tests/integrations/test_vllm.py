"""Weft as a provider of vLLM's ops, compared with vLLM's own, on vLLM's inputs for such comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.ir", reason="needs vllm: pip install 'weft[vllm]'")

from vllm.ir import ops as ir
from vllm.plugins import load_plugins_by_group

from tests.integrations.page import run_script
from weft.integrations import vllm as integration

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def results(op: Any, provider: str, *args: Any) -> tuple[Tensor, ...]:
    """Return a provider's results on copies of these arguments."""
    own = [a.clone() if isinstance(a, Tensor) else a for a in args]
    with op.set_priority([provider, "native"] if provider != "native" else ["native"]):
        assert op.dispatch(*own).provider == provider
        output = op(*own)
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(33, 256), (1, 4096), (7, 5120)])
def test_rms_norm_matches_vllm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    args = ir.rms_norm._input_generator(num_tokens=tokens, hidden_size=hidden, dtype=dtype)
    (actual,), (expected,) = (results(ir.rms_norm, name, *args) for name in ("weft", "native"))
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    else:  # an extra or missing rounding would change one element in six
        assert (actual != expected).float().mean() < 1e-3


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm_rounds_once_without_a_weight_and_with_one_in_fp32(weight_dtype: torch.dtype | None) -> None:
    x, weight, eps = ir.rms_norm._input_generator(num_tokens=33, hidden_size=256, dtype=torch.bfloat16)
    weight = None if weight_dtype is None else weight.to(weight_dtype)
    (actual,), (expected,) = (results(ir.rms_norm, name, x, weight, eps) for name in ("weft", "native"))
    assert (actual != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(33, 256), (1, 4096)])
def test_fused_add_rms_norm_matches_vllm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    op = ir.fused_add_rms_norm
    args = op._input_generator(num_tokens=tokens, hidden_size=hidden, dtype=dtype)
    (y, h), (expected, sums) = (results(op, name, *args) for name in ("weft", "native"))
    assert torch.equal(h, sums)
    if dtype == torch.float32:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    else:
        assert (y != expected).float().mean() < 1e-3


def test_calls_without_a_kernel_go_to_the_next_provider() -> None:
    x, weight, eps = ir.rms_norm._input_generator(num_tokens=3, hidden_size=64, dtype=torch.float32)
    for args in ((x, weight, eps, 32), (x, weight.bfloat16(), eps), (x.double(), weight.double(), eps)):
        with ir.rms_norm.set_priority(["weft", "native"]):
            assert ir.rms_norm.dispatch(*args).provider == "native"
    with ir.fused_add_rms_norm.set_priority(["weft", "native"]):
        assert ir.fused_add_rms_norm.dispatch(x.half(), x, weight.half(), eps).provider == "native"


def test_registering_twice_changes_and_selects_nothing() -> None:
    before = ir.rms_norm.impls["weft"]
    integration.register()
    assert ir.rms_norm.impls["weft"] is before
    assert "weft" not in ir.rms_norm.get_priority()


def test_vllm_finds_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "weft")
    assert load_plugins_by_group("vllm.general_plugins") == {"weft": integration.register}


def test_the_page_runs() -> None:
    assert run_script("vLLM") == "weft torch.Size([8, 4096])\n"
