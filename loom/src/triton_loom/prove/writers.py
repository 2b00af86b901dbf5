"""Guesses of the writer of an output's element: a program, a lane and an iteration, as expressions of its index.

Candidates are not enumerated. At some sizes the solver is asked for numbers: which program writes this element?
Each number, including the digits that kernels split their programs into, is then matched with digits of the index
(row // 32, column % 128, ...) by its values in all of these samples. The result is a guess; `coverage` proves or
discards it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import cycle, islice, product
from operator import mul
from typing import Any

from .contract import Bool, Int, Symbol, constants_of, parts_of
from .evaluate import Evaluator
from .obligations import Access
from .races import Second, iterations
from .scope import Division, integer
from .solver import QUICK, Search, Solution, solve, z3
from .values import Target

Binding = list[tuple[Any, Any]]  # (constant of a program, its value for the program that writes the element)
_SAMPLES = 8  # per store
_MAX_DIVISORS = 14
_MAX_TERMS = 30_000
_EFFORT = QUICK // 4  # per sample
_LARGEST = 2**16
_USUAL_SIZES = ((307, 523, 211, 401, 151, 263), (1031, 90, 613, 37, 700, 83))
_LARGE_SIZES = tuple(7 * 2**power for power in range(12, -1, -2))  # preferred lower bounds


class Element:
    """Arbitrary element of an output."""

    def __init__(self, evaluator: Evaluator, output: str) -> None:
        scope = evaluator.scope
        dims = _dims(evaluator, output)
        self.index = [z3.Int(f"element!{number}") for number in range(len(dims))]
        self.sizes = [scope.without_division(integer(size)) for size, _ in dims]
        strides = [scope.without_division(integer(stride)) for _, stride in dims]
        self.offset: Int = z3.Sum(*(i * s for i, s in zip(self.index, strides, strict=True)))
        # Merged neighboring dimensions: 0 <= i < n and 0 <= j < m imply 0 <= i * m + j < n * m.
        self.runs: list[Int] = []
        self.inside: list[Bool] = []
        for length in range(1, len(dims) + 1):
            for first in range(len(dims) - length + 1):
                run: Int = z3.IntVal(0)
                for number in range(first, first + length):
                    run = run * self.sizes[number] + self.index[number]
                self.runs.append(z3.simplify(run, som=True))
                extent = reduce(mul, self.sizes[first : first + length])
                self.inside += [self.runs[-1] >= 0, self.runs[-1] < extent]


def _dims(evaluator: Evaluator, output: str) -> list[tuple[Int, Int]]:
    """Return (size, stride) of an output's dimensions.

    The shape of a contiguous output is used if it has as many elements.
    """
    buffer = evaluator.contract.arguments[output]
    if buffer.dims is not None:
        return list(buffer.dims)
    dims: list[tuple[Int, Int]] = []
    count: Int = 1
    for size in reversed(buffer.shape or ()):
        dims.insert(0, (size, count))
        count = count * size
    counted = evaluator.scope.without_division(integer(count))
    difference = z3.simplify(counted - evaluator.extents[output], som=True)
    same = z3.is_int_value(difference) and difference.as_long() == 0
    return dims if dims and same else [(evaluator.extents[output], 1)]


@dataclass
class Store:
    """Store to an output in one lane, and the conditions under which it writes the element."""

    access: Access
    target: Target
    evaluator: Evaluator
    element: Element
    turns: list[Any] = field(init=False)  # constants that distinguish its executions
    ranges: list[Bool] = field(init=False)  # of programs and lanes
    needed: list[Bool] = field(init=False)
    local: dict[int, Any] = field(init=False)  # constants that belong to a program

    def __post_init__(self) -> None:
        evaluator = self.evaluator
        lanes = [lane for lane in self.access.lane if not z3.is_int_value(lane)]
        self.turns = [*lanes, *iterations(evaluator, self.access.op), *evaluator.programs]
        self.ranges = [
            z3.And(lane >= 0, lane < size)
            for lane, size in evaluator.lanes.values()
            if any(lane.eq(own) for own in lanes)
        ]
        self.ranges += [
            z3.And(p >= 0, p < n) for p, n in zip(evaluator.programs, evaluator.grid, strict=True)
        ]
        self.needed = [*self.access.happens, self.target.when, self.target.offset == self.element.offset]
        self.local = Second(evaluator).local

    def is_shared(self, expression: Any) -> bool:
        """Return whether all programs have an expression in common."""
        return self.local.keys().isdisjoint(constants_of([expression]))


@dataclass(frozen=True)
class _Term:
    """Digit of the index, or digit of a digit."""

    values: tuple[int, ...]  # in the samples
    build: Callable[[], Any]


class Guesses:
    """Bindings under which a store may write any element that it writes at all."""

    def __init__(self, store: Store, shared: Sequence[Bool], sizes: Sequence[Sizes]) -> None:
        self.store, self.scope = store, store.evaluator.scope
        self.samples = list(islice(_samples(store, shared, sizes), _SAMPLES))
        self.divisions: list[Division] = []
        if self.samples:
            constants = constants_of([*store.needed, *self.scope.relevant(store.needed)])
            self.divisions = [
                d
                for d in self.scope.divisions.values()
                if d.quotient.get_id() in constants and not store.is_shared(d.a)
            ]
            self.numbers, self.shared = self._divisors()
            self.terms = self._terms()

    def __iter__(self) -> Iterator[Binding]:
        """Yield the simplest binding first, then others that agree in all samples."""
        if not self.samples:
            return
        options = []
        axes = zip(self.store.evaluator.programs, self.store.evaluator.grid, strict=True)
        single = {axis.get_id() for axis, size in axes if z3.is_int_value(size) and size.as_long() == 1}
        for turn in self.store.turns:
            fits_ = list(islice(self._fitting(turn, 3), 2))
            if turn.get_id() in single:
                fits_ = [(z3.IntVal(0), [])]
            if not fits_:
                return
            options.append([[(turn, e), *more] for e, more in fits_])
        for choice in islice(product(*options), 4):
            binding = {old.get_id(): (old, new) for pairs in choice for old, new in pairs}
            for d in self.divisions:
                if d.quotient.get_id() not in binding and d.remainder.get_id() not in binding:
                    parts = [next(self._fitting(part, 1), None) for part in (d.quotient, d.remainder)]
                    for part, fits in zip((d.quotient, d.remainder), parts, strict=True):
                        if all(parts) and fits is not None:
                            for old, new in [(part, fits[0]), *fits[1]]:
                                binding.setdefault(old.get_id(), (old, new))
            yield list(binding.values())

    def _values(self, expression: Any) -> tuple[int, ...]:
        return tuple(sample.value(expression) for sample in self.samples)

    def _divisors(self) -> tuple[list[int], list[Any]]:
        """Return the divisors by which kernels split numbers: tile extents, other numbers, and shared sizes."""
        expressions = [*self.store.needed, *self.scope.relevant(self.store.needed)]
        numbers = {size for _, size in self.store.evaluator.lanes.values()}
        shared: dict[str, Any] = {}
        for expression in expressions:
            for part in parts_of(z3.simplify(expression)):
                if z3.is_mul(part) or part.decl().kind() in (z3.Z3_OP_IDIV, z3.Z3_OP_MOD):
                    numbers |= {abs(e.as_long()) for e in part.children() if z3.is_int_value(e)}
                if z3.is_mul(part) and not self.store.is_shared(
                    part
                ):  # such as the rows of a program, which are a quotient
                    factors = [e for e in part.children() if self.store.is_shared(e)]
                    shared_product = z3.simplify(reduce(mul, factors, z3.IntVal(1)))
                    if constants_of([shared_product]):
                        shared.setdefault(str(shared_product), shared_product)
        for constant in constants_of(expressions).values():
            if z3.is_int(constant) and self.store.is_shared(constant):
                shared[str(constant)] = constant
        for axis in self.store.evaluator.grid:
            if not z3.is_int_value(axis):
                shared.setdefault(str(axis), axis)
        for d in self.divisions:
            if self.store.is_shared(d.b):
                shared.setdefault(str(d.b), d.b)
        for index in self.store.element.index:
            shared.pop(str(index), None)
        ranked = sorted(shared.values(), key=lambda e: (not z3.is_const(e), str(e)))
        return sorted(numbers - {0, 1})[:_MAX_DIVISORS], ranked[:_MAX_DIVISORS]

    def _terms(self) -> dict[tuple[int, ...], list[_Term]]:
        """Return the digits of the index by their values, simple ones first."""
        terms: dict[tuple[int, ...], list[_Term]] = {}
        divisors: list[tuple[Any, tuple[int, ...]]] = [
            *((e, values) for e in self.shared if min(values := self._values(e)) > 0),
            *((integer(n), (n,) * len(self.samples)) for n in self.numbers),
        ]
        zero = (0,) * len(self.samples)
        level = [_Term(zero, lambda: z3.IntVal(0))]
        level += [_Term(self._values(run), lambda run=run: run) for run in self.store.element.runs]  # type: ignore[misc]
        count = 0
        for _ in range(3):
            new_terms = []
            for term in level:
                equal_terms = terms.setdefault(term.values, [])
                if len(equal_terms) < 2:
                    equal_terms.append(term)
                    new_terms.append(term)
            level = []
            for term in new_terms:
                if term.values == zero or count > _MAX_TERMS:
                    continue
                for divisor, values in divisors:
                    level += self._parts(term, divisor, values)
                    count += 3
        return terms

    def _parts(self, term: _Term, divisor: Any, values: tuple[int, ...]) -> Iterator[_Term]:
        both = list(zip(term.values, values, strict=True))
        yield _Term(tuple(a // b for a, b in both), lambda: self.scope.divide(term.build(), divisor).quotient)
        yield _Term(tuple(a % b for a, b in both), lambda: self.scope.divide(term.build(), divisor).remainder)
        if all(a >= b for a, b in both):
            yield _Term(tuple(a - b for a, b in both), lambda: term.build() - divisor)

    def _fitting(self, expression: Any, depth: int) -> Iterator[tuple[Any, Binding]]:
        """Yield expressions that match an expression's values in the samples, with the bindings of its parts."""
        if z3.is_int_value(expression):
            yield expression, []
            return
        values = self._values(expression)
        for d in self.divisions if depth else ():
            rest = z3.simplify(d.a - expression, som=True)
            if not d.quotient.eq(expression) and self.store.is_shared(rest):
                for q, more in islice(self._fitting(d.quotient, depth - 1), 1):
                    for r, still in islice(self._fitting(d.remainder, depth - 1), 1):
                        yield q * d.b + r - rest, [(d.quotient, q), (d.remainder, r), *more, *still]
        for term in self.terms.get(values, ()):
            yield term.build(), []
        if not depth:
            return
        for number in self.numbers:
            parts = [tuple(v // number for v in values), tuple(v % number for v in values)]
            high, low = (self.terms.get(part) for part in parts)
            if high and low:
                yield number * high[0].build() + low[0].build(), []
        for size in self.shared:
            less = tuple(v - s for v, s in zip(values, self._values(size), strict=True))
            for term in self.terms.get(less, ())[:1]:
                yield size + term.build(), []


Sizes = tuple[Binding, Solution]  # numbers for the sizes of a contract, and a solution with them


def sizes_of(evaluator: Evaluator, shared: Sequence[Bool]) -> list[Sizes]:
    """Return some sizes that a contract allows, neither small nor round if possible."""
    result: list[Sizes] = []
    sizes, search = evaluator.contract.sizes, Search(shared, _EFFORT)
    for wanted in (*_USUAL_SIZES, None) if sizes else (None,):
        solution = search.nearest([_near(place, size, wanted) for place, size in enumerate(sizes)])
        if solution is not None:
            result.append(([(size, solution.value(size)) for size in sizes], solution))
    return result


def _near(position: int, size: Symbol, wanted: Sequence[int] | None) -> list[Bool]:
    """Return wishes for a size, best first: close to the wanted number at its position, or large."""
    wishes = [size >= low for low in _LARGE_SIZES]
    if wanted is not None:
        usual = wanted[position] if position < len(wanted) else 19
        ranges = ((usual, 4 * usual), (usual // 4, usual), (usual // 16, usual // 4))
        wishes = [size == usual, *(z3.And(size >= low, size <= high) for low, high in ranges)]
    return [*(z3.And(wish, size <= _LARGEST) for wish in wishes), size <= _LARGEST]


def _samples(store: Store, shared: Sequence[Bool], sizes: Sequence[Sizes]) -> Iterator[Solution]:
    """Yield elements that a store writes at some sizes, and their writers."""
    element, draw = store.element, random.Random(0)
    conditions = [*shared, *element.inside, *store.ranges, *store.needed]
    conditions += store.evaluator.scope.relevant(conditions)
    for number, (size_values, solution) in enumerate(islice(cycle(sizes), 2 * _SAMPLES)):
        facts = at(size_values, conditions)
        facts += [size == value for size, value in size_values]
        windows = []
        for i, size in zip(element.index, element.sizes, strict=True):
            count = solution.value(size)
            last = (
                number // len(sizes) == 1
            )  # among the last elements, where most kernels have another program
            first = max(0, count - draw.randrange(1, 9)) if last else draw.randrange(max(1, count))
            windows.append(z3.And(i >= first, i <= first + count // 8))
        while True:
            answer = solve([*facts, *windows], _EFFORT)
            if answer.verdict == "counterexample":
                yield answer
            if answer.verdict == "counterexample" or not windows:
                break
            windows.pop(draw.randrange(len(windows)))


def at(sizes: Sequence[tuple[Any, Any]], expressions: Sequence[Any]) -> list[Any]:
    """Substitute numbers for sizes in expressions."""
    pairs = [(size, integer(value)) for size, value in sizes]
    return [z3.simplify(z3.substitute(e, *pairs)) if pairs else e for e in expressions]
