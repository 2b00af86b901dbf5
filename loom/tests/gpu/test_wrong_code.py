"""Mistakes of a compiler and of a launch, in real kernels: each is reported, refused, or gives wrong results.

Triton's PTX is changed in ways that compilers have got wrong before: a warp is split where all of its lanes are
required (Triton's PR 11156), the barrier between two uses of the same shared memory is missing, as at the boundary of a
call, lanes store different values to one address (Triton's issue 7264). And the driver's arguments are changed as if
somebody had launched a kernel by hand.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from gpu.hopper_kernels import MATMULS, Case
from triton_loom.emulator import scope
from triton_loom.emulator.libcuda import Arrived
from triton_loom.emulator.machine import Program

# ---- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def share(x):
    return x / tl.sum(x, 0)


@triton.jit
def shares_of_shares(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    """Call a function that needs shared memory for its sum twice, both inlined."""
    at = tl.arange(0, N)
    once = share(tl.load(x_ptr + at))
    tl.store(y_ptr + at, share(once * once))


@triton.jit
def mirrored(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(z_ptr + at, 2 * tl.load(x_ptr + at))
    tl.debug_barrier()
    tl.store(y_ptr + at, tl.load(z_ptr + N - 1 - at))


@triton.jit
def squared(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    """Multiply [N / 16, 16] by its transpose."""
    row, column = tl.arange(0, N // 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * 16 + column)
    tl.store(y_ptr + row * (N // 16) + tl.arange(0, N // 16)[None, :], tl.dot(x, x.T))


def launched(kernel: Any, change: Callable[[str], str], target: str) -> tuple[torch.Tensor, set[str]]:
    """Return the result with changed PTX, and the kinds of findings."""
    torch.manual_seed(0)
    x, z = torch.rand(512), torch.zeros(512)
    x = x.bfloat16() if kernel is squared else x
    y = torch.zeros(1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "of", lambda ptx: Program(change(ptx)))
        with triton_loom.emulate(target, raises=False) as gpu:
            kernel[(1,)](x, y, z, N=512)
    return y, {finding.kind for finding in gpu.findings}


# ---- what a compiler gets wrong --------------------------------------------------------------------------------

HALF = ".reg .pred %half; .reg .b32 %lane; mov.u32 %lane, %laneid; setp.lt.u32 %half, %lane, 16;"


def split(opcode: str) -> Callable[[str], str]:
    """Return a change that executes the first such instruction twice, for half of the lanes each, as if a compiler had
    threaded a jump past the reconvergence point."""

    def change(ptx: str) -> str:
        match = re.search(rf"^\s*(?:@!?%\w+ )?{re.escape(opcode)}[^;]*;", ptx, re.M)
        assert match is not None, f"the kernel has no {opcode}"
        both = f"{{ {HALF} @%half bra upper; {match[0]} bra.uni both; upper: {match[0]} both: }}"
        return ptx[: match.start()] + both + ptx[match.end() :]

    return change


def without(opcode: str, number: int) -> Callable[[str], str]:
    """Return a change that removes one of these instructions, counted from 0."""

    def change(ptx: str) -> str:
        match = list(re.finditer(rf"^\s*{re.escape(opcode)}[^;]*;", ptx, re.M))[number]
        return ptx[: match.start()] + ptx[match.end() :]

    return change


def lanes_differ(ptx: str) -> str:
    """Leave out the last step of a warp's sum and store from all lanes: a value that the compiler assumes to be uniform
    is not."""
    first_store = re.search(r"@%p\d+ st\.shared\.b32 \[[^;]*;", ptx)
    assert first_store is not None
    shuffles = list(
        re.finditer(r"shfl\.sync\.bfly\.b32\s+(%r\d+)[^,]*, (%r\d+)[^;]*;", ptx[: first_store.start()])
    )
    last = shuffles[-1]
    ptx = ptx[: first_store.start()] + first_store[0].split(None, 1)[1] + ptx[first_store.end() :]
    return ptx[: last.start()] + f"mov.b32 {last[1]}, {last[2]};" + ptx[last.end() :]


@dataclasses.dataclass(frozen=True)
class Mistake:
    kernel: Any
    change: Callable[[str], str]
    found: set[str]
    changes_result: bool  # in the order in which things are executed here


MISTAKES = {
    "a warp split at shfl": Mistake(
        shares_of_shares, split("shfl.sync"), {"split warp", "lane not there"}, False
    ),
    "a warp split at bar": Mistake(shares_of_shares, split("bar.sync"), {"split warp"}, False),
    "a warp split at ldmatrix": Mistake(squared, split("ldmatrix"), {"split warp"}, False),
    "a warp split at mma": Mistake(squared, split("mma.sync"), {"split warp"}, False),
    "no barrier between two calls": Mistake(shares_of_shares, without("bar.sync", 2), {"shared memory race"}, True),
    "no barrier inside of a call": Mistake(
        shares_of_shares, without("bar.sync", 0), {"shared memory race", "uninitialized shared memory"}, True
    ),
    "a global store read back": Mistake(mirrored, without("bar.sync", 0), {"global memory race"}, True),
    "lanes that should agree": Mistake(shares_of_shares, lanes_differ, {"lanes disagree"}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_of_a_compiler(name: str) -> None:
    mistake = MISTAKES[name]
    right, reported = launched(mistake.kernel, lambda ptx: ptx, "sm_80")
    assert not reported
    result, reported = launched(mistake.kernel, mistake.change, "sm_80")
    assert reported == mistake.found
    assert torch.equal(result, right) != mistake.changes_result


# ---- what a launch gets wrong ----------------------------------------------------------------------------------


def map_with(**fields: int) -> Callable[[Arrived], Arrived]:
    """Return a change of fields (of `TensorMap` in include/gpu/tensor_map.h) of the first tensor map parameter."""
    layout = struct.Struct("<Q8B5Q4Q5H5BxI20x")
    places = {"swizzle": 3, "box_columns": 18, "box_rows": 19}

    def change(arrived: Arrived) -> Arrived:
        values = list(layout.unpack(arrived.parameters[:128]))
        for name, value in fields.items():
            values[places[name]] = value
        return dataclasses.replace(arrived, parameters=layout.pack(*values) + arrived.parameters[128:])

    return change


def without_scratch(arrived: Arrived) -> Arrived:
    """Clear the last two parameters, the addresses of scratch memory and of a profiler's."""
    return dataclasses.replace(arrived, parameters=arrived.parameters[:-16] + bytes(16))


HOST, DEVICE = MATMULS["host-made descriptors"], MATMULS["device-made descriptors"]
REPORTED: dict[str, tuple[Case, Callable[[Arrived], Arrived], set[str]]] = {
    "shared memory of a byte too little": (
        HOST, lambda a: dataclasses.replace(a, shared_bytes=a.shared_bytes - 1),
        {"shared memory out of bounds", "uninitialized shared memory"},
    ),
    "a box of too few rows": (HOST, map_with(box_rows=32), {"deadlock"}),
    "a box of too few columns": (HOST, map_with(box_columns=32), {"deadlock"}),
    "a swizzle of 64 bytes for rows of 128": (HOST, map_with(swizzle=2), {"unusable tensor map", "deadlock"}),
    "no scratch memory": (DEVICE, without_scratch, {"global memory out of bounds", "deadlock"}),
}  # fmt: skip
# Changes that no rule forbids: the kernel runs, on other numbers.
WRONG_RESULTS = {
    "no swizzle": (HOST, map_with(swizzle=0)),
}
REFUSED: dict[str, tuple[Case, Callable[[Arrived], Arrived], str]] = {
    "other warps than it was compiled for": (
        HOST, lambda a: dataclasses.replace(a, block=(64, 1, 1)), "is compiled for 128 threads per block"
    ),
    "a parameter too few": (
        HOST, lambda a: dataclasses.replace(a, parameters=a.parameters[:-8]), "bytes of parameters, but is launched"
    ),
}  # fmt: skip


def launch(case: Case, change: Callable[[Arrived], Arrived]) -> tuple[bool, set[str]]:
    """Return whether the result is right when something else arrives at the driver, and the kinds of findings."""
    result, expected, start = case.make()
    result.zero_()
    receive = scope.Gpu.receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scope.Gpu, "receive", lambda gpu, arrived: receive(gpu, change(arrived)))
        with triton_loom.emulate("sm_90", raises=False) as gpu:
            start()
    close = torch.allclose(
        result.float(), expected.float(), rtol=2**-6, atol=2**-6 * expected.abs().max().item()
    )
    return close, {finding.kind for finding in gpu.findings}


@pytest.mark.parametrize("case", [HOST, DEVICE], ids=["host", "device"])
def test_a_launch_that_is_right(case: Case) -> None:
    assert launch(case, lambda arrived: arrived) == (True, set())


@pytest.mark.parametrize("name", list(REPORTED))
def test_a_launch_that_is_reported(name: str) -> None:
    case, change, kinds = REPORTED[name]
    assert launch(case, change) == (False, kinds)


@pytest.mark.parametrize("name", list(WRONG_RESULTS))
def test_a_launch_that_computes_something_else(name: str) -> None:
    right, reported = launch(*WRONG_RESULTS[name])
    assert not right
    assert not reported


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_launch_that_is_refused(name: str) -> None:
    case, change, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        launch(case, change)
