"""Norms and quantizers in PyTorch: its op checks, torch.compile, and all modes of autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.ops.norm.cases import both_copies, everything, heads
from tests.ops.quantize.cases import quantizer
from weft.lab.calls import assert_same, backward, results, run, upstreams
from weft.lab.families import Call
from weft.lab.families.norm import norm_truth
from weft.lab.truth import near

NORMS = (weft.rms_norm, weft.layer_norm)


OPCHECKED = [
    ("norm", everything),
    ("norm", heads),
    # PyTorch's check adds up every output and compares every input, which fails with FP8 on a CPU.
    ("norm", lambda: both_copies().with_(quantize="int8:1x128:te:pow2")),
    ("norm", lambda: heads().with_(quantize="int8:row:te", return_amax=True)),
    ("norm_backward", everything),
    ("norm_backward", heads),
    ("quantize", lambda: quantizer().with_(format="int8:1x128:te:pow2")),
    ("quantize", lambda: quantizer(3, 40).with_(format="int8:tensor:te", columnwise=False, return_amax=True)),
]


@pytest.mark.parametrize("index", range(len(OPCHECKED)))
def test_opcheck(index: int) -> None:
    op, make = OPCHECKED[index]
    opcheck(op, arguments_of(make(), op)[0])


@pytest.mark.parametrize("format", ["mx", "nvfp4", "tensor"])
@pytest.mark.parametrize("make", [both_copies, quantizer], ids=lambda f: f.__name__)
def test_opcheck_of_fp8(make: Callable[[], Call], format: str) -> None:
    name, option = ("norm", "quantize") if make is both_copies else ("quantize", "format")
    a = arguments_of(make().with_(**{option: format}), name)[0]
    opcheck(name, a, test_utils=("test_autograd_registration", "test_faketensor"))


# ---- torch.compile ----------------------------------------------------------------------------------


NAMES = ("x", "weight", "bias", "residual", "pre_bias", "residual_gate", "modulation")


def layer_with_everything(*tensors: Tensor) -> Any:
    return weft.layer_norm(**dict(zip(NAMES, tensors, strict=True)))


def biased(x: Tensor, pre_bias: Tensor) -> Any:
    """Run a norm whose h is not returned but read by the backward."""
    return weft.rms_norm(x, pre_bias=pre_bias)


def quantized_both(x: Tensor, weight: Tensor) -> Any:
    q, h = weft.rms_norm(x, weight, residual=x * 0.5, quantize="1x128", columnwise=True)
    return q.dequantize(), h


def quantized_and_plain(x: Tensor, weight: Tensor) -> Any:
    q, y = weft.rms_norm(x, weight, quantize="1x128", return_plain=True)
    return q.dequantize(), y


def quantized_alone(x: Tensor) -> Any:
    q = weft.quantize(x, "mx", columnwise=True)
    return weft.dequantize(q) * 2


def two_norms(x: Tensor, weight: Tensor) -> Any:
    """Apply two norms and a skip connection: an in-place backward would break this."""
    return x + weft.rms_norm(weft.rms_norm(x, weight), weight)


def packed_heads(qkv: Tensor, weight: Tensor) -> Any:
    return weft.rms_norm(qkv[..., :128].view(*qkv.shape[:-1], 4, 32), weight)


COMPILED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "everything": (layer_with_everything, ((6, 1, 96), (96,), (96,), (6, 1, 96), (96,), (96,), (6, 1, 192))),
    "biased": (biased, ((6, 96), (96,))),
    "quantized_both": (quantized_both, ((130, 96), (96,))),
    "quantized_and_plain": (quantized_and_plain, ((6, 96), (96,))),
    "quantized_alone": (quantized_alone, ((130, 96),)),
    "two_norms": (two_norms, ((6, 96), (96,))),
    "packed_heads": (packed_heads, ((2, 3, 256), (32,))),
}


def compare_compiled(name: str, **options: Any) -> None:
    function, shapes = COMPILED[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, **options)
    sizes = (0,) if not options.get("dynamic") else (0, 3, 64)
    for more in sizes:
        inputs = [torch.randn(s[0] + (more if len(s) > 1 else 0), *s[1:]).bfloat16() for s in shapes]
        outcomes = []
        for f in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            outputs = f(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.manual_seed(5)
            gradients = torch.autograd.grad(outputs, leaves, [torch.randn_like(o) for o in outputs])
            outcomes.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
        assert_same(outcomes[1], outcomes[0], f"compiled {name} at {more} more rows")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager(name: str) -> None:
    """Fullgraph with dynamic sizes: forward and backward match eager bit for bit."""
    compare_compiled(name, backend="aot_eager", dynamic=True)


@pytest.mark.parametrize("name", [pytest.param("everything", marks=pytest.mark.slow), "quantized_both"])
def test_inductor_is_eager(name: str) -> None:
    compare_compiled(name)


# ---- autograd ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        # None, one, all but one, all; the other combinations run as slow tests.
        pytest.param(needs, marks=[] if sum(needs) in (0, 1, 6, 7) else [pytest.mark.slow])
        for needs in itertools.product([False, True], repeat=7)
    ],
)
def test_gradients_of_a_subset(wanted: tuple[bool, ...]) -> None:
    """Any combination of inputs that require a gradient gives the same bits as all of them together."""
    call = everything()
    full = run(call)
    names = [name for name, need in zip(call.tensors(), wanted, strict=True) if need]
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    outputs = results(call.with_(**leaves))
    assert outputs["y"].requires_grad == bool(names)
    if not names:
        return
    gradients = {
        name: g
        for name, g in upstreams(results(call.requiring_grad())).items()
        if outputs[name].requires_grad
    }
    got = backward(call.with_(**leaves), outputs, gradients)
    assert set(got) == {f"d{name}" for name in names}
    assert_same(got, {name: full[name] for name in got}, f"gradients of {', '.join(names)}")


@pytest.mark.parametrize("used", [("y",), ("residual",), ("y", "residual")])
def test_gradients_of_some_outputs(used: tuple[str, ...]) -> None:
    """y and the residual get separate upstream gradients, one of which may be missing."""
    call = everything().requiring_grad()
    outputs = results(call)
    gradients = {name: g for name, g in upstreams(outputs).items() if name in used}
    expected = norm_truth(call, gradients.get("y"), gradients.get("residual"))
    for name, gradient in backward(call, outputs, gradients).items():
        if expected[name].truth.count_nonzero():
            near(gradient, expected[name])
        else:
            assert not gradient.count_nonzero()


def test_zero_and_infinite_upstream_gradients() -> None:
    call = everything().requiring_grad()
    outputs = results(call)
    zero = {name: torch.zeros_like(g) for name, g in upstreams(outputs).items()}
    for gradient in backward(call, outputs, zero, retain_graph=True).values():
        assert not gradient.count_nonzero()
    infinite = upstreams(outputs)
    infinite["y"][2, 0, 5] = torch.inf
    got = backward(call, outputs, infinite)["dx"]
    assert not got[2].isfinite().all()
    assert got[[0, 1, 3, 4, 5]].isfinite().all()


def test_y_is_x_plus_norm_of_norm() -> None:
    """x + norm(norm(x)) has the gradient of float64."""
    x = torch.randn(6, 96, requires_grad=True)
    weight = torch.randn(96, requires_grad=True)
    gradient = torch.randn(6, 96)
    got = torch.autograd.grad(two_norms(x, weight), (x, weight), gradient)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(two_norms(*double), double, gradient.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_gradients_are_not_aliases() -> None:
    """x and residual have equal gradients in separate memory."""
    call = everything().with_(residual_gate=None).requiring_grad()
    outputs = results(call)
    torch.autograd.backward([outputs["y"], outputs["residual"]], [*upstreams(outputs).values()])
    a, b = call["x"].grad, call["residual"].grad
    assert torch.equal(a, b)
    a.zero_()
    assert b.count_nonzero()


@pytest.mark.parametrize("function", NORMS)
def test_gradcheck_of_the_reference(function: Any) -> None:
    inputs = [
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((3, 2, 7), (7,), (7,), (3, 2, 7), (7,), (3, 2, 7), (3, 21))
    ]

    def f(*tensors: Tensor) -> Any:
        return function(**dict(zip(NAMES, tensors, strict=True)))

    assert torch.autograd.gradcheck(f, inputs)
    x, weight, _, _, pre_bias, *_ = inputs
    assert torch.autograd.gradcheck(lambda x, w, b: function(x, w, pre_bias=b), (x, weight, pre_bias))


def test_second_derivatives_raise() -> None:
    """The backward is not differentiable; without an error the result would be wrong."""
    x = torch.randn(3, 64, requires_grad=True)
    y = weft.rms_norm(x).square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["two_norms", "quantized_both"])
def test_activation_checkpoint(name: str) -> None:
    from torch.utils.checkpoint import checkpoint

    function, shapes = COMPILED[name]
    inputs = [torch.randn(s).bfloat16() for s in shapes]
    outcomes = []
    for f in (function, lambda *a: checkpoint(function, *a, use_reentrant=False)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        outputs = f(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, leaves, [o.detach() for o in outputs])
        outcomes.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
    assert_same(outcomes[1], outcomes[0], "checkpoint")


def test_autocast_changes_nothing() -> None:
    """Norms compute in fp32 in any mode; a bf16 x with fp32 parameters is the usual case."""
    call = everything()
    call = call.with_(weight=call["weight"].float(), bias=call["bias"].float())
    wanted = run(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(call), wanted, "autocast")
