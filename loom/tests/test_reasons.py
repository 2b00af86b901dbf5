"""Reasons of findings: expressions of the kernel's source with their values at the lane, all of them true."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from mistakes import MISTAKES, Mistake
from triton_loom import Finding, Reason


class _Substituted(ast.NodeTransformer):
    """Substitution of values into an expression; drops the dimensions of tiles."""

    def __init__(self, values: Mapping[str, int | str]) -> None:
        self.values = values

    def visit(self, node: ast.AST) -> ast.AST:
        value = self.values.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        if isinstance(value, str) and value not in ("True", "False"):
            others = {
                name: other for name, other in self.values.items() if other != value
            }  # x_ptr = x_ptr + 72
            return _Substituted(others).visit(ast.parse(value, mode="eval").body)
        if value is not None:
            return ast.parse(f"({value})", mode="eval").body
        if isinstance(node, ast.Subscript):
            return self.visit(node.value)
        return super().visit(node)


def evaluate(expression: str, reason: Reason, argument: str | None) -> int | None:
    """Evaluate an expression with a reason's values, from an argument's first element; None if some are missing."""
    filled = _Substituted(reason.values).visit(ast.parse(expression, mode="eval"))
    try:
        return int(eval(ast.unparse(filled), {argument: 0} if argument else {}))
    except NameError:
        return None


def check_reason(finding: Finding, tensor: torch.Tensor | None) -> bool:
    """Return whether a reason is complete; assert that all of it is true."""
    reason = finding.reason
    assert reason is not None
    exact = evaluate(reason.expression, reason, finding.argument)
    if finding.kind == "offset overflow":
        assert exact is None or f"the exact result is {exact}," in finding.detail, reason
        return exact is not None
    if reason.mask is not None:
        assert evaluate(reason.mask, reason, None) in (None, 1), reason
    if exact is None or finding.index is None or tensor is None:
        return False
    # a stride of 0 allows any index; a 32-bit offset has wrapped around
    offset = sum(i * stride for i, stride in zip(finding.index, tensor.stride(), strict=True))
    assert (exact - offset) % 2**32 == 0, f"{reason} is {exact}, not {offset}"
    return True


# ---- the recorded mistakes -----------------------------------------------------------------------------------


def reasons_of(case: Mistake, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Finding, torch.Tensor | None]]:
    """Return the findings of a case with the tensors that they name. (A case may launch several kernels.)"""
    tensors: dict[str, torch.Tensor] = {}

    def note(*args: object, **_: object) -> None:
        named_args = zip(case.kernel.arg_names, args, strict=False)
        tensors.update((name, value) for name, value in named_args if isinstance(value, torch.Tensor))

    monkeypatch.setattr(case.kernel, "pre_run_hooks", [note])
    with triton_loom.sanitize(collect=True, dry=case.dry) as seen:
        case.run(fixed=False, dry=case.dry)
    return [(f, tensors.get(f.argument or "")) for f in seen.findings if f.kernel == case.kernel.fn.__name__]


def test_reasons_of_recorded_mistakes_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason with values for all of its names leads to the reported element."""
    findings = [
        finding_and_tensor for case in MISTAKES for finding_and_tensor in reasons_of(case, monkeypatch)
    ]
    explained = [(finding, tensor) for finding, tensor in findings if finding.reason is not None]
    complete = [finding for finding, tensor in explained if check_reason(finding, tensor)]
    assert len(findings) >= 80
    assert len(explained) >= 65
    assert len(complete) >= 60


# ---- each way to write an address ----------------------------------------------------------------------------


def reasons(
    kernel: object, *args: object, grid: tuple[int, ...] = (1,), **constants: object
) -> list[Reason | None]:
    """Return the reasons of wrong addresses.

    Some kernels also store lanes that their loads leave undefined, which is ignored here.
    """
    with triton_loom.sanitize(collect=True) as seen:
        kernel[grid](*args, **constants)  # type: ignore[index]
    tensors = dict(zip(kernel.arg_names, args, strict=False))  # type: ignore[attr-defined]
    accesses = [finding for finding in seen.findings if finding.kind != "undefined value"]
    for finding in accesses:
        if finding.reason is not None:
            check_reason(finding, tensors.get(finding.argument))  # type: ignore[arg-type]
    return [finding.reason for finding in accesses]


@triton.jit
def read_rows(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n)
    tl.store(y_ptr + row * BLOCK + cols, x)


@pytest.mark.compat
def test_reasons_use_the_kernel_s_names() -> None:
    """A stride of 1 is a constant to the compiler, and is reported all the same."""
    x, y = torch.zeros(4, 100), torch.zeros(4, 128)
    assert reasons(read_rows, x, y, 128, 100, grid=(4,), BLOCK=128) == [
        Reason(
            "x_ptr + row * stride + cols",
            "cols < n",
            {"row": 3, "stride": 100, "cols": 100, "n": 128},
        )
    ]
    (reason,) = reasons(read_rows, x[:, :1], y, 2, 1, BLOCK=128)
    assert str(reason) == (
        "x_ptr + row * stride + cols, mask cols < n where row = 0, cols = 1, n = 2, stride = 1"
    )


@triton.jit
def offset_of(row, stride, col):
    return row * stride + col


@triton.jit
def read_through(p, offs, on):
    return tl.load(p + offs, mask=on)


@triton.jit
def read_by_functions(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < stride
    tl.store(y_ptr + cols, read_through(x_ptr, offset_of(row, stride, cols), inside))


@pytest.mark.compat
def test_reasons_in_device_functions_use_their_names() -> None:
    """The names are those of the function that contains the access."""
    (reason,) = reasons(read_by_functions, torch.zeros(20), torch.zeros(32), 21, BLOCK=32)
    assert reason == Reason("p + offs", "on", {"offs": 20, "on": "True"})


@triton.jit
def read_in_a_loop(x_ptr, y_ptr, rows, cols, stride, TILE: tl.constexpr):
    r = tl.arange(0, TILE)
    x_ptrs = x_ptr + r[:, None] * stride + r[None, :]
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, cols, TILE):
        total += tl.load(x_ptrs, mask=r[:, None] < rows)
        x_ptrs += TILE
    tl.store(y_ptr, tl.sum(total))


@pytest.mark.compat
def test_pointers_advanced_by_a_loop_are_recomputed() -> None:
    (reason,) = reasons(read_in_a_loop, torch.zeros(5, 40), torch.zeros(1), 5, 40, 40, TILE=16)
    assert reason is not None
    assert (reason.expression, reason.mask) == ("x_ptrs", "r[:, None] < rows")
    assert reason.values["x_ptrs"] == "x_ptr + 200"
    assert reason.values["rows"] == 5


@triton.jit
def gather_rows(x_ptr, at_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.load(at_ptr + i)
    tl.store(y_ptr + i, tl.load(x_ptr + at * n))


@triton.jit
def gather_rows_in_place(x_ptr, at_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.load(at_ptr + i)
    tl.store(at_ptr + BLOCK - 1 - i, at)
    tl.store(x_ptr + i, tl.load(x_ptr + at * n, mask=i < BLOCK))


def test_loaded_values_are_read_again() -> None:
    """Values are read again if nobody can have written them since."""
    at = torch.arange(16)
    at[9] = 77
    (reason,) = reasons(gather_rows, torch.zeros(64), at, torch.zeros(16), 3, BLOCK=16)
    assert reason == Reason("x_ptr + at * n", None, {"at": 77, "n": 3})
    (reason, *_) = reasons(gather_rows_in_place, torch.zeros(64), at, 3, BLOCK=16)
    assert reason == Reason("x_ptr + at * n", "i < BLOCK", {}), (
        "the lane cannot be known: the indices were reversed in place"
    )


@triton.jit
def reassigned(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    off = i + n
    i = i + 100
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + off, mask=i < 110)))


def test_ambiguous_names_have_no_values() -> None:
    """`i` of the offset is not `i` of the mask: neither is reported."""
    (reason,) = reasons(reassigned, torch.zeros(32), torch.zeros(1), 30, BLOCK=32)
    assert reason is not None
    assert reason.values["off"] == 32
    assert reason.values.get("i") in (None, 102)


@triton.jit
def two_on_a_line(x_ptr, z_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(z_ptr + 2 * i))


def test_two_loads_on_a_line_are_distinguished() -> None:
    x, y = torch.zeros(64), torch.zeros(32)
    assert reasons(two_on_a_line, x[:8], x, y, 9, BLOCK=32) == [
        Reason("x_ptr + i", "i < n", {"i": 8, "n": 9})
    ]
    assert reasons(two_on_a_line, x, x[:8], y, 9, BLOCK=32) == [Reason("z_ptr + 2 * i", None, {"i": 4})]


@triton.jit
def unsigned_places(x_ptr, at_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.load(at_ptr + i)
    least = tl.load(at_ptr + BLOCK + i)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=at > least))


def test_possibly_unsigned_values_are_omitted() -> None:
    """TTIR does not record signedness: values with the bits of a negative number are omitted."""
    at = torch.tensor([200] * 16 + [7] * 16, dtype=torch.uint8)
    assert reasons(unsigned_places, torch.zeros(15), at, torch.zeros(16), BLOCK=16) == [
        Reason("x_ptr + i", "at > least", {"i": 15, "least": 7})
    ]


@triton.jit
def returns_early(x_ptr, y_ptr, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    end = 0
    for k in range(pid):
        end += k
    if pid > 2:
        tl.store(y_ptr + pid, tl.load(x_ptr + end))


def test_branches_and_loop_results_are_recomputed() -> None:
    (reason,) = reasons(returns_early, torch.zeros(5), torch.zeros(9), 5, grid=(9,))
    assert reason is not None
    assert reason.expression == "x_ptr + end"
    assert reason.values in ({"end": 6}, {})


def test_a_missing_source_gives_no_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A finding is reported even if no reason can be given."""
    from triton_loom.witness import expressions

    monkeypatch.setattr(expressions.linecache, "getlines", lambda file: [])
    expressions.text_at.cache_clear()
    try:
        assert reasons(
            read_rows, torch.zeros(4, 100), torch.zeros(4, 128), 128, 100, grid=(4,), BLOCK=128
        ) == [None]
    finally:
        expressions.text_at.cache_clear()


def test_a_missing_ttir_gives_a_reason_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    x, y = torch.zeros(4, 100), torch.zeros(4, 128)
    assert reasons(read_rows, x, y, 128, 100, grid=(4,), BLOCK=128)[0] != Reason(
        "x_ptr + row * stride + cols", "cols < n"
    )
    monkeypatch.setattr(cache.FileCacheManager, "get_file", lambda self, name: None)
    assert reasons(read_rows, x, y, 128, 100, grid=(4,), BLOCK=128) == [
        Reason("x_ptr + row * stride + cols", "cols < n")
    ]


def test_a_long_loop_gives_a_reason_without_values() -> None:
    """The source expressions are reported without values."""
    (reason,) = reasons(read_in_a_loop, torch.zeros(1, 2**19), torch.zeros(1), 1, 2**19 + 1, 2**19, TILE=16)
    assert reason == Reason("x_ptrs", "r[:, None] < rows")
