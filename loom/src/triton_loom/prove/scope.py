"""Unknowns of a proof, and the facts about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .contract import Bool, Int, constants_of
from .solver import z3


@dataclass(frozen=True)
class Division:
    """a = quotient * b + remainder, for b > 0."""

    a: Int
    b: Int
    quotient: Int
    remainder: Int


@dataclass(frozen=True)
class Loaded:
    """Integer loaded from memory."""

    constant: Any
    argument: str
    offset: Int
    happens: Bool  # the load happens, within its buffer

    @property
    def expressions(self) -> tuple[Any, Any, Any]:
        return self.constant, self.offset, self.happens


class Scope:
    """Constants and the facts about them.

    Every fact holds in all executions, even those of a program, lane or iteration for which the constant is
    meaningless.
    """

    def __init__(self) -> None:
        self.facts: list[Bool] = []
        self.reasons: dict[int, str] = {}  # justification of each fact, by its id
        self.constants: dict[int, Any] = {}  # all constants created here, by id
        self.home_blocks: dict[int, Any] = {}  # the block that a constant belongs to
        self.opaque: dict[int, str] = {}  # what an unmodeled constant stands for, by id
        self.loaded: dict[int, Loaded] = {}
        self.divisions: dict[tuple[int, int], Division] = {}
        self._alive: list[Any] = []  # an id is valid only while its expression is alive
        self._defined: dict[
            int, set[int]
        ] = {}  # constants that a fact defines, by its id: they exist whatever the others are
        self._count = 0

    def fresh(self, name: str, *, sort: Any = None, home: Any = None) -> Any:
        """Create a constant, an integer unless another sort is given."""
        self._count += 1
        prefix = "v" if name[:1].isdigit() else ""  # TTIR names may be numbers, SMT-LIB's may not
        constant = z3.Const(f"{prefix}{name}!{self._count}", z3.IntSort() if sort is None else sort)
        self.constants[constant.get_id()] = constant
        self.home_blocks[constant.get_id()] = home
        return constant

    def know(self, *facts: Bool, because: str, when: Iterable[Bool] = ()) -> None:
        """Add facts that hold `when` the path and ranges of their derivation do.

        For any values of the program's constants, some values of the constants created here must satisfy all facts: a
        fact that excludes sizes of the contract would prove anything about them.
        """
        guard = conjunction(when)
        for fact in facts:
            self.facts.append(fact if z3.is_true(guard) else z3.Implies(guard, fact))
            self.reasons[self.facts[-1].get_id()] = because

    def divide(self, a: Int, b: Int) -> Division:
        """Return quotient and remainder; nothing is known of them where b is not positive."""
        a, b = z3.simplify(integer(a)), z3.simplify(integer(b))
        if z3.is_int_value(b) and b.as_long() > 0:
            return Division(a, b, a / b, a % b)
        key = a.get_id(), b.get_id()
        if key not in self.divisions:
            quotient, remainder = self.fresh("quotient"), self.fresh("remainder")
            exact = z3.And(a == quotient * b + remainder, remainder >= 0, remainder < b)
            self.know(exact, because="quotient and remainder", when=[b > 0])
            self._defined[self.facts[-1].get_id()] = {quotient.get_id(), remainder.get_id()}
            self.divisions[key] = Division(a, b, quotient, remainder)
        return self.divisions[key]

    def without_division(self, expression: Any) -> Any:
        """Replace quotients and remainders by nonnumeric divisors with constants."""
        if not z3.is_expr(expression):
            return expression
        done: dict[int, Any] = {}

        def visit(e: Any) -> Any:
            if e.get_id() in done:
                return done[e.get_id()]
            children = [visit(child) for child in e.children()]
            kind = e.decl().kind() if z3.is_app(e) else None
            if kind in (z3.Z3_OP_IDIV, z3.Z3_OP_MOD) and not z3.is_int_value(children[1]):
                division = self.divide(*children)
                result = division.quotient if kind == z3.Z3_OP_IDIV else division.remainder
            elif children and any(
                c.get_id() != o.get_id() for c, o in zip(children, e.children(), strict=True)
            ):
                result = z3.substitute(e, *zip(e.children(), children, strict=True))
            else:
                result = e
            done[e.get_id()] = result
            self._alive += [e, result]
            return result

        return visit(expression)

    # -- copies --

    def bound(self, seeds: Iterable[Any], blocks: Sequence[Any]) -> dict[int, Any]:
        """Return the constants that depend on the seeds, or belong to one of the blocks."""
        result = {seed.get_id(): seed for seed in seeds}
        result |= {
            i: c for i, c in self.constants.items() if any(self.home_blocks[i] is block for block in blocks)
        }
        while True:
            more = {
                constant.get_id(): constant
                for division in self.divisions.values()
                if division.quotient.get_id() not in result
                and not result.keys().isdisjoint(constants_of([division.a, division.b]))
                for constant in (division.quotient, division.remainder)
            }
            if not more:
                return result
            result |= more

    def copied(
        self, expressions: Sequence[Any], own: dict[int, Any], also: Sequence[tuple[Any, Any]], home: Any
    ) -> list[Any]:
        """Return the expressions with their own constants replaced by new ones that satisfy copies of the same facts.

        The new constants belong to `home`. `also` lists further replacements.
        """
        new = {old.get_id(): (old, to) for old, to in also}
        facts, loaded = self._about(expressions)
        needed = constants_of([*expressions, *facts, *(e for each in loaded for e in each.expressions)])
        used = sorted((set(own) & set(needed)) - set(new))
        for identity in used:
            old = own[identity]
            name = str(old).partition("!")[0]
            new[identity] = old, self.fresh(name, sort=old.sort(), home=home)
            if identity in self.opaque:
                self.opaque[new[identity][1].get_id()] = self.opaque[identity]

        def copy(expression: Any) -> Any:
            pairs = [new[i] for i in constants_of([expression]) if i in new]
            return z3.substitute(expression, *pairs) if pairs else expression

        for fact in facts:
            if not new.keys().isdisjoint(constants_of([fact])):
                self.know(copy(fact), because=self.reasons[fact.get_id()])
                if fact.get_id() in self._defined:
                    defined = {new[i][1].get_id() if i in new else i for i in self._defined[fact.get_id()]}
                    self._defined[self.facts[-1].get_id()] = defined
        for each in loaded:
            if each.constant.get_id() in new:
                constant, offset, happens = map(copy, each.expressions)
                self.loaded[constant.get_id()] = Loaded(constant, each.argument, offset, happens)
        for division in list(self.divisions.values()):
            if division.quotient.get_id() in used:
                parts = (division.a, division.b, division.quotient, division.remainder)
                copied = Division(*map(copy, parts))
                self._alive += [copied.a, copied.b]
                self.divisions.setdefault((copied.a.get_id(), copied.b.get_id()), copied)
        return [copy(e) if z3.is_expr(e) else e for e in expressions]

    def _about(self, expressions: Sequence[Any]) -> tuple[list[Bool], list[Loaded]]:
        """Return the facts about the expressions, and the loaded integers that both are about."""
        loaded: dict[int, Loaded] = {}
        while True:
            about = [*expressions, *(e for each in loaded.values() for e in each.expressions)]
            facts = self.relevant(about)
            names = constants_of([*about, *facts])
            more = {i: each for i, each in self.loaded.items() if i in names and i not in loaded}
            if not more:
                return facts, list(loaded.values())
            loaded |= more

    def relevant(self, expressions: Iterable[Any]) -> list[Bool]:
        """Return the facts about the expressions, directly or through other constants created here.

        The definition of a quotient says nothing about the dividend: it is omitted where the quotient does not occur.
        """
        reached = {i for i in constants_of(expressions) if i in self.constants}
        pending = [(fact, {i for i in constants_of([fact]) if i in self.constants}) for fact in self.facts]
        selected: list[Bool] = []
        while True:
            rest = []
            for fact, names in pending:
                if not names or not self._defined.get(fact.get_id(), names).isdisjoint(reached):
                    selected.append(fact)
                    reached |= names
                else:
                    rest.append((fact, names))
            if len(rest) == len(pending):
                return selected
            pending = rest

    def near(self, expressions: Iterable[Any]) -> list[Bool]:
        """Return the facts about only the constants of the expressions and the quotients among them.

        They are a small part of `relevant` and often sufficient.
        """
        reached = {i for i in constants_of(expressions) if i in self.constants}
        candidates = [(fact, {i for i in constants_of([fact]) if i in self.constants}) for fact in self.facts]
        grown = True
        while grown:
            defining = [
                n for fact, n in candidates if not reached.isdisjoint(self._defined.get(fact.get_id(), ()))
            ]
            more = set().union(*defining) - reached
            grown = bool(more)
            reached |= more
        return [fact for fact, names in candidates if names <= reached]


def integer(value: Any) -> Int:
    """Convert a Python integer to z3's."""
    return z3.IntVal(value) if isinstance(value, int) else value


def conjunction(conditions: Iterable[Any]) -> Bool:
    """Return the conjunction of all conditions."""
    nontrivial = [c for c in conditions if not (z3.is_expr(c) and z3.is_true(c))]
    return (
        z3.BoolVal(True) if not nontrivial else nontrivial[0] if len(nontrivial) == 1 else z3.And(*nontrivial)
    )
