"""Tests of every cell of the table "One contract" in docs/products.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.test_quantized import COPIES, FORMATS, assert_read_or_refused, quantized

ENDS, ALIGN = torch.tensor([128, 256]), 128
CHOSEN = torch.arange(256).view(256, 1) % 2
NO_ARGUMENT = ("no argument", "no weight", "no recipe", "no gradient")


class Function:
    """Function of the table with its plain operands."""

    def __init__(
        self, call: Callable[..., Tensor], kinds: dict[str, tuple[int, ...]], read: dict[str, str]
    ) -> None:
        self.call, self.kinds, self.read = call, kinds, read

    def operands(self) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return {name: torch.randn(shape) / 11 for name, shape in self.kinds.items()}


def experts(x: Tensor, up: Tensor, down: Tensor, **options: Any) -> Tensor:
    return weft.experts(x, up, down, (torch.ones(256, 1), CHOSEN), **options)


# Shapes of operands, and the copy of each that is read.
FUNCTIONS = {
    "matmul": Function(weft.matmul, {"a": (256, 128), "b": (128, 256)}, {"a": "rowwise", "b": "columnwise"}),
    "linear": Function(weft.linear, {"x": (256, 128), "weight": (256, 128)}, {"weight": "rowwise"}),
    "grouped_matmul": Function(
        lambda x, w, **options: weft.grouped_matmul(x, w, ENDS, align=ALIGN, **options),
        {"x": (256, 128), "w": (2, 256, 128)},
        {"x": "rowwise", "w": "rowwise"},
    ),
    "grouped_wgrad": Function(
        lambda dy, x, **options: weft.grouped_wgrad(dy, x, ENDS, align=ALIGN, **options),
        {"dy": (256, 128), "x": (256, 128)},
        {"dy": "columnwise", "x": "columnwise"},
    ),
    "experts": Function(
        experts,
        {"x": (256, 128), "up": (2, 256, 128), "down": (2, 128, 128)},
        {"up": "rowwise", "down": "rowwise"},
    ),
}


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def tracked(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in operands.items()}


# ---- the rows -------------------------------------------------------------------------------------------


def out_dtype(f: Function) -> None:
    operands = f.operands()
    wanted = f.call(**operands)
    out = torch.full_like(wanted, torch.nan, dtype=torch.bfloat16)
    assert f.call(**operands, out=out) is out
    assert relative(out, wanted) < 0.01


def out_over_an_operand(f: Function) -> None:
    operands = f.operands()
    shape = f.call(**operands).shape
    memory = next(iter(operands.values())).new_empty(shape.numel() + 10)
    first = next(iter(operands))
    operands[first] = memory[: operands[first].numel()].view(operands[first].shape)
    f.call(**operands, out=memory[: shape.numel()].view(shape))


def out_with_gradients(f: Function) -> None:
    operands = f.operands()
    f.call(**tracked(operands), out=torch.empty_like(f.call(**operands)))


def quantized_operand(f: Function) -> None:
    for name, side in f.read.items():
        operands = f.operands()
        q = weft.quantize(operands[name], "row", **{"rowwise": False, "columnwise": False, side: True})
        got = f.call(**{**operands, name: q})
        assert relative(got, f.call(**{**operands, name: q.dequantize()})) < 1e-5


def other_copy(f: Function) -> None:
    name, side = next(reversed(f.read.items()))
    operands = f.operands()
    other = "columnwise" if side == "rowwise" else "rowwise"
    operands[name] = weft.quantize(operands[name], "row", **{side: False, other: True})
    f.call(**operands)


def quantized_gradient(f: Function) -> None:
    leaves = tracked(f.operands())
    y = f.call(**leaves)
    q = weft.quantize(torch.randn(y.shape), "1x128")
    got = torch.autograd.grad(y, list(leaves.values()), q, retain_graph=True)
    wanted = torch.autograd.grad(y, list(leaves.values()), q.dequantize())
    assert all(map(torch.equal, got, wanted))


def trained_alone(f: Function) -> None:
    leaves = tracked(f.operands())
    y = f.call(**leaves)
    dy = torch.randn(y.shape)
    wanted = torch.autograd.grad(y, list(leaves.values()), dy)
    for name, gradient in zip(leaves, wanted, strict=True):
        alone = {n: t.detach().requires_grad_(n == name) for n, t in f.operands().items()}
        (got,) = torch.autograd.grad(f.call(**alone), alone[name], dy)
        assert torch.equal(got, gradient)


def main_grad(f: Function) -> None:
    wanted, leaves = tracked(f.operands()), tracked(f.operands())
    f.call(**wanted).sum().backward()
    for name in f.read:
        leaves[name].main_grad = torch.zeros_like(leaves[name])  # type: ignore[attr-defined]
    f.call(**leaves).sum().backward()
    for name in f.read:
        assert leaves[name].grad is None
        assert relative(leaves[name].main_grad, wanted[name].grad) < 1e-6  # type: ignore[attr-defined, arg-type]


def functional_gradient(f: Function, **options: Any) -> None:
    operands = f.operands()
    first = next(iter(operands))
    got = torch.func.grad(lambda x: f.call(**{**operands, first: x}, **options).sum())(operands[first])
    leaves = tracked(operands)
    (wanted,) = torch.autograd.grad(f.call(**leaves, **options).sum(), leaves[first])
    assert relative(got, wanted) < 1e-6


def functional_gradient_of_codes(f: Function) -> None:
    functional_gradient(f, recipe="fp8_block")


def forward_mode(f: Function) -> None:
    operands = f.operands()
    first = next(iter(operands))

    def function(x: Tensor) -> Tensor:
        return f.call(**{**operands, first: x})

    for transform in (
        lambda: torch.func.jvp(function, (operands[first],), (operands[first],)),
        lambda: torch.func.vmap(function)(operands[first][None]),
    ):
        try:
            transform()
        except NotImplementedError:
            continue
        return
    raise NotImplementedError("both were refused")


def compiled(f: Function, **options: Any) -> None:
    leaves = tracked(f.operands()) if f is not FUNCTIONS["grouped_wgrad"] else f.operands()
    function = torch.compile(
        lambda **tensors: f.call(**tensors, **options), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(function(**leaves), f.call(**leaves, **options))


def compiled_and_stochastic(f: Function) -> None:
    compiled(f, recipe="nvfp4")


def inference(f: Function) -> None:
    name, operands = next(reversed(f.read)), f.operands()
    operands[name] = weft.quantize(operands[name], "row", rowwise=True, columnwise=True)
    wanted = f.call(**operands)
    with torch.inference_mode():
        assert torch.equal(f.call(**operands), wanted)


ROWS: dict[str, Callable[[Function], None]] = {
    "`out=` decides the dtype": out_dtype,
    "`out=` over an operand": out_over_an_operand,
    "`out=` with gradients": out_with_gradients,
    "a quantized operand of the pairs above": quantized_operand,
    "an operand without the copy that is read": other_copy,
    "a quantized gradient": quantized_gradient,
    "each operand trained alone": trained_alone,
    "`weight.main_grad`": main_grad,
    "`torch.func.grad`": functional_gradient,
    "`torch.func.grad`, quantized recipe": functional_gradient_of_codes,
    "`torch.func.jvp`, `torch.func.vmap`": forward_mode,
    "`torch.compile(fullgraph=True)`": compiled,
    "compiled, stochastic recipe": compiled_and_stochastic,
    "`torch.inference_mode` with quantized weights": inference,
}

# Text of the error of each refused row.
WORDS = {
    "`out=` over an operand": "shares memory",
    "`out=` with gradients": "no_grad",
    "an operand without the copy that is read": "has no (row|column)-wise copy",
    "`torch.func.grad`": "has no derivative",
    "`torch.func.grad`, quantized recipe": "torch.func cannot differentiate",
    "`torch.func.jvp`, `torch.func.vmap`": "both were refused",
    "compiled, stochastic recipe": "draws a new seed",
}


# ---- the table ------------------------------------------------------------------------------------------


def table() -> dict[tuple[str, str], str]:
    """Return (row, function) -> text of the cell."""
    text = (Path(__file__).parents[3] / "docs/products.md").read_text()
    section = text.split("## One contract")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    names = [cell.strip("`") for cell in lines[0][1:]]
    return {(row, name): cell for row, *cells in lines[2:] for name, cell in zip(names, cells, strict=True)}


def test_the_table_lists_the_tested_rows() -> None:
    assert {row for row, _ in table()} == set(ROWS)
    assert {name for _, name in table()} == set(FUNCTIONS)


@pytest.mark.parametrize(("row", "name"), table())
def test_a_cell(row: str, name: str) -> None:
    says, check, function = table()[row, name], ROWS[row], FUNCTIONS[name]
    if says in NO_ARGUMENT:
        parameters = inspect.signature(getattr(weft, name)).parameters
        missing = {"no argument": "out", "no weight": "weight", "no recipe": "recipe"}.get(says)
        assert missing not in parameters
        assert says != "no gradient" or not weft.catalogue[name].differentiable
    elif says == "served":
        check(function)
    else:
        assert says == "refused"
        with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=WORDS[row]):
            check(function)


# ---- every format, compiled -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_codes_are_read_or_refused_compiled(name: str, spec: str, copies: str) -> None:
    """A graph reads or rejects a quantized operand, with and without gradients of the others."""
    f = FUNCTIONS[name]
    plain_operands = f.operands()
    for operand in f.kinds:
        q = quantized(plain_operands[operand], spec, copies)
        others = {n: t for n, t in plain_operands.items() if n != operand}
        if q is None:
            continue
        for gradients in (False, True) if name != "grouped_wgrad" else (False,):
            leaves = {n: t.clone().requires_grad_(gradients) for n, t in others.items()}

            def compute(
                x: Tensor, leaves: dict[str, Tensor] = leaves, operand: str = operand
            ) -> dict[str, Tensor]:
                torch._dynamo.reset()
                function = torch.compile(f.call, backend="aot_eager", fullgraph=True)
                y = (function if isinstance(x, weft.QTensor) else f.call)(**leaves, **{operand: x})
                results = {"y": y.detach().double()}
                if y.requires_grad:
                    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
                    grads = torch.autograd.grad(y, list(leaves.values()), dy)
                    results |= {f"d{n}": g.double() for n, g in zip(leaves, grads, strict=True)}
                return results

            assert_read_or_refused(compute, q, f"{name} {operand}")
