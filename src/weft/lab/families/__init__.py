"""Registry of op families: their workloads, truths and facts about their kernels.

Tests, benchmarks, audits, the ahead-of-time builder and the docs look up ops and kernels here. A new op adds a module
with a `FAMILY` and inherits every check. Importing this package needs neither Loom nor NumPy, because `weft bench` and
`weft aot build` do not on a GPU; truths that need them import them when called.

>>> from weft.lab.families import for_op
>>> str(for_op("norm", "inference")[0])
'norm:llama3-8b/hidden:residual:1'
"""

import pkgutil
import re
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
    "OPS",
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
# Those that a program defines itself have no workloads.
OPS: tuple[str, ...] = tuple(dict.fromkeys(workload.op for workload in WORKLOADS))

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
    """Return the workloads of an op that have all of the tags."""
    return tuple(w for w in WORKLOADS if w.op == op and w.tags.issuperset(tags))


def distinct(workloads: tuple[Workload, ...] = WORKLOADS) -> tuple[Workload, ...]:
    """Return one workload per op, shape and set of options: the first of those that differ only in rows."""
    return tuple({(w.op, w.name, w.options): w for w in reversed(workloads)}.values())[::-1]


def flops_of(workload: Workload) -> int | None:
    """Return the FLOPs of a workload's products, or None if it has no products."""
    return _FLOPS[workload.op](workload) if workload.op in _FLOPS else None


# ---- truths ---------------------------------------------------------------------------------------------------


def truth_of(op: str) -> Truth | None:
    """Return the truth of an op, or None if its reference is the truth."""
    return _TRUTHS.get(op)


def encoded_of(op: str) -> Encode | None:
    """Return the function that computes an op's results before quantization, or None for the default."""
    return _ENCODED.get(op)


def results_of(function: Callable[..., Any]) -> NameResults | None:
    """Return the function that names the results of a public function, or None if its results have names."""
    return _RESULTS.get(function)


def chain_of(op: str, options: str) -> BuildChain | None:
    """Return the builder of the chain for an op with a set of options, or None."""
    return _CHAINS.get((op, options))


# ---- kernels --------------------------------------------------------------------------------------------------


def _without_digest(kernel: str) -> str:
    """Return the name of a kernel that is generated, without the digest of its text."""
    return re.sub("_[0-9a-f]{12}$", "", kernel)


def moved_of(kernel: str) -> Moved | None:
    """Return the tensors that a kernel moves in whole tiles, or None if the parameter names follow the convention."""
    return _MOVED.get(_without_digest(kernel))


def width_of(kernel: str) -> Width | None:
    """Return the access width that a kernel needs beyond the default, or None."""
    return _WIDTHS.get(_without_digest(kernel))


def spills_of(kernel: str, target: str) -> int:
    """Return the number of bytes that a kernel is known to spill on a target."""
    return _SPILLS.get((_without_digest(kernel), target), 0)


def loaded_of(kernel: str, parameter: str) -> Loaded | None:
    """Return a kernel's assumptions about the integers in a tensor, or None if it makes none."""
    return _LOADED.get((_without_digest(kernel), parameter))
