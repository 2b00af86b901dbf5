"""Where pointers and offsets come from, through arithmetic, loops and branches."""

from __future__ import annotations

from .sorting import BITONIC
from .ttir import I32, Block, Function, Op, Value, element_of


def root_of(value: Value) -> Value | None:
    """The value that a pointer was made from by adding offsets, if there is just one."""
    seen: set[Value] = set()
    roots: set[Value] = set()

    def visit(value: Value) -> None:
        if value in seen:
            return
        seen.add(value)
        sources = _same_or_moved(value)
        if sources is None:
            roots.add(value)
        for source in sources or ():
            visit(source)

    visit(value)
    return roots.pop() if len(roots) == 1 else None


_MOVES = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.bitcast"}


def _same_or_moved(value: Value) -> list[Value] | None:
    """The values that this one equals or is an offset from; None if it is its own beginning."""
    op = value.producer
    if op is None:
        return _carried(value)
    if op.name in _MOVES:
        return op.operands[:1]
    if op.name == "arith.select":
        return op.operands[1:]
    if op.name in ("scf.for", "scf.if", "scf.while"):
        return _results(op, op.results.index(value))
    return None


def _carried(value: Value) -> list[Value] | None:
    """What an argument of a loop's body starts as and becomes; None for the arguments of a function."""
    block: Block | None = value.owner
    loop = block.region.parent if block and block.region else None
    if loop is None or loop.name not in ("scf.for", "scf.while"):
        return None
    assert block
    slot = block.args.index(value)
    if loop.name == "scf.for":
        if slot == 0:
            return None
        return [loop.operands[2 + slot], block.ops[-1].operands[slot - 1]]
    before, after = (region.block for region in loop.regions)
    if block is before:
        return [loop.operands[slot], after.ops[-1].operands[slot]]
    return [before.ops[-1].operands[1 + slot]]


def _results(op: Op, slot: int) -> list[Value]:
    if op.name == "scf.for":
        return [op.operands[3 + slot], op.regions[0].block.ops[-1].operands[slot]]
    if op.name == "scf.if":
        return [region.block.ops[-1].operands[slot] for region in op.regions]
    return [op.regions[0].block.ops[-1].operands[1 + slot]]


# Operations that keep an offset what it is, and arithmetic that a wrong offset survives. What hashes its operands
# (and, or, xor, unsigned division) wraps around on purpose.
_THROUGH = {
    *("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"),
    *("arith.extsi", "arith.index_cast", "arith.divsi", "arith.remsi", "arith.minsi", "arith.maxsi", BITONIC),
}
ARITHMETIC = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.shli": "<<"}


def offset_arithmetic(function: Function) -> set[Op]:
    """32-bit sums, differences and products that offsets of pointers and the bounds of loops are made of."""
    found: set[Op] = set()
    seen: set[Value] = set()
    todo: list[Value] = []
    for user in function.body.walk():
        if user.name == "tt.addptr":
            todo.append(user.operands[1])
        elif user.name == "scf.for" and not user.attrs.get("unsigned"):
            todo += user.operands[:3]  # where it begins and ends, and its step
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        op = value.producer
        if op is None:
            todo += _carried(value) or []
        elif op.name in ARITHMETIC:
            if element_of(value.type) == I32:
                found.add(op)
            todo += op.operands
        elif op.name in _THROUGH:
            todo += op.operands
        elif op.name == "arith.select":
            todo += op.operands[1:]
        elif op.name in ("scf.for", "scf.if", "scf.while"):
            todo += _results(op, op.results.index(value))
    return found
