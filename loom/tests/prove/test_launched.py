"""Proven kernels are launched with sizes of their contracts, and the sanitizer finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import z3
from prove.launches import LAUNCHES
from prove.mutants import kernels
from triton_loom.prove import Contract, Example
from triton_loom.prove.compiling import variants
from triton_loom.prove.replay import launched
from triton_loom.prove.solver import ask


def examples(contract: Contract) -> Iterator[Example]:
    """Yield some small sizes that a contract allows, with their grids."""
    for low, high in ((1, 3), (5, 20), (17, 70), (64, 300)):
        wishes = [z3.And(size >= min(size.high, low), size <= max(size.low, high)) for size in contract.sizes]
        solution = ask([*contract.facts, *wishes], z3.BoolVal(False))
        if solution.verdict == "counterexample":
            x, y, z = (solution.value(axis) for axis in contract.grid)
            sizes = {size.name: solution.value(size) for size in contract.sizes}
            yield Example(sizes, (x, y, z), (0, 0, 0))


def check(kernel: Any, contract: Contract) -> None:
    cases = [(kernel, contract)] if isinstance(kernel, str) else list(variants(kernel, contract))
    results = [
        (example, launched(ttir, case, example)) for ttir, case, *_ in cases for example in examples(case)
    ]
    assert results
    assert not [(example.sizes, findings) for example, findings in results if findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_corrected_kernels_are_clean(name: str) -> None:
    check(*LAUNCHES[name](True))


@pytest.mark.parametrize(("kernel", "contract"), list(kernels())[:1])
def test_a_kernel_with_mutants_is_clean_itself(kernel: Any, contract: Contract) -> None:
    check(kernel, contract)
