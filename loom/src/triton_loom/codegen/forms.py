"""Forms of a value in one chunk of a loop nest, and their C++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..ir.provenance import Integer
from ..ir.ttir import I1, I32, I64, Pointer, Scalar
from .cpp import c_type, size_of, vector_of

Step = int | str  # from lane to lane: an int, or a C++ expression


@dataclass(frozen=True)
class Form:
    """A value in the current chunk.

    kind      expr                        lane l holds
    uniform   a scalar                    expr
    affine    a scalar (lane 0)           expr + l * step            (pointers: in elements)
    vector    a vector                    expr[l]
    offsets   a scalar pointer            expr + offset[l]           (pointers only)
    """

    kind: Literal["uniform", "affine", "vector", "offsets"]
    element: Scalar | Pointer
    expr: str
    level: int
    step: Step = 0
    offset: Form | None = None
    multiple: int = 1  # divides `expr` of an index
    exact: Callable[[], str] | None = (
        None  # the true vector, where the affine form is valid for addresses only
    )

    def vec(self, lanes: int) -> str:
        """Return the value as an expression of so many lanes; a scalar expression for a single lane."""
        if self.kind == "vector" or lanes == 1:
            return self.expr
        type_ = c_type(self.element, lanes)
        if self.kind == "uniform":
            if self.element == I1:
                bit = {"true": "-1", "false": "0"}.get(self.expr, f"-(i32){self.expr}")
                return f"splat<{type_}>({bit})"
            return f"splat<{type_}>({'(i64)' if isinstance(self.element, Pointer) else ''}{self.expr})"
        if self.exact:
            return self.exact()
        if self.kind == "affine" and isinstance(self.element, Pointer):
            return f"ramp<{type_}>((i64){self.expr}, {self.step} * {pointee_size(self.element)}ll)"
        if self.kind == "affine":
            return f"ramp<{type_}>({self.expr}, {self.step})"
        assert self.offset
        assert isinstance(self.element, Pointer)
        offsets = f"{self.offset.wide(lanes)} * {pointee_size(self.element)}ll"
        return f"(splat<{type_}>((i64){self.expr}) + {offsets})"

    def wide(self, lanes: int) -> str:
        """Return an integer form as i64 lanes (sign-extended)."""
        text = self.vec(lanes)
        return text if self.element == I64 else f"convert<{vector_of('i64', lanes)}>({text})"


def wide(text: str, integer: Integer) -> str:
    """Return a scalar integer widened to 64 bits."""
    return f"(i64){text}" if integer.signed else f"(i64)(u{integer.bits}){text}"


Index = tuple[Form, ...]


def constant_index(number: int) -> Form:
    """Return an index that is the same position along a dimension in every chunk."""
    return Form("uniform", I32, str(number), 0, multiple=number or 1 << 30)


def pointee_size(pointer: Pointer) -> int:
    """Return the bytes of an offset of 1."""
    pointee = pointer.pointee
    assert isinstance(pointee, Scalar | Pointer)
    return size_of(pointee)


def as_step(expr: str) -> Step:
    """Return an expression as an int if it is a literal, else unchanged."""
    text = expr.removesuffix("ll")
    return int(text) if text.lstrip("-").isdigit() else expr


def add_steps(a: Step, b: Step) -> Step:
    """Return a + b, computed now if both are ints."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return b if a == 0 else a
    return f"({a} + {b})"


def multiply_steps(a: Step, b: Step) -> Step:
    """Return a * b, computed now if both are ints."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 0 or b == 0:
        return 0
    if a == 1 or b == 1:
        return b if a == 1 else a
    return f"({a} * {b})"
