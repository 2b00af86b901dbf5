"""The conformance suite on a project of four tests: its verdicts on kernels, and its robustness against tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance import emulated, judge, proven, sources
from conformance.projects import Project, Suite
from conformance.run import Run

KERNELS = """
import triton, triton.language as tl

@triton.jit
def double(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), 2 * tl.load(x_ptr + tl.arange(0, BLOCK)))

@triton.jit
def triple(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), 2 * tl.load(x_ptr + tl.arange(0, BLOCK)))

@triton.jit
def unfit(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0)
"""
TESTS = """
import os, time
import pytest, torch
from kernels import double, triple, unfit

def launch(kernel):
    x = torch.randn(8, device="cuda")
    y = torch.empty_like(x)
    kernel[(1,)](x, y, 8)
    return x, y

@pytest.mark.parametrize("size", [64, 8, 16])
def test_double(size):
    assert torch.cuda.is_available() and size == 8
    x, y = launch(double)
    assert torch.equal(y, 2 * x)

def test_triple():
    launch(double)
    x, y = launch(triple)
    assert torch.equal(y, 3 * x)

def test_unfit():
    launch(unfit)

def test_abort():
    os.abort()

def test_hang():
    time.sleep(1000)

def test_after():
    pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(sources, "FIELD", tmp_path)
    directory = tmp_path / "small-1"
    directory.mkdir()
    (directory / "kernels.py").write_text(KERNELS)
    (directory / "test_small.py").write_text(TESTS)
    (directory / "test_unreadable.py").write_text("import something_that_is_not_installed")
    return Project("small", "1", (Suite("tests", ("test_*.py",)),), github="nobody/small")


def test_each_test_gets_a_result(project: Project, tmp_path: Path) -> None:
    run = Run(project, project.suites[0], sources.bring(project), limit=10)
    lines = list(run.events())
    assert run.complete
    assert len(lines) == 7
    unreadable = run.results.pop("test_unreadable.py")
    assert unreadable["outcome"] == "error"
    assert "something_that_is_not_installed" in unreadable["reason"]
    outcomes = {test.split("::")[1]: result["outcome"] for test, result in run.results.items()}
    assert outcomes == {
        "test_double[8]": "passed",
        "test_triple": "failed",
        "test_unfit": "error",
        "test_abort": "lost",
        "test_hang": "lost",
        "test_after": "passed",
    }
    lost = {test.split("::")[1]: result["reason"] for test, result in run.results.items()}
    assert lost["test_abort"] == "the process ended with status -6"
    assert lost["test_hang"] == "no result within 10 s"

    double, triple, unfit = judge.kernels(run.results, {}, lambda test: None)
    assert [kernel.name for kernel in (double, triple, unfit)] == [
        f"kernels.py:{name}" for name in ("double", "triple", "unfit")
    ]
    # A kernel that ran together with a wrong one is not known to be right.
    assert (double.ran, double.right) == (True, False)
    assert (triple.ran, triple.right) == (True, False)
    assert (unfit.ran, unfit.right) == (False, False)
    assert "CompileTimeAssertionFailure" in unfit.why_not

    # A failure with a known reason says nothing against the kernels.
    double, triple, _ = judge.kernels(
        run.results, {}, lambda test: "the reference" * ("triple" in test) or None
    )
    assert double.right
    assert (triple.ran, triple.right, triple.why_not) == (True, False, "the reference")


ON_A_GPU = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def double(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), 2 * tl.load(x_ptr + tl.arange(0, BLOCK)))

@triton.jit
def mirror(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + BLOCK - 1 - tl.arange(0, BLOCK)))
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))

@pytest.mark.parametrize("kernel, clusters", [(double, 1), (mirror, 1), (double, 2)])
def test_launch(kernel, clusters):
    assert torch.cuda.get_device_capability() == (9, 0)
    assert triton.runtime.driver.active.get_current_target().backend == "cuda"
    x = torch.randn(256, device="cuda")
    y = torch.empty_like(x)
    expected = 2 * x if kernel is double else x.flip(0)
    kernel[(1,)](x, y, 256, num_ctas=clusters)
    assert torch.equal(y, expected) or kernel is mirror
"""


def test_results_on_an_emulated_gpu(project: Project, tmp_path: Path) -> None:
    """There are results, an unexamined finding, and an error for a feature that is not emulated."""
    (tmp_path / "small-1" / "test_on_a_gpu.py").write_text(ON_A_GPU)
    suite = Suite("tests", ("test_on_a_gpu.py",), each=9)
    run = Run(project, suite, sources.bring(project), limit=60, emulate="sm_90")
    list(run.events())
    assert run.complete
    right, raced, refused = run.results.values()
    assert (right["outcome"], right["findings"]) == ("passed", [])
    assert {finding["kind"] for finding in raced["findings"]} == {"global memory race"}
    assert "clusters" in refused["reason"]
    (race, *_) = emulated.unexplained(project, run.results)
    assert race.startswith("small: global memory race in mirror, line ")
    table = emulated.table_of([(project, run.results)])
    assert "| small | 1 | 2 | 2 | 2 | 1 | 0 | 0 |" in table
    assert "`mirror`" in table


TO_PROVE = """
import os
import torch, triton, triton.language as tl
from triton_loom import prove

@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, 2 * x, mask=offsets < n)

@triton.jit
def one_more(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets <= n)
    tl.store(y_ptr + offsets, 2 * x, mask=offsets < n)

@triton.jit
def halves(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    double(x_ptr, y_ptr, n, BLOCK)

@triton.jit
def endless(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    double(x_ptr, y_ptr, n, BLOCK)

def ends(kernel, *args, asked=prove.prove, **more):
    if kernel is endless:
        os._exit(3)
    return asked(kernel, *args, **more)

prove.prove = ends

def test_launches():
    x, y = torch.randn(1000), torch.empty(1000)
    grid = (triton.cdiv(1000, 256),)
    endless[grid](x, y, 1000, 256)
    double[grid](x, y, 1000, 256)
    one_more[grid](x, y, 1000, 256)
    halves[(2,)](x.view(torch.int8)[1:501], x[500:], 500, 256)
"""


def test_proofs_of_each_kernel(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a proven kernel, an unexamined counterexample, and kernels without an answer."""
    pytest.importorskip("z3")
    (tmp_path / "small-1" / "test_to_prove.py").write_text(TO_PROVE)
    run = Run(project, Suite("tests", ("test_to_prove.py",)), sources.bring(project), limit=60, prove=True)
    list(run.events())
    assert run.complete
    proofs = {kernel.rpartition(":")[2]: proof for kernel, proof in run.proofs.items()}
    verdicts = {kernel: proof["verdict"] for kernel, proof in proofs.items()}
    assert verdicts == {"endless": "none", "double": "proven", "one_more": "counterexample", "halves": "none"}
    assert proofs["endless"]["why"] == "the process ended with status 3"
    assert "begins inside of an element of x_ptr" in proofs["halves"]["why"]
    assert (proofs["double"]["sizes"], proofs["double"]["fixed"]) == ({"n": 2**31 - 1}, {"BLOCK": 256})
    assert proofs["double"]["accesses"] == 2
    assert [answer["kind"] for answer in proofs["one_more"]["open"] if answer["confirmed"]] == ["bounds"]

    monkeypatch.setattr(proven, "FIGURES", tmp_path / "proven.json")
    (new,) = {line.partition(" at ")[0] for line in proven.unexplained(project, run.proofs)}
    assert new.endswith("one_more: counterexample: bounds of load x_ptr")
    explanations = {
        ("small", "one_more", "bounds"): proven.Examined(hazard=True, what="It reads one element too many.")
    }
    monkeypatch.setattr(proven, "EXAMINED", explanations)
    assert not proven.unexplained(project, run.proofs)
    assert " | 1 | 4 | 1 | 0 | 1 | 0 | 0 | 2 | 4 | " in proven.totals([(project, run.proofs)])
    table = proven.table_of(project, run.proofs)
    assert "| `test_to_prove.py:double` | 2 | proven | n | `(n + 256 - 1)/256` | BLOCK = 256 |" in table
    assert "bounds, 1 (1 confirmed by the sanitizer). It reads one element too many. For instance, " in table

    documented = {"small": {"kernels": {"test_to_prove.py:halves": {"verdict": "proven"}}}}
    (tmp_path / "proven.json").write_text(json.dumps(documented))
    (lost,) = proven.unexplained(project, run.proofs)
    assert lost == "small: test_to_prove.py:halves is not proven any more"


def test_few_tests_cover_all_kernels() -> None:
    def passed(seconds: float, *ran: str) -> dict[str, object]:
        return {"outcome": "passed", "seconds": seconds, "ran": list(ran)}

    results = {
        "slow": passed(100, "a", "b", "c"),
        "quick": passed(1, "a", "b"),
        "other": passed(1, "c"),
        "wrong": {"outcome": "failed", "seconds": 0, "ran": ["a", "b", "c", "d"]},
    }
    assert judge.cover(results) == ["quick", "other"]
