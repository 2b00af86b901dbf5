"""Types of the nodes of a scalar function, and the two things that it becomes: PyTorch operations and Triton text."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expression import Graph, Value
from .primitives import FLOATS, PRIMITIVES, TYPES, clamped

FLOAT = torch.float32  # the type of all floats in a function; fp64 where the reference is given that
NAMES = {dtype: name for name, dtype in TYPES.items() if name not in FLOATS} | {FLOAT: "float32"}

# Dtypes that the arguments of a function may have.
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
)

# The arguments `quantize`, `rowwise` and `columnwise` of a call whose result is not quantized.
UNQUANTIZED = (None, True, False)

TENSOR, ELEMENT, NUMBER = range(3)


class Typed(NamedTuple):
    """Type of a parameter or of a node. As in PyTorch, tensors with dimensions decide the width of what they meet, then
    those of dimension 0, then numbers."""

    dtype: torch.dtype
    rank: int = TENSOR  # or ELEMENT, NUMBER


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def promoted(types: Sequence[Typed]) -> Typed:
    """Return the type that operands share: the widest of those that decide, among the highest of bools, integers and
    floats."""
    highest = max(_category(each.dtype) for each in types)
    candidates = [each for each in types if _category(each.dtype) == highest]
    deciding = min(each.rank for each in candidates)
    dtypes = (each.dtype for each in candidates if each.rank == deciding)
    return Typed(functools.reduce(torch.promote_types, dtypes), min(each.rank for each in types))


def kind_of(value: Any) -> Typed:
    """Return the type of an argument."""
    if isinstance(value, Tensor):
        return Typed(value.dtype, TENSOR if value.dim() else ELEMENT)
    if isinstance(value, (bool, torch.SymBool)):
        return Typed(torch.bool, NUMBER)
    return Typed(torch.int64 if isinstance(value, (int, torch.SymInt)) else FLOAT, NUMBER)


def in_function(kind: Typed) -> Typed:
    """Return the type of an argument inside a function, where all floats are one."""
    return kind._replace(dtype=FLOAT) if kind.dtype.is_floating_point else kind


def operand_type(name: str, operands: Sequence[Typed]) -> Typed:
    """Return the type that a primitive converts its operands to: of a `where`, the two that it chooses from."""
    kind = PRIMITIVES[name].kind
    if kind == "float" or name in ("isnan", "isinf"):
        return Typed(FLOAT, min(each.rank for each in operands))
    common = promoted(operands[1:] if name == "where" else operands)
    common = common._replace(rank=min(each.rank for each in operands))
    if kind == "bits" and common.dtype.is_floating_point:
        raise TypeError(
            f"{name} takes integers and bools; convert floats with .to(tl.int32), or use tl.floor(a / b)"
        )
    if kind == "total" and not common.dtype.is_floating_point:
        return common._replace(dtype=torch.int64)
    if common.dtype is torch.bool and (kind == "number" or name in ("floordiv", "lshift", "rshift")):
        raise TypeError(
            f"{name} takes numbers; convert bools with .to(tl.int32), or combine them with &, | and ~"
        )
    return common


class Scalar:
    """Function of named parameters with named results: of an element each, or of rows of `dims` dimensions. The results
    in `narrow` have one value for each row."""

    def __init__(
        self, graph: Graph, results: Mapping[str, Value], dims: int = 0, narrow: Iterable[str] = ()
    ) -> None:
        self.graph, self.dims, self.narrow = graph, dims, frozenset(narrow)
        self.results = dict(results)
        self._types: dict[tuple[Typed, ...], dict[int, Typed]] = {}
        self.order = graph.needed(results.values())
        nodes = [graph.nodes[index] for index in self.order]
        used = {node.value for node in nodes if node.name == "parameter"}
        self.parameters = tuple(name for name in graph.parameters if name in used)
        self.tables: dict[str, int] = {}  # how many indices each takes
        for node in nodes:
            if node.name == "lookup":
                indices = self.tables.setdefault(node.value, len(node.inputs))
                if node.value in used or indices != len(node.inputs):
                    raise TypeError(
                        f"{node.value} is a table, since it is indexed: it takes as many indices everywhere, and is "
                        "not an element, which cannot be indexed"
                    )

    def shape_of(self, result: str, shape: torch.Size) -> torch.Size:
        """Return the shape of a result for arguments that are broadcast to `shape`."""
        return shape[: len(shape) - self.dims] if result in self.narrow else shape

    def types(self, kinds: tuple[Typed, ...]) -> dict[int, Typed]:
        """Return the type of every node for parameters of these kinds, in the order of `parameters`."""
        if kinds not in self._types:
            self._types[kinds] = self._typed(kinds)
        return self._types[kinds]

    def _typed(self, kinds: tuple[Typed, ...]) -> dict[int, Typed]:
        by_name = dict(zip(self.parameters, kinds, strict=True))
        types: dict[int, Typed] = {}
        for index in self.order:
            node = self.graph.nodes[index]
            if node.name == "parameter":
                types[index] = in_function(by_name[node.value])
            elif node.name == "number":
                types[index] = kind_of(node.value)
            elif node.name == "length":
                types[index] = Typed(torch.int64, NUMBER)
            elif node.name == "lookup":
                inputs = [types[i] for i in node.inputs]
                if any(_category(each.dtype) != 1 for each in inputs):
                    raise TypeError(f"the indices of the table {node.value} must be integers")
                types[index] = Typed(FLOAT, min(each.rank for each in inputs))
            elif node.name == "cast":
                types[index] = Typed(TYPES[node.value], types[node.inputs[0]].rank)
            else:
                common = operand_type(node.name, [types[i] for i in node.inputs])
                is_bool = PRIMITIVES[node.name].kind == "comparison"
                types[index] = common._replace(dtype=torch.bool) if is_bool else common
        return types

    def dtypes(self, kinds: tuple[Typed, ...], floats: torch.dtype) -> list[torch.dtype]:
        """Return the dtypes of the results, of which `floats` is that of floats."""
        types = self.types(kinds)
        dtypes = (types[result.index].dtype for result in self.results.values())
        return [floats if dtype.is_floating_point else dtype for dtype in dtypes]

    # ---- in PyTorch -------------------------------------------------------------------------------------------

    def evaluate(
        self, values: Mapping[str, Any], shape: torch.Size, wide: torch.dtype = FLOAT
    ) -> list[Tensor]:
        """Return the results in PyTorch for arguments that are broadcast to `shape`, not rounded yet: floats are
        computed in `wide`."""
        kinds = tuple(kind_of(values[name]) for name in self.parameters)
        types = self.types(kinds)
        device = next((v.device for v in values.values() if isinstance(v, Tensor)), torch.device("cpu"))

        def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
            dtype = wide if dtype.is_floating_point else dtype
            return value if value.dtype is dtype else value.ne(0) if dtype is torch.bool else value.to(dtype)

        done: dict[int, Tensor] = {}
        for index in self.order:
            node, typed = self.graph.nodes[index], types[index]
            if not node.inputs:
                value: Any = node.value
                if node.name == "parameter":
                    value = values[node.value]
                elif node.name == "length":
                    value = math.prod(shape[len(shape) - self.dims :])
                dtype = wide if typed.dtype.is_floating_point else typed.dtype
                is_tensor = isinstance(value, Tensor)
                done[index] = (
                    cast(value, dtype) if is_tensor else torch.tensor(value, dtype=dtype, device=device)
                )
                continue
            operands = [done[i] for i in node.inputs]
            if node.name == "lookup":
                done[index] = _looked_up(cast(values[node.value], FLOAT), operands)
                continue
            if node.name == "cast":
                done[index] = cast(operands[0], typed.dtype)
                continue
            common = operand_type(node.name, [types[i] for i in node.inputs]).dtype
            operands = [
                cast(each, torch.bool if node.name == "where" and i == 0 else common)
                for i, each in enumerate(operands)
            ]
            primitive = PRIMITIVES[node.name]
            if primitive.row is None:
                done[index] = primitive.torch(*operands)
                continue
            whole = operands[0].expand(torch.broadcast_shapes(operands[0].shape, shape[-self.dims :]))
            result = primitive.torch(whole.flatten(-self.dims))
            row = whole.shape[-self.dims :] if primitive.row.is_scan else (1,) * self.dims
            done[index] = result.unflatten(-1, row)
        return [self._shaped(name, done[result.index], shape) for name, result in self.results.items()]

    def _shaped(self, name: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Expand a result to its whole shape."""
        if name not in self.narrow:
            return value.expand(shape)
        rows = shape[: len(shape) - self.dims]
        return value.expand(*rows, *(1,) * self.dims).reshape(rows)

    # ---- in Triton --------------------------------------------------------------------------------------------

    def expressions(self, kinds: tuple[Typed, ...]) -> tuple[dict[int, str], list[str]]:
        """Return the Triton expression of each node, in variables `x_value` for a parameter x and `v{index}` for other
        nodes, and the expressions of the results. For a primitive of a row it is that of its operand."""
        types = self.types(kinds)
        expressions: dict[int, str] = {}

        def operand(index: int, dtype: torch.dtype) -> str:
            node = self.graph.nodes[index]
            if node.name == "number":
                return literal(node.value, dtype)
            names = {"parameter": f"{node.value}_value", "length": "tl.cast(cols, tl.int64)"}
            name = names.get(node.name, f"v{index}")
            return converted(name, types[index].dtype, dtype)

        for index in self.order:
            node = self.graph.nodes[index]
            if not node.inputs:
                continue
            if node.name == "lookup":
                text = _lookup(node.value, [operand(i, torch.int64) for i in node.inputs])
            elif node.name == "cast" or PRIMITIVES[node.name].row is not None:
                text = operand(node.inputs[0], types[index].dtype)
            else:
                common = operand_type(node.name, [types[i] for i in node.inputs]).dtype
                is_where = node.name == "where"
                template = PRIMITIVES[node.name].triton
                if node.name == "mod" and common.is_floating_point:
                    template = "libdevice.fmod({0}, {1})"
                text = template.format(
                    *(
                        operand(i, torch.bool if is_where and at == 0 else common)
                        for at, i in enumerate(node.inputs)
                    )
                )
            expressions[index] = text
        return expressions, [
            operand(result.index, types[result.index].dtype) for result in self.results.values()
        ]


def _looked_up(table: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return elements of a table; NaN where an index is outside of it."""
    pairs = list(zip(indices, table.shape, strict=True))
    inside = functools.reduce(torch.logical_and, ((i >= 0) & (i < size) for i, size in pairs))
    if not table.numel():
        return inside.new_full(inside.shape, math.nan, dtype=table.dtype)
    found = table[tuple(i.clamp(0, size - 1) for i, size in pairs)]
    return torch.where(inside, found, math.nan)


def _lookup(table: str, indices: Sequence[str]) -> str:
    """Return the Triton expression of `_looked_up`."""
    terms = (f"{at} * tl.cast({table}_stride{i}, tl.int64)" for i, at in enumerate(indices))
    inside = (f"({at} >= 0) & ({at} < {table}_size{i})" for i, at in enumerate(indices))
    load = f"tl.load({table}_ptr + ({' + '.join(terms)}), mask={' & '.join(inside)}, other=float('nan'))"
    return f"{load}.to(tl.float32)"


def literal(value: Any, dtype: torch.dtype) -> str:
    """Return a number as Triton reads it."""
    if dtype is torch.bool:
        return repr(bool(value))
    if not dtype.is_floating_point:
        is_limit = isinstance(value, float) and math.isinf(value)
        return repr(clamped(value, dtype) if is_limit else int(value))
    text = repr(float(value))
    return f"float('{text}')" if text.strip("-") in ("inf", "nan") else text


def converted(text: str, dtype: torch.dtype, wanted: torch.dtype) -> str:
    if dtype is wanted:
        return text
    return f"({text} != 0)" if wanted is torch.bool else f"{text}.to(tl.{NAMES[wanted]})"


def float_dtype(values: Iterable[Any]) -> torch.dtype:
    """Return the dtype of float results: `torch.result_type` of all arguments, or PyTorch's default for integers."""
    tensors: list[torch.dtype] = []
    scalars: list[torch.dtype] = []
    for value in values:
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            (tensors if value.dim() else scalars).append(value.dtype)
    chosen = tensors or scalars
    return functools.reduce(torch.promote_types, chosen) if chosen else torch.get_default_dtype()
