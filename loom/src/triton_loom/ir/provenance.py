"""Origins of pointers and offsets, traced through arithmetic, loops and branches."""

from __future__ import annotations

from dataclasses import dataclass

from .sorting import BITONIC
from .ttir import Block, Function, Op, Pointer, Value, element_of


def root_of(value: Value) -> Value | None:
    """Return the value from which a pointer was derived by adding offsets, if it is unique."""
    seen: set[Value] = set()
    roots: set[Value] = set()

    def visit(value: Value) -> None:
        if value in seen:
            return
        seen.add(value)
        sources = _sources(value)
        if sources is None:
            roots.add(value)
        for source in sources or ():
            visit(source)

    visit(value)
    return roots.pop() if len(roots) == 1 else None


_MOVES = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.bitcast"}


def _sources(value: Value) -> list[Value] | None:
    """Return the values that this one equals or is an offset from; None if it is a root."""
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
    """Return the initial and the updated value of a loop-carried argument; None for the arguments of a function."""
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


# Operations that preserve an offset, and arithmetic through which a wrong offset persists. Hashing operations
# (and, or, xor, unsigned division) wrap around on purpose.
_THROUGH = {
    *("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"),
    *("arith.extsi", "arith.extui", "arith.index_cast"),
    *("arith.divsi", "arith.remsi", "arith.minsi", "arith.maxsi", BITONIC),
}
ARITHMETIC = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.shli": "<<"}
_MASK_AT = {"tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2}  # the position of the mask among the operands


@dataclass(frozen=True)
class Integer:
    """Integer type: TTIR's width with the signedness that its use implies."""

    bits: int = 32
    signed: bool = True

    def __str__(self) -> str:
        return f"{'' if self.signed else 'u'}int{self.bits}"


def mask_of(op: Op) -> Value | None:
    """Return the mask of an access, or None."""
    at = _MASK_AT.get(op.name, len(op.operands))
    return op.operands[at] if at < len(op.operands) else None


MAKES_DESCRIPTOR = "tt.make_tensor_descriptor"


def described(op: Op) -> tuple[Value, list[Value], list[Value]]:
    """Return base, shape and strides of `tt.make_tensor_descriptor`."""
    base, *rest = op.operands
    rank = len(rest) // 2
    return base, rest[:rank], rest[rank:]


def offset_arithmetic(function: Function) -> dict[Op, Integer]:
    """Return the arithmetic of at most 32 bits behind pointer offsets, masks and loop bounds.

    Each sum, difference or product is returned with the type that has to hold its exact result.
    """
    result: dict[Op, Integer] = {}
    seen: set[Value] = set()
    pending: list[tuple[Value, bool]] = []  # (value, signed)
    for user in function.body.walk():
        if user.name == "tt.addptr":
            pending.append((user.operands[1], True))
        elif user.name == "scf.for" and not user.attrs.get("unsigned"):
            pending += [(bound, True) for bound in user.operands[:3]]  # lower bound, upper bound and step
        elif (mask := mask_of(user)) is not None:
            pending += [(value, True) for value in _compared_integers(mask)]
    while pending:
        value, signed = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        op = value.producer
        if op is None:
            sources = _carried(value) or []
        elif op.name in ARITHMETIC:
            bits = element_of(value.type).bits
            if bits < 32 or (bits == 32 and signed):
                result[op] = Integer(bits, signed)
            sources = op.operands
        elif op.name in _THROUGH:
            signed = (
                signed
                if element_of(op.operands[0].type) == element_of(value.type)
                else op.name != "arith.extui"
            )
            sources = op.operands
        elif op.name == "arith.select":
            sources = op.operands[1:]
        elif op.name in ("scf.for", "scf.if", "scf.while"):
            sources = _results(op, op.results.index(value))
        else:
            sources = []
        pending += [(source, signed) for source in sources if not element_of(source.type).is_float]
    return result


def _compared_integers(mask: Value) -> list[Value]:
    """Return the signed integers that are compared in a mask."""
    op = mask.producer
    if op is None:
        return []
    if op.name == "arith.cmpi":
        integers = not isinstance(element_of(op.operands[0].type), Pointer)
        return op.operands if integers and str(op.attrs["flags"][0])[0] != "u" else []
    through = {
        "arith.andi",
        "arith.ori",
        "arith.xori",
        "tt.splat",
        "tt.broadcast",
        "tt.expand_dims",
        "tt.trans",
    }
    return [v for operand in op.operands for v in _compared_integers(operand)] if op.name in through else []
