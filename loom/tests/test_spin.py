"""Endless loops: a launch ends them after a limit, at once if they are obvious, or when the user interrupts it."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton_loom.features import seconds

LIMIT = 0.3  # seconds


@triton.jit
def wait_for_flag(flag_ptr):
    while tl.load(flag_ptr, volatile=True) == 0:  # flag
        pass


@triton.jit
def take_lock(lock_ptr, x_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # lock
        pass
    tl.store(x_ptr, 1)  # and keeps it


@triton.jit
def search(x_ptr, n):
    low, high = 0, n
    while low < high:  # search
        middle = (low + high) // 2
        low = tl.where(tl.load(x_ptr + middle) < 0, middle + 1, middle)
    tl.store(x_ptr, low)


@triton.jit
def by_steps(x_ptr, n, step):
    for i in range(0, n, step):  # steps
        tl.store(x_ptr, i)


@triton.jit
def take_tickets(counter_ptr, taken_ptr, n):
    ticket = tl.atomic_add(counter_ptr, 1)
    while ticket < n:
        tl.store(taken_ptr, ticket)
        ticket = tl.atomic_add(counter_ptr, 1)


def line_of(kernel: triton.JITFunction, comment: str) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(n for n, line in enumerate(lines) if comment in line)


def number(value: int = 0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32)


SPINNING: dict[str, Callable[..., Any]] = {
    "flag": lambda **options: wait_for_flag[(1,)](number(), **options),
    "lock": lambda **options: take_lock[(1,)](number(1), number(), **options),
    "search": lambda **options: search[(1,)](torch.zeros(8, dtype=torch.int32), 7, **options),
}
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "sanitized": triton_loom.sanitize,
    "counted": triton_loom.count,
}
kernels = {"flag": wait_for_flag, "lock": take_lock, "search": search}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", SPINNING)
def test_a_loop_that_spins_is_ended_with_its_line(name: str, scope: str) -> None:
    with SCOPES[scope]() as seen:
        line = line_of(kernels[name], f"# {name}")
        with pytest.raises(
            triton_loom.SpinError, match=rf"test_spin\.py:{line}: .*within the limit of 0\.3 s"
        ):
            SPINNING[name](spin_limit=LIMIT)
        start = time.perf_counter()
        with pytest.raises(triton_loom.SpinError):
            SPINNING[name](spin_limit=LIMIT)
        assert LIMIT <= time.perf_counter() - start < LIMIT + 1
    if scope == "sanitized":
        assert "the limit of a loop ended it early" in seen.summary
    wait_for_flag[(1,)](number(1))  # the next launch is as any other


def test_programs_that_wait_for_each_other_end_together() -> None:
    start = time.perf_counter()
    with pytest.raises(triton_loom.SpinError):
        wait_for_flag[(4,)](number(), launch_cooperative_grid=True, spin_limit=LIMIT)
    assert time.perf_counter() - start < LIMIT + 5


def test_the_limit_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LOOM_SPIN_LIMIT", "0.2")
    with triton_loom.active(), pytest.raises(triton_loom.SpinError, match=r"limit of 0\.2 s"):
        search[(1,)](torch.zeros(8, dtype=torch.int32), 6)
    monkeypatch.setenv("TRITON_LOOM_SPIN_LIMIT", "soon")
    with pytest.raises(ValueError, match=r"TRITON_LOOM_SPIN_LIMIT must be a number of seconds.*'soon'"):
        seconds("TRITON_LOOM_SPIN_LIMIT", default=1)


def test_a_program_that_waits_for_a_later_one_fails_at_once() -> None:
    line = line_of(take_lock, "# lock")
    with pytest.raises(
        triton_loom.DeviceAssertion, match=rf"test_spin\.py:{line}: .*launch_cooperative_grid"
    ):
        take_lock[(4,)](number(), number())


def test_a_working_loop_is_not_mistaken_for_a_waiting_one() -> None:
    """The first of two serial programs takes more tickets than a waiting loop has rounds."""
    counter, tickets = number(), number()
    take_tickets[(2,)](counter, tickets, 1 << 21)
    assert (counter.item(), tickets.item()) == ((1 << 21) + 2, (1 << 21) - 1)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("n", "step"), [(8, 0), (8, -2), (2**31 - 1, 2**30)], ids=["zero", "negative", "wraps"]
)
def test_a_for_loop_that_never_ends_does_not_begin(n: int, step: int, scope: str) -> None:
    line = line_of(by_steps, "# steps")
    error = triton_loom.DeviceAssertion
    if (scope, step) == ("sanitized", 2**30):
        error = triton_loom.SanitizerError  # an overflow, at the same line
    with SCOPES[scope](), pytest.raises(error, match=rf"test_spin\.py:{line}: "):
        by_steps[(1,)](number(), n, step)


@pytest.mark.parametrize("step", [1, 3, 2**30])
def test_a_for_loop_that_ends_is_left_alone(step: int) -> None:
    n, x = 2**31 - 1 - step, number(-1)
    by_steps[(1,)](x, min(n, 3 * step), step)
    assert x.item() == (min(n, 3 * step) - 1) // step * step
    by_steps[(1,)](x, -5, 0)  # nothing to do, whatever the step


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_soon() -> Iterator[list[float]]:
    sent: list[float] = []

    def send() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, send)
    timer.start()
    try:
        yield sent
    finally:
        timer.join()


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("scope", SCOPES)
def test_an_interrupt_ends_a_loop_that_spins(scope: str, programs: int) -> None:
    options = {"launch_cooperative_grid": programs > 1, "spin_limit": 20}
    with SCOPES[scope]():
        wait_for_flag[(programs,)](number(1), **options)  # compiled
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupted_soon() as sent:
                wait_for_flag[(programs,)](number(), **options)
            assert time.perf_counter() - sent[0] < 1
        wait_for_flag[(programs,)](number(1), **options)
    with pytest.raises(KeyboardInterrupt), interrupted_soon():
        time.sleep(20)  # Python hears of it as before


def test_ignored_interrupts_do_not_end_a_launch() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(triton_loom.SpinError), interrupted_soon():
            wait_for_flag[(1,)](number(), spin_limit=0.4)
    finally:
        signal.signal(signal.SIGINT, before)
