"""Programs that simulate a machine without some packages."""

from __future__ import annotations

# Runs before weft is imported: hides the named packages, and Triton's backends that come from them.
WITHOUT = """
import importlib.util, sys
from importlib import metadata

missing = {missing!r}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
found, real = importlib.util.find_spec, metadata.entry_points
importlib.util.find_spec = lambda name, package=None: None if name in missing else found(name, package)


def entry_points(**group):
    if not group:
        return type("Groups", (), {{"select": staticmethod(entry_points)}})
    return metadata.EntryPoints(point for point in real(**group) if point.value not in missing)


metadata.entry_points = entry_points
"""


def without(missing: tuple[str, ...], code: str) -> str:
    """Return a program that runs as if packages were missing."""
    return WITHOUT.format(missing=missing) + code
