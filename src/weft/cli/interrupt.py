"""Ctrl-C: a command ends in one line, within a second, and takes the processes that it started with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .screen import complain

EXIT_CODE = 130  # as shells report a program that SIGINT ended
GRACE = 0.4  # seconds in which a command ends by itself


class Interrupt:
    """Whether a command was interrupted, and whether somebody has said so."""

    told = False

    def tell(self) -> None:
        """Say so, once."""
        if not self.told:
            self.told = True
            complain("interrupted")


@contextmanager
def promptly() -> Iterator[Interrupt]:
    """End the process soon after a SIGINT that arrives in the block.

    Python raises KeyboardInterrupt only between two of its own steps, and a kernel, a product or a solver may compute
    for minutes in one. A thread hears of the signal at once, and ends the process if it is still there after `GRACE`,
    also if Python is waiting for something at its end.
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
        while numbers := signals.read(64):  # nothing when the block is over
            if signal.SIGINT in numbers:
                time.sleep(GRACE)
                _end(interrupt)


def _end(interrupt: Interrupt) -> None:
    kill_children()
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(2, b"\r\x1b[K\x1b[?25h")  # a progress bar may be there, and hides the cursor
    with suppress(Exception):
        interrupt.tell()
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def kill_children() -> None:
    """End the processes that `multiprocessing` has started, whatever they are doing."""
    for child in multiprocessing.active_children():
        child.kill()


@contextmanager
def deaf_children() -> Iterator[None]:
    """Let processes that are started in the block ignore Ctrl-C: their parent ends them, in silence. A SIGINT that
    arrives meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
