"""Weighted sums against float64: the steps of denoising loops, gradients, results in place, and captured loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32

import weft
from tests.support.binaries import flaws
from weft.lab.compiled.offline import compile_all
from weft.runtime import TARGETS, recording

B, T, D = 3, 50, 32


def state(*shape: int) -> Tensor:
    return torch.randn(*shape or (B, T, D))


def half(*shape: int) -> Tensor:
    return state(*shape).bfloat16()


def near(y: Tensor, *terms: Tensor) -> None:
    """Assert that y is the sum of terms in float64, but for roundings of fp32 and one to its dtype."""
    truth = sum(term.double() for term in terms)
    size = sum(term.double().abs() for term in terms)
    eps = torch.finfo(y.dtype).eps / 2 if y.dtype is not torch.float32 else EPS32
    assert ((y.double() - truth).abs() <= eps * truth.abs() + 4 * EPS32 * size).all()  # type: ignore[union-attr]


# ---- uses, in one call each ---------------------------------------------------------------------------------


def test_a_residual() -> None:
    x, y = half(), half()
    assert torch.equal(weft.axpby(x, y), x + y)


def test_a_gated_residual_with_a_bias() -> None:
    r, y, gate, bias = half(), half(), half(B, 1, D), half(D)
    near(weft.axpby(r, (gate, y), bias), r, gate.double() * y.double(), bias.expand_as(r))


@pytest.mark.parametrize(
    "dt", [0.1, torch.tensor(0.1), torch.rand(B), torch.rand(B, T), torch.rand(1)], ids=str
)
def test_an_euler_step(dt: float | Tensor) -> None:
    x, v = state(), half()
    y = weft.axpby(x, (dt, v))
    assert y.dtype is torch.float32
    factor = (
        dt.view(*dt.shape, *(1,) * (3 - dt.dim())).double()
        if isinstance(dt, Tensor)
        else float(torch.tensor(dt))
    )
    near(y, x, factor * v.double())


def test_guidance_and_a_step() -> None:
    x, u, c, dt, scale = state(), half(), half(), 0.1, 4.0
    y = weft.axpby(x, (dt * (1 - scale), u), (dt * scale, c))
    near(y, x, dt * (1 - scale) * u.double(), dt * scale * c.double())


def test_guidance_by_sample_and_a_step_of_a_table() -> None:
    x, u, c, scale = state(), half(), half(), torch.rand(B) + 3
    dts = torch.rand(10)
    table, step = torch.stack([torch.ones(10), dts, dts], 1), torch.tensor(7)
    y = weft.axpby(x, (1 - scale, u), (scale, c), coefficients=table, step=step)
    s = scale.double()[:, None, None]
    near(
        y,
        x,
        dts[7].double() * (1 - scale).double()[:, None, None] * u.double(),
        dts[7].double() * s * c.double(),
    )


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_steps_of_a_table(terms: int) -> None:
    """Adams-Bashforth, DPM-Solver++ and UniPC are such sums, of the state and of earlier predictions."""
    tensors = [state(), *(half() for _ in range(terms - 1))]
    table = torch.randn(20, terms)
    for step in (0, 11, 19):
        at = torch.tensor([step], dtype=torch.int32)
        with triton_loom.sanitize():
            y = weft.axpby(*tensors, coefficients=table, step=at)
        near(y, *(a.double() * t.double() for a, t in zip(table[step], tensors, strict=True)))
        vector = weft.axpby(*tensors, coefficients=table[step])
        assert torch.equal(y, vector)


def test_a_step_outside_of_the_table_is_nan() -> None:
    x = state()
    for table in (torch.ones(10, 2), torch.ones(30, 2)[10:20], torch.ones(0, 2)):
        for step in (-1, -(2**31), len(table), 2**31, 2**62):
            for needs in (False, True):
                with triton_loom.sanitize():
                    y = weft.axpby(
                        x, x, coefficients=table.clone().requires_grad_(needs), step=torch.tensor(step)
                    )
                assert y.isnan().all()


# ---- dtypes and shapes --------------------------------------------------------------------------------------


def test_coefficients_do_not_decide_the_dtype() -> None:
    x = half()
    for a in (0.5, torch.tensor(0.5), torch.full((B,), 0.5), torch.full((B, 1, D), 0.5)):
        assert weft.axpby((a, x), x).dtype is torch.bfloat16
    assert weft.axpby(x, x, coefficients=torch.ones(2)).dtype is torch.bfloat16
    assert weft.axpby(x, x.half()).dtype is torch.float32
    assert weft.axpby(x, state(), out_dtype=torch.float16).dtype is torch.float16
    assert weft.axpby(x, state().double()).dtype is torch.float64


def test_one_rounding() -> None:
    x, y, z = half(), half(), half()
    wide = weft.axpby(x, (0.3, y), (-1.7, z), out_dtype=torch.float32)
    assert torch.equal(weft.axpby(x, (0.3, y), (-1.7, z)), wide.bfloat16())


def test_a_term_without_a_coefficient_keeps_its_bits() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-149, 1e38])
    y = weft.axpby(x)
    assert torch.equal(y, x)
    assert torch.equal(y.signbit(), x.signbit())


def test_terms_are_broadcast_and_strided() -> None:
    x, y, z = state(B, D, T).transpose(1, 2), half(T, 1), half(2 * B, T, D)[::2]
    with triton_loom.sanitize():
        got = weft.axpby(x, (torch.rand(B, T).t().contiguous().t(), y), z)
    assert got.shape == (B, T, D)
    a = torch.rand(T, B).t()
    near(weft.axpby(x, (a, y), z), x, (a[..., None].double() * y.double()), z)


def test_empty_tensors() -> None:
    for shape in ((0, T, D), (B, 0, D), (B, T, 0)):
        x = torch.zeros(shape, requires_grad=True)
        a = torch.ones(shape[0], requires_grad=True)
        y = weft.axpby(x, (a, x), coefficients=torch.ones(4, 2), step=torch.tensor(0))
        assert y.shape == shape
        da, _ = torch.autograd.grad(y.sum(), (a, x))
        assert torch.equal(da, torch.zeros_like(a))


# ---- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (B,), (B, T), (B, 1, D), (1, 1, D), (B, T, D)], ids=str)
def test_gradients_of_coefficients(shape: tuple[int, ...]) -> None:
    x, v, w = state().requires_grad_(), half().requires_grad_(), half(D).requires_grad_()
    a, b = torch.rand(shape).requires_grad_(), torch.rand(B).requires_grad_()

    def gradients(x: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
        y = weft.axpby(x, (a, v), (b, w))
        return torch.autograd.grad(y, (x, v, w, a, b), dy.to(y.dtype))

    dy = state()
    with triton_loom.sanitize():
        got = gradients(x, v, w, a, b)
    again = gradients(x, v, w, a, b)
    exact = gradients(*(t.detach().double().requires_grad_() for t in (x, v, w, a, b)))
    for mine, twice, truth, leaf in zip(got, again, exact, (x, v, w, a, b), strict=True):
        assert mine.shape == leaf.shape
        assert mine.dtype is leaf.dtype
        assert torch.equal(mine, twice)
        eps = torch.finfo(mine.dtype).eps
        assert (mine.double() - truth).abs().max() <= max(eps, 64 * EPS32) * max(truth.abs().max(), 8.0)


def test_gradients_of_a_table() -> None:
    x, v, table = state(), half(), torch.rand(5, 2).requires_grad_()
    y = weft.axpby(x, v, coefficients=table, step=torch.tensor(3))
    assert torch.equal(y, weft.axpby(x, v, coefficients=table.detach(), step=torch.tensor(3)))
    dy = state()
    (got,) = torch.autograd.grad(y, table, dy)
    wanted = torch.zeros(5, 2, dtype=torch.float64)
    wanted[3] = torch.stack([(dy.double() * t.double()).sum() for t in (x, v)])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-3)


def test_coefficients_multiply_those_of_the_terms() -> None:
    x, v, a = state(), half(), torch.rand(B).bfloat16()
    row = torch.rand(2)
    table = weft.axpby(x, (a, v), coefficients=row[None], step=torch.tensor(0))
    assert torch.equal(weft.axpby(x, (a, v), coefficients=row), table)
    leaf = row.clone().requires_grad_()
    y = weft.axpby(x, (a, v), coefficients=leaf)
    assert torch.equal(y, table)
    assert torch.autograd.grad(y.sum(), leaf)[0].shape == (2,)


def test_only_wanted_gradients() -> None:
    x, v, dt = state(), half(), torch.rand(B).requires_grad_()
    y = weft.axpby(x, (dt, v))
    (d,) = torch.autograd.grad(y, dt, torch.ones_like(y))
    torch.testing.assert_close(d, v.float().sum((1, 2)), rtol=1e-4, atol=1e-3)


def test_slopes() -> None:
    x, v, a = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3,), (2,)))
    assert torch.autograd.gradcheck(lambda x, v, a: weft.axpby(x, (a, v), (2.0, x)), (x, v, a))


# ---- in place, compiled, captured -----------------------------------------------------------------------------


def test_the_state_is_updated_in_place() -> None:
    x, v, dt = state(), half(), torch.tensor(0.1)
    wanted = weft.axpby(x, (dt, v))
    kept = x
    assert weft.axpby(x, (dt, v), out=x) is kept
    assert torch.equal(x, wanted)
    rows = state(2 * B, T, D)
    part = rows[::2]
    wanted, others = weft.axpby(part, (dt, v)), rows[1::2].clone()
    weft.axpby(part, (dt, v), out=part)
    assert torch.equal(part, wanted)
    assert torch.equal(rows[1::2], others)


def test_memory_that_would_be_read_too_late_is_refused() -> None:
    x, table, step = state(8, 8), torch.ones(8, 8), torch.tensor(0)
    for call in (
        lambda: weft.axpby(x[1:], x[1:], out=x[:-1]),
        lambda: weft.axpby(x, x.t(), out=x),
        lambda: weft.axpby(x, (x[:, 0], x), out=x),
        lambda: weft.axpby(
            table[:, :2], table[:, 2:4], coefficients=table[:, :2], step=step, out=table[:, :2]
        ),
    ):
        before = x.clone()
        with pytest.raises(ValueError, match="out shares memory with"):
            call()
        assert torch.equal(x, before)


def test_out_of_a_table_or_a_step_is_refused_with_gradients() -> None:
    x = state(4, 4)
    with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
        weft.axpby(x.clone().requires_grad_(), x, out=x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_eager(dynamic: bool) -> None:
    table, step = torch.rand(10, 3), torch.tensor(4)

    def run(x: Tensor, u: Tensor, c: Tensor, scale: Tensor) -> Tensor:
        return weft.axpby(x, (1 - scale, u), (scale, c), coefficients=table, step=step)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (2, 5):
        x, u, c = state(batch, T, D).requires_grad_(), half(batch, T, D), half(batch, T, D)
        scale = torch.rand(batch).requires_grad_()
        mine, wanted = compiled(x, u, c, scale), run(x, u, c, scale)
        assert torch.equal(mine, wanted)
        for a, b in zip(*(torch.autograd.grad(y.sum(), (x, scale)) for y in (mine, wanted)), strict=True):
            assert torch.equal(a, b)


def multistep(
    table: Tensor, model: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return a state, a counter, and one step of an Adams-Bashforth loop that updates them."""
    x, step = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)), torch.tensor(0)
    before = torch.zeros(B, T, D, dtype=torch.bfloat16)

    def one(context: Tensor) -> Tensor:
        v = model(x) * context
        weft.axpby(x, v, before, coefficients=table, step=step, out=x)
        before.copy_(v)
        step.add_(1)
        return x

    return x, step, one


def test_one_captured_step_is_replayed() -> None:
    """The kernel reads the counter: ten replays are ten steps of the schedule, with the bits of the eager loop."""
    steps, weight = 10, half(D, D)
    table = torch.stack([torch.ones(steps), torch.rand(steps) / 10, -torch.rand(steps) / 30], 1)
    table[0, 2] = 0.0
    context = half(B, 1, D)

    def model(x: Tensor) -> Tensor:
        return (x.bfloat16() @ weight).tanh()

    with torch.no_grad():
        x, step, one = multistep(table, model)
        for _ in range(steps):
            one(context)
        eager = x.clone()
        assert step.item() == steps
        x, step, one = multistep(table, model)
        start = x.clone()
        replay = weft.capture(one, context)
        x.copy_(start)
        step.zero_()
        for _ in range(steps):
            y = replay(context)
        assert torch.equal(y, eager)
        assert step.item() == steps
        assert replay(context).isnan().all()  # the schedule has ended


# ---- GPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS]
)
def test_compiled_for_gpus_without_spills(target: str) -> None:
    from weft.lab.families import for_op

    with recording(target) as recorded:
        for workload in (*for_op("axpby"), *for_op("axpby_backward")):
            workload.make("meta")()
    jobs = [(v, target) for v in dict.fromkeys(recorded) if v.kernel.startswith("axpby")]
    assert len(jobs) >= 8
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=300), strict=True):
        assert not flaws(target, binary), variant
