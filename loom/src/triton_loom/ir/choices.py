"""Pointers that a kernel chooses when it runs carry the number of the argument that they came from.

`tl.where(first, x_ptr, y_ptr) + offset` belongs to x or to y, and only the launch knows to which. What is chosen among
is therefore moved by a multiple of 2^48 bytes, which no tensor reaches: include/witness.h reads the number off the
address and moves it back.
"""

from __future__ import annotations

from collections.abc import Iterator

from .provenance import root_of
from .ttir import I64, Function, Module, Op, Pointer, Tensor, Value, element_of

_NUMBER_BIT = 48  # as in include/witness.h
_MOST_POINTERS = 11  # of a kernel: addresses that are only declared are 2^44 bytes apart


def number_choices(module: Module) -> None:
    """Number what pointers are chosen among, where nothing but accesses sees them."""
    arguments = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
    numbers = {arg: number for number, arg in enumerate(arguments, start=1)}
    if len(arguments) > _MOST_POINTERS or any(_seen(function) for function in module.functions.values()):
        return
    chosen = [(op, at) for op in module.entry.body.walk() for at in _chosen(op)]
    for user, at in chosen:
        root = root_of(user.operands[at])
        if root in numbers:
            user.operands[at] = _moved(user.operands[at], numbers[root], user)


def _is_pointer(value: Value) -> bool:
    return isinstance(element_of(value.type), Pointer)


def _seen(function: Function) -> bool:
    """Whether a function looks at a pointer itself, of which it is not clear where it comes from."""
    return any(
        (op.name == "tt.ptr_to_int" and root_of(op.operands[0]) is None)
        or (op.name == "tt.store" and _is_pointer(op.operands[1]))
        for op in function.body.walk()
    )


def _chosen(op: Op) -> Iterator[int]:
    """The operands of an operation that become one of several pointers, or that of a function that is called."""
    if op.name == "arith.select":
        found = zip((1, 2), (op.results[0], op.results[0]), strict=True)
    elif op.name == "scf.for":
        found = zip(range(3, len(op.operands)), op.results, strict=True)
    elif op.name == "scf.yield" and op.block and op.block.region and op.block.region.parent:
        parent = op.block.region.parent
        into = parent.results if parent.name in ("scf.if", "scf.for") else []
        found = zip(range(len(into)), into, strict=True)
    elif op.name == "tt.call":
        yield from (at for at, operand in enumerate(op.operands) if _is_pointer(operand))
        return
    else:
        return
    yield from (at for at, result in found if _is_pointer(result) and root_of(result) is None)


def _moved(pointer: Value, number: int, before: Op) -> Value:
    """The pointer with a number."""
    assert before.block
    block, element = before.block, element_of(pointer.type)
    assert isinstance(element, Pointer)
    size = max(1, element_of(element.pointee).bits // 8)
    shape = pointer.type.shape if isinstance(pointer.type, Tensor) else None
    distance = Value("number", I64 if shape is None else Tensor(shape, I64))
    moved = Value("numbered", pointer.type)
    distance.producer = Op("arith.constant", [], [distance], {"value": (number << _NUMBER_BIT) // size})
    moved.producer = Op("tt.addptr", [pointer, distance], [moved])
    for op in (distance.producer, moved.producer):
        op.location, op.origin, op.block = before.location, before.origin, block
        block.ops.insert(block.ops.index(before), op)
    return moved
