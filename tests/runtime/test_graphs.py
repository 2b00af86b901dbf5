"""`weft.capture`: replays compute what calls compute, on the same memory, without the function's Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton_loom.testing import words

import weft
from weft.runtime import observing


def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Mix kernels and PyTorch's own operations, including views and in-place ones."""
    y, h = weft.rms_norm(x, residual=residual)
    gate = (y.view(len(y), 2, -1)[:, 0] * 2).clamp_(max=3)
    h = h + 1
    h[:, 0] = 7
    return weft.glu(torch.cat([gate, gate], -1)), h


def test_a_replay_computes_what_a_call_computes() -> None:
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


def test_replays_reuse_the_memory_of_the_recording() -> None:
    """Pointers of launches and results are those of the recording."""
    step = weft.capture(layer, *torch.randn(2, 8, 64))
    seen: list[list[int]] = []

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        seen[-1].extend(p.data_ptr() for p in pointers if p is not None)

    addresses = []
    for _ in range(3):
        seen.append([])
        with observing(note):
            result = step(*torch.randn(2, 8, 64))
        addresses.append([part.data_ptr() for part in result])
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_replay_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = weft.capture(lambda x: weft.quantize(x, "1x128"), torch.randn(4, 256))
    x = torch.randn(4, 256)
    wanted = weft.quantize(x, "1x128")
    for name in ("empty", "empty_like", "empty_strided", "zeros"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("a replay allocates"))
    got = step(x)
    assert torch.equal(words(got.rowwise.data), words(wanted.rowwise.data))
    assert torch.equal(got.rowwise.scale, wanted.rowwise.scale)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16])
def test_rows_go_into_the_smallest_recording_that_fits(rows: int) -> None:
    weight = torch.randn(64)
    step = weft.capture(lambda x, w: weft.rms_norm(x, w), torch.randn(2, 64), weight, sizes=(16, 4))
    for _ in range(2):
        x, w = torch.randn(rows, 64), torch.randn(64)
        assert torch.equal(step(x, w), weft.rms_norm(x, w))


def adds_in_python(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def draws_after_a_seed(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand(4, 4)


def draws_after_two_seeds(x: Tensor) -> Tensor:
    y = x + torch.rand(4, 4)
    torch.manual_seed(0)
    return y + torch.rand(4, 4)


def fills_a_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[y[:, 0] > 0] = torch.zeros(2, 4)
    return y


READS = "reads values on the host"
SHAPES = "shape that depends on values"
CHANGES = "changes input 0 in place"
# Two of four rows begin with a positive number.
X = torch.tensor([[1.0, 1, 2, 3], [-1, 2, 3, 3], [2, 3, 4, 3], [-3, 4, 5, 3]])
BAKED_IN: dict[str, tuple[Any, str]] = {
    "float": (lambda x: x * float(x.sum()), READS),
    "int": (lambda x: x * int(x.sum()), READS),
    "bool": (lambda x: x * bool(x.sum()), READS),
    "item": (lambda x: x * x[0, 0].item(), READS),
    "tolist": (lambda x: x * x.tolist()[0][0], READS),
    "tolist of a number": (lambda x: x * x[0, 0].tolist(), READS),
    "numpy": (lambda x: x * float(x.numpy()[0, 0]), READS),
    "numpy by force": (lambda x: x * float(x.numpy(force=True)[0, 0]), READS),
    "asarray": (lambda x: x * float(np.asarray(x)[0, 0]), READS),
    "dlpack": (lambda x: x * float(np.from_dlpack(x)[0, 0]), READS),
    "a branch": (adds_in_python, READS),
    "equal": (lambda x: x * torch.equal(x, x), READS),
    "allclose": (lambda x: x * torch.allclose(x, x), READS),
    "is_nonzero": (lambda x: x * torch.is_nonzero(x[0, 0]), READS),
    "in": (lambda x: x * (5.0 in x), READS),
    "an index that is a tensor": (lambda x: x[x[0, 0].long()], READS),
    "a slice to a tensor": (lambda x: x[: x[0, 0].long()], READS),
    "range": (lambda x: x * len(range(x[0, 0].long())), READS),
    "arange to a tensor": (lambda x: torch.arange(x[0, 0]), READS),
    "tensor_split": (lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[0], READS),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.abs().long()), READS),
    "a mask": (lambda x: x[x[:, 0] > 0], f"by a mask has a {SHAPES}"),
    "a mask of bytes": (lambda x: x[(x[:, 0] > 0).byte()], f"by a mask has a {SHAPES}"),
    "a mask that is written": (fills_a_part, f"by a mask has a {SHAPES}"),
    "nonzero": (lambda x: x.nonzero(), SHAPES),
    "where": (lambda x: torch.where(x > 0)[0], SHAPES),
    "argwhere": (lambda x: torch.argwhere(x > 0), SHAPES),
    "unique": (lambda x: x.unique(), SHAPES),
    "unique rows": (lambda x: x.unique(dim=0), SHAPES),
    "unique neighbors": (lambda x: x.flatten().unique_consecutive(), SHAPES),
    "masked_select": (lambda x: x.masked_select(x > 0), SHAPES),
    "repeat_interleave": (lambda x: x.repeat_interleave(x[:, 1].long(), 0), SHAPES),
    "bincount": (lambda x: x[:, 1].long().bincount(), SHAPES),
    "an input that is added to": (lambda x: x.add_(1), CHANGES),
    "an input that is written to": (lambda x: x.index_fill_(0, torch.tensor([0]), 0.0), CHANGES),
    "a view of an input": (lambda x: x[0].zero_(), CHANGES),
    "an input as out": (lambda x: torch.add(x, 1, out=x), CHANGES),
    "a seed": (draws_after_a_seed, "setting a seed happens in Python"),
    "a seed between": (draws_after_two_seeds, "setting a seed happens in Python"),
    "a generator": (lambda x: x + torch.rand(4, 4, generator=torch.Generator()), "with a generator"),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("case", BAKED_IN)
def test_operations_that_a_replay_would_get_wrong_are_refused(case: str) -> None:
    """Every replay would reuse the values that Python read from the example, and the shapes."""
    fn, said = BAKED_IN[case]
    with pytest.raises(RuntimeError, match=said):
        weft.capture(fn, X)
    fn(X.clone())  # works in a direct call


REPLAYED: dict[str, Any] = {
    "a mask in place of a branch": lambda x: torch.where(x.sum() > 0, x * 2, x * 3),
    "a mask that is filled": lambda x: x.clone().masked_fill_(x > 0, 7.0),
    "a mask that is assigned a number": lambda x: assigned(x.clone()),
    "indices": lambda x: x[x[:, 1].long().remainder(4)],
    "sorted": lambda x: x.sort(0).values,
    "topk": lambda x: x.topk(2).values,
    "a cumulative sum": lambda x: x.cumsum(0),
    "scattered": lambda x: torch.zeros(4, 4).scatter(1, x[:, :1].long().remainder(4), 1.0),
    "split": lambda x: torch.cat(x.split((1, 3))[::-1]),
    "a constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a view of the input": lambda x: x.t(),
    "the input": lambda x: x,
    "clipped in place": lambda x: (x * 2).clamp_(max=3),
    "as a result's out": lambda x: torch.add(x, 1, out=torch.empty(4, 4)),
    "a count": lambda x: (x > 0).sum(),
    "questions about dtypes": lambda x: (
        x.to(torch.promote_types(x.dtype, torch.float64)) * x.is_floating_point()
    ),
}


def assigned(x: Tensor) -> Tensor:
    x[x > 2] = -1.0
    return x


@pytest.mark.parametrize("case", REPLAYED)
def test_operations_that_a_replay_gets_right_are_served(case: str) -> None:
    fn = REPLAYED[case]
    step = weft.capture(fn, X)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) * 3
        assert torch.equal(step(x.clone()), fn(x))


def test_replays_draw_new_random_numbers() -> None:
    """A replay draws what a call would draw, from PyTorch's generator."""

    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x + torch.rand(4, 4) + torch.randn_like(x), 0.5)

    step = weft.capture(noisy, X)
    torch.manual_seed(1)
    wanted = [noisy(X) for _ in range(2)]
    torch.manual_seed(1)
    for one in wanted:
        assert torch.equal(step(X), one)
    assert not torch.equal(*wanted)


def test_an_undeclared_dynamic_shape_is_detected_by_the_replay() -> None:
    """A foreign op does not declare that its shape depends on values."""
    library = torch.library.Library("weft_test_graphs", "DEF")  # type: ignore[no-untyped-call]
    library.define("positive(Tensor x) -> Tensor")
    library.impl("positive", lambda x: x[x > 0].clone(), "CompositeExplicitAutograd")
    step = weft.capture(lambda x: torch.ops.weft_test_graphs.positive(x), X)
    assert torch.equal(step(X * 2), (X * 2)[X > 0])
    with pytest.raises(RuntimeError, match="its shape depends on values"):
        step(-X.abs())


def test_an_op_that_returns_a_float_is_refused() -> None:
    library = torch.library.Library("weft_test_number", "DEF")  # type: ignore[no-untyped-call]
    library.define("largest(Tensor x) -> float")
    library.impl("largest", lambda x: float(x.max()), "CompositeExplicitAutograd")
    with pytest.raises(RuntimeError, match=READS):
        weft.capture(lambda x: x * torch.ops.weft_test_number.largest(x), X)


@triton.jit
def _twice(x_ptr, y_ptr, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


def launched_by_triton(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    with triton_loom.active():
        _twice[(1,)](x, y, count=16)
    return y


def test_a_launch_that_is_not_recorded_is_refused() -> None:
    """On the CPU a tape sees only Weft's launches: a replay would leave the memory of others unchanged."""
    with pytest.raises(RuntimeError, match="_twice was launched directly by Triton"):
        weft.capture(launched_by_triton, X)


def test_a_launch_inside_an_op_is_replayed() -> None:
    library = torch.library.Library("weft_test_launch", "DEF")  # type: ignore[no-untyped-call]
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", launched_by_triton, "CompositeExplicitAutograd")
    step = weft.capture(lambda x: torch.ops.weft_test_launch.twice(x) + 1, X)
    assert torch.equal(step(X * 3), X * 6 + 1)


def test_a_qtensor_is_replayed() -> None:
    """QTensors reach the ops through the dispatcher."""
    weight = weft.quantize(torch.randn(4, 128), "1x128")

    def attended(x: Tensor) -> Tensor:
        q = weft.quantize(x, "int8:row")
        return weft.attention(q, q, x)

    step = weft.capture(attended, torch.randn(1, 2, 9, 64))
    x = torch.randn(1, 2, 9, 64)
    assert torch.equal(step(x), attended(x))
    step = weft.capture(lambda x: x + weight, torch.randn(4, 128))
    assert torch.equal(step(torch.zeros(4, 128)), weight.dequantize())


# ---- numbers of rows ----------------------------------------------------------------------------------------


def test_a_result_is_cut_by_how_it_depends_on_rows() -> None:
    """A result that has the recording's length only by chance is not cut."""
    weight = torch.randn(8, 8)
    step = weft.capture(lambda x: (x + 1, weight * 2, x.t() * 2, x[:, 0]), torch.randn(8, 8), sizes=(8,))
    for rows in (8, 3, 1, 5):
        x = torch.randn(rows, 8)
        for got, wanted in zip(step(x), (x + 1, weight * 2, x.t() * 2, x[:, 0]), strict=True):
            assert torch.equal(got, wanted)


MIXED: dict[str, tuple[Any, str]] = {
    "counts of experts": (lambda x: weft.route(x, 2).counts, "result 0 depends on the padding"),
    "a sum": (lambda x: x.sum(0), "result 0 depends on the padding"),
    "a sum that is added": (lambda x: x + x.sum(0), "result 0 depends on the padding"),
    "a cumulative sum from the end": (
        lambda x: x.flip(0).cumsum(0).flip(0),
        "result 0 depends on the padding",
    ),
    "the last row": (lambda x: x[-1], "result 0 depends on the padding"),
    "rows backwards": (lambda x: x.flip(0), "result 0 depends on the padding"),
    "twice the rows": (
        lambda x: torch.cat([x, x]),
        r"result 0 has the shapes \(14, 8\) for 7 rows, \(16, 8\) for 8",
    ),
    "one row more": (lambda x: torch.cat([x, x[:1]]), "result 0 has the shapes"),
    "rows in fours": (
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 4)),
        "result 0",
    ),
    "the second": (lambda x: (x, x.mean()), "result 1 depends on the padding"),
}


@pytest.mark.parametrize("sizes", [(8,), (4, 8)])
@pytest.mark.parametrize("case", MIXED)
def test_results_that_padding_changes_are_refused(case: str, sizes: tuple[int, ...]) -> None:
    """Results with as many rows as a recording are right."""
    fn, said = MIXED[case]
    step = weft.capture(fn, torch.randn(8, 8), sizes=sizes)
    for rows in sizes:
        x = torch.randn(rows, 8)
        for got, wanted in zip(tree_leaves(step(x)), tree_leaves(fn(x)), strict=True):
            assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="would be padded to.*" + (said if sizes == (8,) else "result")):
        step(torch.randn(3, 8))


def test_random_rows_are_cut() -> None:
    """Comparing replays says nothing about random rows, so they are not refused."""
    step = weft.capture(lambda x: x + torch.rand_like(x), torch.zeros(4, 8), sizes=(4,))
    got = step(torch.zeros(3, 8))
    assert got.shape == (3, 8)
    assert got.unique().numel() > 20


def test_probing_the_dependence_on_rows_leaves_memory_like_a_call() -> None:
    cache = torch.zeros(6, 8)

    def write(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        return x * 2

    x, slots = torch.randn(4, 8), torch.tensor([5, 0, 2, 3])
    step = weft.capture(write, x, slots, sizes=(4,))
    assert torch.equal(cache[slots], x)
    assert not cache[[1, 4]].count_nonzero()
    assert torch.equal(step(x[:3] + 1, slots[:3]), (x[:3] + 1) * 2)


@pytest.mark.parametrize(
    ("fn", "examples", "options", "error", "said"),
    [
        (lambda: None, (), {}, TypeError, "needs an example of each input"),
        (
            lambda x, n: x * n,
            (torch.ones(3), 2),
            {},
            TypeError,
            "input 1 is a int; whatever varies must be a tensor",
        ),
        (lambda x: 3, (torch.ones(3),), {}, TypeError, "returns a int; it must return tensors"),
        (lambda x: x, (torch.tensor(1.0),), {"sizes": (4,)}, ValueError, "the first example is a scalar"),
        (lambda x: list(x), (torch.ones(3),), {"sizes": (4,)}, TypeError, "a different number of tensors"),
    ],
)
def test_functions_that_cannot_be_captured_are_refused(
    fn: Any, examples: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        weft.capture(fn, *examples, **options)


def test_inputs_that_differ_from_the_examples_are_refused() -> None:
    step = weft.capture(lambda x: x + 1, torch.ones(3, 2), sizes=(4, 8))
    with pytest.raises(ValueError, match=r"input 0 has shape \(3, 5\), but \(3, 2\) was captured"):
        step(torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"input 0 has dtype torch.float64"):
        step(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"9 rows are more than the largest of sizes=\(4, 8\)"):
        step(torch.ones(9, 2))
    with pytest.raises(TypeError, match="1 inputs were captured, but 2 were passed"):
        step(torch.ones(3, 2), torch.ones(3, 2))
    fixed = weft.capture(lambda x: x + 1, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"has shape \(4, 2\), but \(3, 2\) was captured: capture again"):
        fixed(torch.ones(4, 2))


def test_a_scalar_or_a_number_in_place_of_rows_is_refused() -> None:
    step = weft.capture(lambda x: x * 2, torch.ones(3, 2), sizes=(4,))
    with pytest.raises(ValueError, match=r"input 0 has shape \(\), but \(3, 2\) was captured"):
        step(torch.tensor(1.0))
    with pytest.raises(TypeError, match="input 0 is a float: pass a tensor"):
        step(1.0)  # type: ignore[arg-type]
