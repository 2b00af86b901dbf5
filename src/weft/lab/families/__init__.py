"""Every family of ops: the problems it is judged on, what it must compute, and what is known of its kernels.

One registry. Tests, benchmarks, audits, the ahead-of-time builder and the docs look ops and kernels up here. A new op
adds a module with a `FAMILY` and inherits every check. Importing it needs neither Loom nor NumPy, since `weft bench`
and `weft aot build` need neither on a GPU: the functions of truths that need them import them.

>>> from weft.lab.families import for_op
>>> str(for_op("norm", "inference")[0])
'norm:llama3-8b/hidden:residual:1'
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ..chain import BuildChain
from ..family import Encode, Family, Moved, NameResults, Width
from ..problem import Call, Inputs, Workload
from ..symbolic.loaded import Loaded
from ..truth import Truth

__all__ = [
    "FAMILIES",
    "WORKLOADS",
    "Call",
    "Inputs",
    "Workload",
    "chain_of",
    "distinct",
    "encoded_of",
    "flops_of",
    "for_op",
    "loaded_of",
    "moved_of",
    "results_of",
    "spills_of",
    "truth_of",
    "width_of",
]

Key = TypeVar("Key")
Value = TypeVar("Value")


def _merged(tables: Iterable[Mapping[Key, Value]]) -> dict[Key, Value]:
    return {key: value for table in tables for key, value in table.items()}


FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module.name}").FAMILY
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
)
WORKLOADS: tuple[Workload, ...] = tuple(workload for family in FAMILIES for workload in family.workloads)

_FLOPS = _merged(family.flops for family in FAMILIES)
_TRUTHS = _merged(family.truths for family in FAMILIES)
_ENCODED = _merged(family.encoded for family in FAMILIES)
_RESULTS = _merged(family.results for family in FAMILIES)
_CHAINS = _merged(family.chains for family in FAMILIES)
_MOVED = _merged(family.moved for family in FAMILIES)
_WIDTHS = _merged(family.widths for family in FAMILIES)
_SPILLS = _merged(family.spills for family in FAMILIES)
_LOADED = _merged(family.loaded for family in FAMILIES)


# ---- workloads ------------------------------------------------------------------------------------------------


def for_op(op: str, *tags: str) -> tuple[Workload, ...]:
    """Return the workloads of an op of the catalogue that have all of the tags."""
    return tuple(w for w in WORKLOADS if w.op == op and w.tags.issuperset(tags))


def distinct(workloads: tuple[Workload, ...] = WORKLOADS) -> tuple[Workload, ...]:
    """Return one workload for each op, shape and set of options: of those that differ only in rows, the first."""
    return tuple({(w.op, w.name, w.options): w for w in reversed(workloads)}.values())[::-1]


def flops_of(workload: Workload) -> int | None:
    """Return the floating-point operations of the products of a workload, or None if it has no products."""
    return _FLOPS[workload.op](workload) if workload.op in _FLOPS else None


# ---- what ops must compute ------------------------------------------------------------------------------------


def truth_of(op: str) -> Truth | None:
    """Return the truth of an op, or None if its reference serves."""
    return _TRUTHS.get(op)


def encoded_of(op: str) -> Encode | None:
    """Return the function that computes the elements behind an op's quantized results, or None for the usual one."""
    return _ENCODED.get(op)


def results_of(function: Callable[..., Any]) -> NameResults | None:
    """Return the function that names the results of a public function, or None if they name themselves."""
    return _RESULTS.get(function)


def chain_of(op: str, options: str) -> BuildChain | None:
    """Return the function that builds the chain of an op with a set of options, or None if there is no chain."""
    return _CHAINS.get((op, options))


# ---- kernels --------------------------------------------------------------------------------------------------


def moved_of(kernel: str) -> Moved | None:
    """Return the tensors that a kernel moves in whole tiles, or None if the usual names of parameters tell."""
    return _MOVED.get(kernel)


def width_of(kernel: str) -> Width | None:
    """Return the width of accesses that a kernel needs besides the usual ones, or None."""
    return _WIDTHS.get(kernel)


def spills_of(kernel: str, target: str) -> int:
    """Return how many bytes a kernel is known to spill on a target."""
    return _SPILLS.get((kernel, target), 0)


def loaded_of(kernel: str, parameter: str) -> Loaded | None:
    """Return the assumptions of a kernel about the integers in a tensor, or None if it makes none."""
    return _LOADED.get((kernel, parameter))
