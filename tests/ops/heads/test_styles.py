"""Pairs that are read in one style and written in the other, and angle tables of other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.heads.test import check, normal, packed, table
from weft.lab.families import Call
from weft.lab.families.rope import spelled_rope
from weft.runtime import choosing_for

CROSSED = {"style": "interleaved", "out_style": "neox"}


def deepseek(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as Hugging Face's DeepSeek models do: x [batch, heads, sequence, dim], tables cat([angles, angles])."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_deepseek_of_hugging_face() -> None:
    """Result and gradient match DeepSeek's rotation with its own tables, [batch, sequence, dim]."""
    x, dy = normal(2, 3, 7, 16, dtype=torch.float32), normal(2, 3, 7, 16, seed=1, dtype=torch.float32)
    angles = normal(2, 7, 8, seed=2, dtype=torch.float32)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    rotation = weft.Rotation(cos=cos, sin=sin, style="interleaved", out_style="neox")
    runs = []
    for rotate in (lambda x: weft.rope(x, rotation, layout="bhsd"), lambda x: deepseek(x, cos, sin)):
        leaf = x.clone().requires_grad_()
        y = rotate(leaf)
        runs.append((y, *torch.autograd.grad(y, leaf, dy)))
    for got, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    back = weft.rope(runs[0][0], rotation, layout="bhsd", inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"rope_dim": 8},
        {"rope_dim": 10, "rope_first": False, "inverse": True},
        {"style": "neox", "out_style": "interleaved", "rope_dim": 14, "rope_first": False},
    ],
    ids=str,
)
def test_one_tensor(options: dict[str, Any]) -> None:
    """Elements that are not rotated keep their place, whatever the output style."""
    call = Call(spelled_rope, {"x": normal(3, 4, 5, 24), "base": 1e4, **CROSSED, **options})
    check(call)
    dim, first = options.get("rope_dim", 24), options.get("rope_first", True)
    rest = slice(dim, None) if first else slice(0, 24 - dim)
    assert torch.equal(call()[..., rest], call["x"][..., rest])


@pytest.mark.parametrize(
    ("target", "options"),
    [
        pytest.param(
            "cpu",
            {"qk_norm": "layer", "norm_after": True, "rope_dim": 16, "rope_first": False},
            marks=pytest.mark.slow,
        ),
        ("sm_90", {"qk_norm": "rms", "packing": "groups", "out_layout": "bhsd"}),
        ("cpu", {"qk_norm": "rms", "norm_after": True, "base": 1e4}),
    ],
    ids=str,
)
def test_norm_weights_follow_the_order_of_their_input(target: str, options: dict[str, Any]) -> None:
    """Weights and biases follow the input style if the norm comes before the rotation, else the output style."""
    with choosing_for(target):
        check(packed(**CROSSED, **options))


def test_cache() -> None:
    """Keys are cached in the order in which they are returned."""
    keys, values = torch.zeros(2, 10, 2, 24).bfloat16().unbind()
    call = packed(**CROSSED, rope_dim=16)
    cached = call.with_(cache=(keys, values), slots=torch.arange(10))
    with torch.no_grad():
        _, k, _ = cached()
    assert torch.equal(keys, k.flatten(0, 1))


def test_complex_tables() -> None:
    """torchtitan multiplies each pair of adjacent elements, as a complex number, by the table's."""
    x = normal(2, 7, 3, 16, dtype=torch.float32)
    cis = torch.polar(torch.ones(20, 8), normal(20, 8, seed=1, dtype=torch.float32))

    def multiplied(table: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2)

    rotation = weft.Rotation.from_complex(cis)
    torch.testing.assert_close(weft.rope(x, rotation), multiplied(cis[:7, None]), rtol=1e-6, atol=1e-6)
    positions = torch.tensor([[3, 4, 5, 0, 1, 2, 19], [0, 1, 2, 3, 4, 5, 6]])
    wanted = multiplied(cis[positions][:, :, None])
    torch.testing.assert_close(weft.rope(x, rotation, positions=positions), wanted, rtol=1e-6, atol=1e-6)
    by_sample = weft.Rotation.from_complex(cis[positions])
    assert torch.equal(weft.rope(x, by_sample), weft.rope(x, rotation, positions=positions))
    tables = table(7, half=8)
    halves = weft.Rotation.from_complex(torch.complex(tables["cos"], tables["sin"]), style="neox")
    assert torch.equal(weft.rope(x, halves), weft.rope(x, weft.Rotation(**tables)))
