"""`explain()` and TRITON_LOOM_EXPLAIN: nests at their lines, ticks where the work is, scratch tiles; free when off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from processes import run_python
from triton_loom.explained import ExplainedKernel
from triton_loom.testing import assert_same

DOCUMENT = Path(__file__).parents[1] / "docs" / "explain.md"


@triton.jit
def uneven(x_ptr, y_ptr, z_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n, 0)
    tl.store(y_ptr + offs, x, offs < n)  # cheap
    for _ in tl.static_range(ROUNDS):
        x = tl.sin(x)
    tl.store(z_ptr + offs, x, offs < n)  # dear


@triton.jit
def products(a_ptr, b_ptr, c_ptr, steps, B: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for k in range(steps):
        total += tl.dot(tl.load(a_ptr + k * B * B + i * B + j), tl.load(b_ptr + k * B * B + i * B + j))
    if steps > 2:
        total = total * 2
    tl.store(c_ptr + i * B + j, total)


def launched(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> tuple[ExplainedKernel, str]:
    """Launch a kernel; return its explanation and its C++."""
    with triton_loom.explain() as explained:
        compiled = kernel[grid](*args, **constants)
    (explanation,) = explained.kernels
    return explanation, compiled.asm["c"]


def line_of(text: str) -> int:
    return 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if text in line)


@pytest.mark.compat
def test_time_goes_where_the_work_is() -> None:
    x, y, z = torch.rand(3, 5000)
    explanation, _ = launched(uneven, (5,), x, y, z, 5000, ROUNDS=40, BLOCK=1024)
    assert (explanation.name, explanation.launches, explanation.programs) == ("uneven", 1, 5)
    nests = {nest.line: nest for nest in explanation.nests}
    cheap, dear = nests[line_of("# cheap")], nests[line_of("# dear")]
    assert {cheap.file, dear.file, explanation.file} == {__file__}
    assert (cheap.does, dear.does, cheap.times, dear.times) == ("store", "store", 5, 5)
    assert dear.ticks > 3 * cheap.ticks > 0  # forty sines against a load and a store
    assert explanation.ticks == sum(nest.ticks for nest in explanation.nests)
    table = str(explanation).splitlines()
    assert "tl.store(z_ptr + offs, x, offs < n) # dear" in table[2]
    assert explanation.kept == [] or explanation.scratch_bytes


def test_nests_in_loops_and_branches_are_entered_as_often_as_they_run() -> None:
    a, b = torch.randn(2, 5, 32, 32)
    c = torch.empty(32, 32)
    explanation, _ = launched(products, (1,), a, b, c, 5, B=32)
    torch.testing.assert_close(c, 2 * (a @ b).sum(0))
    dot = [nest for nest in explanation.nests if nest.does == "product of tiles"]
    assert [(nest.line, nest.times >= 5) for nest in dot] == [(line_of("total += tl.dot"), True)]
    carried = [tile for tile in explanation.kept if tile.why == "carried by a loop or out of a branch"]
    assert [(tile.name, tile.tile, tile.bytes) for tile in carried[:1]] == [("total", "32x32 f32", 4096)]
    # one after another in scratch memory, or in place of each other
    assert 4096 <= explanation.scratch_bytes <= sum(tile.bytes for tile in explanation.kept)


def test_launches_add_up_and_scopes_nest() -> None:
    x, y, z = torch.rand(3, 100)
    with triton_loom.explain() as outer:
        uneven[(1,)](x, y, z, 100, ROUNDS=1, BLOCK=128)
        with triton_loom.explain() as inner:
            for _ in range(3):
                uneven[(2,)](x, y, z, 100, ROUNDS=1, BLOCK=128)
    assert [(k.launches, k.programs) for k in outer.kernels] == [(4, 7)]
    assert [(k.launches, k.programs) for k in inner.kernels] == [(3, 6)]
    assert outer.kernels[0].ticks > inner.kernels[0].ticks > 0
    assert str(triton_loom.explained.Explained()) == "no kernel was launched"


@pytest.mark.parametrize("kernel", ["uneven", "products"])
def test_explaining_costs_nothing_when_off(kernel: str) -> None:
    """The C++ is identical except for the timing calls, and so are the results."""
    if kernel == "uneven":
        x, y, z, plain_y, plain_z = torch.rand(5, 300)
        _, explained = launched(uneven, (3,), x, y, z, 300, ROUNDS=2, BLOCK=128)
        plain = uneven[(3,)](x, plain_y, plain_z, 300, ROUNDS=2, BLOCK=128).asm["c"]
        results = [(y, plain_y), (z, plain_z)]
    else:
        a, b = torch.randn(2, 3, 32, 32)
        c, plain_c = torch.empty(2, 32, 32)
        _, explained = launched(products, (1,), a, b, c, 3, B=32)
        plain = products[(1,)](a, b, plain_c, 3, B=32).asm["c"]
        results = [(c, plain_c)]
    for got, want in results:
        assert_same(got, want)
    assert "loom::lap(" in explained
    added = r"( *loom::lap\(\d+\);| *const loom::Explained explained;|#define LOOM_EXPLAIN \d+|#include .explain.h.)\n"
    assert re.sub(added, "", explained) == plain
    assert not re.search("loom::|LOOM_EXPLAIN|explain.h", plain)


def test_instrumented_kernels_are_not_explained() -> None:
    x, y, z = torch.rand(3, 100)
    with triton_loom.explain() as explained, triton_loom.count() as counted:
        uneven[(1,)](x, y, z, 100, ROUNDS=1, BLOCK=128)
    assert len(counted.launches) == 1
    assert explained.kernels == []


def without_numbers(table: str) -> list[str]:
    """Return the sorted lines without ticks and shares, which also determine their order."""
    lines = [
        re.sub(r"[\d.,]+ (%|ms)|\(.*?:\d+\)|^ +[\d.,]+ +%? *[\d,]+", "", line) for line in table.splitlines()
    ]
    return sorted(" ".join(line.split()) for line in lines)


@pytest.mark.compat
def test_the_documented_example_prints_its_table(tmp_path: Path) -> None:
    """The example prints the documented table; the environment variable prints it at the end of the process."""
    code, table = re.findall(r"```(?:python)?\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script = tmp_path / "softmax.py"
    script.write_text(code)
    run = run_python(script)
    assert not run.returncode, run.stderr
    assert without_numbers(run.stdout) == without_numbers(table)
    script.write_text(
        code.replace("print(explained)", "").replace("with triton_loom.explain() as explained:", "if True:")
    )
    run = run_python(script, TRITON_LOOM_EXPLAIN="1")
    assert run.stdout == ""
    assert without_numbers(run.stderr) == without_numbers(table)
    run = run_python(script, TRITON_LOOM_EXPLAIN="yes")
    assert "TRITON_LOOM_EXPLAIN must be 0 or 1; got 'yes'" in run.stderr
