"""Every op of the catalogue, on every workload, through every check. A new op inherits all of them.

The checks of `CHECKS` each take a workload with few rows. What follows them needs sizes, layouts or values that no
model has, or a mode of PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_loom
from accuracy import EPS32, assert_rounded_once, ulp
from support import Guarded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import weft
from tests.ops.glu import truth as truth_glu
from tests.ops.norm import truth
from tests.ops.norm.truth import ROUNDINGS, Near
from tests.quant import oracle
from weft import Format, QTensor
from weft.quant import Copy
from weft.runtime import Capabilities, Variant, choosing_for, launch, recording
from weft.workloads import WORKLOADS, Call, Inputs, Workload, distinct, for_op
from weft.workloads.traffic import count_traffic, rows_within

NORMS = (weft.rms_norm, weft.layer_norm)
norm_module = importlib.import_module("weft.ops.norm.norm")


def few_rows(workload: Workload) -> int:
    """Tails of everything: more than a stripe of 128 rows where programs own stripes."""
    tall = dict(workload.settings).get("columnwise") and workload.cols <= 2048
    return 131 if tall else 3 if len(workload.shape) > 2 else 5


def small(workload: Workload, **changed: Any) -> Call:
    return workload.make(rows=few_rows(workload), **changed)


# ---- results as flat lists of named tensors ------------------------------------------------------------


def results(call: Call) -> dict[str, Tensor]:
    """What a call returns, by name."""
    got = call()
    if call.function in NORMS:
        names = ["y"]
        names += ["residual"] * (call["residual"] is not None)
        modulation = call["modulation"]
        gated = isinstance(modulation, Tensor) and modulation.shape[-1] == 3 * call["x"].shape[-1]
        names += ["gate"] * gated + ["amax"] * bool(call["return_amax"])
    elif call.function in (weft.quantize, weft.glu):
        names = ["y"] + ["amax"] * bool(call["return_amax"])
    elif hasattr(got, "_fields"):
        named = {name: value for name, value in got._asdict().items() if isinstance(value, (Tensor, QTensor))}
        gradients = call.function.__name__.endswith("_backward")
        return {f"d{name}" if gradients else name: value for name, value in named.items()}
    else:
        more = 0 if isinstance(got, Tensor) else len(got) - 1
        names = ["y", *(f"output{i}" for i in range(1, 1 + more))]
    got = (got,) if isinstance(got, Tensor) else got
    return dict(zip(names, got, strict=True))


def parts(named: dict[str, Any]) -> dict[str, Tensor]:
    """The same with each quantised tensor taken apart."""
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, QTensor):
            for side in ("rowwise", "columnwise"):
                for field, part in zip(Copy._fields, getattr(value, side) or (), strict=False):
                    if part is not None:
                        found[f"{name}.{side}.{field}"] = part.detach()
        elif value is not None:
            found[name] = value.detach()
    return found


def bits(tensor: Tensor) -> Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(kind)


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Bit for bit."""
    got, wanted = parts(got), parts(wanted)
    assert got.keys() == wanted.keys()
    for name in got:
        assert got[name].shape == wanted[name].shape, f"{what}: shape of {name}"
        different = (bits(got[name]) != bits(wanted[name])).sum()
        assert not different, f"{what}: {different} of {got[name].numel()} elements of {name} differ"


def upstreams(outputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """A random gradient for each differentiable output."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in outputs.items()
        if name != "gate" and value.requires_grad
    }


def run(call: Call, gradients: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Forward and backward: outputs, and gradients named d…"""
    call = call.requiring_grad()
    outputs = results(call)
    return {**outputs, **backward(call, outputs, gradients or upstreams(outputs))}


def backward(
    call: Call, outputs: dict[str, Tensor], gradients: dict[str, Tensor], **kwargs: Any
) -> dict[str, Tensor]:
    leaves = {name: t for name, t in call.tensors().items() if t.requires_grad}
    dense = [o.dequantize() if isinstance(o, QTensor) else o for o in (outputs[name] for name in gradients)]
    found = torch.autograd.grad(
        dense, list(leaves.values()), list(gradients.values()), allow_unused=True, **kwargs
    )
    return {f"d{name}": grad for name, grad in zip(leaves, found, strict=True) if grad is not None}


def differentiable(workload: Workload) -> bool:
    """Whether its inputs are leaves of a graph here; quantised ones are none."""
    quantised = workload.op == "dequantize" or "payload" in dict(workload.settings)
    return weft.catalogue[workload.op].differentiable and not quantised


# ---- the checks ----------------------------------------------------------------------------------------


def near(got: Tensor, expected: Near) -> None:
    """Rounded once; and where a result is more than a speck, damage of it is noticed."""
    budget = expected.noise + ulp(expected.truth, got.dtype) / 2
    if (
        got.numel() > 1
        and got.shape[-1] > 1
        and bool((expected.truth.abs().amax() > 4 * budget.amax()).all())
    ):
        assert_rounded_once(got, expected.truth, expected.noise)
    else:  # one column: everything is ±1, and its gradient the difference of equals
        assert got.shape == expected.truth.shape
        assert ((got.double() - expected.truth).abs() <= budget).all()


def accuracy(workload: Workload) -> None:
    """Forward and backward against float64."""
    call = small(workload)
    if workload.op == "norm":
        call = call.requiring_grad()
        outputs = results(call)
        gradients = upstreams(outputs)
        expected = truth.norm(call, gradients["y"], gradients.get("residual"))
        got = {**outputs, **backward(call, outputs, gradients)}
        if call["quantize"] is not None:
            del expected["y"]  # `quantized_bytes` judges it
        if "gate" in got:
            assert torch.equal(got["gate"], call["modulation"].split(call["x"].shape[-1], -1)[2])
        for name, wanted in expected.items():
            near(got[name], wanted)
    elif workload.op == "norm_backward":
        check_norm_backward(workload, call)
    elif workload.op == "quantize":
        got = run(call)
        gradients = upstreams(results(call.requiring_grad()))
        assert_same({"dx": got["dx"]}, {"dx": gradients["y"]}, "the gradient passes straight through")
    elif workload.op == "dequantize":
        q = call["q"]
        flat = (q.numel() // q.shape[-1], q.shape[-1])
        copy = oracle.Quantized(q.rowwise.data.view(torch.uint8), q.rowwise.scale, q.rowwise.global_scale)
        exact = oracle.dequantize(copy, block=q.format.block, element=q.format.element, shape=flat)
        assert_rounded_once(call(), exact.view(q.shape), 2 * EPS32 * exact.abs().view(q.shape))
    elif workload.op in ("glu", "glu_backward"):
        check_glu(call)
    elif workload.op in TRUTHS:
        gradients = {}
        if differentiable(workload):
            call = call.requiring_grad()
            gradients = upstreams(results(call))
        got = results(call)
        expected = TRUTHS[workload.op](call, gradients)
        if gradients:
            got |= backward(call, got, gradients)
        assert set(got) <= set(expected)
        for name, value in got.items():
            wanted = expected[name]
            if isinstance(wanted, Tensor):
                assert torch.equal(value, wanted), name
            elif not isinstance(value, QTensor):  # which `quantized_bytes` judges
                near(value, wanted)
    else:
        accuracy_by_reference(workload)


# What each result and gradient of a call must be: within a noise, or exactly.
TRUTHS: dict[str, Callable[[Call, dict[str, Tensor]], dict[str, Near | Tensor]]] = {
    op: truth
    for path in sorted((Path(__file__).parents[1] / "ops").glob("*/truth*.py"))
    for op, truth in vars(importlib.import_module(f"tests.ops.{path.parent.name}.{path.stem}"))
    .get("TRUTHS", {})
    .items()
}


def accuracy_by_reference(workload: Workload) -> None:
    """For an op without a formula in `truth`: the op itself in float64, where its reference serves. The reference is
    then nobody's witness but its own: add the op to the gradient check below."""
    call = small(workload)
    floats = {name: t for name, t in call.tensors().items() if t.is_floating_point()}
    exact = call.with_(**{name: t.double() for name, t in floats.items()})
    if differentiable(workload):
        gradients = upstreams(results(call.requiring_grad()))
        got, wanted = run(call, gradients), run(exact, {name: g.double() for name, g in gradients.items()})
    else:
        got, wanted = results(call), results(exact)
    assert got.keys() == wanted.keys()
    for name, right in parts(wanted).items():
        if not right.is_floating_point():
            assert torch.equal(got[name], right), name
            continue
        largest = right.abs().amax(-1, keepdim=True) if right.dim() > 1 else right.abs().amax()
        near(got[name], Near(right, (ROUNDINGS * EPS32 * largest).expand(right.shape)))


@pytest.mark.parametrize("options", ["plain", "layer"])
def test_accuracy_by_reference(options: str) -> None:
    """What a new op gets, on ops that are known to be right."""
    accuracy_by_reference(next(w for w in for_op("norm", "training") if w.options == options))


def check_norm_backward(workload: Workload, call: Call) -> None:
    """As the autograd engine calls it, against the gradients of the formula."""
    settings = dict(workload.settings)
    function = settings.get("function", weft.rms_norm)
    forward = Call(
        function,
        {
            "x": call["h"],
            "weight": call["weight"],
            "bias": call["bias"],
            "eps": 1e-5,
            "weight_offset": call["weight_offset"],
            "casting": call["casting"],
            **({"residual": torch.zeros_like(call["h"])} if call["dresidual"] is not None else {}),
        },
    )
    scale = call["scale"]
    if scale is not None:
        lead = call["h"].shape[:1] if settings["modulation"] == "sample" else call["h"].shape[:-1]
        forward = forward.with_(modulation=torch.cat([scale, torch.zeros_like(scale)], -1).view(*lead, -1))
    expected = truth.norm(forward, call["dy"], call["dresidual"])
    names = [
        n for n, need in zip(("x", "weight", "bias", "scale", "shift"), call["needs"], strict=True) if need
    ]
    for name, got in zip(names, call(), strict=True):
        if name in ("scale", "shift"):
            wanted = expected["dmodulation"]
            half = slice(0, got.shape[-1]) if name == "scale" else slice(got.shape[-1], None)
            near(
                got,
                Near(wanted.truth[..., half].reshape(got.shape), wanted.noise[..., half].reshape(got.shape)),
            )
        else:
            near(got, expected[f"d{name}"])


def check_glu(call: Call) -> None:
    """The op with its gradients, or the gradients as they are called by themselves."""
    if call["dy"] is None:
        call = call.requiring_grad()
        outputs = results(call)
        gradients = upstreams(outputs)
        got, expected = {**outputs, **backward(call, outputs, gradients)}, truth_glu.glu(call, gradients["y"])
    else:
        forward = {k: v for k, v in call.kwargs.items() if k not in ("dy", "quantize", "columnwise")}
        got, expected = results(call), truth_glu.glu(Call(weft.glu, forward), call["dy"])
        del expected["y"]
    for name, wanted in expected.items():
        if not isinstance(got[name], QTensor):  # `quantized_bytes` judges those
            near(got[name], wanted)


def own_numbers(call: Call) -> dict[str, Tensor]:
    """The fp32 numbers that quantised results are made of, from a call whose inputs are fp32."""
    kept = {k: v for k, v in call.kwargs.items() if k not in ("quantize", "columnwise", "quant_scale")}
    floats = {name: t.float() for name, t in call.tensors().items() if t.is_floating_point() and name in kept}
    return results(Call(call.function, {**kept, **floats}))


def own_value(call: Call) -> Tensor:
    """The fp32 y that a quantising norm encodes: that of a plain norm whose rows are added up in the same pieces."""
    dropped = ("quantize", "rowwise", "columnwise", "quant_scale", "return_amax")
    plain = Call(call.function, {k: v for k, v in call.kwargs.items() if k not in dropped})
    config, group = norm_module.RowConfig, Format.of(call["quantize"]).group
    choose = config.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "choose", staticmethod(lambda cols, _, target: choose(cols, group, target)))
        value = results(plain.with_(out_dtype=torch.float32))["y"]
    near(value, truth.norm(plain)["y"])
    return value


def quantized_bytes(workload: Workload) -> None:
    """Codes and scales equal those of an independent oracle, made from the op's own fp32 numbers."""
    call = small(workload)
    if workload.op in ("glu", "glu_backward"):
        values = own_numbers(call)
        for name, value in results(call).items():
            if isinstance(value, QTensor):
                truth_glu.assert_copies(
                    value, values[name], call["ends"], call["align"] or 1, call["quant_scale"]
                )
        return
    if not isinstance(results(call).get("y"), QTensor):
        return
    outputs = results(call)
    q = outputs["y"]
    assert isinstance(q, QTensor)
    if call["seed"] is not None:  # the oracle draws no random numbers
        with weft.backend("reference"):
            assert_same(outputs, results(call), "stochastic rounding")
        return
    if workload.op == "norm":
        value = own_value(call)
    elif workload.op == "gated_norm":
        value = own_numbers(call)["y"]
    elif workload.op == "permute":
        if isinstance(call["x"], QTensor):  # nothing is quantised
            return
        value = results(Call(call.function, {n: call[n] for n in ("x", "rows")}))["y"]
    else:
        value = call["x"]
    value = value.reshape(-1, value.shape[-1])
    given = call["quant_scale"] if call["quant_scale"] is not None else call["scale"]
    for side, transpose in (("rowwise", False), ("columnwise", True)):
        copy = getattr(q, side)
        if copy is None:
            assert transpose or not call.kwargs.get("rowwise", True)
            continue
        wanted = oracle.quantize(
            value,
            block=q.format.block,
            element=q.format.element,  # type: ignore[arg-type]
            convention=q.format.convention,
            power_of_two=bool(q.format.power_of_two),
            transpose=transpose,
            scale=given,
        )
        assert_same(
            {"data": copy.data.view(torch.uint8), "scale": copy.scale.view(wanted.scale.dtype)},
            {"data": wanted.data, "scale": wanted.scale.reshape(copy.scale.shape)},
            f"{side} copy",
        )
        if wanted.global_scale is not None:
            assert torch.equal(copy.global_scale, wanted.global_scale)
    if "amax" in outputs:
        assert outputs["amax"] == value.abs().max().float()


class Band(Guarded):
    """Memory of NaN around a tensor."""

    POISON = 0xFF


@contextlib.contextmanager
def guarded_allocations() -> Iterator[list[Band]]:
    """New tensors lie in bands of NaN as well."""
    bands: list[Band] = []

    def guarded(fill: float | None) -> Callable[..., Tensor]:
        def allocate(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
            size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if torch.device(device or "cpu").type != "cpu" or 0 in tuple(size):
                return zeros(size, dtype=dtype, device=device)
            bands.append(Band(tuple(size) or (1,), dtype or torch.float32))
            made = bands[-1].tensor.view(tuple(size))
            return made if fill is None else made.fill_(fill)

        return allocate

    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", guarded(None))
        patch.setattr(torch, "zeros", guarded(0.0))
        yield bands


def guard_bands(workload: Workload) -> None:
    """Nothing is read from or written to the memory around inputs and outputs."""
    call = small(workload)
    wanted = results(call)
    inputs = {name: Band.of(tensor) for name, tensor in call.tensors().items()}
    guarded = call.with_(**{name: band.tensor for name, band in inputs.items()})
    with guarded_allocations() as bands:
        got = results(guarded)
    assert bands, "no allocation was seen"
    assert_same(got, wanted, "with bands of NaN around everything")
    for band in bands:
        band.check()
    for name, band in inputs.items():
        assert torch.equal(bits(band.check()), bits(call.kwargs[name])), f"{name} was changed"
    if not differentiable(workload):
        return
    wanted = run(call)
    inputs = {name: Band.of(tensor) for name, tensor in call.tensors().items()}
    gradients = upstreams(results(call.requiring_grad()))
    upstream = {name: Band.of(tensor) for name, tensor in gradients.items()}
    guarded = call.with_(**{name: band.tensor for name, band in inputs.items()})
    with guarded_allocations() as bands:
        got = run(guarded, {name: band.tensor for name, band in upstream.items()})
    assert_same(got, wanted, "backward, with bands of NaN around everything")
    for band in bands:
        band.check()
    for name, band in inputs.items():
        assert torch.equal(bits(band.check()), bits(call.kwargs[name])), f"{name} was changed by backward"
    for name, band in upstream.items():
        assert torch.equal(bits(band.check()), bits(gradients[name])), f"the gradient of {name} was changed"


def determinism(workload: Workload) -> None:
    """The same bits in every run and for any number of threads."""
    call = small(workload)
    again = run if differentiable(workload) else results
    first = again(call)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert_same(again(call), first, f"{threads} threads")


def twice_backward(workload: Workload) -> None:
    """A graph that is kept can be walked again: backward changes none of what it saved."""
    if not differentiable(workload):
        return
    call = small(workload).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    first = backward(call, outputs, gradients, retain_graph=True)
    first = {name: grad.clone() for name, grad in first.items()}
    assert_same(backward(call, outputs, gradients), first, "second backward")


def no_grad(workload: Workload) -> None:
    """Without gradients the same bits, and nothing that requires one."""
    call = small(workload)
    if not differentiable(workload):
        return
    tracked = results(call.requiring_grad())
    assert any(value.requires_grad for name, value in tracked.items() if name != "gate")
    with torch.no_grad():
        plain = results(call.requiring_grad())
    assert not any(value.requires_grad for name, value in plain.items() if name != "gate")
    assert_same(plain, tracked, "no_grad")
    with torch.inference_mode():
        assert_same(results(small(workload)), plain, "inference_mode")


def functional(workload: Workload) -> None:
    """torch.func differentiates to autograd's bits; what would lose a tangent or a batch is refused."""
    if not differentiable(workload):
        return
    call = small(workload)
    tracked = call.requiring_grad()
    outputs = results(tracked)
    gradients = upstreams(outputs)
    wanted = backward(tracked, outputs, gradients)
    leaves = {name[1:]: tracked[name[1:]].detach() for name in wanted}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        got = results(call.with_(**dict(zip(leaves, tensors, strict=True))))
        dense = (got[name] for name in gradients)
        return tuple(value.dequantize() if isinstance(value, QTensor) else value for value in dense)

    _, pulled_back = torch.func.vjp(function, *leaves.values())
    found = pulled_back(tuple(gradients.values()))
    assert_same(dict(zip(wanted, found, strict=True)), wanted, "torch.func.vjp")
    tangents = tuple(map(torch.ones_like, leaves.values()))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(function, tuple(leaves.values()), tangents)
    with torch.autograd.forward_ad.dual_level():
        dual = map(torch.autograd.forward_ad.make_dual, leaves.values(), tangents)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(*dual)
    with pytest.raises(NotImplementedError, match="cannot be mapped"):
        torch.func.vmap(function)(*(leaf[None] for leaf in leaves.values()))


def backend_of_a_graph(workload: Workload) -> None:
    """What ran as the reference is differentiated by the reference, outside of the block and on any thread."""
    if not differentiable(workload):
        return
    call = small(workload).requiring_grad()
    with weft.backend("reference"):
        outputs = results(call)
        gradients = upstreams(outputs)
        wanted = backward(call, outputs, gradients, retain_graph=True)
        dense = {n: o.dequantize() if isinstance(o, QTensor) else o for n, o in outputs.items()}
    found: list[dict[str, Tensor]] = []

    def elsewhere() -> None:
        found.append(backward(call, dense, gradients))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", None)  # a launch would fail
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found, "a kernel was launched"
    assert_same(found[0], wanted, "backward elsewhere")


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forbidden = ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero")
        assert func.overloadpacket.__name__ not in forbidden, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def no_host_sync(workload: Workload) -> None:
    """Nothing asks a tensor for its numbers: a CUDA graph can hold the op."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host waits for the device")

    call = small(workload)
    gradients = upstreams(results(call.requiring_grad())) if differentiable(workload) else None
    call()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        if gradients:
            run(call, gradients)
        call()
    with NoHostSync():
        call()


def reference_agrees(workload: Workload) -> None:
    """What serves without Triton has the same shapes, dtypes and strides, and meets the same truth."""
    call = small(workload)
    kernel = parts(results(call))
    with weft.backend("reference"):
        reference = parts(results(call))
        accuracy(workload)
    assert kernel.keys() == reference.keys()
    for name, value in kernel.items():
        assert (value.shape, value.dtype) == (reference[name].shape, reference[name].dtype), name
    if workload.op == "quantize":
        assert_same(kernel, reference, "reference")


def witnessed(workload: Workload) -> None:
    """With the launches of an H100: every access is to an element of a tensor argument, no byte is read that nobody
    wrote, no two programs race, no 32-bit offset overflows, every promise to the compiler is kept; and no more bytes
    move than the workload says."""
    rows = rows_within(workload, 144 << 20)
    rows -= rows > 64  # no multiple of anything
    with triton_loom.sanitize() as seen:
        moved = count_traffic(workload, rows)
    assert seen.launches >= moved.launches > 0, "no launch was seen"
    assert moved.as_promised, f"{moved.ratio:.3f} times the least bytes: {moved}"


# Every op and workload goes through all of these.
CHECKS: dict[str, Callable[[Workload], None]] = {
    check.__name__: check
    for check in (
        accuracy,
        quantized_bytes,
        guard_bands,
        determinism,
        twice_backward,
        no_grad,
        functional,
        backend_of_a_graph,
        no_host_sync,
        reference_agrees,
        witnessed,
    )
}


# These depend on an op and its options, and not on sizes.
OF_OPTIONS = ("functional", "backend_of_a_graph")


def telling(check: str) -> Iterator[Any]:
    """Of the workloads that run the same compiled code, or have the same options if those alone matter, one; the others
    are slow tests."""
    seen = set()
    for workload in distinct():
        cols = workload.cols
        alike: tuple[Any, ...] = (workload.op, workload.options)
        if check not in OF_OPTIONS:
            alike += (len(workload.shape), cols > 1024, cols % 1024 == 0, cols % 16 == 0)
        marks = [pytest.mark.slow] if alike in seen or "long" in workload.name else []
        seen.add(alike)
        yield pytest.param(workload, check, marks=marks, id=f"{check}-{workload}")


@pytest.mark.parametrize(("workload", "check"), [case for check in CHECKS for case in telling(check)])
def test_workload(workload: Workload, check: str) -> None:
    CHECKS[check](workload)


@pytest.mark.slow
@pytest.mark.parametrize("workload", distinct(), ids=str)
def test_no_finding_on_the_cpu(workload: Workload) -> None:
    """The CPU's own launches, forward and backward, with few rows."""
    with triton_loom.sanitize() as seen:
        call = small(workload)
        if differentiable(workload):
            run(call)
        else:
            results(call)
    assert seen.launches, "no launch was seen"


def test_every_op_has_workloads_and_every_workload_an_op() -> None:
    assert {w.op for w in WORKLOADS} == set(weft.catalogue)
    assert len({str(w) for w in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("op", weft.catalogue)
def test_least_bytes_grow_with_the_rows(op: str) -> None:
    for workload in distinct(for_op(op)):
        one, two, three = (workload.least_bytes(rows) for rows in (128, 256, 384))
        assert 0 < one < two
        assert two - one == three - two
    if op == "norm":
        plain = next(w for w in for_op(op) if w.options == "plain")
        assert plain.least_bytes(7) == 2 * (2 * 7 * plain.cols + plain.cols)


# ---- layouts -------------------------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def stepped(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


def padded(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_full((*t.shape[:-1], 16), torch.nan)], -1)[..., : t.shape[-1]]


def padded_oddly(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_full((*t.shape[:-1], 3), torch.nan)], -1)[..., : t.shape[-1]]


def off_by_one(t: Tensor) -> Tensor:
    """Not at a multiple of 16 bytes."""
    return torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape)


def expanded(t: Tensor) -> Tensor:
    """Its first row for every row."""
    return t[:1].expand(t.shape)


def constant(t: Tensor) -> Tensor:
    """One element for all: what sum().backward() sends back."""
    return t.flatten()[:1].view([1] * t.dim()).expand(t.shape)


def permuted(t: Tensor) -> Tensor:
    """The middle dimensions lie in another order."""
    return t if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1)


def odd_strides_of_one(t: Tensor) -> Tensor:
    """A dimension of size 1 whose stride means nothing."""
    strides = [977 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides)


LAYOUTS = (
    transposed,
    stepped,
    padded,
    padded_oddly,
    off_by_one,
    expanded,
    constant,
    permuted,
    odd_strides_of_one,
)


def everything(rows: int = 6, cols: int = 96, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A norm with every input there is."""
    normal = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=normal).to(dtype)  # noqa: E731
    return Call(
        weft.layer_norm,
        {
            "x": draw(rows, 1, cols),
            "weight": draw(cols),
            "bias": draw(cols),
            "residual": draw(rows, 1, cols),
            "modulation": draw(rows, 1, 2 * cols),
        },
    )


def heads(rows: int = 3, cols: int = 96) -> Call:
    return Call(weft.rms_norm, {"x": torch.randn(2, rows, 5, cols).bfloat16(), "weight": torch.randn(cols)})


def both_copies(rows: int = 130, cols: int = 96) -> Call:
    x = torch.randn(2, rows, cols).bfloat16()
    return Call(weft.rms_norm, {"x": x, "residual": x * 0.5, "quantize": "1x128", "columnwise": True})


def columns(rows: int = 130, cols: int = 96) -> Call:
    """No residual: both passes read x where it lies."""
    x = torch.randn(2, rows, cols).bfloat16()
    return Call(weft.layer_norm, {"x": x, "quantize": "mx", "columnwise": True})


def quantizer(rows: int = 130, cols: int = 96) -> Call:
    return Call(
        weft.quantize, {"x": torch.randn(2, rows, cols).bfloat16(), "format": "mx", "columnwise": True}
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "make", [everything, heads, both_copies, columns, quantizer], ids=lambda f: f.__name__
)
def test_layout_of_inputs(make: Callable[[], Call], layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides give the bits of the contiguous tensor, forward and backward."""
    call = make()
    different = 0
    for name, tensor in call.tensors().items():
        laid_out = layout(tensor)
        different += laid_out.stride() != tensor.stride() or laid_out.storage_offset() != 0
        wanted = run(call.with_(**{name: laid_out.contiguous().clone()}))
        assert_same(run(call.with_(**{name: laid_out})), wanted, f"{layout.__name__} {name}")
    assert different or layout in (permuted, odd_strides_of_one)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [everything, heads, both_copies, quantizer], ids=lambda f: f.__name__)
def test_layout_of_gradients(make: Callable[[], Call], layout: Callable[[Tensor], Tensor]) -> None:
    call = make()
    gradients = upstreams(results(call.requiring_grad()))
    for name, gradient in gradients.items():
        laid_out = layout(gradient)
        wanted = run(call, {**gradients, name: laid_out.contiguous().clone()})
        assert_same(run(call, {**gradients, name: laid_out}), wanted, f"{layout.__name__} gradient of {name}")


def test_two_different_nestings_of_rows() -> None:
    """Heads of a packed projection forward, heads before tokens backward."""
    packed = torch.randn(2, 3, 8 * 32).bfloat16()
    x = packed[..., : 5 * 32].view(2, 3, 5, 32)
    call = Call(weft.rms_norm, {"x": x, "weight": torch.randn(32)})
    gradient = torch.randn(2, 5, 3, 32).bfloat16().transpose(1, 2)
    wanted = run(call.with_(x=x.contiguous()), {"y": gradient.contiguous()})
    assert_same(run(call, {"y": gradient}), wanted, "two nestings")


# ---- sizes ---------------------------------------------------------------------------------------------

# 1, primes, one past a tile (64 is the least tile, 1024 the largest on a CPU), multiples of 16 and not.
SIZES = [(1, 1), (7, 1), (2, 3), (13, 16), (1, 97), (127, 129), (129, 128), (3, 1023), (2, 1025), (17, 2049)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_size_of_a_norm(rows: int, cols: int) -> None:
    call = everything(rows, cols).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, wanted in truth.norm(call, gradients["y"], gradients["residual"]).items():
        near(got[name], wanted)


@pytest.mark.parametrize(
    ("rows", "cols", "format"), [(1, 1, "1x128"), (2, 3, "mx"), (127, 129, "1x128"), (257, 128, "mx")]
)
def test_size_of_a_quantiser(rows: int, cols: int, format: str) -> None:
    """Norm and quantiser in one pass and in two, both copies and each for itself."""
    x = torch.randn(rows, cols).bfloat16()
    call = Call(weft.rms_norm, {"x": x, "quantize": format, "columnwise": True})
    fused, y = call(), own_value(call)
    together = weft.quantize(y, format, columnwise=True)
    apart = weft.quantize(y.t().contiguous(), format)
    assert_same({"q": fused}, {"q": together}, "fused and separate")
    assert_same(
        {"q": together.columnwise.data}, {"q": apart.rowwise.data}, "column-wise and of the transpose"
    )
    assert_same(
        {"q": together.columnwise.scale}, {"q": apart.rowwise.scale}, "column-wise and of the transpose"
    )


@pytest.mark.parametrize("workload", [w for w in distinct() if w.op != "dequantize"], ids=str)
def test_no_rows(workload: Workload) -> None:
    call = workload.make(rows=0)
    outputs = parts(results(call))
    with weft.backend("reference"):
        wanted = parts(results(call))
    for name, value in wanted.items():
        assert (outputs[name].shape, outputs[name].dtype) == (value.shape, value.dtype), name
        if name.startswith("y.") or name == "amax":
            assert torch.equal(bits(outputs[name]), bits(value)), name
    if differentiable(workload):
        for name, gradient in run(call).items():
            if name.startswith("d"):
                assert not gradient.count_nonzero(), name


@pytest.mark.parametrize("function", [weft.rms_norm, weft.layer_norm, weft.quantize])
def test_no_columns(function: Any) -> None:
    x = torch.randn(4, 0, requires_grad=True)
    result = function(x)
    assert result.shape == (4, 0)
    with weft.backend("reference"):
        assert function(x.detach()).shape == (4, 0)


# ---- rows past 2^31 elements ---------------------------------------------------------------------------


def far_apart(rows: int, cols: int, stride: int = 2**30 - 64) -> Tensor:
    """Rows so far from each other that offsets need more than 32 bits, though the stride is an integer of 32 to a
    kernel; the memory between is never touched."""
    storage = torch.UntypedStorage(2 * (stride * (rows - 1) + cols))
    x = torch.tensor([], dtype=torch.bfloat16).set_(storage, 0, (rows, cols), (stride, 1))
    return x.copy_(torch.randn(rows, cols))


@pytest.mark.parametrize("options", ["plain", "1x128-both", "row", "quantize"])
def test_offsets_have_64_bits(options: str) -> None:
    x = far_apart(4, 96)
    calls = {
        "plain": Call(weft.layer_norm, {"x": x, "residual": x}),
        "1x128-both": Call(weft.rms_norm, {"x": x, "quantize": "1x128", "columnwise": True}),
        "row": Call(weft.rms_norm, {"x": x, "quantize": "row"}),
        "quantize": Call(weft.quantize, {"x": x, "format": "1x128", "columnwise": True}),
    }
    call = calls[options]
    near_by = call.with_(**{name: x.contiguous() for name in call.tensors()})
    assert_same(results(call), results(near_by), "far apart")
    outputs = results(call.requiring_grad())
    gradients = {name: far_apart(4, 96).copy_(g) for name, g in upstreams(outputs).items()}
    wanted = run(near_by, {name: g.contiguous() for name, g in gradients.items()})
    assert_same(run(call, gradients), wanted, "far apart")


def declared(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


# Just below the size from which integers have 64 bits, and so far above that twice the size has more than 31; of each
# one that is a multiple of all tiles, so that no column is masked.
LONG_ROWS = (2**30 - 1, 2**30 - 1024, 1_200_000_001, 1_200_000_000, 2**31 - 1, 2**31 - 1024)


@pytest.mark.parametrize("cols", LONG_ROWS)
@pytest.mark.parametrize("rows", [1, 5])
def test_programs_that_share_a_long_row(rows: int, cols: int) -> None:
    """Every address of an H100's launches is in bounds and no loop wraps around: of tensors that are only declared."""
    op = weft.catalogue["quantize"]
    with triton_loom.sanitize(dry=True) as seen, choosing_for("sm_90"):
        for format, amax in (("e4m3:1x128:te:pow2", True), ("e4m3:mx:te", False), ("e4m3:tensor:te", False)):
            arguments = (declared(rows, cols), format, True, False, None, amax, None)
            op.launch(op.allocate(*arguments), *arguments)
    assert seen.launches == 6, "one kernel each, one more for the first's amax and two for a tensor's scale"


def traced(variant: Variant) -> None:
    """Has Triton check the types of a kernel, without compiling any further."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": variant.num_warps, "num_stages": variant.num_stages})
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    source = ASTSource(
        fn=kernel.fn, signature=dict(variant.signature), constexprs=variant.constants_by_path()
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )


@pytest.mark.parametrize("op", weft.catalogue)
def test_every_kernel_takes_integers_of_64_bits(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size or a stride of 2^30 is all that it takes."""
    monkeypatch.setattr(launch, "WIDE", 0)
    variants: set[Variant] = set()
    for workload in {w.options: w for w in distinct(for_op(op))}.values():
        for target in ("sm_80", "sm_90"):
            with recording(target) as seen:
                workload.make("meta", rows=few_rows(workload))()
            variants.update(seen)
    assert variants
    for variant in variants:
        assert "i32" not in variant.types().values()
        traced(variant)


@pytest.mark.slow
@pytest.mark.parametrize("op", weft.catalogue)
def test_integers_of_64_bits_change_no_result(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for workload in {w.options: w for w in distinct(for_op(op))}.values():
        evaluate = run if differentiable(workload) else results
        wanted = evaluate(small(workload))
        with monkeypatch.context() as changed:
            changed.setattr(launch, "WIDE", 0)
            assert_same(evaluate(small(workload)), wanted, "64 bits")


@pytest.mark.parametrize("seed", [0, 2**30, 2**31 - 1, 2**61 + 2**30, 2**62 - 1])
def test_no_seed_is_a_long_row(seed: int) -> None:
    """A seed has up to 62 bits; it makes no new variant of a kernel."""
    with recording("sm_90") as variants:
        weft.quantize(declared(4, 256), "1x128", seed=seed)
        weft.quantize(declared(4, 256), "1x128", columnwise=True, seed=seed)
    assert {dict(variant.signature)["seed_high"] for variant in variants} == {"i32"}


@pytest.mark.slow
@pytest.mark.parametrize("function", [weft.rms_norm, weft.layer_norm])
def test_more_than_2_to_the_31_elements(function: Any) -> None:
    """The last rows are right, forward and backward; takes 14 GB."""
    x = torch.empty(2**23 + 16, 256, dtype=torch.bfloat16)
    x[:-32], x[-32:] = 1.0, torch.randn(32, 256).bfloat16()
    last = x[-32:].clone().requires_grad_()
    y = function(x.requires_grad_())
    wanted = function(last)
    assert torch.equal(y[-32:], wanted)
    gradient = torch.randn(32, 256).bfloat16()
    (dx,) = torch.autograd.grad(y, x, gradient[:1].expand(y.shape))
    (wanted,) = torch.autograd.grad(wanted, last, gradient[:1].expand(32, 256))
    assert torch.equal(dx[-32:], wanted)


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("make", [everything, both_copies], ids=lambda f: f.__name__)
def test_a_special_value_stays_in_its_row(make: Callable[[], Call], special: float) -> None:
    """And reaches all of it: no maximum or mask swallows a NaN."""
    call = make()
    x = call["x"].clone()
    x.view(-1, x.shape[-1])[4, 3] = special
    named = results(call.with_(x=x))
    y = (named["y"].dequantize() if isinstance(named["y"], QTensor) else named["y"]).view(-1, x.shape[-1])
    wanted = results(call)["y"]
    wanted = (wanted.dequantize() if isinstance(wanted, QTensor) else wanted).view(-1, x.shape[-1])
    others = torch.arange(len(y)) != 4
    assert torch.equal(y[others], wanted[others])
    if make is everything:
        assert y[4].isnan().all() or (special != special) is False
        assert y[4].isnan().any()


@pytest.mark.parametrize(
    "values",
    [
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), 3.0),
        lambda n: torch.randn(n) * 1e-40,
        lambda n: torch.randn(n) * 1e-20,
        lambda n: torch.randn(n) * 1e15,
        lambda n: torch.randn(n) * 1e-3 + 1.0,
    ],
    ids=["zeros", "constant", "denormal", "tiny", "large", "near_one"],
)
@pytest.mark.parametrize("function", NORMS)
def test_values(function: Any, values: Callable[[int], Tensor]) -> None:
    x = torch.cat([values(200), torch.randn(200)]).view(2, 200)
    call = Call(function, {"x": x, "weight": torch.randn(200)}).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    expected = truth.norm(call, gradients["y"])
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, value in expected.items():
        near(got[name], value)


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e6])
@pytest.mark.parametrize("cols", [200, 1025, 4096])
def test_variance_of_rows_far_from_zero(shift: float, cols: int) -> None:
    """LayerNorm is invariant to a shift: mean of squares minus square of mean would lose everything here, and a
    lane without an element would add the mean's square (bugs B6, B9)."""
    x = (torch.randn(5, cols) * 4 + shift).requires_grad_()
    y = weft.layer_norm(x)
    expected = truth.norm(Call(weft.layer_norm, {"x": x.detach()}))
    near(y, expected["y"])
    assert (y.double() - expected["y"].truth).abs().max() < 32 * EPS32 * abs(shift)


# ---- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, "residual"),
        (torch.float16, "1x128-both"),
        (torch.float32, "layer"),
        (torch.float32, "llama"),
    ],
)
def test_dtype(options: str, dtype: torch.dtype) -> None:
    workload = next(w for w in for_op("norm") if w.options == options and "odd" in w.name)
    call = small(workload, dtype=dtype).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    assert outputs["y"].dtype == dtype
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, wanted in truth.norm(call, gradients["y"], gradients.get("residual")).items():
        if not isinstance(got[name], QTensor):
            near(got[name], wanted)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_weight_of_another_dtype(weight_dtype: torch.dtype) -> None:
    """Bug F5: the weight's gradient has the weight's dtype, from fp32 sums."""
    call = everything(dtype=torch.bfloat16)
    call = call.with_(weight=call["weight"].to(weight_dtype), bias=call["bias"].to(weight_dtype))
    got = run(call)
    assert (got["y"].dtype, got["dweight"].dtype, got["dbias"].dtype) == (
        torch.bfloat16,
        weight_dtype,
        weight_dtype,
    )
    gradients = upstreams(results(call.requiring_grad()))
    expected = truth.norm(call, gradients["y"], gradients["residual"])
    for name in ("y", "dweight", "dbias", "dx"):
        near(got[name], expected[name])


# ---- every configuration, not only the one for a CPU ---------------------------------------------------


CONFIGURED = [
    ("sm_90", 200, "residual"),
    ("sm_90", 200, "1x128-both"),
    ("sm_80", 1025, "layer"),
    ("sm_80", 1025, "row-fp8"),
    ("gfx942", 20000, "residual"),
    ("gfx942", 20000, "nvfp4"),
]
SLOWLY_CONFIGURED = [
    (target, cols, options)
    for target, cols in (("sm_90", 200), ("sm_80", 1025), ("gfx942", 20000), ("sm_89", 4096))
    for options in ("residual", "layer", "adaln-row", "1x128-both", "mx-both", "row-fp8", "nvfp4")
    if (target, cols, options) not in CONFIGURED
]


@pytest.mark.parametrize(
    ("target", "cols", "options"),
    [*CONFIGURED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY_CONFIGURED)],
)
def test_configuration_of(target: str, cols: int, options: str) -> None:
    """Bugs A2, F15: several rows to a program, long rows in a loop, codes by integer arithmetic."""
    source = next(w for w in for_op("norm") if w.options == options)
    call = source.build(source, Inputs("cpu", torch.bfloat16, 0), (21, cols))
    with choosing_for(target):
        assert (
            Capabilities.of(target).multiprocessors
            == launch.capabilities_of(torch.device("cpu")).multiprocessors
        )
        got = run(call)
    gradients = upstreams(results(call.requiring_grad()))
    expected = truth.norm(call, gradients["y"], gradients.get("residual"))
    if isinstance(got["y"], QTensor):
        del expected["y"]
        # Another order of adding up moves a number by an ulp, and rarely its code by a step.
        wanted = results(call)["y"]
        for side in ("rowwise", "columnwise"):
            if getattr(wanted, side) is not None:
                same = bits(getattr(got["y"], side).data) == bits(getattr(wanted, side).data)
                assert same.float().mean() > 0.999
    for name, value in expected.items():
        near(got[name], value)


# ---- variants ------------------------------------------------------------------------------------------

HIDDEN_SIZES = sorted(
    {1 << i for i in range(18)}
    | {(1 << i) + 1 for i in range(18)}
    | {(1 << i) + 16 for i in range(4, 18)}
    | {760, 1536, 2880, 3072, 3584, 5120, 7168, 12288, 14336, 18432, 24576}
)


@pytest.mark.parametrize("op", weft.catalogue)
def test_variants_are_a_small_closed_set(op: str) -> None:
    """Whatever the sizes are, an op with one set of options compiles no more than it declares; and a new number of
    rows compiles nothing (bugs J2, J6)."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 1 << 20, (1000,), generator=generator).tolist()
    limit = weft.catalogue[op].variants
    for workload in {w.options: w for w in distinct(for_op(op))}.values():
        if workload.op == "dequantize":
            continue  # its workloads quantise first; below
        by_rows = set()
        for count in rows[: 1000 if workload.options in ("plain", "1x128-both") else 50]:
            by_rows |= launched(lambda w=workload, count=count: w.make("meta", rows=count))
        kernels = {variant.kernel for variant in by_rows}
        assert len(by_rows) <= 2 * len(kernels), f"{workload}: {len(by_rows)} variants over numbers of rows"
        by_cols = set()
        shape = tuple(5 if size == "rows" else size for size in workload.shape[:-1])
        for cols in HIDDEN_SIZES:
            inputs = Inputs("meta", workload.dtype, 0)
            by_cols |= launched(lambda w=workload, i=inputs, s=(*shape, cols): w.build(w, i, s))
        assert len(by_cols) <= limit, f"{workload}: {len(by_cols)} variants over sizes, {limit} declared"


def launched(make: Callable[[], Call]) -> set[Any]:
    """The variants of a call, without those that make its inputs."""
    with recording("sm_90"):
        call = make()
    with recording("sm_90") as seen:
        call()
    return set(seen)


def test_variants_of_dequantize() -> None:
    every: set[Any] = set()
    with recording("sm_90") as seen:
        for rows, cols in itertools.product((1, 5, 4096), HIDDEN_SIZES):
            q = weft.quantize(torch.empty(rows, cols, device="meta"), "1x128")
            seen.clear()
            q.dequantize()
            assert len(seen) == 1, "one launch"
            every.update(seen)
    assert 0 < len(every) <= weft.catalogue["dequantize"].variants


def compiled_variants() -> int:
    import sys

    from weft.runtime import Kernel

    modules = [m for name, m in sys.modules.items() if name.startswith("weft.ops.")]
    found = [v for m in modules for v in vars(m).values() if isinstance(v, Kernel)]
    return sum(len(kernel.variants) for kernel in {id(k): k for k in found}.values())


@pytest.mark.parametrize("make", [everything, both_copies, quantizer], ids=lambda f: f.__name__)
def test_a_new_number_of_rows_compiles_nothing(make: Callable[..., Call]) -> None:
    run(make(rows=64))
    run(make(rows=63))
    before = compiled_variants()
    for rows in (1, 2, 3, 16, 17, 100, 127, 128, 129, 200, 256):
        run(make(rows=rows))
    assert compiled_variants() == before


# ---- PyTorch's own machinery ---------------------------------------------------------------------------


def arguments_of(call: Call, op: str) -> list[tuple[Any, ...]]:
    """With what arguments a call reaches an op."""
    from weft.runtime.ops import Op

    seen: list[tuple[Any, ...]] = []
    original = Op.__call__

    def spy(self: Any, *args: Any) -> Any:
        if self.name == op:
            seen.append(args)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", spy)
        if differentiable_call(call):
            run(call)
        else:
            call()
    return seen


def differentiable_call(call: Call) -> bool:
    return call.function in (*NORMS, weft.quantize, weft.glu, weft.gated_norm)


OPCHECKED = [
    ("norm", everything),
    ("norm", heads),
    # PyTorch's check adds up every output and compares every input, which it can't do with FP8 on a CPU.
    ("norm", lambda: both_copies().with_(quantize="int8:1x128:te:pow2")),
    ("norm", lambda: heads().with_(quantize="int8:row:te", return_amax=True)),
    ("norm_backward", everything),
    ("norm_backward", heads),
    ("quantize", lambda: quantizer().with_(format="int8:1x128:te:pow2")),
    ("quantize", lambda: quantizer(3, 40).with_(format="int8:tensor:te", columnwise=False, return_amax=True)),
]


@pytest.mark.parametrize("index", range(len(OPCHECKED)))
def test_opcheck(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, make = OPCHECKED[index]
    args = arguments_of(make(), op)[0]
    poisoned = torch.empty_strided

    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        """What autograd holds in place of a quantised result is never written, and poison does not equal itself."""
        made = poisoned(*args, **kwargs)
        if type(made) is Tensor and made.device.type == "cpu":
            torch.tensor([], dtype=torch.uint8).set_(made.untyped_storage()).zero_()
        return made

    monkeypatch.setattr(torch, "empty_strided", zeroed)
    if not weft.catalogue[op].differentiable:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    torch.library.opcheck(weft.catalogue[op].overload, args)


@pytest.mark.parametrize("format", ["mx", "nvfp4", "tensor"])
@pytest.mark.parametrize("make", [both_copies, quantizer], ids=lambda f: f.__name__)
def test_opcheck_of_fp8(make: Callable[[], Call], format: str) -> None:
    name, option = ("norm", "quantize") if make is both_copies else ("quantize", "format")
    args = arguments_of(make().with_(**{option: format}), name)[0]
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(weft.catalogue[name].overload, args, test_utils=checks)


@pytest.mark.parametrize("format", ["int8:1x128:te:pow2", "nvfp4"])
def test_opcheck_of_dequantize(format: str) -> None:
    q = weft.quantize(torch.randn(4, 160).bfloat16(), format)
    args = (*q.rowwise, q.format.spec, 160, torch.bfloat16)
    checks = ("test_faketensor", "test_schema", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        weft.catalogue["dequantize"].overload, args, test_utils=checks[: 1 if format == "nvfp4" else 3]
    )


def layer_with_everything(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, modulation: Tensor
) -> Any:
    return weft.layer_norm(x, weight, bias, residual=residual, modulation=modulation)


def quantized_both(x: Tensor, weight: Tensor) -> Any:
    q, h = weft.rms_norm(x, weight, residual=x * 0.5, quantize="1x128", columnwise=True)
    return q.dequantize(), h


def quantized_alone(x: Tensor) -> Any:
    q = weft.quantize(x, "mx", columnwise=True)
    return weft.dequantize(q) * 2


def two_norms(x: Tensor, weight: Tensor) -> Any:
    """Bug D2: an in-place backward breaks exactly this."""
    return x + weft.rms_norm(weft.rms_norm(x, weight), weight)


def packed_heads(qkv: Tensor, weight: Tensor) -> Any:
    return weft.rms_norm(qkv[..., :128].view(*qkv.shape[:-1], 4, 32), weight)


COMPILED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "everything": (layer_with_everything, ((6, 1, 96), (96,), (96,), (6, 1, 96), (6, 1, 192))),
    "quantized_both": (quantized_both, ((130, 96), (96,))),
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
        found = []
        for f in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            outputs = f(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.manual_seed(5)
            gradients = torch.autograd.grad(outputs, leaves, [torch.randn_like(o) for o in outputs])
            found.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
        assert_same(found[1], found[0], f"compiled {name} at {more} more rows")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager(name: str) -> None:
    """Bugs F16, J1, J3: fullgraph, with sizes that change, forward and backward, bit for bit."""
    compare_compiled(name, backend="aot_eager", dynamic=True)


@pytest.mark.parametrize("name", ["everything", "quantized_both"])
def test_inductor_is_eager(name: str) -> None:
    compare_compiled(name)


# ---- autograd ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        # One alone, all but one, all, none; the rest of the combinations when there is time.
        pytest.param(needs, marks=[] if sum(needs) in (0, 1, 4, 5) else [pytest.mark.slow])
        for needs in itertools.product([False, True], repeat=5)
    ],
)
def test_gradients_of_a_subset(wanted: tuple[bool, ...]) -> None:
    """Bugs D8, D9: every combination of what requires a gradient gives the bits of all of them together."""
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
    """Bugs D10, D11: distinct gradients for y and the residual; one of them may be missing."""
    call = everything().requiring_grad()
    outputs = results(call)
    gradients = {name: g for name, g in upstreams(outputs).items() if name in used}
    expected = truth.norm(call, gradients.get("y"), gradients.get("residual"))
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
    """Bug D2."""
    x = torch.randn(6, 96, requires_grad=True)
    weight = torch.randn(96, requires_grad=True)
    gradient = torch.randn(6, 96)
    got = torch.autograd.grad(two_norms(x, weight), (x, weight), gradient)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(two_norms(*double), double, gradient.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_gradients_are_not_aliases() -> None:
    """Bug K2: x and residual have equal gradients, but each its own."""
    call = everything().requiring_grad()
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
        for s in ((3, 2, 7), (7,), (7,), (3, 2, 7), (3, 21))
    ]

    def f(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, modulation: Tensor) -> Any:
        return function(x, weight, bias, residual=residual, modulation=modulation)

    assert torch.autograd.gradcheck(f, inputs)


def test_second_derivatives_are_refused() -> None:
    """Backward is not differentiable; silence would be a wrong answer."""
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
    found = []
    for f in (function, lambda *a: checkpoint(function, *a, use_reentrant=False)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        outputs = f(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, leaves, [o.detach() for o in outputs])
        found.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
    assert_same(found[1], found[0], "checkpoint")


def test_autocast_changes_nothing() -> None:
    """Norms compute in fp32 whatever the mode is; a bf16 x with fp32 parameters is the usual case."""
    call = everything()
    call = call.with_(weight=call["weight"].float(), bias=call["bias"].float())
    wanted = run(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(call), wanted, "autocast")


@pytest.mark.parametrize("make", [everything, both_copies, quantizer], ids=lambda f: f.__name__)
def test_through_the_dispatcher(make: Callable[[], Call]) -> None:
    """`torch.ops.weft` gives the bits of the direct path that eager calls take."""

    class Passing(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Passing.calls += func.namespace == "weft"
            return func(*args, **(kwargs or {}))

    call = make()
    wanted = run(call)
    with Passing():
        got = run(call)
    assert Passing.calls
    assert_same(got, wanted, "dispatched")
