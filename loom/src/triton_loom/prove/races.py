"""Pairs of programs: no program accesses what another one writes, and no program writes an element twice.

All constants of a program (its number, lanes, iterations and loaded values) appear twice, the second time primed.
Constants that programs share (sizes, and what follows from them) appear once. For questions about one program, its
number is shared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.ttir import Block, Op
from .answers import Kind
from .contract import Bool, constants_of
from .evaluate import Evaluator
from .lemmas import ordered
from .obligations import Access, Obligation, Question
from .scope import Division, Loaded, integer
from .solver import z3
from .values import Target, relations, storage_of


@dataclass(frozen=True)
class Pair:
    """Two accesses that must not meet."""

    obligation: Obligation
    facts: Sequence[Bool]  # about the second program
    differ: Bool  # the two programs (or lanes, iterations) differ
    divisions: Sequence[Division]
    lemmas: Sequence[Bool]
    second: Sequence[Any]  # number of the second program
    twins: Sequence[tuple[Any, Any]]  # (constant of the first program, its primed copy)
    offsets: tuple[Any, Any]
    itself: bool  # both are the same access, by two programs, lanes or iterations


class Second:
    """The other program, or another lane and iteration of the same one."""

    def __init__(self, evaluator: Evaluator, *, same_program: bool = False) -> None:
        scope = evaluator.scope
        lanes = [lane for lane, _ in evaluator.lanes.values()]
        shared = {part.get_id() for d in scope.divisions.values() for part in (d.quotient, d.remainder)}
        own = [constant for identity, constant in scope.constants.items() if identity not in shared]
        self.local = scope.bound([*lanes, *own] if same_program else [*evaluator.programs, *lanes, *own], ())
        self.twins = [(c, z3.Const(f"{c}~", c.sort())) for c in self.local.values()]
        self._primed: dict[int, tuple[Any, Any]] = {}  # with the expression itself, which keeps its number
        self.divisions = [
            Division(*map(self.prime, (d.a, d.b, d.quotient, d.remainder))) for d in scope.divisions.values()
        ]

    def prime(self, expression: Any) -> Any:
        """Translate an expression to the other program."""
        number = expression.get_id()
        if number not in self._primed:
            self._primed[number] = expression, z3.substitute(expression, *self.twins)
        return self._primed[number][1]

    def loaded(self, loaded: Loaded) -> Loaded:
        """Return the integer that the other program loads."""
        constant, offset, happens = map(self.prime, (loaded.constant, loaded.offset, loaded.happens))
        return Loaded(constant, loaded.argument, offset, happens)


def races(question: Question, common: Sequence[Bool]) -> Iterator[Pair | Obligation]:
    """Yield the pairs of accesses by any two programs."""
    evaluator = question.evaluator
    second = Second(evaluator)
    differ = z3.Or(*(p != second.prime(p) for p in evaluator.programs))
    for number, one in enumerate(question.accesses):
        for other in question.accesses[number:]:
            if not (one.writes or other.writes) or (one.orders_programs and other.orders_programs):
                continue
            yield from _pairs(evaluator, _Meeting(second, common, differ, "race"), one, other)


def twice(question: Question, common: Sequence[Bool]) -> Iterator[Pair | Obligation]:
    """Yield the pairs of writes to one output: by two lanes or iterations of a program, or by two of its stores.
    Writes by two programs are races, covered there."""
    evaluator = question.evaluator
    second = Second(evaluator, same_program=True)
    stores = [access for access in question.accesses if access.writes and not access.atomic]
    for output in question.evaluator.contract.outputs:
        output_stores = [a for a in stores if any(p.argument == output for p in a.targets)]
        for number, one in enumerate(output_stores):
            for other in output_stores[number:]:
                differ: Bool = z3.BoolVal(True)
                if _in_one_while(one.op, other.op):
                    why = "it is in a while loop, whose iterations are not told apart"
                    what = f"{one.name} {output}"
                    yield Obligation("once", what, one.op.location, (), z3.BoolVal(False), unknown=why)
                    continue
                if one is other:
                    turns = [*one.lane, *iterations(evaluator, one.op)]
                    differ = z3.Or(*(t != second.prime(t) for t in turns if not z3.is_int_value(t)))
                meeting = _Meeting(second, common, differ, "once", output)
                yield from _pairs(evaluator, meeting, one, other)


def iterations(evaluator: Evaluator, op: Op) -> list[Any]:
    """Return the iterations of the counted loops around an operation."""
    return [evaluator.loop(parent).count for parent in _parents(op) if parent.name == "scf.for"]


def _parents(op: Op) -> Iterator[Op]:
    """Yield the enclosing operations, the innermost first."""
    block: Block | None = op.block
    while block is not None and block.region is not None and block.region.parent is not None:
        yield block.region.parent
        block = block.region.parent.block


def _in_one_while(one: Op, other: Op) -> bool:
    return any(parent.name == "scf.while" and parent in list(_parents(other)) for parent in _parents(one))


@dataclass(frozen=True)
class _Meeting:
    second: Second
    common: Sequence[Bool]  # facts about any program
    differ: Bool  # the two differ
    kind: Kind
    output: str | None = None  # the only one of interest


def _pairs(
    evaluator: Evaluator, meeting: _Meeting, one: Access, other: Access
) -> Iterator[Pair | Obligation]:
    contract = evaluator.contract
    for a in one.targets:
        for b in other.targets:
            if a.argument is None or b.argument is None:
                continue  # the access's own obligations report the unknown target
            if storage_of(contract, a.argument) != storage_of(contract, b.argument):
                continue
            if meeting.output not in (None, a.argument, b.argument):
                continue
            buffer, other_buffer = contract.arguments[a.argument], contract.arguments[b.argument]
            what = f"{one.name} {a.argument} and {other.name} {b.argument}"
            if buffer.itemsize != other_buffer.itemsize:
                why = "the two have elements of different size in one memory"
                yield Obligation(meeting.kind, what, one.op.location, (), z3.BoolVal(False), unknown=why)
                continue
            yield _pair(evaluator, meeting, (one, a), (other, b), what)


def _pair(
    evaluator: Evaluator,
    meeting: _Meeting,
    one: tuple[Access, Target],
    other: tuple[Access, Target],
    what: str,
) -> Pair:
    second, scope = meeting.second, evaluator.scope
    (access, target), (access_2, target_2) = one, other
    # Offsets of both buffers in their common storage.
    firsts = [integer(evaluator.buffers[p.argument or ""].first) for p in (target, target_2)]
    offsets_differ = not firsts[0].eq(firsts[1])
    first, first_2 = (scope.without_division(f) if offsets_differ else z3.IntVal(0) for f in firsts)
    offset, offset_2 = target.offset, second.prime(target_2.offset)
    if offsets_differ:
        offset, offset_2 = offset + first, offset_2 + first_2
    now, then = [*access.happens, target.when], [*access_2.happens, target_2.when]
    relevant_facts = scope.relevant([*meeting.common, *now, *then, offset, target_2.offset])
    facts = [f for f in [*meeting.common, *relevant_facts, *then] if z3.is_expr(f)]
    primed = [second.prime(fact) for fact in facts]
    obligation = Obligation(
        meeting.kind,
        what,
        access.op.location,
        now,
        offset != offset_2,
        access.lane,
        shows=("both at element {}", (offset,)),
    )
    return Pair(
        obligation,
        [*primed, *_memory(evaluator, second, [*now, *then, offset, target_2.offset])],
        meeting.differ,
        second.divisions,
        _digits(offset, offset_2, second),
        [second.prime(program) for program in evaluator.programs],
        second.twins,
        (offset, offset_2),
        access is access_2 and target is target_2,
    )


def _memory(evaluator: Evaluator, second: Second, expressions: Sequence[Any]) -> Iterator[Bool]:
    """Yield facts that both programs load the same from memory that nobody writes."""
    names = constants_of(expressions)
    loads = [
        loaded for i, loaded in evaluator.scope.loaded.items() if i in names and z3.is_int(loaded.constant)
    ]
    loads = [loaded for loaded in loads if evaluator.constant(loaded.argument)]
    for one in loads:
        for other in loads:
            yield from relations(evaluator.contract, one, second.loaded(other))


def _digits(offset: Any, offset_2: Any, second: Second) -> list[Bool]:
    """Return lemmas that order the multiples of a size in two offsets."""
    lemmas = []
    one, other = (z3.simplify(e, som=True) for e in (offset, offset_2))
    for identity, size in sorted(constants_of([one]).items(), key=lambda item: str(item[1])):
        if identity in second.local or not z3.is_int(size):
            continue
        parts = []
        for expression in (one, other):
            at = [z3.substitute(expression, (size, z3.IntVal(n))) for n in (0, 1)]
            parts.append(z3.simplify(at[1] - at[0], som=True))
        for a, b in (parts, parts[::-1]):
            lemmas += ordered(a, b, size)
    return [z3.simplify(lemma, som=True) for lemma in lemmas]
