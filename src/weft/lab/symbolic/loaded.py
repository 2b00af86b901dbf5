"""Assumptions of kernels about integers that they load from memory: indices, counts and ends of groups.

A family declares them beside its truths, as `Family.loaded`. They are assumptions where a kernel is proven
memory-safe, and every run of the catalogue's checks asks whether they are true (`weft.lab.assumptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any


@dataclass(frozen=True)
class Given:
    """What a launch is given, in numbers or in symbols: `given["rows"]` is an integer argument, and `given["x_ptr", 0]`
    a size of a tensor."""

    integers: Mapping[str, Any]
    shapes: Mapping[str, Sequence[Any]]

    def __getitem__(self, what: str | tuple[str, int]) -> Any:
        return self.integers[what] if isinstance(what, str) else self.shapes[what[0]][what[1]]

    def rows(self, tensor: str) -> Any:
        """How many rows a tensor has, all dimensions but its last taken together."""
        return reduce(mul, self.shapes[tensor][:-1], 1)


# A number, the name of an integer argument of the kernel, or what can be computed from such.
Bound = int | str | Callable[[Given], Any]


@dataclass(frozen=True)
class Loaded:
    """least <= every element < below, or <= most. Without a bound nothing is known on that side."""

    least: Bound | None = None
    below: Bound | None = None
    most: Bound | None = None
    ascending: bool = False  # no element is less than the one before it
    distinct: bool = False  # no two elements are the same, the one at the place apart not counted
    # The parameter that leads back: where element i is j, and not negative, element j of that is i. So no two elements
    # that are not negative are the same.
    inverse: str | None = None
    apart: tuple[Bound, Loaded] | None = None  # a place where something else is known of the element


def _value(bound: Bound, given: Given) -> Any:
    return bound if isinstance(bound, int) else given[bound] if isinstance(bound, str) else bound(given)


def place_apart(known: Loaded, given: Given) -> Any:
    """The place of which something else is known, or None."""
    return None if known.apart is None else _value(known.apart[0], given)


def within(known: Loaded, given: Given, value: Any) -> list[Any]:
    """That a value is within its bounds, as comparisons."""
    said = []
    if known.least is not None:
        said.append(value >= _value(known.least, given))
    if known.below is not None:
        said.append(value < _value(known.below, given))
    if known.most is not None:
        said.append(value <= _value(known.most, given))
    return said
