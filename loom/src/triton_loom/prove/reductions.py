"""What is known of reductions and scans: little, but enough for indices that are chosen or counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..ir.ttir import Block, Op, Region, Value, element_of, shape_of
from .contract import Bool, constants_of, parts_of
from .scope import Scope
from .solver import QUICK, ask, z3
from .values import Index, in_type

_CHOICES = {"arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui"}


class Evaluator(Protocol):
    """What evaluates the operands; `evaluate.Evaluator` says how."""

    scope: Scope

    def ev(self, value: Value, index: Index = ()) -> Any:
        """A value of one lane."""

    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Anything that the type of a value can hold."""

    def path(self, block: Block | None) -> list[Bool]:
        """What has to hold for a block to run."""

    def strictly(self) -> AbstractContextManager[None]:
        """All that is evaluated inside matters in every lane."""


def reduced(evaluator: Evaluator, op: Op, value: Value, index: Index) -> Any:
    """A minimum, maximum or their place is one of the operand's elements; a sum of zeros and ones is a count. None for
    anything else."""
    slot, axis = op.results.index(value), int(op.attrs["axis"])
    operand, count = op.operands[slot], len(op.operands)
    size = shape_of(operand.type)[axis]
    body = op.regions[0]
    last = body.blocks[-1].ops[-1].operands[slot]
    if len(body.blocks) == 1 and _is_chosen(last, body, slot, count):
        which = evaluator.scope.fresh("chosen", home=op.block)
        evaluator.scope.know(z3.And(which >= 0, which < size), because="lanes of a reduction")
        with evaluator.strictly():
            element = evaluator.ev(operand, (*index[:axis], which, *index[axis:]))
        if element is None or isinstance(element, tuple) or z3.is_bool(element):
            return None
        # It is that of some lane: which one is not known, so neither is the value.
        result = evaluator.opaque(value, "the lane that a reduction chooses", op.block)
        bits = element_of(value.type).bits
        evaluator.scope.know(
            result == element, because="the element that a reduction chooses", when=[in_type(element, bits)]
        )
        return result
    flags = _flags(evaluator, op, operand, index, axis)
    return None if flags is None else _count(evaluator, op, value, flags)


def scanned(evaluator: Evaluator, op: Op, value: Value, index: Index) -> Any:
    """A running sum of zeros and ones is a count of those up to a lane. None for anything else."""
    slot, axis = op.results.index(value), int(op.attrs["axis"])
    operand = op.operands[slot]
    inner = (*index[:axis], *index[axis + 1 :])
    flags = _flags(evaluator, op, operand, inner, axis)
    if flags is None:
        return None
    result = _count(evaluator, op, value, flags)
    with evaluator.strictly():
        own = evaluator.ev(operand, index)
    before = flags.size - 1 - index[axis] if op.attrs.get("reverse") else index[axis]
    evaluator.scope.know(z3.And(result >= own, result <= before + own), because="a running count")
    return result


@dataclass(frozen=True)
class _Flags:
    """Zeros and ones along a dimension."""

    size: int
    limits: list[Any]  # for each of these: no lane from it on is one


def _count(evaluator: Evaluator, op: Op, value: Value, flags: _Flags) -> Any:
    """How many of them are ones."""
    result = evaluator.opaque(value, "a count", op.block)
    evaluator.scope.know(z3.And(result >= 0, result <= flags.size), because="a count")
    for limit in flags.limits:
        evaluator.scope.know(result <= z3.If(limit >= 0, limit, 0), because="a count of lanes below a limit")
    return result


def _is_chosen(value: Value, body: Region, slot: int, count: int) -> bool:
    """It is always one of the two elements that are combined."""
    if value in (body.blocks[0].args[slot], body.blocks[0].args[slot + count]):
        return True
    op = value.producer
    if op is None:
        return False
    if op.name == "arith.select":
        return all(_is_chosen(o, body, slot, count) for o in op.operands[1:])
    return op.name in _CHOICES and all(_is_chosen(o, body, slot, count) for o in op.operands)


def _flags(evaluator: Evaluator, op: Op, operand: Value, index: Index, axis: int) -> _Flags | None:
    """Those that an operation adds up; None if it is not a sum of one operand whose elements are 0 or 1, and of which
    an integer of its type can hold enough."""
    body = op.regions[0].blocks
    if len(op.operands) != 1 or len(body) != 1 or element_of(operand.type).is_float:
        return None
    last = body[0].ops[-1].operands[0].producer
    if last is None or last.name != "arith.addi" or set(last.operands) != set(body[0].args):
        return None
    size = shape_of(operand.type)[axis]
    if size >= 2 ** (element_of(operand.type).bits - 1):
        return None
    evaluator.path(op.block)  # so that the iteration is among what there is before the lane
    shared = set(evaluator.scope.made)
    lane = evaluator.scope.fresh("summed", home=op.block)
    evaluator.scope.know(z3.And(lane >= 0, lane < size), because="lanes of a reduction")
    with evaluator.strictly():
        element = evaluator.ev(operand, (*index[:axis], lane, *index[axis:]))
    if element is None or isinstance(element, tuple) or not _is_flag(element):
        return None
    local = set(evaluator.scope.made) - shared
    return _Flags(size, list(_limits(element, lane, local)))


def _limits(flag: Any, lane: Any, local: set[int]) -> Iterator[Any]:
    """Numbers that a lane is below if its flag is one. They are found among the comparisons that the flag is made from,
    and they are the same in every lane: `local` are the constants that may have another value in each."""
    for distance in _distances(flag):
        limit = z3.simplify(z3.substitute(distance, (lane, z3.IntVal(0))), som=True)
        rest = z3.simplify(distance + lane - limit, som=True)
        same = local.isdisjoint(constants_of([limit]))
        below = same and z3.is_int_value(rest) and rest.as_long() == 0
        if below and ask([flag == 1], lane < limit, QUICK // 4).verdict == "proven":
            yield limit


def _distances(expression: Any) -> Iterator[Any]:
    """Of every comparison in an expression: by how much the larger side is larger, such that it holds from 1 on."""
    for part in parts_of(expression):
        if z3.is_lt(part) or z3.is_le(part):
            yield part.arg(1) - part.arg(0) + (1 if z3.is_le(part) else 0)
        elif z3.is_gt(part) or z3.is_ge(part):
            yield part.arg(0) - part.arg(1) + (1 if z3.is_ge(part) else 0)


def _is_flag(expression: Any) -> bool:
    """0 or 1, as it is written."""
    if z3.is_int_value(expression):
        return expression.as_long() in (0, 1)
    if z3.is_app(expression) and expression.decl().kind() == z3.Z3_OP_ITE:
        return all(_is_flag(branch) for branch in expression.children()[1:])
    return False
