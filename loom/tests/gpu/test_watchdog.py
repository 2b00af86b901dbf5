"""Blocks that never end: they are stopped by deadlock detection, by a limit, or by Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

import pytest
import triton_loom
from gpu.emulated import LINE, kinds, launch, words
from triton_loom.emulator.machine import Options
from triton_loom.emulator.scope import seconds

COUNTS = "again: add.s32 %r2, %r2, 2; setp.ne.b32 %p1, %r2, 5; @%p1 bra again;"
FIRST_BLOCK_LEAVES = "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p2, %r1, 0; @%p2 bra end;"


@pytest.mark.parametrize(
    "operation",
    [
        "atom.global.acq_rel.gpu.cas.b32 %r2, [%rd0], 5, 1;",  # fails
        "atom.global.add.u32 %r2, [%rd0], 0;",
        "ld.acquire.gpu.global.b32 %r2, [%rd0];",
    ],
)
def test_a_loop_that_waits_for_what_nobody_changes_is_a_deadlock(operation: str) -> None:
    body = f"again: {operation} setp.ne.b32 %p1, %r2, 7; @%p1 bra again;"
    outcome = launch(body, words(1))
    assert kinds(outcome) == ["deadlock"]
    assert outcome.findings[0].by.place.line == LINE


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_block_is_stopped_at_its_limit(cooperative: bool) -> None:
    body = f"{FIRST_BLOCK_LEAVES} {COUNTS} end:"
    options = Options(limit=0.2)
    outcome = launch(body, words(1), grid=(2, 1, 1), cooperative=cooperative, options=options)
    (finding,) = outcome.findings
    assert (finding.kind, finding.by.place.line, finding.by.block) == ("time limit", LINE, (1, 0, 0))
    assert "TRITON_LOOM_EMULATE_LIMIT" in str(finding)


def test_the_next_launch_has_its_own_time() -> None:
    assert kinds(launch(COUNTS, words(1), options=Options(limit=0.1))) == ["time limit"]
    out = words(1)
    assert kinds(launch("st.global.b32 [%rd0], 7;", out, options=Options(limit=60))) == []
    assert out[0] == 7


@pytest.mark.parametrize("cooperative", [False, True])
def test_an_interrupt_ends_a_launch_within_a_second(cooperative: bool) -> None:
    """Time is the process's CPU time, which does not depend on the machine's load."""
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        sent = time.process_time()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, interrupt)
    timer.start()
    body = f"{FIRST_BLOCK_LEAVES} {COUNTS} end:"
    with pytest.raises(KeyboardInterrupt):
        launch(body, words(1), grid=(2, 1, 1), cooperative=cooperative, options=Options(limit=60))
    assert time.process_time() - sent < 1


def test_sources_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_LOOM_EMULATE_LIMIT", raising=False)
    assert (seconds(None), seconds(5), seconds(math.inf)) == (60, 5, math.inf)
    monkeypatch.setenv("TRITON_LOOM_EMULATE_LIMIT", "2.5")
    assert (seconds(None), seconds(5)) == (2.5, 5)
    with triton_loom.emulate("sm_90") as gpu:
        assert gpu.options.limit == 2.5
    monkeypatch.setenv("TRITON_LOOM_EMULATE_LIMIT", "soon")
    with pytest.raises(ValueError, match="TRITON_LOOM_EMULATE_LIMIT must be a number of seconds above 0"):
        seconds(None)
    with pytest.raises(ValueError, match="limit must be a number of seconds above 0"):
        seconds(0)
