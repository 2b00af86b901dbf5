"""`emulate()` from end to end: stock Triton, its launcher, and the machine."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton_loom.ptx import text

pytestmark = pytest.mark.compat


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr + at, x + tl.load(y_ptr + at, mask=mask), mask=mask)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_a_kernel_on_every_target(target: str) -> None:
    x, y = torch.randn(2, 1000)
    out = torch.full((1003,), torch.nan)
    with triton_loom.emulate(target) as gpu:
        add[(8,)](x, y, out, 1000, BLOCK=128)
    assert torch.equal(out[:1000], x + y)
    assert out[1000:].isnan().all()
    assert not gpu.findings
    (launch,) = gpu.launches
    assert sum(launch.outcome.executed) > 8 * 4 * 5
    assert f"{sum(launch.outcome.executed):,}" in gpu.report()


def test_a_mask_that_lets_too_much_through() -> None:
    memory = torch.full((1100,), torch.nan)
    x, y, out = torch.randn(1000), torch.randn(1000), memory[:1000]
    with pytest.raises(triton_loom.HazardError) as error, triton_loom.emulate("sm_80"):
        add[(8,)](x, y, out, 1001, BLOCK=128)
    assert {finding.kind for finding in error.value.findings} == {"global memory out of bounds"}
    assert all(finding.by.block == (7, 0, 0) for finding in error.value.findings)
    assert Path(__file__).name in str(error.value)
    assert torch.equal(out, x + y)  # the others are right,
    assert memory[1000:].isnan().all()  # and what is not the kernel's was left alone


def test_a_launch_inside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook launches a kernel of its own, on other memory: each launch may only touch its own memory."""
    x, y, inner = torch.randn(3, 1000)
    out, sums = torch.empty(1000), torch.empty(1000)

    def hook(metadata: object) -> None:
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
        add[(8,)](inner, inner, sums, 1000, BLOCK=128)

    with triton_loom.emulate("sm_90") as gpu:
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        add[(8,)](x, y, out, 1000, BLOCK=128)
    assert len(gpu.launches) == 2
    assert torch.equal(out, x + y)
    assert torch.equal(sums, 2 * inner)


@triton.jit
def doubled(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def counted(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def moved(x_ptr, y_ptr, N: tl.constexpr):
    """Reverse x in place: threads with copies load what others store, but the storing thread loaded its own copy."""
    at = tl.arange(0, N)
    tl.store(x_ptr + N - 1 - at, tl.load(x_ptr + at))


@triton.jit
def scaled_and_counted(x_ptr, y_ptr, N: tl.constexpr):
    """Use each thread's copy of the scale."""
    at = tl.arange(0, N)
    scale = tl.load(x_ptr)
    tl.store(y_ptr + at, scale * tl.load(y_ptr + at))
    tl.store(x_ptr, scale + 1)


@triton.jit
def counted_unless_zero(x_ptr, y_ptr, N: tl.constexpr):
    """Branch in all threads of the block on a value that one of them stores."""
    if tl.load(x_ptr) != 0:
        tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def running_sums(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0))


@pytest.mark.parametrize(
    ("kernel", "races"),
    [(doubled, 0), (counted, 0), (moved, 1), (scaled_and_counted, 1), (counted_unless_zero, 1), (running_sums, 0)],
    ids=lambda value: value.__name__ if not isinstance(value, int) else "",
)  # fmt: skip
def test_copies_of_an_element_that_nobody_uses(kernel: Any, races: int) -> None:
    """A tile of 32 elements has four copies in a block of 128 threads, and a scalar has 128."""
    x, y = torch.rand(32) + 1, torch.rand(32)
    with triton_loom.emulate("sm_90", raises=False) as gpu:
        kernel[(1,)](x, y, N=32)
    assert {finding.kind for finding in gpu.findings} == {"global memory race"} if races else not gpu.findings


@triton.jit
def added(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(y_ptr + at, tl.load(x_ptr + tl.program_id(0) * N + at))


def test_an_atomic_addition_that_the_target_lacks() -> None:
    """An atomic bf16 addition before sm_90 loads, adds and compares until nobody else was faster."""
    x, y = torch.randint(-8, 8, (4, 64)).bfloat16(), torch.zeros(64).bfloat16()
    with triton_loom.emulate("sm_80") as gpu:
        added[(4,)](x, y, N=64)
    assert ".cas." in gpu.launches[0].ptx
    assert torch.equal(y, x.sum(0))


@triton.jit
def sines(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.sin(tl.load(x_ptr + tl.arange(0, N))))


def test_a_sine_takes_memory_of_each_thread() -> None:
    """A sine needs digits of pi if its argument is large, in some lanes of a warp and not in others."""
    x = torch.randn(256) * torch.logspace(0, 12, 256)
    y = torch.empty_like(x)
    with triton_loom.emulate("sm_90") as gpu:
        sines[(1,)](x, y, N=256)
    assert ".local" in gpu.launches[0].ptx
    assert (y.double() - x.double().sin()).abs().max() < 2e-7


@triton.jit
def meet(count_ptr, x_ptr, y_ptr, N: tl.constexpr):
    """Wait for all other programs before reading the neighbor's value."""
    me = tl.program_id(0)
    tl.store(x_ptr + me, me)
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1)
    while tl.atomic_add(count_ptr, 0) < N:
        pass
    tl.debug_barrier()
    tl.store(y_ptr + me, tl.load(x_ptr + (me + 1) % N))


def test_blocks_of_a_cooperative_launch_run_at_once() -> None:
    count, (x, y) = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 6, dtype=torch.int32)
    with triton_loom.emulate("sm_80") as gpu:
        meet[(6,)](count, x, y, N=6, launch_cooperative_grid=True)
    assert y.tolist() == [1, 2, 3, 4, 5, 0]
    assert gpu.launches[0].cooperative


def test_the_line_of_inline_assembly() -> None:
    """All of the assembly is attributed to one line of Python, although Triton 3.8 and 3.9 count lines on."""
    kernel = text.read("""
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.reqntid 32
{
	.loc	1 7 31                          // script.py:7:31
	// begin inline asm
	.loc	1 7 31                          // script.py:7:31
	mov.u32 %r1, 0x0;
	.loc	1 8 31                          // script.py:8:31
	mov.u32 %r2, 0x0;
	// end inline asm
	mov.u32 %r3, 0x0;
	.loc	1 9 31                          // script.py:9:31
	ret;
}
	.file	1 "script.py"
""")
    assert [statement.place.line for statement in kernel.statements] == [7, 7, 7, 9]
    assert [statement.line for statement in kernel.statements] == [10, 12, 14, 16]


def test_the_script_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = Path(__file__).parents[2] / "docs" / "emulate.md"
    for name in (
        "script.py",
        "copy.py",
    ):  # the copy's kernel is in Triton's cache, as it was in the first file
        script = tmp_path / name
        script.write_text(re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.M | re.S)[0])
        runpy.run_path(str(script))
        printed = capsys.readouterr().out
        assert printed.startswith("sm_90, emulated:\n")
        assert "global memory race in mirrored, 128 times" in printed
        assert f"({script}:9," in printed


def test_kinds_of_findings_are_ignored_by_name() -> None:
    refused = pytest.raises(ValueError, match=r"unknown kinds of findings \['races'\]; choose from")
    with refused, triton_loom.emulate("sm_80", ignore=["races"]):
        pass
