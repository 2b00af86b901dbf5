"""Scalar functions as ops: any number of tensors and numbers, broadcast, of any strides and dtypes.

    @weft.pointwise
    def gated_add(x, y, gate):
        return x + y * gate

Floats are computed in fp32 and rounded once to the dtype of each result, which PyTorch's promotion decides. The
gradient is derived from the function and computed by one kernel. For arguments that were broadcast it is summed in a
fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import is_observed
from ..common.checks import (
    check_disjoint,
    check_distinct,
    check_out_dtype,
    check_tensor,
    no_tensor,
    same_elements,
)
from ..common.results import Result, result_options
from .expression import gradients, optional_in, parameters_of, trace, traced
from .lowering import DTYPES, UNQUANTIZED, Scalar
from .op import broadcast, define
from .primitives import OF_ROWS

NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
OPTIONS = ("out", "out_dtype", "quantize", "rowwise", "columnwise")


class Pointwise:
    """Op of a scalar function. Calling it computes the function of each element."""

    dims = 0  # of a row, if it is an op of rows

    def __init__(self, function: Callable[..., Any], backward: Callable[..., Any] | None = None) -> None:
        self.scalar = function = getattr(function, "fn", function)
        functools.update_wrapper(self, function)
        self.name = function.__name__.lstrip("_")
        self.name = self.name if self.name.isidentifier() else "scalar"  # of a lambda
        self.parameters, self._backward = parameters_of(function), backward
        self.optional = optional_in(function)
        _, results = trace(function)
        names = ("out",) if len(results) == 1 else tuple(f"out{i}" for i in range(len(results)))
        taken = {*names, *(f"d{name}" for name in names), "needs", *OPTIONS}
        if clash := sorted(taken.intersection(self.parameters)):
            raise TypeError(
                f"{self.name}: rename the parameter {clash[0]}, which is also the name of a result or of an option"
            )
        self.results = names
        self._gradients: dict[tuple[tuple[str, ...], ...], Scalar] = {}
        self._without: dict[tuple[str, ...], Scalar] = {}
        scalar = self.without(())
        self.check(scalar)
        self.op = define(self.name, scalar, self.parameters, self.optional, self.without, self.gradient)

    def without(self, absent: tuple[str, ...]) -> Scalar:
        """Return the function of all parameters but those that are left out."""
        if absent not in self._without:
            graph, results = trace(self.scalar, absent)
            by_name = dict(zip(self.results, results, strict=True))
            narrow = [n for n, each in by_name.items() if self.dims and not graph.varies(each.index)]
            self._without[absent] = Scalar(graph, by_name, self.dims, narrow)
        return self._without[absent]

    def check(self, scalar: Scalar) -> None:
        """Raise an error for what this kind of function cannot do."""
        if scalar.tables and not scalar.parameters:
            raise TypeError(
                f"{', '.join(scalar.tables)} of {self.name} is a table, since it is indexed, and cannot be the only "
                "parameter: an op needs one of which it sees an element, which cannot be indexed"
            )
        names = (scalar.graph.nodes[index].name for index in scalar.order)
        if of_rows := next((name for name in names if name in OF_ROWS), None):
            raise TypeError(
                f"{self.name} sees one element at a time; {of_rows} is for functions of rows: use @weft.rowwise"
            )

    def gradient(
        self,
        wanted: tuple[str, ...],
        upstream: tuple[str, ...],
        narrow: tuple[str, ...],
        absent: tuple[str, ...] = (),
    ) -> Scalar:
        """Return the gradients of the wanted parameters, as a function of the parameters and of the upstream gradients.
        Those in `narrow` are summed over rows; those in `absent` are left out."""
        key = wanted, upstream, narrow, absent
        if key not in self._gradients:
            self._gradients[key] = self._gradient(*key)
        return self._gradients[key]

    def _gradient(
        self,
        wanted: tuple[str, ...],
        upstream: tuple[str, ...],
        narrow: tuple[str, ...],
        absent: tuple[str, ...],
    ) -> Scalar:
        graph, results = trace(self.scalar, absent)
        incoming = {
            f"d{n}": graph.parameter(f"d{n}", not self.dims or graph.varies(each.index))
            for n, each in zip(self.results, results, strict=True)
        }
        if self._backward is None:
            pairs = [
                (r, u) for r, (name, u) in zip(results, incoming.items(), strict=True) if name in upstream
            ]
            values = gradients([r for r, _ in pairs], [u for _, u in pairs], wanted)
        else:
            zero = graph.number(0.0)
            arguments = [None if n in absent else graph.parameter(n) for n in self.parameters]
            arguments += [u if name in upstream else zero for name, u in incoming.items()]
            returned = traced(self._backward, graph, arguments)
            if len(returned) != len(self.parameters):
                raise TypeError(
                    f"backward= of {self.name} must return {len(self.parameters)} gradients, for "
                    f"{', '.join(self.parameters)}; got {len(returned)}"
                )
            values = {n: v for n, v in zip(self.parameters, returned, strict=True) if n in wanted}
        values |= {n: graph.apply("sum", values[n]) for n in narrow}
        return Scalar(graph, values, self.dims or int(bool(narrow)), narrow)

    def __call__(
        self,
        *args: Any,
        out: Tensor | tuple[Tensor, ...] | None = None,
        out_dtype: torch.dtype | None = None,
        quantize: Format | str | None = None,
        rowwise: bool = True,
        columnwise: bool = False,
        **named: Any,
    ) -> Any:
        if named or len(args) != len(self.parameters):
            args = self._ordered(args, named)
        is_plain = quantize is None and out is None and not columnwise
        if is_plain and not is_observed():
            results = self.op.run_planned(args, out_dtype)
            if results is not None:
                return results[0] if len(results) == 1 else tuple(results)
        a = self._arguments(args, out_dtype)
        if quantize is not None or columnwise:
            return self._quantized(a, out, quantize, rowwise, columnwise)
        outputs = self.op(a) if out is None else self._into(out if isinstance(out, tuple) else (out,), a)
        return outputs[0] if len(self.results) == 1 else tuple(outputs)

    def __repr__(self) -> str:
        return f"<weft.{type(self).__name__.lower()} {self.name}({', '.join(self.parameters)})>"

    def __reduce__(self) -> str:
        """Pickle as a function is: by its name."""
        return self.scalar.__qualname__

    def _ordered(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in order; raise an error that says which are missing or unknown."""
        values = dict(zip(self.parameters, args, strict=False))
        missing = [n for n in self.parameters if n not in values | named and n not in self.optional]
        unknown = [name for name in named if name not in self.parameters]
        twice = [name for name in named if name in values]
        for names, what in ((missing, "misses"), (unknown, "has no parameter"), (twice, "was given twice")):
            if names:
                raise TypeError(f"{self.name}({', '.join(self.parameters)}) {what} {', '.join(names)}")
        if len(args) > len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments; got {len(args)}")
        return tuple((values | named).get(name) for name in self.parameters)

    def _arguments(self, values: tuple[Any, ...], out_dtype: torch.dtype | None) -> Any:
        """Check the arguments, and part them into tensors and numbers."""
        tensors: list[Tensor | None] = []
        numbers: list[Any] = []
        first: Tensor | None = None
        for name, value in zip(self.parameters, values, strict=True):
            if name in self.op.tables and value is not None:
                self._check_table(name, value)
            if isinstance(value, Tensor):
                if value.layout is not torch.strided:
                    raise no_tensor(name, value)
                if first is None:
                    first = value
                if value.dtype not in DTYPES or (value is not first and value.device != first.device):
                    check_tensor(name, value, DTYPES, first.device)
                tensors.append(value)
                numbers.append(None)
            elif isinstance(value, NUMBERS):
                tensors.append(None)
                numbers.append(value)
            elif value is None and name in self.optional:
                tensors.append(None)
                numbers.append(None)
            else:
                raise no_tensor(name, value, "A number would do as well")
        elements = [name for name in self.parameters if name not in self.op.tables]
        if first is None or not any(isinstance(v, Tensor) for v in self._elements(values)):
            raise TypeError(f"{self.name} needs a tensor among {', '.join(elements)}; got numbers alone")
        if out_dtype is not None:
            check_out_dtype(out_dtype)
        a = self.op.arguments.cls(*tensors, *numbers, out_dtype, *UNQUANTIZED)
        self.op.validate(a)
        return a

    def _elements(self, values: tuple[Any, ...]) -> Iterator[Any]:
        """Return the arguments of which the function sees an element."""
        return (v for n, v in zip(self.parameters, values, strict=True) if n not in self.op.tables)

    def _check_table(self, name: str, table: Any) -> None:
        if not isinstance(table, Tensor) or table.layout is not torch.strided:
            raise no_tensor(name, table)
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} is a table, which gets no gradient: index it in PyTorch and pass the elements, or detach it"
            )

    def _quantized(
        self, a: Any, out: Any, quantize: Format | str | None, rowwise: bool, columnwise: bool
    ) -> Tensor:
        """Return the result as a `QTensor`."""
        tensors = self.op.tensors(a)
        options = result_options(
            next(iter(tensors.values())),
            quantize,
            rowwise=rowwise,
            columnwise=columnwise,
            out_dtype=a.out_dtype,
        )
        instead = "quantize what it returns with weft.quantize"
        if out is not None:
            raise ValueError("out= is for a plain result, and a quantized one is a new QTensor: leave it out")
        if not self.op.one_result:
            many = len(self.results)
            which = f"{many} results" if many > 1 else "a result with one value for each row"
            raise ValueError(
                f"quantize= is for one result with a last dimension, and {self.name} has {which}: {instead}"
            )
        (dtype,) = self.op.result_dtypes(a)
        if not (dtype.is_floating_point and broadcast(tensors)):
            what = "has no dimension" if dtype.is_floating_point else f"is {dtype}"
            raise ValueError(
                f"quantize= is for floats with a last dimension, and the result of {self.name} {what}"
            )
        stored = (options.format, options.rowwise, options.columnwise)
        result: Result = self.op(self.op.arguments.cls(*a[: -len(UNQUANTIZED)], *stored))
        return result.value(options)

    def _into(self, out: tuple[Tensor, ...], a: Any) -> Any:
        """Compute into `out`, which may be an argument itself, with the same elements in the same places."""
        tensors = self.op.tensors(a)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
            raise ValueError("out= is for inference: call it under torch.no_grad()")
        shape, dtypes = broadcast(tensors, self.dims), self.op.result_dtypes(a)
        if len(out) != len(dtypes):
            raise ValueError(f"{self.name} has {len(dtypes)} results; out has {len(out)} tensors")
        device = next(iter(tensors.values())).device
        for name, t, dtype in zip(self.results, out, dtypes, strict=True):
            check_tensor("out", t, (dtype,), device, tuple(self.op.scalar.shape_of(name, shape)))
            check_distinct("out", t)
        in_place = not self.dims  # an op of rows reads a row again when it has written some of it
        tables = [(n, t) for n, t in zip(self.parameters, a, strict=False) if n in self.op.tables]
        read = [(n, t) for n, t in tables if t is not None] + [
            (n, t) for n, t in tensors.items() if not (in_place and any(same_elements(t, to) for to in out))
        ]
        check_disjoint([("out", t) for t in out], read)
        return self.op.into(self.op.plain(out), a)


@overload
def pointwise(function: Callable[..., Any], /) -> Pointwise: ...


@overload
def pointwise(*, backward: Callable[..., Any] | None = ...) -> Callable[[Callable[..., Any]], Pointwise]: ...


def pointwise(
    function: Callable[..., Any] | None = None, /, *, backward: Callable[..., Any] | None = None
) -> Any:
    """Turn a scalar function in Triton's language into an op.

    The op broadcasts its arguments, of any strides and dtypes. It also takes `out=`, `out_dtype=` for the dtype of
    float results, and `quantize=`, `rowwise=` and `columnwise=` for a result that is a `QTensor`, as in `weft.glu`.

    - `function`: has a parameter for each tensor or number, and returns a scalar or a tuple of scalars. It may call
      Python helpers and `@triton.jit` functions.
    - `backward`: a scalar function of the parameters and of the gradient of each result, which returns the gradient of
      each parameter. Without it, the gradient is derived from the function.

    >>> import torch, weft
    >>> @weft.pointwise
    ... def gated_add(x, y, gate):
    ...     return x + y * gate
    >>> gated_add(torch.ones(2), torch.ones(3, 1), 2.0)
    tensor([[3., 3.],
            [3., 3.],
            [3., 3.]])
    """
    return (
        functools.partial(Pointwise, backward=backward) if function is None else Pointwise(function, backward)
    )
