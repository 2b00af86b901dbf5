"""The witness end to end: its scopes, findings and reports, and no findings in correct kernels."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_examples
import torch
import triton
import triton.language as tl
import triton_loom
import triton_loom.driver
from processes import run_python
from support import short
from triton.runtime import driver
from triton_loom import Finding


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


# ---- scopes --------------------------------------------------------------------------------------------------

ALLOCATING = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]


def state() -> list[Any]:
    """Return the state that a scope changes and has to restore."""
    return [
        driver._active,
        *(getattr(owner, name) for owner, name in ALLOCATING),
        "new_full" in vars(torch.Tensor),
    ]


def launch_outside() -> None:
    """Launch a kernel that reads one element too many."""
    x = torch.zeros(64)
    double[(1,)](x[:20], x[32:60], 21, BLOCK=64)


@pytest.mark.parametrize("dry", [False, True])
def test_scopes_restore_everything(dry: bool) -> None:
    original = state()
    with triton_loom.sanitize(dry=dry), triton_loom.count():
        assert state() != original
    assert state() == original
    with pytest.raises(ZeroDivisionError), triton_loom.count(), triton_loom.sanitize(dry=dry):
        raise ZeroDivisionError
    assert state() == original
    with pytest.raises(triton_loom.SanitizerError) as raised, triton_loom.sanitize(dry=dry):
        launch_outside()
    assert state() == original
    assert kinds(raised.value.findings) == ["out-of-bounds load"]
    launch_outside()  # unchecked now


def test_nested_counters_both_count() -> None:
    x, y = torch.ones(64), torch.zeros(64)
    with triton_loom.count() as outer:
        with triton_loom.count() as inner:
            double[(1,)](x, y, 64, BLOCK=64)
        double[(1,)](x, y, 20, BLOCK=64)
    assert [launch.loads.requested for launch in outer.launches] == [256, 80]
    assert [launch.loads.requested for launch in inner.launches] == [256]
    assert outer.launches[0].grid == (1, 1, 1)


def test_activating_the_cpu_keeps_the_scope() -> None:
    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted, triton_loom.active():
        launch_outside()
    assert (len(seen.findings), len(counted.launches)) == (1, 1)


def test_launches_of_two_threads_are_kept_apart() -> None:
    """Each launch is reported by itself, whatever other threads launch."""
    rounds = 25
    errors: list[BaseException] = []

    def launch(n: int) -> None:
        try:
            x, y = torch.arange(512.0), torch.zeros(512)
            for _ in range(rounds):
                double[(triton.cdiv(n, 64),)](x, y[: n - 1], n, BLOCK=64)
                assert torch.equal(y[: n - 1], 2 * x[: n - 1])
                assert not y[n - 1 :].any()
        except BaseException as error:
            errors.append(error)

    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted:
        threads = [threading.Thread(target=launch, args=(n,)) for n in (100, 500)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert seen.launches == len(counted.launches) == 2 * rounds
    assert sorted(finding.launch for finding in seen.findings) == list(range(2 * rounds))
    assert {finding.index for finding in seen.findings} == {(99,), (499,)}
    assert sorted(launch.loads.requested for launch in counted.launches) == [400] * rounds + [2000] * rounds


def test_a_finding_is_complete() -> None:
    source = Path(__file__).read_text().splitlines()
    with triton_loom.sanitize(collect=True) as seen:
        double[(2,)](torch.ones(128), torch.zeros(128), 128, BLOCK=64)
        launch_outside()
    (finding,) = seen.findings
    assert source[finding.line - 1].strip().startswith("tl.store(y_ptr + i, 2 * tl.load")
    launch_site = finding.launched_from.rsplit(":", 1)
    assert launch_site[0] == finding.file == __file__
    assert source[int(launch_site[1]) - 1].strip().startswith("double[(1,)](x[:20]")
    assert (finding.launch, finding.program, finding.index, finding.count) == (1, (0, 0, 0), (20,), 1)
    for part in (
        f"{__file__}:{finding.line}",
        "double",
        "(0, 0, 0)",
        "x_ptr",
        "(20,)",
        "launch 1",
        finding.launched_from,
    ):
        assert part in str(finding)
    assert "\n" not in str(finding)


def test_a_finding_names_the_file_that_was_run(tmp_path: Path) -> None:
    """Triton's cache shares the kernel with an identical one in another directory."""
    for name in ("here", "there"):
        path = tmp_path / name / "module.py"
        path.parent.mkdir()
        path.write_text(KERNEL.replace("wrong line", "wrong line of a module"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with triton_loom.sanitize(collect=True) as seen:
            module.double[(1,)](torch.ones(40)[:20], torch.zeros(40), 21, BLOCK=64)
        assert [finding.file for finding in seen.findings] == [str(path)]


def test_meta_tensors_are_checked() -> None:
    x, y = torch.empty(1 << 40, device="meta"), torch.empty(1 << 40, device="meta")
    with triton_loom.sanitize(collect=True, dry=True) as seen:
        double[(3,)](x, y, 190, BLOCK=64)
        assert not seen.findings
        double[(3,)](x[:100], y, 101, BLOCK=64)
    (finding,) = seen.findings
    assert (finding.kind, finding.index, finding.program) == ("out-of-bounds load", (100,), (1, 0, 0))


@triton.jit
def copy_in_tuples(pair, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pair[1] + i, tl.load(pair[0] + i, mask=i < n), mask=i < n)


def test_meta_tensors_in_tuples_are_checked() -> None:
    x, y = torch.empty(1 << 40, device="meta"), torch.empty(1 << 40, device="meta")
    with triton_loom.sanitize(collect=True) as seen:
        copy_in_tuples[(3,)]((x[:100], y), 101, BLOCK=64)
    (finding,) = seen.findings
    assert (finding.kind, finding.argument, finding.index) == ("out-of-bounds load", "pair[0]", (100,))


def test_dry_launches_store_nothing() -> None:
    x, y = torch.ones(64), torch.zeros(64)
    with triton_loom.sanitize(dry=True) as seen:
        double[(1,)](x, y, 64, BLOCK=64)
    assert seen.launches == 1
    assert not y.any()


KERNEL = """
import sys
import torch, triton, triton.language as tl, triton_loom

@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)  # wrong line
    tl.store(y_ptr + i, 2 * x, mask=i < n)
"""
WRONG = KERNEL + "\ndouble[(1,)](torch.ones(40)[:20], torch.zeros(40), 21, BLOCK=64)\nprint('went on')\n"
WRONG_LINE = 1 + next(i for i, line in enumerate(WRONG.splitlines()) if "wrong line" in line)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_dry_launches_touch_no_memory(script: Callable[[str], str]) -> None:
    """Tensors have 8 GB each; the process grows by less than 100 MB. (The tests' own allocations would be filled.)"""
    path = script(
        KERNEL
        + """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

n = 1 << 32
with triton_loom.sanitize(collect=True, dry=True) as seen:
    double[(1,)](torch.ones(64), torch.ones(64), 64, BLOCK=1024)
    before = resident()
    x, y = torch.empty(n, dtype=torch.int16), torch.empty(n, dtype=torch.int16)
    double[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
    assert not seen.findings, seen.findings
    double[(triton.cdiv(n, 1024),)](x, y[:-3], n, BLOCK=1024)
print(resident() - before, *[(f.kind, f.count, f.index) for f in seen.findings])
"""
    )
    run = run_python(path)
    assert run.returncode == 0, run.stderr
    grown, finding = run.stdout.split(" ", 1)
    assert ast.literal_eval(finding) == ("out-of-bounds store", 3, ((1 << 32) - 3,))
    assert int(grown) < 100


@pytest.mark.parametrize("value", ["1", "collect"])
def test_the_environment_enables_the_sanitizer(value: str, script: Callable[[str], str]) -> None:
    path = script(WRONG)
    run = run_python(path, TRITON_LOOM_SANITIZE=value)
    assert run.returncode == (1 if value == "1" else 0), f"exit code {run.returncode}\n{run.stderr[-2000:]}"
    assert run.stdout == ("" if value == "1" else "went on\n")
    assert ("SanitizerError" in run.stderr) == (value == "1")
    assert f"{Path(path).name}:{WRONG_LINE}: out-of-bounds load in double" in run.stderr


def test_an_invalid_environment_value_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LOOM_SANITIZE", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        triton_loom.driver.LoomDriver()


def test_pytest_option_and_fixture(script: Callable[..., str], tmp_path: Path) -> None:
    text = (
        KERNEL
        + """
def launch(n):
    double[(1,)](torch.ones(40)[:20], torch.zeros(40), n, BLOCK=64)

def test_right():
    launch(20)

def test_wrong():
    launch(21)

def test_right_with_fixture(loom_sanitizer):
    launch(20)
    assert loom_sanitizer.launches == 1

def test_wrong_with_fixture(loom_sanitizer):
    launch(21)
"""
    )
    path = script(text.replace("wrong line", "wrong line of a test"), "test_script.py")
    flags = ["-m", "pytest", path, "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    run = run_python(*flags, "--loom-sanitize")
    assert run.returncode == 1, run.stdout
    assert {*re.findall(r"^(\w+) \S*::(\w+)", run.stdout, re.M)} == {
        ("PASSED", "test_right"),
        ("FAILED", "test_wrong"),
        ("PASSED", "test_right_with_fixture"),
        ("FAILED", "test_wrong_with_fixture"),
    }
    assert f"test_script.py:{WRONG_LINE}: out-of-bounds load" in run.stdout
    run = run_python(*flags, "-k", "wrong")
    assert {*re.findall(r"^(\w+) \S*::(\w+)", run.stdout, re.M)} == {
        ("PASSED", "test_wrong"),
        ("FAILED", "test_wrong_with_fixture"),
    }


def test_report_of_a_clean_example() -> None:
    run = run_python("-m", "triton_loom", "report", test_examples.EXAMPLES / "01_vector_add.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "max error" in run.stdout
    assert "bytes moved" in run.stdout
    for row in (r"add_kernel", r"x_ptr\W+loads\W+\d", r"out_ptr\W+stores\W+\d"):
        assert re.search(row, run.stdout), row
    assert "0 findings" in run.stdout


def test_report_of_a_mistake_fails(script: Callable[[str], str]) -> None:
    path = script(WRONG)
    run = run_python("-m", "triton_loom", "report", path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert run.stdout.startswith("went on\n")
    assert f"{Path(path).name}:{WRONG_LINE}: out-of-bounds load in double" in run.stdout
    assert re.search(r"x_ptr\W+loads\W+80\b", run.stdout)
    assert "1 findings" in run.stdout


# ---- correct kernels ---------------------------------------------------------------------------------------------

EXAMPLES: dict[str, Callable[[], Any]] = {
    "vector_add": lambda: test_examples.run_vector_add(),
    "fused_softmax": lambda: test_examples.run_fused_softmax(),
    "matmul": lambda: test_examples.matmul.matmul(torch.randn(100, 70), torch.randn(70, 90), "leaky_relu"),
    "dropout": lambda: test_examples.run_dropout(),
    "layer_norm": lambda: test_examples.run_layer_norm(),
    "flash_attention": lambda: [
        test_examples.flash_attention.attention(*torch.randn(3, 2, 2, 100, 64).unbind(), causal)
        for causal in (False, True)
    ],
}


@pytest.mark.parametrize("run", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_are_clean(run: Callable[[], Any]) -> None:
    with triton_loom.sanitize(collect=True) as seen:
        run()
    assert seen.launches
    assert not seen.findings, "\n".join(map(str, seen.findings))


def liger_findings(monkeypatch: pytest.MonkeyPatch, selected: Callable[[Any], bool]) -> list[str]:
    """Return the findings in the Liger ops of test_liger, forward and backward.

    As there, Liger's device check is bypassed and its tuning cut short.
    """
    pytest.importorskip("liger_kernel")
    import test_liger
    from liger_kernel.ops import dyt

    monkeypatch.setattr(dyt, "infer_device", lambda: "npu")
    for kernel in (dyt._dyt_fwd_kernel, dyt._dyt_bwd_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[::9])
    findings = []
    for case in filter(selected, test_liger.CASES):
        for dtype in case.dtypes:
            inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
            with triton_loom.sanitize(collect=True) as seen:
                test_liger.outputs_and_gradients(case.liger, inputs, case.wrt, dtype)
            assert seen.launches, case.name
            findings += [f"{case.name} {short(dtype)}: {finding}" for finding in seen.findings]
    return findings


def test_some_liger_ops_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not liger_findings(monkeypatch, lambda case: case.name in ("rms_norm", "cross_entropy", "swiglu"))


@pytest.mark.slow
def test_all_liger_ops_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not liger_findings(monkeypatch, lambda case: True)


# ---- cost --------------------------------------------------------------------------------------------------------

COST = """
import statistics, time
from contextlib import nullcontext
import torch, triton_loom, weft

x, w = torch.randn(8192, 2048).bfloat16(), torch.rand(2048).bfloat16()
scopes = [nullcontext, triton_loom.count, triton_loom.sanitize]

def seconds(scope):
    with torch.no_grad(), scope():
        start = time.perf_counter()
        weft.rms_norm(x, w, quantize="1x128")
        return time.perf_counter() - start

for scope in scopes:
    seconds(scope)
for _ in range(3):
    rounds = [[seconds(scope) for scope in scopes] for _ in range(5)]
    print(*(statistics.median(times) for times in zip(*rounds)))
"""


@pytest.mark.slow
def test_instrumentation_slows_a_norm_by_bounded_factors(script: Callable[[str], str]) -> None:
    """Time a fused norm of 8192x2048, natively, counted and sanitized in turn.

    The times are medians of five, the best of three rounds. It runs in its own process, where nothing else fills
    allocations.
    """
    pytest.importorskip("weft")
    run = run_python(script(COST), TRITON_LOOM_QUICK_BUILD="0")
    assert run.returncode == 0, run.stderr
    rounds = [[float(part) for part in line.split()] for line in run.stdout.splitlines()]
    assert len(rounds) == 3
    counted = min(count / native for native, count, _ in rounds)
    sanitized = min(sanitize / native for native, _, sanitize in rounds)
    assert counted <= 6, f"counted: {counted:.1f}x"
    assert sanitized <= 12, f"sanitized: {sanitized:.1f}x"
