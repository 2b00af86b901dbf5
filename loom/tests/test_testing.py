"""`triton_loom.testing` as documented, and a document for every public name of Loom."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from processes import run_python
from triton.backends.compiler import GPUTarget
from triton_loom import testing
from triton_loom.testing import assert_caught, launching_nothing, mutant

LOOM = Path(__file__).parents[1]
DOCUMENTS = "\n".join(
    path.read_text() for path in [LOOM / "README.md", *sorted((LOOM / "docs").glob("*.md"))]
)


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def doubles(kernel: Any = double) -> None:
    x = torch.ones(20)
    kernel[(1,)](x, 10, BLOCK=16)
    assert x.tolist() == [2.0] * 10 + [1.0] * 10


def test_mutants_are_caught() -> None:
    assert_caught(doubles, double, ("2 *", "3 *"), ("mask=offs < n)\n", "mask=offs < n + 1)\n"))
    with pytest.raises(AssertionError, match=r"passes with '2 \+ 0 \*' for '2 \*' in double"):
        assert_caught(doubles, double, ("2 *", "2 + 0 *"))
    with pytest.raises(ValueError, match="does not compile with 'two"):
        assert_caught(doubles, double, ("2 *", "two *"))
    with pytest.raises(ValueError, match="'offs < n' is 2 times in double, not once"):
        mutant(double, "offs < n", "offs <= n")
    doubles()  # the kernel itself is unchanged


def test_launching_nothing_compiles_only() -> None:
    x = torch.ones(20)
    with launching_nothing(GPUTarget("cuda", 80, 32)):
        compiled = double[(1,)](x, 10, BLOCK=16)
    assert (x == 1).all()
    assert ".target sm_80" in compiled.asm["ptx"]
    doubles()


@pytest.mark.compat
def test_the_documented_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (LOOM / "docs" / "testing.md").read_text(), re.DOTALL)
    script = tmp_path / "test_example.py"
    script.write_text(code)
    run = run_python(script)
    assert run.returncode == 0, run.stderr


def test_only_the_fixtures_need_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import triton_loom.testing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


PUBLIC = [(package, name) for package in (triton_loom, testing) for name in package.__all__]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_every_public_name_is_documented(package: Any, name: str) -> None:
    """Every name has a docstring, if it can have one, and is mentioned in the README or the documents."""
    value = getattr(package, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", DOCUMENTS), f"no document names {name}"


def test_poisoned_allocations_respect_the_default_device() -> None:
    """PyTorch caches its constructors when a default device is first set, whatever they are then."""
    code = """
import torch
from triton_loom.testing.memory import poisoned_allocations
with poisoned_allocations(), torch.device("meta"):
    print(torch.empty(3).device, torch.empty_strided((3,), (1,)).device)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "meta meta\n"
