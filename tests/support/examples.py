"""Import the examples as modules to test their functions, and run them on several ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def example(name: str) -> ModuleType:
    """Return `examples/NAME.py` as an imported module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / f"examples/{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(name: str, *arguments: str, ranks: int) -> str:
    """Return the output of `examples/NAME.py` on that many ranks of this machine."""
    path = Path(__file__).parents[2] / f"examples/{name}.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launch, str(path), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
