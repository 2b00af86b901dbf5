"""Split of ops into tests of the day, run with every change, and tests of the night."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft


def by_family() -> Iterator[Any]:
    """Yield parameters for all ops. The last op of each family, a forward one with few kernels, runs by day; the others
    are slow tests."""
    families = {op: weft.catalogue[op].launch.__module__.split(".")[2] for op in weft.catalogue}
    last = {family: op for op, family in families.items()}.values()
    for op in weft.catalogue:
        yield pytest.param(op, marks=[] if op in last else [pytest.mark.slow])
