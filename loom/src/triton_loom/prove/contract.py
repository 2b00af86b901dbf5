"""What a launch of a kernel promises: the sizes it is for, its grid and what each argument is.

    n = symbol("n", 1, 2**31 - 1)
    contract = Contract(
        sizes=(n,),
        grid=(cdiv(n, 1024), 1, 1),
        arguments={"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n},
        constants={"BLOCK": 1024},
    )

Integers are z3's, which are the integers of mathematics; `a / b` of two of them is a floor for b > 0. Whether a
kernel's 32 and 64 bits hold them is what is to be proven.
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

# The names of PyTorch's dtypes, and TTIR's of such elements.
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
    """A contract that does not say what has to be known, or says it of the wrong thing."""


class Integer(z3.ArithRef):
    """An integer of z3's that `//` divides too, as `triton.cdiv` does."""

    def __init__(self, expression: z3.ArithRef) -> None:
        super().__init__(expression.as_ast(), expression.ctx)

    def __floordiv__(self, other: Int) -> Integer:
        return Integer(self / other)

    def __rfloordiv__(self, other: Int) -> Integer:
        return Integer(other / self)

    def __neg__(self) -> Integer:
        return Integer(super().__neg__())


def _closed(name: str) -> Callable[[Any, Any], Any]:
    """The operator of z3's, its result an `Integer` again."""

    def operator(self: Integer, other: Int) -> Any:
        result = getattr(z3.ArithRef, name)(self, other)
        return Integer(result) if isinstance(result, z3.ArithRef) and z3.is_int(result) else result

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "truediv", "rtruediv"):
    setattr(Integer, f"__{_name}__", _closed(f"__{_name}__"))


class Symbol(Integer):
    """A size that is not known, between two numbers (both included). It is an integer of z3's."""

    def __init__(self, name: str, low: int, high: int) -> None:
        super().__init__(z3.Int(name))
        self.name, self.low, self.high = name, low, high

    def __deepcopy__(self, memo: Any = None) -> Symbol:
        return self

    @property
    def range(self) -> Bool:
        """That it is between the two."""
        return z3.And(self.low <= self, self <= self.high)


def symbol(name: str, low: int = 1, high: int = 2**31 - 1) -> Symbol:
    """A size of a contract, by default any that is positive and fits 32 bits."""
    if "!" in name:
        raise ContractError(
            f"the name {name} has a '!', which marks the prover's own constants: choose another"
        )
    if low > high:
        raise ContractError(f"{name} is to be at least {low} and at most {high}, which no number is")
    return Symbol(name, low, high)


def cdiv(a: Int, b: Int) -> Int:
    """The least integer that is not below a / b, for b > 0."""
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else (a + b - 1) / b


@dataclass(frozen=True)
class Buffer:
    """A tensor that a pointer argument leads to: element 0 is where it points."""

    element: Any  # as in TTIR: "f32", "bf16", "i64", "f8E4M3FN", ...; a dtype of PyTorch becomes that
    extent: Int  # elements from the first up to and with the last, those in gaps of a view counted
    dims: tuple[tuple[Int, Int], ...] | None = (
        None  # (size, stride) where there are gaps; None: there are none
    )
    align: int = 16  # bytes that the address of element 0 is a multiple of
    values: Callable[..., Bool] | None = None  # what is assumed of a loaded integer, or of it and its place
    # Its elements differ from each other, as those of a permutation do; or those do of which this holds, given an
    # element and its place.
    distinct: bool | Callable[[Int, Int], Bool] = False
    # The argument that leads back: where the element at place i is j, and not negative, the one at place j of that
    # argument is i.
    inverse: str | None = None
    # No address that the kernel finds in memory leads to it, so that such stores leave it as it is.
    unreached: bool = False
    ascending: bool = False  # no element is less than the one before it, as with offsets of groups
    storage: str | None = None  # arguments that name the same storage are one memory
    first: Int = 0  # the element of the storage that element 0 is
    # The sizes of a tensor without gaps, its last dimension being that of neighbours. Who writes an element of an
    # output is found more easily by its place in each dimension than by its number.
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
        """A view with these sizes and strides, of which only its elements are in bounds."""
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
        """What is assumed of the integer at a place; None if that is nothing."""
        if self.values is None:
            return None
        return self.values(value, place) if self.by_place else self.values(value)

    def differs(self, value: Int, place: Int) -> Bool:
        """Whether the integer at a place is one of those that differ from each other."""
        return self.distinct(value, place) if callable(self.distinct) else z3.BoolVal(self.distinct)

    @property
    def by_place(self) -> bool:
        """Whether what is assumed of an integer depends on where it is."""
        if self.values is None:
            return False
        return sum(p.default is p.empty for p in signature(self.values).parameters.values()) > 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return (
            1
            if self.element == "i1" or self.element.startswith("f8")
            else int(self.element.lstrip("bfiu")) // 8
        )


@dataclass(frozen=True)
class Contract:
    """A launch, or all launches of one kind: what is given to the kernel for which sizes."""

    arguments: Mapping[str, Argument]  # of the compiled kernel, by name; floats may be left out
    grid: tuple[Int, Int, Int]
    sizes: tuple[Symbol, ...] = ()
    assumptions: tuple[Bool, ...] = ()
    constants: Mapping[str, Any] = field(
        default_factory=dict
    )  # of `tl.constexpr` parameters, to compile a kernel
    outputs: tuple[str, ...] = ()  # arguments of which every element has to be written, and once

    def __post_init__(self) -> None:
        if len(self.grid) != 3:
            raise ContractError(
                f"a grid has three axes, not {len(self.grid)}: put 1 for those that are not used"
            )
        for name in self.outputs:
            if not isinstance(self.arguments.get(name), Buffer):
                raise ContractError(f"the output {name} is not a buffer among the arguments")
        for name, argument in self.arguments.items():
            back = argument.inverse if isinstance(argument, Buffer) else None
            if back is not None and not isinstance(self.arguments.get(back), Buffer):
                raise ContractError(
                    f"{back}, which leads back from {name}, is not a buffer among the arguments"
                )
        known = {size.name for size in self.sizes}
        for name in sorted(free_names(self.expressions()) - known):
            raise ContractError(
                f"{name} is used and has no range: put symbol({name!r}, low, high) among the sizes"
            )

    @classmethod
    def of(cls, *, grid: Sequence[Int], arguments: Mapping[str, Argument], **more: Any) -> Contract:
        """The same with less to write: axes of the grid may be left out, and so may sizes that stand alone as an
        argument, as the extent or size of a buffer, or as an axis of the grid."""
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
        """All that is said in terms of the sizes."""
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
        """What holds of the sizes."""
        return [*(size.range for size in self.sizes), *self.assumptions]


def free_names(expressions: Iterable[Any]) -> set[str]:
    """The names of the constants that expressions of z3's are made of."""
    return {str(constant) for constant in constants_of(expressions).values()}


def constants_of(expressions: Iterable[Any]) -> dict[int, Any]:
    """The constants without a value in expressions of z3's, by their ids."""
    found: dict[int, Any] = {}
    for expression in expressions:
        if z3.is_expr(expression):
            found |= _constants_in(expression)
    return found


Found = TypeVar("Found")
_MOST_REMEMBERED = 20_000


def remembered(look: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """What a function finds in an expression is found once: facts are asked about with every obligation, and walking
    through them would take most of the time. An id belongs to an expression for as long as there is one, so the
    expression is kept with what was found."""
    known: dict[int, tuple[Any, Found]] = {}

    @wraps(look)
    def found_in(expression: Any) -> Found:
        identity = expression.get_id()
        if identity in known and known[identity][0].ctx is expression.ctx:
            return known[identity][1]
        found = look(expression)
        if len(known) >= _MOST_REMEMBERED:
            known.clear()
        known[identity] = expression, found
        return found

    return found_in


@remembered
def _constants_in(expression: Any) -> dict[int, Any]:
    return {
        part.get_id(): part
        for part in parts_of(expression)
        if z3.is_const(part) and part.decl().kind() == z3.Z3_OP_UNINTERPRETED
    }


def parts_of(expression: Any) -> Iterator[Any]:
    """An expression of z3's and all that it is made of, each part once."""
    seen: set[int] = set()
    todo = [expression]
    while todo:
        part = todo.pop()
        if part.get_id() not in seen:
            seen.add(part.get_id())
            todo += part.children()
            yield part
