"""How the commands look: tables without lines, and a bar for what takes long."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..runtime import catalogue


def plain_table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim",
        pad_edge=False,
    )  # fmt: skip


def progress_bar() -> Progress:
    """On stderr, and gone when it is over. A task's description says what is being done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def complain(text: str) -> None:
    """Say on stderr why a command does nothing."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def no_such_op(ops: Sequence[str]) -> str:
    """What to complain of if one of the ops that a command was given is none; otherwise nothing."""
    wrong = [op for op in ops if op not in catalogue]
    return f"there is no op {wrong[0]!r}; there are {', '.join(catalogue)}" if wrong else ""
