"""Coverage of a product of choices by the cases that always run."""

from __future__ import annotations

import itertools

from tests.support.covering import covering


def test_every_pair_of_values_always_runs() -> None:
    choices = ("abcdefg", (False, True), (1, 2))
    cases = covering(*choices)
    assert {case.values for case in cases} == set(itertools.product(*choices))
    always = [case.values for case in cases if not case.marks]
    for i, j in itertools.combinations(range(3), 2):
        assert {(case[i], case[j]) for case in always} == set(itertools.product(choices[i], choices[j]))
    assert len(always) < 20


def test_every_value_always_runs() -> None:
    always = [case.values for case in covering("abc", (1, 2), together=1) if not case.marks]
    assert [set(values) for values in zip(*always, strict=True)] == [set("abc"), {1, 2}]
    assert len(always) == 3


def test_values_run_about_as_often_as_each_other() -> None:
    always = [case.values for case in covering(range(9), "abc", together=1) if not case.marks]
    assert sorted(letter for _, letter in always) == sorted("abc" * 3)
