"""What the ops must compute, written down once more in float64. A module here may have

- `TRUTHS`, by op: what the results and gradients of a call must be, see `weft.lab.truth`. An op without a truth is
  held to its own reference in float64.
- `ENCODED`, by op: the numbers of a call that its quantised results encode, by the names of those results. Without it:
  what the same call computes from fp32 inputs when nothing is quantised.
- `RESULTS`, by public function: the names of what a call of it returns, where that is a plain tuple.

and about kernels, as compiled for GPUs, what is not expected of every kernel:

- `MOVED`, by kernel: which tensors (read, written) it reads and writes in whole tiles, if the usual names do not tell.
- `WIDTHS`, by kernel: a width of accesses in bits that it needs besides the usual ones, on targets that begin so.
- `SPILLS`, by kernel and target: bytes that it spills although it should not.
- `LOADED`, by kernel and parameter: what it assumes of the integers in that tensor, see `weft.lab.symbolic.loaded`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any


@cache
def declared(what: str) -> dict[Any, Any]:
    """What all modules here say under that name."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {key: value for module in modules for key, value in getattr(module, what, {}).items()}
