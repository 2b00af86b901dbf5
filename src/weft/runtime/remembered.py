"""Cache for what host code computes from sizes, strides and options.

All caches are registered here so that they can be cleared together: a run with symbolic sizes leaves nothing behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_caches: list[Any] = []


def remembered(function: Callable[P, R], *, typed: bool = False) -> Callable[P, R]:
    """Decorate a function of hashable arguments to cache its last 4096 results. If `typed`, 1 and 1.0 are different
    arguments."""
    cached = functools.lru_cache(maxsize=4096, typed=typed)(function)
    _caches.append(cached)
    return cast("Callable[P, R]", cached)


def forget() -> None:
    """Clear all caches."""
    for cached in _caches:
        cached.cache_clear()
