"""Kernels' assumptions about integers that they load from memory: indices, counts and ends of groups.

A family declares them beside its truths, as `Family.loaded`. They are assumptions of the proofs of memory safety, and
every run of the catalogue's checks tests whether they hold (`weft.lab.assumptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any


@dataclass(frozen=True)
class Given:
    """Arguments of a launch, as integers or symbols. `given["rows"]` is an integer argument, and `given["x_ptr", 0]` a
    size of a tensor."""

    integers: Mapping[str, Any]
    shapes: Mapping[str, Sequence[Any]]

    def __getitem__(self, what: str | tuple[str, int]) -> Any:
        return self.integers[what] if isinstance(what, str) else self.shapes[what[0]][what[1]]

    def rows(self, tensor: str) -> Any:
        """Return how many rows a tensor has, all dimensions but its last merged."""
        return reduce(mul, self.shapes[tensor][:-1], 1)


# An integer, the name of an integer argument of the kernel, or a function of the launch's arguments.
Bound = int | str | Callable[[Given], Any]


@dataclass(frozen=True)
class Loaded:
    """Bounds: least <= element < below, or <= most. A side without a bound is unrestricted."""

    least: Bound | None = None
    below: Bound | None = None
    most: Bound | None = None
    ascending: bool = False  # no element is less than its predecessor
    distinct: bool = False  # no two elements are equal, not counting the one at the index of `apart`
    shared: int | None = None  # a value that distinct elements may have in common: the least or the largest
    # The parameter that holds the inverse: if element i is j >= 0, its element j is i. So no two nonnegative elements
    # are equal.
    inverse: str | None = None
    apart: tuple[Bound, Loaded] | None = None  # an index whose element has other bounds, and these


def _value(bound: Bound, launch: Given) -> Any:
    return bound if isinstance(bound, int) else launch[bound] if isinstance(bound, str) else bound(launch)


def exception_index(bounds: Loaded, launch: Given) -> Any:
    """Return the index of the element with other bounds, or None."""
    return None if bounds.apart is None else _value(bounds.apart[0], launch)


def within(bounds: Loaded, launch: Given, value: Any) -> list[Any]:
    """Return comparisons that state that a value is within its bounds."""
    comparisons = []
    if bounds.least is not None:
        comparisons.append(value >= _value(bounds.least, launch))
    if bounds.below is not None:
        comparisons.append(value < _value(bounds.below, launch))
    if bounds.most is not None:
        comparisons.append(value <= _value(bounds.most, launch))
    return comparisons
