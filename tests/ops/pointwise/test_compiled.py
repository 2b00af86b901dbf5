"""Kernels of scalar functions as they are compiled for GPUs, and what a solver proves about them for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.ops.pointwise.functions import FUNCTIONS
from tests.support.binaries import flaws
from weft.lab.compiled.offline import compile_all
from weft.ops.pointwise.kernels import Form, Operand, kernel_for
from weft.ops.pointwise.lowering import Typed
from weft.runtime import TARGETS, Variant, recording

# ---- binaries -----------------------------------------------------------------------------------------------


def variants(name: str, target: str) -> list[Variant]:
    """Return the variants that a function and its gradient launch for three layouts."""
    function = FUNCTIONS[name]
    op = weft.pointwise(function.scalar)
    shapes = [(64, 1024), (1024,), (64, 1)][: function.arguments]
    with recording(target) as recorded:
        for layout in (shapes, [(64, 1024)] * function.arguments):
            inputs = [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in layout]
            results = op(*inputs)
            if results.requires_grad:
                torch.autograd.grad(results, inputs, torch.empty_like(results))
    return list(dict.fromkeys(recorded))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(
            target, name, marks=[] if (target, name) == ("sm_90", "silu_and_mul") else pytest.mark.slow
        )
        for target in TARGETS
        for name in ("silu_and_mul", "lerp", "gelu", "pow", "clamp", "atan2")
    ],
)
def test_kernels_compile_without_spills(target: str, name: str) -> None:
    jobs = [(variant, target) for variant in variants(name, target)]
    assert len(jobs) >= 2
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=300), strict=True):
        assert not flaws(target, binary), variant


# ---- proofs -------------------------------------------------------------------------------------------------

FP32 = (Typed(torch.float32),) * 2


def flat() -> Any:
    from triton_loom.prove import Buffer, cdiv, prove, symbol

    operands = (Operand("x", "1", False), Operand("y", "0", False)), (Operand("out", "1", False),)
    kernel = kernel_for("add", weft.pointwise(FUNCTIONS["add"].scalar).op.scalar, Form(FP32, *operands, 0))
    count = symbol("count", 1, 2**30)
    arguments = {"x_ptr": Buffer("f32", count), "y_ptr": Buffer("f32", 1), "out_ptr": Buffer("f32", count)}
    constants = {"count": count, "TILE": 2048, "ALIGN": 1}
    return prove(kernel.fn, grid=(cdiv(count, 2048),), args=arguments | constants, outputs=("out_ptr",))


def in_rows(outer: int, broadcast: str) -> Any:
    """Prove x[sizes, cols] + y -> out: x of any strides, y a row or a column, out contiguous."""
    from triton_loom.prove import Buffer, cdiv, prove, symbol

    column = broadcast == "column"
    inputs = (Operand("x", "1", True), Operand("y", "0" if column else "1", column))
    form = Form(FP32, inputs, (Operand("out", "1", True),), outer)
    kernel = kernel_for("add", weft.pointwise(FUNCTIONS["add"].scalar).op.scalar, form)
    sizes, cols = [symbol(f"size{i}", 1, 2**10) for i in range(outer)], symbol("cols", 1, 2**14)
    strides = [symbol(f"stride{i}", 0, 2**24) for i in range(outer)]
    rows: Any = 1
    row_strides: list[Any] = []
    for size in reversed(sizes):
        row_strides.insert(0, rows)
        rows = size * rows
    arguments: dict[str, Any] = {
        "x_ptr": Buffer.strided("f32", (*sizes, cols), (*strides, 1)),
        "y_ptr": Buffer("f32", rows if column else cols),
        "out_ptr": Buffer("f32", rows * cols, shape=(*sizes, cols)),
        "rows": rows,
        "cols": cols,
        "ROWS": 2,
        "COLS": 1024,
        "ALIGN": 1,
    }
    arguments |= {f"size{i}": sizes[i] for i in range(1, outer)}
    for i in range(outer):
        arguments |= {f"x_stride{i}": strides[i], f"out_stride{i}": row_strides[i] * cols}
        if column:
            arguments[f"y_stride{i}"] = row_strides[i]
    return prove(kernel.fn, grid=(cdiv(rows, 2) * cdiv(cols, 1024),), args=arguments, outputs=("out_ptr",))


def test_one_dimension_is_proven_safe() -> None:
    assert flat().verdict == "proven"


@pytest.mark.parametrize(
    ("outer", "broadcast"),
    [
        (1, "row"),
        pytest.param(1, "column", marks=pytest.mark.slow),
        pytest.param(2, "row", marks=pytest.mark.slow),
        pytest.param(2, "column", marks=pytest.mark.slow),
        pytest.param(3, "row", marks=pytest.mark.slow),
    ],
)
def test_more_dimensions_are_proven_safe(outer: int, broadcast: str) -> None:
    """Bounds, overflow, races and promises; that every element is written is left open for three dimensions."""
    report = in_rows(outer, broadcast)
    open_questions = {answer.kind for answer in report.answers if answer.verdict != "proven"}
    assert open_questions <= {"covered"}, report
    assert outer == 2 or not open_questions, report
