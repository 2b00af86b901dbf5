"""`weft.capture`: replays compute what calls compute, on the same memory, without the function's Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import words

import weft
from weft.runtime import observing


def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels and PyTorch's own operations, views and in-place ones among them."""
    y, h = weft.rms_norm(x, residual=residual)
    gate = (y.view(len(y), 2, -1)[:, 0] * 2).clamp_(max=3)
    h = h + 1
    h[:, 0] = 7
    return weft.glu(torch.cat([gate, gate], -1)), h


def test_a_replay_is_a_call() -> None:
    calls = 0

    def counted(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return layer(x, residual)

    step = weft.capture(counted, *torch.randn(2, 8, 64))
    for seed in range(3):
        inputs = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed))
        for got, wanted in zip(step(*inputs), layer(*inputs), strict=True):
            assert torch.equal(got, wanted)
    assert calls == 1, "a replay ran the function"


def test_memory_stays() -> None:
    """Pointers of launches and results are those of the recording."""
    step = weft.capture(layer, *torch.randn(2, 8, 64))
    seen: list[list[int]] = []

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        seen[-1].extend(p.data_ptr() for p in pointers if p is not None)

    places = []
    for _ in range(3):
        seen.append([])
        with observing(note):
            result = step(*torch.randn(2, 8, 64))
        places.append([part.data_ptr() for part in result])
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]
    assert places[0] == places[1] == places[2]


def test_nothing_is_allocated_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    step = weft.capture(lambda x: weft.quantize(x, "1x128"), torch.randn(4, 256))
    x = torch.randn(4, 256)
    wanted = weft.quantize(x, "1x128")
    for name in ("empty", "empty_like", "empty_strided", "zeros"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("a replay allocates"))
    got = step(x)
    assert torch.equal(words(got.rowwise.data), words(wanted.rowwise.data))
    assert torch.equal(got.rowwise.scale, wanted.rowwise.scale)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16])
def test_rows_are_put_into_the_smallest_recording(rows: int) -> None:
    weight = torch.randn(64)
    step = weft.capture(lambda x, w: weft.rms_norm(x, w), torch.randn(2, 64), weight, sizes=(16, 4))
    for _ in range(2):
        x, w = torch.randn(rows, 64), torch.randn(64)
        assert torch.equal(step(x, w), weft.rms_norm(x, w))


def reads(x: Tensor) -> Tensor:
    return x * float(x.sum())


@pytest.mark.parametrize(
    ("fn", "examples", "options", "error", "said"),
    [
        (reads, (torch.ones(3),), {}, RuntimeError, "reads numbers on the host"),
        (lambda: None, (), {}, TypeError, "needs an example of each input"),
        (
            lambda x, n: x * n,
            (torch.ones(3), 2),
            {},
            TypeError,
            "input 1 is a int; what may vary must be a tensor",
        ),
        (lambda x: 3, (torch.ones(3),), {}, TypeError, "returns a int; it must return tensors"),
        (lambda x: x, (torch.tensor(1.0),), {"sizes": (4,)}, ValueError, "the first example has none"),
    ],
)
def test_what_cannot_be_captured_is_refused(
    fn: Any, examples: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        weft.capture(fn, *examples, **options)


def test_other_inputs_are_refused() -> None:
    step = weft.capture(lambda x: x + 1, torch.ones(3, 2), sizes=(4, 8))
    with pytest.raises(ValueError, match=r"input 0 has shape \(3, 5\), captured was \(3, 2\)"):
        step(torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"input 0 has dtype torch.float64"):
        step(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"9 rows are more than the largest of sizes=\(4, 8\)"):
        step(torch.ones(9, 2))
    with pytest.raises(TypeError, match="1 inputs were captured, 2 are given"):
        step(torch.ones(3, 2), torch.ones(3, 2))
    fixed = weft.capture(lambda x: x + 1, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"has shape \(4, 2\), captured was \(3, 2\): capture it again"):
        fixed(torch.ones(4, 2))
