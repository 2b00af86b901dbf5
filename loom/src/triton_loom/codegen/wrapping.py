"""Wraparound in a loop nest's integer arithmetic: reports for the sanitizer, and errors that end a launch.

Offsets and masks are evaluated as if integers were unbounded. Where a machine's integers would wrap, the access that
uses the result determines in which lanes that matters.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from ..ir.provenance import Integer, mask_of
from ..ir.ttir import I32, Op, Value, element_of
from .accesses import Accesses, exact_result
from .cpp import c_string, vector_of
from .forms import Form, Index, constant_index, wide
from .schedule import is_virtual


@dataclass(eq=False)
class Watch:
    """Arithmetic of a nest whose results may not fit their type: a variable says in which lanes."""

    op: Op
    name: str
    exact: str  # the result of lane `l`
    uniform: bool  # the same in all lanes
    settled: bool = False  # an access reports it

    @property
    def placeholder(self) -> str:
        return f"// {self.name}"


class Wrapping:
    """Part of a loop nest that detects where its arithmetic wraps around."""

    accesses: Accesses
    shape: tuple[int, ...]
    lanes: int
    lane_dim: int
    lane_level: int
    variables: dict[int, str]
    teed: list[Value]

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self.refused: set[tuple[Value, str]] = set()

    @abstractmethod
    def name(self, stem: str) -> str: ...
    @abstractmethod
    def do(self, statement: str, level: int) -> None: ...
    @abstractmethod
    def vec(self, form: Form) -> str: ...
    @abstractmethod
    def eval(self, value: Value, index: Index) -> Form: ...

    def watch(self, op: Op, forms: list[Form], level: int, integer: Integer) -> None:
        """Check the exact results of an offset's arithmetic; if lanes are equally spaced, only the first and the last.

        An access that uses it says which lanes matter (`settle`); for any other use, all lanes do."""
        type_ = f"{integer.bits}, {str(integer.signed).lower()}"
        uniform = all(f.kind == "uniform" for f in forms)
        if uniform or all(f.kind in ("uniform", "affine") for f in forms):
            first, last, exact = (
                exact_result(op, *(f"({wide(f.expr, integer)} + {lane} * (i64)({f.step}))" for f in forms))
                for lane in (0, self.lanes - 1, "l")
            )
            outside = f"lanes_outside<{type_}, {1 if uniform else self.lanes}>({first}, {last})"
        else:
            level = max(level, self.lane_level)
            unsigned = "" if integer.signed else f"({vector_of(f'u{integer.bits}', self.lanes)})"
            lanes = vector_of("i64", self.lanes)
            tile = exact_result(op, *(f"convert<{lanes}>({unsigned}{self.vec(f)})" for f in forms))
            outside, exact = f"lanes_outside<{type_}>({tile})", f"{tile}[l]"
        watch = Watch(op, self.name("outside"), exact, uniform)
        self.watches.append(watch)
        self.do(f"const u64 {watch.name} = {outside};", level)
        self.do(watch.placeholder, level)

    def settle(self, op: Op, mask: str | None, index: Index, level: int) -> None:
        """Report wraparound in the address or in the mask of an access, in the lanes where it matters: for the address
        the active lanes, for a part of the mask the lanes that no other part turns off."""
        if not self.watches:
            return
        for watch in self.watches_in(op.operands[0]):
            self.report(watch, mask, level)
        mask_value = mask_of(op)
        parts = conjuncts(mask_value) if mask is not None and mask_value is not None else []
        for part in parts:
            for watch in self.watches_in(part):
                others = [other for other in parts if watch not in self.watches_in(other)]
                on = " & ".join(self.vec(self.eval(other, index)) for other in others)
                self.report(watch, on or None, level)

    def report(self, watch: Watch, mask: str | None, level: int) -> None:
        watch.settled = True
        on = f" & lanes_on({mask if self.lanes > 1 else f'bool({mask})'})" if mask is not None else ""
        lanes = f"u64(({watch.name} * ~0ull{on}) != 0)" if watch.uniform else f"{watch.name}{on}"
        call = self.accesses.overflow(watch.op, watch.exact, lanes)
        self.do(f"if (__builtin_expect({watch.name} != 0, 0)) {call}", level)

    def watches_in(self, value: Value) -> list[Watch]:
        """Return the watched arithmetic of this nest that a value is computed from."""
        seen: set[Value] = set()
        todo = [value]
        while todo:
            current = todo.pop()
            if current not in seen and current.producer is not None and is_virtual(current):
                seen.add(current)
                todo += current.producer.operands
        return [watch for watch in self.watches if watch.op.result in seen]

    def settled(self, lines: list[str]) -> list[str]:
        """Return the nest's lines, with reports of the arithmetic that no access has settled."""
        teed = [watch for value in self.teed for watch in self.watches_in(value)]
        reports = {
            watch.placeholder: []
            if watch.settled and watch not in teed
            else [f"if ({watch.name}) {self.accesses.overflow(watch.op, watch.exact, watch.name)}"]
            for watch in self.watches
        }
        return [line for text in lines for line in reports.get(text, [text])]

    def refuse_wrapping(self, op: Op, value: Value, index: Index) -> None:
        """End the launch if 32-bit integers that a mask compares wrap around inside a chunk, where they are assumed to
        count up. A row that begins at a multiple of the chunk's lanes wraps between two chunks, which is right."""
        if (variable := self.variables.get(self.lane_dim)) is None:
            return
        first = tuple(constant_index(0) if form.expr == variable else form for form in index)
        whole_row = all(form.kind == "uniform" for form in first)
        for narrow in narrow_sources(value):
            start = self.eval(narrow, first if whole_row else index)
            lanes = self.shape[self.lane_dim] if whole_row else self.lanes
            if start.expr.lstrip("-").isdigit() or (narrow, start.expr) in self.refused:
                continue
            self.refused.add((narrow, start.expr))
            inside = f"{start.expr} > {2**31 - lanes} && {start.expr} % {self.lanes} != 0"
            why = c_string(
                f"{op.location}: integers of 32 bits that a mask compares wrap around inside of a tile"
            )
            self.do(f"if (__builtin_expect({inside}, 0)) fail(p, {why});", start.level)


def conjuncts(mask: Value) -> list[Value]:
    """Return the masks whose conjunction this one is."""
    op = mask.producer
    if op is None or op.name != "arith.andi":
        return [mask]
    return [part for operand in op.operands for part in conjuncts(operand)]


def narrow_sources(value: Value) -> list[Value]:
    """Return the 32-bit integers that an integer is computed from: itself, or the operands of a widening."""
    op = value.producer
    if element_of(value.type) == I32:
        return [value]
    return [v for operand in op.operands for v in narrow_sources(operand)] if op and is_virtual(value) else []
