"""The examples as modules, for tests of their functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def example(name: str) -> ModuleType:
    """`examples/NAME.py`, as if it were imported."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / f"examples/{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
