"""Options that docs/arithmetic.md names, compared with the transformers classes they reproduce, in bf16."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import weft

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

BF16 = torch.bfloat16

NORMS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": ("LlamaRMSNorm", BF16, {"casting": "llama"}),
    "llama, fp32 weights": ("LlamaRMSNorm", torch.float32, {"casting": "llama", "out_dtype": "promote"}),
    "gpt_oss": ("GptOssRMSNorm", BF16, {}),
    "gemma2": ("Gemma2RMSNorm", BF16, {"weight_offset": 1}),
}
GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextRMSNormGated", {"act": "silu", "casting": "llama"}),
    "kimi_linear": ("KimiLinearRMSNormGated", {"act": "sigmoid"}),
}


def build_norm(model: str, name: str, dtype: torch.dtype) -> Any:
    """Build a norm of transformers over 200 elements, with random weights."""
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    norm = getattr(module, name)(200, eps=1e-6).to(dtype)
    norm.weight.data.normal_(1.0, 0.3)
    return norm


def assert_same_values(got: Tensor, wanted: Tensor) -> None:
    """Assert equal values, except where an fp32 function rounds to the other side."""
    assert got.dtype == wanted.dtype
    assert (got != wanted).float().mean() < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", NORMS)
def test_norms_match_transformers(name: str) -> None:
    kind, dtype, options = NORMS[name]
    norm, x = build_norm(name.partition(",")[0], kind, dtype), torch.randn(64, 200).to(BF16)
    assert_same_values(weft.rms_norm(x, norm.weight, **options), norm(x))


@torch.no_grad()
@pytest.mark.parametrize("model", GATED)
def test_gated_norms_match_transformers(model: str) -> None:
    kind, options = GATED[model]
    norm, x, gate = (
        build_norm(model, kind, BF16),
        torch.randn(64, 200).to(BF16),
        2 * torch.randn(64, 200).to(BF16),
    )
    assert_same_values(weft.gated_norm(x, gate, norm.weight, **options), norm(x, gate))


def test_the_rotation_of_deepseek_matches() -> None:
    """Three roundings differ little from one in fp32."""
    module = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, angles = torch.randn(2, 4, 16, 64), torch.randn(2, 16, 32)
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))
    wanted, _ = module.apply_rotary_pos_emb_interleave(q, q[:, :1], cos, sin)
    rotation = weft.Rotation(cos=cos, sin=sin, style="interleaved", out_style="neox")
    torch.testing.assert_close(weft.rope(q, rotation, layout="bhsd"), wanted, rtol=1e-6, atol=1e-6)
