"""The arguments of a kernel: pointers, numbers, and structs of them.

A struct is a `NamedTuple` whose members are tensors (`Tensor`, `Tensor | None`), integers (`int`), floats (`float`) or
structs again. The host makes it of tensors, and a kernel with a parameter of that annotation reads the same members:

    class Rows(NamedTuple):
        ptr: Tensor | None
        stride: int

    @kernel
    def _copy_kernel(x: Rows, y: Rows, count, factor: float, TILE: tl.constexpr): ...
        tl.load(x.ptr + row * x.stride)

    launch(grid, *_copy_kernel.arguments(x=Rows(x, x.stride(0)), y=Rows(y, y.stride(0)), count=n, factor=2.0))

A parameter that is not a struct is a pointer if its name ends in `_ptr`, a float if it is annotated `float`, and else
an integer. A launch takes all pointers, then all integers, then all floats, those of structs in depth-first order.
Triton's own launchers take the arguments nested as the parameters are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

# What Triton's launchers take before the arguments of a kernel.
_BEFORE = "x, y, z, stream, function, metadata, hook_info, enter_hook, exit_hook"

Flat = tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[float, ...]]


class Leaf(NamedTuple):
    """A pointer or a number among the arguments of a kernel."""

    name: str  # "x.ptr" for a member of the struct x
    kind: type  # Tensor, int or float

    @property
    def variable(self) -> str:
        """Its name in generated code."""
        return self.name.replace(".", "__")


class Struct(NamedTuple):
    """A parameter or a member that is a struct."""

    name: str
    cls: type
    members: tuple[Leaf | Struct, ...]


class Parameters:
    """The parameters of a kernel without its constants, in order."""

    def __init__(self, kernel: str, annotations: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.members = tuple(_member(name, kind) for name, kind in annotations.items())
        leaves = tuple(_leaves(self.members))
        # In the order of a launch: pointers, integers, floats.
        self.leaves = tuple(leaf for kind in (Tensor, int, float) for leaf in leaves if leaf.kind is kind)
        # Whether the kernel's parameters are the leaves in this order.
        self.is_flat = self.leaves == self.members

    def maker(self, name: str, *kinds: type) -> Callable[..., Any]:
        """A function from the arguments by name to what a launch takes of these kinds: the pointers (`Tensor`), the
        integers and the floats, a tuple of each; of one kind, this tuple.

        It is generated code, as in NamedTuples, since looking at annotations would take too long in every launch. What
        has nothing but pointers may be left out, and they are None. None in place of a struct stands for one whose
        pointers are None and whose numbers are 0. A struct that has other kinds, too, is given without them: as a tuple
        of what is left, or as the one member that is left.
        """
        parameters, apart = [], []
        for member in self.members:
            given = _only(member, kinds)
            if given is None:
                continue
            optional = all(leaf.kind is Tensor for leaf in _leaves((given,)))
            parameters.append(f"{member.name}=None" if optional else member.name)
            if isinstance(member, Struct):
                apart.append(
                    f"    {_pattern(given)} = {_absent(given)} if {member.name} is None else {member.name}"
                )
        packed = (
            f"({''.join(f'{leaf.variable}, ' for leaf in self.leaves if leaf.kind is kind)})"
            for kind in kinds
        )
        lines = [f"def {name}(*, {', '.join(parameters)}):", *apart, f"    return {', '.join(packed)}"]
        return generated("\n".join(lines), f"{self.kernel}.{name}")

    def nesting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A launcher that takes the arguments flat and calls `run`, which takes structs as tuples."""
        flat = ", ".join(leaf.variable for leaf in self.leaves)
        nested = ", ".join(_pattern(member) for member in self.members)
        source = f"def launch({_BEFORE}, {flat}, *constants):\n    run({_BEFORE}, {nested}, *constants)"
        launch = generated(source, f"{self.kernel}.launch", run=run)
        # Loom's launcher can be given the tensors whose addresses a kernel finds in memory.
        if hasattr(run, "reaching"):
            launch.reaching = lambda tensors: self.nesting(run.reaching(tensors))  # type: ignore[attr-defined]
        return launch

    @functools.cached_property
    def binder(self) -> Callable[..., Callable[..., Any]]:
        """A function of a launcher that takes structs as tuples, and of the integers of a launch: the launcher that
        takes the pointers and the floats. Structs of integers alone are made once, when these are known."""
        integers, others = (
            [leaf.variable for leaf in self.leaves if (leaf.kind is int) is whole] for whole in (True, False)
        )
        made = [
            member
            for member in _structs(self.members)
            if all(leaf.kind is int for leaf in _leaves((member,)))
        ]
        known = {member.name: member.name.replace(".", "__") for member in made}
        nested = ", ".join(_pattern(member, known) for member in self.members)
        lines = [f"def bind({', '.join(['run', *integers])}):"]
        lines += [f"    {known[member.name]} = {_pattern(member)}" for member in made]
        lines += [f"    def launch({_BEFORE}, {', '.join(others)}, *constants):"]
        lines += [f"        run({_BEFORE}, {nested}, *constants)", "    return launch"]
        return generated("\n".join(lines), f"{self.kernel}.bind")

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names of leaves, as values by the names of parameters: a struct becomes an instance of its
        class."""
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
    """Structs, and those among their members."""
    for member in members:
        if isinstance(member, Struct):
            yield member
            yield from _structs(member.members)


def _pattern(member: Leaf | Struct, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """Source code with the variables of a member as nested tuples, to take a struct apart or to put it together."""
    if isinstance(member, Struct):
        if member.name in known:
            return known[member.name]
        return f"({''.join(f'{_pattern(inner, known)}, ' for inner in member.members)})"
    return member.variable


def _only(member: Leaf | Struct, kinds: tuple[type, ...]) -> Leaf | Struct | None:
    """What a member has of these kinds: a struct, the one member of it that is left, or None."""
    if isinstance(member, Leaf):
        return member if member.kind in kinds else None
    left = tuple(inner for each in member.members if (inner := _only(each, kinds)) is not None)
    if len(left) < 2 and left != member.members:
        return left[0] if left else None
    return Struct(member.name, member.cls, left)


def _absent(member: Leaf | Struct) -> str:
    if isinstance(member, Struct):
        return f"({''.join(f'{_absent(inner)}, ' for inner in member.members)})"
    return {Tensor: "None", int: "0", float: "0.0"}[member.kind]


def _filled(member: Leaf | Struct, values: Mapping[str, Any]) -> Any:
    if isinstance(member, Struct):
        return member.cls(*(_filled(inner, values) for inner in member.members))
    return values[member.name]


def generated(source: str, name: str, **names: Any) -> Callable[..., Any]:
    """The function that `source` defines; `name` is what its errors call it."""
    exec(source, names)
    function: Callable[..., Any] = names[source[4 : source.index("(")]]
    function.__qualname__ = name
    return function
