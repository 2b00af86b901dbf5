"""`python -m triton_loom report` on unmodified scripts, including those that fail or need a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from processes import run_python
from triton_loom import report
from triton_loom.tables import in_units, table

KERNEL = """
import sys
import torch, triton, triton.language as tl


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


"""


def reported(tmp_path: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(KERNEL + body)
    return run_python("-m", "triton_loom", "report", *options, script, "word", "--flag")


@pytest.mark.compat
def test_the_report_has_a_row_for_each_kernel(tmp_path: Path) -> None:
    """The row has launches, bytes and verdict; the script keeps its own output, arguments and exit code."""
    body = """
for _ in range(3):
    double[(4,)](torch.ones(1000), 1000, BLOCK=256)
print(sys.argv[1:], __name__)
sys.exit(5)
"""
    run = reported(tmp_path, body)
    assert run.returncode == 5, run.stderr
    assert run.stdout.startswith("['word', '--flag'] __main__\n")
    assert re.search(r"double +3 +12 kB +12 kB +([\d.]+ s|cached) +[\d.]+ ms +clean\n", run.stdout)
    assert "3 launches, 12 programs, 0 flops in dots, 0 findings" in run.stdout


def test_a_failing_script_is_reported_up_to_its_failure(tmp_path: Path) -> None:
    body = """
double[(4,)](torch.ones(1000), 1001, BLOCK=256)
raise KeyError("on its own")
"""
    run = reported(tmp_path, body)
    assert run.returncode == 1
    assert re.search(r"double +1 .* 2 findings\n", run.stdout)
    assert (
        f"script.py:{KERNEL[: KERNEL.index('tl.store')].count(chr(10)) + 1}: out-of-bounds load" in run.stdout
    )
    assert "KeyError: 'on its own'" in run.stderr
    assert "runpy" not in run.stderr


GPU = """
x = torch.ones(1000, device="cuda")
y = torch.ones(1000).cuda().to(torch.device("cuda:0"))
for tensor in (x, y):
    double[(4,)](tensor, 1000, BLOCK=256)
torch.cuda.synchronize()
print(x.sum().item(), y.sum().item(), x.device)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_that_needs_a_gpu_can_be_redirected(tmp_path: Path) -> None:
    run = reported(tmp_path, GPU)
    assert run.returncode == 1
    assert "python -m triton_loom report --device cpu " in run.stderr
    assert "no Triton kernel was launched" in run.stdout
    run = reported(tmp_path, GPU, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2000.0 2000.0 cpu\n")
    assert re.search(r"double +2 .* clean", run.stdout)


def test_redirection_ends_with_its_scope() -> None:
    original = torch.cuda.synchronize
    with report.redirected():
        assert torch.zeros(2, device="cuda:1").device.type == "cpu"
        torch.cuda.synchronize()
    assert torch.cuda.synchronize is original


def test_a_missing_script_is_an_error(tmp_path: Path) -> None:
    run = run_python("-m", "triton_loom", "report", tmp_path / "none.py")
    assert run.returncode == 2
    assert f"there is no file {tmp_path / 'none.py'}" in run.stderr


def test_tables_align_their_columns() -> None:
    assert table([("a", "1"), ("bcd", "234")], "<>") == ["  a      1", "  bcd  234"]
    assert table([], "<>") == []
    assert [in_units(n) for n in (0, 9_999, 10_000, 12_345_678, 10**12)] == [
        "0 B",
        "9,999 B",
        "10 kB",
        "12.35 MB",
        "1,000 GB",
    ]
