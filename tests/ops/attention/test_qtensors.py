"""Every tensor argument of the attention ops as a `QTensor` in every format: correct, or refused with a clear error.

Correct means close to float64 attention of the dequantized values, for results and gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.support.covering import covering
from weft.ops.attention.attention import attention_op
from weft.quant import PLAIN, Codes
from weft.runtime import catalogue, choosing_for

# One convention per block and element suffices: conventions differ in how codes are computed, not in how they are read.
FORMATS = sorted({weft.Format(f.block, f.element).spec for f in weft.Format.all()})
FORMATS += ["e2m1:nvfp4:te:hadamard-columnwise", "e4m3:row:vllm", "int8:row:torchao"]
FEW = ["int8:row:te", "e4m3:1x128:te:pow2", "e2m1:nvfp4:te"]
REFUSALS = (ValueError, TypeError, NotImplementedError)
Call = Callable[..., Any]


def exact(x: Tensor) -> Tensor:
    return x.dequantize(torch.float64) if isinstance(x, weft.QTensor) else x.double()


def attention_in_fp64(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal attention of heads [batch, heads, tokens, dim] and its lse step by step."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    with_sink = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return with_sink.softmax(-1)[..., :-1] @ value, with_sink.logsumexp(-1)


def causal(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    result = weft.attention(query, key, value, sinks=sinks, is_causal=True, return_lse=True)
    assert isinstance(result, weft.Attention)
    return result.out, result.lse


def decode(query: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from the last queries of one sequence, with keys and values [tokens, heads, dim] as pages of a cache."""
    pages = [x.view(2, 20, 2, 128) for x in (k, v)]
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([40])
    cache = weft.KVCache(*pages)
    result = weft.attention_decode(
        query, cache, page_table=table, lengths=length, sinks=sinks, return_lse=True
    )
    return result.out, result.lse  # type: ignore[union-attr]


def decode_in_fp64(query: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    heads = (x.view(1, 40, 2, 128).transpose(1, 2) for x in (k, v))
    out, lse = attention_in_fp64(query.transpose(1, 2), *heads, sinks)
    return out.transpose(1, 2), lse


def latents(query: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([40])
    cache = weft.KVCache(k.view(2, 20, 1, 576))
    options: Any = {"page_table": table, "lengths": length, "scale": 0.05, "return_lse": True}
    result = weft.mla_decode(query, cache, **options)
    return result.out, result.lse  # type: ignore[union-attr]


def latents_in_fp64(query: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("bqhd,kd->bhqk", query, k.view(40, 576)) * 0.05
    scores = scores.masked_fill(torch.ones(3, 40, dtype=torch.bool).triu(38), float("-inf"))
    out = torch.einsum("bhqk,kd->bqhd", scores.softmax(-1), k.view(40, 576)[:, :512])
    return out, scores.logsumexp(-1)


def merge(one: Tensor, other: Tensor, lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    result = weft.merge_attention([one, other], [lse, other_lse])
    return result.out, result.lse


def merge_in_fp64(one: Tensor, other: Tensor, lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    weights = ((each - total).exp()[..., None] for each in (lse, other_lse))
    return next(weights) * one + next(weights) * other, total


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


OPS: dict[str, tuple[Call, Call, dict[str, Tensor]]] = {
    "attention": (
        causal,
        attention_in_fp64,
        drawn(query=(1, 4, 37, 128), key=(1, 2, 37, 128), value=(1, 2, 37, 128), sinks=(4,)),
    ),
    "attention_decode": (
        decode,
        decode_in_fp64,
        drawn(query=(1, 3, 4, 128), k=(40, 2, 128), v=(40, 2, 128), sinks=(4,)),
    ),
    "mla_decode": (latents, latents_in_fp64, drawn(query=(1, 3, 4, 576), k=(40, 576))),
    "merge_attention": (
        merge,
        merge_in_fp64,
        drawn(one=(1, 4, 37, 128), other=(1, 4, 37, 128), lse=(1, 4, 37), other_lse=(1, 4, 37)),
    ),
}
ARGUMENTS = [(op, name) for op, (_, _, inputs) in OPS.items() for name in inputs]
DIFFERENTIABLE = [(op, name) for op, name in ARGUMENTS if "decode" not in op]


@contextmanager
def mode(name: str, call: Call) -> Iterator[Call]:
    torch._dynamo.reset()
    with weft.backend("reference" if name == "reference" else "auto"):
        yield torch.compile(call, backend="aot_eager", fullgraph=True) if name == "compiled" else call


def judge(result: tuple[Tensor, ...], wanted: tuple[Tensor, ...], what: str) -> None:
    for one, other in zip(result, wanted, strict=True):
        assert one.shape == other.shape
        assert exact(one).sub(other).abs().max() <= 2e-5 * other.abs().max().clamp(min=1), what


def quantized(inputs: dict[str, Tensor], names: tuple[str, ...], spec: str) -> dict[str, Tensor]:
    return {name: weft.quantize(x, spec) if name in names else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("op", "spec"),
    [
        pytest.param(op, spec, marks=[] if op == "attention" or spec in FEW else [pytest.mark.slow])
        for op in OPS
        for spec in FORMATS
    ],
)
def test_a_qtensor_in_any_format_is_read_as_its_values(op: str, spec: str) -> None:
    call, in_fp64, inputs = OPS[op]
    for names in [*((name,) for name in inputs), *itertools.combinations(inputs, 2), tuple(inputs)]:
        mixed = quantized(inputs, names, spec)
        judge(call(**mixed), in_fp64(*map(exact, mixed.values())), f"{op} of {names}")


@pytest.mark.parametrize(
    ("how", "spec", "at"), covering(["compiled", "reference"], FEW, ARGUMENTS, together=1)
)
def test_qtensors_compiled_and_in_the_reference(how: str, spec: str, at: tuple[str, str]) -> None:
    op, name = at
    call, in_fp64, inputs = OPS[op]
    others = ("query", "key") if name == "query" and "key" in inputs else (name,)
    for names in {(name,), others}:
        mixed = quantized(inputs, names, spec)
        with mode(how, call) as attend:
            judge(attend(**mixed), in_fp64(*map(exact, mixed.values())), f"{op} of {names}")


def gradients(call: Call, inputs: dict[str, Tensor], needed: str, upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = {name: x.detach().requires_grad_(name == needed) for name, x in inputs.items()}
    result = dict(zip(call(**leaves), (upstream, torch.ones((), dtype=exact(upstream).dtype)), strict=True))
    ends = {
        x: g.to(x.dtype).expand(x.shape) if x.dim() == 3 else g for x, g in result.items() if x.requires_grad
    }
    return torch.autograd.grad(tuple(ends), (leaves[needed],), tuple(ends.values()))


GRADIENTS = [(op, name, needed) for op, name in DIFFERENTIABLE for needed in OPS[op][2]]


@pytest.mark.parametrize(
    ("how", "spec", "at"), covering(["eager", "compiled", "reference"], FEW, GRADIENTS, together=1)
)
def test_gradients_beside_a_qtensor(how: str, spec: str, at: tuple[str, str, str]) -> None:
    """The gradient of each argument is correct, also of the quantized one, for which it passes straight through."""
    op, name, needed = at
    call, in_fp64, inputs = OPS[op]
    mixed = quantized(inputs, (name,), spec)
    upstream = torch.randn(1, 4, 37, 128, generator=torch.Generator().manual_seed(1))
    wanted = gradients(in_fp64, {n: exact(x) for n, x in mixed.items()}, needed, upstream.double())
    with mode(how, call) as attend:
        judge(gradients(attend, mixed, needed, upstream), wanted, f"{op}: d{needed} beside {name}")


@pytest.mark.parametrize("how", ["eager", "compiled", "reference"])
@pytest.mark.parametrize("needed", ["query", "value", "sinks"])
def test_gradients_beside_codes_that_scores_could_take(how: str, needed: str) -> None:
    """Query and key are multiplied as codes if no gradient is needed, else dequantized."""
    call, in_fp64, inputs = OPS["attention"]
    mixed = quantized(inputs, ("query", "key"), "int8:row")
    upstream = torch.randn(1, 4, 37, 128, generator=torch.Generator().manual_seed(1))
    wanted = gradients(in_fp64, {n: exact(x) for n, x in mixed.items()}, needed, upstream.double())
    with mode(how, call) as attend:
        judge(gradients(attend, mixed, needed, upstream), wanted, how)


@pytest.mark.parametrize(("spec", "layout"), covering(FORMATS, ["bhsd", "bshd"], together=1))
def test_a_qtensor_as_the_incoming_gradient(spec: str, layout: Any) -> None:
    _, _, inputs = OPS["attention"]
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    leaves = [inputs[name].permute(order).requires_grad_() for name in ("query", "key", "value")]
    upstream = weft.quantize(torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)), spec)
    out = weft.attention(*leaves, is_causal=True, layout=layout)
    result = torch.autograd.grad(out, leaves, upstream)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    heads = (leaf.permute(order) for leaf in doubles)
    wanted, _ = attention_in_fp64(*heads, torch.full((4,), float("-inf"), dtype=torch.float64))
    judge(result, torch.autograd.grad(wanted.permute(order), doubles, exact(upstream)), spec)


@pytest.mark.parametrize("how", ["compiled", "reference"])
def test_a_quantized_gradient_compiled_and_in_the_reference(how: str) -> None:
    call, in_fp64, inputs = OPS["attention"]
    upstream = weft.quantize(torch.randn(1, 4, 37, 128, generator=torch.Generator().manual_seed(1)), "1x128")
    wanted = gradients(in_fp64, {n: x.double() for n, x in inputs.items()}, "key", exact(upstream))
    with mode(how, call) as attend:
        judge(gradients(attend, inputs, "key", upstream), wanted, how)


def test_codes_unsupported_by_the_target_are_dequantized() -> None:
    call, in_fp64, inputs = OPS["attention"]
    mixed = quantized(inputs, ("query", "key"), "e4m3:row")
    with choosing_for("sm_80"):
        judge(call(**mixed), in_fp64(*map(exact, mixed.values())), "e4m3 on sm_80")


def test_qtensors_with_only_a_columnwise_copy() -> None:
    for op, (call, in_fp64, inputs) in OPS.items():
        if op == "attention":
            for names in (("query",), ("query", "key"), ("value",)):
                mixed = {
                    name: weft.quantize(x, "int8:row", rowwise=False, columnwise=True) if name in names else x
                    for name, x in inputs.items()
                }
                wanted = in_fp64(*map(exact, mixed.values()))
                judge(call(**mixed), wanted, f"{names}")
                with mode("compiled", call) as attend:
                    judge(attend(**mixed), wanted, f"{names}, compiled")


# ---- every format, operand, copy and way to call ------------------------------------------------------------

OPERANDS = [("query",), ("key",), ("value",), ("query", "key"), ("query", "key", "value")]
COPIES: dict[str, dict[str, bool]] = {
    "rowwise": {},
    "columnwise": {"rowwise": False, "columnwise": True},
    "both": {"columnwise": True},
}
HOWS = ["no_grad", "grad", "compiled", "captured", "reference", "op", "torch.ops"]


def every_case() -> list[Any]:
    """Return cases in which each value occurs, and as slow tests cases in which each two values occur together."""
    choices = (FORMATS, OPERANDS, list(COPIES), HOWS)
    few, pairs = (
        {case.values for case in covering(*choices, together=together) if not case.marks}
        for together in (1, 2)
    )
    return [pytest.param(*case) for case in sorted(few)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in sorted(pairs - few)
    ]


def called(how: str, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Call attention in one of several ways; the op itself may refuse codes that it cannot multiply."""
    call, _, plain = OPS["attention"]
    if how == "grad":
        return call(**{name: x.detach().requires_grad_() for name, x in inputs.items()})  # type: ignore[no-any-return]
    if how == "captured":
        heads = {name: x for name, x in inputs.items() if name != "sinks"}
        return weft.capture(lambda sinks: call(**heads, sinks=sinks), inputs["sinks"])(inputs["sinks"])
    if how in ("op", "torch.ops"):
        a = recorded(lambda: call(**plain))._replace(**inputs)
        if how == "op":
            outputs = attention_op(a)
            return outputs.result.y, outputs.lse
        return tuple(torch.ops.weft.attention(*attention_op.arguments.flatten(a))[:2])
    with mode(how, call) as attend, torch.no_grad():
        return attend(**inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("spec", "names", "copies", "how"), every_case())
def test_no_qtensor_is_misread(spec: str, names: tuple[str, ...], copies: str, how: str) -> None:
    """Each is multiplied as it is or dequantized; a direct call of the op may also refuse it."""
    _, in_fp64, inputs = OPS["attention"]
    mixed = {
        name: weft.quantize(x, spec, **COPIES[copies]) if name in names else x for name, x in inputs.items()
    }
    try:
        result = called(how, mixed)
    except ValueError as error:
        if how not in ("op", "torch.ops") or "codes of query and key in one format" not in str(error):
            raise
        return
    judge(tuple(x.detach() for x in result), in_fp64(*map(exact, mixed.values())), f"{names} {how}")


PAIRS = [("int8:row", "e4m3:row"), ("e4m3:row", "e4m3:mx"), ("e4m3:mx", "int8:row"), ("e4m3:mx", "e5m2:mx")]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("how", ["no_grad", "compiled"])
def test_codes_of_different_formats_are_dequantized(pair: tuple[str, str], how: str) -> None:
    """Each of them could be multiplied beside one of its own format; of conventions, any two can."""
    _, in_fp64, inputs = OPS["attention"]
    mixed = inputs | {
        name: weft.quantize(inputs[name], s) for name, s in zip(("query", "key"), pair, strict=True)
    }
    judge(called(how, mixed), in_fp64(*map(exact, mixed.values())), f"{pair}")
    same = inputs | {
        name: weft.quantize(inputs[name], f"e4m3:mx:{s}")
        for name, s in (("query", "te"), ("key", "deepgemm"))
    }
    judge(called(how, same), in_fp64(*map(exact, same.values())), "conventions")


def test_copies_of_different_sides_are_dequantized() -> None:
    call, in_fp64, inputs = OPS["attention"]
    for spec in ("int8:row", "e4m3:mx"):
        mixed = quantized(inputs, ("query",), spec)
        mixed["key"] = weft.quantize(inputs["key"], spec, **COPIES["columnwise"])
        judge(call(**mixed), in_fp64(*map(exact, mixed.values())), spec)


def test_indices_that_are_qtensors_are_refused() -> None:
    inputs = drawn(query=(40, 4, 128), key=(40, 2, 128))
    floats = weft.quantize(torch.ones(2), "tensor")
    with pytest.raises(REFUSALS, match="cu_seqlens must be int32 or int64"):
        weft.attention(inputs["query"], inputs["key"], inputs["key"], cu_seqlens=floats)
    with pytest.raises(REFUSALS, match="cu_seqlens must be int32 or int64"):
        weft.attention(inputs["query"], inputs["key"], inputs["key"], cu_seqlens=floats, kv_lengths=floats)


# ---- direct calls of the op ---------------------------------------------------------------------------------


def recorded(call: Callable[[], Any]) -> Any:
    """Return the arguments of the attention op in a call."""
    arguments: list[Any] = []
    launch = attention_op.launch
    object.__setattr__(attention_op, "launch", lambda o, a: (arguments.append(a), launch(o, a)))
    try:
        call()
    finally:
        object.__setattr__(attention_op, "launch", launch)
    return arguments[0]


def op_arguments(spec: str = "int8:row", **changed: Any) -> Any:
    """Return the op's arguments in a public call with codes of query and key."""
    _, _, inputs = OPS["attention"]
    q, k = (weft.quantize(inputs[n], spec) for n in ("query", "key"))
    return recorded(lambda: weft.attention(q, k, inputs["value"]))._replace(**changed)


def broken_codes() -> Iterator[tuple[str, dict[str, Any], str]]:
    a = op_arguments()
    other = weft.quantize(OPS["attention"][2]["query"], "e5m2:row").rowwise
    assert other is not None
    for name in ("query_codes", "key_codes"):
        codes: Codes = getattr(a, name)
        yield f"{name} without their format", {name: codes._replace(format=None)}, "in one format"
        yield f"{name} alone", {name: PLAIN}, "in one format"
        yield (
            f"{name} in a format of other blocks",
            {name: codes._replace(format="int8:1x128:te:pow2")},
            "in one format",
        )
        yield (
            f"{name} in another format than the other",
            {name: codes._replace(format="e4m3:row:te")},
            "in one format",
        )
        yield f"{name} without data", {name: codes._replace(data=None)}, "codes in torch.int8; got none"
        yield (
            f"{name} without scales",
            {name: codes._replace(scale=None)},
            "scales in torch.float32; got none",
        )
        yield (
            f"{name} with a global_scale",
            {name: codes._replace(global_scale=torch.ones(()))},
            "has no global_scale",
        )
        yield f"{name} of another dtype", {name: codes._replace(data=other.data)}, "codes in torch.int8; got"
        yield (
            f"{name} with too few scales",
            {name: codes._replace(scale=codes.scale[:7])},
            "scales in torch.float32; got",
        )  # type: ignore[index]
    yield (
        "codes of values alone",
        {"query_codes": PLAIN, "key_codes": PLAIN, "values": "e4m3"},
        "go with codes",
    )


def test_the_op_refuses_groups_that_it_would_misread() -> None:
    a = op_arguments("e4m3:mx")
    codes: Codes = a.key_codes
    assert codes.scale is not None
    attention_op(a)
    for changed, message in (
        (codes._replace(scale=codes.scale[:7]), "scales in torch.float8_e8m0fnu; got"),
        (codes._replace(scale=codes.scale.float()), "scales in torch.float8_e8m0fnu; got"),
        (codes._replace(format="e4m3:row:te"), "in one format"),
        (codes._replace(data=codes.data.view(torch.int8)), "codes in torch.float8_e4m3fn; got"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_op(a._replace(key_codes=changed))


@pytest.mark.parametrize(
    ("spec", "values", "target"),
    [("e4m3:mx", None, "sm_90"), ("e4m3:row", None, "sm_80"), ("int8:row", "e4m3", "gfx942")],
)
def test_the_op_refuses_codes_that_the_target_cannot_multiply(spec: str, values: Any, target: str) -> None:
    a = op_arguments(spec)
    with choosing_for(target), pytest.raises(ValueError, match=f"{target} cannot multiply e4m3"):
        attention_op(a._replace(values=values))


def test_the_op_refuses_unknown_values() -> None:
    with pytest.raises(ValueError, match="values must be"):
        attention_op(op_arguments(values="e5m2"))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_op_refuses_codes_that_it_would_misread(backend: Any) -> None:
    a, broken = op_arguments(), list(broken_codes())
    with weft.backend(backend):
        assert attention_op(a).result.y.isfinite().all()
        for what, changed, message in broken:
            with pytest.raises(ValueError, match=message):
                raise AssertionError(f"{what}: {attention_op(a._replace(**changed))}")


def test_the_op_refuses_gradients_through_codes() -> None:
    """Backward reads query and key, and the tensors that stand in for codes hold no data."""
    a = op_arguments()
    with pytest.raises(ValueError, match="for inference"):
        attention_op(a._replace(value=a.value.clone().requires_grad_()))


def test_the_decode_op_refuses_caches_that_it_would_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _, inputs = OPS["attention_decode"]
    recorded: list[Any] = []
    op = catalogue["attention_decode"]
    launch = op.launch
    with monkeypatch.context() as patch:
        patch.setattr(op, "launch", lambda o, a: (recorded.append(a), launch(o, a)))
        call(**inputs)
    codes, scale = torch.zeros(2, 20, 2, 128, dtype=torch.int8), torch.ones(2)
    for changed in (
        {"k": codes, "v": codes},
        {"k": codes, "v": codes, "k_scale": scale},
        {"k": codes, "k_scale": scale, "v_scale": scale},
        {"k_scale": scale, "v_scale": scale},
        {"v": codes, "v_scale": scale},
        {"k": codes.view(torch.uint8), "v": codes.view(torch.uint8)},
        {"k": codes, "v": codes, "k_scale": scale, "v_scale": scale.double()},
        {"k": codes, "v": codes, "k_scale": scale, "v_scale": torch.ones(3)},
    ):
        for backend in ("auto", "reference"):
            with weft.backend(backend), pytest.raises(ValueError, match="cache"):  # type: ignore[arg-type]
                raise AssertionError(f"{list(changed)}: {op(recorded[0]._replace(**changed))}")
