"""Every launch in a scope has a verdict, so that "no finding" is never mistaken for "not checked"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from processes import run_python
from test_sanitizer import copy_positive, natively
from test_witness import KERNEL, WRONG, double, launch_outside, script  # noqa: F401
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.runtime import driver
from triton_loom.driver import LoomDriver, activated


def outcomes(scope: Any) -> list[tuple[str, str]]:
    return [(verdict.outcome, verdict.reason) for verdict in scope.verdicts]


def launch_inside() -> None:
    double[(1,)](torch.ones(64), torch.zeros(64), 64, BLOCK=64)


def test_clean_launches_and_findings_have_verdicts() -> None:
    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted:
        launch_inside()
        launch_outside()
        launch_inside()
    assert outcomes(seen) == [("clean", ""), ("findings", ""), ("clean", "")]
    assert outcomes(counted) == [("counted", "")] * 3
    assert [str(verdict) for verdict in seen.verdicts[:2]] == ["double: clean", "double: findings"]
    assert seen.summary == "3 launches: 2 clean, 1 findings"


def test_a_scope_without_launches_is_not_checked() -> None:
    with triton_loom.sanitize() as seen:
        pass
    assert seen.verdicts == []
    assert seen.summary == "not checked: nothing was launched"


def launch_compiled(compiled: Any) -> None:
    """Launch a compiled kernel directly, as code does that keeps one, whatever it was compiled for."""
    x, y = torch.ones(64), torch.zeros(64)
    stream = driver.active.get_current_stream(None)
    metadata = compiled.packed_metadata
    compiled.run(1, 1, 1, stream, compiled.function, metadata, None, None, None, x[:20], y, 21, 64)


def compiled_in(scope: Callable[[], Any]) -> Any:
    with scope():
        return double[(1,)](torch.ones(64)[:20], torch.zeros(64), 20, BLOCK=64)


def test_a_kernel_compiled_before_the_scope_is_not_checked() -> None:
    compiled = compiled_in(triton_loom.active)
    with triton_loom.sanitize() as seen, triton_loom.count() as counted:
        launch_compiled(compiled)
    (verdict,) = seen.verdicts
    assert verdict.missed
    assert verdict.outcome == "not checked"
    assert "compiled without instruments" in verdict.reason
    assert [outcome for outcome, _ in outcomes(counted)] == ["not counted"]
    assert (seen.launches, counted.launches) == (0, [])
    assert seen.summary == f"1 launch: 1 not checked; {verdict} (1 launch)"
    launch_compiled(compiled)
    assert len(seen.verdicts) == 1, "the scope is closed"


def test_a_native_launch_is_not_checked() -> None:
    with triton_loom.sanitize() as seen:
        natively(launch_outside)
    assert [outcome for outcome, _ in outcomes(seen)] == ["not checked"]


def test_a_kernel_compiled_for_another_scope_is_missed() -> None:
    """The kernel has one instrument but not the other."""
    sanitized, counted_only = compiled_in(triton_loom.sanitize), compiled_in(triton_loom.count)
    with triton_loom.count() as counted:
        launch_compiled(sanitized)
        launch_compiled(counted_only)
    assert outcomes(counted) == [("not counted", "it was compiled for sanitize() alone"), ("counted", "")]
    assert [launch.loads.requested for launch in counted.launches] == [80]
    with triton_loom.sanitize(collect=True) as seen:
        launch_compiled(counted_only)
        launch_compiled(sanitized)
    assert outcomes(seen) == [("not checked", "it was compiled for count() alone"), ("findings", "")]
    assert [finding.launch for finding in seen.findings] == [0]


class Elsewhere(LoomDriver):
    """Device that claims to be a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_a_launch_on_another_device_is_missed() -> None:
    """The device's launcher calls Triton's hooks, but nothing of Loom's."""
    with triton_loom.sanitize() as seen, triton_loom.count() as counted:
        with activated(Elsewhere(())):
            knobs.runtime.launch_enter_hook(LazyDict({"name": "double", "stream": 0}))
        launch_inside()
    assert outcomes(seen) == [("not checked", "it was launched on cuda"), ("clean", "")]
    assert outcomes(counted)[0] == ("not counted", "it was launched on cuda")


def test_a_dry_launch_says_what_it_leaves_out() -> None:
    with triton_loom.sanitize(dry=True) as seen:
        launch_inside()
    ((outcome, reason),) = outcomes(seen)
    assert outcome == "clean"
    assert "bounds and overflow only" in reason


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def test_a_bare_address_is_reported_as_unchecked() -> None:
    x = torch.zeros(64)
    with triton_loom.sanitize() as seen:
        compiled = add_one[(1,)](x, 64, BLOCK=64)
        stream, metadata = driver.active.get_current_stream(None), compiled.packed_metadata
        compiled.run(1, 1, 1, stream, compiled.function, metadata, None, None, None, x.data_ptr(), 64, 64)
    assert outcomes(seen)[0] == ("clean", "")
    outcome, reason = outcomes(seen)[1]
    assert outcome == "clean"
    assert "through x_ptr, which came as a bare address" in reason


def test_a_launch_ended_by_an_assertion_is_not_checked() -> None:
    with triton_loom.sanitize() as seen, pytest.raises(triton_loom.DeviceAssertion):
        copy_positive[(1,)](torch.zeros(8), torch.zeros(1), 5, debug=True)
    assert outcomes(seen) == [("not checked", "an assertion ended it early")]


def test_the_innermost_sanitizer_judges() -> None:
    with triton_loom.sanitize() as outer, triton_loom.sanitize() as inner:
        launch_inside()
    assert (outcomes(outer), outcomes(inner)) == ([], [("clean", "")])


# ---- output of verdicts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pytest_summarizes_verdicts(script: Callable[..., str]) -> None:  # noqa: F811
    text = (
        KERNEL.replace("wrong line", "line of a test of verdicts")
        + """
def test_clean():
    double[(1,)](torch.ones(40)[:20], torch.zeros(40), 20, BLOCK=64)

def test_wrong():
    double[(1,)](torch.ones(40)[:20], torch.zeros(40), 21, BLOCK=64)

def test_idle(loom_sanitizer):
    pass
"""
    )
    path = script(text, "test_shown.py")
    flags = ["-m", "pytest", path, "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    for more in (["-p", "no:xdist"], ["-n", "1"]):
        run = run_python(*flags, "--loom-sanitize", *more)
        assert run.returncode == 1, run.stdout
        assert "2 launches: 1 clean, 1 findings" in run.stdout
        assert re.search(r"launched nothing: \S*test_idle$", run.stdout, re.M)
    run = run_python(*flags, "-k", "clean")
    assert "launches" not in run.stdout


def test_the_report_and_the_environment_show_verdicts(script: Callable[..., str]) -> None:  # noqa: F811
    path = script(WRONG)
    run = run_python("-m", "triton_loom", "report", path)
    assert "1 launch: 1 findings" in run.stdout
    run = run_python(path, TRITON_LOOM_SANITIZE="collect")
    assert "TRITON_LOOM_SANITIZE: 1 launch: 1 findings" in run.stderr
    nothing = script("import triton_loom", "idle.py")
    run = run_python("-m", "triton_loom", "report", nothing)
    assert run.returncode == 0
    assert "not checked: nothing was launched" in run.stdout
