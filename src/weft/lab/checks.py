"""What every op is held to on every workload, on whichever device is under test. Each check takes a workload, gives it
few rows, and raises an AssertionError that says what is wrong, or `NotApplicable` where there is nothing to check."""

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
    """Why a check has nothing to look at."""


def assert_accurate(op: str, call: Call) -> None:
    """Results and gradients of a call are what the truth of the op says."""
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
    """Forward and backward against float64; and integers in memory are what kernels take for granted."""
    with holding():
        if truth_of(workload.op) is not None:
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
        raise NotApplicable("nothing is quantised")
    if call["seed"] is not None:  # the oracle draws no random numbers
        with backend("reference"):
            assert_same(outputs, results(call), "stochastic rounding")
        return
    encode = encoded_of(workload.op)
    numbers = own_numbers(call) if encode is None else encode(call, results)
    scale = call["quant_scale"] if call["quant_scale"] is not None else call["scale"]
    for name, value in numbers.items():
        if name in quantised:
            copies = quantised[name]
            assert (copies.rowwise is not None) == call.kwargs.get("rowwise", True)
            assert_copies(copies, value, call["ends"], call["align"] or 1, scale)
    if "amax" in outputs and "y" in numbers:
        assert outputs["amax"] == numbers["y"].abs().max().float()


def guard_bands(workload: Workload) -> None:
    """Nothing is read from or written to the memory around inputs and outputs, by the op or by its backward."""
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
    """The same bits come out if inputs, gradients and everything that is allocated have NaN around them, which stays
    there, and inputs and gradients stay as they are."""
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
    """The same bits in every run and for any number of the CPU's threads."""
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
    """A graph that is kept can be walked again: backward changes none of what it saved."""
    if not differentiable(workload):
        raise NotApplicable("nothing is differentiated")
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
    """Collects what was compiled for the launches of a block, when that is over."""
    launched: list[tuple[Kernel, Variant]] = []
    binaries: list[Any] = []

    def note(launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        launched.append((launch.kernel, launch.variant(pointers, max(integers) >= WIDE, len(integers))))

    with observing(note):
        yield binaries
    for kernel, variant in launched:
        found = [compiled for (known, _), compiled in kernel.variants.items() if known == variant]
        binaries += [compiled for compiled in found if set(compiled.asm) & {"ptx", "amdgcn"}]


def why_other_bits(binary: Any) -> frozenset[str]:
    """Why a kernel compiled for a GPU may give other bits than Loom; of AMD's code nothing is known."""
    return reasons(binary.asm["ptx"]) if "ptx" in binary.asm else frozenset({"AMD's code was not looked at"})


def same_bits_as_the_cpu(workload: Workload) -> None:
    """A GPU gives the bits that Loom gives with the same tiles, unless its code has approximate instructions, sums over
    threads or products of matrices."""
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
    """Recorded once (on a GPU in a CUDA graph) and replayed on other numbers in the same memory: what a call gives."""
    device = conditions().device
    call, other = small(workload), small(workload, seed=conditions().seed + 1)
    names = [name for name, tensor in call.tensors().items() if tensor.shape == other[name].shape]
    if not names:
        raise NotApplicable("its tensors are in lists")

    def function(*tensors: Tensor) -> Any:
        return returned(call.to(device).with_(**dict(zip(names, tensors, strict=True))))

    given = [other[name].to(device) for name in names]
    step = capture(function, *(call[name].to(device) for name in names))
    assert_same(moved(step(*given), CPU), moved(function(*given), CPU), "replayed")


def streams(workload: Workload) -> None:
    """On another stream than the default one the same bits, without waiting for the default one's work."""
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
    """On another GPU than the current one the same bits."""
    device = conditions().device
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotApplicable("there is one device")
    others = (torch.device("cuda", k) for k in range(torch.cuda.device_count()))
    other = next(found for found in others if found != device)
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
