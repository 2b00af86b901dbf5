"""Questions without products of unknowns: each such product becomes an unknown of its own.

What is proven then holds for whatever number stands for a product, hence also for the product itself; what is not
proven says nothing. z3 decides such questions soon, and what it needs to know of products it is told by `lemmas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .solver import QUICK, Solution, ask, z3
from .sums import factors_of, number_of


class Linear:
    """Replaces products of unknowns, the same one by the same unknown in all expressions."""

    def __init__(self) -> None:
        self._products: dict[tuple[int, ...], Any] = {}
        self._done: dict[int, Any] = {}
        self._whole: dict[int, Any] = {}  # what was asked for, by what it was before it was simplified
        self._kept: list[Any] = []  # ids are those of expressions that are alive

    def __call__(self, expression: Any) -> Any:
        """An expression without products of unknowns. Conditions are not simplified, only what they compare: z3 would
        write a product that is not negative as four cases of its factors."""
        identity = expression.get_id()
        if identity not in self._whole:
            self._kept.append(expression)
            if z3.is_bool(expression):
                pairs = [(child, self(child)) for child in expression.children()]
                self._whole[identity] = _with(expression, pairs)
            else:
                self._whole[identity] = self._visited(z3.simplify(expression, som=True))
        return self._whole[identity]

    def follows(self, facts: Iterable[Any], goal: Any, effort: int = QUICK) -> bool:
        """Whether a goal is proven without anything about products but what the facts say of them."""
        return self.asked(facts, goal, effort).verdict == "proven"

    def asked(self, facts: Iterable[Any], goal: Any, effort: int = QUICK) -> Solution:
        """Whether a goal is proven. A counterexample may be none: its numbers for products need not be products."""
        return ask([self(fact) for fact in facts], self(goal), effort)

    def _visited(self, e: Any) -> Any:
        identity = e.get_id()
        if identity not in self._done:
            self._kept.append(e)
            self._done[identity] = self._replaced(e)
        return self._done[identity]

    def _replaced(self, e: Any) -> Any:
        if z3.is_mul(e) or (z3.is_app(e) and e.decl().kind() == z3.Z3_OP_POWER):
            factors = factors_of(e)
            if len(factors) > 1:
                return number_of(e) * self._unknown(factors)
        return _with(e, [(child, self._visited(child)) for child in e.children()])

    def _unknown(self, factors: Sequence[Any]) -> Any:
        self._kept += factors
        key = tuple(sorted(factor.get_id() for factor in factors))
        if key not in self._products:
            self._products[key] = z3.Int(f"!product!{len(self._products)}")
        return self._products[key]


def _with(e: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """An expression with other children."""
    changed = [(old, new) for old, new in pairs if not old.eq(new)]
    return z3.substitute(e, *changed) if changed else e
