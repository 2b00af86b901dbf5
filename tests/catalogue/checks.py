"""Checks that every op must pass on every workload besides those of its results (`weft.lab.checks`). They concern
PyTorch's transformations, waiting for the device, and the memory that kernels access."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.catalogue.memory import launches_in_callers_memory, results_in_callers_memory
from weft import QTensor
from weft.lab import checks as results_of_ops
from weft.lab.calls import assert_same, backward, differentiable, parts, results, run, small, upstreams
from weft.lab.checks import NotApplicable, accuracy, quantized_bytes
from weft.lab.families import Workload
from weft.lab.traffic import CACHED, count_call, rows_within
from weft.runtime import observing


def functional(workload: Workload) -> None:
    """Check that torch.func gives autograd's bits, and refuses what would lose a tangent or a batch."""
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
    gradients_of_leaves = pulled_back(tuple(gradients.values()))
    assert_same(dict(zip(wanted, gradients_of_leaves, strict=True)), wanted, "torch.func.vjp")
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
    """Check that reference results are differentiated by the reference, outside the block and on any thread."""
    if not differentiable(workload):
        return
    call = small(workload).requiring_grad()
    with weft.backend("reference"):
        outputs = results(call)
        gradients = upstreams(outputs)
        wanted = backward(call, outputs, gradients, retain_graph=True)
        dense = {n: o.dequantize() if isinstance(o, QTensor) else o for n, o in outputs.items()}
    results_elsewhere: list[dict[str, Tensor]] = []

    def elsewhere() -> None:
        results_elsewhere.append(backward(call, dense, gradients))

    def refuse(*call: Any) -> None:
        raise AssertionError("a kernel was launched")

    with observing(refuse):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert results_elsewhere, "a kernel was launched"
    assert_same(results_elsewhere[0], wanted, "backward elsewhere")


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forbidden = ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero")
        assert func.overloadpacket.__name__ not in forbidden, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def no_host_sync(workload: Workload) -> None:
    """Check that nothing reads a tensor's elements on the host, so that a CUDA graph can hold the op."""

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
    """Check that the reference, used without Triton, gives the same shapes and dtypes and meets the same truth."""
    call = small(workload)
    kernel = parts(results(call))
    with weft.backend("reference"):
        reference = parts(results(call))
        accuracy(workload)
        with suppress(NotApplicable):
            quantized_bytes(workload)
    assert kernel.keys() == reference.keys()
    for name, value in kernel.items():
        assert (value.shape, value.dtype) == (reference[name].shape, reference[name].dtype), name


def enough_rows(workload: Workload) -> int:
    """Return enough rows for tensors to outgrow the traffic model's cache. 72 MiB move, or twice that if the main
    input, as bytes, would fit into the cache."""
    rows = rows_within(workload, 72 << 20)
    if math.prod(workload.sized(rows)) < CACHED:
        rows = rows_within(workload, 144 << 20)
    return rows - (rows > 64)  # not a multiple of any block size


def witnessed(workload: Workload) -> None:
    """Check the memory accesses of an H100's launches. Every access is to an element of a tensor argument, no
    uninitialized byte is read, no two programs race, no 32-bit offset overflows, every promise to the compiler holds,
    and no more bytes move than the workload promises."""
    rows = enough_rows(workload)
    call = workload.make(rows=rows)  # made by the CPU's own launches, outside the check
    with triton_loom.sanitize() as seen:
        moved = count_call(workload, call, rows)
    assert seen.launches >= moved.launches > 0, "no launch was seen"
    assert moved.as_promised, f"{moved.ratio:.3f} times the least bytes: {moved}"


# Checks of every op and workload.
CHECKS: dict[str, Callable[[Workload], None]] = {
    check.__name__: check
    for check in (
        *results_of_ops.CHECKS.values(),
        functional,
        backend_of_a_graph,
        no_host_sync,
        reference_agrees,
        launches_in_callers_memory,
        results_in_callers_memory,
        witnessed,
    )
}


# Checks for the night: slow ones, and those that do not apply to a CPU.
BY_NIGHT = ("witnessed", "same_bits_as_the_cpu", "streams", "second_device")
# Checks of code shared by all options of an op: one workload of each op by day, the others by night. Guard bands are
# among them because every kernel is also proven to stay inside its tensors (docs/prove.md).
OF_OPS = (
    "guard_bands",
    "determinism",
    "twice_backward",
    "no_grad",
    "functional",
    "backend_of_a_graph",
    "no_host_sync",
    "replay",
    "reference_agrees",
)
