"""z3, and how it is asked. All of `prove` imports it from here, so that one sentence says what is missing.

A question is whether facts imply a goal. How long z3 thinks is limited by what it does, not by time, so that a slow
machine proves as much as a fast one. Each question that is not easy is asked in a context of its own, because what z3
was asked before would change how it goes about the next one. Even so the same text may take z3 twice the effort in
another process: a question near the limit is decided in one run and not in the next. `persist` asks again, from other
seeds.
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

# Of z3's resource limit: hundredths of a second, tenths, seconds.
EASY, QUICK, THOROUGH = 50_000, 1_500_000, 12_000_000
SEEDS = 0, 1  # from which a question is asked that must be decided, one after the other
Verdict = Literal["proven", "counterexample", "unknown"]


@dataclass(frozen=True)
class Solution:
    """What z3 says of a question."""

    verdict: Verdict
    how: str = ""  # the lemmas that were needed
    model: Any = None  # of a counterexample
    query: str = ""  # of what is unknown, in the language of SMT-LIB

    def value(self, expression: Any) -> int:
        """A number in the counterexample."""
        if not z3.is_expr(expression):
            return int(expression)
        found = self.model.eval(expression.translate(self.model.ctx), model_completion=True)
        return bool(z3.is_true(found)) if z3.is_bool(found) else int(found.as_long())


def ask(facts: Sequence[Any], goal: Any, effort: int = QUICK, seed: int = 0) -> Solution:
    """Whether the facts imply the goal. z3 has two ways to go about it, each of which decides what the other does not.
    Its core alone is quicker on easy questions; from odd seeds it is the only one that is asked."""
    asked = (*facts, z3.Not(goal))
    if seed % 2:
        return _checked(_solver(z3.SimpleSolver, z3.Context(), asked, effort, seed))
    solution = _checked(_solver(z3.SimpleSolver, _easy.context(), asked, min(EASY, effort), seed))
    if solution.verdict != "unknown":
        return solution
    return _checked(_solver(z3.Solver, z3.Context(), asked, effort, seed))


def solve(facts: Sequence[Any], effort: int = QUICK) -> Solution:
    """A solution of facts as the "counterexample", or "proven" if there is none. z3's core alone is not asked: its
    solutions resemble each other too much to guess from them who writes an element."""
    return _checked(_solver(z3.Solver, z3.Context(), facts, effort))


class _Easy:
    """Contexts for easy questions, one for several of them: a new one takes 8 ms, longer than most of these questions.
    Whatever is not decided there is asked again in a context of its own."""

    questions = 64  # in one context

    def __init__(self) -> None:
        self._context, self._left = None, 0

    def context(self) -> Any:
        if not self._left:
            self._context, self._left = z3.Context(), self.questions
        self._left -= 1
        return self._context


_easy = _Easy()


def _solver(kind: Any, context: Any, facts: Iterable[Any], effort: int, seed: int = 0) -> Any:
    """A solver in a context that knows some facts, which may be those of another context."""
    solver = kind(ctx=context)
    solver.set("rlimit", effort)
    solver.set("ctrl_c", False)  # else z3 swallows the signal and answers "unknown"
    if seed:
        solver.set("random_seed", seed)
    solver.add(*(fact.translate(context) for fact in facts))
    return solver


def _checked(solver: Any) -> Solution:
    """Whether what a solver knows contradicts itself."""
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
    """Solutions of the same facts beside changing wishes. One solver looks for all of them, which is many times quicker
    and does no harm: any solution will do."""

    def __init__(self, facts: Iterable[Any], effort: int = QUICK) -> None:
        self._solver = _solver(z3.Solver, z3.Context(), facts, effort)

    def with_(self, wishes: Iterable[Any]) -> Solution:
        """Whether facts and wishes contradict each other: "proven", or a solution as the "counterexample"."""
        self._solver.push()
        try:
            self._solver.add(*(wish.translate(self._solver.ctx) for wish in wishes))
            return _checked(self._solver)
        finally:
            self._solver.pop()

    def nearest(self, wishes: Sequence[Sequence[Any]]) -> Solution | None:
        """Solve the facts with the first wish of every list or else, one list after the other, with the first that is
        possible beside those before it. None if nothing is found."""
        best = self.with_([choices[0] for choices in wishes])
        if best.verdict == "counterexample":
            return best
        best = self.with_([])
        known: list[Any] = []
        for choices in wishes:
            for wish in choices:
                is_so = best.verdict == "counterexample" and best.value(wish)
                answer = best if is_so else self.with_([*known, wish])
                if answer.verdict == "counterexample":
                    known.append(wish)
                    best = answer
                    break
        return best if best.verdict == "counterexample" else None


Lemmas = Callable[[], Sequence[Any]]


def decide(
    facts: Sequence[Any], goal: Any, lemmas: dict[str, Lemmas], effort: int = THOROUGH, seed: int = 0
) -> Solution:
    """The same with help: what is unknown without lemmas is asked again with each of these groups of them."""
    solution = ask(facts, goal, min(QUICK, effort), seed)
    for how, make in lemmas.items():
        if solution.verdict != "unknown":
            return solution
        found = ask([*facts, *make()], goal, effort, seed)
        if found.verdict != "unknown":
            solution = Solution(found.verdict, how, found.model)
    if solution.verdict == "unknown" and effort > QUICK:
        again = ask(facts, goal, effort, seed)
        solution = again if again.verdict != "unknown" else solution
    return solution


def persist(
    facts: Sequence[Any], goal: Any, lemmas: dict[str, Lemmas], effort: int, seeds: Iterable[int]
) -> Solution:
    """The same from one seed after another, until it is decided."""
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
