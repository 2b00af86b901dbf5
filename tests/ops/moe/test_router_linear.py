"""The router's projection is as accurate as fp32, on every path and for every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import assert_rounded_once

import weft
from tests.catalogue.layouts import LAYOUTS, far_apart
from tests.support.covering import covering
from weft.lab.calls import assert_same
from weft.lab.families.router_linear import router_linear_truth
from weft.runtime import choosing_for, recording

F = torch.nn.functional
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(
    rows: int,
    cols: int,
    experts: int,
    x_dtype: torch.dtype = BF16,
    weight_dtype: torch.dtype = FP32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x, weight, bias and an upstream gradient."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw)  # noqa: E731
    return (
        normal(rows, cols).to(x_dtype),
        (normal(experts, cols) * 0.05).to(weight_dtype),
        normal(experts).to(weight_dtype),
        normal(rows, experts),
    )


def run(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in (("x", x), ("weight", weight), ("bias", bias))
        if t is not None
    }
    y = weft.router_linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def check(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    got = run(x, weight, bias, dy)
    for name, near in router_linear_truth(x, weight, bias, dy).items():
        assert_rounded_once(got[name], near.truth, near.noise)
    return got


# ---- accuracy ------------------------------------------------------------------------------------------

SIZES = [(1, 1, 1), (2, 3, 2), (17, 33, 5), (40, 96, 160), (129, 65, 257), (65, 200, 60), (3, 2049, 7)]


@pytest.mark.parametrize(("rows", "cols", "experts"), SIZES)
def test_sizes(rows: int, cols: int, experts: int) -> None:
    """Sizes exceed a tile by one, in every dimension."""
    x, weight, bias, dy = inputs(rows, cols, experts)
    got = run(x, weight, bias, dy)
    for name, near in router_linear_truth(x, weight, bias, dy).items():
        assert_rounded_once(got[name], near.truth, near.noise)


DTYPES = [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32), (FP32, FP16)]
# Tiles depend on the target, not on the dtypes.
ON_TARGETS = covering(DTYPES, ("cpu", "sm_90", "gfx942"), together=1)


@pytest.mark.parametrize(("dtypes", "target"), ON_TARGETS)
def test_dtypes_on(target: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """fp32 products and products of bf16 parts meet the same error bound, in the tiles of each target."""
    x_dtype, weight_dtype = dtypes
    with choosing_for(target):
        got = check(*inputs(70, 1100, 36, x_dtype, weight_dtype))
    assert (got["y"].dtype, got["dx"].dtype, got["dweight"].dtype) == (FP32, x_dtype, weight_dtype)


def errors(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the root mean square and largest error, relative to the root mean square of the truth."""
    error = (got.double() - truth) / truth.square().mean().sqrt()
    return error.square().mean().sqrt().item(), error.abs().max().item()


def tf32(x: Tensor) -> Tensor:
    """Round to TF32's eleven bits, as a matrix unit does."""
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(("rows", "target"), covering((192, 9000), ("sm_90", "cpu"), together=1))
def test_error_is_no_larger_than_that_of_fp32(target: str, rows: int) -> None:
    """y, dx (in fp32) and dweight are compared with F.linear in fp32, TF32 and bf16, all against float64."""
    cols, experts = (2048, 64) if rows < 1000 else (256, 16)  # few rows are split over columns, many are not
    x, weight, _, dy = inputs(rows, cols, experts)
    with choosing_for(target):
        got = run(x, weight, None, dy)
        # dx is rounded to x's dtype, which hides its error: x in fp32 shows it
        dx = run(x.float(), weight, None, dy)["dx"]
    xf = x.float()
    rounded = {"fp32": lambda t: t, "tf32": tf32, "bf16": lambda t: t.bfloat16().float()}
    for name, result, product in (
        ("y", got["y"], lambda f: F.linear(f(xf), f(weight))),
        ("dx", dx, lambda f: f(dy) @ f(weight)),
        ("dweight", got["dweight"], lambda f: f(dy).t() @ f(xf)),
    ):
        truth = product(lambda t: t.double())
        error = errors(result, truth)
        baselines = {kind: errors(product(f).float(), truth) for kind, f in rounded.items()}
        print(
            f"{target} {rows} {name}: weft {error[0]:.2e} {error[1]:.2e}",
            *(f"{k} {v[0]:.2e}" for k, v in baselines.items()),
        )
        # Errors of sums this short vary by chance: 10% in the mean, and 50% in the worst of many thousands.
        assert error[0] <= 1.1 * baselines["fp32"][0], name
        assert error[1] <= 1.5 * baselines["fp32"][1], name
        assert error[0] < 0.05 * baselines["tf32"][0], name
        assert baselines["tf32"][0] < baselines["bf16"][0], name


def test_large_and_small_terms() -> None:
    """Large terms cancel, so a missing part of an operand would show."""
    x = torch.ones(16, 64).bfloat16()
    weight = torch.zeros(16, 64)
    weight[:, 0], weight[:, 1], weight[:, 2] = 2.0**23 + 1, -(2.0**23), 2.0**-20
    for target in ("cpu", "sm_90"):
        with choosing_for(target):
            y = weft.router_linear(x, weight)
        assert torch.equal(y, torch.full((16, 16), 1 + 2.0**-20)), target


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_special_values(target: str) -> None:
    """Splitting into parts preserves the largest values, infinities and NaN of a weight."""
    largest = torch.finfo(FP32).max
    x, weight, _, _ = inputs(16, 64, 16)
    for special in (largest, -largest, torch.inf, -torch.inf, torch.nan):
        changed = weight.clone()
        changed[3, 5] = special
        small = x.clone() * 2.0**-9
        with choosing_for(target):
            y = weft.router_linear(small, changed)
            others = weft.router_linear(small, weight)
        wanted = F.linear(small.float(), changed)
        assert torch.equal(y[:, 3].isnan(), wanted[:, 3].isnan())
        assert torch.equal(y[:, 3].isinf(), wanted[:, 3].isinf())
        torch.testing.assert_close(y[:, 3], wanted[:, 3], equal_nan=True)
        rest = torch.arange(16) != 3
        assert torch.equal(y[:, rest], others[:, rest])


# ---- order of sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_same_bits_for_any_number_of_rows(target: str) -> None:
    """A token's logits depend only on the token, among batches that all split the columns or all do not."""
    x, weight, bias, _ = inputs(300, 1100, 20)
    with choosing_for(target):
        batch = weft.router_linear(x, weight, bias)
        for rows in (1, 2, 63, 64, 65):
            assert torch.equal(weft.router_linear(x[7 : 7 + rows], weight, bias), batch[7 : 7 + rows])


def test_columns_are_split_only_for_few_rows() -> None:
    weight = torch.empty(256, 2048, device="meta")
    for rows, kernels in ((64, ["router_linear_kernel", "_sum_kernel"]), (8192, ["router_linear_kernel"])):
        with recording("sm_90") as seen:
            weft.router_linear(torch.empty(rows, 2048, dtype=BF16, device="meta"), weight)
        assert [variant.kernel for variant in seen] == kernels


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_deterministic(target: str) -> None:
    args = inputs(500, 192, 24)
    with choosing_for(target):
        first = run(*args)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(run(*args), first, f"{threads} threads on {target}")


# ---- layouts, gradients, PyTorch -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of any tensor, including the upstream gradient, give the bits of contiguous ones."""
    args = list(inputs(21, 48, 12))
    for i, tensor in enumerate(args):
        if tensor.dim() == 1 and layout.__name__ in ("expanded",):
            continue
        laid_out = layout(tensor)
        changed, wanted = list(args), list(args)
        changed[i], wanted[i] = laid_out, laid_out.contiguous().clone()
        assert_same(run(*changed), run(*wanted), f"{layout.__name__} {i}")


def test_leading_dimensions() -> None:
    x, weight, bias, dy = inputs(24, 48, 12)
    wanted = run(x, weight, bias, dy)
    shaped = run(x.view(2, 3, 4, 48), weight, bias, dy.view(2, 3, 4, 12))
    assert shaped["y"].shape == (2, 3, 4, 12)
    assert_same({n: t.reshape(wanted[n].shape) for n, t in shaped.items()}, wanted, "leading dimensions")
    transposed = x.view(2, 12, 48).transpose(0, 1)
    y = weft.router_linear(transposed, weight, bias)
    assert torch.equal(y.transpose(0, 1).reshape(24, 12), wanted["y"])


def test_offsets_have_64_bits() -> None:
    x = far_apart(4, 96)
    _, weight, bias, dy = inputs(4, 96, 12)
    assert_same(run(x, weight, bias, dy), run(x.contiguous(), weight, bias, dy), "far apart")


@pytest.mark.parametrize("wanted", range(8))
def test_gradients_of_a_subset(wanted: int) -> None:
    """Any subset of the inputs may need gradients."""
    x, weight, bias, dy = inputs(33, 48, 12)
    full = run(x, weight, bias, dy)
    tensors = {"x": x, "weight": weight, "bias": bias}
    leaves = {n: t.detach().requires_grad_(bool(wanted >> i & 1)) for i, (n, t) in enumerate(tensors.items())}
    y = weft.router_linear(**leaves)
    assert y.requires_grad == bool(wanted)
    if wanted:
        y.backward(dy)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, full[f"d{name}"])


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16, requires_grad=True)
    weight, bias = torch.randn(12, 48, requires_grad=True), torch.randn(12, requires_grad=True)
    y = weft.router_linear(x, weight, bias)
    assert y.shape == (*shape[:-1], 12)
    assert y.dtype == FP32
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not weight.grad.count_nonzero()
    assert not bias.grad.count_nonzero()


def test_no_columns() -> None:
    """Without columns, the result is the bias."""
    y = weft.router_linear(torch.empty(5, 0, dtype=BF16), torch.empty(12, 0), torch.arange(12.0))
    assert torch.equal(y, torch.arange(12.0).expand(5, 12))


def test_no_copy_of_the_activations() -> None:
    """Neither forward nor backward allocates a tensor as large as x in fp32."""
    x, weight, bias, dy = inputs(600, 512, 16)
    sizes: list[int] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        run(x, weight, bias, dy)
    assert sizes
    assert max(sizes) <= x.numel() * x.element_size()


def test_gradcheck_of_the_reference() -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (4, 5), (4,))]
    assert torch.autograd.gradcheck(weft.router_linear, leaves)


def test_opcheck() -> None:
    x, weight, bias, dy = inputs(9, 48, 12)
    tracked = tuple(t.requires_grad_() for t in (x, weight, bias))
    torch.library.opcheck(weft.catalogue["router_linear"].overload, tracked)
    args = (*(t.detach() for t in tracked), dy, True, True, True)
    torch.library.opcheck(weft.catalogue["router_linear_backward"].overload, args)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return weft.router_linear(x, weight, bias) * 2

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 33):
        x, weight, bias, dy = inputs(rows, 48, 12)
        results = []
        for g in (f, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            y = g(*leaves)
            results.append({"y": y, **dict(zip("xwb", torch.autograd.grad(y, leaves, dy), strict=True))})
        assert_same(results[1], results[0], "compiled")


def test_autocast_changes_nothing() -> None:
    args = inputs(33, 48, 12)
    wanted = run(*args)
    with torch.autocast("cpu", dtype=BF16):
        assert_same(run(*args), wanted, "autocast")


def test_invalid_arguments_raise() -> None:
    x, weight, bias, _ = inputs(4, 48, 12)
    for wrong, message in (
        ((x, weight[:, :40], bias), r"\[E, H\]"),
        ((x, weight[0], bias), r"\[E, H\]"),
        ((x, weight, bias[:3]), r"bias must have the shape \(12,\)"),
        ((x, weight[:0], None), "at least one; got none"),
        ((x.int(), weight, None), "x must be bfloat16"),
        ((x, weight.to("meta"), None), "weight must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.router_linear(*wrong)
