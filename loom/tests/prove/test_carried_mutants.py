"""Kernels that count, in every small way wrong: where a mutant is proven, launches of it with random memory stay in
bounds; and where launches do not, nothing was proven."""

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
    """A kernel, its contract, and what is in memory: the least and the largest integer of a buffer."""
    whole = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", n), "count_ptr": Buffer("i32", 1), "n": n}
    yield right.compact, Contract.of(grid=(1,), arguments=whole), {"x_ptr": (-1, 3)}
    some = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", n + 1), "n": n, "lead": symbol("lead", 0, 1000)}
    masked = {"MASKED": True}
    yield right.count, Contract.of(grid=(1,), arguments=some, constants=masked), {"x_ptr": (-1, 3)}
    groups, row = symbol("groups", 1, 1000), symbol("row", 0)
    ends = Buffer("i32", groups, values=lambda v: v >= 0)
    room = {"y_ptr": Buffer("i32", rows + 1), "z_ptr": Buffer("i32", rows + 1)}
    sizes = {"groups": groups, "rows": rows, "row": row}
    cut = {"FIRST": 0, "CUT": True}
    between = Contract.of(grid=(1,), arguments={"ends_ptr": ends, **room, **sizes}, constants=cut)
    yield right.bracket, between, {"ends_ptr": (0, 400)}


def filled(example: Example, contract: Contract, memory: dict[str, tuple[int, int]]) -> Iterator[Example]:
    """The same sizes with random integers in memory, and with none but the largest."""
    draw = random.Random(0)
    for least in (None, None, 1):
        loaded = [
            (name, element, draw.randint(low, high) if least is None else high)
            for name, (low, high) in memory.items()
            for element in range(next(iter(example.sizes.values())))
        ]
        yield replace(example, loaded=tuple(loaded))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "contract", "memory"), [pytest.param(*k, id=k[0].fn.__name__) for k in kernels()]
)
def test_mutants(kernel: Any, contract: Contract, memory: dict[str, tuple[int, int]]) -> None:
    seen, proven = [], []
    for mutant in mutants(kernel, contract):
        prover = Prover(mutant.ttir, mutant.contract, 3_000_000)
        verdicts = {prover.answer(o).verdict for o in prover.question.obligations}
        findings = [
            finding
            for example in examples(mutant.contract)
            for full in filled(example, mutant.contract, memory)
            for finding in launched(mutant.ttir, mutant.contract, full)
            if finding.kind.startswith("out-of-bounds")
        ]
        if verdicts == {"proven"}:
            proven.append(str(mutant))
            assert not findings, (str(mutant), findings[0])
        elif findings:
            seen.append(str(mutant))
    assert len(proven) >= 5, proven
    assert len(seen) >= 5, seen
