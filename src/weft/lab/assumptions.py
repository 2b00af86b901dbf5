"""Check the kernels' assumptions about the integers that they load, at every launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime import observing
from .families import loaded_of
from .symbolic.loaded import Given, Loaded, exception_index, within


@contextmanager
def holding() -> Iterator[None]:
    """Refuse, within the block, every launch whose loaded integers break the declaration in the kernel's family."""

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
    """Raise if an element is out of bounds, or if the elements do not ascend or differ as declared."""
    flat = tensor.detach().cpu().long().flatten()
    exception_at = exception_index(assumed, arguments)
    groups = [(assumed, flat)]
    if assumed.apart is not None and exception_at is not None and 0 <= exception_at < flat.numel():
        groups = [
            (assumed, torch.cat([flat[:exception_at], flat[exception_at + 1 :]])),
            (assumed.apart[1], flat[exception_at : exception_at + 1]),
        ]
    for allowed, elements in groups:
        for extreme in elements.aminmax() if elements.numel() else ():
            if not all(within(allowed, arguments, int(extreme))):
                raise AssertionError(f"{what} has the element {int(extreme)}, which {allowed} does not allow")
    if assumed.ascending and bool((flat[1:] < flat[:-1]).any()):
        raise AssertionError(f"{what} does not ascend")
    different = groups[0][1] if assumed.shared is None else groups[0][1][groups[0][1] != assumed.shared]
    if assumed.distinct and different.unique().numel() < different.numel():
        raise AssertionError(f"{what} has an element twice")


def _check_inverse(what: str, forward: torch.Tensor, inverse: torch.Tensor) -> None:
    """Raise unless `inverse[forward[i]]` is i wherever `forward[i]` is not negative."""
    forward, inverse = (t.detach().cpu().long().flatten() for t in (forward, inverse))
    indices = (forward >= 0).nonzero()[:, 0]
    targets = forward[indices]
    if bool((targets >= inverse.numel()).any()) or bool((inverse[targets] != indices).any()):
        raise AssertionError(f"{what} is not undone by its inverse")
