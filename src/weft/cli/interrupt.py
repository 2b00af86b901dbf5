"""Ctrl-C handling: a command ends in one line, within a second, along with the processes it started."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .screen import complain

EXIT_CODE = 130  # shells report this for a program that SIGINT ended
GRACE = 0.4  # seconds that a command has to end by itself


class Interrupt:
    """Interruption of a command, which is reported once."""

    reported = False

    def report(self) -> None:
        """Report the interruption, once."""
        if not self.reported:
            self.reported = True
            complain("interrupted")


@contextmanager
def promptly() -> Iterator[Interrupt]:
    """End the process soon after a SIGINT inside the block.

    Python raises KeyboardInterrupt only between its own steps, and a kernel, a product or a solver may compute for
    minutes in one. A thread is notified at once and ends the process if it is still running after `GRACE`, even if
    Python is waiting for something on exit.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, interrupt), name="weft-interrupt", daemon=True).start()
    try:
        yield interrupt
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writer)


def _watch(reader: int, interrupt: Interrupt) -> None:
    with os.fdopen(reader, "rb", buffering=0) as signals:
        while received := signals.read(64):  # empty when the block is over
            if signal.SIGINT in received:
                time.sleep(GRACE)
                _end(interrupt)


def _end(interrupt: Interrupt) -> None:
    kill_children()
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(2, b"\r\x1b[K\x1b[?25h")  # clear a progress bar, which hides the cursor
    with suppress(Exception):
        interrupt.report()
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def kill_children() -> None:
    """Kill the processes that `multiprocessing` has started, whatever they are doing."""
    for child in multiprocessing.active_children():
        child.kill()


def die_with_parent() -> None:
    """End this process as soon as the one that started it ends, however that ends: a solver hears no signal."""
    threading.Thread(target=_outlive, args=(multiprocessing.parent_process(),), daemon=True).start()


def _outlive(parent: multiprocessing.process.BaseProcess | None) -> None:
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Let processes started in the block ignore Ctrl-C: their parent ends them silently. A SIGINT that arrives
    meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
