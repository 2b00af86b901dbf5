"""The unknowns of a proof: constants that stand for what is not known, and what is known of them."""

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
    """An integer that a load has found in memory."""

    constant: Any
    argument: str
    offset: Int
    happens: Bool  # that the load takes place, within its buffer

    @property
    def expressions(self) -> tuple[Any, Any, Any]:
        return self.constant, self.offset, self.happens


class Scope:
    """Makes constants and keeps the facts about them. Every fact holds in all executions, also those of a program, lane
    or iteration in which the constant has no meaning."""

    def __init__(self) -> None:
        self.facts: list[Bool] = []
        self.reasons: dict[int, str] = {}  # what allows each fact, by its id
        self.made: dict[int, Any] = {}  # all constants that were made here, by id
        self.homes: dict[int, Any] = {}  # the block that a constant belongs to
        self.opaque: dict[int, str] = {}  # constants that stand for what is not modelled, and what that is
        self.loaded: dict[int, Loaded] = {}
        self.divisions: dict[tuple[int, int], Division] = {}
        self._kept: list[Any] = []  # ids are those of expressions that are alive
        self._defined: dict[
            int, set[int]
        ] = {}  # by facts that define constants, which exist whatever the others are
        self._count = 0

    def fresh(self, name: str, *, sort: Any = None, home: Any = None) -> Any:
        """A new constant, an integer unless another sort is given."""
        self._count += 1
        first = "v" if name[:1].isdigit() else ""  # a name of TTIR may be a number, of SMT-LIB not
        constant = z3.Const(f"{first}{name}!{self._count}", z3.IntSort() if sort is None else sort)
        self.made[constant.get_id()] = constant
        self.homes[constant.get_id()] = home
        return constant

    def know(self, *facts: Bool, because: str, when: Iterable[Bool] = ()) -> None:
        """Add facts that hold `when` the path and ranges that they were derived under do. Whatever the constants of the
        program are, there must be values of those made here that satisfy all facts: a fact that excludes sizes of the
        contract would prove anything about them."""
        guard = conjunction(when)
        for fact in facts:
            self.facts.append(fact if z3.is_true(guard) else z3.Implies(guard, fact))
            self.reasons[self.facts[-1].get_id()] = because

    def divide(self, a: Int, b: Int) -> Division:
        """Quotient and remainder; nothing is known of them where b is not positive."""
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
        """The same, a quotient or remainder by something that is not a number written as a constant of its own."""
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
            self._kept += [e, result]
            return result

        return visit(expression)

    # -- copies --

    def bound(self, seeds: Iterable[Any], blocks: Sequence[Any]) -> dict[int, Any]:
        """The constants that depend on the seeds, or belong to one of the blocks."""
        found = {seed.get_id(): seed for seed in seeds}
        found |= {i: c for i, c in self.made.items() if any(self.homes[i] is block for block in blocks)}
        while True:
            more = {
                constant.get_id(): constant
                for division in self.divisions.values()
                if division.quotient.get_id() not in found
                and not found.keys().isdisjoint(constants_of([division.a, division.b]))
                for constant in (division.quotient, division.remainder)
            }
            if not more:
                return found
            found |= more

    def copied(
        self, expressions: Sequence[Any], own: dict[int, Any], also: Sequence[tuple[Any, Any]], home: Any
    ) -> list[Any]:
        """Return the expressions with new constants, which belong to `home`, in place of their own. What is known of
        those is known of the new ones. What is in `also` is replaced as said."""
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
                self._kept += [copied.a, copied.b]
                self.divisions.setdefault((copied.a.get_id(), copied.b.get_id()), copied)
        return [copy(e) if z3.is_expr(e) else e for e in expressions]

    def _about(self, expressions: Sequence[Any]) -> tuple[list[Bool], list[Loaded]]:
        """The facts that say something of the expressions, and the integers in memory that they and these are about."""
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
        """The facts that say something of the expressions, directly or through other constants that were made here.
        What a quotient is says nothing of the dividend: it is left out where the quotient is not asked about."""
        reached = {i for i in constants_of(expressions) if i in self.made}
        waiting = [(fact, {i for i in constants_of([fact]) if i in self.made}) for fact in self.facts]
        chosen: list[Bool] = []
        while True:
            rest = []
            for fact, names in waiting:
                if not names or not self._defined.get(fact.get_id(), names).isdisjoint(reached):
                    chosen.append(fact)
                    reached |= names
                else:
                    rest.append((fact, names))
            if len(rest) == len(waiting):
                return chosen
            waiting = rest

    def near(self, expressions: Iterable[Any]) -> list[Bool]:
        """The facts about the constants of the expressions and of the quotients among them alone: a few of `relevant`,
        which are often enough."""
        reached = {i for i in constants_of(expressions) if i in self.made}
        waiting = [(fact, {i for i in constants_of([fact]) if i in self.made}) for fact in self.facts]
        again = True
        while again:
            defining = [
                n for fact, n in waiting if not reached.isdisjoint(self._defined.get(fact.get_id(), ()))
            ]
            more = set().union(*defining) - reached
            again = bool(more)
            reached |= more
        return [fact for fact, names in waiting if names <= reached]


def integer(value: Any) -> Int:
    """A number of z3's."""
    return z3.IntVal(value) if isinstance(value, int) else value


def conjunction(conditions: Iterable[Any]) -> Bool:
    """All of them."""
    found = [c for c in conditions if not (z3.is_expr(c) and z3.is_true(c))]
    return z3.BoolVal(True) if not found else found[0] if len(found) == 1 else z3.And(*found)
