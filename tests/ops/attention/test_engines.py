"""Engines of attention: the table, calls that fall back to Weft's own kernels, recording, and library calls.

PyTorch's CPU kernel runs for real. GPU kernels are called with their own argument lists: PyTorch's on meta tensors,
other libraries' on stand-ins that compute on a CPU what the library documents.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from tests.ops.attention.test import heads, packed
from weft.ops.attention import engines, libraries
from weft.ops.attention.arguments import (
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionGradients,
    AttentionOutputs,
    Mask,
    Packed,
)
from weft.ops.attention.engines import TABLE, all_see, attention_on, choose_library
from weft.ops.attention.libraries import LIBRARIES, Library, attend, attend_backward
from weft.ops.attention.reference import visible
from weft.ops.common.results import Result, plain_result
from weft.quant import PLAIN
from weft.runtime import Capabilities, recording

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NO_MASK, CAUSAL = Mask(None, None, True), Mask(None, 0, True)


def library(name: str) -> Library:
    (match,) = (each for each in LIBRARIES if each.name == name)
    return match


def run(upstream: Tensor | None = None, dlse: Tensor | None = None, **call: Any) -> list[Tensor]:
    """Return the result, lse, and the gradients of query, key and value."""
    leaves = {name: call[name].detach().requires_grad_() for name in ("query", "key", "value")}
    result = weft.attention(**call | leaves | {"return_lse": True})
    assert isinstance(result, weft.Attention)
    if upstream is None:
        upstream = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(9)).to(
            result.out.dtype
        )
    outs, grads = ([result.out], [upstream]) if dlse is None else ([result.out, result.lse], [upstream, dlse])
    return [
        result.out.detach(),
        result.lse.detach(),
        *torch.autograd.grad(outs, list(leaves.values()), grads),
    ]


def engines_used(**call: Any) -> list[str]:
    """Return the engines of a forward and a backward."""
    with weft.record_engines() as used:
        run(**call)
    assert [one.backward for one in used] == [False, True]
    return [one.engine for one in used]


# ---- the table ----------------------------------------------------------------------------------------------


def test_the_table_names_known_libraries() -> None:
    names = [each.name for each in LIBRARIES]
    assert len(set(names)) == len(names)
    assert {each.engine for each in LIBRARIES} | {"auto", "weft"} == set(engines.ENGINES)
    for rule in TABLE:
        entry = library(rule.library)
        assert set(rule.targets) <= set(entry.targets)
        assert rule.why
        assert not rule.backward or entry.backward is not None
        assert all(Capabilities.of(target) for target in rule.targets)


def test_attention_on_describes_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_on("cpu") == "torch (PyTorch on CPUs): bf16, fp16 forward; weft: the others"
    assert attention_on("sm_80") == attention_on("gfx950") == "weft"
    monkeypatch.setitem(engines._BY_NAME, "cuDNN", library("cuDNN")._replace(missing=lambda: None))
    missing = "fa3 (FlashAttention-3): not without the module flash_attn_interface"
    assert attention_on("sm_90") == f"{missing}; torch (cuDNN): bf16, fp16 forward; weft: the others"


def test_what_ran_is_recorded() -> None:
    call = heads(20, 30, q=6, dim=32, dtype=BF16)
    with weft.record_engines() as outer, weft.record_engines() as inner:
        run(**call)
        weft.matmul(torch.ones(2, 3), torch.ones(3, 4))
    assert outer == inner
    assert [type(one).__name__ for one in outer] == ["Attended", "Attended", "Used"]
    assert outer[0] == ("torch", "PyTorch on CPUs", False, 20, 30, 6, 32)
    assert outer[1] == ("weft", "Weft", True, 20, 30, 6, 32)
    with weft.record_engines() as outer:
        with weft.record_engines() as inner:
            pass
        run(**call, engine="weft")
    assert (len(outer), inner) == (2, [])


# ---- PyTorch's kernel for CPUs --------------------------------------------------------------------------------


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        ({"queries": 150}, {}),
        ({"queries": 150, "q": 6, "kv": 1, "dim": 72}, {"is_causal": True}),
        ({"queries": 40, "keys": 170, "batch": 2}, {"is_causal": True, "causal_align": "upper_left"}),
        ({"queries": 170, "keys": 40, "dim": 33}, {"is_causal": True, "causal_align": "upper_left"}),
        ({"queries": 1, "keys": 90}, {"scale": 0.5}),
    ],
)
def test_torch_is_as_accurate(dtype: torch.dtype, sizes: dict[str, Any], mask: dict[str, Any]) -> None:
    """PyTorch's error is at most 1.1 times that of Weft's own kernels. Its lse was measured to be off by up to 7e-5;
    1e-4 is allowed. The gradients come from Weft's own kernels after PyTorch's forward."""
    call = heads(**sizes, dtype=dtype) | mask
    exact = run(**call | {name: call[name].double() for name in ("query", "key", "value")})
    own, auto = run(**call, engine="weft"), run(**call)
    assert engines_used(**call) == ["torch", "weft"]
    for i, (ours, theirs, truth) in enumerate(zip(own, auto, exact, strict=True)):
        assert theirs.dtype == ours.dtype
        assert theirs.stride() == ours.stride()
        allowed = 1e-4 if i == 1 else 1.1 * error(ours, truth) + 1e-7
        assert error(theirs, truth) <= allowed, i


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_requiring_torch_gives_its_bits(layout: str, dtype: torch.dtype) -> None:
    """Forward and backward have the bits of F.scaled_dot_product_attention."""
    inputs = heads(90, batch=2, dtype=dtype)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
    back = [order.index(i) for i in range(4)]
    call = {name: x.permute(order) for name, x in inputs.items()}
    assert engines_used(**call, layout=layout, is_causal=True, engine="torch") == ["torch", "torch"]
    upstream = torch.randn(2, 4, 90, 64).to(dtype)
    result = run(upstream.permute(order), **call, layout=layout, is_causal=True, engine="torch")
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(wanted, leaves, upstream)
    for one, other in zip([result[0], *result[2:]], [wanted, *grads], strict=True):
        assert torch.equal(one.permute(back), other)


def test_any_strides() -> None:
    """PyTorch's kernel reads wrong elements if a head is not contiguous."""
    call = heads(70, dtype=BF16, batch=2) | {"is_causal": True, "engine": "torch"}
    wanted = run(**call)
    transposed = {name: call[name].mT.contiguous().mT for name in ("query", "key", "value")}
    # A 16-byte load would cross from one head into the next.
    odd = {name: F.pad(call[name], (1, 2))[..., 1:-2] for name in ("query", "key", "value")}
    second = {name: call[name].repeat_interleave(2, -1)[..., ::2] for name in ("query", "key", "value")}
    for other in (transposed, odd, second):
        for one, right in zip(run(**call | other), wanted, strict=True):
            assert torch.equal(one, right)
    upstream = torch.randn(64).to(BF16).expand(2, 4, 70, 64)
    for one, right in zip(run(upstream, **call), run(upstream.contiguous(), **call), strict=True):
        assert torch.equal(one, right)


def test_some_gradients() -> None:
    call = heads(50, dtype=BF16)
    wanted = run(**call, engine="torch")
    upstream = torch.randn(1, 4, 50, 64, generator=torch.Generator().manual_seed(9)).to(BF16)
    for i, name in enumerate(("query", "key", "value")):
        leaf = call[name].clone().requires_grad_()
        out = weft.attention(**call | {name: leaf}, engine="torch")
        assert torch.equal(torch.autograd.grad(out, leaf, upstream)[0], wanted[2 + i])


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_compiled(engine: Any) -> None:
    call = heads(60, dtype=BF16) | {"is_causal": True}

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return weft.attention(query, key, value, is_causal=True, engine=engine).float().square().sum()

    leaves = [call[name].clone().requires_grad_() for name in ("query", "key", "value")]
    wanted = loss(*leaves)
    grads = torch.autograd.grad(wanted, leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with weft.record_engines() as used:
        result = compiled(*leaves)
        found_grads = torch.autograd.grad(result, leaves)
    assert [one.engine for one in used] == ["torch", "weft" if engine == "auto" else "torch"]
    assert torch.equal(result, wanted)
    for one, other in zip(found_grads, grads, strict=True):
        assert torch.equal(one, other)


def test_a_graph_refuses_when_it_runs() -> None:
    call = heads(20, dtype=BF16)
    compiled = torch.compile(weft.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="engine='torch' lacks softcap"):
        compiled(**call, softcap=3.0, engine="torch")


# ---- calls that fall back to Weft ------------------------------------------------------------------------------

LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": (heads(20, dtype=BF16) | {"sinks": torch.zeros(4)}, "sinks"),
    "softcap": (heads(20, dtype=BF16) | {"softcap": 5.0}, "softcap"),
    "window": (heads(20, dtype=BF16) | {"window": (5, 0)}, "window"),
    "left of a causal mask": (heads(20, dtype=BF16) | {"window": (5, None), "is_causal": True}, "window"),
    "packed": (packed([9, 11], dtype=BF16), "packed sequences"),
    "kv_lengths": (heads(20, dtype=BF16) | {"kv_lengths": torch.tensor([7])}, "kv_lengths"),
    "alignment": (
        heads(20, 30, dtype=BF16) | {"is_causal": True, "causal_align": "lower_right"},
        "this causal_align",
    ),
    "widths": (heads(20, dim=64, v_dim=32, dtype=BF16), "heads of 64 and 32"),
    "no keys": (heads(20, 0, dtype=BF16), "0 keys"),
    "return_max": (heads(20, dtype=BF16) | {"return_max": True}, "return_max"),
    "quantize": (heads(20, dim=128, dtype=BF16) | {"quantize": "1x128"}, "a quantized result"),
}


@pytest.mark.parametrize("case", LACKS)
def test_what_torch_lacks_is_left_to_weft(case: str) -> None:
    call, words = LACKS[case]
    with weft.record_engines() as used:
        weft.attention(**call)
    assert [one.engine for one in used] == ["weft"]
    with weft.record_engines() as used, pytest.raises(ValueError, match=f"engine='torch' lacks .*{words}"):
        weft.attention(**call, engine="torch")
    assert used == []


def test_fp32_is_left_to_weft_unless_torch_is_required() -> None:
    assert engines_used(**heads(20)) == ["weft", "weft"]
    assert engines_used(**heads(20), engine="torch") == ["torch", "torch"]


def test_all_see_agrees_with_the_mask() -> None:
    bounds = (None, 0, 1, 3)
    for left, right, lower, queries, keys in itertools.product(
        bounds, bounds, (True, False), range(1, 7), range(1, 7)
    ):
        mask = Mask(left, right, lower)
        seen = visible(queries, keys, mask, torch.device("cpu")).any(1).all()
        assert all_see(mask, queries, keys) == bool(seen), (mask, queries, keys)


@pytest.mark.parametrize("queries", [70, 800])
def test_threads_change_no_bit(queries: int) -> None:
    """Neither the number of threads nor the batch changes a bit."""
    call = heads(queries, batch=3, dtype=BF16) | {"is_causal": True, "engine": "torch"}
    result = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        result.append(run(**call))
    upstream = torch.randn(3, 4, queries, 64, generator=torch.Generator().manual_seed(9)).to(BF16)
    alone = {name: call[name][1:2] for name in ("query", "key", "value")}
    for one, other, own in zip(*result, run(upstream[1:2], **call | alone), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[1:2], own)


def test_a_gradient_of_lse_is_left_to_weft() -> None:
    call, dlse = heads(20, dtype=BF16), torch.randn(1, 4, 20)
    assert engines_used(**call, engine="torch", dlse=dlse) == ["torch", "weft"]
    for one, other in zip(
        run(**call, engine="torch", dlse=dlse)[2:], run(**call, engine="weft", dlse=dlse)[2:], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)


def test_unsupported_engines_are_refused() -> None:
    call = heads(20, dtype=BF16)
    with pytest.raises(ValueError, match=r"engine must be 'auto', 'weft', .* or 'aiter'; got 'cudnn'"):
        weft.attention(**call, engine="cudnn")  # type: ignore[call-overload]
    for engine in ("fa2", "fa3", "fa4", "aiter"):
        with pytest.raises(ValueError, match=f"engine='{engine}' lacks kernels for cpu"):
            weft.attention(**call, engine=engine)


def test_a_call_is_refused_before_anything_runs() -> None:
    """Unsupported calls raise early, also those that launch no kernel."""
    with weft.backend("reference"), pytest.raises(ValueError, match="engine='torch' lacks softcap"):
        weft.attention(**heads(20, dtype=BF16), softcap=3.0, engine="torch")
    with pytest.raises(ValueError, match="engine='fa2' lacks kernels for cpu"):
        weft.attention(**heads(0, dtype=BF16), engine="fa2")


def test_recording_calls_no_library() -> None:
    """Bundles of kernels need Weft's own, which run where a library is missing."""
    call = {name: torch.empty(x.shape, dtype=BF16, device="meta") for name, x in heads(128, dim=128).items()}
    for engine in ("auto", "fa3"):
        with recording("sm_90") as variants:
            weft.attention(**call, is_causal=True, engine=engine)  # type: ignore[call-overload]
        assert {variant.kernel for variant in variants} == {"attention_kernel"}


# ---- choice on GPUs -------------------------------------------------------------------------------------------


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all libraries are installed."""
    installed = tuple(each._replace(missing=lambda: None) for each in LIBRARIES)
    monkeypatch.setattr(engines, "LIBRARIES", installed)
    monkeypatch.setattr(engines, "_BY_NAME", {each.name: each for each in installed})


@pytest.fixture
def gpu() -> Iterator[Callable[..., AttentionArgs]]:
    """Provide a function that makes arguments of a forward on a fake GPU."""

    def make(**options: Any) -> AttentionArgs:
        dtype = options.pop("dtype", BF16)
        q, k = options.pop("queries", 64), options.pop("keys", 64)
        dim, v_dim = options.pop("dim", 128), options.pop("v_dim", 128)
        lead = () if options.get("layout") == "thd" else (2,)
        shapes = ((*lead, q, 8, dim), (*lead, k, 2, dim), (*lead, k, 2, v_dim))
        query, key, value = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        plain = arguments(query, key, value, **{"layout": "bshd"} | options)
        return plain

    with FakeTensorMode():
        yield make


def arguments(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> AttentionArgs:
    plain = AttentionArgs(
        query, key, value, PLAIN, PLAIN, None, None, Packed(None, None, None), NO_MASK, 0.125, 0.0, "bhsd", False,
        "auto", plain_result(query.dtype),
    )  # fmt: skip
    return plain._replace(**options)


def backward_of(
    a: AttentionArgs, y: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> AttentionBackwardArgs:
    return AttentionBackwardArgs(
        y, dlse, y, lse, a.query, a.key, a.value, a.sinks, a.packed, a.mask, a.scale, a.softcap, a.layout,
        a.engine, AttentionGradients(True, True, True, False, False, False),
    )  # fmt: skip


def chosen(a: AttentionArgs | AttentionBackwardArgs, target: str) -> str:
    choice = choose_library(a, Capabilities.of(target))
    return "Weft" if choice is None else choice.name


@pytest.mark.usefixtures("everything")
def test_choice_on_gpus(gpu: Callable[..., AttentionArgs]) -> None:
    plain = gpu(mask=CAUSAL)
    for target, name in (
        ("sm_80", "Weft"), ("sm_86", "Weft"), ("sm_89", "Weft"), ("sm_120", "Weft"), ("gfx942", "Weft"),
        ("gfx950", "Weft"), ("sm_90", "FlashAttention-3"), ("sm_100", "FlashAttention-4"),
        ("sm_103", "FlashAttention-4"),
    ):  # fmt: skip
        assert chosen(plain, target) == name
        assert chosen(backward_of(plain, plain.query, plain.query), target) == name
    for engine, target, name in (
        ("torch", "sm_80", "PyTorch flash"), ("torch", "gfx942", "PyTorch flash"), ("torch", "sm_90", "cuDNN"),
        ("fa2", "sm_120", "FlashAttention-2"), ("fa4", "sm_90", "FlashAttention-4"), ("aiter", "gfx950", "AITER"),
    ):  # fmt: skip
        assert chosen(plain._replace(engine=engine), target) == name
    assert chosen(gpu(dim=192, v_dim=192, engine="torch"), "sm_90") == "PyTorch flash"
    assert chosen(gpu(keys=1, engine="torch"), "sm_90") == "PyTorch flash"


def test_without_flash_attention(gpu: Callable[..., AttentionArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gpu(mask=CAUSAL)
    monkeypatch.setitem(engines._BY_NAME, "cuDNN", library("cuDNN")._replace(missing=lambda: "cuDNN"))
    assert [chosen(plain, target) for target in ("sm_90", "sm_100")] == ["Weft", "Weft"]
    monkeypatch.setitem(engines._BY_NAME, "cuDNN", library("cuDNN")._replace(missing=lambda: None))
    assert [chosen(plain, target) for target in ("sm_90", "sm_100")] == ["cuDNN", "cuDNN"]
    # PyTorch has no cuDNN backward with the same bits in every run.
    assert chosen(backward_of(plain, plain.query, plain.query), "sm_90") == "Weft"


STARTS = torch.tensor([0, 5, 64], dtype=torch.int32)
TO_WEFT: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.zeros(8)},
    "kv_lengths": {"packed": Packed(None, None, torch.tensor([3, 4]))},
    "return_max": {"return_max": True},
    "quantized": {"result": plain_result(BF16)._replace(format="e4m3:1x128:te")},
    "fp32": {"dtype": FP32},
    "no keys": {"keys": 0},
    "odd heads": {"dim": 60, "v_dim": 60},
    "latent heads": {"dim": 200, "v_dim": 64},
    "upper left": {"keys": 80, "mask": Mask(None, 0, False)},
    "queries without a key": {"keys": 60, "mask": CAUSAL},
    "window without a key": {"keys": 50, "mask": Mask(3, 13, True)},
    "keys of their own": {"layout": "thd", "packed": Packed(STARTS, STARTS.clone(), None)},
    "more tokens of keys": {"layout": "thd", "packed": Packed(STARTS, STARTS, None), "keys": 70},
}


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("case", TO_WEFT)
def test_what_flash_attention_lacks(case: str, gpu: Callable[..., AttentionArgs]) -> None:
    call = gpu(**TO_WEFT[case])
    for target, engine in (("sm_90", "fa3"), ("sm_100", "fa4"), ("sm_80", "fa2"), ("gfx950", "aiter")):
        assert chosen(call, target) == "Weft"
        with pytest.raises(ValueError, match=f"engine='{engine}' lacks"):
            chosen(call._replace(engine=engine), target)
        if not call.return_max and call.result.format is None:
            backward = backward_of(call, call.query, call.query)._replace(engine=engine)
            assert chosen(backward, target) == "Weft"


HAS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "window": {"mask": Mask(20, 0, True)},
    "window with a key": {"keys": 51, "mask": Mask(3, 13, True)},
    "packed": {"layout": "thd", "packed": Packed(STARTS, STARTS, None)},
    "latent heads": {"dim": 192, "v_dim": 128},
}


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("case", HAS)
def test_what_flash_attention_has(case: str, gpu: Callable[..., AttentionArgs]) -> None:
    call = gpu(**HAS[case])
    assert chosen(call, "sm_90") == "FlashAttention-3"
    assert chosen(call, "sm_100") == "FlashAttention-4"
    assert (
        (chosen(call._replace(engine="fa2"), "sm_80") == "FlashAttention-2")
        if case != "latent heads"
        else True
    )
    for target, engine in (("sm_90", "torch"), ("gfx950", "aiter")):
        if case == "latent heads" or engine == "torch" or case in ("softcap", "window", "packed"):
            with pytest.raises(ValueError, match=f"engine='{engine}' lacks"):
                chosen(call._replace(engine=engine), target)


@pytest.mark.usefixtures("everything")
def test_nondeterministic_backwards_are_not_used(gpu: Callable[..., AttentionArgs]) -> None:
    wide = gpu(dim=256, v_dim=256)
    assert chosen(wide, "sm_90") == "FlashAttention-3"
    assert chosen(backward_of(wide, wide.query, wide.query), "sm_90") == "Weft"
    backward = backward_of(wide, wide.query, wide.query)._replace(engine="torch")
    assert chosen(backward, "sm_90") == "Weft"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(backward, "sm_90") == "PyTorch flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen(backward, "sm_90") == "Weft"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("everything")
def test_a_gradient_of_lse_goes_to_weft(gpu: Callable[..., AttentionArgs]) -> None:
    call = gpu()
    lse = torch.empty(2, 8, 64, device="cuda")
    assert chosen(backward_of(call, call.query, lse), "sm_90") == "FlashAttention-3"
    assert chosen(backward_of(call, call.query, lse, lse), "sm_90") == "Weft"


@pytest.mark.usefixtures("everything")
def test_tensors_on_a_cpu_do_not_go_to_a_gpu() -> None:
    """`choosing_for` runs a GPU's launches on CPU tensors."""
    call = arguments(*heads(20, dtype=BF16).values())
    assert chosen(call, "sm_90") == "Weft"
    with pytest.raises(ValueError, match="engine='fa3' lacks kernels for tensors on cpu"):
        chosen(call._replace(engine="fa3"), "sm_90")


# ---- PyTorch's kernels for GPUs -------------------------------------------------------------------------------


def outputs(a: AttentionArgs) -> AttentionOutputs:
    """Allocate outputs as the op does."""
    batch, count, tokens = a.query.shape[:3]
    y = a.query.new_empty(batch, tokens, count, a.value.shape[-1]).transpose(1, 2)
    lse = torch.empty(batch, count, tokens, device=y.device)
    return AttentionOutputs(Result(y, *[None] * 7), lse, None)


@pytest.mark.parametrize("name", ["cuDNN", "PyTorch flash"])
def test_calls_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's meta functions accept the arguments and return results of the right shapes."""
    query, key, value = (torch.empty(x.shape, dtype=BF16, device="meta") for x in heads(100).values())
    a = arguments(query, key, value, mask=CAUSAL)
    o = outputs(a)
    attend(library(name), o, a)
    entry, calls = library(name), []
    for op in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"):
        real = getattr(torch.ops.aten, op)

        def called(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            calls.append(
                dict(zip((x.name for x in real.default._schema.arguments), args, strict=False)) | kwargs
            )
            return real(*args, **kwargs)

        monkeypatch.setattr(torch.ops.aten, op, called)
    attend(entry, o, a)
    (call,) = calls
    assert (call["dropout_p"], call["is_causal"], call["scale"]) == (0.0, True, 0.125)
    assert call["query"].shape == (1, 4, 100, 64)
    assert call.get("compute_log_sumexp", True) is True
    if entry.backward is not None:
        grads = AttentionGradients(*(torch.empty_like(x) for x in (query, key, value)), None, None, None)
        attend_backward(entry, grads, backward_of(a, o.result.y.transpose(1, 2), o.lse))


# ---- other libraries --------------------------------------------------------------------------------------------


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None, softcap: float, starts: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute what FlashAttention does, in fp32: heads [batch, tokens, heads, dim] or packed; masks aligned to the
    lower right; tokens outside all sequences are not written."""
    if starts is not None:
        out, lse = q.new_full((*q.shape[:2], v.shape[-1]), math.nan), q.new_full(q.shape[1::-1], math.nan)
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if begin == end:
                continue
            part = flash(*(x[None, begin:end] for x in (q, k, v)), scale, left, right, softcap, None)
            out[begin:end], lse[:, begin:end] = part[0][0], part[1][0]
        return out, lse
    group = q.shape[2] // k.shape[2]
    s = scale * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2))
    s = softcap * torch.tanh(s / softcap) if softcap else s
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])[None, :]
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if left is not None:
        hidden |= key < own - left
    if right is not None:
        hidden |= key > own + right
    s = s.masked_fill(hidden, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.repeat_interleave(group, 2))
    return out, torch.logsumexp(s, -1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, softcap: float, starts: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True))
        assert all(place % 8 == 0 for place in (x.storage_offset(), *x.stride()[:-1]))
    left, right = (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right
    result = flash(q.float(), k.float(), v.float(), scale, left, right, softcap, starts)
    return result[0].to(q.dtype), result[1]


def backward(
    dout: Tensor, tensors: tuple[Tensor, ...], out: Tensor, lse: Tensor, into: tuple[Tensor, ...], scale: float,
    causal: bool, window: Any, softcap: float, starts: Any,
) -> None:  # fmt: skip
    leaves = [x.detach().float().requires_grad_() for x in tensors]
    with torch.enable_grad():
        left, right = (None if side in (None, -1) else side for side in window)
        again, lse_again = flash(*leaves, scale, left, 0 if causal else right, softcap, starts)
        used = slice(None) if starts is None else slice(int(starts[0]), int(starts[-1]))
        at = (slice(None), used) if starts is not None else used
        if not lse.isnan().any():  # starts out of range
            torch.testing.assert_close(lse[at], lse_again.detach()[at], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(out[used].float(), again.detach()[used], rtol=2e-2, atol=2e-2)
        grads = torch.autograd.grad(again[used], leaves, dout[used].float())
    for place, grad in zip(into, grads, strict=True):
        place.fill_(math.nan)
        place[used] = grad[used]


# Argument lists are copied from the library versions that `libraries` names.


class FA2:
    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        window = window_size_left, window_size_right
        out, lse = forward(q, k, v, softmax_scale, causal, window, softcap, None)
        return out, lse, torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
    ):  # fmt: skip
        check_starts(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = window_size_left, window_size_right
        out, lse = forward(q, k, v, softmax_scale, causal, window, softcap, cu_seqlens_q)
        return out, lse, torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert deterministic
        window = window_size_left, window_size_right
        backward(
            dout, (q, k, v), out, softmax_lse, (dq, dk, dv), softmax_scale, causal, window, softcap, None
        )
        return torch.empty(0)

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert deterministic
        check_starts(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window, into = (window_size_left, window_size_right), (dq, dk, dv)
        backward(
            dout, (q, k, v), out, softmax_lse, into, softmax_scale, causal, window, softcap, cu_seqlens_q
        )
        return torch.empty(0)


class FA3:
    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert num_splits == 1
        if cu_seqlens_q is not None:
            check_starts(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = window_size_left, window_size_right
        out, lse = forward(q, k, v, softmax_scale, causal, window, softcap, cu_seqlens_q)
        return out, lse, torch.empty(0), torch.empty(0)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert deterministic
        window, into = (window_size_left, window_size_right), (dq, dk, dv)
        backward(
            dout, (q, k, v), out, softmax_lse, into, softmax_scale, is_causal, window, softcap, cu_seqlens_q
        )
        return torch.empty(0)


class FA4:
    @staticmethod
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
        tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None,
        _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
        lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None,
        gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False,
    ):  # fmt: skip
        assert return_lse
        assert -1 not in (window_size_left, window_size_right)
        window = window_size_left, window_size_right
        results = forward(q, k, v, softmax_scale, causal, window, softcap, cu_seqlens_q)
        if out is not None:
            out.copy_(results[0])
            lse.copy_(results[1])
            results = out, lse
        return *results, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
        num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
        AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
        cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None,
        aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None,
    ):  # fmt: skip
        assert deterministic
        assert -1 not in (window_size_left, window_size_right)
        window, into = (window_size_left, window_size_right), (dq, dk, dv)
        backward(dout, (q, k, v), out, lse, into, softmax_scale, causal, window, softcap, cu_seqlens_q)
        return dq, dk, dv


class AITER:
    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, sink_size, bias,
        alibi_slopes, q_descale, k_descale, v_descale, return_lse, return_softmax, how_v3_bf16_cvt=1,
        cu_seqlens_q=None, cu_seqlens_kv=None, sink_ptr=None, out=None, num_splits=0,
    ):  # fmt: skip
        assert (dropout_p, sink_size, bias, alibi_slopes, q_descale) == (0.0, 0, None, None, None)
        assert (return_lse, return_softmax, how_v3_bf16_cvt, num_splits) == (True, False, 0, 1)
        window = window_size_left, window_size_right
        out, lse = forward(q, k, v, softmax_scale, causal, window, 0.0, None)
        return out, lse, torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dbias, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, bias, alibi_slopes, deterministic, rng_state=None, is_v3_atomic_fp32=True,
        how_v3_bf16_cvt=1, sink=None, d_sink=None,
    ):  # fmt: skip
        assert deterministic
        assert how_v3_bf16_cvt == 0
        window = window_size_left, window_size_right
        backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), softmax_scale, causal, window, 0.0, None)
        return torch.empty(0)


def check_starts(q: Tensor, k: Tensor, longest_q: int, longest_k: int) -> None:
    assert q.dtype == k.dtype == torch.int32
    assert q[0] >= 0
    assert (q.diff() >= 0).all()
    assert q[-1] <= longest_q
    assert max(q.diff()) <= longest_q
    assert max(k.diff()) <= longest_k


MODULES = {
    "fa2": ("flash_attn.flash_attn_interface", FA2),
    "fa3": ("flash_attn_interface", FA3),
    "fa4": ("flash_attn.cute.interface", FA4),
    "aiter": ("aiter.ops.mha", AITER),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Provide a function that replaces a library by a stand-in for CPUs."""

    def put(engine: str) -> None:
        path, functions = MODULES[engine]
        for at in [path[:i] for i, c in enumerate(path) if c == "."]:
            monkeypatch.setitem(sys.modules, at, ModuleType(at))
        module = ModuleType(path)
        for name in vars(functions):
            if name.startswith("_flash"):
                setattr(module, name, getattr(functions, name))
        monkeypatch.setitem(sys.modules, path, module)
        libraries._missing.cache_clear()
        here = tuple(each._replace(targets=("cpu",)) for each in LIBRARIES if each.engine == engine)
        monkeypatch.setattr(engines, "LIBRARIES", here)

    return put


@pytest.fixture(autouse=True)
def _clear_module_cache() -> Iterator[None]:
    """Clear the cache of module checks after each test."""
    yield
    libraries._missing.cache_clear()


LOWER: dict[str, Any] = {"is_causal": True, "causal_align": "lower_right"}
CALLS: dict[str, dict[str, Any]] = {
    "full": heads(70, 90, batch=2, dtype=BF16),
    "causal": heads(70, 90, batch=2, dtype=BF16) | LOWER,
    "square": heads(70, dtype=BF16) | {"is_causal": True, "causal_align": "upper_left", "scale": 0.3},
    "not contiguous": {name: x.mT.contiguous().mT for name, x in heads(70, dtype=BF16).items()} | LOWER,
    "odd place": {name: F.pad(x, (1, 7))[..., 1:-7] for name, x in heads(70, dtype=BF16).items()},
    "odd strides": {name: F.pad(x, (0, 3))[..., :-3] for name, x in heads(70, dtype=BF16).items()},
    "every second": {name: x.repeat_interleave(2, -1)[..., ::2] for name, x in heads(70, dtype=BF16).items()},
    "expanded": heads(70, batch=3, dtype=BF16)
    | {name: x.expand(3, -1, -1, -1) for name, x in heads(70, dtype=BF16).items() if name != "query"},
    "softcap": heads(70, dtype=BF16) | {"softcap": 2.0, "scale": 1.0},
    "window": heads(70, 80, dtype=BF16) | {"window": (9, 4), "causal_align": "lower_right"},
    "left": heads(70, dtype=BF16) | {"window": (9, None)},
    "own key": heads(70, dtype=BF16) | {"window": (0, 0)},
    "packed": packed([40, 0, 1, 29], pads=5, dtype=BF16) | {"is_causal": True},
    "packed window": packed([40, 29], pads=5, dtype=BF16) | {"window": (9, 0), "softcap": 5.0},
}
CALLS["late start"] = CALLS["packed"] | {"cu_seqlens": torch.tensor([5, 40, 70], dtype=torch.int32)}
CALLS["long starts"] = CALLS["packed"] | {"cu_seqlens": CALLS["packed"]["cu_seqlens"].long()}


CASES = [
    (engine, name)
    for engine in MODULES
    for name in CALLS
    if engine != "aiter" or not {"softcap", "window", "cu_seqlens"} & set(CALLS[name])
]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_calls_of_libraries(engine: str, name: str, stand_in: Callable[[str], None]) -> None:
    """Forward and backward reach the stand-in, which agrees with Weft's own kernels up to the rounding of p, ds and
    results to bf16."""
    stand_in(engine)
    call = CALLS[name]
    assert engines_used(**call, engine=engine) == [engine, engine]
    result, own = run(**call, engine=engine), run(**call, engine="weft")
    for part, one, other in zip(("out", "lse", "dq", "dk", "dv"), result, own, strict=True):
        assert one.stride() == other.stride()
        size = 1.0 if part == "lse" else max(1.0, float(other.abs().max()))
        torch.testing.assert_close(
            one, other, rtol=1e-5, atol=(1e-5 if part == "lse" else 0.01) * size, msg=part
        )
    if "cu_seqlens" in call:
        for one in (result[0], *result[2:]):
            assert not one[70:].count_nonzero()
            assert not one[: call["cu_seqlens"][0]].count_nonzero()
        assert (result[1][:, 70:] == -math.inf).all()


@pytest.mark.parametrize("starts", [[0, 40, 75_000], [-3, 40, 75], [0, 60, 40, 75], [0, 2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("engine", ["fa2", "fa3", "fa4"])
def test_libraries_get_no_starts_out_of_range(
    engine: str, starts: list[int], stand_in: Callable[[str], None]
) -> None:
    """Libraries would read and write beyond the tokens. The results are NaN."""
    stand_in(engine)
    call = CALLS["packed"] | {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
    assert engines_used(**call, engine=engine) == [engine, engine]
    assert all(part.isnan().all() for part in run(**call, engine=engine))


def test_libraries_in_a_graph(stand_in: Callable[[str], None]) -> None:
    stand_in("fa2")
    call = CALLS["packed"]
    leaves = [call[name].clone().requires_grad_() for name in ("query", "key", "value")]

    def out(*leaves: Tensor) -> Tensor:
        return weft.attention(*leaves, cu_seqlens=call["cu_seqlens"], is_causal=True, engine="fa2")

    with weft.record_engines() as used:
        result = torch.compile(out, fullgraph=True, backend="aot_eager")(*leaves)
        grads = torch.autograd.grad(result.sum(), leaves)
    assert [one.engine for one in used] == ["fa2", "fa2"]
    assert torch.equal(result, out(*leaves))
    for one, other in zip(grads, torch.autograd.grad(out(*leaves).sum(), leaves), strict=True):
        assert torch.equal(one, other)


def test_another_version_of_a_library_is_not_called(stand_in: Callable[[str], None]) -> None:
    stand_in("fa3")
    module = sys.modules["flash_attn_interface"]

    def older(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        raise AssertionError("called")

    module._flash_attn_forward = older  # type: ignore[attr-defined]
    libraries._missing.cache_clear()
    with pytest.raises(ValueError, match="a version of flash_attn_interface whose _flash_attn_forward takes"):
        weft.attention(**CALLS["full"], engine="fa3")


def test_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> Any:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(libraries.importlib, "import_module", fail)
    words = "the module flash_attn_interface, which does not import (undefined symbol)"
    assert library("FlashAttention-3").missing() == words
