"""Scalar functions as graphs of primitives: traced from Python, differentiated, and evaluated in PyTorch.

A function is called once with `Value`s in place of numbers; what it does with them is recorded as nodes of a `Graph`.
Triton's functions are recognized by their names, so tracing needs no Triton. Helpers that the function calls, plain or
`@triton.jit`, are traced along.

    graph, results = trace(lambda x, y: tl.exp(x) * y)
    results[0].derivatives(...)
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import primitives
from .primitives import PRIMITIVES


class Node(NamedTuple):
    """A number, a parameter, or a primitive of earlier nodes."""

    # Of a primitive; "number", "parameter", "cast", "lookup" of an element of a table, or "length", which is that of a
    # row.
    name: str
    inputs: tuple[int, ...] = ()  # of a lookup, the indices
    value: Any = None  # of a number, the name of a parameter or of a table, or the type that is cast to


class Graph:
    """Nodes in the order in which they can be computed. Equal nodes are one."""

    def __init__(self, parameters: Iterable[str] = ()) -> None:
        self.derives = False  # a gradient: products with 0 and 1 are left out, so that no zero becomes NaN
        self.nodes: list[Node] = []
        self._index: dict[Any, int] = {}
        self._varies: dict[int, bool] = {}
        self.parameters: dict[str, Value] = {}
        for name in parameters:
            self.parameter(name)

    def parameter(self, name: str, varies: bool = True) -> Value:
        """Add a parameter, which may have one value for a row."""
        self.parameters[name] = self.value("parameter", value=name)
        self._varies[self.parameters[name].index] = varies
        return self.parameters[name]

    def value(self, name: str, *inputs: Value, value: Any = None) -> Value:
        node = Node(name, tuple(each.index for each in inputs), value)
        key = (node, type(value), math.copysign(1.0, value) if isinstance(value, float) else 0.0)
        if key not in self._index:
            self._index[key] = len(self.nodes)
            self.nodes.append(node)
        return Value(self, self._index[key])

    def number(self, value: float) -> Value:
        return self.value("number", value=value)

    def lifted(self, value: Any) -> Value:
        """Return a value of this graph for an operand: a `Value`, or a number."""
        if isinstance(value, Value):
            return value
        if isinstance(value, (bool, int, float)):
            return self.number(value)
        raise TypeError(f"a scalar function computes with its parameters and with numbers; got {value!r}")

    def apply(self, name: str, *operands: Any) -> Value:
        """Return a primitive of operands."""
        inputs = [self.lifted(each) for each in operands]
        simple = primitives.simplified(name, inputs) if self.derives else None
        return self.value(name, *inputs) if simple is None else simple

    def varies(self, index: int) -> bool:
        """Return whether a node has a value for each element, rather than one for a row."""
        if index not in self._varies:
            node = self.nodes[index]
            row = PRIMITIVES[node.name].row if node.name in PRIMITIVES else None
            self._varies[index] = any(map(self.varies, node.inputs)) if row is None else row.is_scan
        return self._varies[index]

    def needed(self, results: Iterable[Value]) -> list[int]:
        """Return the nodes that results are computed from, in order."""
        needed, waiting = set(), [each.index for each in results]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += self.nodes[index].inputs
        return sorted(needed)


class Value:
    """Node of a graph, with the operators and methods of a scalar in Triton's language."""

    __slots__ = ("graph", "index")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph, self.index = graph, index

    @property
    def node(self) -> Node:
        return self.graph.nodes[self.index]

    @property
    def constant(self) -> Any:
        """The number that this is, or None."""
        return self.node.value if self.node.name == "number" else None

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Value:
        """Convert to an integer type, `tl.int1` or a float type, which all stand for fp32."""
        if bitcast or fp_downcast_rounding is not None:
            raise TypeError("a scalar function converts numbers by value: .to(dtype) without other options")
        return self.graph.value("cast", self, value=primitives.type_named(dtype))

    def __bool__(self) -> bool:
        raise TypeError(
            "a scalar function has no branches on its arguments: write tl.where(condition, a, b) for `if` and "
            "`a if condition else b`, and &, | and ~ for `and`, `or` and `not`"
        )

    def __float__(self) -> float:
        raise TypeError(
            "the functions of `math` take numbers: use those of tl and of libdevice for arguments"
        )

    __int__ = __index__ = __float__

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a parameter stands for one element, or for all elements of a row: it cannot be iterated over. A table is "
            "indexed by integers, as in table[step, 0]"
        )

    def __getitem__(self, index: Any) -> Any:
        """Look an element of a table up: a parameter that is indexed."""
        indices = index if isinstance(index, tuple) else (index,)
        if self.node.name != "parameter" or not all(type(i) in (int, Value) for i in indices):
            return iter(self)
        return self.graph.value("lookup", *map(self.graph.lifted, indices), value=self.node.value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "numel":
            return self.graph.value("length")
        if name in primitives.CALLS:  # `x.abs()`, `x.sigmoid()`, `x.sum()`
            return functools.partial(_primitive(self.graph, name), self)
        raise AttributeError(f"a scalar has no .{name}: {primitives.advice()}")

    def __pow__(self, exponent: Any) -> Value:
        if isinstance(exponent, int) and 0 <= exponent <= 16:
            return self._power(exponent)
        if isinstance(exponent, float) and exponent == 0.5:
            return self.graph.apply("sqrt", self)
        return self.graph.apply("pow", self, exponent)

    def _power(self, exponent: int) -> Value:
        """Return the product of so many factors, by repeated squares."""
        if exponent < 2:
            return self if exponent else self.graph.number(1.0)
        half = self._power(exponent // 2)
        square = self.graph.apply("mul", half, half)
        return self.graph.apply("mul", square, self) if exponent % 2 else square

    def __rpow__(self, base: Any) -> Value:
        return self.graph.apply("pow", base, self)


def _operator(name: str, method: str, reflected: str | None) -> None:
    setattr(Value, method, lambda self, other: self.graph.apply(name, self, other))
    if reflected is not None:
        setattr(Value, reflected, lambda self, other: self.graph.apply(name, other, self))


for _name, _method in primitives.BINARY.items():
    _operator(_name, f"__{_method}__", None if _name in primitives.COMPARISONS else f"__r{_method}__")
for _name, _method in primitives.UNARY.items():
    setattr(Value, f"__{_method}__", lambda self, name=_name: self.graph.apply(name, self))


# ---- tracing ------------------------------------------------------------------------------------------------


class _Language:
    """Stand-in for `triton.language` and its modules while a function is traced."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        if name in ("math", "extra", "libdevice", "cuda", "hip", "language"):
            return self
        if name == "constexpr":
            return lambda value: value
        if name == "PropagateNan":
            return types.SimpleNamespace(ALL=True, NONE=False)
        if name in primitives.TYPES:
            return name
        return _primitive(self._graph, name)


def _primitive(graph: Graph, name: str) -> Callable[..., Any]:
    """Return the function of values that stands for a function of Triton's."""
    if name not in primitives.CALLS:
        raise AttributeError(f"tl.{name} is not among the functions of a scalar: {primitives.advice()}")
    signature, build = primitives.CALLS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return build(graph, *bound.args)

    return call


def _is_of_triton(value: Any) -> bool:
    """Return whether a global is a module of Triton's, or the stand-in for one."""
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in ("triton", "libdevice")
    return type(value).__name__ == "_Absent"


def _traceable(value: Any, graph: Graph, seen: dict[int, Any]) -> Any:
    """Return what a traced function finds under a global name."""
    if _is_of_triton(value):
        return _Language(graph)
    value = getattr(value, "scalar", value) if hasattr(type(value), "scalar") else value  # a pointwise op
    if hasattr(value, "fn") and not isinstance(value, type):  # of `@triton.jit`
        value = value.fn
    if type(value).__name__ == "constexpr":
        return value.value
    module = getattr(value, "__module__", None) or ""
    if callable(value) and module.split(".")[0] == "triton":
        return _primitive(graph, value.__name__)
    if isinstance(value, types.FunctionType):
        return _rebound(value, graph, seen)
    return value


def _rebound(function: types.FunctionType, graph: Graph, seen: dict[int, Any]) -> Any:
    """Return the function with Triton's names replaced by those of a trace."""
    if id(function) in seen:
        return seen[id(function)]
    names = dict(function.__globals__)
    outer = function.__closure__ or ()
    cells = tuple(types.CellType() for _ in outer)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    seen[id(function)] = copy
    for name in _names_in(function.__code__):
        if name in names:
            names[name] = _traceable(names[name], graph, seen)
    for cell, original in zip(cells, outer, strict=True):
        cell.cell_contents = _traceable(original.cell_contents, graph, seen)
    return copy


def _names_in(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(
        *(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
    )


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of a scalar function, which have no stars, and no default but None."""
    parameters = inspect.signature(function).parameters.values()
    wrong = [
        p.name
        for p in parameters
        if p.kind is not p.POSITIONAL_OR_KEYWORD or p.default not in (p.empty, None)
    ]
    if wrong or not parameters:
        raise TypeError(
            f"{function.__name__} needs parameters of the form f(x, y=None, ...), without stars and other defaults"
            + (f"; {', '.join(wrong)} is not" if wrong else "")
        )
    return tuple(p.name for p in parameters)


def optional_in(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of a scalar function that may be left out: those with the default None."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.default is None)


def trace(function: Callable[..., Any], absent: Sequence[str] = ()) -> tuple[Graph, tuple[Value, ...]]:
    """Call a scalar function with the parameters of a new graph, and None for those in `absent`; return the graph and
    the results."""
    names = parameters_of(function)
    graph = Graph(name for name in names if name not in absent)
    return graph, traced(function, graph, [graph.parameters.get(name) for name in names])


def traced(
    function: Callable[..., Any], graph: Graph, arguments: Sequence[Value | None]
) -> tuple[Value, ...]:
    """Call a scalar function with values of a graph; return the results."""
    own: Any = getattr(function, "fn", function)  # of `@triton.jit`
    results = _rebound(own, graph, {})(*arguments)
    return tuple(map(graph.lifted, results if isinstance(results, tuple) else (results,)))


# ---- derivatives --------------------------------------------------------------------------------------------


def gradients(results: Sequence[Value], upstream: Sequence[Value], wanted: Iterable[str]) -> dict[str, Value]:
    """Return the gradients of the wanted parameters, from the results backward: sums over paths of the product of an
    upstream gradient and the derivatives along the path."""
    graph = results[0].graph
    graph.derives = True
    adjoints: dict[int, Value] = {}
    for result, gradient in zip(results, upstream, strict=True):
        _accumulate(adjoints, result.index, gradient)
    for index in reversed(graph.needed(results)):
        node = graph.nodes[index]
        adjoint = adjoints.get(index)
        if adjoint is None or not node.inputs:
            continue
        inputs = [Value(graph, i) for i in node.inputs]
        if node.name == "lookup":
            continue
        if node.name == "cast":
            contributions: Sequence[Value | None] = (adjoint if node.value == "float32" else None,)
        else:
            rule = PRIMITIVES[node.name].gradient
            if rule is None:
                raise TypeError(
                    f"{node.name} has no derivative: pass backward=, a function of the arguments and of the gradients "
                    "of the results, or backward=None for an op without gradients"
                )
            contributions = rule(adjoint, Value(graph, index), *inputs)
        for each, contribution in zip(inputs, contributions, strict=True):
            if contribution is not None:
                _accumulate(adjoints, each.index, contribution)
    zero = graph.number(0.0)
    return {name: adjoints.get(graph.parameters[name].index, zero) for name in wanted}


def _accumulate(adjoints: dict[int, Value], index: int, value: Value) -> None:
    """Add to the gradient of a node. What has one value for a row gets the sum over the row."""
    graph = value.graph
    if graph.nodes[index].name in ("number", "length"):
        return
    if graph.varies(value.index) and not graph.varies(index):
        value = graph.apply("sum", value)
    adjoints[index] = value.graph.apply("add", adjoints[index], value) if index in adjoints else value
