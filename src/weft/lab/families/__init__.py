"""The problems that every op is judged on: shapes of real models, their inputs, the bytes that must move.

One registry. Tests, benchmarks, audits, the ahead-of-time builder and the docs iterate over it; a new op adds a
file of workloads here and inherits every check. `FLOPS` in such a file says how many operations its products have.

>>> from weft.lab.families import for_op
>>> str(for_op("norm", "inference")[0])
'norm:llama3-8b/hidden:residual:1'
"""

import pkgutil
from importlib import import_module

from ..problem import Call, Inputs, Workload

__all__ = ["WORKLOADS", "Call", "Inputs", "Workload", "distinct", "flops_of", "for_op"]

_MODULES = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
WORKLOADS: tuple[Workload, ...] = tuple(w for module in _MODULES for w in getattr(module, "WORKLOADS", ()))

_FLOPS = {op: count for module in _MODULES for op, count in getattr(module, "FLOPS", {}).items()}


def flops_of(workload: Workload) -> int | None:
    """The floating-point operations of the products of a workload; None if it has no products."""
    return _FLOPS[workload.op](workload) if workload.op in _FLOPS else None


def for_op(op: str, *tags: str) -> tuple[Workload, ...]:
    """The workloads of an op of the catalogue that have all of the tags."""
    return tuple(w for w in WORKLOADS if w.op == op and w.tags.issuperset(tags))


def distinct(workloads: tuple[Workload, ...] = WORKLOADS) -> tuple[Workload, ...]:
    """One workload for each op, shape and set of options: those that differ in the number of rows alone, once."""
    return tuple({(w.op, w.name, w.options): w for w in reversed(workloads)}.values())[::-1]
