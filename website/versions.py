"""The table of supported versions, `.ci/versions`: read, and written as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

# What a role of a version means, in the order in which the table shows them.
ROLES = {
    "main": "every change",
    "any": "every change (whichever pip finds)",
    "newest": "`.ci/run floor`",
    "between": "`.ci/run floor`",
    "floor": "`.ci/run floor`",
    "oldest": "`.ci/run frameworks`",
    "latest": "`.ci/run frameworks`",
    "seen": "once, by hand",
}


class Supported(NamedTuple):
    name: str
    package: str
    allowed: str  # what pyproject.toml asks for
    tested: dict[str, str]  # version by role


def supported() -> dict[str, Supported]:
    """The rows of `.ci/versions` by name."""
    found = {}
    for line in (ROOT / ".ci" / "versions").read_text().splitlines():
        if line and not line.startswith("#"):
            name, package, allowed, tested, *_ = (cell.strip() for cell in line.split("|"))
            versions = dict(item.split("=", 1) for item in tested.split())
            found[name] = Supported(name, package, allowed, versions)
    return found


def table() -> str:
    """The Markdown that CONTRIBUTING.md and the site show."""
    lines = ["| | allowed | tested, and by what |", "|---|---|---|"]
    for row in supported().values():
        by: dict[str, list[str]] = {}
        for role, version in sorted(row.tested.items(), key=lambda item: list(ROLES).index(item[0])):
            by.setdefault(ROLES[role], []).append(version)
        tested = "; ".join(f"{', '.join(versions)}: {what}" for what, versions in by.items())
        lines.append(f"| {row.package} | {row.allowed} | {tested} |")
    return "\n".join(lines)
