"""Text in columns, for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    """Format rows as aligned columns, one per character of `aligned`: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def in_units(number: float) -> str:
    """Format a number of bytes compactly."""
    for unit in ("B", "kB", "MB"):
        if number < 10_000:
            return f"{number:,.4g} {unit}"
        number /= 1000
    return f"{number:,.4g} GB"
