"""What every op is held to on every workload. Each check takes a workload and gives it few rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_loom.testing import EPS32, NAN, Guarded, guarded_allocations, words

import weft
from tests.catalogue.calls import (
    assert_same,
    backward,
    differentiable,
    handed_through,
    near,
    own_numbers,
    parts,
    results,
    run,
    small,
    tracked,
    upstreams,
)
from tests.catalogue.families import declared
from tests.quant.copies import assert_copies
from tests.support.truth import ROUNDINGS, Near
from weft import QTensor
from weft.runtime import observing
from weft.workloads import Call, Workload
from weft.workloads.traffic import CACHED, count_call, rows_within


def assert_accurate(op: str, call: Call) -> None:
    """Results and gradients of a call are what the truth of the op says."""
    gradients: dict[str, Tensor] = {}
    if tracked(op, call):
        call = call.requiring_grad()
    got = results(call)
    if tracked(op, call):
        gradients = upstreams(got)
        got |= backward(call, got, gradients)
    expected = declared("TRUTHS")[op](call, gradients)
    for name, value in got.items():
        if isinstance(value, QTensor):  # `quantized_bytes` judges it
            continue
        wanted = expected[name]
        if isinstance(wanted, Tensor):
            assert torch.equal(value, wanted), name
        else:
            near(value, wanted)


def accuracy(workload: Workload) -> None:
    """Forward and backward against float64."""
    if workload.op in declared("TRUTHS"):
        assert_accurate(workload.op, small(workload))
    else:
        accuracy_by_reference(workload)


def accuracy_by_reference(workload: Workload) -> None:
    """For an op without a truth: the op itself in float64, where its reference serves."""
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


def quantized_bytes(workload: Workload) -> None:
    """Codes and scales equal those of an independent oracle, made from the op's own fp32 numbers."""
    call = small(workload)
    outputs = results(call)
    quantised = {name: value for name, value in outputs.items() if isinstance(value, QTensor)}
    if not quantised:
        return
    if call["seed"] is not None:  # the oracle draws no random numbers
        with weft.backend("reference"):
            assert_same(outputs, results(call), "stochastic rounding")
        return
    numbers = declared("ENCODED").get(workload.op, own_numbers)(call)
    scale = call["quant_scale"] if call["quant_scale"] is not None else call["scale"]
    for name, value in numbers.items():
        if name in quantised:
            copies = quantised[name]
            assert (copies.rowwise is not None) == call.kwargs.get("rowwise", True)
            assert_copies(copies, value, call["ends"], call["align"] or 1, scale)
    if "amax" in outputs and "y" in numbers:
        assert outputs["amax"] == numbers["y"].abs().max().float()


def guard_bands(workload: Workload) -> None:
    """Nothing is read from or written to the memory around inputs and outputs."""
    call = small(workload)
    wanted = results(call)
    inputs = {name: Guarded.of(tensor, NAN) for name, tensor in call.tensors().items()}
    guarded = call.with_(**{name: band.tensor for name, band in inputs.items()})
    with guarded_allocations() as bands:
        got = results(guarded)
    assert bands, "no allocation was seen"
    assert_same(got, wanted, "with bands of NaN around everything")
    for band in bands:
        band.check()
    for name, band in inputs.items():
        assert torch.equal(words(band.check()), words(call.kwargs[name])), f"{name} was changed"
    if not differentiable(workload):
        return
    wanted = run(call)
    inputs = {name: Guarded.of(tensor, NAN) for name, tensor in call.tensors().items()}
    gradients = upstreams(results(call.requiring_grad()))
    upstream = {name: Guarded.of(tensor, NAN) for name, tensor in gradients.items()}
    guarded = call.with_(**{name: band.tensor for name, band in inputs.items()})
    with guarded_allocations() as bands:
        got = run(guarded, {name: band.tensor for name, band in upstream.items()})
    assert_same(got, wanted, "backward, with bands of NaN around everything")
    for band in bands:
        band.check()
    for name, band in inputs.items():
        assert torch.equal(words(band.check()), words(call.kwargs[name])), f"{name} was changed by backward"
    for name, band in upstream.items():
        assert torch.equal(words(band.check()), words(gradients[name])), f"the gradient of {name} was changed"


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
    assert any(value.requires_grad and not handed_through(value) for value in tracked.values())
    with torch.no_grad():
        plain = results(call.requiring_grad())
    assert not any(value.requires_grad and not handed_through(value) for value in plain.values())
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

    def refuse(*call: Any) -> None:
        raise AssertionError("a kernel was launched")

    with observing(refuse):
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
        quantized_bytes(workload)
    assert kernel.keys() == reference.keys()
    for name, value in kernel.items():
        assert (value.shape, value.dtype) == (reference[name].shape, reference[name].dtype), name


def enough_rows(workload: Workload) -> int:
    """So many that tensors outgrow the cache of the model of traffic: 72 MiB move, or twice that if the main input,
    were its elements bytes, would fit into the cache."""
    rows = rows_within(workload, 72 << 20)
    if math.prod(workload.sized(rows)) < CACHED:
        rows = rows_within(workload, 144 << 20)
    return rows - (rows > 64)  # no multiple of anything


def witnessed(workload: Workload) -> None:
    """With the launches of an H100: every access is to an element of a tensor argument, no byte is read that nobody
    wrote, no two programs race, no 32-bit offset overflows, every promise to the compiler is kept; and no more bytes
    move than the workload says."""
    rows = enough_rows(workload)
    call = workload.make(rows=rows)  # by launches of the CPU's own, which are not meant
    with triton_loom.sanitize() as seen:
        moved = count_call(workload, call, rows)
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


# These take long, whatever the workload.
BY_NIGHT = ("witnessed",)
