"""The line on a terminal that says that kernels are being built: when it comes, and when it does not."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.runtime import notice


class Terminal:
    """A pseudo-terminal: what is written to its file can be read."""

    def __init__(self) -> None:
        self.reader, writer = pty.openpty()
        self.file = os.fdopen(writer, "w", buffering=1)

    def read(self, lines: int = 0) -> str:
        """What was written, as plain text; so many lines are waited for."""
        found = b""
        while select.select([self.reader], [], [], 30.0 if found.count(b"\n") < lines else 0.0)[0]:
            found += os.read(self.reader, 4096)
        return re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """The standard error of this process, which is no rank and not in CI; a line comes after 0.5 s, not 2."""
    made = Terminal()
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=made.file))
    monkeypatch.setattr(notice, "SECONDS", 0.5)
    monkeypatch.setattr(notice, "AGAIN", 3.0)
    for name, value in {"COLUMNS": "100", "TERM": "xterm", "TRITON_CACHE_DIR": "/kernels"}.items():
        monkeypatch.setenv(name, value)
    for name in ("CI", "WEFT_QUIET", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.file.close()
    os.close(made.reader)


def take(seconds: float, told: notice.Notice) -> None:
    with told.building():
        time.sleep(seconds)


def test_building_for_long_is_told(terminal: Terminal) -> None:
    told = notice.Notice()
    take(0.2, told)
    assert terminal.read() == "", "not yet"
    take(0.6, told)
    assert terminal.read(1) == "weft: building kernels (1 done). Each is built once and kept in /kernels\n"
    take(0.2, told)
    assert terminal.read() == "", "a line is enough"
    take(0.8, told)
    assert terminal.read(1) == "weft: building kernels (3 done). Each is built once and kept in /kernels\n"


def test_a_long_line_stays_one_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    take(0.7, notice.Notice())
    assert terminal.read(1) == "weft: building kernels (0 done). Each i…\n"


def test_threads_that_build_at_the_same_time(terminal: Terminal) -> None:
    """Their time counts once, and so does the line."""
    told = notice.Notice()
    threads = [threading.Thread(target=take, args=(0.3, told)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (terminal.read(), told.built) == ("", 4)
    take(0.4, told)
    assert terminal.read(1).count("\n") == 1


def test_a_kernel_that_does_not_build(terminal: Terminal) -> None:
    """The error passes, nothing keeps running, and what comes next is told as ever."""
    told = notice.Notice()
    with pytest.raises(ValueError, match="no such type"), told.building():
        raise ValueError("no such type")
    assert terminal.read() == ""
    deadline = time.monotonic() + 10
    while any(thread.name == "weft-notice" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    take(0.7, told)
    assert terminal.read(1).count("\n") == 1


@pytest.mark.parametrize("name", ["CI=true", "CI=1", "WEFT_QUIET=1", "RANK=3", "no terminal", "no stderr"])
def test_when_nothing_is_told(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    told = notice.Notice()
    variable, _, value = name.partition("=")
    other = None
    if value:
        monkeypatch.setenv(variable, value)
    else:
        other = io.StringIO() if name == "no terminal" else None
        monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=other))
    before = threading.active_count()
    with told.building():
        assert threading.active_count() == before, "nobody watches"
        time.sleep(0.6)
    assert terminal.read() + (other.getvalue() if other else "") == ""


FIRST_CALLS = """
import time
import torch
import weft
from weft.runtime import launch
build = launch.build
def slow(fn, variant, target, building):
    {before}
    return build(fn, variant, target, lambda: (building(), {building}))
launch.build = slow
x = torch.randn(8, 256, requires_grad=True)
weft.rms_norm(x, torch.ones(256)).sum().backward()
weft.quantize(x.detach())
print("done")
"""


def test_the_first_call_of_an_op_is_told_if_it_builds(tmp_path: Path) -> None:
    """On a terminal, with an empty cache, and with kernels that take a second each; standard output is left alone.
    Kernels of a warm cache are loaded, however long that takes, and nothing says that they are built."""
    terminal = Terminal()
    quiet = ("CI", "WEFT_QUIET", "RANK", "WEFT_NO_JIT")
    environment = {k: v for k, v in os.environ.items() if k not in quiet}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "300", "TERM": "xterm"}

    def told(before: str = "pass", building: str = "None") -> str:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS.format(before=before, building=building)], env=environment,
            stdout=subprocess.PIPE, stderr=terminal.file, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert done.stdout == "done\n"
        return terminal.read()

    line = rf"weft: building kernels \([0-9] done\)\. Each is built once and kept in {re.escape(str(tmp_path))}\n"
    assert re.fullmatch(f"({line})+", told(building="time.sleep(1.2)"))
    assert told(before="time.sleep(1.2)") == ""


def test_a_line_does_not_tear_a_progress_bar() -> None:
    """rich shows a bar on a terminal: the line comes above it, at the beginning of a line of its own."""
    code = """
import time
from weft.cli.screen import Steps
from weft.runtime import notice
notice.SECONDS = 0.2
with Steps(3, "compiling") as steps, notice.Notice().building():
    time.sleep(1.0)
"""
    terminal = Terminal()
    quiet = ("CI", "WEFT_QUIET", "RANK", "COLUMNS")
    environment = {k: v for k, v in os.environ.items() if k not in quiet} | {"TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=terminal.file, timeout=300, check=True
    )
    shown = terminal.read()
    assert "compiling" in shown
    before, _, _ = shown.partition("weft: building kernels")
    assert before != shown
    assert before.endswith("\r\x1b[2K"), "the bar is erased first"
