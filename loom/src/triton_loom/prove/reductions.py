"""Facts about reductions and scans: few, but enough for indices that are selected or counted."""

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
    """Interface that evaluates the operands; see `evaluate.Evaluator`."""

    scope: Scope

    def ev(self, value: Value, index: Index = ()) -> Any:
        """Evaluate one lane."""

    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Return an arbitrary value of a value's type."""

    def path(self, block: Block | None) -> list[Bool]:
        """Return the conditions for a block to run."""

    def strictly(self) -> AbstractContextManager[None]:
        """Mark everything that is evaluated inside as required in every lane."""


def reduced(evaluator: Evaluator, op: Op, value: Value, index: Index) -> Any:
    """Evaluate a reduction; None if nothing is known of it.

    A minimum, maximum or their index is one of the operand's elements; a sum of zeros and ones is a count.
    """
    slot, axis = op.results.index(value), int(op.attrs["axis"])
    operand, count = op.operands[slot], len(op.operands)
    size = shape_of(operand.type)[axis]
    body = op.regions[0]
    last = body.blocks[-1].ops[-1].operands[slot]
    if len(body.blocks) == 1 and _is_chosen(last, body, slot, count):
        chosen_lane = evaluator.scope.fresh("chosen", home=op.block)
        evaluator.scope.know(z3.And(chosen_lane >= 0, chosen_lane < size), because="lanes of a reduction")
        with evaluator.strictly():
            element = evaluator.ev(operand, (*index[:axis], chosen_lane, *index[axis:]))
        if element is None or isinstance(element, tuple) or z3.is_bool(element):
            return None
        # The value belongs to an unknown lane, so it is unknown too.
        result = evaluator.opaque(value, "the lane that a reduction chooses", op.block)
        bits = element_of(value.type).bits
        evaluator.scope.know(
            result == element, because="the element that a reduction chooses", when=[in_type(element, bits)]
        )
        return result
    flags = _flags(evaluator, op, operand, index, axis)
    return None if flags is None else _count(evaluator, op, value, flags)


def scanned(evaluator: Evaluator, op: Op, value: Value, index: Index) -> Any:
    """Evaluate a scan: a running sum of zeros and ones counts those up to a lane. None for anything else."""
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
    limits: list[Any]  # bounds of the lanes whose flag is one


def _count(evaluator: Evaluator, op: Op, value: Value, flags: _Flags) -> Any:
    """Return the number of ones."""
    result = evaluator.opaque(value, "a count", op.block)
    evaluator.scope.know(z3.And(result >= 0, result <= flags.size), because="a count")
    for limit in flags.limits:
        evaluator.scope.know(result <= z3.If(limit >= 0, limit, 0), because="a count of lanes below a limit")
    return result


def _is_chosen(value: Value, body: Region, slot: int, count: int) -> bool:
    """Return whether the value is always one of the two elements that are combined."""
    if value in (body.blocks[0].args[slot], body.blocks[0].args[slot + count]):
        return True
    op = value.producer
    if op is None:
        return False
    if op.name == "arith.select":
        return all(_is_chosen(o, body, slot, count) for o in op.operands[1:])
    return op.name in _CHOICES and all(_is_chosen(o, body, slot, count) for o in op.operands)


def _flags(evaluator: Evaluator, op: Op, operand: Value, index: Index, axis: int) -> _Flags | None:
    """Return the flags that an operation sums, or None.

    It must sum one operand of zeros and ones in a type wide enough for the count.
    """
    body = op.regions[0].blocks
    if len(op.operands) != 1 or len(body) != 1 or element_of(operand.type).is_float:
        return None
    last = body[0].ops[-1].operands[0].producer
    if last is None or last.name != "arith.addi" or set(last.operands) != set(body[0].args):
        return None
    size = shape_of(operand.type)[axis]
    if size >= 2 ** (element_of(operand.type).bits - 1):
        return None
    evaluator.path(op.block)  # creates the iteration's constants before the lane's
    shared = set(evaluator.scope.constants)
    lane = evaluator.scope.fresh("summed", home=op.block)
    evaluator.scope.know(z3.And(lane >= 0, lane < size), because="lanes of a reduction")
    with evaluator.strictly():
        element = evaluator.ev(operand, (*index[:axis], lane, *index[axis:]))
    if element is None or isinstance(element, tuple) or not _is_flag(element):
        return None
    local = set(evaluator.scope.constants) - shared
    return _Flags(size, list(_limits(element, lane, local)))


def _limits(flag: Any, lane: Any, local: set[int]) -> Iterator[Any]:
    """Yield upper bounds of a lane whose flag is one.

    Candidates come from the comparisons in the flag and must not depend on the lane: `local` are the constants that may
    differ between lanes.
    """
    for distance in _distances(flag):
        limit = z3.simplify(z3.substitute(distance, (lane, z3.IntVal(0))), som=True)
        rest = z3.simplify(distance + lane - limit, som=True)
        same = local.isdisjoint(constants_of([limit]))
        below = same and z3.is_int_value(rest) and rest.as_long() == 0
        if below and ask([flag == 1], lane < limit, QUICK // 4).verdict == "proven":
            yield limit


def _distances(expression: Any) -> Iterator[Any]:
    """Yield the difference of the sides of every comparison, such that the comparison holds from 1 on."""
    for part in parts_of(expression):
        if z3.is_lt(part) or z3.is_le(part):
            yield part.arg(1) - part.arg(0) + (1 if z3.is_le(part) else 0)
        elif z3.is_gt(part) or z3.is_ge(part):
            yield part.arg(0) - part.arg(1) + (1 if z3.is_ge(part) else 0)


def _is_flag(expression: Any) -> bool:
    """Return whether the expression is syntactically 0 or 1."""
    if z3.is_int_value(expression):
        return expression.as_long() in (0, 1)
    if z3.is_app(expression) and expression.decl().kind() == z3.Z3_OP_ITE:
        return all(_is_flag(branch) for branch in expression.children()[1:])
    return False
