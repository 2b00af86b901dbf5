"""Assumptions of kernels about the integers that they load, checked where the kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime import observing
from .families import loaded_of
from .symbolic.loaded import Given, Loaded, place_apart, within


@contextmanager
def holding() -> Iterator[None]:
    """Refuse, within the block, every launch whose integers in memory are not as its kernel's family declares."""

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        leaves = [leaf.name for leaf in launch.kernel.layout.leaves]
        arguments = Given(
            dict(zip(leaves[len(pointers) :], integers, strict=False)),
            {name: t.shape for name, t in zip(leaves, pointers, strict=False) if t is not None},
        )
        tensors = {name: t for name, t in zip(leaves, pointers, strict=False) if t is not None}
        for name, tensor in tensors.items():
            assumed = loaded_of(launch.kernel.name, name)
            if assumed is not None and tensor.numel():
                what = f"{name} of {launch.kernel.name}"
                _check(assumed, what, tensor, arguments)
                if assumed.inverse in tensors:
                    _check_inverse(what, tensor, tensors[assumed.inverse])

    with observing(note):
        yield


def _check(assumed: Loaded, what: str, tensor: torch.Tensor, arguments: Given) -> None:
    """Raise if an element of a tensor is not within its bounds, or the elements do not ascend or differ as declared."""
    flat = tensor.detach().cpu().long().flatten()
    place = place_apart(assumed, arguments)
    parts = [(assumed, flat)]
    if assumed.apart is not None and place is not None and 0 <= place < flat.numel():
        parts = [
            (assumed, torch.cat([flat[:place], flat[place + 1 :]])),
            (assumed.apart[1], flat[place : place + 1]),
        ]
    for allowed, elements in parts:
        for extreme in elements.aminmax() if elements.numel() else ():
            if not all(within(allowed, arguments, int(extreme))):
                raise AssertionError(f"{what} has the element {int(extreme)}, which {allowed} does not allow")
    if assumed.ascending and bool((flat[1:] < flat[:-1]).any()):
        raise AssertionError(f"{what} does not ascend")
    if assumed.distinct and parts[0][1].unique().numel() < parts[0][1].numel():
        raise AssertionError(f"{what} has an element twice")


def _check_inverse(what: str, there: torch.Tensor, back: torch.Tensor) -> None:
    """Raise unless element `there[i]` of `back` is i, wherever `there[i]` is not negative."""
    there, back = (t.detach().cpu().long().flatten() for t in (there, back))
    places = (there >= 0).nonzero()[:, 0]
    targets = there[places]
    if bool((targets >= back.numel()).any()) or bool((back[targets] != places).any()):
        raise AssertionError(f"{what} does not lead back to where it comes from")
