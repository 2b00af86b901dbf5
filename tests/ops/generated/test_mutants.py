"""Mistakes in the text of kernels and in how dimensions are merged, each of which a layout shows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
import triton_loom

import weft
from tests.ops.generated.test import LAYOUTS
from weft.lab.calls import assert_same
from weft.ops.generated import kernels, launch
from weft.testing import check

TEXT = [
    ("the first tile alone", "tl.program_id(0).to(tl.int64) * TILE", "tl.program_id(0).to(tl.int64) * 0"),
    ("past the end", "mask = off < count", "mask = off <= count"),
    ("without the last element", "mask = off < count", "mask = off < count - 1"),
    ("up to a multiple of 16", "(count // ALIGN) * ALIGN", "(count // 16) * 16"),
    ("cols up to a multiple of 16", "(cols // ALIGN) * ALIGN", "(cols // 16) * 16"),
    ("rows past the end", "row < rows", "row <= rows"),
    ("columns past the end", "inside = col < cols", "inside = col <= cols"),
    ("the first rows alone", "// tiles).to(tl.int64) * ROWS", "// tiles).to(tl.int64) * 0"),
    ("the first columns alone", "% tiles) * COLS", "% tiles) * 0"),
    ("the rows of one dimension", "row % size1", "row"),
    ("dimensions in the wrong order", "row // size1", "row % size1"),
    ("without the stride of x", "at0 * x_stride0", "at0"),
    ("without the step of y", "* y_step", "* 1"),
    ("the stride of out for y", "at0 * y_stride0", "at0 * out_stride0"),
    ("rounded twice", "tl.cast(v2,", "tl.cast(v2.to(tl.bfloat16),"),
]
HOST = [
    ("merged across a gap", "a == b * each.size", "a == b * each.size or True"),
    ("broadcast dimensions move", "0 if size == 1 else s", "s"),
    (
        "dimensions aligned on the left",
        "(0,) * (len(shape) - len(layout.shape)) + tuple(own)",
        "tuple(own) + (0,) * (len(shape) - len(layout.shape))",
    ),
    ("always dense", '"1" if last.strides[i] == 1 else "any"', '"1"'),
    ("never along rows", "any(d.strides[i] for d in outer)", "False"),
]
HOST_FUNCTIONS = (
    launch.merged,
    launch._strides_in,
    launch._bound,
    launch._bound_rows,
    launch._merged_step,
    launch._outer_arguments,
    launch._fills_copies,
    launch._bound_for,
)
ROWS_TEXT = [
    ("the first rows alone", "tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0).to(tl.int64) * 0"),
    ("rows past the end", "row < rows", "row <= rows"),
    ("elements past the end", "inside = col < cols", "inside = col <= cols"),
    ("cols up to a multiple of 16", "(cols // ALIGN) * ALIGN", "(cols // 16) * 16"),
    ("zero outside of a row for a maximum", "float('-inf')", "0.0"),
    ("what is outside of a row in a sum", "tl.where(inside, ", "tl.where(col >= 0, "),
    ("a NaN is the maximum", " & (x_value == x_value)", ""),
    ("without the carry of a scan", " + carry", " + 0 * carry"),
    ("a carry of the last element alone", "+= tl.sum(", "= tl.sum("),
    ("a maximum of the last tile alone", "tl.maximum(acc", "tl.maximum(0.0 * acc"),
    ("tiles from the start for a scan from the end", "tile = tiles - 1 - tile", "tile = tile"),
    ("the first tile alone", "range(0, tiles)", "range(0, 1)"),
    ("the first channel alone", "in0 = rest", "in0 = rest * 0"),
    ("elements of the next channel", "(sub < inner1)", "(sub <= inner1)"),
    ("without the stride of x", "at0 * x_stride0", "at0"),
    ("rounded twice", "tl.cast(v", "tl.cast(0.5 * v"),
]
ROWS_HOST = [
    ("dimensions of a row that are not one in memory", "outer != stride * size", "False"),
    ("half of the programs", "(-(-rows // height) * tiles", "(-(-rows // (2 * height)) * tiles"),
    ("a promise of strides that does not hold", "align_of(cols, *dense,", "align_of(cols,"),
    (
        "sizes of the outer dimensions swapped",
        "outer[i].size for i in range(1",
        "outer[i - 1].size for i in range(1",
    ),
    ("sizes of a row's dimensions swapped", "inner[i] for i", "inner[i - 1] for i"),
]
CODES_TEXT = [
    ("all blocks of rows in the first", "out, tl.program_id(0) // tiles", "out, 0 * tl.program_id(0)"),
    ("all tiles in the first", "tl.program_id(0) % tiles, tiles", "0, tiles"),
    ("elements that do not exist", ", mask, out,", ", mask | True, out,"),
    ("half of the result", "store_quantized(v", "store_quantized(0.5 * v"),
    ("the first tile of a row alone", "tl.program_id(0), tile, tiles", "tl.program_id(0), 0, tiles"),
]
CODES_HOST = [
    ("rows in the order of memory", "in_order=to is not None", "in_order=False"),
    ("half of the tiles", "-(-cols // width)", "-(-cols // (2 * width))"),
    ("columns of a function of rows", "columnwise or format.square", "False"),
]


TABLE_TEXT = [
    ("steps before the first", "(step_value >= 0) & ", ""),
    ("steps after the last", " & (step_value < table_size0)", ""),
    ("one step too many", "< table_size0", "<= table_size0"),
    ("columns after the last", " & (1 < table_size1)", ""),
    ("the first row alone", "step_value * tl.cast(table_stride0", "0 * tl.cast(table_stride0"),
    ("the first column alone", "1 * tl.cast(table_stride1", "0 * tl.cast(table_stride1"),
    ("strides swapped", "tl.cast(table_stride0,", "tl.cast(table_stride1,"),
    ("zero outside of the table", "other=float('nan')", "other=0.0"),
    ("32-bit steps", "step_value = tl.load(step_ptr)", "step_value = tl.load(step_ptr).to(tl.int32)"),
    ("steps counted from 1", "step_value = tl.load(step_ptr)", "step_value = tl.load(step_ptr) - 1"),
    ("a gradient without its table", "dout_value * v5", "dout_value"),
    ("a gradient with what is outside of a row", "tl.where(inside, v10, 0.0)", "tl.where(inside, v10, 1.0)"),
]
TABLE_HOST = [
    ("strides of 1", "stride) for i, stride in", "1) for i, stride in"),
    ("sizes of 1", "size) for i, size in", "1) for i, size in"),
]


def assert_tables_right() -> None:
    """Compare steps of a table with PyTorch, under the sanitizer, by an op that nothing is cached for."""
    op = weft.pointwise(lambda x, gate, table, step: x + table[step, 1] * gate)
    x, memory = torch.randn(6, 33), torch.randn(40, 3)
    for table in (
        memory[:20],
        memory[:20].t().contiguous().t(),
        memory[::2],
        memory[:20, :1],
        memory[:20, ::2],
    ):
        for step in (0, 7, len(table) - 1, -1, len(table), 2**32 + 3):
            gate = torch.randn(6, 1, requires_grad=True)
            with triton_loom.sanitize():
                y = op(x, gate, table, torch.tensor(step))
                (dgate,) = torch.autograd.grad(y, gate, torch.ones_like(y))
            inside = 0 <= step < len(table) and table.shape[1] > 1
            a = table[step, 1] if inside else torch.tensor(math.nan)
            torch.testing.assert_close(y.detach(), x + a * gate.detach(), equal_nan=True)
            torch.testing.assert_close(dgate, (33 * a).expand(6, 1), equal_nan=True)


def test_tables_are_right_without_a_mistake() -> None:
    assert_tables_right()


def assert_right() -> None:
    """Compare all layouts with PyTorch, under the sanitizer, by an op that nothing is cached for."""
    op = weft.pointwise(lambda x, y: x - y)
    for x, y in [
        *LAYOUTS.values(),
        (torch.randn(3000), torch.randn(3000)),
        (torch.randn(70, 3000), torch.randn(3000)),
    ]:
        with triton_loom.sanitize():
            got = op(x, y)
        assert torch.equal(got, x - y)


def test_nothing_is_wrong_without_a_mistake() -> None:
    assert_right()


def assert_rows_right() -> None:
    """Compare functions of rows with PyTorch, under the sanitizer, by ops that nothing is cached for."""
    softmax = weft.rowwise(
        lambda x, y: (tl.exp(x - tl.max(x)) / tl.sum(tl.exp(x - tl.max(x))), tl.sum(x * y))
    )
    sums = weft.rowwise(lambda x, y: (tl.cumsum(x) - y, tl.max(x)))
    backward = weft.rowwise(lambda x: tl.cumsum(x, reverse=True))
    channels = weft.rowwise(dims=2)(lambda x, y: tl.cumsum(x) * y)
    x = torch.randint(-4, 5, (6, 5, 70)).float()
    long = torch.randint(-4, 5, (5, 8200)).float()
    holes = torch.where(x == 4, math.nan, x)
    with triton_loom.sanitize():
        for a, b in (
            (x, x[0]),
            (x - 50, x[:, :1]),
            (x[..., :64], x[0, :, 3:67]),
            (x.transpose(0, 1), x[:, 0]),
            (long, long[0]),
            (long[0], long[1]),
        ):
            y, total = softmax(a, b)
            torch.testing.assert_close(y, a.softmax(-1))
            assert torch.equal(total, (a * b).sum(-1))
            scanned, largest = sums(a, b)
            assert torch.equal(scanned, a.cumsum(-1) - b)
            assert torch.equal(largest, a.amax(-1))
            assert torch.equal(backward(a), a.flip(-1).cumsum(-1).flip(-1))
        assert torch.equal(sums(holes, x)[1], holes.nan_to_num(-math.inf).amax(-1))
        assert torch.equal(sums(torch.full((2, 64), math.nan), x[0, 0, :64])[1], torch.full((2,), -math.inf))
        assert torch.equal(channels(x, x[0, :, :1]), x.flatten(1).cumsum(-1).view(x.shape) * x[0, :, :1])


def assert_codes_right() -> None:
    """Compare quantized results with quantized fp32 results, by ops that nothing is cached for."""
    away = weft.pointwise(lambda x, y: x - y + 3.0)  # not zero where no element is
    largest = weft.rowwise(lambda x, y: tl.max(x) * y + 3.0)
    x = torch.randn(131, 2, 1300)
    for op, a, spec, columnwise in (
        (away, x, "1x128", False),
        (away, x[:, 0].t(), "1x128", True),
        (away, torch.randn(2, 9000), "row", False),
        (largest, x[:9, 0, :300], "1x128", True),
        (largest, torch.randn(2, 9000), "1x128", False),
    ):
        b = a.flip(0).contiguous()
        for first, second in ((a, b), (b.transpose(0, 1), a.transpose(0, 1))):
            with triton_loom.sanitize():
                got = op(first, second, quantize=spec, columnwise=columnwise)
            wide = op(first, second, out_dtype=torch.float32).contiguous()
            assert_same({"y": got}, {"y": weft.quantize(wide, spec, columnwise=columnwise)}, spec)


def test_codes_are_right_without_a_mistake() -> None:
    assert_codes_right()


def cases(elements: list[Any], rows: list[Any], codes: list[Any]) -> tuple[list[Any], list[str]]:
    """Return the parameters of a test and their names."""
    of_all = [(assert_right, "elements", *each) for each in elements]
    of_all += [(assert_rows_right, "rows", *each) for each in rows]
    of_all += [(assert_codes_right, "codes", *each) for each in codes]
    return [(of, old, new) for of, _, _, old, new in of_all], [
        f"{kind}: {what}" for _, kind, what, *_ in of_all
    ]


def with_tables(found: tuple[list[Any], list[str]], mistakes: list[Any]) -> tuple[list[Any], list[str]]:
    of_tables = [(assert_tables_right, old, new) for _, old, new in mistakes]
    return found[0] + of_tables, found[1] + [f"tables: {what}" for what, *_ in mistakes]


WITH_TEXT = with_tables(cases(TEXT, ROWS_TEXT, CODES_TEXT), TABLE_TEXT)
WITH_HOST = with_tables(cases(HOST, ROWS_HOST, CODES_HOST), TABLE_HOST)


def test_rows_are_right_without_a_mistake() -> None:
    assert_rows_right()


@pytest.mark.mutation
@pytest.mark.parametrize(("of", "old", "new"), WITH_TEXT[0], ids=WITH_TEXT[1])
def test_a_mistake_in_a_kernel_is_noticed(
    of: Callable[[], None], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = 0

    def mutated(*args: Any) -> str:
        nonlocal changed
        text = kernel_text(*args)
        changed += old in text
        return text.replace(old, new)

    kernel_text = kernels.kernel_text
    monkeypatch.setattr(kernels, "kernel_text", mutated)
    with pytest.raises((AssertionError, triton_loom.SanitizerError)):
        of()
    assert changed


@pytest.mark.mutation
def test_a_mistake_in_codes_fails_the_check_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_text = kernels.kernel_text
    monkeypatch.setattr(
        kernels,
        "kernel_text",
        lambda *args: kernel_text(*args).replace("store_quantized(", "store_quantized(0.5 * "),
    )
    with pytest.raises(AssertionError, match="quantized_bytes in 1x128"):
        check(weft.pointwise(lambda x, y: x - y))


@pytest.mark.mutation
@pytest.mark.parametrize(("of", "old", "new"), WITH_HOST[0], ids=WITH_HOST[1])
def test_a_mistake_on_the_host_is_noticed(
    of: Callable[[], None], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = next(f for f in HOST_FUNCTIONS if old in inspect.getsource(inspect.unwrap(f)))
    names = vars(launch) | {"remembered": lambda function: function}
    exec(inspect.getsource(inspect.unwrap(function)).replace(old, new), names)
    monkeypatch.setattr(launch, inspect.unwrap(function).__name__, names[inspect.unwrap(function).__name__])
    with pytest.raises((AssertionError, triton_loom.SanitizerError)):
        of()
