"""Delayed scaling: the scales of every step against plain PyTorch, saturation, and unrecorded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import DelayedScaling
from weft.lab.families.product import product_truth
from weft.lab.truth import near

M, N, K = 24, 40, 64
MAX = {"x": 448.0, "weight": 448.0, "grad": 57344.0}
DTYPES = {"x": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "grad": torch.float8_e5m2}


def tensors(step: int) -> dict[str, Tensor]:
    """Return x, weight and dy of a step, whose sizes change over the steps."""
    draw = torch.Generator().manual_seed(step)
    sizes = {"x": (M, K), "weight": (N, K), "grad": (M, N)}
    growth = {"x": 3.0**step, "weight": 1.0 + step % 2, "grad": 0.1**step}
    return {name: torch.randn(*size, generator=draw) * growth[name] for name, size in sizes.items()}


def rounded(x: Tensor, name: str, scale: Tensor) -> Tensor:
    """Round x to its FP8 type with this scale; return float64."""
    codes = (x * (1.0 / scale)).clamp(-MAX[name], MAX[name]).to(DTYPES[name])
    return codes.double() * scale.double()


def run(scaling: DelayedScaling, inputs: dict[str, Tensor], layer: Any = weft.linear) -> dict[str, Tensor]:
    x, w = (inputs[name].clone().requires_grad_() for name in ("x", "weight"))
    y = layer(x, w, recipe="fp8_tensor", scaling=scaling)
    y.backward(inputs["grad"])
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}  # type: ignore[dict-item]


def scales(scaling: DelayedScaling) -> dict[str, Tensor]:
    return {name: getattr(scaling, f"{name}_scale").clone() for name in MAX}


@pytest.mark.parametrize(("algorithm", "margin"), [("max", 0), ("most_recent", 0), ("max", 2)])
def test_each_step_uses_scales_of_earlier_steps(algorithm: Any, margin: int) -> None:
    history = 3
    scaling = DelayedScaling(history=history, margin=margin, algorithm=algorithm)
    amaxes: dict[str, list[Tensor]] = {name: [] for name in MAX}
    stale = {name: torch.tensor(1.0) for name in MAX}
    for step in range(6):
        inputs = tensors(step)
        got = run(scaling, inputs)
        x, w, dy = (rounded(inputs[name], name, stale[name]) for name in MAX)
        near(got["y"], product_truth(x, w.T))
        near(got["dx"], product_truth(dy, w))
        near(got["dw"], product_truth(dy.T, x))
        assert {name: float(scale) for name, scale in scales(scaling).items()} == {
            name: float(scale) for name, scale in stale.items()
        }
        scaling.step()
        for name in MAX:
            amaxes[name].append(inputs[name].abs().max())
            last = amaxes[name][-history:] if algorithm == "max" else amaxes[name][-1:]
            stale[name] = 1.0 / (torch.tensor(MAX[name] / 2**margin) / torch.stack(last).max())
            assert torch.equal(getattr(scaling, f"{name}_scale"), stale[name]), (step, name)


def test_values_that_outgrow_their_scale_saturate() -> None:
    scaling = DelayedScaling(history=2)
    run(scaling, tensors(0))
    scaling.step()
    before, inputs = scales(scaling), tensors(0)
    inputs = {name: 100 * x for name, x in inputs.items()}
    got = run(scaling, inputs)
    x, w, dy = (rounded(inputs[name], name, before[name]) for name in MAX)
    assert x.abs().max() == 448 * before["x"].double()
    assert (x.abs() == x.abs().max()).float().mean() > 0.5
    near(got["y"], product_truth(x, w.T))
    near(got["dw"], product_truth(dy.T, x))
    scaling.step()
    assert torch.allclose(scaling.x_scale, 100 * before["x"])


def test_the_margin_leaves_headroom() -> None:
    """A margin of 2 holds values four times as large without saturation."""
    scaling, inputs = DelayedScaling(margin=2), tensors(0)
    run(scaling, inputs)
    scaling.step()
    limit = 448 * scaling.x_scale
    assert torch.allclose(limit, 4 * inputs["x"].abs().max())


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_scales_do_not_change_without_a_usable_amax(value: float) -> None:
    scaling = DelayedScaling(history=2)
    run(scaling, tensors(0))
    scaling.step()
    before = scales(scaling)
    inputs = tensors(0)
    inputs["x"].fill_(value) if value == 0.0 else inputs["x"].view(-1)[3:4].fill_(value)
    for _ in range(2 if value == 0.0 else 1):  # the history still has the amax before the zeros
        run(scaling, inputs)
        scaling.step()
    assert torch.equal(scaling.x_scale, before["x"])
    for _ in range(2):
        run(scaling, tensors(1))
        scaling.step()
    assert torch.equal(scaling.x_scale, 1.0 / (448.0 / tensors(1)["x"].abs().max()))


def test_calls_between_steps_use_the_same_scales() -> None:
    """Micro-batches, compiled layers and recomputed activations share scales, and the largest amax is recorded."""

    def twice(layer: Any) -> list[Tensor]:
        scaling = DelayedScaling(history=4)
        values: list[Tensor] = []
        for step in range(2):
            for micro in (1, 0):
                values += run(scaling, tensors(step + micro), layer).values()
            values += [scaling.amax.clone()]
            scaling.step()
            values += scales(scaling).values()
        return values

    def checkpointed(x: Tensor, w: Tensor, **options: Any) -> Any:
        return checkpoint(lambda x, w: weft.linear(x, w, **options), x, w, use_reentrant=False)

    eager = twice(weft.linear)
    largest = [max(tensors(step)[name].abs().max() for step in (0, 1)) for name in MAX]
    assert torch.equal(eager[6], torch.stack(largest))
    compiled = torch.compile(weft.linear, fullgraph=True, backend="aot_eager")
    for layer in (checkpointed, compiled):
        assert all(torch.equal(mine, its) for mine, its in zip(twice(layer), eager, strict=True))


def test_state() -> None:
    scaling = DelayedScaling(history=2)
    run(scaling, tensors(0))
    scaling.step()
    run(scaling, tensors(1))
    saved = {name: value.clone() for name, value in scaling.state_dict().items()}
    assert set(saved) == {"amax", "history", "x_scale", "weight_scale", "grad_scale"}
    other = torch.nn.Sequential(DelayedScaling(history=2)).bfloat16()[0]
    other.load_state_dict(saved)
    assert {value.dtype for value in other.state_dict().values()} == {torch.float32}
    for one in (scaling, other):
        one.step()
    assert scales(scaling) == scales(other)
    before = scaling.eval().state_dict()
    run(scaling, tensors(2))
    assert all(torch.equal(before[name], value) for name, value in scaling.state_dict().items())
    assert not scaling.amax.any()
    later = DelayedScaling(history=2, device="meta").to_empty(device="cpu")
    later.reset_parameters()
    fresh = DelayedScaling(history=2).state_dict()
    assert all(torch.equal(fresh[name], value) for name, value in later.state_dict().items())


def test_mistakes_raise_clear_errors() -> None:
    scaling, inputs = DelayedScaling(), tensors(0)
    x, w = inputs["x"].requires_grad_(), inputs["weight"]
    y = weft.linear(x, w, recipe="fp8_tensor", scaling=scaling)
    scaling.step()
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation"
    ):  # backward would use other scales
        y.sum().backward()  # type: ignore[no-untyped-call]
    for call, words in (
        (lambda: weft.linear(x, w, recipe="fp8_block", scaling=scaling), "give both the same"),
        (lambda: weft.linear(x, w, scaling=scaling), "give both the same"),
        (lambda: weft.linear(x, w, recipe="fp8_tensor", scaling=1.0), "must be a weft.DelayedScaling"),  # type: ignore[arg-type]
        (
            lambda: weft.linear(x, w, recipe="fp8_tensor", scaling=DelayedScaling(device="meta")),
            "must be on cpu",
        ),
        (lambda: DelayedScaling("fp8_block"), "one scale per tensor"),
        (lambda: DelayedScaling(None), "one scale per tensor"),  # type: ignore[arg-type]
        (lambda: DelayedScaling(algorithm="mean"), "'max' or 'most_recent'"),  # type: ignore[arg-type]
        (lambda: DelayedScaling(history=0), "at least 1 step"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
