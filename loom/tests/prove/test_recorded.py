"""The recorded mistakes for all sizes: each has a counterexample, and its correction a proof."""

from __future__ import annotations

import pytest
from mistakes import MISTAKES, Mistake
from prove.launches import LAUNCHES
from triton_loom.prove import prove

KINDS = {
    "out-of-bounds load": {"bounds"},
    "out-of-bounds store": {"bounds"},
    "offset overflow": {"overflow", "step"},
    "broken promise": {"promise"},
}
CASES = [case for case in MISTAKES if case.kind in KINDS]
# One of each kind by default; the slow tests run all of them.
BY_DAY = {"no_tokens_at_all", "heads_of_long_sequences", "rows_of_odd_stride_called_aligned"}

NOT_REPLAYED = {"stride_of_another_value"}  # the compiled kernel has no such argument to vary


def name_of(case: Mistake) -> str:
    return case.launch.__name__


def some(case: Mistake) -> object:
    return pytest.param(case, id=name_of(case), marks=() if name_of(case) in BY_DAY else pytest.mark.slow)


every_case = pytest.mark.parametrize("case", [some(case) for case in CASES])


def test_every_mistake_of_these_kinds_has_a_contract() -> None:
    assert {name_of(case) for case in CASES} == set(LAUNCHES)


@every_case
def test_the_mistake_has_a_counterexample(case: Mistake) -> None:
    report = prove(*LAUNCHES[name_of(case)](False))
    answers = [answer for answer in report.counterexamples if answer.kind in KINDS[case.kind]]
    assert answers, report
    confirmed = any(answer.example is not None and answer.example.confirmed for answer in answers)
    assert confirmed or name_of(case) in NOT_REPLAYED, report
    lines = {str(line) for line in case.lines()}
    assert any(answer.place.rpartition(":")[2] in lines for answer in answers), report
    if case.argument and not case.kind.startswith("broken"):
        assert case.argument in {answer.what.split()[-1] for answer in answers}, report


@every_case
def test_its_correction_is_proven(case: Mistake) -> None:
    report = prove(*LAUNCHES[name_of(case)](True), replay=False)
    assert report.verdict == "proven", report
