"""Softmax, sums and norms of rows against PyTorch in float64: values, gradients, special rows, layouts, and bits."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import EPS32

import weft

LENGTHS = (33, 8193)
BY_NIGHT = (1, 2, 1000, 8192, 50_000, 300_000)


class Function(NamedTuple):
    """A function of rows, its definition in PyTorch, and its error in fp32: of each result, from x in float64."""

    weft: Callable[..., Tensor]
    torch: Callable[..., Tensor]
    noise: Callable[[Tensor, Tensor], Tensor]  # (x, truth)


def of_softmax(x: Tensor, y: Tensor) -> Tensor:
    """The exponent is rounded, so that the error of an exponential grows with it."""
    return y * (16 + (x.amax(-1, keepdim=True) - x).nan_to_num())


def of_logarithm(x: Tensor, y: Tensor) -> Tensor:
    return 16 + 4 * y.abs()


def of_sums(x: Tensor, y: Tensor) -> Tensor:
    """Roundings of a sum of n terms are a random walk of n steps, each a part of the largest partial sum."""
    steps = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64).sqrt()
    sums = torch.maximum(y.abs().cummax(-1).values, y.abs().flip(-1).cummax(-1).values.flip(-1))
    return 2 * sums * steps.maximum(steps.flip(-1))


FUNCTIONS = {
    "softmax": Function(weft.softmax, lambda x: x.softmax(-1), of_softmax),
    "log_softmax": Function(weft.log_softmax, lambda x: x.log_softmax(-1), of_logarithm),
    "logsumexp": Function(weft.logsumexp, lambda x: x.logsumexp(-1), of_logarithm),
    "cumsum": Function(weft.cumsum, lambda x: x.cumsum(-1), of_sums),
    "cumsum_reversed": Function(
        lambda x: weft.cumsum(x, reverse=True), lambda x: x.flip(-1).cumsum(-1).flip(-1), of_sums
    ),
    "l2_normalize": Function(weft.l2_normalize, lambda x: F.normalize(x, dim=-1), lambda x, y: 16 * y.abs()),
}


def near(got: Tensor, truth: Tensor, noise: Tensor) -> None:
    """Assert that a result is within an error in fp32 roundings, and one rounding to its own dtype, of the truth."""
    assert got.shape == truth.shape
    eps = torch.finfo(got.dtype).eps if got.dtype is not torch.float32 else 0.0
    limit = EPS32 * noise + eps * truth.abs() + 2.0**-126
    assert ((got.double() - truth).abs() <= limit).all()


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [*LENGTHS, *(pytest.param(n, marks=pytest.mark.slow) for n in BY_NIGHT)])
def test_values_and_gradients(name: str, length: int) -> None:
    function, x = FUNCTIONS[name], drawn(3, length).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, truth = function.weft(x), function.torch(exact)
    near(y.detach(), truth.detach(), function.noise(exact.detach(), truth.detach()))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(truth, exact, dy.double())
    terms = of_sums(exact, expected) if "sum" in name else 32 * expected.abs()
    terms = terms + 4 * (length == 1)  # a difference of equals
    near(dx, expected, terms + 32 * math.sqrt(length) * expected.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_half_precision_rounds_once(name: str, dtype: torch.dtype) -> None:
    x = drawn(5, 300, dtype=dtype)
    got, wide = FUNCTIONS[name].weft(x), FUNCTIONS[name].weft(x.float())
    assert got.dtype is dtype
    assert torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("length", [4, 9000])
def test_special_rows(name: str, length: int) -> None:
    """Rows of -inf alone, with inf, with NaN, with elements that overflow: as in PyTorch."""
    inf, nan = math.inf, math.nan
    heads = [
        [-inf] * 4, [inf, 0.0, -inf, 1.0], [nan, 0.0, 1.0, 2.0], [nan] * 4,
        [1e38, -1e38, 0.0, 1.0], [-inf, 0.0, -inf, 1.0],
    ]  # fmt: skip
    x = torch.tensor([row + row[-1:] * (length - 4) for row in heads])
    got, wanted = FUNCTIONS[name].weft(x), FUNCTIONS[name].torch(x.double()).float()
    torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [pytest.param(5, marks=pytest.mark.slow), 700, 9000])
def test_bits_do_not_depend_on_the_batch(name: str, length: int) -> None:
    x = drawn(9, length)
    together = FUNCTIONS[name].weft(x)
    for row in (0, 4, 8):
        assert torch.equal(together[row], FUNCTIONS[name].weft(x[row : row + 1])[0])
        assert torch.equal(together[row], FUNCTIONS[name].weft(x[row]))


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_any_dimension(dim: int) -> None:
    x = drawn(4, 6, 10)
    for ours, theirs in (
        (weft.softmax, torch.softmax), (weft.log_softmax, torch.log_softmax), (weft.cumsum, torch.cumsum),
        (weft.logsumexp, torch.logsumexp), (weft.l2_normalize, lambda x, dim: F.normalize(x, dim=dim)),
    ):  # fmt: skip
        got = ours(x, dim)
        torch.testing.assert_close(got, theirs(x, dim))


def test_strides() -> None:
    x = drawn(6, 7, 40)
    for view in (
        x[:, ::2],
        x[..., ::3],
        x.transpose(0, 2),
        x[:, :1].expand(6, 5, 40),
        x[..., :1].expand(6, 7, 9),
    ):
        torch.testing.assert_close(weft.softmax(view), view.softmax(-1))
        torch.testing.assert_close(weft.cumsum(view), view.cumsum(-1))
        assert torch.equal(weft.logsumexp(view), weft.logsumexp(view.contiguous()))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for function in FUNCTIONS.values():
        assert torch.equal(function.weft(x), function.torch(x))


def test_integers_are_summed_in_int64() -> None:
    x = torch.full((2, 9000), 2**20, dtype=torch.int32)
    assert torch.equal(weft.cumsum(x), x.cumsum(-1))
    assert torch.equal(weft.cumsum(x.bool()), x.bool().cumsum(-1))


# ---- group norm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((3, 12, 5, 7), 4),
        ((2, 8, 40, 40), 2),
        ((2, 6, 3), 1),
        ((2, 6, 3), 6),
        ((4, 8), 2),
        ((1, 4, 50, 50), 1),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> None:
    inputs = [drawn(*shape)] + [drawn(shape[1]) for _ in range(2 * affine)]
    inputs = [each.requires_grad_() for each in inputs]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    y, truth = weft.group_norm(inputs[0], groups, *inputs[1:]), F.group_norm(exact[0], groups, *exact[1:])
    near(
        y.detach(), truth.detach(), 16 * (1 + truth.detach().abs() + (exact[2].abs().amax() if affine else 0))
    )
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(truth, exact, dy.double())
    for got, want in zip(torch.autograd.grad(y, inputs, dy), expected, strict=True):
        near(got, want, torch.full_like(want, 64 * math.sqrt(y.numel()) * float(want.abs().amax())))


def test_channels_last() -> None:
    x = drawn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    torch.testing.assert_close(weft.group_norm(x, 4), F.group_norm(x, 4))


def test_group_norm_of_one_channel_alone() -> None:
    """A group is normalized with the bits it has in any batch."""
    x, weight, bias = drawn(5, 8, 33), drawn(8), drawn(8)
    together = weft.group_norm(x, 4, weight, bias)
    assert torch.equal(together[2:3], weft.group_norm(x[2:3], 4, weight, bias))
    assert torch.equal(together[:, 2:4], weft.group_norm(x[:, 2:4], 1, weight[2:4], bias[2:4]))


def test_zero_vectors_have_no_direction() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    weft.l2_normalize(x).sum().backward()
    exact = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    F.normalize(exact, dim=-1).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad)


# ---- xIELU ----------------------------------------------------------------------------------------------------


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5) -> Tensor:
    below = torch.where(x > 0, 0.0, x)
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(below) - below) * n + beta * x)


@pytest.mark.parametrize(
    "shape", [(33,), (4, 5, 96), pytest.param((3, 21504), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("alpha", [0.3, -12.0, 6.0])
def test_xielu(shape: tuple[int, ...], alpha: float) -> None:
    """Values near zero and far from it, and gradients of x and of both parameters, of any dtype beside x's."""
    x = drawn(*shape) * torch.logspace(-6, 1.3, shape[-1])
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype), torch.tensor([alpha]), torch.tensor(0.5 - alpha).bfloat16()]
        inputs = [each.requires_grad_() for each in inputs]
        exact = [each.detach().double().requires_grad_() for each in inputs]
        y, truth = weft.xielu(*inputs, beta=0.7), _xielu(*exact, beta=0.7)
        assert y.dtype is dtype
        scale = 1 + F.softplus(exact[2].detach())
        near(y.detach(), truth.detach(), 8 * (truth.detach().abs() + scale * exact[0].detach().abs()))
        dy = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        dx, *rest = torch.autograd.grad(y, inputs, dy)
        wanted, *sums = torch.autograd.grad(truth, exact, dy.double())
        near(dx, wanted, 8 * (wanted.abs() + scale * dy.double().abs()))
        for got, want, alone in zip(rest, sums, exact[1:], strict=True):
            terms = dy.double().abs() * exact[0].detach().abs().maximum(exact[0].detach().square())
            slope = torch.sigmoid(alone.detach())
            near(got, want, 8 * math.sqrt(x.numel()) * slope * terms.square().sum().sqrt())


def test_xielu_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    module = activations.XIELUActivation(dtype=torch.float32)
    x = drawn(4, 64)
    # Its eps moves results by up to 1e-6.
    torch.testing.assert_close(weft.xielu(x, module.alpha_p, module.alpha_n), module(x), rtol=1e-6, atol=2e-6)


def test_xielu_at_infinity() -> None:
    x = torch.tensor([-math.inf, -1e30, -100.0, 0.0, 100.0, math.inf, math.nan], requires_grad=True)
    alpha = torch.zeros(1, requires_grad=True)
    y = weft.xielu(x, alpha, alpha)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    steep = math.log(2)
    assert torch.equal(y.isinf(), torch.tensor([True, False, False, False, False, True, False]))
    assert torch.allclose(
        dx, torch.tensor([-steep, -steep, -steep, 0.5, 200 * steep + 0.5, math.inf, math.nan]), equal_nan=True
    )
    assert y[6].isnan()


def test_ops_are_pickled_by_name() -> None:
    from weft.ops.rows import softmax

    assert pickle.loads(pickle.dumps(softmax._softmax)) is softmax._softmax
    assert copy.deepcopy(softmax._softmax) is softmax._softmax


def test_mistakes_are_named() -> None:
    x = drawn(2, 6)
    for call, error, message in (
        (lambda: weft.softmax(x, 2), IndexError, "no dimension 2"),
        (lambda: weft.softmax(x, (0, 1)), TypeError, "dim must be an integer"),  # type: ignore[arg-type]
        (lambda: weft.cumsum(x.int(), out_dtype=torch.bfloat16), ValueError, "is torch.int64"),
        (lambda: weft.softmax([1.0]), TypeError, "x must be a tensor"),
        (lambda: weft.softmax(x, out_dtype=torch.int8), ValueError, "out_dtype"),
        (
            lambda: weft.xielu(x, torch.zeros(2), torch.zeros(1)),
            ValueError,
            r"alpha_p must have the shape \(\) or \(1,\)",
        ),
        (lambda: weft.xielu(x, torch.zeros(1), 0.8), TypeError, "alpha_n must be a tensor"),  # type: ignore[arg-type]
        (lambda: weft.group_norm(x, 4), ValueError, "groups must divide the 6 channels"),
        (lambda: weft.group_norm(x, 0), ValueError, "groups must divide"),
        (lambda: weft.group_norm(x[0], 1), ValueError, r"\[N, C, ...\]"),
        (lambda: weft.group_norm(x, 2, x), ValueError, "weight must have the shape"),
        (lambda: weft.group_norm(x.int(), 2), ValueError, "x must be"),
    ):
        with pytest.raises(error, match=message):
            call()
