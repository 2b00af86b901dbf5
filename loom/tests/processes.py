"""Python processes that begin with PyTorch and Triton imported. Loom reads its environment variables, and looks for its
compiler, only when something is launched."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from triton_loom.testing import Forks


@functools.cache
def _forks() -> Forks:
    return Forks("torch", "triton")


def run_python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python script ...` or `python -m module ...` does, says and returns."""
    return _forks().run(*arguments, COLUMNS="200", **environment)
