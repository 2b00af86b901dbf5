"""Products of choices, of which some cases always run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*choices: Sequence[Any], together: int = 2) -> list[Any]:
    """Return parameters for the product of some choices. The cases that always run have every combination of values of
    any `together` of the choices, as few as a greedy search finds, with no value much more often than another; the
    other cases are slow."""

    def combinations(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), together))

    cases = list(itertools.product(*(range(len(values)) for values in choices)))
    missing = set().union(*map(combinations, cases))
    always = set()
    used: Counter[tuple[int, int]] = Counter()
    while missing:
        best = max(
            cases,
            key=lambda case: (
                len(combinations(case) & missing),
                -sum(used[value] for value in enumerate(case)),
            ),
        )
        always.add(best)
        used.update(enumerate(best))
        missing -= combinations(best)
    return [
        pytest.param(
            *(values[i] for values, i in zip(choices, case, strict=True)),
            marks=[] if case in always else [pytest.mark.slow],
        )
        for case in cases
    ]
