"""Lanes that a load leaves undefined: mistakes that the sanitizer reports, and idioms that it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom

# In each kernel `# load` marks the load without `other`, and `# use` the place where its undefined lanes are used.


@triton.jit
def stored_too_far(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr + at, x, mask=at < n + 1)  # use


@triton.jit
def stored_without_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr + at, tl.exp(x) * 2)  # use


@triton.jit
def summed(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr, tl.sum(x, 0))  # use


@triton.jit
def largest(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr, tl.max(x, 0))  # use


@triton.jit
def position_of_the_largest(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr, tl.argmax(x, 0))  # use


@triton.jit
def softmax(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    x = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + at, x / tl.sum(x, 0), mask=at < n)  # use


@triton.jit
def added_up_in_a_loop(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr, tl.sum(total, 0))  # use


@triton.jit
def address(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(x_ptr + at, mask=at < n).to(tl.int32)  # load
    tl.store(out_ptr + index, 1.0)  # use


@triton.jit
def mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr + at, 1.0, mask=x > 0)  # use


@triton.jit
def branch(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr, mask=n > 100)  # load
    if x > 0:  # use
        tl.store(out_ptr, 1.0)


@triton.jit
def updated(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.atomic_add(out_ptr + at, x)  # use


@triton.jit
def multiplied_by_a_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr, tl.sum(x * (at < n).to(tl.float32), 0))  # use


@triton.jit
def product(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * 4 + col, mask=(row < 4) & (col < 4))  # load
    y = tl.dot(x, tl.trans(x))
    tl.store(out_ptr + row * 4 + col, y, mask=(row < 4) & (col < 4))  # use


@triton.jit
def running_sum_backwards(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    tl.store(out_ptr + at, tl.cumsum(x, 0, reverse=True), mask=at < n)  # use


@triton.jit
def wrong_where(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)  # load
    x = tl.where(at <= n, x, 0.0)
    tl.store(out_ptr, tl.sum(x, 0))  # use


@triton.jit
def rows_and_columns_swapped(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, col = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + row * 4 + col, mask=(row < 3) & (col < 4))  # load
    tl.store(out_ptr + row * 4 + col, x, mask=(row < 4) & (col < 3))  # use


@triton.jit
def in_one_branch(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    if n > 3:
        x = tl.load(x_ptr + at, mask=at < n)  # load
        tl.store(out_ptr + at, 0.0)
    tl.store(out_ptr + at, x)  # use


MISTAKES = [
    *(
        stored_too_far,
        stored_without_mask,
        summed,
        largest,
        position_of_the_largest,
        softmax,
        added_up_in_a_loop,
    ),
    *(address, mask, branch, updated, multiplied_by_a_mask, product, running_sum_backwards, wrong_where),
    *(rows_and_columns_swapped, in_one_branch),
]


def line_of(kernel: Any, comment: str) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(n for n, line in enumerate(lines) if comment in line)


def findings(kernel: Any, n: int, block: int = 64) -> list[triton_loom.Finding]:
    x, out = torch.arange(1.0, 65), torch.zeros(64)
    with triton_loom.sanitize(collect=True) as seen:
        kernel[(1,)](x, out, n, BLOCK=block)
    return seen.findings


@pytest.mark.parametrize("kernel", MISTAKES, ids=lambda kernel: kernel.__name__)
def test_a_mistake_is_reported_with_both_lines(kernel: Any) -> None:
    (finding,) = (f for f in findings(kernel, 17) if f.kind == "undefined value")
    assert finding.line == line_of(kernel, "# use")
    assert f"line {line_of(kernel, '# load')} leaves undefined" in finding.detail


@pytest.mark.parametrize("kernel", [stored_without_mask, summed, largest, softmax, added_up_in_a_loop])
def test_a_full_mask_leaves_nothing_undefined(kernel: Any) -> None:
    assert not findings(kernel, 64)


# ---- correct idioms ----------------------------------------------------------------------------------------------


@triton.jit
def same_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, tl.exp(x) + 1, mask=at < n)


@triton.jit
def narrower_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=at < n - 1)
    tl.store(out_ptr + at, x, mask=(at < n) & (at % 2 == 0))


@triton.jit
def chosen(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr, tl.sum(tl.where(at < n, x, 0.0), 0))
    tl.store(out_ptr + 1, tl.max(tl.where(at >= n, float("-inf"), x), 0))


@triton.jit
def chosen_in_a_loop(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        total += tl.where(at < n, x * x, 0.0)
    tl.store(out_ptr, tl.sum(total, 0))


@triton.jit
def masked_rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, col = tl.arange(0, 16), tl.arange(0, 4)
    x = tl.load(x_ptr + row[:, None] * 4 + col[None, :], mask=row[:, None] < 5)
    tl.store(out_ptr + row, tl.sum(x, 1), mask=row < 5)


@triton.jit
def masked_rows_of_a_product(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * 16 + col, mask=row < 3)
    y = tl.dot(x, tl.full([16, 16], 1.0, tl.float32))
    tl.store(out_ptr + row * 16 + col, y, mask=row < 3)


@triton.jit
def masked_again(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, 1.0, mask=(x > 0) & (at < n))


@triton.jit
def masked_addresses(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(x_ptr + at, mask=at < n).to(tl.int32)
    tl.store(out_ptr + tl.load(x_ptr + index, mask=at < n).to(tl.int32), 1.0, mask=(at < n) & (at < 1))


@triton.jit
def running_sum(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, tl.cumsum(x, 0), mask=at < n)


@triton.jit
def never_used(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    total = tl.sum(x, 0)
    if n == 64:
        tl.store(out_ptr, total)


@triton.jit
def other_given(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x)
    tl.store(out_ptr, tl.sum(x, 0))


@triton.jit
def carried_pairs(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    for _ in range(3):
        x = x * 2 + 1
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def side_by_side(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at, mask=at < n)
    low, high = tl.split(tl.reshape(tl.join(x, x), [16, 2]))
    tl.store(out_ptr + at, low + high, mask=at < n)


@triton.jit
def zeroed_by_a_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(x_ptr + at, mask=at < n).to(tl.int32)
    tl.store(out_ptr + at, 1.0, mask=(at < n) & index != 0)  # Python reads ((at < n) & index) != 0
    tl.store(out_ptr, tl.sum(index * (at < n), 0))


RIGHT: list[Callable[..., Any]] = [
    *(
        same_mask,
        narrower_mask,
        chosen,
        chosen_in_a_loop,
        masked_rows,
        masked_rows_of_a_product,
        masked_again,
    ),
    *(masked_addresses, running_sum, never_used, other_given, carried_pairs, side_by_side, zeroed_by_a_mask),
]


@pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.__name__)
def test_correct_idioms_are_not_reported(kernel: Any) -> None:
    assert not findings(kernel, 11), findings(kernel, 11)[0]


@pytest.mark.parametrize(
    "kernel", [same_mask, chosen_in_a_loop, other_given], ids=lambda kernel: kernel.__name__
)
def test_obviously_correct_uses_need_no_check(kernel: Any) -> None:
    with triton_loom.sanitize():
        compiled = kernel[(1,)](torch.zeros(64), torch.zeros(64), 8, BLOCK=64)
    assert "uses_undefined" not in compiled.asm["c"]
