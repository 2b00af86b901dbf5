"""Checks that every op must pass on every workload, on the device under test. Each check takes a workload, gives it few
rows, and raises an AssertionError that says what is wrong, or `NotApplicable` if there is nothing to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton_loom
from torch import Tensor
from triton_loom.ptx.exactness import reasons
from triton_loom.testing import EPS32, NAN, Guarded, guarded_allocations, words

from .. import backend
from ..graphs import capture
from ..quant import QTensor
from ..runtime import Kernel, Launch, Variant, capabilities_of, choosing_for, observing
from ..runtime.launch import WIDE
from .assumptions import holding
from .calls import (
    assert_same,
    backward,
    conditions,
    differentiable,
    handed_through,
    own_numbers,
    parts,
    results,
    returned,
    run,
    small,
    tracked,
    under,
    upstreams,
)
from .copies import assert_copies
from .families import Call, Workload, encoded_of, truth_of
from .problem import moved
from .truth import ROUNDINGS, Near, near

CPU = torch.device("cpu")


class NotApplicable(Exception):
    """Reason that a check has nothing to look at."""


def assert_accurate(op: str, call: Call) -> None:
    """Raise unless results and gradients of a call agree with the truth of the op."""
    gradients: dict[str, Tensor] = {}
    if tracked(op, call):
        call = call.requiring_grad()
    got = results(call)
    if tracked(op, call):
        gradients = upstreams(got)
        got |= backward(call, got, gradients)
    truth = truth_of(op)
    assert truth is not None, f"{op} has no truth"
    expected = truth(call, gradients)
    for name, value in got.items():
        if isinstance(value, QTensor):  # `quantized_bytes` judges it
            continue
        wanted = expected[name]
        if isinstance(wanted, Tensor):
            assert torch.equal(value, wanted), name
        else:
            near(value, wanted)


def accuracy(workload: Workload) -> None:
    """Compare forward and backward with float64, and loaded integers with the kernels' assumptions."""
    with holding():
        if truth_of(workload.op) is not None:
            assert_accurate(workload.op, small(workload))
        else:
            accuracy_by_reference(workload)


def accuracy_by_reference(workload: Workload) -> None:
    """Compare an op without a truth with its own reference in float64."""
    call = small(workload)
    floats = {name: t for name, t in call.tensors().items() if t.is_floating_point()}
    exact = call.with_(**{name: t.double() for name, t in floats.items()})
    if differentiable(workload):
        gradients = upstreams(results(call.requiring_grad()))
        got, wanted = run(call, gradients), run(exact, {name: g.double() for name, g in gradients.items()})
    else:
        got, wanted = results(call), results(exact)
    assert got.keys() == wanted.keys()
    for name, expected in parts(wanted).items():
        if not expected.is_floating_point():
            assert torch.equal(got[name], expected), name
            continue
        largest = expected.abs().amax(-1, keepdim=True) if expected.dim() > 1 else expected.abs().amax()
        near(got[name], Near(expected, (ROUNDINGS * EPS32 * largest).expand(expected.shape)))


def quantized_bytes(workload: Workload) -> None:
    """Compare codes and scales with an independent oracle's, made from the op's own fp32 results."""
    call = small(workload)
    outputs = results(call)
    quantized = {name: value for name, value in outputs.items() if isinstance(value, QTensor)}
    if not quantized:
        raise NotApplicable("nothing is quantized")
    if call["seed"] is not None:  # the oracle draws no random numbers
        with backend("reference"):
            assert_same(outputs, results(call), "stochastic rounding")
        return
    encode = encoded_of(workload.op)
    numbers = own_numbers(call) if encode is None else encode(call, results)
    scale = call["quant_scale"] if call["quant_scale"] is not None else call["scale"]
    for name, value in numbers.items():
        if name in quantized:
            copies = quantized[name]
            assert (copies.rowwise is not None) == call.kwargs.get("rowwise", True)
            assert_copies(copies, value, call["ends"], call["align"] or 1, scale)
    if "amax" in outputs and "y" in numbers:
        assert outputs["amax"] == numbers["y"].abs().max().float()


def guard_bands(workload: Workload) -> None:
    """Check that op and backward neither read nor write the memory around inputs and outputs."""
    call = small(workload).to(conditions().device)
    _between_guards(call, {}, results(call), lambda guarded, _: results(guarded))
    if differentiable(workload):
        gradients = upstreams(results(call.requiring_grad()))
        _between_guards(call, gradients, run(call, gradients), run)


def _between_guards(
    call: Call,
    gradients: dict[str, Tensor],
    wanted: dict[str, Tensor],
    evaluate: Callable[[Call, dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    """Raise if bands of NaN around inputs, gradients and allocations change the result. The bands, the inputs and the
    gradients must stay unchanged too."""
    inputs = {name: Guarded.of(tensor, NAN) for name, tensor in call.tensors().items()}
    upstream = {name: Guarded.of(tensor, NAN) for name, tensor in gradients.items()}
    guarded = call.with_(**{name: band.tensor for name, band in inputs.items()})
    with guarded_allocations(device=call.device) as bands:
        got = evaluate(guarded, {name: band.tensor for name, band in upstream.items()})
    assert bands, "no allocation was seen"
    what = "backward" if gradients else "forward"
    assert_same(got, wanted, f"{what}, with bands of NaN around everything")
    for band in bands:
        band.check()
    for name, band in inputs.items():
        assert torch.equal(words(band.check()), words(call.kwargs[name])), f"{name} was changed by {what}"
    for name, band in upstream.items():
        assert torch.equal(words(band.check()), words(gradients[name])), f"the gradient of {name} was changed"


def determinism(workload: Workload) -> None:
    """Check that every run gives the same bits, with any number of CPU threads."""
    call = small(workload)
    again = run if differentiable(workload) else results
    first = again(call)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert_same(again(call), first, f"another run, {threads} threads")
    finally:
        torch.set_num_threads(before)


def twice_backward(workload: Workload) -> None:
    """Check that a retained graph can be walked again: backward changes nothing that was saved."""
    if not differentiable(workload):
        raise NotApplicable("nothing is differentiated")
    call = small(workload).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    first = backward(call, outputs, gradients, retain_graph=True)
    first = {name: grad.clone() for name, grad in first.items()}
    assert_same(backward(call, outputs, gradients), first, "second backward")


def no_grad(workload: Workload) -> None:
    """Check that results without gradients have the same bits and do not require gradients."""
    call = small(workload)
    if not differentiable(workload):
        raise NotApplicable("nothing is differentiated")
    tracked = results(call.requiring_grad())
    assert any(value.requires_grad and not handed_through(value) for value in tracked.values())
    with torch.no_grad():
        plain = results(call.requiring_grad())
    assert not any(value.requires_grad and not handed_through(value) for value in plain.values())
    assert_same(plain, tracked, "no_grad")
    with torch.inference_mode():
        assert_same(results(small(workload)), plain, "inference_mode")


@contextmanager
def _noting_binaries() -> Iterator[list[Any]]:
    """Collect the binaries of the launches within the block, once it has ended."""
    launched: list[tuple[Kernel, Variant]] = []
    binaries: list[Any] = []

    def note(launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        launched.append((launch.kernel, launch.variant(pointers, max(integers) >= WIDE, len(integers))))

    with observing(note):
        yield binaries
    for kernel, variant in launched:
        matches = [compiled for (candidate, _), compiled in kernel.variants.items() if candidate == variant]
        binaries += [compiled for compiled in matches if set(compiled.asm) & {"ptx", "amdgcn"}]


def why_other_bits(binary: Any) -> frozenset[str]:
    """Return the reasons a GPU binary may give other bits than Loom; AMD code is not inspected."""
    return reasons(binary.asm["ptx"]) if "ptx" in binary.asm else frozenset({"AMD's code was not looked at"})


def same_bits_as_the_cpu(workload: Workload) -> None:
    """Compare a GPU's bits with Loom's for the same tiles. Not applicable if the GPU code has approximate instructions,
    sums over threads or matrix products."""
    call = small(workload)
    if capabilities_of(conditions().device).is_cpu:
        raise NotApplicable("this is the CPU")
    with _noting_binaries() as binaries:
        got = results(call)
    excuses = sorted(set().union(*map(why_other_bits, binaries)))
    if excuses or not binaries:
        raise NotApplicable(", ".join(excuses) or "no kernel was launched")
    with choosing_for(capabilities_of(conditions().device)), triton_loom.active(), under(device=CPU):
        assert_same(got, results(call), "on the CPU")


def replay(workload: Workload) -> None:
    """Record the call once (on a GPU in a CUDA graph), replay it on other inputs in the same memory, and compare."""
    device = conditions().device
    call, other = small(workload), small(workload, seed=conditions().seed + 1)
    names = [name for name, tensor in call.tensors().items() if tensor.shape == other[name].shape]
    if not names:
        raise NotApplicable("its tensors are in lists")

    def function(*tensors: Tensor) -> Any:
        return returned(call.to(device).with_(**dict(zip(names, tensors, strict=True))))

    fresh = [other[name].to(device) for name in names]
    step = capture(function, *(call[name].to(device) for name in names))
    assert_same(moved(step(*fresh), CPU), moved(function(*fresh), CPU), "replayed")


def streams(workload: Workload) -> None:
    """Check for the same bits on a second stream, without waiting for the default stream's work."""
    device = conditions().device
    if device.type != "cuda":
        raise NotApplicable("only GPUs have streams")
    call = small(workload).to(device)
    wanted = results(call)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        got = results(call)
    stream.synchronize()
    assert_same(got, wanted, "on another stream")


def second_device(workload: Workload) -> None:
    """Check for the same bits on a GPU that is not the current one."""
    device = conditions().device
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotApplicable("there is one device")
    others = (torch.device("cuda", k) for k in range(torch.cuda.device_count()))
    other = next(candidate for candidate in others if candidate != device)
    if capabilities_of(other) != capabilities_of(device):
        raise NotApplicable(f"{other} is another kind of device")
    call = small(workload)
    wanted = results(call)
    with torch.cuda.device(device), under(device=other):
        assert_same(results(call), wanted, f"on {other} while {device} is the current one")


# In the order in which `weft verify` shows them.
CHECKS: dict[str, Callable[[Workload], None]] = {
    check.__name__: check
    for check in (
        accuracy,
        quantized_bytes,
        guard_bands,
        determinism,
        twice_backward,
        no_grad,
        same_bits_as_the_cpu,
        replay,
        streams,
        second_device,
    )
}
