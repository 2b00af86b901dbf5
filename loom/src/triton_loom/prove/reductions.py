"""What is known of reductions and scans: little, but enough for indices that are chosen or counted."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..ir.ttir import Block, Op, Region, Value, element_of, shape_of
from .scope import Scope
from .solver import z3
from .values import Index

_CHOICES = {"arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui"}


class Evaluator(Protocol):
    """What evaluates the operands; `evaluate.Evaluator` says how."""

    scope: Scope

    def ev(self, value: Value, index: Index = ()) -> Any:
        """A value of one lane."""

    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Anything that the type of a value can hold."""

    def lane(self, name: str, size: int) -> Any:
        """Any lane of a dimension."""

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
        evaluator.scope.facts.append(z3.And(which >= 0, which < size))
        with evaluator.strictly():
            element = evaluator.ev(operand, (*index[:axis], which, *index[axis:]))
        if element is None or isinstance(element, tuple) or z3.is_bool(element):
            return None
        # It is that of some lane: which one is not known, so neither is the value.
        result = evaluator.opaque(value, "the lane that a reduction chooses", op.block)
        evaluator.scope.facts.append(result == element)
        return result
    return (
        _count(evaluator, op, value, size) if _is_sum_of_flags(evaluator, op, operand, index, axis) else None
    )


def scanned(evaluator: Evaluator, op: Op, value: Value, index: Index) -> Any:
    """A running sum of zeros and ones is a count of those up to a lane. None for anything else."""
    slot, axis = op.results.index(value), int(op.attrs["axis"])
    operand = op.operands[slot]
    size = shape_of(operand.type)[axis]
    inner = (*index[:axis], *index[axis + 1 :])
    if not _is_sum_of_flags(evaluator, op, operand, inner, axis):
        return None
    result = _count(evaluator, op, value, size)
    reverse = bool(op.attrs.get("reverse"))
    evaluator.scope.facts.append(result <= (size - index[axis] if reverse else index[axis] + 1))
    return result


def _count(evaluator: Evaluator, op: Op, value: Value, size: int) -> Any:
    result = evaluator.opaque(value, "a count", op.block)
    evaluator.scope.facts.append(z3.And(result >= 0, result <= size))
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


def _is_sum_of_flags(evaluator: Evaluator, op: Op, operand: Value, index: Index, axis: int) -> bool:
    """A sum of one operand whose elements are 0 or 1, and of which an integer of its type can hold enough."""
    body = op.regions[0].blocks
    if len(op.operands) != 1 or len(body) != 1 or element_of(operand.type).is_float:
        return False
    last = body[0].ops[-1].operands[0].producer
    if last is None or last.name != "arith.addi" or set(last.operands) != set(body[0].args):
        return False
    size = shape_of(operand.type)[axis]
    if size >= 2 ** (element_of(operand.type).bits - 1):
        return False
    lane = evaluator.lane(f"summed.{size}", size)
    with evaluator.strictly():
        element = evaluator.ev(operand, (*index[:axis], lane, *index[axis:]))
    return element is not None and not isinstance(element, tuple) and _is_flag(element)


def _is_flag(expression: Any) -> bool:
    """0 or 1, as it is written."""
    if z3.is_int_value(expression):
        return expression.as_long() in (0, 1)
    if z3.is_app(expression) and expression.decl().kind() == z3.Z3_OP_ITE:
        return all(_is_flag(branch) for branch in expression.children()[1:])
    return False
