"""Proof that every element of an output is written.

For each store, a program, a lane and an iteration that write an arbitrary element are guessed (`writers`), as
expressions of the element's index. It is then proven, for all sizes and elements, that this program exists and that
its store happens and hits this element. Several stores may share the elements. Where no proof succeeds, some sizes
are searched for an element that nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from .answers import Answer, Example
from .contract import Bool, constants_of
from .lemmas import about_products, about_quotients
from .proving import Prover
from .scope import conjunction
from .solver import QUICK, Solution, Verdict, ask, z3
from .sums import undivided
from .writers import Binding, Element, Guesses, Store, at

_MAX_STORES = 16
_MAX_CASES = 16  # cases of an index with few values
_MAX_HARD = 5  # questions per output that may use lemmas, which take far longer


def covered(prover: Prover, output: str) -> Answer:
    """Answer whether every element of an output is written."""
    what, evaluator = f"all of {output}", prover.evaluator
    element = Element(evaluator, output)
    stores = [
        Store(access, target, evaluator, element)
        for access in prover.question.accesses
        if access.replaces
        for target in access.targets
        if target.argument == output
    ]
    if not stores:
        return Answer("covered", what, prover.function.location, "unknown", "no store to it was found")
    location = stores[0].access.op.location
    search = _Search(prover, element, stores[:_MAX_STORES])
    if search.proven():
        return Answer("covered", what, location, "proven", "by a witness")
    example = _missed(prover, search.shared, element, stores)
    if example is not None:
        return Answer("covered", what, location, "counterexample", example=example)
    why = "no program was found that writes an arbitrary element"
    return Answer("covered", what, location, "unknown", why)


@dataclass
class _Writer:
    """Store by a program that is bound to the element."""

    store: Store
    binding: Binding
    ranges: list[Bool]  # unproven conditions for the program and lane to exist
    needed: list[Bool]  # unproven conditions for the store to happen and to hit the element
    facts: list[Bool]  # about the program, if it exists
    wrong: bool  # a condition fails for some element


class _Search:
    """Search for programs that write an element."""

    def __init__(self, prover: Prover, element: Element, stores: Sequence[Store]) -> None:
        self.prover, self.element, self.stores = prover, element, stores
        self.scope = prover.evaluator.scope
        self.shared = [fact for fact in prover.common if stores[0].is_shared(fact)]
        self._hard = 0  # hard questions so far

    def proven(self) -> bool:
        """Return whether every element is written, by one store or by several together."""
        partial: list[_Writer] = []
        for store in self.stores:
            candidates = []
            for binding in Guesses(store, self.shared, self.prover.some_sizes):
                writer = self._writer(store, binding)
                if not writer.ranges and not writer.needed:
                    return True
                candidates.append(writer)
                if not writer.wrong:
                    break  # the solver gave up, and would on another guess too
            partial += sorted(candidates, key=lambda writer: len(writer.ranges) + len(writer.needed))[:1]
        return len(partial) > 1 and self._together(partial)

    def shared_facts(self, expressions: Sequence[Any]) -> list[Bool]:
        """Return the facts about expressions that all programs share."""
        return [fact for fact in self.scope.relevant(expressions) if self.stores[0].is_shared(fact)]

    def _writer(self, store: Store, binding: Binding) -> _Writer:
        """Bind a store to a guessed program.

        Facts about programs hold for existing ones: the existence of this program is proven without them, its other
        conditions with them.
        """
        bound = {constant.get_id() for constant, _ in binding}
        needed = list(store.needed)
        facts = []
        quotients = set()
        for d in self.scope.divisions.values():
            if d.quotient.get_id() in bound or d.remainder.get_id() in bound:
                # The binding of a quotient is correct if the remainder is in range. That must be proven, not assumed.
                quotients |= {d.quotient.get_id(), d.remainder.get_id()}
                needed += [d.remainder >= 0, d.remainder < d.b, d.a == d.quotient * d.b + d.remainder]
        for fact in self.scope.relevant([*self.shared, *needed]):
            if not store.is_shared(fact) and quotients.isdisjoint(constants_of([fact])):
                facts.append(z3.substitute(fact, *binding))
        needed, ranges = (
            _conjuncts([z3.substitute(e, *binding) for e in part]) for part in (needed, store.ranges)
        )
        verdicts = [(condition, self._verdict([], condition)) for condition in ranges]
        open_ranges = [condition for condition, verdict in verdicts if verdict != "proven"]
        verdicts += [(condition_2, self._verdict([*facts, *ranges], condition_2)) for condition_2 in needed]
        open_needed = [condition_2 for condition_2, verdict in verdicts[len(ranges) :] if verdict != "proven"]
        wrong = any(verdict == "counterexample" for _, verdict in verdicts)
        return _Writer(store, binding, open_ranges, open_needed, facts, wrong)

    def _together(self, writers: Sequence[_Writer]) -> bool:
        """Return whether each element is written by one of several stores."""
        facts: list[Bool] = []
        ways: list[Bool] = []
        for number, writer in enumerate(writers):
            names: Binding = []
            if not all(_agree(writer.binding, other.binding) for other in writers):
                # It is another program: its unbound constants are different ones.
                names = [(c, z3.Const(f"{c}#{number}", c.sort())) for c in writer.store.local.values()]
            exists = conjunction(writer.ranges)
            facts += [z3.substitute(z3.Implies(exists, fact), *names) for fact in writer.facts]
            ways.append(z3.substitute(conjunction([*writer.ranges, *writer.needed]), *names))
        goal = z3.Or(*ways)
        cases: list[Binding] = [[]]
        for i, size in zip(self.element.index, self.element.sizes, strict=True):
            if z3.is_int_value(size) and size.as_long() * len(cases) <= _MAX_CASES:
                cases = [[*case, (i, z3.IntVal(n))] for case in cases for n in range(size.as_long())]
        for case in cases:
            premises, case_goal = [z3.substitute(fact, *case) for fact in facts], z3.substitute(goal, *case)
            if self._verdict(premises, case_goal, case) != "proven":
                return False
        return True

    def _verdict(self, more: Sequence[Bool], goal: Bool, case: Binding | None = None) -> Verdict:
        """Decide whether a goal holds for all sizes and elements, or for those of a case."""
        if self._is_plain(goal):
            return "proven"
        facts = [*self.shared, *self.element.inside, *more]
        facts += self.shared_facts([*facts, goal])
        if case:
            facts = [z3.substitute(fact, *case) for fact in facts]
        solution = ask(facts, goal, QUICK // 2)
        self._hard += solution.verdict == "unknown"
        if solution.verdict != "unknown" or self._hard > _MAX_HARD:
            return solution.verdict
        everything = [*facts, goal]
        names = constants_of(everything)
        divisions = [d for d in self.scope.divisions.values() if d.quotient.get_id() in names]
        lemmas = [*about_quotients(everything, divisions), *about_products(everything)]
        if self.prover.linear.follows([*facts, *lemmas], goal):
            return "proven"
        return ask([*facts, *lemmas], goal, QUICK).verdict

    def _is_plain(self, goal: Bool) -> bool:
        """Return whether a goal is syntactically true."""
        if not (z3.is_eq(goal) and z3.is_int(goal.arg(0))):
            return z3.is_true(z3.simplify(goal))
        difference = undivided(goal.arg(0) - goal.arg(1), self._is_shown)
        return bool(z3.is_int_value(difference) and difference.as_long() == 0)

    def _is_shown(self, goal: Bool) -> bool:
        """Return whether a condition holds for all sizes."""
        return (
            ask([*self.shared, *self.shared_facts([*self.shared, goal])], goal, QUICK // 2).verdict
            == "proven"
        )


def _agree(one: Binding, other: Binding) -> bool:
    """Return whether two bindings can belong to one program, lane and iteration."""
    values = {constant.get_id(): e for constant, e in one}
    return all(values[constant.get_id()].eq(e) for constant, e in other if constant.get_id() in values)


def _conjuncts(conditions: Sequence[Bool]) -> list[Bool]:
    """Split conjunctions into their conditions."""
    result: list[Bool] = []
    for condition in conditions:
        result += _conjuncts(condition.children()) if z3.is_and(condition) else [condition]
    return result


def _missed(
    prover: Prover, shared: Sequence[Bool], element: Element, stores: Sequence[Store]
) -> Example | None:
    """Search some small sizes for an element that nobody writes."""
    evaluator = prover.evaluator
    facts = [*element.inside, *evaluator.scope.relevant([*shared, *element.inside])]
    shared = [*shared, *(fact for fact in facts if stores[0].is_shared(fact))]
    for sizes in _small_sizes(prover, shared):
        size_values = [(size, sizes.value(size)) for size in prover.contract.sizes]
        ends = [sizes.value(size) - 1 for size in element.sizes]
        corners = dict.fromkeys(product(*((end, 0) for end in ends)))
        for index in islice(dict.fromkeys([*islice(corners, 4), tuple(end // 2 for end in ends)]), 5):
            values = [*size_values, *zip(element.index, index, strict=True)]
            if all(_never(prover, store, values) for store in stores):
                x, y, z = (sizes.value(size) for size in evaluator.grid)
                named = {size.name: value for size, value in size_values}
                return Example(named, (x, y, z), (0, 0, 0), detail=f"nobody writes the element at {index}")
    return None


def _never(prover: Prover, store: Store, values: Binding) -> bool:
    """Return whether a store never writes an element, in any program."""
    facts = prover.facts([*store.ranges, *store.needed], z3.BoolVal(False))
    values_ = [constant == value for constant, value in values]
    return ask([*at(values, facts), *values_], z3.BoolVal(False), QUICK // 2).verdict == "proven"


def _small_sizes(prover: Prover, facts: Sequence[Bool]) -> Iterator[Solution]:
    sizes = prover.contract.sizes
    for number in (1, 2, 17, 33, 64, 129):
        exactly = [size == min(max(number, size.low), size.high) for size in sizes]
        about = [z3.And(size >= min(number, size.high), size <= max(size.low, 2 * number)) for size in sizes]
        for near in (exactly, about):
            solution = ask([*facts, *near], z3.BoolVal(False), QUICK // 4)
            if solution.verdict == "counterexample":
                yield solution
                break
