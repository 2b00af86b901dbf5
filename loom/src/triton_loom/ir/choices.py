"""Tag pointers selected at run time with the number of the argument that they came from.

`tl.where(first, x_ptr, y_ptr) + offset` belongs to x or to y, and only the launch knows to which. Each alternative
is therefore moved by a multiple of 2^48 bytes, more than any tensor spans: include/witness.h reads the number off
the address and moves it back.
"""

from __future__ import annotations

from collections.abc import Iterator

from .provenance import root_of
from .ttir import I64, Function, Module, Op, Pointer, Tensor, Value, element_of

_NUMBER_BIT = 48  # as in include/witness.h
_MAX_POINTERS = 11  # per kernel: the fake addresses of meta tensors are 2^44 bytes apart


def number_choices(module: Module) -> None:
    """Tag the alternatives of selected pointers, provided that only accesses see them."""
    arguments = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
    numbers = {arg: number for number, arg in enumerate(arguments, start=1)}
    if len(arguments) > _MAX_POINTERS or any(
        _inspects_pointers(function) for function in module.functions.values()
    ):
        return
    alternatives = [(op, at) for op in module.entry.body.walk() for at in _alternatives(op)]
    for user, at in alternatives:
        root = root_of(user.operands[at])
        if root in numbers:
            user.operands[at] = _tagged(user.operands[at], numbers[root], user)


def _is_pointer(value: Value) -> bool:
    return isinstance(element_of(value.type), Pointer)


def _inspects_pointers(function: Function) -> bool:
    """Return whether a function uses the bits of a pointer of unclear origin, or stores a pointer."""
    return any(
        (op.name == "tt.ptr_to_int" and root_of(op.operands[0]) is None)
        or (op.name == "tt.store" and _is_pointer(op.operands[1]))
        for op in function.body.walk()
    )


def _alternatives(op: Op) -> Iterator[int]:
    """Yield the positions of the operands that become one of several pointers, or pointer arguments of a call."""
    if op.name == "arith.select":
        pairs = zip((1, 2), (op.results[0], op.results[0]), strict=True)
    elif op.name == "scf.for":
        pairs = zip(range(3, len(op.operands)), op.results, strict=True)
    elif op.name == "scf.yield" and op.block and op.block.region and op.block.region.parent:
        parent = op.block.region.parent
        targets = parent.results if parent.name in ("scf.if", "scf.for") else []
        pairs = zip(range(len(targets)), targets, strict=True)
    elif op.name == "tt.call":
        yield from (at for at, operand in enumerate(op.operands) if _is_pointer(operand))
        return
    else:
        return
    yield from (at for at, result in pairs if _is_pointer(result) and root_of(result) is None)


def _tagged(pointer: Value, number: int, before: Op) -> Value:
    """Return the pointer tagged with a number."""
    assert before.block
    block, element = before.block, element_of(pointer.type)
    assert isinstance(element, Pointer)
    size = max(1, element_of(element.pointee).bits // 8)
    shape = pointer.type.shape if isinstance(pointer.type, Tensor) else None
    distance = Value("number", I64 if shape is None else Tensor(shape, I64))
    tagged = Value("numbered", pointer.type)
    distance.producer = Op("arith.constant", [], [distance], {"value": (number << _NUMBER_BIT) // size})
    tagged.producer = Op("tt.addptr", [pointer, distance], [tagged])
    for op in (distance.producer, tagged.producer):
        op.location, op.origin, op.block = before.location, before.origin, block
        block.ops.insert(block.ops.index(before), op)
    return tagged
