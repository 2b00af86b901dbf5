"""Operators of flash-linear-attention against the references in its package, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fla.ops.attn import parallel_attn
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla import fused_recurrent_gla
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn import fused_recurrent_hgrn
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.simple_gla import chunk_simple_gla
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from triton_loom.testing import check

from conformance.cases.support import gradients

B, T, H, D = 1, 70, 2, 32  # one whole chunk and the beginning of another


def heads() -> torch.Tensor:
    return torch.randn(B, T, H, D)


def keys() -> torch.Tensor:
    return F.normalize(heads(), dim=-1)


def rate() -> torch.Tensor:
    return torch.rand(B, T, H)


def decay(*shape: int) -> torch.Tensor:
    return F.logsigmoid(torch.randn(shape) + 2)


@dataclass(frozen=True)
class Case:
    name: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    fla: Callable[..., Any]
    reference: Callable[..., Any]


CASES = [
    Case(
        "chunk_simple_gla",
        lambda: (heads(), heads(), heads(), decay(B, T, H)),
        lambda *inputs: chunk_simple_gla(*inputs)[0],
        lambda *inputs: naive_recurrent_simple_gla(*inputs)[0],
    ),
    Case(
        "fused_recurrent_gla",
        lambda: (heads(), heads(), heads(), decay(B, T, H, D)),
        lambda *inputs: fused_recurrent_gla(*inputs)[0],
        lambda *inputs: naive_recurrent_gla(*inputs)[0],
    ),
    Case(
        "chunk_gated_delta_rule",
        lambda: (keys(), keys(), heads(), decay(B, T, H), rate()),
        lambda *inputs: chunk_gated_delta_rule(*inputs)[0],
        lambda q, k, v, g, beta: naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0],
    ),
    Case(
        "fused_recurrent_hgrn",
        lambda: (torch.randn(B, T, 100), decay(B, T, 100)),
        lambda *inputs: fused_recurrent_hgrn(*inputs)[0],
        lambda *inputs: naive_recurrent_hgrn(*inputs)[0],
    ),
    Case(
        "parallel_attn",
        lambda: (heads(), heads(), heads()),
        parallel_attn,
        lambda *inputs: naive_parallel_attn(*inputs)[0],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_fla(case: Case) -> None:
    """Both sides compute in float32, in another order; the operators of chunks invert triangular matrices."""
    inputs = case.inputs()
    got = gradients(case.fla, len(inputs))(*inputs)
    expected = gradients(case.reference, len(inputs))(*inputs)
    for x, y in zip(got, expected, strict=True):
        check(x, y, 1e-4 * y.abs().max())
