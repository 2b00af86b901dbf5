"""A line on the terminal when building kernels takes long, so that nobody takes the first call for a hang.

Nothing is printed unless the standard error of the process is a terminal, in CI (the variable `CI`), with
`WEFT_QUIET=1`, or by other ranks than the first. The line comes after 2 seconds of building, and again, with another
number of kernels, after 20 and 200.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SECONDS = 2.0  # of building, until the first line
AGAIN = 10.0  # times as many until the next
FOUND = 0.1  # seconds; a kernel that takes less was built before, and only loaded from Triton's cache


class Notice:
    """How long this process has been building kernels, and how many it has built."""

    def __init__(self) -> None:
        self.built = 0
        self._due = SECONDS  # of building: when the next line comes
        self._spent = 0.0  # seconds, without those of the builds that are under way
        self._since = 0.0  # when these began
        self._under_way = 0
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the building of a kernel, by any thread."""
        if is_quiet():
            yield
            return
        begin = time.monotonic()
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since, self._over = begin, threading.Event()
                watch = threading.Thread(
                    target=self._watch, args=(self._over,), name="weft-notice", daemon=True
                )
                watch.start()
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic()
                self.built += now - begin >= FOUND
                self._under_way -= 1
                if self._under_way == 0:
                    self._over.set()
                    self._spent += now - self._since if now - self._since >= FOUND else 0.0

    def _watch(self, over: threading.Event) -> None:
        """Print when it is time, until these builds are over."""
        while not over.wait(max(0.0, self._due - self._spent - (time.monotonic() - self._since))):
            with self._lock:
                if over.is_set():
                    return
                self._due *= AGAIN
                line = self.line()
            _print(line)

    def line(self) -> str:
        from triton import knobs

        home, cache = os.path.expanduser("~"), str(knobs.cache.dir)
        cache = f"~{cache[len(home) :]}" if cache.startswith(home + os.sep) else cache
        return f"weft: building kernels ({self.built} done). Each is built once and kept in {cache}"


NOTICE = Notice()


def is_quiet() -> bool:
    """Whether nothing may be printed, as things stand."""
    if os.environ.get("WEFT_QUIET", "0") not in ("", "0") or os.environ.get("CI", "") not in (
        "",
        "0",
        "false",
    ):
        return True
    if os.environ.get("RANK", "0") != "0":
        return True
    try:
        return not sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return True


def _print(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    with suppress(OSError, ValueError):  # the terminal may be gone by now
        Console(file=sys.stderr).print(Text(line, "dim"), no_wrap=True, overflow="ellipsis")
