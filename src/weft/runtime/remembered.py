"""What host code works out of sizes, strides and options, and remembers: a call with the same ones works out nothing.

All of it has one home, so that whoever changes what answers depend on can have it forgotten, as a run with symbols for
sizes does at its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_known: list[Any] = []


def remembered(function: Callable[P, R], *, typed: bool = False) -> Callable[P, R]:
    """Decorate a function of hashable values: its answers to the last 4096 sets of values are kept. If `typed`, 1 and
    1.0 are two values."""
    known = functools.lru_cache(maxsize=4096, typed=typed)(function)
    _known.append(known)
    return cast("Callable[P, R]", known)


def forget() -> None:
    """Forget all answers."""
    for known in _known:
        known.cache_clear()
