"""Terminal output of the commands: borderless tables, progress and refusals."""

from __future__ import annotations

import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from ..runtime.environment import is_on


class Refused(Exception):
    """Refusal of a request: what is wrong with it, and what to do instead."""


def complain(text: str) -> None:
    """Print on stderr why a command does nothing or stops."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def plain_table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim",
        pad_edge=False,
    )  # fmt: skip


class Steps:
    """Progress of a command on stderr: on a terminal a bar that disappears at the end, elsewhere an occasional line, so
    that a log shows that the command is alive. `WEFT_QUIET=1` suppresses the lines.

        with Steps(len(tasks)) as steps:
            for task in tasks:
                steps.say(str(task))
                ...
                steps.advance()
    """

    FIRST, LONGEST = 10.0, 60.0  # seconds to the first line and, doubling, between later ones

    def __init__(self, total: int | None, text: str = "") -> None:
        self.total, self.text, self.done = total, text, 0
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._over = threading.Event()

    def __enter__(self) -> Steps:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # A long text yields to the bar: in a terminal of 80 columns the line stays one line.
            description = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            )
            columns = (description, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True, expand=True)
            self._bar.add_task(self.text, total=self.total)
            self._bar.start()
        elif not is_on("WEFT_QUIET"):
            threading.Thread(target=self._print_lines, name="weft-steps", daemon=True).start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show what is being done now."""
        self.text = text
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)

    def advance(self) -> None:
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        """Set how many steps are done."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def _print_lines(self) -> None:
        begin, pause = time.monotonic(), self.FIRST
        while not self._over.wait(pause):
            pause = min(2 * pause, self.LONGEST)
            self._console.print(
                self.line(time.monotonic() - begin), markup=False, highlight=False, soft_wrap=True
            )

    def line(self, seconds: float) -> str:
        """Return the line that a log shows after so many seconds."""
        count = "" if self.total is None else f"{self.done} of {self.total} done, "
        return f"weft: {count}{seconds:.0f} s: {Text.from_markup(self.text).plain}".removesuffix(": ")
