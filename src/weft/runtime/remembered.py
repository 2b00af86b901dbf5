"""What host code has worked out from sizes, strides and options, kept for later calls with the same ones.

It has one home, so that all of it can be forgotten together: a run with symbols for sizes leaves nothing behind.
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
