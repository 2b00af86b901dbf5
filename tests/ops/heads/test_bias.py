"""Bias of a packed projection: added before the norm, the rotation and the cache; and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.catalogue.layouts import constant, expanded, off_by_one, stepped
from tests.ops.heads.test import (
    COMBINED,
    HEADS,
    ROTATION,
    SLOTS,
    apart,
    cache_contents,
    check,
    check_caches,
    expected_tokens,
    normal,
    packed,
    with_caches,
)
from tests.support.covering import covering
from weft.lab.calls import assert_same, backward, results, run, upstreams
from weft.lab.families import Call
from weft.runtime import choosing_for


def biased(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    call = packed(**options)
    return call.with_(bias=normal(call["qkv"].shape[-1], seed=7, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.slow if i % 2 else ()) for i, options in enumerate(COMBINED)],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_options(options: dict[str, Any]) -> None:
    check(biased(**options))


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_configuration_of(target: str) -> None:
    """Several tokens and heads per program, an odd number of heads, and more tokens than one program sums."""
    with choosing_for(target):
        check(biased(tokens=37, heads=6, kv_heads=3, **COMBINED[1]))
        check(biased(tokens=37, heads=3, kv_heads=1, v_dim=10, style="interleaved"))
        check(biased(torch.float32, tokens=150, heads=2, kv_heads=1, gate=True))


@pytest.mark.parametrize("options", [COMBINED[1], COMBINED[3], COMBINED[5]], ids=str)
def test_the_bias_is_added_in_fp32(options: dict[str, Any]) -> None:
    """All results and the input's gradient have the bits of adding the bias in fp32 and rounding once; the bias
    gradient is the sum of the rounded input gradient."""
    call = biased(**options)
    wide = call["qkv"].float() + call["bias"].float()
    got = run(call)
    gradients = upstreams(results(call.requiring_grad()))
    plain = {n: t for n, t in call.kwargs.items() if n != "bias"}
    wanted = run(
        Call(call.function, {**plain, "qkv": wide}), {name: g.float() for name, g in gradients.items()}
    )
    names = {name for name in wanted if "weight" not in name and "bias" not in name}
    assert "dqkv" in names
    assert_same({n: got[n] for n in names}, {n: wanted[n].bfloat16() for n in names}, "the sum in fp32")
    rounded = (call["qkv"] + call["bias"])[..., -8:]
    assert not torch.equal(rounded.float(), wide[..., -8:])


def test_gradients_of_a_subset() -> None:
    call = biased(qk_norm="rms")
    full = run(call)
    gradients = upstreams(results(call.requiring_grad()))
    for names in (("bias",), ("qkv",), ("bias", "q_weight"), ("k_weight",)):
        leaves = {name: call[name].clone().requires_grad_() for name in names}
        got = backward(call.with_(**leaves), results(call.with_(**leaves)), gradients)
        assert_same(got, {f"d{name}": full[f"d{name}"] for name in names}, str(names))


@pytest.mark.parametrize("layout", [stepped, off_by_one, constant], ids=lambda f: f.__name__)
def test_layouts(layout: Any) -> None:
    """Any strides of the bias and of upstream gradients give the same bits."""
    call = biased(qk_norm="rms", tokens=7)
    bias = layout(call["bias"])
    wanted = run(call.with_(bias=bias.contiguous().clone()))
    assert_same(run(call.with_(bias=bias)), wanted, "the bias")
    assert torch.equal(run(call.with_(bias=call["bias"].clone()))["dbias"], run(call)["dbias"])
    gradients = upstreams(results(call.requiring_grad()))
    for change in (layout, expanded):
        laid_out = {name: change(g) for name, g in gradients.items()}
        close = {name: g.contiguous().clone() for name, g in laid_out.items()}
        assert_same(run(call, laid_out), run(call, close), "gradients")


def test_empty_inputs() -> None:
    got = run(biased(tokens=0))
    assert not got["dbias"].count_nonzero()
    assert got["dbias"].shape == (8 * 24,)


@pytest.mark.parametrize(
    ("fp8", "target"),
    covering((False, True), ("cpu", "sm_90"), together=1),
    ids=lambda value: {False: "same", True: "fp8"}.get(value, value),
)
def test_cache(fp8: bool, target: str) -> None:
    """Cached k and v include the bias: the returned bits, or codes of the fp32 sum."""
    call = with_caches(biased(gate=True, packing="groups", v_dim=40, rope_dim=12, qk_norm="rms"), fp8)
    with choosing_for(target):
        got = call()
        check_caches(call, expected_tokens(call))
        plain = call.with_(cache=None, slots=None, cache_scales=None)()
    assert_same(dict(zip("qkvg", got, strict=True)), dict(zip("qkvg", plain, strict=True)), "results")
    again = with_caches(call, fp8)
    with weft.backend("reference"):
        again.with_(qk_norm=None, rope_dim=None, cos=None, sin=None)()
    bare = with_caches(call, fp8).with_(qk_norm=None, rope_dim=None, cos=None, sin=None)
    bare()
    assert_same(dict(enumerate(cache_contents(again))), dict(enumerate(cache_contents(bare))), "reference")
    with pytest.raises(ValueError, match="for inference"):
        call.with_(bias=call["bias"].clone().requires_grad_())()


def prepared(qkv: Tensor, bias: Tensor) -> Any:
    return weft.qkv_prepare(qkv, heads=HEADS, bias=bias, rotation=ROTATION, out_layout="bhsd")[:3]


def cached(qkv: Tensor, bias: Tensor, kv: Tensor) -> Any:
    cache = weft.KVCache(kv[0], kv[1])
    return weft.qkv_prepare(qkv, heads=HEADS, bias=bias, rotation=ROTATION, cache=cache, slots=SLOTS)[:3]


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 8):
        runs = []
        for f in (prepared, compiled):
            leaves = [normal(2, tokens, 8 * 24).requires_grad_(), normal(8 * 24, seed=1).requires_grad_()]
            outputs = f(*leaves)
            gradients = torch.autograd.grad(outputs, leaves, [normal(*o.shape, seed=3) for o in outputs])
            runs.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
        assert_same(runs[1], runs[0], f"compiled with {tokens} tokens")
    runs = []
    for f in (cached, torch.compile(cached, fullgraph=True, backend="aot_eager")):
        kv = torch.zeros(2, 16, 2, 24).bfloat16()
        outputs = f(normal(2, 5, 8 * 24), normal(8 * 24, seed=1), kv)
        runs.append({str(i): t for i, t in enumerate((*outputs, kv))})
    assert_same(runs[1], runs[0], "compiled with a cache")


def test_opcheck() -> None:
    call = biased(qk_norm="rms", gate=True)
    opcheck("qkv_prepare", arguments_of(call.requiring_grad(), "qkv_prepare", results)[0])
    opcheck("qkv_prepare_backward", arguments_of(call, "qkv_prepare_backward")[0])
    cached = with_caches(call, False, "slots")
    for t in cached["cache"]:
        t.zero_()
    opcheck("qkv_prepare_cached", arguments_of(cached, "qkv_prepare_cached", results)[0])


def test_gradcheck_of_the_reference() -> None:
    call = biased(
        tokens=2, dim=6, rope_dim=4, heads=2, kv_heads=1, gate=True, qk_norm="layer", norm_after=True
    )
    doubled = call.with_(**{name: call[name].double() for name in call.tensors()})
    inputs = [doubled[name].requires_grad_() for name in ("qkv", "bias")]
    assert torch.autograd.gradcheck(lambda x, bias: doubled.with_(qkv=x, bias=bias)(), inputs)


def test_wrong_calls() -> None:
    call = biased()
    for wrong, message in (
        (call["bias"][1:], r"bias must have the shape \(192,\)"),
        (call["bias"].long(), "bias must be bfloat16"),
        (call["bias"].to("meta"), "bias must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            call.with_(bias=wrong)()
    with pytest.raises(TypeError, match="bias must be a tensor"):
        call.with_(bias=[0.0] * 192)()
    with pytest.raises(ValueError, match="add each bias in its own projection"):
        apart().with_(bias=call["bias"])()
