"""Scores in mxfp8: equal to attention over the dequantized codes, of QTensors and of plain tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import heads, packed
from tests.ops.attention.test_eight_bits import error
from weft.runtime import choosing_for

BF16 = torch.bfloat16
MX: dict[str, Any] = {"scores": "mxfp8"}


def decoded(x: Tensor) -> Tensor:
    return weft.quantize(x.float(), "e4m3:mx").dequantize(torch.float64)


def smoothed(key: Tensor) -> Tensor:
    return key.float() - key.mean(2, keepdim=True, dtype=torch.float32)


def assert_of_codes(result: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """Assert that a result is that of dequantized queries and keys: products are exact, so only weights, sums and the
    result are rounded."""
    exact = weft.attention(query, key, value.double(), **options, return_lse=True)
    size = weft.attention(query, key, value.double().abs(), **options)
    assert ((result.out.double() - exact.out).abs() <= 2.0**-7 * size + 1e-6).all()
    if result.lse is not None:
        torch.testing.assert_close(result.lse.double(), exact.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dim", "target"),
    [(128, "cpu"), (128, "sm_100"), (64, "cpu"), (80, "sm_120"), (192, "sm_100"), (192, "sm_120"), (8, "cpu"),
     (33, "cpu"), (100, "cpu"), (256, "sm_100")],
)  # fmt: skip
def test_scores_are_those_of_the_codes(dim: int, target: str) -> None:
    """Heads whose last block of scales is partial, in one piece and in two, with the tiles of targets."""
    inputs = heads(150, dtype=BF16, dim=dim, v_dim=64)
    inputs["query"][..., dim // 2 :] *= 64  # scales differ along a head
    options: dict[str, Any] = {"is_causal": True, "scale": 0.02}
    with choosing_for(target):
        result = weft.attention(**inputs, **options, **MX, return_lse=True)
    mean = inputs["key"].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    shift = (inputs["query"].double() * mean).sum(-1) * 0.02
    result = result._replace(lse=result.lse.double() - shift)
    assert_of_codes(
        result, decoded(inputs["query"]), decoded(smoothed(inputs["key"])), inputs["value"], **options
    )


@pytest.mark.parametrize("spec", ["e4m3:mx:te", "e4m3:mx:deepgemm", "e4m3:mx:torchao"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "packed"])
def test_qtensors_are_multiplied_as_they_are(spec: str, layout: Any) -> None:
    """The result has the bits of the codes, which dequantized operands would not give."""
    if layout == "packed":
        inputs = packed([40, 0, 33], pads=7, dtype=BF16, dim=80)
        options = {"cu_seqlens": inputs.pop("cu_seqlens")}
    else:
        order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
        inputs = {n: x.permute(order).contiguous() for n, x in heads(70, batch=2, dtype=BF16, dim=80).items()}
        options = {"layout": layout}
    q, k = (weft.quantize(inputs[name], spec) for name in ("query", "key"))
    result = weft.attention(q, k, inputs["value"], **options, return_lse=True)
    exact = (x.dequantize(torch.float64) for x in (q, k))
    assert_of_codes(result, *exact, inputs["value"], **options)
    with weft.record_engines() as used:
        weft.attention(q, k, inputs["value"], **options)
    assert [one.engine for one in used] == ["weft"]


def test_scales_at_the_ends_of_their_range() -> None:
    """Scales from 2^-127 to 2^100 on either side, and blocks of zeros."""
    inputs = heads(70, dim=64)
    for power, other in ((-100, 90), (100, -100), (-120, 0)):
        q, k = inputs["query"] * 2.0**power, inputs["key"] * 2.0**other
        q[:, 0, :, 32:] = 0.0
        q, k = (weft.quantize(x, "e4m3:mx") for x in (q, k))
        result = weft.attention(q, k, inputs["value"], return_lse=True)
        exact = (x.dequantize(torch.float64) for x in (q, k))
        assert_of_codes(result, *exact, inputs["value"])


@pytest.mark.parametrize("values", [None, "e4m3", "int8"])
def test_options_combine(values: Any) -> None:
    for options, sizes in (
        ({"sinks": torch.randn(4)}, {}),
        ({"softcap": 5.0}, {"dim": 80}),
        ({"kv_lengths": torch.tensor([0, 70, 90])}, {"batch": 3, "keys": 90}),
        ({"window": (20, 3), "causal_align": "lower_right"}, {"keys": 140, "dim": 192, "v_dim": 128}),
    ):
        inputs = heads(100, **sizes, dtype=BF16)  # type: ignore[arg-type]
        plain = attend(**inputs, **options, return_lse=True)
        result = weft.attention(**inputs, **options, **MX, values=values, return_lse=True)  # type: ignore[call-overload]
        assert error(result.out, plain.out) < 0.06
        finite = plain.lse.isfinite()
        assert torch.equal(finite, result.lse.isfinite())
        torch.testing.assert_close(result.lse[finite], plain.lse[finite], rtol=0.02, atol=0.12)


@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_a_nonfinite_key_reaches_only_queries_that_see_it(content: float) -> None:
    inputs = heads(100, dtype=BF16)
    inputs["key"][0, 0, 70, 5] = content
    result = weft.attention(**inputs, is_causal=True, **MX)
    assert result[:, :2, 70:].isnan().all()
    assert result[:, :2, :70].isfinite().all()
    assert result[:, 2:].isfinite().all()


def test_compiled_is_eager() -> None:
    def call(*inputs: Tensor) -> Any:
        return weft.attention(*inputs, is_causal=True, **MX, return_lse=True)[:2]

    torch._dynamo.reset()
    inputs = heads(70, dtype=BF16).values()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    for one, other in zip(compiled, call(*inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("target", "instead"), [("sm_80", "int8"), ("sm_89", "e4m3"), ("sm_90", "e4m3"), ("gfx942", "int8")]
)
def test_targets_without_scaled_products_refuse_scores_and_decode_qtensors(target: str, instead: str) -> None:
    inputs = heads(40)
    q, k = (weft.quantize(inputs[name], "e4m3:mx") for name in ("query", "key"))
    with choosing_for(target):
        with pytest.raises(ValueError, match=f"{target} cannot multiply e4m3 with scales of 32.*{instead}"):
            weft.attention(**inputs, **MX)
        result = weft.attention(q, k, inputs["value"], return_lse=True)
    exact = (x.dequantize(torch.float64) for x in (q, k))
    assert_of_codes(result, *exact, inputs["value"])
