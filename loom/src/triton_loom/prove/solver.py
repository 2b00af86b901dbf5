"""z3, and how it is asked. All of `prove` imports it from here, so that one sentence says what is missing.

A question is whether facts imply a goal. How long z3 thinks is limited by what it does, not by time: the answer is the
same on any machine. Each question is asked in a context of its own, because what z3 was asked before would change how
it goes about the next one.
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

QUICK, THOROUGH = 1_500_000, 12_000_000  # of z3's resource limit: tenths of a second, seconds
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


def ask(facts: Sequence[Any], goal: Any, effort: int = QUICK) -> Solution:
    """Whether the facts imply the goal."""
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set("rlimit", effort)
    solver.set("ctrl_c", False)  # else z3 swallows the signal and answers "unknown"
    for fact in facts:
        solver.add(fact.translate(context))
    solver.add(z3.Not(goal.translate(context)))
    try:
        answer = solver.check()
    except z3.Z3Exception:
        return Solution("unknown", query=solver.to_smt2())
    if answer == z3.unsat:
        return Solution("proven")
    if answer == z3.sat:
        return Solution("counterexample", model=solver.model())
    return Solution("unknown", query=solver.to_smt2())


Lemmas = Callable[[], Sequence[Any]]


def decide(facts: Sequence[Any], goal: Any, lemmas: dict[str, Lemmas], effort: int = THOROUGH) -> Solution:
    """The same with help: what is unknown without lemmas is asked again with each of these groups of them."""
    solution = ask(facts, goal, min(QUICK, effort))
    for how, make in lemmas.items():
        if solution.verdict != "unknown":
            return solution
        found = ask([*facts, *make()], goal, effort)
        if found.verdict != "unknown":
            solution = Solution(found.verdict, how, found.model)
    if solution.verdict == "unknown" and effort > QUICK:
        again = ask(facts, goal, effort)
        solution = again if again.verdict != "unknown" else solution
    return solution


def solved(facts: Sequence[Any], wishes: Iterable[Sequence[Any]], effort: int = QUICK) -> Solution | None:
    """Solve facts, and of every list of wishes the first that is possible beside those before it. None if nothing is
    found."""
    known, solution = list(facts), ask(facts, z3.BoolVal(False), effort)
    for choices in wishes:
        for wish in choices:
            answer = ask([*known, wish], z3.BoolVal(False), effort)
            if answer.verdict == "counterexample":
                known.append(wish)
                solution = answer
                break
    return solution if solution.verdict == "counterexample" else None


__all__ = ["QUICK", "THOROUGH", "Lemmas", "Solution", "Verdict", "ask", "decide", "solved", "z3"]
