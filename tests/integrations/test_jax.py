"""Weft's functions on JAX arrays: numbers against float64, bytes against PyTorch, and JAX's transformations.

The reference of a gradient is `jax.grad` of the same program in jax.numpy and float64, on dequantized operands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.integrations.page import run_script

pytest.importorskip("jax", reason="needs JAX: pip install 'weft[jax]'")

import jax
import jax.numpy as jnp
import numpy as np

from weft.integrations.jax import QArray, _subnormals, dequantize, linear, matmul, quantize, wrap

PAIRS = {  # formats of a [M, K] and b [N, K]
    "1x128": ("1x128", "128x128"),
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "mx": ("mx", "mx"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "int8": ("int8:row", "int8:row"),
    "e5m2": ("e5m2:1x128:te", "128x128"),
    "weight-only": (None, "int4:1x128:te"),
}


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def in_torch(x: Any) -> torch.Tensor:
    return torch.from_dlpack(x)


def in_64(x: Any) -> np.ndarray:
    """Return the numbers of an array or a tensor."""
    if isinstance(x, torch.Tensor):
        return x.detach().double().numpy()
    return np.asarray(x).astype(np.float64)


def assert_same(actual: Any, expected: torch.Tensor) -> None:
    """The same dtype, shape and bytes."""
    expected = expected.detach()
    assert actual.dtype.name == str(expected.dtype).removeprefix("torch.")
    assert actual.shape == tuple(expected.shape)
    assert (
        np.asarray(actual).tobytes() == expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def assert_near(actual: Any, exact: Any, magnitude: Any, term: float = 1e-5) -> None:
    """Within the rounding of a result in bf16, and errors of `term` in a sum of terms of this magnitude."""
    bound = 2**-8 * np.abs(exact) + term * magnitude + 1e-30
    assert np.all(np.abs(in_64(actual) - exact) <= bound)


def coded(x: Any, spec: str | None, **options: Any) -> Any:
    return x if spec is None else quantize(x, spec, **options)


def product(a: Any, b: Any, pair: str) -> Any:
    """Return the product of quantized operands."""
    left, right = PAIRS[pair]
    return matmul(coded(a, left), coded(b, right).T)


# ---- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 256), (33, 384), (3, 5, 128), (0, 256)])
@pytest.mark.parametrize(
    "spec", ["1x128", "128x128", "tensor", "row", "mx", "nvfp4", "e2m1:mx", "int8:1x128:te"]
)
def test_codes_are_those_of_weft(spec: str, shape: tuple[int, ...]) -> None:
    x = normal(0, *shape)
    for quantized in (quantize, jax.jit(quantize, static_argnums=1)):
        q = quantized(x, spec)
        expected = weft.quantize(in_torch(x), spec)
        names, (_, full) = expected.__tensor_flatten__()
        assert (q.shape, q.dtype, q.spec, {*q.parts}) == (shape, jnp.bfloat16, full, {*names})
        for name in names:
            assert_same(q.parts[name], getattr(expected, name))
        assert_same(dequantize(q), expected.dequantize())


def test_both_copies_and_more_results() -> None:
    x = normal(0, 128, 256)
    q, amax = quantize(x, "1x128", columnwise=True, return_amax=True)
    expected, expected_amax = weft.quantize(in_torch(x), "1x128", columnwise=True, return_amax=True)
    assert_same(amax, expected_amax)
    for name in expected.__tensor_flatten__()[0]:
        assert_same(q.parts[name], getattr(expected, name))
    assert q.parts["_columnwise_data"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize("pair", PAIRS)
def test_products_match_float64_and_weft(pair: str, rows: int) -> None:
    a, b = normal(1, rows, 384), normal(2, 96, 384)
    y = product(a, b, pair)
    x, w = (
        in_torch(t) if spec is None else weft.quantize(in_torch(t), spec)
        for t, spec in zip((a, b), PAIRS[pair], strict=True)
    )
    assert_same(y, weft.matmul(x, w.T))
    x, w = (in_64(t.dequantize(torch.float32) if isinstance(t, weft.QTensor) else t) for t in (x, w))
    assert_near(y, x @ w.T, np.abs(x) @ np.abs(w.T))
    assert np.array_equal(y, jax.jit(partial(product, pair=pair))(a, b))


def test_subnormals_are_not_flushed() -> None:
    """XLA's threads flush them. PyTorch's threads, which start in the first call, must not."""
    tiny = np.full((1 << 20,), 3e-40, np.float32)
    same = wrap(lambda x: x * 1)
    for call in (same, jax.jit(same)):
        assert np.array_equal(call(jax.device_put(tiny)), tiny)
    assert torch.equal(torch.from_numpy(tiny) * 1, torch.from_numpy(tiny))


@pytest.mark.parametrize("flushed", [False, True])
def test_the_mode_of_a_thread_is_restored(flushed: bool) -> None:
    tiny = np.float32(3e-40)
    try:
        torch.set_flush_denormal(flushed)
        with _subnormals():
            assert tiny * np.float32(2) != 0
        assert (tiny * np.float32(2) == 0) == flushed
    finally:
        torch.set_flush_denormal(False)


def test_a_transposed_array_is_that_of_weft() -> None:
    """Formats that rotate one copy rotate the other one of the transpose."""
    x, spec = normal(0, 128, 256), "e2m1:nvfp4:te:hadamard-columnwise"
    q = quantize(x, spec, columnwise=True).T
    expected = weft.quantize(in_torch(x), spec, columnwise=True).T
    names, (_, full) = expected.__tensor_flatten__()
    assert (q.shape, q.spec, {*q.parts}) == ((256, 128), full, {*names})
    assert q.spec != q.T.spec
    for name in names:
        assert_same(q.parts[name], getattr(expected, name))
    assert_same(dequantize(q), expected.dequantize())


def test_options_are_passed_on() -> None:
    a, b, bias = normal(0, 5, 256), normal(1, 64, 256), normal(2, 64)
    y = matmul(a, b.T, bias=bias, activation="silu", out_dtype=jnp.float32)
    assert_same(
        y,
        weft.matmul(
            *map(in_torch, (a, b.T)), bias=in_torch(bias), activation="silu", out_dtype=torch.float32
        ),
    )
    assert matmul(a, b.T, quantize="row").spec == "e4m3:row:te"
    assert matmul(a, b.T, out_dtype=np.float32).dtype == matmul(a, b.T, out_dtype=np.dtype("float32")).dtype
    kinds = wrap(lambda x, option: x * {bool: 2, int: 3, float: 4}[type(option)])
    assert [int(kinds(jnp.ones(1), option)[0]) for option in (True, 1, 1.0)] == [2, 3, 4]
    assert matmul(a[:0], b.T).shape == (0, 64)


# ---- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("pair", ["1x128", "tensor", "row", "mx"])
def test_gradients_match_float64_and_weft(pair: str, traced: Callable[[Any], Any]) -> None:
    a, b, dy = normal(1, 33, 384), normal(2, 128, 384), normal(3, 33, 128)

    def loss(a: Any, b: Any) -> Any:
        left, right = PAIRS[pair]
        y = matmul(quantize(a, left, columnwise=True), quantize(b, right, columnwise=True).T)
        return (y * dy).astype(jnp.float32).sum()

    grads = traced(jax.grad(loss, (0, 1)))(a, b)
    x, w = (in_torch(t).clone().requires_grad_() for t in (a, b))
    codes = [weft.quantize(t, spec, columnwise=True) for t, spec in zip((x, w), PAIRS[pair], strict=True)]
    weft.matmul(codes[0], codes[1].T).backward(in_torch(dy))
    for actual, leaf in zip(grads, (x, w), strict=True):
        assert_same(actual, leaf.grad)
    # The backward reads the column-wise copies, and the row-wise ones if the format is "row".
    copies = {"rowwise": pair == "row", "columnwise": pair != "row"}
    left, right = (in_64(dequantize(quantize(t, s, **copies), jnp.float32))
                   for t, s in zip((a, b), PAIRS[pair], strict=True))  # fmt: skip
    with jax.enable_x64(True):
        exact = jax.grad(lambda a, b: ((a @ b.T) * jnp.asarray(in_64(dy))).sum(), (0, 1))(
            jnp.asarray(left), jnp.asarray(right)
        )
    for actual, reference, one, other in (
        (grads[0], exact[0], in_64(dy), right),
        (grads[1], exact[1], in_64(dy).T, left),
    ):
        # A plain dy times codes: those are decoded to bf16, exactly if their scales are powers of two.
        term = 2**-9 if pair in ("tensor", "row") else 1e-5
        assert_near(actual, np.asarray(reference), np.abs(one) @ np.abs(other), term)


def test_gradients_of_a_layer_match_weft() -> None:
    x, w = normal(0, 40, 256), normal(1, 128, 256, dtype=jnp.float32)
    grads = jax.jit(
        jax.grad(lambda x, w: linear(x, w, recipe="fp8_block").astype(jnp.float32).sum(), (0, 1))
    )(x, w)
    leaves = [in_torch(t).clone().requires_grad_() for t in (x, w)]
    weft.linear(*leaves, recipe="fp8_block").float().sum().backward()
    for actual, leaf in zip(grads, leaves, strict=True):
        assert_same(actual, leaf.grad)


def test_only_wanted_gradients_are_computed() -> None:
    """Frozen operands have none, and what JAX does not ask for is not computed."""
    asked: list[tuple[bool, bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            asked.append(ctx.needs_input_grad)
            a, b = ctx.saved_tensors
            return dy * b, dy * a

    multiply = wrap(Product.apply)
    a, b = normal(0, 8), normal(1, 8)
    assert np.array_equal(jax.grad(lambda a: multiply(a, b).sum())(a), b)
    assert np.array_equal(jax.grad(lambda b: multiply(a, b).sum())(b), a)
    assert asked == [(True, False), (False, True)]
    q = quantize(normal(0, 64, 256), "1x128", columnwise=True)
    grads = jax.grad(lambda q: matmul(a_matrix, q.T).astype(jnp.float32).sum(), allow_int=True)
    a_matrix = quantize(normal(2, 4, 256), "1x128", columnwise=True)
    assert grads(q).gradient.shape == q.shape
    assert float(abs(grads(q).gradient).max()) > 0
    frozen = jax.grad(lambda x: matmul(x, q.frozen().T).astype(jnp.float32).sum())
    assert frozen(normal(2, 4, 256)).shape == (4, 256)


def test_results_without_a_gradient() -> None:
    """A result that the loss does not read, integers among the results, and an operand without influence."""
    x, w = normal(0, 6, 256, dtype=jnp.float32), jnp.ones(256)
    added = wrap(weft.rms_norm)
    both = jax.grad(lambda x, r: added(x, w, residual=r)[0].sum(), (0, 1))(x, x)
    leaves = [in_torch(x).clone().requires_grad_() for _ in range(2)]
    weft.rms_norm(leaves[0], in_torch(w), residual=leaves[1])[0].sum().backward()
    for actual, leaf in zip(both, leaves, strict=True):
        assert_same(actual, leaf.grad)
    values = jax.grad(lambda x: wrap(weft.top_k)(x, 3)[0].sum())(x)
    assert int((values != 0).sum()) == 18
    nothing = wrap(lambda x, y: (x * 2, y.detach()))
    assert not np.any(jax.grad(lambda y: nothing(x, y)[1].sum())(x))


# ---- any function ---------------------------------------------------------------------------------------------


def _exact_norm(x: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def _exact_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (weft.rms_norm, {"eps": 1e-6}, _exact_norm, [(9, 256), (256,)]),
    "glu": (weft.glu, {}, lambda a, b: jax.nn.silu(a) * b, [(7, 96), (7, 96)]),
    "softmax": (weft.softmax, {}, jax.nn.softmax, [(5, 77)]),
    "attention": (
        weft.attention, {"is_causal": True, "layout": "bshd"}, _exact_attention, [(2, 20, 2, 32)] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients_match_float64(name: str) -> None:
    function, options, exact, shapes = FUNCTIONS[name]
    operands = [normal(seed, *shape, dtype=jnp.float32) for seed, shape in enumerate(shapes)]
    wanted = tuple(range(len(operands)))
    y, grads = jax.jit(
        lambda *xs: (
            wrap(function)(*xs, **options),
            jax.grad(lambda *xs: (wrap(function)(*xs, **options) ** 2).sum(), wanted)(*xs),
        )
    )(*operands)
    with jax.enable_x64(True):
        doubles = [jnp.asarray(in_64(x)) for x in operands]
        expected = exact(*doubles)
        gradients = jax.grad(lambda *xs: (exact(*xs) ** 2).sum(), wanted)(*doubles)
    for actual, reference in zip((y, *grads), (expected, *gradients), strict=True):
        np.testing.assert_allclose(in_64(actual), np.asarray(reference), rtol=2e-4, atol=2e-4)


def test_quantized_results_pass_gradients_on() -> None:
    """A norm writes the codes that a product reads; the gradient goes through both."""
    x, w, weight = normal(0, 32, 256), normal(1, 64, 256), jnp.ones(256, jnp.bfloat16)

    def loss(x: Any, w: Any) -> Any:
        codes = wrap(weft.rms_norm)(x, weight, quantize="1x128", columnwise=True)
        assert isinstance(codes, QArray)
        return matmul(codes, quantize(w, "128x128").T).astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    leaves = [in_torch(t).clone().requires_grad_() for t in (x, w)]
    codes = weft.rms_norm(leaves[0], in_torch(weight), quantize="1x128", columnwise=True)
    weft.matmul(codes, weft.quantize(leaves[1], "128x128").T).float().sum().backward()
    for actual, leaf in zip(grads, leaves, strict=True):
        assert_same(actual, leaf.grad)


# ---- transformations ------------------------------------------------------------------------------------------


def test_vmap_calls_for_each_element() -> None:
    a, b = normal(0, 4, 9, 256), normal(1, 64, 256)
    y = jax.vmap(partial(product, pair="1x128"), (0, None))(a, b)
    assert np.array_equal(y, jnp.stack([product(each, b, "1x128") for each in a]))
    assert np.array_equal(jax.vmap(partial(product, pair="1x128"), (1, None), 1)(a, b)[:, 2],
                          product(a[:, 2], b, "1x128"))  # fmt: skip
    assert jax.vmap(partial(product, pair="1x128"), (0, None))(a[:0], b).shape == (0, 9, 64)

    def gradient(a: Any, b: Any) -> Any:
        return jax.grad(lambda a: product(a, b, "1x128").astype(jnp.float32).sum())(a)

    assert np.array_equal(
        jax.jit(jax.vmap(gradient, (0, None)))(a, b), jnp.stack([gradient(each, b) for each in a])
    )
    codes = jax.vmap(lambda a: quantize(a, "1x128"))(a)
    again = jax.vmap(lambda q: matmul(q, quantize(b, "128x128").T))(codes)
    assert np.array_equal(again, y)
    with pytest.raises(ValueError, match=r"this QArray of shape \(9, 256\) was stacked"):
        dequantize(codes)


def test_scan_remat_and_donation() -> None:
    a, b = normal(0, 4, 9, 256), normal(1, 256, 256)
    step = jax.checkpoint(lambda x, each: (product(x, b, "1x128") / 16 + each, None))
    carried, _ = jax.jit(lambda a: jax.lax.scan(step, a[0], a))(a)
    x = a[0]
    for each in a:
        x = product(x, b, "1x128") / 16 + each
    np.testing.assert_allclose(in_64(carried), in_64(x), rtol=0.02, atol=0.02)  # XLA fuses the rest otherwise
    assert jax.grad(lambda a: jax.lax.scan(step, a[0], a)[0].astype(jnp.float32).sum())(a).shape == a.shape
    expected = product(a[0], b, "1x128")
    donated = jax.jit(partial(product, pair="1x128"), donate_argnums=0)(a[0] + 0, b)
    assert np.array_equal(donated, expected)


def test_dtypes_of_64_bits() -> None:
    x = normal(0, 4, 100, dtype=jnp.float32)
    top_k = wrap(weft.top_k)
    assert top_k(x, 5)[1].dtype == jnp.int32
    with jax.enable_x64(True):
        y, i = jax.jit(lambda x: top_k(x, 5))(x)
        assert (y.dtype, i.dtype) == (jnp.float32, jnp.int64)
        with pytest.raises(ValueError, match="float64"):
            quantize(jnp.ones((4, 128)), "1x128")


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from weft.integrations.jax import matmul, quantize

def f(x, w):
    return matmul(quantize(x, "1x128"), quantize(w, "128x128").T)

def grad(x, w):
    return jax.grad(lambda x: f(x, w).astype(jnp.float32).sum())(x)

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = (jax.random.normal(jax.random.key(i), (n, 256), jnp.bfloat16) for i, n in enumerate((64, 128)))
shards = jax.device_put(x, NamedSharding(mesh, P("d"))), jax.device_put(w, NamedSharding(mesh, P()))
whole = NamedSharding(mesh, P())
for function in (f, grad):
    expected = function(x, w)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)
    for each in (function, jax.jit(function), jax.jit(function, out_shardings=whole), jax.jit(mapped)):
        assert np.array_equal(each(*shards), expected), each
assert len(jax.devices()) == 2
"""


def test_sharded_arrays() -> None:
    """Outside shard_map, a call gathers its operands; inside, each device calls it with its shard."""
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- refused --------------------------------------------------------------------------------------------------


def test_wrong_calls_are_refused_in_weft_s_words() -> None:
    x, w = normal(0, 8, 256), normal(1, 64, 256)
    for traced in (lambda function: function, jax.jit):
        with pytest.raises(ValueError, match=r"K is 256 in a and 64 in b. Pass a weight \[N, K\] as w.T"):
            traced(matmul)(x, w)
        with pytest.raises(ValueError, match=r"x must be bfloat16, float16 or float32; got torch\.int32"):
            traced(quantize)(x.astype(jnp.int32))
    with pytest.raises(ValueError, match="unknown format '3x3'"):
        quantize(x, "3x3")
    with pytest.raises(ValueError, match="nvfp4"):
        matmul(quantize(x, "mx"), quantize(w, "nvfp4").T)
    with pytest.raises(TypeError, match="without a JAX array"):
        quantize(1.0)
    with pytest.raises(TypeError, match=r"got a torch.Tensor: pass a JAX array"):
        matmul(x, torch.ones(256, 8))
    with pytest.raises(TypeError, match="option that is hashable"):
        matmul(x, w.T, bias=bytearray(64))
    with pytest.raises(TypeError, match="no tensors of dtype key<fry>"):
        quantize(jax.random.key(0))
    with pytest.raises(ValueError, match="only a matrix can be transposed"):
        _ = quantize(normal(0, 2, 4, 128), "1x128").T


def test_writing_to_an_array_is_refused() -> None:
    x, w, out = normal(0, 8, 256), normal(1, 64, 256), jnp.zeros((8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="matmul would write to an operand, but JAX arrays are immutable"):
        matmul(x, w.T, out=out)
    with pytest.raises(ValueError, match="would write to an operand"):
        wrap(lambda x: x.mul_(2))(x)
    with pytest.raises(TypeError, match="something besides tensors"):
        wrap(lambda x: (x, 1))(x)
    assert not np.any(out)


def test_gpus_are_refused() -> None:
    """Lowering for a GPU needs none."""
    traced = jax.jit(lambda x: quantize(x, "1x128")).trace(normal(0, 8, 256))
    assert "xla_ffi_python_cpu_callback" in traced.lower(lowering_platforms=("cpu",)).as_text()
    with pytest.raises(
        NotImplementedError, match=r"runs on CPUs only, but this program is compiled for cuda"
    ):
        traced.lower(lowering_platforms=("cuda",))


def test_other_derivatives_are_refused() -> None:
    x, w = normal(0, 8, 256), normal(1, 64, 256)

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: product(x, w, "1x128").astype(jnp.float32).sum())(x)

    with pytest.raises(
        NotImplementedError, match="the gradients of Weft's functions cannot be differentiated"
    ):
        jax.grad(lambda x: gradient(x).astype(jnp.float32).sum())(x)
    with pytest.raises(NotImplementedError, match="cannot be differentiated"):
        jax.jvp(gradient, (x,), (x,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: matmul(x, w.T), (x,), (x,))


def test_an_error_in_a_call_reaches_the_caller() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            raise ValueError("only at run time")
        return x

    with pytest.raises(Exception, match="only at run time"):
        jax.block_until_ready(wrap(fails)(normal(0, 8)))


# ---- memory ---------------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_memory_is_lost() -> None:
    """1,000 calls on 1 MiB, eager and compiled, forward and backward, leave less than 32 KiB each."""
    x, w = normal(0, 2048, 256), normal(1, 128, 256)

    def loss(x: Any, w: Any) -> Any:
        return product(x, w, "1x128").astype(jnp.float32).sum()

    calls = (loss, jax.jit(loss), jax.grad(loss), jax.jit(jax.grad(loss)))

    def repeat(times: int) -> None:
        for _ in range(times):
            for call in calls:
                jax.block_until_ready(call(x, w))

    repeat(30)
    before = resident()
    repeat(250)
    assert resident() - before < 1000 * 32 << 10


def test_operands_that_a_function_keeps() -> None:
    x, kept = normal(0, 1024, 1024, dtype=jnp.float32), []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x[0] * 2

    on_arrays = wrap(keep)
    for i in range(3):
        jax.block_until_ready(on_arrays(x + i))
    assert kept[0].device.type == "meta"
    for i in range(3):
        assert torch.equal(kept[1 + i], in_torch(x + i))


def test_large_arrays_in_parallel_branches() -> None:
    """Callbacks of independent branches do not wait for each other."""
    x = normal(0, 2048, 2048, dtype=jnp.float32)
    double = wrap(lambda x: x * 2)
    many = jax.jit(lambda x: sum(double(x + i) for i in range(8)))
    for _ in range(3):
        assert float(many(x)[0, 0]) == pytest.approx(float(16 * x[0, 0] + 56), rel=1e-5)


# ---- the page -------------------------------------------------------------------------------------------------


def test_first_five_minutes() -> None:
    lines = run_script("JAX").split("\n")
    assert lines[0] == "(1024, 512) bfloat16 float8_e4m3fn"
    assert lines[1].startswith("(1024, 256) (512, 256) ")
