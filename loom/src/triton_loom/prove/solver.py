"""Interface to z3. All of `prove` imports z3 from here, so that one message explains a missing installation.

A question is whether facts imply a goal. z3's effort is limited by resources, not by time, so that a slow machine
proves as much as a fast one. Each question that is not easy gets its own context, because earlier questions would
change how z3 approaches the next. Even so the same text may cost z3 twice the effort in another process: a question
near the limit is decided in one run and not in the next. `persist` retries from other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

try:
    import z3
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "triton_loom.prove needs the solver z3, which is not installed: pip install 'triton-loom[prove]'"
    ) from error

# Units of z3's resource limit: about hundredths of a second, tenths, seconds.
EASY, QUICK, THOROUGH = 50_000, 1_500_000, 12_000_000
SEEDS = 0, 1  # tried in turn for a question that must be decided
Verdict = Literal["proven", "counterexample", "unknown"]


@dataclass(frozen=True)
class Solution:
    """z3's answer to a question."""

    verdict: Verdict
    how: str = ""  # the lemmas that were needed
    model: Any = None  # of a counterexample
    query: str = ""  # of an unknown, in SMT-LIB

    def value(self, expression: Any) -> int:
        """Evaluate an expression in the counterexample."""
        if not z3.is_expr(expression):
            return int(expression)
        result = self.model.eval(expression.translate(self.model.ctx), model_completion=True)
        return bool(z3.is_true(result)) if z3.is_bool(result) else int(result.as_long())


def ask(facts: Sequence[Any], goal: Any, effort: int = QUICK, seed: int = 0) -> Solution:
    """Decide whether the facts imply the goal.

    z3 has two strategies, each of which decides questions that the other does not. Its core alone is faster on easy
    questions; odd seeds use only the core.
    """
    formulas = (*facts, z3.Not(goal))
    if seed % 2:
        return _checked(_solver(z3.SimpleSolver, z3.Context(), formulas, effort, seed))
    solution = _checked(_solver(z3.SimpleSolver, _easy.context(), formulas, min(EASY, effort), seed))
    if solution.verdict != "unknown":
        return solution
    return _checked(_solver(z3.Solver, z3.Context(), formulas, effort, seed))


def solve(facts: Sequence[Any], effort: int = QUICK) -> Solution:
    """Solve facts: a solution is the "counterexample", or "proven" if there is none.

    z3's core alone is not used: its solutions are too similar to guess from them which program writes an element.
    """
    return _checked(_solver(z3.Solver, z3.Context(), facts, effort))


class _Easy:
    """Contexts for easy questions, each shared by several: a new one takes 8 ms, longer than most of these questions.
    Undecided questions are asked again in a context of their own."""

    questions = 64  # per context

    def __init__(self) -> None:
        self._context, self._left = None, 0

    def context(self) -> Any:
        if not self._left:
            self._context, self._left = z3.Context(), self.questions
        self._left -= 1
        return self._context


_easy = _Easy()


def _solver(kind: Any, context: Any, facts: Iterable[Any], effort: int, seed: int = 0) -> Any:
    """Create a solver in a context, with facts that may belong to another context."""
    solver = kind(ctx=context)
    solver.set("rlimit", effort)
    solver.set("ctrl_c", False)  # otherwise z3 swallows the signal and answers "unknown"
    if seed:
        solver.set("random_seed", seed)
    solver.add(*(fact.translate(context) for fact in facts))
    return solver


def _checked(solver: Any) -> Solution:
    """Check whether a solver's facts are contradictory."""
    try:
        answer = solver.check()
    except z3.Z3Exception:
        return Solution("unknown", query=solver.to_smt2())
    if answer == z3.unsat:
        return Solution("proven")
    if answer == z3.sat:
        return Solution("counterexample", model=solver.model())
    return Solution("unknown", query=solver.to_smt2())


class Search:
    """Solutions of the same facts with varying wishes.

    They share one solver, which is many times faster and safe here: any solution will do.
    """

    def __init__(self, facts: Iterable[Any], effort: int = QUICK) -> None:
        self._solver = _solver(z3.Solver, z3.Context(), facts, effort)

    def with_(self, wishes: Iterable[Any]) -> Solution:
        """Return "proven" if facts and wishes are contradictory, or a solution as the "counterexample"."""
        self._solver.push()
        try:
            self._solver.add(*(wish.translate(self._solver.ctx) for wish in wishes))
            return _checked(self._solver)
        finally:
            self._solver.pop()

    def nearest(self, wishes: Sequence[Sequence[Any]]) -> Solution | None:
        """Solve the facts with the first wish of every list, or else with the first compatible one, list by list.

        Wishes granted earlier are kept. Return None if nothing is found.
        """
        best = self.with_([choices[0] for choices in wishes])
        if best.verdict == "counterexample":
            return best
        best = self.with_([])
        granted: list[Any] = []
        for choices in wishes:
            for wish in choices:
                holds = best.verdict == "counterexample" and best.value(wish)
                answer = best if holds else self.with_([*granted, wish])
                if answer.verdict == "counterexample":
                    granted.append(wish)
                    best = answer
                    break
        return best if best.verdict == "counterexample" else None


Lemmas = Callable[[], Sequence[Any]]


def decide(
    facts: Sequence[Any], goal: Any, lemmas: dict[str, Lemmas], effort: int = THOROUGH, seed: int = 0
) -> Solution:
    """Decide a question, retrying an unknown with each group of lemmas."""
    solution = ask(facts, goal, min(QUICK, effort), seed)
    for how, make in lemmas.items():
        if solution.verdict != "unknown":
            return solution
        attempt = ask([*facts, *make()], goal, effort, seed)
        if attempt.verdict != "unknown":
            solution = Solution(attempt.verdict, how, attempt.model)
    if solution.verdict == "unknown" and effort > QUICK:
        retry = ask(facts, goal, effort, seed)
        solution = retry if retry.verdict != "unknown" else solution
    return solution


def persist(
    facts: Sequence[Any], goal: Any, lemmas: dict[str, Lemmas], effort: int, seeds: Iterable[int]
) -> Solution:
    """Decide a question from one seed after another, until it is decided."""
    solution = Solution("unknown")
    for seed in seeds:
        solution = decide(facts, goal, lemmas, effort, seed)
        if solution.verdict != "unknown":
            break
    return solution


__all__ = [
    "QUICK",
    "SEEDS",
    "THOROUGH",
    "Lemmas",
    "Search",
    "Solution",
    "Verdict",
    "ask",
    "decide",
    "persist",
    "solve",
    "z3",
]
