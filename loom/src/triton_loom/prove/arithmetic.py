"""Integer operations of TTIR over mathematical integers, and the conditions under which machine results agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.ttir import I1, Op, Pointer, element_of
from .contract import Bool, Int
from .scope import Scope
from .solver import z3


def bits_of(op: Op) -> int:
    """Return the width of an operation's integers: its first operand's."""
    return element_of(op.operands[0].type).bits


def signed(value: Any) -> Int:
    """Convert a boolean to a one-bit integer: -1 or 0."""
    return z3.If(value, z3.IntVal(-1), z3.IntVal(0)) if z3.is_bool(value) else value


def unsigned(value: Any, bits: int) -> Int:
    """Reinterpret the bits of an integer as unsigned."""
    if z3.is_bool(value):
        return z3.If(value, z3.IntVal(1), z3.IntVal(0))
    if z3.is_int_value(value) and value.as_long() >= 0:
        return value
    return z3.If(value < 0, value + 2**bits, value)


def _sum(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    a, b = operands
    if z3.is_bool(a):
        return z3.And(a, b) if op.name == "arith.muli" else z3.Xor(a, b)
    return a + b if op.name == "arith.addi" else a - b if op.name == "arith.subi" else a * b


def _division(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    a, b = operands
    if z3.is_bool(a):
        return None
    if op.name in ("arith.divui", "arith.remui"):
        a, b = (unsigned(o, bits_of(op)) for o in operands)
    if op.name == "arith.ceildivsi":
        a = a + b - 1
    division = scope.divide(a, b)
    return division.remainder if "rem" in op.name else division.quotient


def _shift(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    a, amount = operands[0], z3.simplify(operands[1]) if z3.is_int(operands[1]) else None
    if (
        z3.is_bool(a)
        or amount is None
        or not z3.is_int_value(amount)
        or not 0 <= amount.as_long() < bits_of(op)
    ):
        return None
    power = 2 ** amount.as_long()
    if op.name == "arith.shli":
        return a * power
    if power == 1:
        return a
    return (unsigned(a, bits_of(op)) if op.name == "arith.shrui" else a) / power


def _bitwise(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    a, b = operands
    if z3.is_bool(a):
        return {"arith.andi": z3.And, "arith.ori": z3.Or, "arith.xori": z3.Xor}[op.name](a, b)
    for x, other in ((a, z3.simplify(b)), (b, z3.simplify(a))):
        if not z3.is_int_value(other):
            continue
        number = other.as_long()
        if op.name == "arith.andi" and number >= 0 and number & (number + 1) == 0:
            return x % (number + 1)  # the last bits
        if op.name == "arith.andi" and number < 0 and -number & (-number - 1) == 0:
            return x - x % -number  # all but the last bits
        if op.name == "arith.xori" and number == -1:
            return -1 - x
    result = scope.fresh("bits", home=op.block)
    scope.opaque[result.get_id()] = op.name
    top = 2 ** (bits_of(op) - 1)
    scope.know(z3.And(-top <= result, result < top), because="the range of a type")
    if op.name == "arith.andi":
        for operand in (a, b):
            below = z3.And(result >= 0, result <= operand)
            scope.know(below, because="the bits of both operands", when=[operand >= 0])
        return result
    # Obligations refute operands that exceed their type; here they must not cause a contradiction.
    natural = [a >= 0, b >= 0, a < top, b < top]
    scope.know(z3.And(result >= 0, result <= a + b), because="the bits of one operand", when=natural)
    if op.name == "arith.ori":
        scope.know(z3.And(a <= result, b <= result), because="the bits of one operand", when=natural)
    return result


def _extreme(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    a, b = operands
    if z3.is_bool(a):
        return None
    x, y = operands if op.name.endswith("si") else (unsigned(o, bits_of(op)) for o in operands)
    return z3.If(x <= y, a, b) if "min" in op.name else z3.If(x >= y, a, b)


def _comparison(scope: Scope, op: Op, operands: Sequence[Any]) -> Bool | None:
    predicate, (a, b) = op.attrs["flags"][0], operands
    if predicate in ("eq", "ne"):
        return a == b if predicate == "eq" else a != b
    if predicate[0] == "u":
        a, b = (unsigned(o, bits_of(op)) for o in operands)
    else:
        a, b = signed(a), signed(b)
    return {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}.get(predicate[1:])


def _extension(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    return unsigned(operands[0], bits_of(op)) if op.name == "arith.extui" else signed(operands[0])


def _truncation(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    return operands[0] % 2 == 1 if element_of(op.result.type) == I1 else operands[0]


def _absolute(scope: Scope, op: Op, operands: Sequence[Any]) -> Any:
    return z3.If(operands[0] >= 0, operands[0], -operands[0])


ARITHMETIC: dict[str, Callable[[Scope, Op, Sequence[Any]], Any]] = {
    **dict.fromkeys(("arith.addi", "arith.subi", "arith.muli"), _sum),
    **dict.fromkeys(("arith.divsi", "arith.remsi", "arith.divui", "arith.remui"), _division),
    **dict.fromkeys(("arith.ceildivsi", "arith.floordivsi"), _division),
    **dict.fromkeys(("arith.shli", "arith.shrsi", "arith.shrui"), _shift),
    **dict.fromkeys(("arith.andi", "arith.ori", "arith.xori"), _bitwise),
    **dict.fromkeys(("arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui"), _extreme),
    **dict.fromkeys(("arith.extsi", "arith.extui", "arith.index_cast"), _extension),
    "arith.cmpi": _comparison,
    "arith.trunci": _truncation,
    "math.absi": _absolute,
}

_MAY_WRAP = {
    "arith.addi",
    "arith.subi",
    "arith.muli",
    "arith.shli",
    "arith.trunci",
    "math.absi",
    "arith.index_cast",
}
_DIVISIONS = {"arith.divsi", "arith.remsi", "arith.ceildivsi", "arith.floordivsi"}


def requirements(op: Op, operands: Sequence[Any], result: Any) -> list[tuple[str, Bool]]:
    """Return pairs (kind, condition) under which the machine's result equals the mathematical one."""
    element = element_of(op.result.type)
    if isinstance(element, Pointer) or element == I1:
        return []
    if op.name in _MAY_WRAP:
        top = 2 ** (element.bits - 1)
        return [("overflow", z3.And(-top <= result, result < top))]
    if op.name in _DIVISIONS:
        return [("sign", operands[0] >= 0), ("sign", operands[1] >= 1)]
    if op.name in ("arith.divui", "arith.remui"):
        top = 2 ** (element.bits - 1)
        return [("sign", operands[1] != 0), ("overflow", result < top)]
    return []
