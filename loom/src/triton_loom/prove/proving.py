"""Asks the solver every question about a kernel, and puts the answers together."""

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
from .writers import Sizes, sizes_of


class Prover:
    """One kernel, as TTIR, under one contract."""

    def __init__(self, ttir: str, contract: Contract, effort: int = THOROUGH) -> None:
        self.function = parse(ttir).entry
        self.evaluator = Evaluator(self.function, contract)
        self.question: Question = question(self.evaluator)
        self.contract, self.effort = contract, effort
        self.common = self.evaluator.facts
        self._whole = conjunction(self.common)  # one expression costs less to hand over than a hundred
        self._learned: list[Bool] = []  # what was proven and helps with what comes after it
        self._solved: dict[tuple[Any, ...], tuple[Solution, Any]] = {}
        self.linear = Linear()  # one for all questions: their facts are mostly the same

    def facts(self, more: Sequence[Bool], goal: Bool) -> list[Bool]:
        """All that can be used to prove a goal."""
        scope = self.evaluator.scope
        found = [self._whole, *more, *scope.relevant([self._whole, *more, goal])]
        names = constants_of([*found, goal]).keys()
        return found + [fact for fact in self._learned if constants_of([fact]).keys() <= names]

    def contract_facts(self, goal: Bool) -> list[Bool]:
        """What the contract says, without what holds of every launch that there can be."""
        known = self.evaluator.contract_facts
        return [*known, *self.evaluator.scope.relevant([*known, goal])]

    def nearly(self, more: Sequence[Bool], goal: Bool) -> bool:
        """Whether what is known of a goal's own constants is enough. In kernels with loops that is a small part of what
        could be used, and asked soon."""
        return ask(self._near(more, goal), goal, QUICK // 4).verdict == "proven"

    def _near(self, more: Sequence[Bool], goal: Bool) -> list[Bool]:
        return [self._whole, *more, *self.evaluator.scope.near([self._whole, *more, goal])]

    @cached_property
    def some_sizes(self) -> list[Sizes]:
        """Some that the contract is for."""
        local = Second(self.evaluator).local.keys()
        known = [fact for fact in self.common if local.isdisjoint(constants_of([fact]))]
        known += [
            fact for fact in self.evaluator.scope.relevant(known) if local.isdisjoint(constants_of([fact]))
        ]
        return sizes_of(self.evaluator, known)

    def solve(self, facts: Sequence[Bool], goal: Bool, seeds: Sequence[int] = (0,)) -> Solution:
        """With lemmas where they are needed. Many obligations are the same question, which is asked once."""
        if z3.is_true(z3.simplify(goal)):
            return Solution("proven")
        key = len(seeds), goal.get_id(), *sorted({fact.get_id() for fact in facts})
        if key not in self._solved:
            found = self._solve(facts, goal, seeds)
            self._solved[key] = found, (facts, goal)  # ids are those of what is alive
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
        """To one obligation. What is assumed of an integer in memory holds for one that lies in its buffer: where that
        is proven of a load, later questions about what it has loaded need not find it out again."""
        found = self._answer(obligation)
        if (
            found.verdict == "proven"
            and obligation.kind != "reached"
            and self.contradicted(obligation.assuming)
        ):
            why = "under this contract it never happens, so that nothing is proven of it"
            return replace(found, verdict="unknown", why=why)
        argument = obligation.what.rpartition(" ")[2]
        buffer = self.contract.arguments.get(argument) if obligation.kind == "bounds" else None
        if found.verdict == "proven" and isinstance(buffer, Buffer) and buffer.values is not None:
            self._learned.append(z3.Implies(conjunction(obligation.assuming), obligation.goal))
        return found

    def contradicted(self, assuming: Sequence[Bool]) -> bool:
        """Whether what is assumed can never be. From that anything follows, so no proof under it is believed."""
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
        guessed = self.guessed(o.assuming, o.goal)
        if guessed:  # it may be that this never happens
            why = f"it depends on what is not modelled: {', '.join(guessed)}"
            return Answer(o.kind, o.what, o.place, "unknown", why, self.example(o, solution))
        example = self.example(o, self.smallest(facts, o.goal, solution))
        return Answer(o.kind, o.what, o.place, "counterexample", example=example)

    def inside(self, facts: Sequence[Bool], o: Obligation) -> bool:
        """Whether an access is shown to be inside of its buffer digit by digit: `nested`. Most need no such help."""
        if ask(facts, o.goal, QUICK // 8).verdict != "unknown":
            return False
        assert o.within is not None
        return inside(*o.within, lambda goal: self.soon(o.assuming, goal))

    def soon(self, more: Sequence[Bool], goal: Bool) -> bool:
        """Whether a goal is proven with little effort."""
        near, all_ = self._near(more, goal), self.facts(more, goal)
        return self._soon(near, goal, QUICK // 4) or (
            len(near) < len(all_) and self._soon(all_, goal, QUICK // 2)
        )

    def _soon(self, facts: Sequence[Bool], goal: Bool, effort: int) -> bool:
        """As it is, or with lemmas in place of products."""
        key = ("soon", effort, goal.get_id(), *sorted({fact.get_id() for fact in facts}))
        if key not in self._solved:
            solution = ask(facts, goal, effort)
            if solution.verdict == "unknown":
                lemmas = [lemma for make in self._lemmas(facts, goal).values() for lemma in make()]
                shown = self.linear.follows([*facts, *lemmas], goal)
                solution = Solution("proven") if shown else solution
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
        """To whether two accesses meet."""
        o = pair.obligation
        both = [*self.facts(o.assuming, o.goal), *pair.facts]
        if ask(both, z3.BoolVal(False), self.effort).verdict == "proven":
            # A single access always meets itself, unless what is assumed of it contradicts itself.
            why = f"under this contract the two never happen in one {'program' if o.kind == 'once' else 'launch'}"
            return Answer(o.kind, o.what, o.place, "unknown" if pair.itself else "proven", why)
        if o.kind == "race" and self.one_program(pair, both):
            return Answer(o.kind, o.what, o.place, "proven", "digits")
        facts = [*both, pair.differ]
        # What digits do not show is seldom shown otherwise: less is done for it.
        solution = decide(facts, o.goal, {"digits": lambda: pair.lemmas}, max(self.effort // 2, 1))
        if solution.verdict != "counterexample":
            return _without_example(o, solution)
        guessed = self.guessed(o.assuming, o.goal)
        if not guessed and any(access.orders_programs for access in self.question.accesses):
            guessed = ["atomics, which may order the two"]
        if not guessed:
            solution = self.smallest(facts, o.goal, solution)
        x, y, z = (solution.value(p) for p in pair.second)
        example = replace(self.example(o, solution), other_program=(x, y, z))
        if guessed:
            why = f"it depends on what is not modelled: {', '.join(guessed)}"
            return Answer(o.kind, o.what, o.place, "unknown", why, example)
        return Answer(o.kind, o.what, o.place, "counterexample", example=example)

    def one_program(self, pair: Pair, facts: Sequence[Bool]) -> bool:
        """Whether two accesses of one element are always those of one program: `digits`."""
        names = constants_of([*facts, *pair.offsets])
        every = (*self.evaluator.scope.divisions.values(), *pair.divisions)
        divisions = [d for d in every if d.quotient.get_id() in names]
        divisors = {d.b.get_id(): d.b for d in divisions}
        known = [b > 0 for b in divisors.values() if self.solve(facts, b > 0).verdict == "proven"]
        known += [lemma for d in divisions for lemma in range_of(d)]
        programs = list(zip(self.evaluator.programs, pair.second, strict=True))
        grid = [
            (number, size)
            for both in zip(*programs, strict=True)
            for number, size in zip(both, self.evaluator.grid, strict=True)
        ]
        known += [*below(grid, divisions), *natural(d.a for d in divisions)]
        known = [*facts, *known]
        if same(known, pair.offsets, programs, pair.twins, self.linear):
            return True
        # Rows from one number of programs to the next: the number is a digit of the counter, whose name hides it.
        spelled = pair.offsets
        for counter, meaning in reversed(self.evaluator.counters):  # inner loops first
            theirs = z3.substitute(counter, *pair.twins), z3.substitute(meaning, *pair.twins)
            spelled = tuple(z3.substitute(offset, (counter, meaning), theirs) for offset in spelled)
        if all(one.eq(other) for one, other in zip(spelled, pair.offsets, strict=True)):
            return False
        return same(known, spelled, programs, pair.twins, self.linear)

    def meetings(self) -> list[Answer]:
        """Whether programs race, and whether outputs are written once."""
        found = [*races(self.question, self.common), *twice(self.question, self.common)]
        return [self.answer_pair(f) if isinstance(f, Pair) else self.answer(f) for f in found]

    def guessed(self, assuming: Sequence[Bool], goal: Bool) -> list[str]:
        """What a question depends on that is not modelled, so that a counterexample may be none."""
        scope = self.evaluator.scope
        own = [*assuming, goal]
        local = [fact for fact in scope.relevant(own) if any(i in scope.made for i in constants_of([fact]))]
        names = constants_of([*own, *local])
        return sorted({scope.opaque[i] for i in names if i in scope.opaque})

    # -- counterexamples --

    def smallest(self, facts: Sequence[Bool], goal: Bool, solution: Solution) -> Solution:
        """A counterexample in which one size after another is as small as it can be."""
        more: list[Bool] = []
        for size in [*self.contract.sizes, *self.evaluator.programs]:
            low, high, far = getattr(size, "low", 0), solution.value(size), 0
            while low < high:  # steps become longer until there is one, then shorter
                limit = min(low + far, (low + high) // 2)
                found = ask([*facts, *more, size <= limit], goal, QUICK // 4)
                if found.verdict == "counterexample":
                    solution = found
                    high, far = solution.value(size), high
                else:
                    low, far = limit + 1, 2 * far + 1
                if not hasattr(size, "low") and far > 3:
                    break  # of programs, any will do
            more.append(size <= high)
        names = constants_of([*facts, goal])
        for loaded in [loaded for i, loaded in self.evaluator.scope.loaded.items() if i in names]:
            for limit in (2**7, 2**15, 2**31) if z3.is_int(loaded.constant) else ():
                small = z3.And(-limit <= loaded.constant, loaded.constant < limit)
                found = ask([*facts, *more, small], goal, QUICK // 4)
                if found.verdict == "counterexample":
                    solution = found
                    more.append(small)
                    break
        return solution

    def example(self, o: Obligation, solution: Solution) -> Example:
        """What a solution says, in numbers."""
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
        """How often the innermost loop runs, if all loops are in one another: what a replay may cost."""
        times = 1
        for op in self.function.body.walk():
            if op.name == "scf.for":
                loop = self.evaluator.loop(op)
                lower, upper, step = (solution.value(part) for part in (loop.lower, loop.upper, loop.step))
                times *= max(1, -(-(upper - lower) // max(1, step)))
        return times

    def memory(self, o: Obligation, solution: Solution) -> tuple[tuple[str, int, int], ...]:
        """The integers in memory that a counterexample needs."""
        scope = self.evaluator.scope
        names = constants_of([*o.assuming, o.goal, *scope.relevant([*o.assuming, o.goal])])
        found = {}
        for identity in names:
            loaded = scope.loaded.get(identity)
            if loaded is not None and solution.value(loaded.happens):
                found[loaded.argument, solution.value(loaded.offset)] = solution.value(loaded.constant)
        return tuple((argument, offset, value) for (argument, offset), value in sorted(found.items()))

    def answers(self, *kinds: Kind) -> list[Answer]:
        """Answer the obligations of these kinds, or all of them."""
        return [self.answer(o) for o in self.question.obligations if not kinds or o.kind in kinds]

    def report(self) -> Report:
        """All answers."""
        begun = time.perf_counter()
        answers = [*self.answers(), *self.meetings()]
        seconds = time.perf_counter() - begun
        return Report(self.function.name, tuple(answers), self.assumed(), seconds=seconds)

    def assumed(self) -> tuple[str, ...]:
        """Say in words what is assumed of memory that the kernel does not write to."""
        anywhere = None in self.evaluator.stored
        found: list[str] = []
        for name, buffer in self.evaluator.buffers.items():
            if self.evaluator.constant(name):
                found += _assumed(name, buffer)
                found += [f"no address found in memory leads to {name}"] * (anywhere and buffer.unreached)
        return tuple(found)


def _without_example(o: Obligation, solution: Solution) -> Answer:
    """The answer where the solver has no counterexample: a proof, or nothing within its limit."""
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
