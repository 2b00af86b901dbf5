"""Operations that compute nothing: a result element is a constant, a launch or lane number, or an operand's element."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..ir.ttir import I1, Block, Op, Value, element_of, shape_of
from .contract import Int
from .solver import z3
from .values import Index, linear, select


class Shapes(ABC):
    """Handlers of these operations, one method per name."""

    programs: list[Int]
    grid: list[Int]

    @abstractmethod
    def ev(self, value: Value, index: Index = ()) -> Any:
        """Evaluate one lane."""

    @abstractmethod
    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Return an arbitrary value of a value's type."""

    def _arith_constant(self, op: Op, value: Value, index: Index) -> Any:
        number, element = op.attrs.get("value"), element_of(value.type)
        one = z3.BoolVal if element == I1 else z3.IntVal

        def literal(number_: Any) -> Any:
            return one(bool(number_) if element == I1 else int(number_))

        if isinstance(number, list) and len(set(number)) == 1:
            number = number[0]
        if isinstance(number, bool | int):
            return literal(number)
        if isinstance(number, list) and len(number) <= 32 and all(isinstance(n, bool | int) for n in number):
            at = linear(shape_of(value.type), index)
            result = literal(number[-1])
            for position, n in reversed(list(enumerate(number[:-1]))):
                result = z3.If(at == position, literal(n), result)
            return result
        return self.opaque(value, "a constant tile")

    def _tt_get_program_id(self, op: Op, value: Value, index: Index) -> Any:
        return self.programs["xyz".index(op.attrs["flags"][0])]

    def _tt_get_num_programs(self, op: Op, value: Value, index: Index) -> Any:
        return self.grid["xyz".index(op.attrs["flags"][0])]

    def _tt_make_range(self, op: Op, value: Value, index: Index) -> Any:
        return index[0] + int(op.attrs["start"]) if int(op.attrs["start"]) else index[0]

    def _tt_splat(self, op: Op, value: Value, index: Index) -> Any:
        return self.ev(op.operands[0])

    def _tt_unsplat(self, op: Op, value: Value, index: Index) -> Any:
        return self.ev(op.operands[0], tuple(z3.IntVal(0) for _ in shape_of(op.operands[0].type)))

    def _tt_expand_dims(self, op: Op, value: Value, index: Index) -> Any:
        axis = int(op.attrs["axis"])
        return self.ev(op.operands[0], index[:axis] + index[axis + 1 :])

    def _tt_broadcast(self, op: Op, value: Value, index: Index) -> Any:
        shape = shape_of(op.operands[0].type)
        inner = tuple(z3.IntVal(0) if size == 1 else i for size, i in zip(shape, index, strict=True))
        return self.ev(op.operands[0], inner)

    def _tt_trans(self, op: Op, value: Value, index: Index) -> Any:
        inner: list[Any] = [None] * len(index)
        for dim, source in enumerate(op.attrs["order"]):
            inner[int(source)] = index[dim]
        return self.ev(op.operands[0], tuple(inner))

    def _tt_reshape(self, op: Op, value: Value, index: Index) -> Any:
        if "allow_reorder" in op.attrs or "allow_reorder" in op.attrs.get("flags", ()):
            return self.opaque(value, "tt.reshape in any order")
        source = shape_of(op.operands[0].type)
        rest, inner = linear(shape_of(value.type), index), []
        for size in reversed(source):
            inner.append(z3.simplify(rest % size))
            rest = rest / size
        return self.ev(op.operands[0], tuple(reversed(inner)))

    def _tt_join(self, op: Op, value: Value, index: Index) -> Any:
        first, second = (self.ev(o, index[:-1]) for o in op.operands)
        return select(index[-1] == 0, first, second)

    def _tt_split(self, op: Op, value: Value, index: Index) -> Any:
        return self.ev(op.operands[0], (*index, z3.IntVal(op.results.index(value))))

    def _arith_select(self, op: Op, value: Value, index: Index) -> Any:
        condition = self.ev(op.operands[0], index if shape_of(op.operands[0].type) else ())
        first, second = (self.ev(o, index) for o in op.operands[1:])
        return select(condition, first, second)
