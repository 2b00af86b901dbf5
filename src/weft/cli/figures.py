"""Table of names and figures that stays readable in a narrow terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

GAP = "  "
Cell = str | Text


class Figures:
    """Table with names in its first column and figures in the others. Nothing is folded or cut: if the width does not
    suffice, long names get lines of their own above their figures, and columns that do not fit beside short names go to
    another table below.

    >>> lines = [["op", "kernels", "proven"], ["norm", "3", "17"]]
    >>> Console(width=80).print(Figures(lines))
    op    kernels  proven
    norm        3      17
    >>> Console(width=16).print(Figures(lines))
    op    kernels
    norm        3
    <BLANKLINE>
    op    proven
    norm      17
    """

    def __init__(
        self,
        lines: Iterable[Sequence[Cell]],
        *,
        title: str = "",
        caption: str = "",
        styles: Sequence[str] = (),
    ) -> None:
        """Take the headings as the first line. `styles` are those of the other lines, if any."""
        headings, *rows = ([_text(cell) for cell in line] for line in lines)
        for heading in headings:
            heading.stylize("dim")
        for row, style in zip(rows, styles, strict=False):
            for cell in row:
                cell.stylize(style)
        self.lines, self.title, self.caption = [headings, *rows], title, caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        if self.title:
            yield Text(self.title)
        for line in self._shown(options.max_width):
            line.rstrip()
            line.no_wrap, line.overflow = True, "ignore"
            yield line
        if self.caption:
            yield Text(self.caption, "dim")

    def _shown(self, width: int) -> Iterator[Text]:
        longest, *widths = (max(map(len, column)) for column in zip(*self.lines, strict=True))
        groups = _grouped(widths, width - longest)
        if len(groups) > 1 and 5 * longest > 2 * width:
            for line in self.lines:
                yield line[0].copy()
                for group in _grouped(widths, width):
                    yield _joined(line, widths, group)
            return
        for number, group in enumerate(groups):
            if number:
                yield Text()
            for line in self.lines:
                name = line[0].copy()
                name.pad_right(longest - len(name))
                yield name + _joined(line, widths, group)


def _text(cell: Cell) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text(cell)


def _grouped(widths: Sequence[int], available: int) -> list[list[int]]:
    """Return the column numbers in groups that fit the available width."""
    groups: list[list[int]] = [[]]
    remaining = available
    for number, width in enumerate(widths, 1):
        if groups[-1] and width + len(GAP) > remaining:
            groups.append([])
            remaining = available
        groups[-1].append(number)
        remaining -= width + len(GAP)
    return groups


def _joined(line: Sequence[Text], widths: Sequence[int], group: Iterable[int]) -> Text:
    joined = Text()
    for number in group:
        cell = line[number].copy()
        cell.pad_left(widths[number - 1] - len(cell))
        joined.append(GAP).append_text(cell)
    return joined
