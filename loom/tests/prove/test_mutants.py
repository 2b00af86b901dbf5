"""Nothing small that is wrong with a kernel goes unnoticed: the sanitizer confirms it, or an output is not written
whole and once, or everything is still proven and the change does no harm."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prove.mutants import Mutant, kernels, mutants, verdict
from triton_loom.prove import Contract, prove

KERNELS = [pytest.param(*asked, id=asked[0].fn.__name__) for asked in kernels()]

# Changes after which everything is proven as before, and why.
HARMLESS = {
    "flat: one program more": "its lanes are off",
    "flat: twice the programs": "their lanes are off",
}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "contract"), KERNELS)
def test_the_kernel_itself_is_proven(kernel: Any, contract: Contract) -> None:
    assert prove(kernel, contract, replay=False).verdict == "proven"


def judged(kernel: Any, contract: Contract) -> dict[Mutant, str]:
    return {mutant: verdict(mutant)[0] for mutant in mutants(kernel, contract)}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "contract"), KERNELS)
def test_every_mutant_is_noticed(kernel: Any, contract: Contract) -> None:
    found = judged(kernel, contract)
    counts = Counter(found.values())
    assert not counts["unknown"], [str(mutant) for mutant, what in found.items() if what == "unknown"]
    assert counts["confirmed"] >= len(found) // 3, counts


def test_mutants_of_a_mask() -> None:
    kernel, contract = next(kernels())
    chosen = [
        m for m in mutants(kernel, contract) if "mask" in m.what or "sle" in m.what or "programs" in m.what
    ]
    found = {str(mutant): verdict(mutant)[0] for mutant in chosen}
    assert len(found) == 5, found
    harmless = {name for name, what in found.items() if what == "harmless"}
    assert harmless == set(HARMLESS) & set(found)
    assert set(found.values()) <= {"confirmed", "harmless"}, found
