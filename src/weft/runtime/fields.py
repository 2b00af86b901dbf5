"""Flat forms of the NamedTuples that hold an op's arguments and outputs, as `torch.library` needs them.

A dispatcher takes flat lists. The leaves of a NamedTuple are its members, and the leaves of members that are
NamedTuples themselves: `a.to.format` is the leaf `to_format`. The conversions between both forms are generated code, as
in NamedTuples, since they run on every call.

    class To(NamedTuple):
        format: str | None
        columnwise: bool

    class Args(NamedTuple):
        x: Tensor
        to: To

    Fields(Args).schema                             "Tensor x, str? to_format, bool to_columnwise"
    Fields(Args).build(x, "1x128", True)            Args(x, To("1x128", True))

A NamedTuple of gradients is generic in `G`: `NormGradients` holds tensors that may be None, and `NormGradients[bool]`
says which of them are wanted.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Annotated, Any, Generic, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from typing_extensions import TypeVar

T = TypeVar("T")
# A gradient, or in `NormGradients[bool]` whether it is wanted.
G = TypeVar("G", default=Tensor | None)
# Whether each output of an op is present (not None), nested as the outputs are.
Present = tuple["bool | Present", ...]

# Annotation of a list of tensors that an op writes to.
Written = Annotated[list[Tensor], "written"]
# Annotations of a tensor and of a string that may be None. Type checkers see `Tensor` and `str`: code that reads such a
# member knows that it is there, as the codes of an operand are once the operand is known to be quantized.
Maybe = Annotated[Tensor, "may be None"]
MaybeStr = Annotated[str, "may be None"]
# Annotation of an integer or a float, or None.
MaybeNumber = Annotated[float, "an integer or a float, or None"]

_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    float: "float",
    int: "SymInt",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    list[Tensor]: "Tensor[]",
    list[int]: "SymInt[]",
    list[bool]: "bool[]",
    Written: "Tensor[]",
    Maybe: "Tensor?",
    MaybeStr: "str?",
    MaybeNumber: "Scalar?",
}


class Leaf(NamedTuple):
    """Value in a flat list."""

    name: str
    schema: str  # its type as a schema spells it
    written: bool

    @property
    def is_tensor(self) -> bool:
        """True if the leaf is a tensor or a list of tensors."""
        return self.schema.startswith("Tensor")

    @property
    def optional(self) -> bool:
        return self.schema.endswith("?")


class Fields(Generic[T]):
    """Conversions of a NamedTuple class to flat lists and back.

    - `flatten(a)`: its leaves as a tuple; `build(*leaves)` is the inverse.
    - `tensors(a)`: the leaves that are tensors, lists of tensors, or None for an absent one; `others(a)`: the rest.
    - `join(tensors, others)`: the inverse of these two.
    """

    def __init__(self, cls: type[T]) -> None:
        self.cls = cls
        self.leaves = tuple(_leaves_of(cls, ""))
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) < len(names):
            raise TypeError(f"{cls.__name__} has two leaves with the same name: {', '.join(names)}")
        self.names = tuple(names)
        self.tensor_names = tuple(leaf.name for leaf in self.leaves if leaf.is_tensor)
        self.tensor_name_set = frozenset(self.tensor_names)
        self.schema = ", ".join(f"{_aliased(leaf)} {leaf.name}" for leaf in self.leaves)
        others = [name for name in names if name not in self.tensor_name_set]
        expressions = {name: f"t[{i}]" for i, name in enumerate(self.tensor_names)}
        expressions |= {name: f"o[{i}]" for i, name in enumerate(others)}
        namespace: dict[str, type] = {}
        # Unpacking a NamedTuple is faster than reading its members one by one.
        unpack = f"(a): {_unpacked(cls, '')} = a; return "
        self.flatten: Callable[[T], tuple[Any, ...]] = _generated(unpack + _tuple_of(names), namespace)
        self.tensors: Callable[[T], tuple[Any, ...]] = _generated(
            unpack + _tuple_of(self.tensor_names), namespace
        )
        self.others: Callable[[T], tuple[Any, ...]] = _generated(unpack + _tuple_of(others), namespace)
        self.build: Callable[..., T] = _generated(
            f"({', '.join(names)}): return {_built(cls, '', {name: name for name in names}, namespace)}",
            namespace,
        )
        self.join: Callable[[Any, Any], T] = _generated(
            f"(t, o): return {_built(cls, '', expressions, namespace)}", namespace
        )

    @staticmethod
    @functools.cache
    def of(cls: Hashable) -> Fields[Any]:
        return Fields(cls)  # type: ignore[arg-type]

    def from_present(self, present: Present | None, values: Iterable[Any]) -> T:
        """Return the NamedTuple with `values` for the leaves that are `present`, and None for the others."""
        if present is None:
            return self.build(*values)
        remaining = iter(values)
        return self.build(*(next(remaining) if is_present else None for is_present in self.flatten(present)))  # type: ignore[arg-type]


def _is_namedtuple(kind: Any) -> bool:
    kind = get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@functools.cache
def _members(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return names and types of a NamedTuple's members. Resolving the types from strings takes time, hence the
    cache."""
    origin = get_origin(cls) or cls
    parameters = getattr(origin, "__parameters__", ())
    arguments = dict(zip(parameters, get_args(cls) or (each.__default__ for each in parameters), strict=True))
    hints = get_type_hints(origin, include_extras=True)
    return tuple((name, arguments.get(kind, kind)) for name, kind in hints.items())


def _leaves_of(cls: Any, prefix: str) -> Iterable[Leaf]:
    if not _is_namedtuple(cls):
        raise TypeError(f"the arguments and outputs of an op are NamedTuples; got {cls!r}")
    for name, kind in _members(cls):
        if _is_namedtuple(kind):
            yield from _leaves_of(kind, f"{prefix}{name}_")
        else:
            yield Leaf(prefix + name, _spelled(cls, name, kind), kind == Written)


def _spelled(cls: type, name: str, kind: Any) -> str:
    """Return the type of a member as a schema spells it."""
    optional = isinstance(kind, types.UnionType) and type(None) in get_args(kind)
    if optional:
        kind, *more = (k for k in get_args(kind) if k is not type(None))
        kind = object if more else kind
    if kind not in _SCHEMA:
        raise TypeError(f"{cls.__name__}.{name}: an op cannot have an argument or output of type {kind}")
    return _SCHEMA[kind] + "?" * optional


def _aliased(leaf: Leaf) -> str:
    return f"Tensor({leaf.name}!)[]" if leaf.written else leaf.schema


def _tuple_of(expressions: Iterable[str]) -> str:
    return "(" + "".join(f"{expression}, " for expression in expressions) + ")"


def _built(cls: Any, prefix: str, leaves: dict[str, str], namespace: dict[str, type]) -> str:
    """Return source code that builds a `cls` from the source code of its leaves."""
    members = []
    for name, kind in _members(cls):
        nested = _is_namedtuple(kind)
        members.append(
            _built(kind, f"{prefix}{name}_", leaves, namespace) if nested else leaves[prefix + name]
        )
    name = f"_{prefix}class"
    namespace[name] = get_origin(cls) or cls
    return f"{name}({', '.join(members)})"


def _unpacked(cls: Any, prefix: str) -> str:
    """Return the leaves' variables as nested tuples, to unpack a `cls`."""
    return _tuple_of(
        _unpacked(kind, f"{prefix}{name}_") if _is_namedtuple(kind) else prefix + name
        for name, kind in _members(cls)
    )


def _generated(source: str, namespace: dict[str, type]) -> Any:
    """Compile a function of these parameters and body. torch.compile can trace it like other code of this file."""
    exec(compile(f"def function{source}", __file__, "exec"), namespace)
    return namespace.pop("function")
