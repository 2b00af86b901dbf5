"""Questions without products of unknowns: each such product is replaced by an unknown of its own.

A proof then holds for any value of the product, hence for the true one; a failure says nothing. z3 decides such
questions quickly, and `lemmas` provides the facts about products that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .solver import QUICK, Solution, ask, z3
from .sums import factors_of, number_of


class Linear:
    """Replacement of products of unknowns, consistent over all expressions."""

    def __init__(self) -> None:
        self._products: dict[tuple[int, ...], Any] = {}
        self._replaced_parts: dict[int, Any] = {}
        self._linearized: dict[int, Any] = {}  # results, by the id of the original expression
        self._alive: list[Any] = []  # an id is valid only while its expression is alive

    def __call__(self, expression: Any) -> Any:
        """Return an expression without products of unknowns.

        Conditions are not simplified, only the terms they compare: z3 would expand `product >= 0` into four cases of
        its factors.
        """
        identity = expression.get_id()
        if identity not in self._linearized:
            self._alive.append(expression)
            if z3.is_bool(expression):
                pairs = [(child, self(child)) for child in expression.children()]
                self._linearized[identity] = _substitute_children(expression, pairs)
            else:
                self._linearized[identity] = self._visit(z3.simplify(expression, som=True))
        return self._linearized[identity]

    def follows(self, facts: Iterable[Any], goal: Any, effort: int = QUICK) -> bool:
        """Return whether a goal is proven using only what the facts say about products."""
        return self.asked(facts, goal, effort).verdict == "proven"

    def asked(self, facts: Iterable[Any], goal: Any, effort: int = QUICK) -> Solution:
        """Solve a linearized question. Counterexamples may be spurious: the values of products need not be products."""
        return ask([self(fact) for fact in facts], self(goal), effort)

    def _visit(self, e: Any) -> Any:
        identity = e.get_id()
        if identity not in self._replaced_parts:
            self._alive.append(e)
            self._replaced_parts[identity] = self._replace(e)
        return self._replaced_parts[identity]

    def _replace(self, e: Any) -> Any:
        if z3.is_mul(e) or (z3.is_app(e) and e.decl().kind() == z3.Z3_OP_POWER):
            factors = factors_of(e)
            if len(factors) > 1:
                return number_of(e) * self._unknown(factors)
        return _substitute_children(e, [(child, self._visit(child)) for child in e.children()])

    def _unknown(self, factors: Sequence[Any]) -> Any:
        self._alive += factors
        key = tuple(sorted(factor.get_id() for factor in factors))
        if key not in self._products:
            self._products[key] = z3.Int(f"!product!{len(self._products)}")
        return self._products[key]


def _substitute_children(e: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return an expression with other children."""
    changed = [(old, new) for old, new in pairs if not old.eq(new)]
    return z3.substitute(e, *changed) if changed else e
