"""Contracts: the sizes that a kernel is launched with, its grid and the meaning of each argument.

    n = symbol("n", 1, 2**31 - 1)
    contract = Contract(
        sizes=(n,),
        grid=(cdiv(n, 1024), 1, 1),
        arguments={"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n},
        constants={"BLOCK": 1024},
    )

Integers are z3's mathematical integers; `a / b` of two of them rounds down for b > 0. Whether a kernel's 32 and
64 bits hold them is to be proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .solver import z3

Int = Any  # an integer of z3's (`z3.ArithRef`), or Python's
Bool = Any  # a boolean of z3's (`z3.BoolRef`), or Python's
Argument = Any  # Buffer | Int | float | None

# Names of PyTorch's dtypes, and TTIR's names for their elements.
ELEMENTS = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "bool": "i1",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "float8_e4m3fnuz": "f8E4M3FNUZ",
    "float8_e5m2fnuz": "f8E5M2FNUZ",
}


class ContractError(ValueError):
    """A contract is incomplete or inconsistent."""


class Integer(z3.ArithRef):
    """z3 integer that also supports `//`, as `triton.cdiv` needs it."""

    def __init__(self, expression: z3.ArithRef) -> None:
        super().__init__(expression.as_ast(), expression.ctx)

    def __floordiv__(self, other: Int) -> Integer:
        return Integer(self / other)

    def __rfloordiv__(self, other: Int) -> Integer:
        return Integer(other / self)

    def __neg__(self) -> Integer:
        return Integer(super().__neg__())


def _closed(name: str) -> Callable[[Any, Any], Any]:
    """Wrap a z3 operator to return `Integer` again."""

    def operator(self: Integer, other: Int) -> Any:
        result = getattr(z3.ArithRef, name)(self, other)
        return Integer(result) if isinstance(result, z3.ArithRef) and z3.is_int(result) else result

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "truediv", "rtruediv"):
    setattr(Integer, f"__{_name}__", _closed(f"__{_name}__"))


class Symbol(Integer):
    """Unknown size between two numbers, inclusive; a z3 integer."""

    def __init__(self, name: str, low: int, high: int) -> None:
        super().__init__(z3.Int(name))
        self.name, self.low, self.high = name, low, high

    def __deepcopy__(self, memo: Any = None) -> Symbol:
        return self

    @property
    def range(self) -> Bool:
        """Return the condition that it lies in its range."""
        return z3.And(self.low <= self, self <= self.high)


def symbol(name: str, low: int = 1, high: int = 2**31 - 1) -> Symbol:
    """Create a size of a contract, by default any positive number that fits 32 bits."""
    if "!" in name:
        raise ContractError(
            f"the name {name} has a '!', which marks the prover's own constants: choose another"
        )
    if low > high:
        raise ContractError(f"{name} has the empty range {low} to {high}: low must not exceed high")
    return Symbol(name, low, high)


def cdiv(a: Int, b: Int) -> Int:
    """Return a / b rounded up, for b > 0."""
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else (a + b - 1) / b


@dataclass(frozen=True)
class Buffer:
    """Tensor behind a pointer argument, which points to element 0."""

    element: Any  # as in TTIR: "f32", "bf16", "i64", "f8E4M3FN", ...; PyTorch dtypes are converted
    extent: Int  # elements from the first to the last, including the gaps of a view
    dims: tuple[tuple[Int, Int], ...] | None = None  # (size, stride) of a view with gaps; None: contiguous
    align: int = 16  # bytes; the address of element 0 is a multiple of it
    values: Callable[..., Bool] | None = None  # assumption about a loaded integer, or about it and its place
    # Whether all elements differ, as in a permutation; or a condition, on an element and its place, that selects those
    # which differ.
    distinct: bool | Callable[[Int, Int], Bool] = False
    # Name of the inverse map: if the element at place i is j >= 0, then the element at place j of that argument is i.
    inverse: str | None = None
    # No address that the kernel reads from memory points into it, so that stores through such addresses spare it.
    unreached: bool = False
    ascending: bool = False  # no element is smaller than its predecessor, as in group offsets
    storage: str | None = None  # arguments with the same storage share memory
    first: Int = 0  # offset of element 0 in the storage
    # Sizes of a contiguous tensor, innermost last. The program that writes an element of an output is found more easily
    # from its index in each dimension than from its linear offset.
    shape: tuple[Int, ...] | None = None

    def __post_init__(self) -> None:
        name = ELEMENTS.get(str(self.element).removeprefix("torch."), self.element)
        if name not in ELEMENTS.values():
            known = ", ".join(ELEMENTS.values())
            raise ContractError(
                f"a buffer has elements of {self.element}: give a dtype of PyTorch, or {known}"
            )
        object.__setattr__(self, "element", name)

    @classmethod
    def strided(cls, element: str, sizes: Sequence[Int], strides: Sequence[Int], **more: Any) -> Buffer:
        """Return a view with these sizes and strides; only its elements are in bounds."""
        if len(sizes) != len(strides):
            raise ContractError(f"{len(sizes)} sizes and {len(strides)} strides do not describe a tensor")
        last: Int = 1
        empty = []
        for size, stride in zip(sizes, strides, strict=True):
            last = last + (size - 1) * stride
            if not isinstance(size, int) or size == 0:
                empty.append(size == 0)
        extent = z3.If(z3.Or(*empty), 0, last) if empty else last
        return cls(element, extent, tuple(zip(sizes, strides, strict=True)), **more)

    def assumed(self, value: Int, place: Int) -> Bool | None:
        """Return the assumption about the integer at a place; None if there is none."""
        if self.values is None:
            return None
        return self.values(value, place) if self.by_place else self.values(value)

    def differs(self, value: Int, place: Int) -> Bool:
        """Return the condition that the integer at a place is one of those that differ from each other."""
        return self.distinct(value, place) if callable(self.distinct) else z3.BoolVal(self.distinct)

    @property
    def by_place(self) -> bool:
        """Return whether the assumption about an integer depends on its place."""
        if self.values is None:
            return False
        return sum(p.default is p.empty for p in signature(self.values).parameters.values()) > 1

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return (
            1
            if self.element == "i1" or self.element.startswith("f8")
            else int(self.element.lstrip("bfiu")) // 8
        )


@dataclass(frozen=True)
class Contract:
    """All launches of one kind: the arguments of the kernel as functions of the sizes."""

    arguments: Mapping[str, Argument]  # of the compiled kernel, by name; floats may be omitted
    grid: tuple[Int, Int, Int]
    sizes: tuple[Symbol, ...] = ()
    assumptions: tuple[Bool, ...] = ()
    constants: Mapping[str, Any] = field(
        default_factory=dict
    )  # of `tl.constexpr` parameters, to compile a kernel
    outputs: tuple[str, ...] = ()  # arguments of which every element must be written exactly once

    def __post_init__(self) -> None:
        if len(self.grid) != 3:
            raise ContractError(f"a grid has three axes, not {len(self.grid)}: pass 1 for unused axes")
        for name in self.outputs:
            if not isinstance(self.arguments.get(name), Buffer):
                raise ContractError(f"the output {name} is not a buffer among the arguments")
        for name, argument in self.arguments.items():
            back = argument.inverse if isinstance(argument, Buffer) else None
            if back is not None and not isinstance(self.arguments.get(back), Buffer):
                raise ContractError(f"{back}, the inverse of {name}, is not a buffer among the arguments")
        known = {size.name for size in self.sizes}
        for name in sorted(free_names(self.expressions()) - known):
            raise ContractError(
                f"{name} is used but has no range: add symbol({name!r}, low, high) to the sizes"
            )

    @classmethod
    def of(cls, *, grid: Sequence[Int], arguments: Mapping[str, Argument], **more: Any) -> Contract:
        """Build a contract with shorthand.

        Trailing axes of the grid may be omitted, and so may sizes that appear by themselves as an argument, as the
        extent or size of a buffer, or as an axis of the grid.
        """
        sizes = {size.name: size for size in more.pop("sizes", ())}
        alone: list[Any] = [*grid, *arguments.values()]
        for argument in arguments.values():
            if isinstance(argument, Buffer):
                alone += [argument.extent, *(part for dim in argument.dims or () for part in dim)]
        for part in (part for part in alone if isinstance(part, Symbol)):
            other = sizes.setdefault(part.name, part)
            if (other.low, other.high) != (part.low, part.high):
                raise ContractError(
                    f"{part.name} is {part.low} to {part.high} in one place, and {other.low} to {other.high} in another"
                )
        return cls(arguments, (*grid, 1, 1)[:3], tuple(sizes.values()), **more)

    def expressions(self) -> Iterable[Any]:
        """Yield all expressions over the sizes."""
        yield from (*self.grid, *self.assumptions)
        for argument in self.arguments.values():
            if isinstance(argument, Buffer):
                yield from (argument.extent, argument.first)
                yield from (part for dim in argument.dims or () for part in dim)
                yield from argument.shape or ()
            else:
                yield argument

    @property
    def facts(self) -> list[Bool]:
        """Return the conditions on the sizes."""
        return [*(size.range for size in self.sizes), *self.assumptions]


def free_names(expressions: Iterable[Any]) -> set[str]:
    """Return the names of the constants in z3 expressions."""
    return {str(constant) for constant in constants_of(expressions).values()}


def constants_of(expressions: Iterable[Any]) -> dict[int, Any]:
    """Return the uninterpreted constants in z3 expressions, by their ids."""
    constants: dict[int, Any] = {}
    for expression in expressions:
        if z3.is_expr(expression):
            constants |= _constants_in(expression)
    return constants


Result = TypeVar("Result")
_MAX_CACHED = 20_000


def remembered(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Cache the results of a function of one expression.

    Facts are used by every obligation, and traversing them each time would take most of the time. An id is valid
    only while its expression lives, so the cache keeps the expression.
    """
    cache: dict[int, tuple[Any, Result]] = {}

    @wraps(function)
    def cached_function(expression: Any) -> Result:
        identity = expression.get_id()
        if identity in cache and cache[identity][0].ctx is expression.ctx:
            return cache[identity][1]
        result = function(expression)
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[identity] = expression, result
        return result

    return cached_function


@remembered
def _constants_in(expression: Any) -> dict[int, Any]:
    return {
        part.get_id(): part
        for part in parts_of(expression)
        if z3.is_const(part) and part.decl().kind() == z3.Z3_OP_UNINTERPRETED
    }


def parts_of(expression: Any) -> Iterator[Any]:
    """Yield a z3 expression and all of its subexpressions, each once."""
    seen: set[int] = set()
    pending = [expression]
    while pending:
        part = pending.pop()
        if part.get_id() not in seen:
            seen.add(part.get_id())
            pending += part.children()
            yield part
