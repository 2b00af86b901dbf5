"""Follow "Writing an op" literally in a copy of the checkout; all checks must pass at the end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_loom.testing import Forks

from tests.support import IMPORTED

from .pages import ROOT, WARNINGS, WRITING, Block, blocks, guide, program_of, run, run_text


def files() -> dict[str, str]:
    """Return the files that the guide writes, by path: the first line of a block names its file."""
    result: dict[str, str] = {}
    for block in blocks(WRITING, "python"):
        first, _, text = block.text.partition("\n")
        path, _, continued = first.removeprefix("# ").partition(", ")
        assert path.endswith(".py"), f"{block}: the first line names the file"
        assert (path in result) == (continued == "continued"), f"{block}: {first}"
        result[path] = result[path] + "\n\n" + text if continued else text
    return result


READ = {path: text for path, text in files().items() if "softplus_gate" not in path}
WRITTEN = {path: text for path, text in files().items() if path not in READ}


def write(texts: dict[str, str], root: Path) -> None:
    for path, text in texts.items():
        assert not (root / path).exists()
        (root / path).write_text(text)


def apply_diff(block: Block, root: Path) -> None:
    """Apply a diff: + lines replace the - lines before them, or follow the line before them."""
    first, *rest = block.text.splitlines()
    path = root / first.removeprefix(" # ")
    text = path.read_text().splitlines()
    position = 0
    for line in rest:
        sign, content = line[0], line[1:]
        if sign == "+":
            text.insert(position, content)
            position += 1
            continue
        assert content in text, f"{block}: {path.name} has no line {content!r} any more"
        position = text.index(content)
        if sign == "-":
            del text[position]
        else:
            position += 1
    path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout with the op that the guide adds, unless the checkout has it already."""
    root = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(
        ROOT, root, ignore=shutil.ignore_patterns("__pycache__", ".git", ".*cache", ".venv*", "site")
    )
    assert (len(READ), len(WRITTEN)) == (1, 4)
    if not (root / next(iter(WRITTEN))).exists():
        write(WRITTEN, root)
        for block in blocks(WRITING, "diff"):
            apply_diff(block, root)
    return root


@pytest.fixture(scope="module")
def extended_forks(extended: Path) -> Iterator[Forks]:
    """Yield forks of a Python that has imported the copy."""
    with Forks(*IMPORTED, flags=WARNINGS, PYTHONPATH=path_of(extended)) as forks:
        yield forks


def path_of(root: Path) -> str:
    return os.pathsep.join(str(root / path) for path in ("src", "loom/src", ".", "loom/tests"))


def test_added_op_is_in_style(extended: Path, tmp_path: Path) -> None:
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    (tmp_path / "src/weft/ops").mkdir(parents=True)
    write(READ, tmp_path)
    for file in (
        *(extended / path for path in (*WRITTEN, "src/weft/__init__.py")),
        *(tmp_path / path for path in READ),
    ):
        run(sys.executable, "-m", "ruff", "check", *settings, str(file))
        run(sys.executable, "-m", "ruff", "format", "--check", *settings, str(file))


# Checks for any op with a reference, which judges it in float64, differentiated by autograd.
ADDED = """
import torch
from triton_loom.testing import EPS32, assert_rounded_once
from torch.library import opcheck

import weft
from weft.lab.families import for_op

assert "checkout" in weft.__file__, weft.__file__
op = weft.catalogue["softplus_gate"]
assert weft.catalogue["softplus_gate_backward"] and op.differentiable
for workload in for_op("softplus_gate"):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = workload.make(rows=3, dtype=dtype).requiring_grad()
        y = call()
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        gradients = torch.autograd.grad(y, list(call.tensors().values()), dy)
        exact = [t.detach().double().requires_grad_() for t in call.tensors().values()]
        truth = op.reference(op.arguments.build(*exact)).y
        wanted = [truth, *torch.autograd.grad(truth, exact, dy.double())]
        for got, right in zip([y, *gradients], wanted, strict=True):
            # exp, log, a quotient and three products.
            assert_rounded_once(got, right, 8 * EPS32 * right.detach().abs())

gate, x = (torch.randn(3, 40, dtype=torch.float64, requires_grad=True) for _ in range(2))
torch.autograd.gradcheck(weft.ops.softplus_gate, (gate, x))
gate, x = (torch.randn(5, 40, requires_grad=True) for _ in range(2))
opcheck(op.overload, (gate, x))
compiled = torch.compile(weft.ops.softplus_gate, fullgraph=True, backend="aot_eager")
for function in (weft.ops.softplus_gate, compiled):
    grads = torch.autograd.grad(function(gate, x).square().sum(), (gate, x))
    if function is compiled:
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    before = grads
assert torch.equal(compiled(gate, x), weft.ops.softplus_gate(gate, x))
special = torch.tensor([float("inf"), -float("inf"), float("nan"), -90.0, 90.0])
ones = torch.ones(5)
got, right = weft.ops.softplus_gate(special, ones), op.reference(op.arguments.build(special, ones)).y
torch.testing.assert_close(got, right, rtol=1e-6, atol=0, equal_nan=True)
assert weft.ops.softplus_gate(gate[:0], x[:0]).shape == (0, 40)
assert torch.equal(weft.ops.softplus_gate(gate.t(), x.t()), weft.ops.softplus_gate(gate, x).t())
print("proven")
"""


def test_added_op_is_right(extended_forks: Forks, tmp_path: Path) -> None:
    assert run_text(ADDED, tmp_path, extended_forks).endswith("proven\n")


QUANTIZED = """
import warnings

import torch

import weft
from triton_loom.testing import EPS32, assert_rounded_once, words
from weft.ops.scale_rows import scale_rows

generator = torch.Generator().manual_seed(2)
for shape in ((5, 7, 200), (3, 256), (33, 1), (0, 64)):
    x = torch.randn(shape, generator=generator).bfloat16()
    factor = torch.randn(shape[:-1], generator=generator)
    factor.view(-1)[:1] = float("inf")
    assert torch.equal(scale_rows(x, factor), (x.float() * factor[..., None]).bfloat16())
    # By registers and by way of fp32; the formats of either kind differ in `quantize` alone.
    for format in ("1x128", "mx", "row", "tensor", "128x128", "nvfp4") if x.dim() == 3 else ("1x128", "tensor"):
        for columnwise in (False, True) if format != "row" else (False,):
            q = scale_rows(x, factor, quantize=format, columnwise=columnwise)
            wanted = weft.quantize(x.float() * factor[..., None], format, columnwise=columnwise)
            for copy, right in ((q.rowwise, wanted.rowwise), (q.columnwise, wanted.columnwise)):
                for got, part in zip((copy or ())[:3], (right or ())[:3], strict=True):
                    assert got is part is None or torch.equal(words(got), words(part)), format
warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, when it traces a torch.autograd.Function
x, factor = torch.randn(6, 96, requires_grad=True), torch.randn(6, requires_grad=True)
for function in (scale_rows, torch.compile(scale_rows, fullgraph=True, backend="aot_eager")):
    for format in (None, "1x128"):
        y = function(x, factor, quantize=format)
        y = y if format is None else y.dequantize()
        dx, dfactor = torch.autograd.grad(y.sum(), (x, factor))
        assert torch.equal(dx, factor[:, None].expand(6, 96))
        total = x.double().sum(1)
        assert_rounded_once(dfactor, total, 96 * EPS32 * x.double().abs().sum(1))
print("proven")
"""


@pytest.mark.slow
def test_quantizing_op_of_the_guide_is_right(extended: Path, tmp_path: Path) -> None:
    """The guide's second op gets a copy of its own: it repeats the steps of the first."""
    copy = tmp_path / "checkout"
    shutil.copytree(extended, copy)
    write(READ, copy)
    with Forks(*IMPORTED, flags=WARNINGS, PYTHONPATH=path_of(copy)) as forks:
        assert run_text(QUANTIZED, tmp_path, forks).endswith("proven\n")


BINARIES = """
import torch

import weft
from weft.lab.compiled.offline import Binary, compile_all
from weft.runtime import recording
from weft.lab.families import for_op


def main():
    jobs = []
    for target in ("sm_90", "gfx942"):
        with recording(target) as variants:
            for op in ("softplus_gate", "softplus_gate_backward"):
                for_op(op)[0].make("meta")()
        jobs += [(variant, target) for variant in variants]
    assert len(jobs) == 4
    for binary in compile_all(jobs):
        assert isinstance(binary, Binary), binary
        assert set(binary.loads) == set(binary.stores) == {128}, binary
        assert binary.spill_bytes == 0 and not binary.uses_fp64, binary
    print("compiled")


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_added_op_compiles_for_gpus(extended_forks: Forks, tmp_path: Path) -> None:
    assert run_text(BINARIES, tmp_path, extended_forks).endswith("compiled\n")


def pytest_in(root: Path, *arguments: str) -> str:
    """Run tests in a copy of the checkout, all of which must pass, and return pytest's output."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return run(sys.executable, "-m", "pytest", *arguments, *options, cwd=root, PYTHONPATH=path_of(root))


def test_added_op_inherits_every_check(extended: Path) -> None:
    (command,) = [c for c in guide() if c.startswith("pytest tests/catalogue")]
    printed = pytest_in(extended, *shlex.split(command)[1:])
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed
    assert int(passed[1]) > 10, printed
    assert "skipped" not in printed, printed


# Tests that compare the repository with the whole catalogue. The guide has run the tests of single ops.
CATALOGUE_TESTS = (
    "tests/docs/test_docs.py",
    "tests/docs/test_site.py",
    "tests/docs/test_types.py",
    "tests/catalogue/test_mistakes.py",
    "tests/catalogue/test_mutations.py",
    "tests/proof/test_contracts.py",
    "tests/proof/test_symbolic.py",
    "tests/cli/test_audit.py",
    "tests/cli/test_bench.py",
    "tests/cli/test_bench_contenders.py",
    "tests/cli/test_evidence.py",
    "tests/runtime/test_choices.py",
    "tests/runtime/test_layers.py",
    "tests/runtime/test_ops.py",
    "tests/runtime/test_package.py",
)


@pytest.mark.slow
def test_adding_an_op_ends_with_all_checks_green(extended: Path, tmp_path: Path) -> None:
    """Regression: the guide left six checks red: op and traffic tables, exports, mistakes, mutants and proofs."""
    copy = tmp_path / "checkout"
    shutil.copytree(extended, copy)
    for command in guide():
        program, *arguments = shlex.split(command)
        if program == "pytest":
            pytest_in(copy, *arguments)
        else:
            run(program_of(program), *arguments, cwd=copy, PYTHONPATH=path_of(copy))
    for file in CATALOGUE_TESTS:
        pytest_in(copy, file)
