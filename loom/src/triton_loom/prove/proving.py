"""Prover: asks the solver every question about a kernel and collects the answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..ir.reader import parse
from .answers import Answer, Example, Kind, Report
from .contract import Bool, Buffer, Contract, constants_of
from .digits import same
from .evaluate import Evaluator
from .lemmas import about_products, about_quotients, below, natural, range_of
from .linear import Linear
from .nested import inside
from .obligations import Obligation, Question, question
from .races import Pair, Second, races, twice
from .scope import conjunction
from .solver import QUICK, SEEDS, THOROUGH, Lemmas, Solution, ask, decide, persist, z3
from .views import is_element
from .writers import Sizes, sizes_of


class Prover:
    """Prover of one kernel, given as TTIR, under one contract."""

    def __init__(self, ttir: str, contract: Contract, effort: int = THOROUGH) -> None:
        self.function = parse(ttir).entry
        self.evaluator = Evaluator(self.function, contract)
        self.question: Question = question(self.evaluator)
        self.contract, self.effort = contract, effort
        self.common = self.evaluator.facts
        self._common_fact = conjunction(self.common)  # one expression is cheaper to translate than a hundred
        self._proven_facts: list[Bool] = []  # proven facts that help later questions
        self._solved: dict[tuple[Any, ...], tuple[Solution, Any]] = {}
        self.linear = Linear()  # shared: the questions have most facts in common

    def facts(self, more: Sequence[Bool], goal: Bool) -> list[Bool]:
        """Return all facts that may help to prove a goal."""
        scope = self.evaluator.scope
        facts = [self._common_fact, *more, *scope.relevant([self._common_fact, *more, goal])]
        names = constants_of([*facts, goal]).keys()
        return facts + [fact for fact in self._proven_facts if constants_of([fact]).keys() <= names]

    def contract_facts(self, goal: Bool) -> list[Bool]:
        """Return the facts of the contract, without those of every possible launch."""
        known = self.evaluator.contract_facts
        return [*known, *self.evaluator.scope.relevant([*known, goal])]

    def nearly(self, more: Sequence[Bool], goal: Bool) -> bool:
        """Return whether the facts about a goal's own constants prove it.

        In kernels with loops these are a small part of all facts, and quickly tried.
        """
        return ask(self._near(more, goal), goal, QUICK // 4).verdict == "proven"

    def _near(self, more: Sequence[Bool], goal: Bool) -> list[Bool]:
        return [self._common_fact, *more, *self.evaluator.scope.near([self._common_fact, *more, goal])]

    @cached_property
    def some_sizes(self) -> list[Sizes]:
        """Return some sizes of the contract."""
        local = Second(self.evaluator).local.keys()
        known = [fact for fact in self.common if local.isdisjoint(constants_of([fact]))]
        known += [
            fact for fact in self.evaluator.scope.relevant(known) if local.isdisjoint(constants_of([fact]))
        ]
        return sizes_of(self.evaluator, known)

    def solve(self, facts: Sequence[Bool], goal: Bool, seeds: Sequence[int] = (0,)) -> Solution:
        """Solve a question, with lemmas if needed; identical questions of several obligations are asked once."""
        if z3.is_true(z3.simplify(goal)):
            return Solution("proven")
        key = len(seeds), goal.get_id(), *sorted({fact.get_id() for fact in facts})
        if key not in self._solved:
            solution = self._solve(facts, goal, seeds)
            self._solved[key] = solution, (facts, goal)  # keeps the ids valid
        return self._solved[key][0]

    def _solve(self, facts: Sequence[Bool], goal: Bool, seeds: Sequence[int]) -> Solution:
        lemmas = self._lemmas(facts, goal)
        both = {"both": lambda: [lemma for make in lemmas.values() for lemma in make()]}
        return persist(facts, goal, lemmas | both, self.effort, seeds)

    def _lemmas(self, facts: Sequence[Bool], goal: Bool) -> dict[str, Lemmas]:
        divisions = list(self.evaluator.scope.divisions.values())
        everything = [*facts, goal]
        names = constants_of(everything)
        divisions = [d for d in divisions if d.quotient.get_id() in names]
        return {
            "quotients": lambda: about_quotients(everything, divisions),
            "products": lambda: about_products(everything),
        }

    def answer(self, obligation: Obligation) -> Answer:
        """Answer one obligation.

        The contract's assumption about an integer in memory holds inside its buffer: once that is proven of a load,
        later questions about the loaded value may use it.
        """
        answer = self._answer(obligation)
        if (
            answer.verdict == "proven"
            and obligation.kind != "reached"
            and self.contradicted(obligation.assuming)
        ):
            why = "under this contract it never happens, so that nothing is proven of it"
            return replace(answer, verdict="unknown", why=why)
        argument = obligation.what.rpartition(" ")[2]
        buffer = self.contract.arguments.get(argument) if obligation.kind == "bounds" else None
        if answer.verdict == "proven" and isinstance(buffer, Buffer) and buffer.values is not None:
            self._proven_facts.append(z3.Implies(conjunction(obligation.assuming), obligation.goal))
        return answer

    def contradicted(self, assuming: Sequence[Bool]) -> bool:
        """Return whether the assumptions are contradictory.

        Anything follows from those, so no proof under them counts.
        """
        key = ("assumed", *sorted({condition.get_id() for condition in assuming}))
        if key not in self._solved:
            nothing = z3.BoolVal(False)
            self._solved[key] = ask(self.facts(assuming, nothing), nothing, QUICK // 4), assuming
        return self._solved[key][0].verdict == "proven"

    def _answer(self, o: Obligation) -> Answer:
        if o.unknown:
            return Answer(o.kind, o.what, o.place, "unknown", o.unknown)
        of_contract = o.kind == "contract"
        facts = self.contract_facts(o.goal) if of_contract else self.facts(o.assuming, o.goal)
        if o.kind == "reached":
            return self._reached(o, facts)
        if not of_contract and self.nearly(o.assuming, o.goal):
            return Answer(o.kind, o.what, o.place, "proven")
        for goal in o.stronger:
            solution = self.solve(self.facts(o.assuming, goal), goal)
            if solution.verdict == "proven":
                return Answer(o.kind, o.what, o.place, "proven", solution.how)
        if o.within is not None and self.inside(facts, o):
            return Answer(o.kind, o.what, o.place, "proven", "digits")
        solution = self.solve(facts, o.goal, SEEDS)
        if solution.verdict != "counterexample":
            return _without_example(o, solution)
        unmodeled = self.unmodeled(o.assuming, o.goal)
        if unmodeled:  # the violation may be unreachable
            why = f"it depends on what is not modelled: {', '.join(unmodeled)}"
            return Answer(o.kind, o.what, o.place, "unknown", why, self.example(o, solution))
        solution = self.smallest(facts, o.goal, solution)
        if o.view is not None and is_element(solution, *o.view):
            return Answer(
                o.kind, o.what, o.place, "unknown", "larger strides of the view may lie within smaller ones"
            )
        return Answer(o.kind, o.what, o.place, "counterexample", example=self.example(o, solution))

    def inside(self, facts: Sequence[Bool], o: Obligation) -> bool:
        """Return whether an access is proven inside of its buffer digit by digit (`nested`). Most need no such help."""
        if ask(facts, o.goal, QUICK // 8).verdict != "unknown":
            return False
        assert o.within is not None
        return inside(*o.within, lambda goal: self.proven_quickly(o.assuming, goal))

    def proven_quickly(self, more: Sequence[Bool], goal: Bool) -> bool:
        """Return whether a goal is proven with little effort."""
        near, all_ = self._near(more, goal), self.facts(more, goal)
        return self._proven_quickly(near, goal, QUICK // 4) or (
            len(near) < len(all_) and self._proven_quickly(all_, goal, QUICK // 2)
        )

    def _proven_quickly(self, facts: Sequence[Bool], goal: Bool, effort: int) -> bool:
        """Return whether a goal is proven directly, or with lemmas in place of products."""
        key = ("soon", effort, goal.get_id(), *sorted({fact.get_id() for fact in facts}))
        if key not in self._solved:
            solution = ask(facts, goal, effort)
            if solution.verdict == "unknown":
                lemmas = [lemma for make in self._lemmas(facts, goal).values() for lemma in make()]
                follows = self.linear.follows([*facts, *lemmas], goal)
                solution = Solution("proven") if follows else solution
            self._solved[key] = solution, (facts, goal)
        return self._solved[key][0].verdict == "proven"

    def _reached(self, o: Obligation, facts: Sequence[Bool]) -> Answer:
        solution = ask(facts, o.goal, self.effort)
        if solution.verdict == "counterexample":
            return Answer(o.kind, o.what, o.place, "proven")
        if solution.verdict == "proven":
            why = "under this contract it never happens, so that nothing is proven of it"
            return Answer(o.kind, o.what, o.place, "unknown", why)
        why = "the solver found no sizes for which it happens"
        return Answer(o.kind, o.what, o.place, "unknown", why, query=solution.query)

    def answer_pair(self, pair: Pair) -> Answer:
        """Answer whether two accesses meet."""
        o = pair.obligation
        both = [*self.facts(o.assuming, o.goal), *pair.facts]
        if ask(both, z3.BoolVal(False), self.effort).verdict == "proven":
            # A single access always meets itself, unless its assumptions are contradictory.
            why = f"under this contract the two never happen in one {'program' if o.kind == 'once' else 'launch'}"
            return Answer(o.kind, o.what, o.place, "unknown" if pair.itself else "proven", why)
        if o.kind == "race" and self.one_program(pair, both):
            return Answer(o.kind, o.what, o.place, "proven", "digits")
        facts = [*both, pair.differ]
        # Pairs that digits do not decide are seldom decided otherwise: spend less effort.
        solution = decide(facts, o.goal, {"digits": lambda: pair.lemmas}, max(self.effort // 2, 1))
        if solution.verdict != "counterexample":
            return _without_example(o, solution)
        unmodeled = self.unmodeled(o.assuming, o.goal)
        if not unmodeled and any(access.orders_programs for access in self.question.accesses):
            unmodeled = ["atomics, which may order the two"]
        if not unmodeled:
            solution = self.smallest(facts, o.goal, solution)
        x, y, z = (solution.value(p) for p in pair.second)
        example = replace(self.example(o, solution), other_program=(x, y, z))
        if unmodeled:
            why = f"it depends on what is not modelled: {', '.join(unmodeled)}"
            return Answer(o.kind, o.what, o.place, "unknown", why, example)
        return Answer(o.kind, o.what, o.place, "counterexample", example=example)

    def one_program(self, pair: Pair, facts: Sequence[Bool]) -> bool:
        """Return whether two accesses of one element always belong to one program (`digits`)."""
        names = constants_of([*facts, *pair.offsets])
        every = (*self.evaluator.scope.divisions.values(), *pair.divisions)
        divisions = [d for d in every if d.quotient.get_id() in names]
        divisors = {d.b.get_id(): d.b for d in divisions}
        premises = [b > 0 for b in divisors.values() if self.solve(facts, b > 0).verdict == "proven"]
        premises += [lemma for d in divisions for lemma in range_of(d)]
        programs = list(zip(self.evaluator.programs, pair.second, strict=True))
        grid = [
            (number, size)
            for both in zip(*programs, strict=True)
            for number, size in zip(both, self.evaluator.grid, strict=True)
        ]
        premises += [*below(grid, divisions), *natural(d.a for d in divisions)]
        premises = [*facts, *premises]
        if same(premises, pair.offsets, programs, pair.twins, self.linear):
            return True
        # Grid-stride loops: the program number is a digit of the counter, so expand the counter's definition.
        expanded = pair.offsets
        for counter, meaning in reversed(self.evaluator.counters):  # inner loops first
            theirs = z3.substitute(counter, *pair.twins), z3.substitute(meaning, *pair.twins)
            expanded = tuple(z3.substitute(offset, (counter, meaning), theirs) for offset in expanded)
        if all(one.eq(other) for one, other in zip(expanded, pair.offsets, strict=True)):
            return False
        return same(premises, expanded, programs, pair.twins, self.linear)

    def meetings(self) -> list[Answer]:
        """Answer whether programs race, and whether outputs are written once."""
        questions = [*races(self.question, self.common), *twice(self.question, self.common)]
        return [
            self.answer_pair(question) if isinstance(question, Pair) else self.answer(question)
            for question in questions
        ]

    def unmodeled(self, assuming: Sequence[Bool], goal: Bool) -> list[str]:
        """Return the unmodeled operations a question depends on, which may make a counterexample spurious."""
        scope = self.evaluator.scope
        given = [*assuming, goal]
        local = [
            fact for fact in scope.relevant(given) if any(i in scope.constants for i in constants_of([fact]))
        ]
        names = constants_of([*given, *local])
        return sorted({scope.opaque[i] for i in names if i in scope.opaque})

    # -- counterexamples --

    def smallest(self, facts: Sequence[Bool], goal: Bool, solution: Solution) -> Solution:
        """Minimize a counterexample, one size after another."""
        more: list[Bool] = []
        for size in [*self.contract.sizes, *self.evaluator.programs]:
            low, high, step = getattr(size, "low", 0), solution.value(size), 0
            while low < high:  # grow the step until a counterexample is found, then bisect
                limit = min(low + step, (low + high) // 2)
                candidate = ask([*facts, *more, size <= limit], goal, QUICK // 4)
                if candidate.verdict == "counterexample":
                    solution = candidate
                    high, step = solution.value(size), high
                else:
                    low, step = limit + 1, 2 * step + 1
                if not hasattr(size, "low") and step > 3:
                    break  # any program will do
            more.append(size <= high)
        names = constants_of([*facts, goal])
        for loaded in [loaded for i, loaded in self.evaluator.scope.loaded.items() if i in names]:
            for limit in (2**7, 2**15, 2**31) if z3.is_int(loaded.constant) else ():
                small = z3.And(-limit <= loaded.constant, loaded.constant < limit)
                candidate = ask([*facts, *more, small], goal, QUICK // 4)
                if candidate.verdict == "counterexample":
                    solution = candidate
                    more.append(small)
                    break
        return solution

    def example(self, o: Obligation, solution: Solution) -> Example:
        """Convert a solution to an example."""
        text, numbers = o.shows
        value = solution.value
        x, y, z = (value(p) for p in self.evaluator.programs)
        grid_x, grid_y, grid_z = (value(size) for size in self.evaluator.grid)
        return Example(
            sizes={size.name: value(size) for size in self.contract.sizes},
            grid=(grid_x, grid_y, grid_z),
            program=(x, y, z),
            lane=tuple(value(lane) for lane in o.lane),
            detail=text.format(*(value(number) for number in numbers)),
            iterations=self.iterations(solution),
            loaded=self.memory(o, solution),
        )

    def iterations(self, solution: Solution) -> int:
        """Return how often the innermost loop runs if all loops are nested: the possible cost of a replay."""
        times = 1
        for op in self.function.body.walk():
            if op.name == "scf.for":
                loop = self.evaluator.loop(op)
                lower, upper, step = (solution.value(part) for part in (loop.lower, loop.upper, loop.step))
                times *= max(1, -(-(upper - lower) // max(1, step)))
        return times

    def memory(self, o: Obligation, solution: Solution) -> tuple[tuple[str, int, int], ...]:
        """Return the integers in memory that a counterexample needs."""
        scope = self.evaluator.scope
        names = constants_of([*o.assuming, o.goal, *scope.relevant([*o.assuming, o.goal])])
        integers = {}
        for identity in names:
            loaded = scope.loaded.get(identity)
            if loaded is not None and solution.value(loaded.happens):
                integers[loaded.argument, solution.value(loaded.offset)] = solution.value(loaded.constant)
        return tuple((argument, offset, value) for (argument, offset), value in sorted(integers.items()))

    def answers(self, *kinds: Kind) -> list[Answer]:
        """Answer the obligations of these kinds, or all of them."""
        return [self.answer(o) for o in self.question.obligations if not kinds or o.kind in kinds]

    def report(self) -> Report:
        """Return all answers."""
        start = time.perf_counter()
        answers = [*self.answers(), *self.meetings()]
        seconds = time.perf_counter() - start
        return Report(self.function.name, tuple(answers), self.assumed(), seconds=seconds)

    def assumed(self) -> tuple[str, ...]:
        """Describe the assumptions about memory that the kernel does not write to."""
        anywhere = None in self.evaluator.stored
        descriptions: list[str] = []
        for name, buffer in self.evaluator.buffers.items():
            if self.evaluator.constant(name):
                descriptions += _assumed(name, buffer)
                descriptions += [f"no address found in memory leads to {name}"] * (
                    anywhere and buffer.unreached
                )
        return tuple(descriptions)


def _without_example(o: Obligation, solution: Solution) -> Answer:
    """Return the answer without a counterexample: a proof, or an unknown within the solver's limit."""
    if solution.verdict == "proven":
        return Answer(o.kind, o.what, o.place, "proven", solution.how)
    why = "the solver did not decide it within its limit"
    return Answer(o.kind, o.what, o.place, "unknown", why, query=solution.query)


def _assumed(name: str, buffer: Buffer) -> Iterator[str]:
    value, place = z3.Int("v"), z3.Int("i")
    if buffer.values is not None:
        text = " ".join(str(buffer.assumed(value, place)).split())
        yield f"{text} for every v loaded from {name}[i]"
    if callable(buffer.distinct):
        text = " ".join(str(buffer.differs(value, place)).split())
        yield f"elements v of {name}[i] with {text} differ"
    elif buffer.distinct:
        yield f"the elements of {name} differ"
    if buffer.inverse is not None:
        yield f"{buffer.inverse}[v] = i for every v >= 0 that is {name}[i]"
    if buffer.ascending:
        yield f"the elements of {name} ascend"
