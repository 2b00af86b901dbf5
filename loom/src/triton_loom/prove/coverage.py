"""Every element of an output is written: a program, a lane and an iteration that do are found for each.

They are searched among a few shapes that kernels have (element // 1024 is the program, element % 1024 the lane).
What is right for some small sizes is then proven for all. Where nothing is found, small sizes are searched for an
element that nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from .answers import Answer, Example
from .contract import Bool, Buffer, Int, constants_of
from .lemmas import about_products, about_quotients
from .obligations import Access
from .proving import Prover
from .races import Second, iterations
from .scope import conjunction, integer
from .solver import QUICK, Lemmas, Solution, ask, decide, z3
from .values import Place

_FIRST_TRIED, _MOST_TRIED = 300, 2000
Binding = list[tuple[Any, Any]]


def covered(prover: Prover, output: str) -> Answer:
    """Whether every element of an output is written."""
    stores = [
        (access, place)
        for access in prover.question.accesses
        if access.writes
        for place in access.places
        if place.argument == output
    ]
    what = f"all of {output}"
    if not stores:
        return Answer("covered", what, prover.function.location, "unknown", "no store to it was found")
    location = stores[0][0].op.location
    searches = [_Search(prover, access, place) for access, place in stores]
    if any(search.proven(_FIRST_TRIED) for search in searches):
        return Answer("covered", what, location, "proven", "by a witness")
    example = _missed(prover, output, stores)
    if example is not None:
        return Answer("covered", what, location, "counterexample", example=example)
    if any(search.proven(_MOST_TRIED) for search in searches):
        return Answer("covered", what, location, "proven", "by a witness")
    return Answer(
        "covered", what, location, "unknown", "no program was found that writes an arbitrary element"
    )


def _element(prover: Prover, output: str) -> tuple[list[Any], list[Bool], Int]:
    """Any element of an output: its index, that it is one, and its offset."""
    scope = prover.evaluator.scope
    buffer: Buffer = prover.contract.arguments[output]
    dims = buffer.dims or ((prover.evaluator.extents[output], 1),)
    index = [z3.Int(f"element.{number}") for number in range(len(dims))]
    inside, offset = [], z3.IntVal(0)
    for i, (size, stride) in zip(index, dims, strict=True):
        inside += [i >= 0, i < scope.without_division(integer(size))]
        offset = offset + i * scope.without_division(integer(stride))
    return index, inside, offset


class _Search:
    """For a program, lane and iteration that write an element."""

    def __init__(self, prover: Prover, access: Access, place: Place) -> None:
        evaluator = prover.evaluator
        assert place.argument is not None
        self.prover, self.access = prover, access
        self.index, self.inside, offset = _element(prover, place.argument)
        self.local = Second(evaluator).local
        self.turns = [lane for lane in access.lane if not z3.is_int_value(lane)]
        self.times = iterations(evaluator, access.op)
        ranges = [
            z3.And(lane >= 0, lane < size) for lane, size in evaluator.lanes.values() if self._is_turn(lane)
        ]
        programs = [z3.And(p >= 0, p < g) for p, g in zip(evaluator.programs, evaluator.grid, strict=True)]
        self.needed = [*access.happens, place.when, place.offset == offset, *ranges, *programs]
        self.shared = [f for f in prover.common if self.local.keys().isdisjoint(constants_of([f]))]
        self.shared += [f for f in evaluator.scope.facts if self.local.keys().isdisjoint(constants_of([f]))]

    def _is_turn(self, constant: Any) -> bool:
        return any(constant.eq(turn) for turn in self.turns)

    def proven(self, most: int) -> bool:
        """Whether a witness was found and proven to be one for all sizes."""
        scope = self.prover.evaluator.scope
        names = constants_of(self.needed)
        loads = set(scope.loaded) | set(scope.opaque)
        if not loads.isdisjoint(names):
            return False
        samples = list(self._samples())
        for binding in islice(self._candidates(), most):
            if all(self._right(binding, sample) for sample in samples) and self._for_all(binding):
                return True
        return False

    def _samples(self) -> Iterator[Solution]:
        """Some sizes with an element, the first and last elements of some among them."""
        facts = [*self.shared, *self.inside]
        small = [size <= max(size.low, 40) for size in self.prover.contract.sizes]
        larger = [size >= min(size.high, 70) for size in self.prover.contract.sizes]
        above = [size <= max(size.low, 3000) for size in self.prover.contract.sizes]
        for more in (
            small,
            [*larger, *above],
            [*larger, *above, *(i >= 67 for i in self.index)],
            [i >= 1 for i in self.index],
        ):
            solution = ask([*facts, *more], z3.BoolVal(False), QUICK)
            if solution.verdict == "counterexample":
                yield solution

    def _right(self, binding: Binding, sample: Solution) -> bool:
        """Whether a candidate is a witness for the sizes and the element of a sample."""
        known = [(c, z3.IntVal(sample.value(c))) for c in [*self.prover.contract.sizes, *self.index]]
        bound = {
            constant.get_id(): (constant, z3.simplify(z3.substitute(e, *known))) for constant, e in binding
        }
        pairs = [*known, *bound.values()]
        for d in self.prover.evaluator.scope.divisions.values():
            a, b = (z3.simplify(z3.substitute(e, *pairs)) for e in (d.a, d.b))
            if z3.is_int_value(a) and z3.is_int_value(b) and b.as_long() > 0:
                q, r = divmod(a.as_long(), b.as_long())
                pairs += [(d.quotient, z3.IntVal(q)), (d.remainder, z3.IntVal(r))]
        for fact in self.prover.evaluator.scope.facts:  # the counters of loops
            if z3.is_eq(fact) and z3.is_const(fact.arg(0)) and fact.arg(0).get_id() in self.local:
                value = z3.simplify(z3.substitute(fact.arg(1), *pairs))
                if z3.is_int_value(value):
                    pairs.append((fact.arg(0), value))
        return all(z3.is_true(z3.simplify(z3.substitute(need, *pairs))) for need in self.needed)

    def _candidates(self) -> Iterator[Binding]:
        evaluator = self.prover.evaluator
        sizes = sorted({size for _, size in evaluator.lanes.values() if size > 1})
        lanes = dict(evaluator.lanes.values())
        choices: list[list[Binding]] = []
        for turn in self.turns:
            size = next(n for lane, n in lanes.items() if lane.eq(turn))
            smaller = [(i / other) % size for i in self.index for other in sizes]
            found = [*(i % size for i in self.index), *self.index, *smaller, z3.IntVal(0)]
            choices.append([[(turn, e)] for e in found])
        parts = [*self.index, *(i / size for i in self.index for size in sizes)]
        parts += [i / (a * b) for i in self.index for a in sizes for b in sizes]
        parts = list({str(p): p for p in parts}.values())
        for count in self.times:
            choices.append([[(count, e)] for e in [*parts, z3.IntVal(0)]])
        for program, size in zip(evaluator.programs, evaluator.grid, strict=True):
            if z3.is_int_value(size) and size.as_long() == 1:
                choices.append([[(program, z3.IntVal(0))]])
                continue
            found = [[(program, e)] for e in [*parts, z3.IntVal(0)]]
            for d in evaluator.scope.divisions.values():
                if d.a.eq(program):
                    split = [(q, r) for q in parts for r in [*parts, z3.IntVal(0)]]
                    found += [[(program, q * d.b + r), (d.quotient, q), (d.remainder, r)] for q, r in split]
            choices.append(found)
        for choice in product(*choices):
            yield [pair for binding in choice for pair in binding]

    def _for_all(self, binding: Binding) -> bool:
        evaluator = self.prover.evaluator
        facts = [*self.shared, *self.inside]
        needed = list(self.needed)
        bound = {constant.get_id() for constant, _ in binding}
        for d in evaluator.scope.divisions.values():
            if (
                d.quotient.get_id() in bound
            ):  # the quotient is what it is bound to if the remainder can be one
                needed += [d.remainder >= 0, d.remainder < d.b, d.a == d.quotient * d.b + d.remainder]
        for fact in evaluator.scope.facts:
            names = constants_of([fact]).keys()
            if not self.local.keys().isdisjoint(names) and not _about_bound(fact, binding, evaluator):
                facts.append(z3.substitute(fact, *binding))
        goal = z3.substitute(conjunction(needed), *binding)
        divisions = [d for d in evaluator.scope.divisions.values() if d.quotient.get_id() not in bound]
        everything = [*facts, goal]
        lemmas: dict[str, Lemmas] = {
            "products": lambda: about_products(everything),
            "quotients": lambda: [*about_quotients(everything, divisions), *about_products(everything)],
        }
        return decide(facts, goal, lemmas, self.prover.effort).verdict == "proven"


def _about_bound(fact: Any, binding: Binding, evaluator: Any) -> bool:
    """The definition of a quotient that is bound: it has to be shown, not assumed."""
    names = constants_of([fact])
    bound = {constant.get_id() for constant, _ in binding}
    quotients = {d.quotient.get_id() for d in evaluator.scope.divisions.values()} & bound
    return not quotients.isdisjoint(names)


def _missed(prover: Prover, output: str, stores: Sequence[tuple[Access, Place]]) -> Example | None:
    """An element that nobody writes, for some small sizes."""
    index, inside, offset = _element(prover, output)
    evaluator = prover.evaluator
    local = Second(evaluator).local
    shared = [
        f for f in [*prover.common, *evaluator.scope.facts] if local.keys().isdisjoint(constants_of([f]))
    ]
    names = constants_of([e for access, place in stores for e in (*access.happens, place.offset)])
    if not (set(evaluator.scope.loaded) | set(evaluator.scope.opaque)).isdisjoint(names):
        return None
    dims = prover.contract.arguments[output].dims or ((prover.evaluator.extents[output], 1),)
    for sizes in _small_sizes(prover, [*shared, *inside]):
        fixed = [size == sizes.value(size) for size in prover.contract.sizes]
        ends = [sizes.value(size) - 1 for size, _ in dims]
        corners = dict.fromkeys(product(*((end, 0) for end in ends)))
        for element in (*corners, tuple(end // 2 for end in ends)):
            at = [i == value for i, value in zip(index, element, strict=True)]
            written = (
                ask(
                    prover.facts([*access.happens, place.when, *fixed, *at, *inside], place.offset == offset),
                    place.offset != offset,
                )
                for access, place in stores
            )
            if all(answer.verdict == "proven" for answer in written):  # not to be
                x, y, z = (sizes.value(size) for size in evaluator.grid)
                named = {size.name: sizes.value(size) for size in prover.contract.sizes}
                return Example(named, (x, y, z), (0, 0, 0), detail=f"nobody writes the element at {element}")
    return None


def _small_sizes(prover: Prover, facts: Sequence[Bool]) -> Iterator[Solution]:
    sizes = prover.contract.sizes
    for number in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129):
        exactly = [size == min(max(number, size.low), size.high) for size in sizes]
        about = [z3.And(size >= min(number, size.high), size <= max(size.low, 2 * number)) for size in sizes]
        for near in (exactly, about):
            solution = ask([*facts, *near], z3.BoolVal(False), QUICK // 4)
            if solution.verdict == "counterexample":
                yield solution
                break
