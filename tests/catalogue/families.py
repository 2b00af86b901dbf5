"""What the families of ops declare beside their tests: found by looking there, listed nowhere.

A module `truth*.py` or `cases*.py` in a folder of `tests/ops` may have

- `TRUTHS`, by op: what the results and gradients of a call must be, see `tests.support.truth`. An op without a truth is
  held to its own reference in float64.
- `ENCODED`, by op: the numbers of a call that its quantised results encode, by the names of those results. Without it:
  what the same call computes from fp32 inputs when nothing is quantised.
- `RESULTS`, by public function: the names of what a call of it returns, where that is a plain tuple.
- `CASES`, by name: calls with the options that no single workload has together, for a number of rows and of columns.

and about kernels, as compiled for GPUs, what `tests/runtime/test_compile.py` does not expect of every kernel:

- `MOVED`, by kernel: which tensors (read, written) it reads and writes in whole tiles, if the usual names do not tell.
- `WIDTHS`, by kernel: a width of accesses in bits that it needs besides the usual ones, on targets that begin so.
- `SPILLS`, by kernel and target: bytes that it spills although it should not.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

OPS = Path(__file__).parents[1] / "ops"


@cache
def declared(what: str) -> dict[Any, Any]:
    """What all families say under that name."""
    paths = sorted([*OPS.glob("*/truth*.py"), *OPS.glob("*/cases*.py")])
    modules = [importlib.import_module(f"tests.ops.{path.parent.name}.{path.stem}") for path in paths]
    return {key: value for module in modules for key, value in getattr(module, what, {}).items()}
