"""Progress line on the terminal when building kernels takes long, so that nobody mistakes the first call for a hang.

Nothing is printed if the standard error of the process is not a terminal, in CI (the variable `CI`), with
`WEFT_QUIET=1`, or by ranks other than the first. The line appears after 2 seconds of building, and again after 20 and
200, with the number of kernels built so far.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .environment import is_on

SECONDS = 2.0  # build time before the first line
AGAIN = 10.0  # growth of this time for each further line


class Notice:
    """Clock of this process's kernel builds, with their number."""

    def __init__(self) -> None:
        self.built = 0
        self._due = SECONDS  # seconds of building before the next line
        self._spent = 0.0  # seconds of all builds that have ended
        self._since = 0.0  # start of the builds in progress
        self._under_way = 0
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Return a context for building a kernel, on any thread. Loading a built one does not count."""
        if is_quiet():
            yield
            return
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since, self._over = time.monotonic(), threading.Event()
                watch = threading.Thread(
                    target=self._watch, args=(self._over,), name="weft-notice", daemon=True
                )
                watch.start()
        try:
            yield
            with self._lock:
                self.built += 1
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self._over.set()
                    self._spent += time.monotonic() - self._since

    def _watch(self, over: threading.Event) -> None:
        """Print when due, until these builds are over."""
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
        return f"weft: building kernels ({self.built} done). Each is built once and cached in {cache}"


NOTICE = Notice()


def is_quiet() -> bool:
    """Return whether this process must print nothing."""
    if is_on("WEFT_QUIET") or is_on("CI"):
        return True
    if os.environ.get("RANK", "0") != "0":
        return True
    try:
        return not sys.stderr.isatty()
    except (AttributeError, ValueError):  # the process has no standard error, or it is closed
        return True


def _print(line: str) -> None:
    width = shutil.get_terminal_size().columns
    if len(line) > width:
        line = line[: width - 1] + "…"
    with suppress(OSError, ValueError):  # the terminal may be gone by now
        # A rich progress bar replaces sys.stderr while it is shown, and prints what is written there above itself.
        print(f"\x1b[2m{line}\x1b[0m", file=sys.stderr, flush=True)
