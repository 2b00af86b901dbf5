"""Pages that are made of documents outside of docs/, and of tables that machines read."""

from __future__ import annotations

from pathlib import Path

from . import versions
from .links import ELSEWHERE, rewrite

ROOT = Path(__file__).parents[1]


def elsewhere() -> dict[str, str]:
    """Place on the site and text."""
    found = {"versions.md": supported(), "assets/weft.css": (ROOT / "website/weft.css").read_text()}
    for source, place in ELSEWHERE.items():
        if place == "index.md":  # docs/ has one of its own
            continue
        text = (ROOT / source).read_text()
        found[place] = rewrite(text, source, place) if place.endswith(".md") else text
    return found


def supported() -> str:
    return f"""# Versions

What Weft and Loom are tested with. The table is `.ci/versions`, which continuous integration installs from.

{versions.table()}

- **every change**: the whole suite, on a machine without a GPU.
- **`.ci/run floor`**, **`.ci/run frameworks`**: by night, and by whoever moves a version. How far the frameworks were
  tried: [frameworks](integrations.md).
- Linux on x86-64. A compiler for C++17, `g++` or `clang++`, for Loom.
- GPUs: compiled for, never run on. [What has not been measured](unmeasured.md).
"""
