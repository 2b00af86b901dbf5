"""Mutants of counting kernels: proven ones stay in bounds with random memory, and others are not proven."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prove import test_carried as right
from prove.mutants import mutants
from prove.test_launched import examples
from triton_loom.prove import Buffer, Contract, Example, symbol
from triton_loom.prove.proving import Prover
from triton_loom.prove.replay import launched

n, rows = right.n, right.rows


def kernels() -> Iterator[tuple[Any, Contract, dict[str, tuple[int, int]]]]:
    """Yield a kernel, its contract, and the range of integers in each buffer."""
    arguments = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", n), "count_ptr": Buffer("i32", 1), "n": n}
    yield right.compact, Contract.of(grid=(1,), arguments=arguments), {"x_ptr": (-1, 3)}
    lead_arguments = {
        "x_ptr": Buffer("i32", n),
        "y_ptr": Buffer("i32", n + 1),
        "n": n,
        "lead": symbol("lead", 0, 1000),
    }
    masked = {"MASKED": True}
    yield right.count, Contract.of(grid=(1,), arguments=lead_arguments, constants=masked), {"x_ptr": (-1, 3)}
    groups, row = symbol("groups", 1, 1000), symbol("row", 0)
    ends = Buffer("i32", groups, values=lambda v: v >= 0)
    room = {"y_ptr": Buffer("i32", rows + 1), "z_ptr": Buffer("i32", rows + 1)}
    sizes = {"groups": groups, "rows": rows, "row": row}
    cut = {"FIRST": 0, "CUT": True}
    between = Contract.of(grid=(1,), arguments={"ends_ptr": ends, **room, **sizes}, constants=cut)
    yield right.bracket, between, {"ends_ptr": (0, 400)}


def filled(example: Example, contract: Contract, memory: dict[str, tuple[int, int]]) -> Iterator[Example]:
    """Yield the same sizes with random integers in memory, and with only the largest."""
    draw = random.Random(0)
    for fixed in (None, None, 1):
        loaded = [
            (name, element, draw.randint(low, high) if fixed is None else high)
            for name, (low, high) in memory.items()
            for element in range(next(iter(example.sizes.values())))
        ]
        yield replace(example, loaded=tuple(loaded))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "contract", "memory"), [pytest.param(*k, id=k[0].fn.__name__) for k in kernels()]
)
def test_proven_mutants_stay_in_bounds(
    kernel: Any, contract: Contract, memory: dict[str, tuple[int, int]]
) -> None:
    refuted, proven = [], []
    for mutant in mutants(kernel, contract):
        prover = Prover(mutant.ttir, mutant.contract, 3_000_000)
        verdicts = {prover.answer(o).verdict for o in prover.question.obligations}
        findings = [
            finding
            for example in examples(mutant.contract)
            for filled_example in filled(example, mutant.contract, memory)
            for finding in launched(mutant.ttir, mutant.contract, filled_example)
            if finding.kind.startswith("out-of-bounds")
        ]
        if verdicts == {"proven"}:
            proven.append(str(mutant))
            assert not findings, (str(mutant), findings[0])
        elif findings:
            refuted.append(str(mutant))
    assert len(proven) >= 5, proven
    assert len(refuted) >= 5, refuted
