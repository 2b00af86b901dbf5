"""Queries and keys returned as codes: the bytes of `quantize` on fp32 heads, and attention on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import guarded_allocations, words

import weft
from tests.catalogue.calls import arguments_of
from tests.ops.heads.test import apart, opcheck, packed
from weft import QTensor
from weft.lab.calls import results
from weft.lab.families import Call
from weft.runtime import choosing_for, recording

HEADS = weft.Heads(q=4, kv=2, dim=64)
ROTATION = weft.Rotation(10000.0)


def check(call: Call, spec: str) -> None:
    """Check that q and k are quantized from fp32, and that v and gates are as without codes."""
    wide = call.with_(**{name: call[name].float() for name in ("qkv", "k", "v") if call[name] is not None})()
    plain = call()
    with guarded_allocations() as bands:
        got = call.with_(quantize=spec)()
    for band in bands:
        band.check()
    for codes, heads in zip(got[:2], wide[:2], strict=True):
        assert isinstance(codes, QTensor)
        assert (codes.shape, codes.dtype, codes.spec) == (
            heads.shape,
            call["qkv"].dtype,
            weft.Format.of(spec).spec,
        )
        rowwise, wanted = codes.rowwise, weft.quantize(heads, spec).rowwise
        assert rowwise is not None
        assert wanted is not None
        assert torch.equal(words(rowwise.data), words(wanted.data))
        assert torch.equal(rowwise.scale, wanted.scale)
    for one, other in zip(got[2:], plain[2:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("target", "options", "spec"),
    [
        ("cpu", {"qk_norm": "rms", "base": 1e4, "out_layout": "bhsd"}, "int8:row"),
        (
            "sm_90",
            {"packing": "groups", "gate": True, "layout": "sbhd", "out_layout": "bshd", "rope_dim": 10},
            "e4m3:row",
        ),
        (
            "cpu",
            {
                "qk_norm": "layer",
                "norm_after": True,
                "style": "interleaved",
                "v_dim": 10,
                "out_layout": "thd",
            },
            "e4m3:row",
        ),
    ],
    ids=["rms", "groups", "layer"],
)
def test_codes_are_those_of_quantize(target: str, options: dict[str, Any], spec: str) -> None:
    with choosing_for(target):
        check(packed(**options), spec)


def test_separate_tensors() -> None:
    check(apart("bshd", out_layout="sbhd"), "int8:row")
    check(apart("thd").with_(v=None), "int8:row")


@pytest.mark.parametrize("size", [{"batch": 0}, {"tokens": 0}, {"tokens": 1}])
def test_few_tokens(size: dict[str, int]) -> None:
    check(packed(qk_norm="rms", base=1e4, out_layout="bhsd", **size), "int8:row")


@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_attention_takes_codes(element: str) -> None:
    """Attention multiplies the codes without another pass, with the bits of separately quantized heads."""
    x = torch.randn(2, 70, HEADS.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    options: dict[str, Any] = {"heads": HEADS, "rotation": ROTATION, "out_layout": "bhsd"}
    q, k, v, _ = weft.qkv_prepare(x, quantize=f"{element}:row", **options)
    wide = weft.qkv_prepare(x.float(), **options)
    codes = [weft.quantize(heads, f"{element}:row").bfloat16() for heads in (wide.q, wide.k)]
    assert v is not None
    result = weft.attention(q, k, v, is_causal=True, values="e4m3")
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, weft.attention(*codes, v, is_causal=True, values="e4m3"))
    plain = weft.attention(*weft.qkv_prepare(x, **options)[:3], is_causal=True)
    assert (result - plain).float().norm() < 0.06 * plain.float().norm()
    # With sinks, keys are not smoothed, so attention's own codes are the same.
    sinks = torch.zeros(4)
    inside = weft.attention(wide.q, wide.k, v.float(), sinks=sinks, scores=element, values="e4m3")  # type: ignore[call-overload]
    assert torch.equal(weft.attention(q, k, v, sinks=sinks, values="e4m3"), inside.bfloat16())
    meta = x.to("meta")
    with recording("sm_90"):
        q, k, v, _ = weft.qkv_prepare(meta, quantize=f"{element}:row", **options)
    with recording("sm_90") as recorded:
        weft.attention(q, k, v, is_causal=True)
    assert [variant.kernel for variant in recorded] == ["attention_kernel"]


def prepared(x: Tensor) -> Tensor:
    q, k, v, _ = weft.qkv_prepare(x, heads=HEADS, rotation=ROTATION, quantize="int8:row")
    return weft.attention(q, k, v, layout="bshd", values="e4m3")  # type: ignore[arg-type]


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 33, HEADS.width).bfloat16()
    assert torch.equal(torch.compile(prepared, fullgraph=True, backend="aot_eager")(x), prepared(x))


def test_opcheck() -> None:
    call = packed(qk_norm="rms", gate=True, quantize="int8:row")
    opcheck("qkv_prepare_quantized", arguments_of(call, "qkv_prepare_quantized", results)[0])


def test_mistakes_are_named() -> None:
    call = packed(base=1e4)
    with pytest.raises(ValueError, match="e4m3:row:te or int8:row:te"):
        call.with_(quantize="1x128")()
    cache = tuple(torch.zeros(16, 2, 24).bfloat16() for _ in "kv")
    with pytest.raises(ValueError, match="does not go with a cache"):
        call.with_(quantize="int8:row", cache=cache, slots=torch.zeros(10, dtype=torch.int32))()
    with pytest.raises(ValueError, match=r"for inference.*without quantize="):
        call.with_(quantize="int8:row").requiring_grad()()
