"""Explain why an access went wrong: its address and mask in the kernel's own names, with their values at that lane.

The kernel records none of this. When a launch has a finding, the kernel's TTIR is read again, the offending
program's addresses are recomputed from the launch's arguments (`evaluate`) until one is the reported address, and
the expression is located in the kernel's source (`expressions`). What cannot be known is left out.
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
from .expressions import Location, Match, Matcher, Text, text_at
from .watched import Violation

_OPERATIONS = {
    "load": ("tt.load",),
    "store": ("tt.store",),
    "atomic": ("tt.atomic_rmw", "tt.atomic_cas"),
    "offset": tuple(ARITHMETIC),
}


def reason_for(violation: Violation) -> Reason | None:
    """Return the reason for a violation; None where none can be given."""
    file, _, line = violation.site["location"].rpartition(":")
    text = text_at(file, int(line or 0))
    if text is None or violation.site["what"] not in _OPERATIONS:
        return None
    try:
        return _Explanation(violation, text, int(line)).reason()
    except RecursionError:  # an expression of thousands of parts
        return None


@dataclass(frozen=True)
class Occurrence:
    """Lane of one run of an operation."""

    op: Op
    program: Program
    frame: Frame
    lane: tuple[int, ...]


class _Explanation:
    def __init__(self, violation: Violation, text: Text, line: int) -> None:
        self.violation, self.text, self.line = violation, text, line
        self.what = violation.site["what"]
        # Arguments and constants of an inlined function belong to the caller and have other names.
        in_kernel = violation.site["location"] == violation.site["called"]
        self.constants = violation.watched.kernel.constants if in_kernel else None

    def reason(self) -> Reason | None:
        try:
            occurrence = next(self.occurrences(), None)
        except (Unknown, ParseError):
            occurrence = None
        if self.what == "offset":
            return self.arithmetic(occurrence) if occurrence else None
        return self.access(occurrence)

    # -- locate the violation --

    def occurrences(self) -> Iterator[Occurrence]:
        """Yield the lanes at which the operation did what was reported."""
        source = self.violation.watched.kernel.ttir()
        if source is None:
            return
        module = parse(source)
        for op in self.operations(module):
            program = program_of(self.violation.watched, self.violation.program, module)
            for frame in program.frames(op.block, op.operands) if op.block else ():
                lane = self.lane(op, program, frame)
                if lane is not None:
                    yield Occurrence(op, program, frame, lane)

    def operations(self, module: Module) -> Iterator[Op]:
        """Yield the operations that are reported as this site."""
        site = self.violation.watched.kernel.metadata["sites"][self.violation.number]  # as it was compiled
        offsets = offset_arithmetic(module.entry)
        pointers = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
        for op in module.entry.body.walk():
            at_site = (op.origin or op.location, op.location) == (site["location"], site["called"])
            if not at_site or op.name not in _OPERATIONS[self.what]:
                continue
            if self.what == "offset":
                matches = op in offsets
            else:
                root = root_of(op.operands[0])
                matches = (pointers.index(root) if root in pointers else -1) == site["argument"]
            if matches:
                yield op

    def lane(self, op: Op, program: Program, frame: Frame) -> tuple[int, ...] | None:
        """Return the first lane of a run that fits the record."""
        record = self.violation.record
        if self.what == "offset":
            left, right = (program.value(operand, frame) for operand in op.operands)
            hit = _EXACT[op.name](left, right) == record.value
        else:
            address = program.value(op.operands[0], frame)
            distance = signed(record.address) - address
            hit = (distance >= 0) & (distance < self.violation.site["size"])
            mask = mask_of(op)
            if mask is not None:
                hit = hit & (program.value(mask, frame) != 0)
        lanes = hit.nonzero()
        return tuple(lanes[0].tolist()) if len(lanes) else None

    # -- describe it in the kernel's names --

    def access(self, occurrence: Occurrence | None) -> Reason | None:
        calls = list(self.text.accesses(self.what, self.line))
        reasons = []
        for call in calls:
            parts = [(call.address, occurrence.op.operands[0])] if occurrence else []
            mask = mask_of(occurrence.op) if occurrence else None
            if call.mask is not None and mask is not None:
                parts.append((call.mask, mask))
            masked = ast.unparse(call.mask) if call.mask is not None else None
            certain, values = self.values(parts, occurrence) if occurrence else (False, {})
            if certain or len(calls) == 1:
                reasons.append(Reason(ast.unparse(call.address), masked, values))
        return reasons[0] if len(reasons) == 1 else None

    def arithmetic(self, occurrence: Occurrence) -> Reason | None:
        reasons = {}
        for node in self.text.at(self.line):
            if isinstance(node, ast.BinOp):
                certain, values = self.values([(node, occurrence.op.result)], occurrence)
                if certain and values:
                    reasons[ast.unparse(node)] = Reason(ast.unparse(node), None, values)
        return next(iter(reasons.values())) if len(reasons) == 1 else None

    def values(
        self, parts: list[tuple[ast.expr, Value]], occurrence: Occurrence
    ) -> tuple[bool, dict[str, int | str]]:
        """Return whether the expressions fit the operation, and the values of their names."""
        match = Match()
        for expand in (True, False):
            matcher = Matcher(self.text, self.constants, expand)
            match = Match()
            for node, value in parts:
                match = match.plus(matcher.match(node, Location(value, occurrence.lane)))
            if not match.conflicts:
                break
        values: dict[str, int | str] = {}
        for name, location in (match.names | (match.positions if match.certain else {})).items():
            format_value = match.definitions.get(name) or self.format_value(location, occurrence)
            if format_value is not None and name not in match.conflicts:
                values[name] = format_value
        values |= match.numbers
        return match.certain, values

    def format_value(self, location: Location, occurrence: Occurrence) -> int | str | None:
        """Return a value in printable form; None if it cannot be known."""
        try:
            tile = occurrence.program.value(location.value, occurrence.frame)
        except Unknown:
            return None
        number = int(tile[location.lane])
        element = element_of(location.value.type)
        if isinstance(element, Pointer):
            return self.format_pointer(location.value, number)
        if element == I1:
            return str(bool(number))
        if number < 0 and self.has_unsigned:
            return None  # TTIR does not record which integers are signed
        return number

    def format_pointer(self, value: Value, number: int) -> str | None:
        """Format a pointer as an offset from the argument that it was derived from."""
        root = root_of(value)
        if root is None or root is value or root.producer is not None:
            return None
        argument = next((a for a in self.violation.watched.arguments if a.name == root.name), None)
        element = element_of(value.type)
        assert isinstance(element, Pointer)
        size = max(1, element_of(element.pointee).bits // 8)
        if argument is None or (number - argument.address) % size:
            return None
        return f"{root.name} + {(number - argument.address) // size}"

    @property
    def has_unsigned(self) -> bool:
        watched = self.violation.watched
        tensors = (a.tensor.dtype for a in watched.arguments if a.has_tensor)
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
