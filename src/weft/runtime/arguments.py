"""Arguments of a kernel: pointers, numbers, and structs of them.

A struct is a `NamedTuple` whose members are tensors (`Tensor`, `Tensor | None`), integers (`int`), floats (`float`) or
structs again. The host builds it from tensors; a kernel with a parameter of that annotation reads the same members:

    class Rows(NamedTuple):
        ptr: Tensor | None
        stride: int

    @kernel
    def _copy_kernel(x: Rows, y: Rows, count, factor: float, TILE: tl.constexpr): ...
        tl.load(x.ptr + row * x.stride)

    launch(grid, *_copy_kernel.arguments(x=Rows(x, x.stride(0)), y=Rows(y, y.stride(0)), count=n, factor=2.0))

A parameter that is not a struct is a pointer if its name ends in `_ptr`, a float if it is annotated `float`, and an
integer otherwise. A launch takes all pointers, then all integers, then all floats, with structs flattened depth
first. Triton's own launchers take the arguments nested like the parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

# Arguments of Triton's launchers that precede the kernel's own.
_PREFIX = "x, y, z, stream, function, metadata, hook_info, enter_hook, exit_hook"

Flat = tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[float, ...]]


class Leaf(NamedTuple):
    """Pointer or number among the arguments of a kernel."""

    name: str  # "x.ptr" for a member of the struct x
    kind: type  # Tensor, int or float

    @property
    def variable(self) -> str:
        """Name in generated code."""
        return self.name.replace(".", "__")


class Struct(NamedTuple):
    """Parameter or member that is a struct."""

    name: str
    cls: type
    members: tuple[Leaf | Struct, ...]


class Parameters:
    """Parameters of a kernel without its constants, in order."""

    def __init__(self, kernel: str, annotations: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.members = tuple(_member(name, kind) for name, kind in annotations.items())
        leaves = tuple(_leaves(self.members))
        # In launch order: pointers, integers, floats.
        self.leaves = tuple(leaf for kind in (Tensor, int, float) for leaf in leaves if leaf.kind is kind)
        # Whether the kernel's parameters are the leaves in this order.
        self.is_flat = self.leaves == self.members

    def maker(self, name: str, *kinds: type) -> Callable[..., Any]:
        """Return a function from the arguments by name to the launch arguments of these kinds: the pointers (`Tensor`),
        the integers and the floats, a tuple each; for a single kind, just its tuple.

        It is generated code, as in NamedTuples, since inspecting annotations would take too long on every launch.
        Parameters that hold only pointers may be omitted and are then None. None in place of a struct stands for one
        whose pointers are None and whose numbers are 0. A struct that also has other kinds is passed without them: as a
        tuple of the remaining members, or as the one member that remains.
        """
        parameters, unpacking = [], []
        for member in self.members:
            selected = _only(member, kinds)
            if selected is None:
                continue
            optional = all(leaf.kind is Tensor for leaf in _leaves((selected,)))
            parameters.append(f"{member.name}=None" if optional else member.name)
            if isinstance(member, Struct):
                unpacking.append(
                    f"    {_pattern(selected)} = {_absent(selected)} if {member.name} is None else {member.name}"
                )
        packed = (
            f"({''.join(f'{leaf.variable}, ' for leaf in self.leaves if leaf.kind is kind)})"
            for kind in kinds
        )
        lines = [f"def {name}(*, {', '.join(parameters)}):", *unpacking, f"    return {', '.join(packed)}"]
        return generated("\n".join(lines), f"{self.kernel}.{name}")

    def nesting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run`, which takes structs as tuples, in a launcher that takes flat arguments."""
        flat = ", ".join(leaf.variable for leaf in self.leaves)
        nested = ", ".join(_pattern(member) for member in self.members)
        source = f"def launch({_PREFIX}, {flat}, *constants):\n    run({_PREFIX}, {nested}, *constants)"
        launch = generated(source, f"{self.kernel}.launch", run=run)
        # Loom's launcher accepts the tensors whose addresses a kernel reads from memory.
        if hasattr(run, "reaching"):
            launch.reaching = lambda tensors: self.nesting(run.reaching(tensors))  # type: ignore[attr-defined]
        return launch

    @functools.cached_property
    def binder(self) -> Callable[..., Callable[..., Any]]:
        """Function from a launcher that takes structs as tuples, and the integers of a launch, to a launcher of
        pointers and floats. Structs of integers alone are built once, when these are bound."""
        integers, others = (
            [leaf.variable for leaf in self.leaves if (leaf.kind is int) is is_integer]
            for is_integer in (True, False)
        )
        integer_structs = [
            member
            for member in _structs(self.members)
            if all(leaf.kind is int for leaf in _leaves((member,)))
        ]
        variables = {member.name: member.name.replace(".", "__") for member in integer_structs}
        nested = ", ".join(_pattern(member, variables) for member in self.members)
        lines = [f"def bind({', '.join(['run', *integers])}):"]
        lines += [f"    {variables[member.name]} = {_pattern(member)}" for member in integer_structs]
        lines += [f"    def launch({_PREFIX}, {', '.join(others)}, *constants):"]
        lines += [f"        run({_PREFIX}, {nested}, *constants)", "    return launch"]
        return generated("\n".join(lines), f"{self.kernel}.bind")

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values by leaf name to values by parameter name: a struct becomes an instance of its class."""
        return {member.name: _filled(member, values) for member in self.members}


def _member(name: str, kind: Any) -> Leaf | Struct:
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind, vars(sys.modules[kind.__module__]))
        return Struct(name, kind, tuple(_member(f"{name}.{field}", hints[field]) for field in kind._fields))
    if kind is None:  # a parameter without an annotation
        return Leaf(name, Tensor if name.endswith("_ptr") else int)
    for leaf in (Tensor, int, float):
        if kind is leaf or kind == leaf | None:
            return Leaf(name, leaf)
    raise TypeError(
        f"{name} of a kernel is annotated with {kind!r}: members of a struct are Tensor, int, float or a NamedTuple of "
        "these, and so are the annotations of parameters that are not constants"
    )


def _leaves(members: tuple[Leaf | Struct, ...]) -> Iterator[Leaf]:
    for member in members:
        if isinstance(member, Struct):
            yield from _leaves(member.members)
        else:
            yield member


def _structs(members: tuple[Leaf | Struct, ...]) -> Iterator[Struct]:
    """Yield the structs among the members, at any depth."""
    for member in members:
        if isinstance(member, Struct):
            yield member
            yield from _structs(member.members)


def _pattern(member: Leaf | Struct, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return source code with a member's variables as nested tuples, to unpack a struct or to build it."""
    if isinstance(member, Struct):
        if member.name in variables:
            return variables[member.name]
        return f"({''.join(f'{_pattern(inner, variables)}, ' for inner in member.members)})"
    return member.variable


def _only(member: Leaf | Struct, kinds: tuple[type, ...]) -> Leaf | Struct | None:
    """Return the part of a member that has these kinds: a struct, its one remaining member, or None."""
    if isinstance(member, Leaf):
        return member if member.kind in kinds else None
    remaining = tuple(inner for each in member.members if (inner := _only(each, kinds)) is not None)
    if len(remaining) < 2 and remaining != member.members:
        return remaining[0] if remaining else None
    return Struct(member.name, member.cls, remaining)


def _absent(member: Leaf | Struct) -> str:
    if isinstance(member, Struct):
        return f"({''.join(f'{_absent(inner)}, ' for inner in member.members)})"
    return {Tensor: "None", int: "0", float: "0.0"}[member.kind]


def _filled(member: Leaf | Struct, values: Mapping[str, Any]) -> Any:
    if isinstance(member, Struct):
        return member.cls(*(_filled(inner, values) for inner in member.members))
    return values[member.name]


def generated(source: str, name: str, **names: Any) -> Callable[..., Any]:
    """Return the function that `source` defines; errors call it `name`."""
    exec(source, names)
    function: Callable[..., Any] = names[source[4 : source.index("(")]]
    function.__qualname__ = name
    return function
