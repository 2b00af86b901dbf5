"""Contracts from recorded launches: which numbers become sizes, and the conditions that callers add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
import z3
from triton_loom.prove import ContractError, prove
from triton_loom.prove.recording import Launch, described, fixed, generalized, recorded


@triton.jit
def scale_groups(x_ptr, scale_ptr, y_ptr, cols, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Scale rows by one factor for every GROUP rows."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + offsets, mask=offsets < cols)
    tl.store(y_ptr + row * cols + offsets, x * tl.load(scale_ptr + row // GROUP), mask=offsets < cols)


@pytest.fixture(scope="module")
def launch() -> Launch:
    x = torch.randn(21, 50)
    with triton_loom.active(), recorded() as launches:
        scale_groups[(21,)](x, torch.randn(7), torch.empty_like(x), 50, GROUP=3, BLOCK=64)
    (recorded_launch,) = launches
    return recorded_launch


def of_groups(sizes: Any) -> list[Any]:
    return [sizes["size_21"] == 3 * sizes["size_7"]]


def test_extents_become_sizes(launch: Launch) -> None:
    contract = generalized(launch)
    assert {(size.name, size.high) for size in contract.sizes} == {
        ("size_21", 2**31 - 1),
        ("cols", 64),  # BLOCK is derived from it
        ("size_7", 2**31 - 1),
    }
    assert str(contract.grid[0]) == "size_21"
    assert fixed(contract) == {"GROUP": 3, "BLOCK": 64}


def test_a_guess_that_is_too_general_is_refuted(launch: Launch) -> None:
    report = prove(launch.kernel, generalized(launch))
    (answer,) = report.counterexamples
    assert (answer.kind, answer.what) == ("bounds", "load scale_ptr")
    assert answer.example is not None
    assert answer.example.confirmed


def test_conditions_of_callers_narrow_the_contract(launch: Launch) -> None:
    contract = generalized(launch, ensured=of_groups)
    assert "with size_21 == 3*size_7" in described(contract)
    assert fixed(contract) == {"GROUP": 3, "BLOCK": 64}
    assert fixed(generalized(launch, ensured=lambda s: [s["size_7"] == 7]))["size_7"] == 7
    assert prove(launch.kernel, contract).verdict == "proven"
    # One row beyond the last group has no scale.
    wider = generalized(launch, ensured=lambda s: [s["size_21"] <= 3 * s["size_7"] + 1])
    assert prove(launch.kernel, wider).verdict == "counterexample"


def test_conditions_that_the_launch_violates_are_refused(launch: Launch) -> None:
    with pytest.raises(ContractError, match="does not hold of the recorded launch"):
        generalized(launch, ensured=lambda s: [s["size_21"] == 4 * s["size_7"]])


@triton.jit
def rotate_tokens(x_ptr, length, BATCH: tl.constexpr, HEAD: tl.constexpr):
    place = x_ptr + tl.program_id(0).to(tl.int64) * HEAD + tl.arange(0, HEAD)
    tl.store(place, -tl.load(place))


def test_a_grid_may_be_a_constant_times_a_size() -> None:
    """The grid is batches times tokens, where the batches are a constant."""
    x = torch.randn(2, 19, 32)
    with triton_loom.active(), recorded() as launches:
        rotate_tokens[(38,)](x, 19, BATCH=2, HEAD=32)
    contract = generalized(launches[0])
    assert str(contract.grid[0]) == "2*length"
    assert prove(rotate_tokens, contract).verdict == "proven"


@triton.jit
def look_up(index_ptr, table_ptr, y_ptr, MARK: tl.constexpr, PLACES: tl.constexpr):
    row = tl.program_id(0)
    index = tl.load(index_ptr + row)
    if index != MARK:
        tl.store(y_ptr + row, tl.load(table_ptr + index))


@pytest.mark.parametrize(
    ("index", "places", "assumed", "verdict"),
    [
        ([0, 5, 8], 4, "And(v >= 0, size_11 > v)", "proven"),  # below the next size
        ([2, 5, 8], 9, "And(v >= 0, v < 9)", "counterexample"),  # everything below a constant
        ([2, 5, 11], 4, "And(v >= 0, size_11 + 1 > v)", "counterexample"),  # up to a size, as offsets are
        ([4, -100, 8], 4, "Or(v == -100, And(v >= 0, size_11 > v))", "proven"),  # a marker
        ([4, -7, -3], 4, "And(v >= -7, size_11 > v)", "counterexample"),
    ],
)
def test_assumptions_about_memory_are_generalized(
    index: list[int], places: int, assumed: str, verdict: str
) -> None:
    arguments = {"index_ptr": torch.tensor(index), "table_ptr": torch.randn(11), "y_ptr": torch.empty(3)}
    contract = generalized(Launch(look_up, (3, 1, 1), {**arguments, "MARK": -100, "PLACES": places}))
    assert str(contract.arguments["index_ptr"].values(z3.Int("v"))) == assumed
    assert prove(look_up, contract).verdict == verdict


def test_liger_kernels_are_proven() -> None:
    """Prove the forward and backward kernels of Liger's RMSNorm as installed."""
    liger = pytest.importorskip("liger_kernel.ops")
    x, weight = torch.randn(33, 257, requires_grad=True), torch.rand(257, requires_grad=True)
    with triton_loom.active(), recorded() as launches:
        y = liger.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True)
        torch.autograd.grad(y.sum(), [x, weight])
    assert len(launches) == 2
    for launch in launches:
        contract = generalized(launch)
        assert [size.high for size in contract.sizes] == [2**31 - 1, 512]
        assert prove(launch.kernel, contract).verdict == "proven"
