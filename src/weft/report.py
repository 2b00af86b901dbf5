"""Report on the modules of a model that was changed in place."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """Outcome for one module or parameter."""

    kind: str  # what it was recognized as
    name: str
    module: str  # the class of the module, and the shape of a weight
    changed: bool
    what: str  # what it computes now, or why it was left alone


@dataclass
class Report:
    """Record of what was changed in a model and what was left alone. When printed, similar entries share a line."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def changed(self) -> list[str]:
        """Names of the modules and parameters that were changed."""
        return [entry.name for entry in self.entries if entry.changed]

    @property
    def left(self) -> dict[str, str]:
        """Names of everything left alone, with the reason."""
        return {entry.name: entry.what for entry in self.entries if not entry.changed}

    def count(self, kind: str) -> int:
        """Return how many modules of a kind were changed."""
        return sum(entry.kind == kind for entry in self.entries if entry.changed)

    def __str__(self) -> str:
        if not self.entries:
            return "nothing was changed: the model has no module that Weft computes"
        alike: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.entries:
            what = entry.what if entry.changed else f"left alone: {entry.what}"
            alike.setdefault((entry.kind, entry.module, what), []).append(entry.name)
        table = [("kind", "modules", "class", "weft")]
        for (kind, module, what), names in alike.items():
            first = names[0] or "(the model itself)"
            table.append(
                (kind, first if len(names) == 1 else f"{first} and {len(names) - 1} more", module, what)
            )
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]])
            for line in table
        )
