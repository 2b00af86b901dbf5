"""What kernels take for granted of integers that they load from memory: indices, counts and ends of groups.

A family declares it beside its truths, as `LOADED` by kernel and parameter. It is an assumption where a kernel is
proven memory-safe, and every run of the catalogue's checks asks whether it is true there (`holding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

import torch

from ...runtime import observing
from ..truths import declared


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


@contextmanager
def holding() -> Iterator[None]:
    """In the block, every launch is refused that is given integers which are not as declared."""

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        leaves = [leaf.name for leaf in launch.kernel.layout.leaves]
        given = Given(
            dict(zip(leaves[len(pointers) :], integers, strict=False)),
            {name: t.shape for name, t in zip(leaves, pointers, strict=False) if t is not None},
        )
        tensors = {name: t for name, t in zip(leaves, pointers, strict=False) if t is not None}
        for name, tensor in tensors.items():
            known = declared("LOADED").get((launch.kernel.name, name))
            if known is not None and tensor.numel():
                what = f"{name} of {launch.kernel.name}"
                _check(known, what, tensor, given)
                if known.inverse in tensors:
                    _check_inverse(what, tensor, tensors[known.inverse])

    with observing(note):
        yield


def _check(known: Loaded, what: str, tensor: torch.Tensor, given: Given) -> None:
    flat = tensor.detach().cpu().long().flatten()
    place = place_apart(known, given)
    parts = [(known, flat)]
    if known.apart is not None and place is not None and 0 <= place < flat.numel():
        parts = [
            (known, torch.cat([flat[:place], flat[place + 1 :]])),
            (known.apart[1], flat[place : place + 1]),
        ]
    for said, elements in parts:
        for extreme in elements.aminmax() if elements.numel() else ():
            if not all(within(said, given, int(extreme))):
                raise AssertionError(f"{what} has the element {int(extreme)}, which {said} does not allow")
    if known.ascending and bool((flat[1:] < flat[:-1]).any()):
        raise AssertionError(f"{what} does not ascend")
    if known.distinct and parts[0][1].unique().numel() < parts[0][1].numel():
        raise AssertionError(f"{what} has an element twice")


def _check_inverse(what: str, there: torch.Tensor, back: torch.Tensor) -> None:
    there, back = (t.detach().cpu().long().flatten() for t in (there, back))
    places = (there >= 0).nonzero()[:, 0]
    targets = there[places]
    if bool((targets >= back.numel()).any()) or bool((back[targets] != places).any()):
        raise AssertionError(f"{what} does not lead back to where it comes from")
