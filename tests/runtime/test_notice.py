"""Progress line on a terminal for kernel builds: when it appears and when it does not."""

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
    """Pseudo-terminal: text written to its file can be read."""

    def __init__(self) -> None:
        self.reader, writer = pty.openpty()
        self.file = os.fdopen(writer, "w", buffering=1)

    def read(self, lines: int = 0) -> str:
        """Return what was written as plain text, waiting for the given number of lines."""
        output = b""
        while select.select([self.reader], [], [], 30.0 if output.count(b"\n") < lines else 0.0)[0]:
            output += os.read(self.reader, 4096)
        return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """The standard error of this process, which is no rank and not in CI; a line appears after 0.5 s, not 2."""
    pseudo_terminal = Terminal()
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=pseudo_terminal.file))
    monkeypatch.setattr(notice, "SECONDS", 0.5)
    monkeypatch.setattr(notice, "AGAIN", 3.0)
    for name, value in {"COLUMNS": "100", "TERM": "xterm", "TRITON_CACHE_DIR": "/kernels"}.items():
        monkeypatch.setenv(name, value)
    for name in ("CI", "WEFT_QUIET", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield pseudo_terminal
    pseudo_terminal.file.close()
    os.close(pseudo_terminal.reader)


def take(seconds: float, announcer: notice.Notice) -> None:
    with announcer.building():
        time.sleep(seconds)


def test_long_builds_are_announced(terminal: Terminal) -> None:
    announcer = notice.Notice()
    take(0.2, announcer)
    assert terminal.read() == "", "not yet"
    take(0.6, announcer)
    assert terminal.read(1) == "weft: building kernels (1 done). Each is built once and cached in /kernels\n"
    take(0.2, announcer)
    assert terminal.read() == "", "one line is enough"
    take(0.8, announcer)
    assert terminal.read(1) == "weft: building kernels (3 done). Each is built once and cached in /kernels\n"


def test_a_long_line_stays_one_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    take(0.7, notice.Notice())
    assert terminal.read(1) == "weft: building kernels (0 done). Each i…\n"


def test_concurrent_builds_count_once(terminal: Terminal) -> None:
    """Overlapping build time counts once, and only one line appears."""
    announcer = notice.Notice()
    threads = [threading.Thread(target=take, args=(0.3, announcer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (terminal.read(), announcer.built) == ("", 4)
    take(0.4, announcer)
    assert terminal.read(1).count("\n") == 1


def test_a_failing_build_stops_the_clock(terminal: Terminal) -> None:
    """The error propagates, no thread keeps running, and later builds are announced as usual."""
    announcer = notice.Notice()
    with pytest.raises(ValueError, match="no such type"), announcer.building():
        raise ValueError("no such type")
    assert terminal.read() == ""
    deadline = time.monotonic() + 10
    while any(thread.name == "weft-notice" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    take(0.7, announcer)
    assert terminal.read(1).count("\n") == 1


@pytest.mark.parametrize("name", ["CI=true", "CI=1", "WEFT_QUIET=1", "RANK=3", "no terminal", "no stderr"])
def test_nothing_is_announced_without_a_terminal_or_on_request(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    announcer = notice.Notice()
    variable, _, value = name.partition("=")
    other = None
    if value:
        monkeypatch.setenv(variable, value)
    else:
        other = io.StringIO() if name == "no terminal" else None
        monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=other))
    before = threading.active_count()
    with announcer.building():
        assert threading.active_count() == before, "no thread watches"
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


def test_the_first_call_of_an_op_is_announced_if_it_builds(tmp_path: Path) -> None:
    """A line appears on the terminal, given an empty cache and slow builds; standard output is left alone. Kernels from
    a warm cache are loaded without an announcement, however long that takes."""
    terminal = Terminal()
    quiet = ("CI", "WEFT_QUIET", "RANK", "WEFT_NO_JIT")
    environment = {k: v for k, v in os.environ.items() if k not in quiet}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "300", "TERM": "xterm"}

    def announced(before: str = "pass", building: str = "None") -> str:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS.format(before=before, building=building)], env=environment,
            stdout=subprocess.PIPE, stderr=terminal.file, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert done.stdout == "done\n"
        return terminal.read()

    line = rf"weft: building kernels \([0-9] done\)\. Each is built once and cached in {re.escape(str(tmp_path))}\n"
    assert re.fullmatch(f"({line})+", announced(building="time.sleep(1.2)"))
    assert announced(before="time.sleep(1.2)") == ""


def test_a_line_does_not_tear_a_progress_bar() -> None:
    """The line appears above a rich progress bar, at the start of a line of its own."""
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
