"""Why an access went wrong: its address and mask in the kernel's own names, with their values at the offending lane.

Nothing of it is recorded by the kernel. When a launch has a finding, the kernel's TTIR is read again, the offending
program's addresses are worked out from the launch's arguments (`evaluate`) until one is the address that was reported,
and the expression is found in the kernel's text (`expressions`). What can't be known is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..errors import Reason
from ..ir.provenance import ARITHMETIC, mask_of, offset_arithmetic, root_of
from ..ir.reader import parse
from ..ir.scanner import ParseError
from ..ir.ttir import I1, Module, Op, Pointer, Value, element_of
from .again import program_of, signed
from .evaluate import Frame, Program, Tile, Unknown
from .expressions import Match, Matcher, Place, Text, text_at
from .watched import Seen

_OPERATIONS = {
    "load": ("tt.load",),
    "store": ("tt.store",),
    "atomic": ("tt.atomic_rmw", "tt.atomic_cas"),
    "offset": tuple(ARITHMETIC),
}


def reason_for(seen: Seen) -> Reason | None:
    """The reason for what was seen; None where none can be given."""
    file, _, line = seen.site["location"].rpartition(":")
    text = text_at(file, int(line or 0))
    if text is None or seen.site["what"] not in _OPERATIONS:
        return None
    try:
        return _Explanation(seen, text, int(line)).reason()
    except RecursionError:  # an expression of thousands of parts
        return None


@dataclass(frozen=True)
class Occurrence:
    """One lane of one run of an operation."""

    op: Op
    program: Program
    frame: Frame
    lane: tuple[int, ...]


class _Explanation:
    def __init__(self, seen: Seen, text: Text, line: int) -> None:
        self.seen, self.text, self.line = seen, text, line
        self.what = seen.site["what"]
        # Of a function that was inlined, arguments and constants are the caller's and have other names.
        in_kernel = seen.site["location"] == seen.site["called"]
        self.constants = seen.watched.kernel.constants if in_kernel else None

    def reason(self) -> Reason | None:
        try:
            found = next(self.occurrences(), None)
        except (Unknown, ParseError):
            found = None
        if self.what == "offset":
            return self.arithmetic(found) if found else None
        return self.access(found)

    # -- where it happened --

    def occurrences(self) -> Iterator[Occurrence]:
        """Lanes at which the operation did what was reported."""
        source = self.seen.watched.kernel.ttir()
        if source is None:
            return
        module = parse(source)
        for op in self.operations(module):
            program = program_of(self.seen.watched, self.seen.program, module)
            for frame in program.frames(op.block, op.operands) if op.block else ():
                lane = self.lane(op, program, frame)
                if lane is not None:
                    yield Occurrence(op, program, frame, lane)

    def operations(self, module: Module) -> Iterator[Op]:
        """The operations that are reported as this site."""
        site = self.seen.watched.kernel.told["sites"][self.seen.number]  # as it was compiled
        offsets = offset_arithmetic(module.entry)
        pointers = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
        for op in module.entry.body.walk():
            here = (op.origin or op.location, op.location) == (site["location"], site["called"])
            if not here or op.name not in _OPERATIONS[self.what]:
                continue
            if self.what == "offset":
                is_it = op in offsets
            else:
                root = root_of(op.operands[0])
                is_it = (pointers.index(root) if root in pointers else -1) == site["argument"]
            if is_it:
                yield op

    def lane(self, op: Op, program: Program, frame: Frame) -> tuple[int, ...] | None:
        """The first lane of a run that fits the record."""
        record = self.seen.record
        if self.what == "offset":
            left, right = (program.value(operand, frame) for operand in op.operands)
            hit = _EXACT[op.name](left, right) == record.value
        else:
            address = program.value(op.operands[0], frame)
            distance = signed(record.address) - address
            hit = (distance >= 0) & (distance < self.seen.site["size"])
            mask = mask_of(op)
            if mask is not None:
                hit = hit & (program.value(mask, frame) != 0)
        lanes = hit.nonzero()
        return tuple(lanes[0].tolist()) if len(lanes) else None

    # -- in the words of the kernel --

    def access(self, found: Occurrence | None) -> Reason | None:
        calls = list(self.text.accesses(self.what, self.line))
        reasons = []
        for call in calls:
            parts = [(call.address, found.op.operands[0])] if found else []
            mask = mask_of(found.op) if found else None
            if call.mask is not None and mask is not None:
                parts.append((call.mask, mask))
            masked = ast.unparse(call.mask) if call.mask is not None else None
            certain, values = self.values(parts, found) if found else (False, {})
            if certain or len(calls) == 1:
                reasons.append(Reason(ast.unparse(call.address), masked, values))
        return reasons[0] if len(reasons) == 1 else None

    def arithmetic(self, found: Occurrence) -> Reason | None:
        reasons = {}
        for node in self.text.at(self.line):
            if isinstance(node, ast.BinOp):
                certain, values = self.values([(node, found.op.result)], found)
                if certain and values:
                    reasons[ast.unparse(node)] = Reason(ast.unparse(node), None, values)
        return next(iter(reasons.values())) if len(reasons) == 1 else None

    def values(
        self, parts: list[tuple[ast.expr, Value]], found: Occurrence
    ) -> tuple[bool, dict[str, int | str]]:
        """What the names of expressions stand for, and whether the expressions fit the operation."""
        match = Match()
        for expand in (True, False):
            matcher = Matcher(self.text, self.constants, expand)
            match = Match()
            for node, value in parts:
                match = match.plus(matcher.match(node, Place(value, found.lane)))
            if not match.conflicts:
                break
        values: dict[str, int | str] = {}
        for name, place in (match.names | (match.positions if match.certain else {})).items():
            shown = match.definitions.get(name) or self.shown(place, found)
            if shown is not None and name not in match.conflicts:
                values[name] = shown
        values |= match.numbers
        return match.certain, values

    def shown(self, place: Place, found: Occurrence) -> int | str | None:
        """A value as it is printed; None if it can't be known."""
        try:
            tile = found.program.value(place.value, found.frame)
        except Unknown:
            return None
        number = int(tile[place.lane])
        element = element_of(place.value.type)
        if isinstance(element, Pointer):
            return self.shown_pointer(place.value, number)
        if element == I1:
            return str(bool(number))
        if number < 0 and self.has_unsigned:
            return None  # TTIR does not say which integers have a sign
        return number

    def shown_pointer(self, value: Value, number: int) -> str | None:
        """A pointer, as the argument that it was made from and an offset."""
        root = root_of(value)
        if root is None or root is value or root.producer is not None:
            return None
        argument = next((a for a in self.seen.watched.arguments if a.name == root.name), None)
        element = element_of(value.type)
        assert isinstance(element, Pointer)
        size = max(1, element_of(element.pointee).bits // 8)
        if argument is None or (number - argument.address) % size:
            return None
        return f"{root.name} + {(number - argument.address) // size}"

    @property
    def has_unsigned(self) -> bool:
        watched = self.seen.watched
        tensors = (a.tensor.dtype for a in watched.arguments if a.known)
        return any(dtype in _UNSIGNED for dtype in tensors) or any(
            f.code in "BHIQ" for f in watched.kernel.fields
        )


_UNSIGNED = {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_EXACT: dict[str, Callable[[Tile, Tile], Tile]] = {
    "arith.addi": torch.add,
    "arith.subi": torch.sub,
    "arith.muli": torch.mul,
    "arith.shli": torch.bitwise_left_shift,
}
