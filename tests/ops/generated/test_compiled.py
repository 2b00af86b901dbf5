"""Kernels of scalar functions as they are compiled for GPUs, and what a solver proves about them for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

import weft
from tests.ops.generated.functions import FUNCTIONS
from tests.support.binaries import flaws
from weft.lab.compiled.offline import compile_all
from weft.lab.families.rows import FUNCTIONS as FUNCTIONS_OF_ROWS
from weft.ops.generated.kernels import kernel_for
from weft.ops.generated.lowering import Typed
from weft.ops.generated.text import Form, Operand
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


ROWS = FUNCTIONS_OF_ROWS | {"group_norm": lambda x: weft.group_norm(x[..., None], 8)}


def variants_of_rows(name: str, target: str) -> list[Variant]:
    """Return the variants that a function of rows and its gradient launch for a short, a whole and a long row."""
    with recording(target) as recorded:
        for length in (200, 8192, 20_000):
            x = torch.empty((64, length), dtype=torch.bfloat16, device="meta", requires_grad=True)
            y = ROWS[name](x)
            torch.autograd.grad(y, x, torch.empty_like(y))
    return list(dict.fromkeys(recorded))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(target, name, marks=[] if (target, name) == ("sm_90", "softmax") else pytest.mark.slow)
        for target in TARGETS
        for name in ROWS
    ],
)
def test_kernels_of_rows_compile_without_spills(target: str, name: str) -> None:
    jobs = [(variant, target) for variant in variants_of_rows(name, target)]
    assert len(jobs) >= 6
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=300), strict=True):
        assert not flaws(target, binary), variant


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


def variants_of_codes(name: str, target: str, **options: Any) -> list[Variant]:
    """Return the variants that fill the copies of a quantized result."""
    with recording(target) as recorded:
        for length in (200, 4096, 20_000):
            x = torch.empty((64, length), dtype=torch.bfloat16, device="meta")
            if name == "softmax":
                weft.rowwise(lambda x: tl.exp(x - tl.max(x)) / tl.sum(tl.exp(x - tl.max(x))))(x, **options)
            else:
                weft.pointwise(FUNCTIONS[name].scalar)(x, x[0], **options)
    return [each for each in dict.fromkeys(recorded) if each.module == kernel_for.__module__]


@pytest.mark.parametrize(
    ("target", "name", "spec", "columnwise"),
    [
        pytest.param(
            target, *of, marks=[] if (target, *of[1:]) == ("sm_90", "mx", True) else pytest.mark.slow
        )
        for target in TARGETS
        for of in [
            ("silu_and_mul", "1x128", False),
            ("silu_and_mul", "1x128", True),
            ("silu_and_mul", "128x128", True),
            ("silu_and_mul", "mx", True),
            ("silu_and_mul", "nvfp4", True),
            ("softmax", "1x128", False),
            ("softmax", "row", False),
        ]
    ],
)
def test_quantized_results_compile_without_spills(
    target: str, name: str, spec: str, columnwise: bool
) -> None:
    jobs = [(v, target) for v in variants_of_codes(name, target, quantize=spec, columnwise=columnwise)]
    assert jobs
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


def outer_sizes(outer: int) -> tuple[list[Any], list[Any], Any, list[Any]]:
    """Return sizes of outer dimensions, strides of any tensor along them, and their product and strides in rows of a
    contiguous one."""
    from triton_loom.prove import symbol

    sizes = [symbol(f"size{i}", 1, 2**10) for i in range(outer)]
    strides = [symbol(f"stride{i}", 0, 2**24) for i in range(outer)]
    rows: Any = 1
    row_strides: list[Any] = []
    for size in reversed(sizes):
        row_strides.insert(0, rows)
        rows = size * rows
    return sizes, strides, rows, row_strides


def in_rows(outer: int, broadcast: str) -> Any:
    """Prove x[sizes, cols] + y -> out: x of any strides, y a row or a column, out contiguous."""
    from triton_loom.prove import Buffer, cdiv, prove, symbol

    column = broadcast == "column"
    inputs = (Operand("x", "1", True), Operand("y", "0" if column else "1", column))
    form = Form(FP32, inputs, (Operand("out", "1", True),), outer)
    kernel = kernel_for("add", weft.pointwise(FUNCTIONS["add"].scalar).op.scalar, form)
    cols = symbol("cols", 1, 2**14)
    sizes, strides, rows, row_strides = outer_sizes(outer)
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


def rows(outer: int, loops: bool, scan: bool) -> Any:
    """Prove a softmax or a running sum of x[sizes, cols], of any strides between rows, into a contiguous result."""
    from triton_loom.prove import Buffer, cdiv, prove, symbol

    op = weft.rowwise((lambda x: tl.cumsum(x)) if scan else (lambda x: tl.exp(x - tl.max(x)) / tl.sum(x)))
    form = Form(FP32[:1], (Operand("x", "1", True),), (Operand("out", "1", True),), outer, loops)
    kernel = kernel_for("rows", op.op.scalar, form)
    width = 256 if loops else 1024
    cols = symbol("cols", 1, 2**14 if loops else width)
    sizes, strides, count, row_strides = outer_sizes(outer)
    arguments: dict[str, Any] = {
        "x_ptr": Buffer.strided("f32", (*sizes, cols), (*strides, 1)),
        "out_ptr": Buffer("f32", count * cols, shape=(*sizes, cols)),
        "rows": count, "cols": cols, "ROWS": 2, "COLS": width, "ALIGN": 1,
    }  # fmt: skip
    arguments |= {f"size{i}": sizes[i] for i in range(1, outer)}
    for i in range(outer):
        arguments |= {f"x_stride{i}": strides[i], f"out_stride{i}": row_strides[i] * cols}
    return prove(kernel.fn, grid=(cdiv(count, 2),), args=arguments, outputs=("out_ptr",))


@pytest.mark.parametrize(
    ("outer", "loops", "scan"),
    [
        (1, False, False),
        pytest.param(1, True, False, marks=pytest.mark.slow),
        pytest.param(1, True, True, marks=pytest.mark.slow),
        pytest.param(2, False, False, marks=pytest.mark.slow),
        pytest.param(3, False, False, marks=pytest.mark.slow),
        pytest.param(2, True, False, marks=pytest.mark.slow),
    ],
)
def test_rows_are_proven_safe(outer: int, loops: bool, scan: bool) -> None:
    report = rows(outer, loops, scan)
    open_questions = {answer.kind for answer in report.answers if answer.verdict != "proven"}
    assert open_questions <= {"covered"}, report
    assert outer > 1 or not open_questions, report
