"""Mistakes in the text of kernels and in how dimensions are merged, each of which a layout shows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton_loom

import weft
from tests.ops.pointwise.test import LAYOUTS
from weft.ops.pointwise import kernels, launch

TEXT = [
    ("the first tile alone", "tl.program_id(0).to(tl.int64) * TILE", "tl.program_id(0).to(tl.int64) * 0"),
    ("past the end", "mask = off < count", "mask = off <= count"),
    ("without the last element", "mask = off < count", "mask = off < count - 1"),
    ("up to a multiple of 16", "(count // ALIGN) * ALIGN", "(count // 16) * 16"),
    ("cols up to a multiple of 16", "(cols // ALIGN) * ALIGN", "(cols // 16) * 16"),
    ("rows past the end", "row < rows", "row <= rows"),
    ("columns past the end", "inside = col < cols", "inside = col <= cols"),
    ("the first rows alone", "// tiles).to(tl.int64) * ROWS", "// tiles).to(tl.int64) * 0"),
    ("the first columns alone", "% tiles) * COLS", "% tiles) * 0"),
    ("the rows of one dimension", "row % size1", "row"),
    ("dimensions in the wrong order", "row // size1", "row % size1"),
    ("without the stride of x", "at0 * x_stride0", "at0"),
    ("without the step of y", "* y_step", "* 1"),
    ("the stride of out for y", "at0 * y_stride0", "at0 * out_stride0"),
    ("rounded twice", "tl.cast(v2,", "tl.cast(v2.to(tl.bfloat16),"),
]
HOST = [
    ("merged across a gap", "a == b * each.size", "a == b * each.size or True"),
    ("broadcast dimensions move", "0 if size == 1 else s", "s"),
    ("dimensions aligned on the left", "[0] * missing + own", "own + [0] * missing"),
    ("always dense", '"1" if last.strides[i] == 1 else "any"', '"1"'),
    ("never along rows", "any(d.strides[i] for d in outer)", "False"),
]


def assert_right() -> None:
    """Compare all layouts with PyTorch, under the sanitizer, by an op that nothing is cached for."""
    op = weft.pointwise(lambda x, y: x - y)
    for x, y in [
        *LAYOUTS.values(),
        (torch.randn(3000), torch.randn(3000)),
        (torch.randn(70, 3000), torch.randn(3000)),
    ]:
        with triton_loom.sanitize():
            got = op(x, y)
        assert torch.equal(got, x - y)


def test_nothing_is_wrong_without_a_mistake() -> None:
    assert_right()


@pytest.mark.mutation
@pytest.mark.parametrize(("what", "old", "new"), TEXT, ids=[what for what, *_ in TEXT])
def test_a_mistake_in_a_kernel_is_noticed(
    what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = 0

    def mutated(*args: Any) -> str:
        nonlocal changed
        text = kernel_text(*args)
        changed += old in text
        return text.replace(old, new)

    kernel_text = kernels.kernel_text
    monkeypatch.setattr(kernels, "kernel_text", mutated)
    with pytest.raises((AssertionError, triton_loom.SanitizerError)):
        assert_right()
    assert changed


@pytest.mark.mutation
@pytest.mark.parametrize(("what", "old", "new"), HOST, ids=[what for what, *_ in HOST])
def test_a_mistake_on_the_host_is_noticed(
    what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = next(f for f in (launch.merged, launch._bound) if old in inspect.getsource(inspect.unwrap(f)))
    names = vars(launch) | {"remembered": lambda function: function}
    exec(inspect.getsource(inspect.unwrap(function)).replace(old, new), names)
    monkeypatch.setattr(launch, inspect.unwrap(function).__name__, names[inspect.unwrap(function).__name__])
    with pytest.raises((AssertionError, triton_loom.SanitizerError)):
        assert_right()
