"""Every small mistake is noticed: confirmed by the sanitizer, refuted by coverage or races, or proven harmless."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prove.mutants import Mutant, kernels, mutants, verdict
from triton_loom.prove import Contract, prove

KERNELS = [pytest.param(*asked, id=asked[0].fn.__name__) for asked in kernels()]

# Changes after which everything is still proven, and why.
HARMLESS = {
    "flat: one program more": "its lanes are masked off",
    "flat: twice the programs": "their lanes are masked off",
}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "contract"), KERNELS)
def test_the_kernel_itself_is_proven(kernel: Any, contract: Contract) -> None:
    assert prove(kernel, contract, replay=False).verdict == "proven"


def outcomes_of(kernel: Any, contract: Contract) -> dict[Mutant, str]:
    return {mutant: verdict(mutant)[0] for mutant in mutants(kernel, contract)}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "contract"), KERNELS)
def test_every_mutant_is_noticed(kernel: Any, contract: Contract) -> None:
    outcomes = outcomes_of(kernel, contract)
    counts = Counter(outcomes.values())
    assert not counts["unknown"], [str(mutant) for mutant, what in outcomes.items() if what == "unknown"]
    assert counts["confirmed"] >= len(outcomes) // 3, counts


def test_mutants_of_a_mask_are_noticed() -> None:
    kernel, contract = next(kernels())
    selected = [
        m for m in mutants(kernel, contract) if "mask" in m.what or "sle" in m.what or "programs" in m.what
    ]
    outcomes = {str(mutant): verdict(mutant)[0] for mutant in selected}
    assert len(outcomes) == 5, outcomes
    harmless = {name for name, what in outcomes.items() if what == "harmless"}
    assert harmless == set(HARMLESS) & set(outcomes)
    assert set(outcomes.values()) <= {"confirmed", "harmless"}, outcomes
