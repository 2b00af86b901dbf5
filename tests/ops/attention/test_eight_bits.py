"""Scores and values in eight bits: equal to attention over the dequantized codes, and close to plain attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import guarded_allocations

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import heads, packed
from tests.support.covering import covering
from weft.lab.families.attention import sees
from weft.runtime import choosing_for

BF16 = torch.bfloat16
ELEMENTS = ("int8", "e4m3")


def decoded(x: Tensor, element: str) -> Tensor:
    """Quantize heads and dequantize them to float64."""
    return weft.quantize(x.float(), f"{element}:row:te").dequantize(torch.float64)


def smoothed(key: Tensor) -> Tensor:
    return key.float() - key.mean(2, keepdim=True, dtype=torch.float32)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_scores_are_those_of_the_codes(element: Any, target: str) -> None:
    """Products of codes are exact, so the only errors are the roundings of weights and of the result."""
    inputs = heads(150, dtype=BF16, dim=128)
    with choosing_for(target):
        result = weft.attention(**inputs, is_causal=True, scores=element, return_lse=True)
    exact = weft.attention(
        decoded(inputs["query"], element),
        decoded(smoothed(inputs["key"]), element),
        inputs["value"].double(),
        is_causal=True,
        return_lse=True,
    )
    size = weft.attention(  # sum of p |v|
        decoded(inputs["query"], element), decoded(smoothed(inputs["key"]), element), inputs["value"].double().abs(),
        is_causal=True,
    )  # fmt: skip
    assert ((result.out.double() - exact.out).abs() <= 2.0**-7 * size + 1e-6).all()
    mean = inputs["key"].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    shift = (inputs["query"].double() * mean).sum(-1) * 128**-0.5
    torch.testing.assert_close(result.lse.double(), exact.lse + shift, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("element", "limits"), [("int8", (0.014, 0.014, 0.09)), ("e4m3", (0.05, 0.05, 0.09))]
)
def test_errors_beside_plain_scores(element: Any, limits: tuple[float, ...]) -> None:
    """Cases: normal elements, keys with an offset, and keys with an outlier channel. Smoothing removes an offset."""
    for limit, (offset, outlier) in zip(limits, ((0.0, 1.0), (5.0, 1.0), (0.0, 20.0)), strict=True):
        inputs = heads(200, dtype=BF16, dim=128)
        inputs["key"][..., 3] *= outlier
        inputs["key"] += offset
        wanted = weft.attention(**inputs)
        result = weft.attention(**inputs, scores=element)
        assert error(result, wanted) < limit, (offset, outlier)


def test_a_constant_key_changes_little() -> None:
    inputs = heads(200, dtype=BF16, dim=128)
    first = weft.attention(**inputs, scores="int8")
    inputs["key"] += 1.0  # the sum rounds the keys again in bf16
    assert error(weft.attention(**inputs, scores="int8"), first) < 0.02


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
def test_options_combine(options: dict[str, Any]) -> None:
    sizes = {name: options[name] for name in ("batch", "keys") if name in options}
    rest = {name: value for name, value in options.items() if name not in sizes}
    inputs = heads(100, **sizes, dtype=BF16)
    for i, length in enumerate(rest["kv_lengths"].tolist() if "kv_lengths" in rest else ()):
        inputs["key"][i, :, length:] = float("nan")
        inputs["value"][i, :, length:] = float("nan")
    order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}.get(rest.get("layout", ""), (0, 1, 2, 3))
    inputs = {name: x.permute(order) for name, x in inputs.items()}
    plain, result = (
        weft.attention(**inputs, **rest, scores=scores, return_lse=True) for scores in (None, "int8")
    )
    assert error(result.out, plain.out) < 0.01
    finite = plain.lse.isfinite()
    assert torch.equal(finite, result.lse.isfinite())
    torch.testing.assert_close(result.lse[finite], plain.lse[finite], rtol=0.01, atol=0.01)


def test_packed() -> None:
    inputs = packed([40, 0, 90], pads=5, dtype=BF16)
    inputs["key"][130:] = float("nan")
    plain, result = (
        weft.attention(**inputs, is_causal=True, scores=scores, return_lse=True) for scores in (None, "e4m3")
    )
    assert error(result.out, plain.out) < 0.04
    torch.testing.assert_close(result.lse[:, :130], plain.lse[:, :130], rtol=0.02, atol=0.12)


HIDDEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kv_lengths": (heads(40, 90, batch=2, dtype=BF16), {"kv_lengths": torch.tensor([30, 60])}),
    "kv_lengths of packed sequences": (
        packed([30, 40], [50, 60], dtype=BF16),
        {"kv_lengths": torch.tensor([20, 60])},
    ),
    "keys after the last query's": (
        heads(40, 90, dtype=BF16),
        {"is_causal": True, "causal_align": "upper_left"},
    ),
    "keys before the first query's window": (
        heads(20, 90, dtype=BF16),
        {"window": (9, 0), "causal_align": "lower_right"},
    ),
    "both, packed": (
        packed([20, 1, 30], [60, 20, 70], dtype=BF16),
        {"window": (9, 0), "causal_align": "lower_right", "kv_lengths": torch.tensor([50, 20, 31])},
    ),
    "after the last query's, packed": (
        packed([20, 1, 30], [60, 20, 70], dtype=BF16),
        {"window": (None, 2), "causal_align": "upper_left"},
    ),
    "pads": (packed([30, 40], pads=20, dtype=BF16), {"is_causal": True}),
}


def seen_keys(inputs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Return which keys any query sees, bool [batch, keys] or packed [keys]: those whose values get a gradient."""
    floats = {name: x.float().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    attend(**floats, **options).sum().backward()
    grad = floats["value"].grad
    return grad.ne(0).any(-1).any(1)


@pytest.mark.parametrize(
    ("case", "element", "values"),
    covering(list(HIDDEN), [*ELEMENTS, "mxfp8"], [None, "e4m3", "int8"], together=1),
)
def test_keys_that_no_query_sees_change_no_bit(case: str, element: Any, values: Any) -> None:
    """Unseen keys used to enter the mean that smooths the keys."""
    inputs, options = HIDDEN[case]
    hidden = ~seen_keys(inputs, options)
    assert hidden.any()
    assert not hidden.all()
    options = options | {"scores": element, "values": values, "return_lse": True, "return_max": True}
    wanted = weft.attention(**inputs, **options)
    for content in (math.nan, math.inf, 1e4):
        other = inputs | {name: inputs[name].clone() for name in ("key", "value")}
        for name in ("key", "value"):
            x = other[name] if "cu_seqlens" in inputs else other[name].transpose(1, 2)
            # A weight of 0 times a non-finite plain value is NaN, as in any product.
            x[hidden] = content if name == "key" or values is not None else 1e4
        for one, two in zip(weft.attention(**other, **options), wanted, strict=True):
            assert torch.equal(one, two), content


def test_other_sequences_change_no_bit_of_smoothed_keys() -> None:
    """The mean key is computed per sequence, packed or not."""
    inputs = packed([40, 0, 90], dtype=BF16)
    options: dict[str, Any] = {"is_causal": True, "scores": "int8", "return_lse": True}
    together = weft.attention(**inputs, **options)
    for begin, end in ((0, 40), (40, 130)):
        alone = {name: inputs[name][begin:end].transpose(0, 1)[None] for name in ("query", "key", "value")}
        one = weft.attention(**alone, **options)
        assert torch.equal(one.out[0].transpose(0, 1), together.out[begin:end])
        torch.testing.assert_close(one.lse[0], together.lse[:, begin:end], rtol=1e-6, atol=1e-6)
    inputs["key"][40:] += 1e4
    assert torch.equal(weft.attention(**inputs, **options).out[:40], together.out[:40])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_a_nonfinite_key_reaches_only_queries_that_see_it(element: Any, content: float) -> None:
    """Other queries stay finite. The int8 codes of a row with NaN used to be zeros, and its mean reached all keys."""
    inputs = heads(100, dtype=BF16)
    wanted = weft.attention(**inputs, is_causal=True, scores=element)
    inputs["key"][0, 0, 70, 5] = content
    result = weft.attention(**inputs, is_causal=True, scores=element)
    assert result[:, :2, 70:].isnan().all()
    assert result[:, :2, :70].isfinite().all()
    assert torch.equal(result[:, 2:], wanted[:, 2:])
    assert error(result[:, :2, :70], wanted[:, :2, :70]) < 0.1
    inputs["query"][0, 3, 9, 0] = content
    result = weft.attention(**inputs, is_causal=True, scores=element)
    assert result[:, 3, 9].isnan().all()
    assert result[:, 3].isnan().all(-1).sum() == 1


# ---- values in e4m3 ------------------------------------------------------------------------------------------

E4M3_STEP = 2.0**-4  # the largest relative error of a rounding to e4m3
MIN_WEIGHT_ERROR = 2.0**-18  # largest error below e4m3's normal range, relative to the row's largest weight


def decoded_values(value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Quantize values [..., keys, dim] with one scale per column over the seen keys, and dequantize to float64."""
    if seen is not None:
        value = torch.where(seen[:, None], value, 0.0)
    return decoded(value.mT.contiguous(), "e4m3").mT


def assert_of_codes(result: weft.Attention, inputs: dict[str, Any], **options: Any) -> None:
    """Assert that results match the dequantized codes with e4m3 weights, for sequences [1, heads, tokens, dim]."""
    smooth = "sinks" not in options and "softcap" not in options
    q = decoded(inputs["query"], "e4m3")
    k = decoded(smoothed(inputs["key"]) if smooth else inputs["key"], "e4m3")
    v = decoded_values(inputs["value"], sees(q.shape[2], k.shape[2], options).any(0))
    exact = weft.attention(q, k, v, **options, return_lse=True)
    size = weft.attention(q, k, v.abs(), **options)  # sum of p |v|
    # With equal scores each key has weight 1 / seen, and the largest weight is at most 1.
    seen = weft.attention(torch.zeros_like(q), k, v.abs(), **options | {"sinks": None})
    slack = MIN_WEIGHT_ERROR * inputs["key"].shape[2] * seen
    assert ((result.out.double() - exact.out).abs() <= (E4M3_STEP + 2.0**-8) * size + slack).all()
    finite = exact.lse.isfinite()
    assert torch.equal(finite, result.lse.isfinite())
    if not smooth:
        torch.testing.assert_close(result.lse[finite].double(), exact.lse[finite], rtol=1e-5, atol=1e-4)


VALUES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("cpu", {"queries": 150}, {"is_causal": True}),
    ("sm_90", {"queries": 150}, {"is_causal": True}),
    (
        "sm_90",
        {"queries": 37, "keys": 129, "dim": 128, "kv": 1},
        {"window": (40, 3), "causal_align": "lower_right"},
    ),
    ("cpu", {"queries": 70, "keys": 33, "v_dim": 24}, {"is_causal": True, "causal_align": "lower_right"}),
    ("cpu", {"queries": 65, "dim": 72, "v_dim": 192}, {"sinks": torch.randn(4)}),
    ("cpu", {"queries": 40, "keys": 257, "dim": 80, "v_dim": 80, "kv": 4}, {"softcap": 5.0}),
]


@pytest.mark.parametrize(
    ("target", "sizes", "options"),
    VALUES,
    ids=[f"{sizes['queries']}-{target}" for target, sizes, _ in VALUES],
)
def test_values_are_those_of_the_codes(target: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    inputs = heads(**sizes, dtype=BF16)
    with choosing_for(target):
        result = weft.attention(**inputs, **options, scores="e4m3", values="e4m3", return_lse=True)
    assert_of_codes(result, inputs, **options)


@pytest.mark.parametrize("far", [0, 8])
def test_weights_are_scaled_before_they_are_rounded(far: int) -> None:
    """A single tile of keys gives the row maximum at once. With `far`, one key dominates and the other weights are near
    the smallest e4m3 values."""
    inputs = heads(100, 60, dtype=BF16, dim=128)
    inputs["query"][..., 0], inputs["key"][..., 0], inputs["key"][:, :, 0, 0] = 10.0, 0.0, far
    result = weft.attention(**inputs, scores="int8", values="e4m3")
    q, k = decoded(inputs["query"], "int8"), decoded(smoothed(inputs["key"]), "int8").repeat_interleave(2, 1)
    v = decoded_values(inputs["value"]).repeat_interleave(2, 1)
    s = q @ k.mT * 128**-0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    rounded = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
    wanted = rounded @ v / p.sum(-1, keepdim=True)
    assert error(result, wanted) < 2e-3  # the rounding of the result
    assert far or error(wanted, p @ v / p.sum(-1, keepdim=True)) > 1e-2


def assert_alone_is_together(lengths: list[int], **options: Any) -> tuple[dict[str, Tensor], weft.Attention]:
    """Assert that sequences that use only some of their keys, packed or not, have the bits that they have alone,
    whatever the unused keys and the memory for codes hold. Return the second sequence and its result."""
    inputs = heads(100, max(lengths) + 20, batch=len(lengths), dtype=BF16, v_dim=80)
    inputs["value"][1] *= 100  # scales are those of a sequence
    options = options | {"sinks": torch.zeros(4), "return_lse": True}
    own = [
        {name: x[i : i + 1, :, : None if name == "query" else length] for name, x in inputs.items()}
        for i, length in enumerate(lengths)
    ]
    alone = [weft.attention(**each, **options) for each in own]
    query, key, value = (
        torch.cat([each[name][0].transpose(0, 1) for each in own]) for name in ("query", "key", "value")
    )
    inputs = {name: x.clone() for name, x in inputs.items()}
    for i, length in enumerate(lengths):
        inputs["key"][i, :, length:] = inputs["value"][i, :, length:] = float("nan")
    used, starts = torch.tensor(lengths), torch.arange(len(lengths) + 1) * 100
    k_starts = torch.cat([torch.zeros(1).long(), used.cumsum(0)])
    with guarded_allocations() as bands:
        together = weft.attention(**inputs, kv_lengths=used, **options)
        joined = weft.attention(query, key, value, cu_seqlens=starts, cu_seqlens_k=k_starts, **options)
    for band in bands:
        band.check()
    for i, one in enumerate(alone):
        assert torch.equal(one.out[0], together.out[i])
        assert torch.equal(one.lse[0], together.lse[i])
        assert torch.equal(one.out[0].transpose(0, 1), joined.out[100 * i : 100 * i + 100])
    return own[1], alone[1]


def test_values_of_sequences() -> None:
    inputs, result = assert_alone_is_together([0, 70, 33], scores="e4m3", values="e4m3")
    assert_of_codes(result, inputs, sinks=torch.zeros(4))


def test_special_values() -> None:
    """Zeros stay zeros, and a NaN reaches the same elements as without codes."""
    inputs = heads(100, dtype=BF16)
    inputs["value"][:, 0] = 0.0
    inputs["value"][:, 1, 70, 3] = float("nan")
    out = weft.attention(**inputs, is_causal=True, scores="e4m3", values="e4m3")
    assert (out[:, :2] == 0).all()
    wrong = weft.attention(**inputs, is_causal=True, engine="weft").isnan()
    assert wrong[:, 2:, 70:, 3].all()
    assert torch.equal(out.isnan(), wrong)


@pytest.mark.parametrize(
    ("scores", "values", "limits"),
    [
        ("int8", "e4m3", (0.04, 0.04, 0.08, 0.04)),
        ("e4m3", "e4m3", (0.06, 0.06, 0.06, 0.06)),
        ("int8", "int8", (0.02, 0.02, 0.1, 0.02)),
        ("mxfp8", None, (0.05, 0.05, 0.16, 0.05)),
        ("mxfp8", "int8", (0.05, 0.05, 0.16, 0.05)),
    ],
)
def test_errors_beside_bf16(scores: Any, values: Any, limits: tuple[float, ...]) -> None:
    """Cases: normal elements, keys with an offset, an outlier channel of keys and one of values, whose own error is
    left out. The bounds are those of docs/attention.md, with room for fewer tokens."""
    cases = ((0.0, 1.0, 1.0), (5.0, 1.0, 1.0), (0.0, 20.0, 1.0), (0.0, 1.0, 100.0))
    for limit, (offset, key_outlier, value_outlier) in zip(limits, cases, strict=True):
        inputs = heads(200, dtype=BF16, dim=128)
        inputs["key"][..., 3] *= key_outlier
        inputs["key"] += offset
        inputs["value"][..., 3] *= value_outlier
        others = torch.arange(128) != 3
        wanted = weft.attention(*(inputs[name].double() for name in ("query", "key", "value")))
        plain, result = (
            error(out[..., others], wanted[..., others])
            for out in (
                F.scaled_dot_product_attention(**inputs, enable_gqa=True),
                weft.attention(**inputs, scores=scores, values=values),
            )
        )
        assert plain < result < limit, (offset, key_outlier, value_outlier)


def test_outliers_of_values_have_their_own_scale() -> None:
    inputs = heads(200, dtype=BF16, dim=128)
    inputs["value"][..., 3] *= 1000
    result = weft.attention(**inputs, scores="e4m3", values="e4m3")
    assert error(result[..., 4:], weft.attention(**inputs)[..., 4:]) < 0.06


def test_the_same_bits_in_every_run() -> None:
    inputs = heads(150, batch=2, dtype=BF16)
    one, two = (weft.attention(**inputs, is_causal=True, scores="e4m3", values="e4m3") for _ in range(2))
    assert torch.equal(one, two)


def test_compiled_is_eager() -> None:
    def attend(*inputs: Tensor) -> Any:
        return weft.attention(*inputs, is_causal=True, scores="int8", values="e4m3", return_lse=True)[:2]

    torch._dynamo.reset()
    inputs = heads(70, dtype=BF16).values()
    for one, other in zip(
        torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs), attend(*inputs), strict=True
    ):
        assert torch.equal(one, other)


def test_mistakes_are_named() -> None:
    inputs = heads(20)
    with pytest.raises(ValueError, match="values must be"):
        weft.attention(**inputs, scores="int8", values="e5m2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="go with scores"):
        weft.attention(**inputs, values="e4m3")
    with (
        choosing_for("sm_80"),
        pytest.raises(ValueError, match="sm_80 cannot multiply e4m3: pass values"),
    ):
        weft.attention(**inputs, scores="int8", values="e4m3")
    with pytest.raises(ValueError, match="scores must be"):
        weft.attention(**inputs, scores="int4")  # type: ignore[arg-type]
    inputs["query"].requires_grad_()
    with pytest.raises(ValueError, match="for inference"):
        weft.attention(**inputs, scores="int8")
