"""Python processes that start with PyTorch and Triton imported. Loom reads its environment variables, and looks for its
compiler, only at a launch."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from triton_loom.testing import Forks


@functools.cache
def _forks() -> Forks:
    return Forks("torch", "triton")


def run_python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python script ...` or `python -m module ...`; return the completed process with its output."""
    return _forks().run(*arguments, COLUMNS="200", **environment)
