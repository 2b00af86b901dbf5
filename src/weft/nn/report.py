"""What became of the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Filter = Callable[[str, nn.Module], bool]  # of a module's name and the module: whether it is meant


@dataclass(frozen=True)
class Entry:
    """What became of one module or parameter."""

    name: str
    kind: str  # its class
    shape: tuple[int, ...]
    changed: bool
    what: str  # what it is now, or why it was left alone


@dataclass(frozen=True)
class Report:
    """What became of the modules of a model; printed, a line for each."""

    entries: tuple[Entry, ...]

    @property
    def changed(self) -> list[str]:
        """The names of what was changed."""
        return [entry.name for entry in self.entries if entry.changed]

    @property
    def left(self) -> dict[str, str]:
        """What was left alone, and why."""
        return {entry.name: entry.what for entry in self.entries if not entry.changed}

    def __str__(self) -> str:
        width = max((len(entry.name) for entry in self.entries), default=0)
        lines = [
            f"{'*' if entry.changed else '-'} {entry.name:{width}}  {entry.kind} {list(entry.shape)}: {entry.what}"
            for entry in self.entries
        ]
        return "\n".join([f"{len(self.changed)} of {len(self.entries)} changed", *lines])
