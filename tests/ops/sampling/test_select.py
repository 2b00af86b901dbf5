"""The largest elements of rows against Python's sort: ties, spans, lengths, layouts, gradients and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.layouts import far_apart
from weft.lab.families.selection import in_order
from weft.ops.sampling import launch
from weft.runtime import choosing_for

INF, NAN = float("inf"), float("nan")


def rows_of(kind: str, cols: int) -> Tensor:
    """Return rows in which ties decide."""
    drawn = torch.randn(3, cols)
    return {
        "equal": torch.full((3, cols), -2.5),
        "two values": (drawn > 0).float(),
        "grid": (drawn * 4).round() / 4,
        "zeros": torch.where(drawn > 0, 0.0, -0.0),
        "minus infinity": drawn.masked_fill(drawn < 1.5, -INF),
        "nan": drawn.masked_fill(drawn > -1.0, NAN),
        "only nan": torch.full((3, cols), NAN),
        "infinities": torch.where(drawn > 2, INF, drawn),
        "plain": drawn,
        "neighbors": 1.0 + 2.0**-23 * ((drawn > 0).int() + (drawn > 2.3).int()),
    }[kind]


def assert_sorted(x: Tensor, k: int, got: Any, start: int = 0, end: int | None = None) -> None:
    for row, values, indices in zip(x, got.values, got.indices, strict=True):
        wanted = in_order(row, start, x.shape[1] if end is None else end)[:k]
        assert indices.tolist() == wanted + [-1] * (k - len(wanted))
        padded = torch.cat([row[wanted], torch.full((k - len(wanted),), -INF, dtype=x.dtype)])
        assert torch.equal(values.nan_to_num(7.0), padded.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind",
    [
        "equal",
        "two values",
        "grid",
        "zeros",
        "minus infinity",
        "nan",
        "only nan",
        "infinities",
        "plain",
        "neighbors",
    ],
)
def test_ties_and_odd_values(kind: str, dtype: torch.dtype) -> None:
    x = rows_of(kind, 9001).to(dtype)
    for k in (1, 13, 64):
        assert_sorted(x, k, weft.top_k(x, k))


@pytest.mark.parametrize(
    ("cols", "k"),
    [
        (1, 1),
        (1, 3),
        (7, 7),
        (33, 40),
        (64, 2),
        (4097, 1),
        (5000, 2048),
        (9000, 2048),
        (70_001, 600),
        (1_000_003, 50),
    ],
)
def test_lengths(cols: int, k: int) -> None:
    x = rows_of("grid" if cols > 10_000 else "plain", cols)[:2]
    assert_sorted(x, k, weft.top_k(x, k))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_tiles_of_gpus(target: str) -> None:
    x = rows_of("grid", 9001)
    with choosing_for(target):
        for k in (1, 700):
            assert_sorted(x, k, weft.top_k(x, k))


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_scratch_may_hold_columns_of_other_calls(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.torch, "empty", fill)
    x, step = torch.randn(40, 5000), torch.arange(40)
    x[:, :2] = 4.5  # the columns that would be found there
    assert_sorted(x[:2, :4200], 300, weft.top_k(x[:2], 300, ends=torch.tensor([4200, 4200])), 0, 4200)
    below = -x[:, :4100].abs()  # the value that would be found there
    got = weft.sample(below, top_k=70, seed=0, step=step).tokens
    monkeypatch.undo()
    assert torch.equal(got, weft.sample(below, top_k=70, seed=0, step=step).tokens)


def test_spans() -> None:
    x = torch.randn(6, 5000)
    starts = torch.tensor([0, 4999, 3, -7, 4000, 6000])
    ends = torch.tensor([0, 5000, 4, 20, 9000, 7000], dtype=torch.int32)
    for k in (1, 5, 300):
        got = weft.top_k(x, k, starts=starts, ends=ends)
        for row in range(6):
            own = type(got)(got.values[row : row + 1], got.indices[row : row + 1])
            assert_sorted(x[row : row + 1], k, own, int(starts[row]), int(ends[row]))
    only_ends = weft.top_k(x[:1], 2, ends=torch.tensor([2]))
    assert_sorted(x[:1], 2, only_ends, 0, 2)


def test_layouts() -> None:
    x = torch.randn(4, 3, 300).transpose(0, 1)
    for view in (x, x[..., 5:280], x[..., ::2], x[:, 1:3], x[:0]):
        got = weft.top_k(view, 5)
        flat = view.reshape(-1, view.shape[-1])
        assert got.values.shape == (*view.shape[:-1], 5)
        assert_sorted(flat, 5, type(got)(got.values.reshape(-1, 5), got.indices.reshape(-1, 5)))


def test_offsets_have_64_bits() -> None:
    """vllm#47383, sglang#35571: rows past 2^31 elements."""
    x = far_apart(4, 96)
    assert_sorted(x.contiguous(), 5, weft.top_k(x, 5))


@pytest.mark.parametrize("upstream", ["contiguous", "expanded", "strided"])
def test_gradients(upstream: str) -> None:
    x = torch.randn(5, 100, requires_grad=True)
    got = weft.top_k(x, 7, ends=torch.tensor([100, 3, 0, 50, 7]))
    dy = {
        "contiguous": torch.randn(5, 7),
        "expanded": torch.randn(5, 1).expand(5, 7),
        "strided": torch.randn(7, 10)[:, ::2].t(),
    }[upstream]
    got.values.backward(dy)
    wanted = torch.zeros(5, 100)
    for row in range(5):
        for i, col in enumerate(got.indices[row].tolist()):
            if col >= 0:
                wanted[row, col] = dy[row, i]
    assert torch.equal(x.grad, wanted)
    assert not got.indices.requires_grad


def test_gradients_of_gradients() -> None:
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: weft.top_k(t, 4).values, x)
    assert torch.autograd.gradgradcheck(lambda t: weft.top_k(t, 4).values, x)


def test_the_largest_of_a_row_with_nan_is_a_number() -> None:
    """vllm#50183: a NaN won the argmax, or gave an index past the row."""
    x = torch.tensor([[NAN, 1.0, 3.0, NAN], [NAN, NAN, NAN, -INF], [NAN] * 4])
    assert weft.top_k(x, 1).indices.flatten().tolist() == [2, 3, 0]


def test_compiled_is_eager() -> None:
    x = torch.randn(3, 200, requires_grad=True)
    compiled = torch.compile(lambda t: weft.top_k(t, 9), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x).indices, weft.top_k(x, 9).indices)
    compiled(x).values.sum().backward()
    assert x.grad.sum() == 27


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weft.top_k(torch.randn(3, 5), 0), "k must be from 1 to 2048"),
        (lambda: weft.top_k(torch.randn(3, 5), 2049), "torch.sort"),
        (lambda: weft.top_k(torch.randn(3, 5), 2.5), "k must be"),  # type: ignore[arg-type]
        (lambda: weft.top_k(torch.randn(()), 1), "at least one dimension"),
        (lambda: weft.top_k(torch.arange(5), 1), "x must be"),
        (lambda: weft.top_k(torch.randn(3, 5), 1, ends=torch.tensor([5, 5])), "ends must have the shape"),
        (lambda: weft.top_k(torch.randn(3, 5), 1, starts=torch.zeros(3)), "starts must be int32 or int64"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()
