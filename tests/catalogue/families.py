"""Calls with options that no single workload combines.

They are in `CASES` of the modules `cases*.py` in folders of `tests/ops`, by name, for a number of rows and of
columns."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

OPS = Path(__file__).parents[1] / "ops"


@cache
def cases() -> dict[str, Any]:
    """Return the cases of all families."""
    modules = [
        importlib.import_module(f"tests.ops.{path.parent.name}.{path.stem}")
        for path in sorted(OPS.glob("*/cases*.py"))
    ]
    return {name: make for module in modules for name, make in module.CASES.items()}
