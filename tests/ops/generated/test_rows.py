"""Ops of functions of rows: reductions of reductions, scans, arguments of every form, rows of every length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
import triton_loom
from torch import Tensor

import weft
from weft.lab.problem import Call, Workload
from weft.testing import check

# As a function of a row, and in PyTorch.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda x: tl.sum(x), lambda x: x.sum(-1)),
    "largest and smallest": (
        lambda x: (tl.max(x), tl.min(x)),
        lambda x: (x.amax(-1), x.amin(-1)),
    ),
    "variance": (
        lambda x: tl.sum((x - tl.sum(x) / x.numel) * (x - tl.sum(x) / x.numel)) / x.numel,
        lambda x: x.var(-1, correction=0),
    ),
    "standardized": (
        lambda x: (x - x.sum() / x.numel) * tl.rsqrt(tl.sum(x * x) / x.numel + 1.0),
        lambda x: (x - x.mean(-1, keepdim=True)) * (x.square().mean(-1, keepdim=True) + 1).rsqrt(),
    ),
    "share of the largest": (
        lambda x: tl.sum(tl.where(x == tl.max(x), x, 0.0)),
        lambda x: torch.where(x == x.amax(-1, keepdim=True), x, 0.0).sum(-1),
    ),
    "scan of a softmax": (
        lambda x: tl.cumsum(tl.exp(x - tl.max(x)) / tl.sum(tl.exp(x - tl.max(x)))),
        lambda x: x.softmax(-1).cumsum(-1),
    ),
    "sum of a scan": (lambda x: tl.sum(tl.cumsum(x)) / x.numel, lambda x: x.cumsum(-1).mean(-1)),
    "scan from the end": (
        lambda x: tl.cumsum(x * x, reverse=True) - tl.sum(x),
        lambda x: x.square().flip(-1).cumsum(-1).flip(-1) - x.sum(-1, keepdim=True),
    ),
    "both ways": (
        lambda x: tl.cumsum(x) * tl.cumsum(x, reverse=True),
        lambda x: x.cumsum(-1) * x.flip(-1).cumsum(-1).flip(-1),
    ),
    "rows and elements": (
        lambda x: (tl.sum(x) * x, tl.sum(x * x)),
        lambda x: (x.sum(-1, keepdim=True) * x, x.square().sum(-1)),
    ),
    "no reduction": (lambda x: x * x, lambda x: x * x),
}  # fmt: skip
BY_DAY = ("variance", "share of the largest", "scan of a softmax", "rows and elements")
LENGTHS = (1, 2, 77, 4096, 8200, 20_000)


def several(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *[(name, (77, 8200)) for name in BY_DAY],
        *[pytest.param(name, LENGTHS, marks=pytest.mark.slow) for name in FUNCTIONS],
    ],
)
def test_results_and_gradients(name: str, lengths: tuple[int, ...]) -> None:
    function, definition = FUNCTIONS[name]
    op = weft.rowwise(function)
    for length in lengths:
        x = torch.randn(3, length, generator=torch.Generator().manual_seed(length)).requires_grad_()
        exact = x.detach().double().requires_grad_()
        got, wanted = several(op(x)), several(definition(exact))
        scale = max(float(each.detach().abs().max()) for each in wanted)
        for mine, truth in zip(got, wanted, strict=True):
            assert mine.shape == truth.shape
            torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=3e-6 * scale * length**0.5)
        upstream = [torch.randn_like(each) for each in got]
        (dx,) = torch.autograd.grad(got, x, upstream)
        (expected,) = torch.autograd.grad(wanted, exact, [each.double() for each in upstream])
        scale = float(expected.abs().max())
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=3e-6 * scale * length**0.5)


def test_equal_maxima_share_the_gradient() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    weft.rowwise(lambda x: tl.max(x))(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0, 0.5, 0.5], [1 / 3] * 3]))


def test_a_nan_does_not_win() -> None:
    op = weft.rowwise(lambda x: (tl.max(x), tl.min(x)))
    for length in (3, 9000):
        x = torch.full((2, length), math.nan)
        x[0, 1] = 5.0
        largest, smallest = op(x)
        assert largest.tolist() == [5.0, -math.inf]
        assert smallest.tolist() == [5.0, math.inf]


def test_integers() -> None:
    op = weft.rowwise(lambda x: (tl.sum(x), tl.max(x), tl.sum(x > 0)))
    for length in (5, 9000):
        x = torch.randint(-(2**31), 2**31 - 1, (3, length), dtype=torch.int32)
        total, largest, positive = op(x)
        assert torch.equal(total, x.sum(-1))
        assert torch.equal(largest, x.amax(-1))
        assert torch.equal(positive, (x > 0).sum(-1))


# ---- arguments ------------------------------------------------------------------------------------------------


def weighted(x: Any, column: Any, row: Any, number: Any) -> Any:
    return (x * column + row) / (tl.sum(x * x) + number) + tl.max(column)


def weighted_in_pytorch(x: Tensor, column: Tensor, row: Tensor, number: float) -> Tensor:
    total = x.square().sum(-1, keepdim=True) + number
    return (x * column + row) / total + column.expand(x.shape).amax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        (6, torch.bfloat16),
        (9001, torch.float32),
        pytest.param(6, torch.float32, marks=pytest.mark.slow),
        pytest.param(9001, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_arguments_are_broadcast(length: int, dtype: torch.dtype) -> None:
    """A vector of columns, one value for each row, one for all, and their gradients."""
    op = weft.rowwise(weighted)
    for shapes in (
        [(4, 3, length), (length,), (3, 1)],
        [(length,), (1,), (length,)],
        [(2, 1, length), (length,), (2, 5, 1)],
        [(4, 3, length), (4, 1, length), (1,)],
    ):
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        exact = [each.detach().double().requires_grad_() for each in inputs]
        got, wanted = op(*inputs, 2.0), weighted_in_pytorch(*exact, 2.0)
        assert got.dtype is dtype
        tolerance = 3e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), wanted.expand(got.shape), rtol=tolerance, atol=tolerance)
        upstream = torch.randn(got.shape).to(dtype)
        expected = torch.autograd.grad(wanted.expand(got.shape), exact, upstream.double())
        for mine, truth in zip(torch.autograd.grad(got, inputs, upstream), expected, strict=True):
            limit = tolerance * max(1.0, float(truth.abs().max()))
            torch.testing.assert_close(mine.double(), truth, rtol=tolerance, atol=limit)


def test_rows_of_two_dimensions() -> None:
    @weft.rowwise(dims=2)
    def scaled(x: Any, channel: Any) -> Any:
        return tl.cumsum(x) * channel / tl.max(tl.abs(x)), tl.sum(x)

    x, channel = torch.randn(3, 4, 5), torch.randn(4, 1)
    for each in (x, x.transpose(0, 2)[:, :, :3].transpose(0, 2), torch.randn(4, 5, 3).permute(2, 0, 1)):
        result, total = scaled(each, channel)
        flat = each.reshape(len(each), -1)
        wanted = flat.cumsum(-1).view(each.shape) * channel / flat.abs().amax(-1)[:, None, None]
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(total, flat.sum(-1))


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), pytest.param((2, 3, 4, 3000), marks=pytest.mark.slow)])
def test_rows_of_three_dimensions(shape: tuple[int, ...]) -> None:
    """With an operand that varies along any of them, in scans in one direction and in both."""

    def one_way(x: Any, w: Any) -> Any:
        return tl.cumsum(x * w), tl.sum(x * w), tl.cumsum(w - x, reverse=True)

    def reversed_sums(t: Tensor) -> Tensor:
        return t.flip(1).cumsum(1).flip(1)

    separate = weft.rowwise(dims=3)(one_way)
    both = weft.rowwise(dims=3)(lambda x, w: tl.cumsum(x * w) + tl.cumsum(w - x, reverse=True))
    _, a, b, c = shape
    for small in ((a, 1, 1), (b, 1), (c,), (a, 1, c), (1, b, c), (a, b, 1)):
        x, w = (torch.randint(-4, 5, size).float().requires_grad_() for size in (shape, small))
        with triton_loom.sanitize():
            scanned, total, rest = separate(x, w)
            sums = both(x, w)
        product, difference = (x * w).flatten(1), (w - x).flatten(1)
        assert torch.equal(scanned.flatten(1), product.cumsum(1))
        assert torch.equal(total, product.sum(1))
        assert torch.equal(rest.flatten(1), reversed_sums(difference))
        assert torch.equal(sums.flatten(1), product.cumsum(1) + reversed_sums(difference))
        got = torch.autograd.grad(scanned.square().sum() + total.sum(), (x, w))
        wanted = torch.autograd.grad(product.cumsum(1).square().sum() + product.sum(), (x, w))
        for mine, truth in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))


def test_strides() -> None:
    op = weft.rowwise(lambda x, y: tl.cumsum(x) - y * tl.max(x))
    x, y = torch.randn(5, 6, 70), torch.randn(6, 70)
    for a, b in (
        (x, y),
        (x.transpose(0, 1)[..., ::3], y[:, None, ::3]),
        (x.flip(0), y[:1]),
        (x[..., :1].expand(5, 6, 9), y[:, :9]),
    ):
        with triton_loom.sanitize():
            got = op(a, b)
        torch.testing.assert_close(got, a.cumsum(-1) - b * a.amax(-1, keepdim=True), atol=1e-4, rtol=1e-4)


def test_out() -> None:
    x = torch.randn(3, 40)
    op = weft.rowwise(lambda x: x / tl.sum(x))
    out = torch.empty(40, 3).t()
    assert op(x, out=out) is out
    assert torch.equal(out, op(x))
    with pytest.raises(ValueError, match="out shares memory with x"):
        op(x, out=x)


def test_compiled_without_a_graph_break() -> None:
    op = weft.rowwise(lambda x: x / tl.sum(tl.abs(x)))
    compiled = torch.compile(lambda x: op(x * 2).sum(), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 40, requires_grad=True)
    wanted = torch.autograd.grad(op(x * 2).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), wanted)


def test_what_is_refused() -> None:
    x = torch.ones(2, 3)
    for call, error, message in (
        (lambda: weft.rowwise(lambda x: tl.sum(x, axis=1)), TypeError, "a row has one axis"),
        (lambda: weft.rowwise(lambda x: tl.sort(x)), AttributeError, "tl.sort is not among"),
        (lambda: weft.rowwise(dims=0)(lambda x: x), ValueError, "at least one dimension; got dims=0"),
        (lambda: weft.pointwise(lambda x: tl.cumsum(x)), TypeError, "use @weft.rowwise"),
        (lambda: weft.pointwise(lambda x: x / x.numel), TypeError, "use @weft.rowwise"),
        (lambda: weft.rowwise(lambda x: tl.sum(x))(x[0, 0]), ValueError, "a row has 1 dimension"),
        (lambda: weft.rowwise(dims=2)(lambda x: tl.sum(x))(x[0]), ValueError, "a row has 2 dimensions"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_checks_of_a_users_op() -> None:
    @weft.rowwise
    def soft_rank(x: Any, temperature: Any) -> Any:
        return tl.cumsum(tl.sigmoid(x / temperature)) / tl.sum(tl.sigmoid(x / temperature))

    assert {"gradients", "sanitized", "compiled"} <= {*check(soft_rank, torch.randn(5, 33), 0.7)}
    assert {"gradients", "bytes", "proven"} <= {*check(weft.rowwise(lambda x, y: x / tl.sum(tl.abs(x)) * y))}


def test_bytes_and_proofs_notice_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads its rows twice, and one whose last column is outside of them."""
    from weft.ops.generated import kernels, launch
    from weft.testing import _bytes, _proven

    def workload_of(op: Any, rows: int, cols: int) -> Workload:
        def build(workload: Workload, inputs: Any, shape: tuple[int, ...]) -> Call:
            return Call(op, {"x": inputs.normal(*shape)})

        return Workload(op.op.name, "own", "all", ("rows", cols), rows, build, dtype=torch.float32)

    def share(x: Any) -> Any:
        return x / tl.sum(tl.abs(x))

    _bytes(workload_of(weft.rowwise(share), 4096, 1024))
    with monkeypatch.context() as changed:
        changed.setattr(launch, "row_config", lambda cols, operands, target: launch.TileConfig(256, 4))
        with pytest.raises(AssertionError, match="bytes are moved"):
            _bytes(workload_of(weft.rowwise(share), 4096, 1024))
    _proven(workload_of(weft.rowwise(share), 5, 33))
    text_of, wrong = kernels.kernel_text, ("inside = col < cols", "inside = col <= cols")
    monkeypatch.setattr(kernels, "kernel_text", lambda *args: text_of(*args).replace(*wrong))
    with pytest.raises(AssertionError, match="x_ptr"):
        _proven(workload_of(weft.rowwise(share), 5, 33))
