"""Pointers that need more than their address for the sanitizer: pointers chosen at run time, and descriptors."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_loom import Finding, sanitize

# ---- chosen when it runs ------------------------------------------------------------------------------------


@triton.jit
def by_select(x_ptr, y_ptr, z_ptr, n, first, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptr = tl.where(first != 0, x_ptr, y_ptr)
    tl.store(z_ptr + off, tl.load(ptr + off, mask=off < n, other=0.0))


@triton.jit
def by_branch(x_ptr, y_ptr, z_ptr, n, first, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptr = x_ptr
    if first == 0:
        ptr = y_ptr
    tl.store(z_ptr + off, tl.load(ptr + off, mask=off < n, other=0.0))


@triton.jit
def by_lane(x_ptr, y_ptr, z_ptr, n, first, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptrs = tl.where((off % 2 == 0) == (first != 0), x_ptr + off, y_ptr + off)
    ptrs = tl.where(off % 2 == 0, ptrs, z_ptr + off)
    tl.store(z_ptr + off, tl.load(ptrs, mask=off < n, other=0.0))


@triton.jit
def by_swapping(x_ptr, y_ptr, z_ptr, n, first, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one, other = y_ptr, x_ptr
    for _ in range(first):
        one, other = other, one
    tl.store(z_ptr + off, tl.load(one + off, mask=off < n, other=0.0))


@triton.jit(noinline=True)
def copied(ptr, z_ptr, pid, n, BLOCK: tl.constexpr):
    off = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + off, tl.load(ptr + off, mask=off < n, other=0.0))


@triton.jit
def by_call(x_ptr, y_ptr, z_ptr, n, first, BLOCK: tl.constexpr):
    if first != 0:
        copied(x_ptr, z_ptr, tl.program_id(0), n, BLOCK)
    else:
        copied(y_ptr, z_ptr, tl.program_id(0), n, BLOCK)


CHOICES = [by_select, by_branch, by_lane, by_swapping, by_call]
of_each_choice = pytest.mark.parametrize("kernel", CHOICES, ids=lambda kernel: kernel.fn.__name__)


def neighbors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x and y in one storage, y right after x, and z."""
    storage = torch.arange(128.0)
    return storage[:64], storage[64:], torch.zeros(128)


@of_each_choice
@pytest.mark.parametrize("first", [0, 1])
def test_a_chosen_pointer_is_checked_against_its_own_tensor(kernel: Any, first: int) -> None:
    """x[64] is y[0], which is also a tensor of the launch."""
    x, y, z = neighbors()
    with sanitize(collect=True) as seen:
        kernel[(1,)](x, y, z, 80, first, 128)
    findings = [finding for finding in seen.findings if finding.kind == "out-of-bounds load"]
    assert [finding.argument for finding in findings] == (["x_ptr"] if first else ["y_ptr"])
    assert findings[0].index == (64,)
    assert findings[0].count == (8 if kernel is by_lane else 16)


@of_each_choice
@pytest.mark.parametrize("first", [0, 1])
def test_chosen_pointers_load_what_they_point_to(kernel: Any, first: int) -> None:
    x, y, z = neighbors()
    with sanitize():
        kernel[(2,)](x, y, z, 50, first, 64)
    chosen = x if first else y
    expected = torch.where(torch.arange(128) < 50, torch.cat([chosen, chosen]), 0.0)
    if kernel is by_lane:
        expected = torch.where(torch.arange(128) % 2 == 0, expected, 0.0)
    assert torch.equal(z, expected)


@triton.jit
def moves_chosen(x_ptr, y_ptr, first, BLOCK: tl.constexpr):
    """Load and store the same memory through different pointers, and update it atomically."""
    off = tl.arange(0, BLOCK)
    ptr = tl.where(first != 0, x_ptr, y_ptr)
    moved = tl.load(x_ptr + off)
    tl.store(ptr + off + 1, moved, mask=off < BLOCK - 1)
    tl.atomic_add(ptr + off, 10.0)
    tl.store(ptr, tl.load(ptr) + 1)


@pytest.mark.parametrize("first", [0, 1])
def test_chosen_pointers_store_and_update(first: int) -> None:
    x, y = torch.arange(64.0), torch.zeros(64)
    with sanitize():
        moves_chosen[(1,)](x, y, first, 64)
    chosen = (x if first else y).clone()
    expected = torch.cat([torch.zeros(1), torch.arange(63.0)]) + 10
    expected[0] += 1
    assert torch.equal(chosen, expected)


def test_chosen_pointers_race_as_others() -> None:
    x, y, z = neighbors()
    with sanitize(collect=True) as seen:
        by_select[(2,)](x, z[:64], z, 64, 0, 64)  # reads what it stores
        moves_chosen[(2,)](x, y, 0, 64)
    assert {(finding.kind, finding.launch) for finding in seen.findings} >= {("race", 1)}


def test_a_chosen_pointer_far_out_of_bounds_is_reported() -> None:
    x, y, z = neighbors()
    with sanitize(collect=True) as seen:
        by_select[(1,)](x[:0], y, z, -1, 1, 128)  # nothing is on
        by_far[(1,)](x, y, z, 1)
        by_far[(1,)](x, y, z, 0)
    assert [(f.kind, f.argument) for f in seen.findings] == [
        ("out-of-bounds load", "x_ptr"),
        ("out-of-bounds load", "y_ptr"),
    ]


@triton.jit
def by_far(x_ptr, y_ptr, z_ptr, first):
    ptr = tl.where(first != 0, x_ptr, y_ptr)
    tl.store(z_ptr, tl.load(ptr - (1 << 42)))


def test_chosen_pointers_of_tensors_that_are_only_declared() -> None:
    x, y, z = (torch.empty(size, device="meta") for size in (64, 128, 128))
    with sanitize(collect=True) as seen:
        by_select[(1,)](x, y, z, 80, 1, 128)
        by_select[(1,)](x, y, z, 80, 0, 128)
    assert [(f.kind, f.argument, f.launch) for f in seen.findings] == [("out-of-bounds load", "x_ptr", 0)]


# ---- descriptors that a kernel makes ------------------------------------------------------------------------


@triton.jit
def described(x_ptr, y_ptr, rows, cols, stride, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.make_tensor_descriptor(x_ptr + first, [rows, cols], [stride, 1], [ROWS, COLS])
    tl.store(y_ptr + pid, tl.sum(x.load([pid * ROWS, 0])))


@triton.jit
def described_by_program(x_ptr, y_ptr, rows, cols, stride, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    pid = tl.program_id(0)
    for row in range(2):
        x = tl.make_tensor_descriptor(x_ptr + pid * first + row * 4, [rows, cols], [stride, 1], [ROWS, COLS])
        tl.store(y_ptr + pid, tl.sum(x.load([0, 0])))


def found_in(launch: Callable[[], None]) -> list[Finding]:
    with sanitize(collect=True) as seen:
        launch()
    return seen.findings


@pytest.mark.parametrize(
    ("kernel", "stride", "first", "said"),
    [
        (described, 16, 0, ""),
        (described, 20, 0, ""),
        (described, 15, 0, "dimension 0 of the descriptor has a stride of 60 bytes"),
        (described, 16, 4, ""),
        (described, 16, 3, "but a GPU requires multiples of 16 bytes"),
        (described_by_program, 16, 8, ""),
        (described_by_program, 16, 3, "but a GPU requires multiples of 16 bytes"),  # but for program 0
    ],
)
def test_descriptors_that_a_gpu_refuses_are_reported(kernel: Any, stride: int, first: int, said: str) -> None:
    memory = torch.zeros(1024 + 4)
    x = memory[-(memory.data_ptr() // 4) % 4 :]
    findings = found_in(lambda: kernel[(3,)](x, torch.empty(3), 32, 12, stride, first, ROWS=16, COLS=8))
    if not said:
        assert findings == []
        return
    (finding,) = findings
    assert finding.kind == "broken promise"
    assert finding.argument == "x_ptr"
    assert finding.program == ((2, 0, 0) if kernel is described_by_program else (0, 0, 0))
    assert "tl.make_tensor_descriptor" in linecache.getline(finding.file, finding.line)
    assert said in finding.detail


@triton.jit
def described_by_both(x, y_ptr, z_ptr, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    y = tl.make_tensor_descriptor(y_ptr, [ROWS, COLS], [stride, 1], [ROWS, COLS])
    tl.store(z_ptr, tl.sum(x.load([0, 0]) + y.load([0, 0])))


def test_descriptors_of_the_host_are_left_to_triton() -> None:
    x, y = torch.zeros(16, 16), torch.zeros(16, 16)
    host = TensorDescriptor(x, [16, 16], [16, 1], [16, 16])
    assert found_in(lambda: described_by_both[(1,)](host, y, torch.empty(1), 16, ROWS=16, COLS=16)) == []
