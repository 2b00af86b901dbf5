"""Scores in eight bits: exactly the attention of the decoded queries and keys, and near to that of the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.attention.test import heads, packed
from weft.runtime import choosing_for

BF16 = torch.bfloat16
ELEMENTS = ("int8", "e4m3")


def decoded(x: Tensor, element: str) -> Tensor:
    """What the codes of heads stand for, in float64."""
    return weft.quantize(x.float(), f"{element}:row:te").dequantize(torch.float64)


def smoothed(key: Tensor) -> Tensor:
    return key.float() - key.mean(2, keepdim=True, dtype=torch.float32)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_scores_are_those_of_the_codes(element: Any, target: str) -> None:
    """The products of codes are exact: what is left is the rounding of weights and of the result."""
    given = heads(150, dtype=BF16, dim=128)
    with choosing_for(target):
        found = weft.attention(**given, is_causal=True, scores=element, return_lse=True)
    exact = weft.attention(
        decoded(given["query"], element),
        decoded(smoothed(given["key"]), element),
        given["value"].double(),
        is_causal=True,
        return_lse=True,
    )
    size = weft.attention(  # sum of p |v|
        decoded(given["query"], element), decoded(smoothed(given["key"]), element), given["value"].double().abs(),
        is_causal=True,
    )  # fmt: skip
    assert ((found.out.double() - exact.out).abs() <= 2.0**-7 * size + 1e-6).all()
    mean = given["key"].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    shift = (given["query"].double() * mean).sum(-1) * 128**-0.5
    torch.testing.assert_close(found.lse.double(), exact.lse + shift, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("element", "limits"), [("int8", (0.014, 0.014, 0.09)), ("e4m3", (0.05, 0.05, 0.09))]
)
def test_errors_beside_plain_scores(element: Any, limits: tuple[float, ...]) -> None:
    """Normal numbers, keys with an offset, and a channel with outliers of keys: where a mean is all that is large,
    smoothing takes it away."""
    for limit, (offset, outlier) in zip(limits, ((0.0, 1.0), (5.0, 1.0), (0.0, 20.0)), strict=True):
        given = heads(200, dtype=BF16, dim=128)
        given["key"][..., 3] *= outlier
        given["key"] += offset
        wanted = weft.attention(**given)
        found = weft.attention(**given, scores=element)
        assert error(found, wanted) < limit, (offset, outlier)


def test_a_constant_key_changes_little() -> None:
    given = heads(200, dtype=BF16, dim=128)
    first = weft.attention(**given, scores="int8")
    given["key"] += 1.0  # in bf16 that rounds the keys anew
    assert error(weft.attention(**given, scores="int8"), first) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.randn(4)},
        {"softcap": 5.0},
        {"kv_lengths": torch.tensor([0, 70, 90]), "batch": 3, "keys": 90},
        {"layout": "bshd"},
        {"layout": "sbhd", "kv_lengths": torch.tensor([50]), "keys": 100},
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    sizes = {name: options[name] for name in ("batch", "keys") if name in options}
    rest = {name: value for name, value in options.items() if name not in sizes}
    given = heads(100, **sizes, dtype=BF16)
    for i, length in enumerate(rest["kv_lengths"].tolist() if "kv_lengths" in rest else ()):
        given["key"][i, :, length:] = float("nan")
        given["value"][i, :, length:] = float("nan")
    order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}.get(rest.get("layout", ""), (0, 1, 2, 3))
    given = {name: x.permute(order) for name, x in given.items()}
    plain, found = (
        weft.attention(**given, **rest, scores=scores, return_lse=True) for scores in (None, "int8")
    )
    assert error(found.out, plain.out) < 0.01
    finite = plain.lse.isfinite()
    assert torch.equal(finite, found.lse.isfinite())
    torch.testing.assert_close(found.lse[finite], plain.lse[finite], rtol=0.01, atol=0.01)


def test_packed() -> None:
    given = packed([40, 0, 90], pads=5, dtype=BF16)
    given["key"][130:] = float("nan")
    plain, found = (
        weft.attention(**given, is_causal=True, scores=scores, return_lse=True) for scores in (None, "e4m3")
    )
    assert error(found.out, plain.out) < 0.04
    torch.testing.assert_close(found.lse[:, :130], plain.lse[:, :130], rtol=0.02, atol=0.12)


def test_mistakes_are_named() -> None:
    given = heads(20)
    with pytest.raises(ValueError, match="scores must be"):
        weft.attention(**given, scores="int4")  # type: ignore[arg-type]
    given["query"].requires_grad_()
    with pytest.raises(ValueError, match="for inference"):
        weft.attention(**given, scores="int8")
