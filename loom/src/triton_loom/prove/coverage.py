"""Every element of an output is written.

For each store a program, a lane and an iteration are guessed that write an arbitrary element (`writers`), as
expressions of its index. Then it is proven, for all sizes and elements, that there is such a program, and that its
store is to this element and takes place. Several stores may do it together, each for a part of the elements. Where
nothing is proven, some sizes are searched for an element that nobody writes.
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

_MOST_STORES = 16
_MOST_CASES = 16  # of an index that has few values
_MOST_HARD = 5  # questions about an output that lemmas are made for, which takes far longer than without them


def covered(prover: Prover, output: str) -> Answer:
    """Whether every element of an output is written."""
    what, evaluator = f"all of {output}", prover.evaluator
    element = Element(evaluator, output)
    stores = [
        Store(access, place, evaluator, element)
        for access in prover.question.accesses
        if access.replaces
        for place in access.places
        if place.argument == output
    ]
    if not stores:
        return Answer("covered", what, prover.function.location, "unknown", "no store to it was found")
    location = stores[0].access.op.location
    search = _Search(prover, element, stores[:_MOST_STORES])
    if search.proven():
        return Answer("covered", what, location, "proven", "by a witness")
    example = _missed(prover, search.shared, element, stores)
    if example is not None:
        return Answer("covered", what, location, "counterexample", example=example)
    why = "no program was found that writes an arbitrary element"
    return Answer("covered", what, location, "unknown", why)


@dataclass
class _Writer:
    """A store by a program that is bound to the element."""

    store: Store
    binding: Binding
    ranges: list[Bool]  # that there is such a program and lane, as far as that is not proven
    needed: list[Bool]  # that the store takes place and is to the element, as far as that is not proven
    facts: list[Bool]  # of the program, if there is one
    wrong: bool  # some of it does not hold for all elements


class _Search:
    """For programs that write an element."""

    def __init__(self, prover: Prover, element: Element, stores: Sequence[Store]) -> None:
        self.prover, self.element, self.stores = prover, element, stores
        self.scope = prover.evaluator.scope
        self.shared = [fact for fact in prover.common if stores[0].is_shared(fact)]
        self._hard = 0  # questions so far that were

    def proven(self) -> bool:
        """Whether every element is written, by one store or by several together."""
        partial: list[_Writer] = []
        for store in self.stores:
            found = []
            for binding in Guesses(store, self.shared, self.prover.some_sizes):
                writer = self._writer(store, binding)
                if not writer.ranges and not writer.needed:
                    return True
                found.append(writer)
                if not writer.wrong:
                    break  # the solver does not know, and would not of another guess
            partial += sorted(found, key=lambda writer: len(writer.ranges) + len(writer.needed))[:1]
        return len(partial) > 1 and self._together(partial)

    def known(self, expressions: Sequence[Any]) -> list[Bool]:
        """What is known of expressions that all programs share."""
        return [fact for fact in self.scope.relevant(expressions) if self.stores[0].is_shared(fact)]

    def _writer(self, store: Store, binding: Binding) -> _Writer:
        """The program of a guess. Facts about programs hold for those that there are: that there is this one is shown
        without them, and what is needed of it is shown with them, if there is one."""
        bound = {constant.get_id() for constant, _ in binding}
        needed = list(store.needed)
        facts = []
        quotients = set()
        for d in self.scope.divisions.values():
            if d.quotient.get_id() in bound or d.remainder.get_id() in bound:
                # The quotient is what it is bound to if the remainder can be one. That is to be shown, not assumed.
                quotients |= {d.quotient.get_id(), d.remainder.get_id()}
                needed += [d.remainder >= 0, d.remainder < d.b, d.a == d.quotient * d.b + d.remainder]
        for fact in self.scope.relevant([*self.shared, *needed]):
            if not store.is_shared(fact) and quotients.isdisjoint(constants_of([fact])):
                facts.append(z3.substitute(fact, *binding))
        needed, ranges = (
            _conjuncts([z3.substitute(e, *binding) for e in part]) for part in (needed, store.ranges)
        )
        found = [(there, self._verdict([], there)) for there in ranges]
        open_ranges = [there for there, verdict in found if verdict != "proven"]
        found += [(need, self._verdict([*facts, *ranges], need)) for need in needed]
        open_needed = [need for need, verdict in found[len(ranges) :] if verdict != "proven"]
        wrong = any(verdict == "counterexample" for _, verdict in found)
        return _Writer(store, binding, open_ranges, open_needed, facts, wrong)

    def _together(self, writers: Sequence[_Writer]) -> bool:
        """Whether each element is written by one of several."""
        facts: list[Bool] = []
        ways: list[Bool] = []
        for number, writer in enumerate(writers):
            names: Binding = []
            if not all(_agree(writer.binding, other.binding) for other in writers):
                # It is another program: what is not bound is something else there.
                names = [(c, z3.Const(f"{c}#{number}", c.sort())) for c in writer.store.local.values()]
            exists = conjunction(writer.ranges)
            facts += [z3.substitute(z3.Implies(exists, fact), *names) for fact in writer.facts]
            ways.append(z3.substitute(conjunction([*writer.ranges, *writer.needed]), *names))
        goal = z3.Or(*ways)
        cases: list[Binding] = [[]]
        for i, size in zip(self.element.index, self.element.sizes, strict=True):
            if z3.is_int_value(size) and size.as_long() * len(cases) <= _MOST_CASES:
                cases = [[*case, (i, z3.IntVal(n))] for case in cases for n in range(size.as_long())]
        for case in cases:
            known, wanted = [z3.substitute(fact, *case) for fact in facts], z3.substitute(goal, *case)
            if self._verdict(known, wanted, case) != "proven":
                return False
        return True

    def _verdict(self, more: Sequence[Bool], goal: Bool, case: Binding | None = None) -> Verdict:
        """Whether a goal holds for all sizes and elements, or for those of a case."""
        if self._is_plain(goal):
            return "proven"
        known = [*self.shared, *self.element.inside, *more]
        known += self.known([*known, goal])
        if case:
            known = [z3.substitute(fact, *case) for fact in known]
        solution = ask(known, goal, QUICK // 2)
        self._hard += solution.verdict == "unknown"
        if solution.verdict != "unknown" or self._hard > _MOST_HARD:
            return solution.verdict
        everything = [*known, goal]
        names = constants_of(everything)
        divisions = [d for d in self.scope.divisions.values() if d.quotient.get_id() in names]
        lemmas = [*about_quotients(everything, divisions), *about_products(everything)]
        if self.prover.linear.follows([*known, *lemmas], goal):
            return "proven"
        return ask([*known, *lemmas], goal, QUICK).verdict

    def _is_plain(self, goal: Bool) -> bool:
        """Whether a goal is true as it is written."""
        if not (z3.is_eq(goal) and z3.is_int(goal.arg(0))):
            return z3.is_true(z3.simplify(goal))
        difference = undivided(goal.arg(0) - goal.arg(1), self._is_shown)
        return bool(z3.is_int_value(difference) and difference.as_long() == 0)

    def _is_shown(self, goal: Bool) -> bool:
        """Whether something holds of the sizes."""
        return ask([*self.shared, *self.known([*self.shared, goal])], goal, QUICK // 2).verdict == "proven"


def _agree(one: Binding, other: Binding) -> bool:
    """Whether two bindings can be those of one program, lane and iteration."""
    known = {constant.get_id(): e for constant, e in one}
    return all(known[constant.get_id()].eq(e) for constant, e in other if constant.get_id() in known)


def _conjuncts(conditions: Sequence[Bool]) -> list[Bool]:
    """Conditions one by one."""
    found: list[Bool] = []
    for condition in conditions:
        found += _conjuncts(condition.children()) if z3.is_and(condition) else [condition]
    return found


def _missed(
    prover: Prover, shared: Sequence[Bool], element: Element, stores: Sequence[Store]
) -> Example | None:
    """An element that nobody writes, for some small sizes."""
    evaluator = prover.evaluator
    known = [*element.inside, *evaluator.scope.relevant([*shared, *element.inside])]
    shared = [*shared, *(fact for fact in known if stores[0].is_shared(fact))]
    for sizes in _small_sizes(prover, shared):
        given = [(size, sizes.value(size)) for size in prover.contract.sizes]
        ends = [sizes.value(size) - 1 for size in element.sizes]
        corners = dict.fromkeys(product(*((end, 0) for end in ends)))
        for place in islice(dict.fromkeys([*islice(corners, 4), tuple(end // 2 for end in ends)]), 5):
            here = [*given, *zip(element.index, place, strict=True)]
            if all(_never(prover, store, here) for store in stores):
                x, y, z = (sizes.value(size) for size in evaluator.grid)
                named = {size.name: value for size, value in given}
                return Example(named, (x, y, z), (0, 0, 0), detail=f"nobody writes the element at {place}")
    return None


def _never(prover: Prover, store: Store, here: Binding) -> bool:
    """Whether a store does not write an element, whichever program it is in."""
    facts = prover.facts([*store.ranges, *store.needed], z3.BoolVal(False))
    known = [constant == value for constant, value in here]
    return ask([*at(here, facts), *known], z3.BoolVal(False), QUICK // 2).verdict == "proven"


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
