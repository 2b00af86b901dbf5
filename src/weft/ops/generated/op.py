"""Ops of functions: arguments and outputs by the names of a function's parameters, forward and backward."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ...quant.qtensor import stand_in
from ...runtime import (
    Backward,
    Gradients,
    Maybe,
    MaybeNumber,
    Op,
    Present,
    Sharding,
    capabilities_of,
    catalogue,
    is_transformed,
    serves,
)
from ..common.results import Result, ResultOptions, allocate_result, result_reference
from .lowering import FLOAT, Scalar, float_dtype, kind_of
from .rows import LONGEST_TILE, serves_rows

A = TypeVar("A", bound=tuple[Any, ...])
O = TypeVar("O", bound=tuple[Any, ...])  # noqa: E741

# Variants for one set of dtypes: flat or with up to three dimensions before the last, which of the operands vary along
# them, alignment, sizes below 2^30 or not.
VARIANTS = 64


def broadcast(tensors: Mapping[str, Tensor], dims: int = 0) -> torch.Size:
    """Return the shape that tensors are broadcast to, which has at least so many dimensions."""
    try:
        shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    except RuntimeError:
        raise ValueError(f"the shapes cannot be broadcast together: {_shapes(tensors)}") from None
    if len(shape) < dims:
        raise ValueError(f"a row has {dims} dimension{'s' * (dims > 1)}; got {_shapes(tensors)}")
    return shape


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())


def allocated(shape: torch.Size, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> Tensor:
    """Allocate a result: with the order in memory of the first tensor that has its shape, else contiguous."""
    first = next(iter(tensors.values()))
    like = next((t for t in tensors.values() if t.shape == shape), None)
    return first.new_empty(shape, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype)


class FunctionOp(Op[A, O], name="", variants=VARIANTS):
    """Op of a function. Its first arguments are the parameters that are tensors, the next ones those that are
    numbers; each parameter is None in one of the two, and in both if it is left out."""

    parameters: tuple[str, ...]
    tables: frozenset[str]  # parameters that are indexed
    dims: int  # of a row; 0 for a function of elements

    def values(self, a: Any) -> dict[str, Any]:
        """Return tensors and numbers by the names of their parameters."""
        count = len(self.parameters)
        return {
            name: number if tensor is None else tensor
            for name, tensor, number in zip(self.parameters, a[:count], a[count : 2 * count], strict=True)
        }

    def tensors(self, a: Any) -> dict[str, Tensor]:
        """Return the tensors that are broadcast, by name."""
        named = zip(self.parameters, a, strict=False)
        return {name: t for name, t in named if t is not None and name not in self.tables}

    def absent(self, a: Any) -> tuple[str, ...]:
        """Return the parameters that are left out."""
        return tuple(name for name, value in self.values(a).items() if value is None)

    def serves_call(self, a: Any) -> bool:
        tensors = [t for t in self.arguments.tensors(a) if t is not None]
        return self.serves(tensors[0]) and self.has_kernel(a, tensors)

    def has_kernel(self, a: Any, tensors: Iterable[Tensor]) -> bool:
        """Return whether kernels compute these dtypes and sizes."""
        return all(t.dtype is not torch.float64 and t.numel() for t in tensors)

    def wide(self, values: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype in which the reference computes floats."""
        return torch.float64 if any(kind_of(v).dtype is torch.float64 for v in values.values()) else FLOAT


class ForwardOp(FunctionOp[A, O], name="", variants=VARIANTS):
    """Op that computes the results of a function. If there is one, with a last dimension, its output is a `Result`,
    which may be quantized."""

    scalar: Scalar  # of all parameters
    scalar_without: Callable[[tuple[str, ...]], Scalar]  # of all but those that are left out
    optional: frozenset[str]  # parameters that may be left out
    backward_op: Any
    one_result: bool

    def function_of(self, a: Any) -> Scalar:
        """Return the function of the parameters that a call has."""
        absent = self.absent(a)
        return self.scalar_without(absent) if absent else self.scalar

    def validate(self, a: Any) -> None:
        """Raise an error for a table that a kernel would misread."""
        for name, indices in self.scalar.tables.items():
            table = a[self.parameters.index(name)]
            if table is not None and not (table.is_floating_point() and table.dim() == indices):
                raise ValueError(
                    f"{name} is a table of floats, indexed by {indices} numbers; got {table.dtype} {tuple(table.shape)}"
                )

    def result_dtypes(self, a: Any) -> list[torch.dtype]:
        values, scalar = self.values(a), self.function_of(a)
        kinds = tuple(kind_of(values[name]) for name in scalar.parameters)
        elements = (v for n, v in values.items() if v is not None and n not in self.tables)
        dtypes = scalar.dtypes(kinds, a.out_dtype or float_dtype(elements))
        if a.out_dtype is not None and not any(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(
                f"out_dtype is for float results, and the result of {self.name} is {dtypes[0]}: leave it out"
            )
        return dtypes

    def has_kernel(self, a: Any, tensors: Iterable[Tensor]) -> bool:
        return (
            super().has_kernel(a, tensors)
            and torch.float64 not in self.result_dtypes(a)
            and (
                not self.dims
                or serves_rows(self.function_of(a), broadcast(self.tensors(a))[-self.dims :].numel())
            )
        )

    def options(self, a: Any) -> ResultOptions:
        """Return the storage of the one result."""
        (dtype,) = self.result_dtypes(a)
        return ResultOptions(dtype, a.quantize, a.rowwise, a.columnwise, None, False)

    def present(self, a: Any) -> Present | None:
        return self.options(a).present() if self.one_result else None

    def plain(self, results: Iterable[Tensor]) -> Any:
        """Return the outputs of a call whose results are not quantized."""
        return Result(*results) if self.one_result else self.outputs.build(*results)

    def by_result(self, outputs: Any) -> dict[str, Tensor]:
        """Return the outputs of such a call by the names of the results."""
        return dict(zip(self.scalar.results, outputs, strict=False))

    def allocate(self, a: Any) -> Any:
        tensors = self.tensors(a)
        shape = broadcast(tensors, self.dims)
        if a.quantize is not None:
            return allocate_result(self.options(a), next(iter(tensors.values())), shape)
        results = zip(self.scalar.results, self.result_dtypes(a), strict=True)
        return self.plain(
            allocated(self.scalar.shape_of(name, shape), dtype, tensors) for name, dtype in results
        )

    def launch(self, outputs: Any, a: Any) -> None:
        from .launch import launch_quantized, launch_scalar

        if a.quantize is not None:
            launch_quantized(self.name, self.function_of(a), self.values(a), outputs, self.options(a))
        else:
            launch_scalar(self.name, self.function_of(a), self.values(a), self.by_result(outputs))

    def run(self, a: Any) -> Any:
        if a.quantize is None:
            count = len(self.parameters)
            values = [a[count + i] if a[i] is None else a[i] for i in range(count)]
            results = self.run_planned(values, a.out_dtype)
            if results is not None:
                return self.plain(results)
        return super().run(a)

    def run_planned(self, values: Sequence[Any], out_dtype: torch.dtype | None) -> list[Tensor] | None:
        """Compute by the plan for this layout of arguments, which knows all but addresses and floats. Return None if
        there is none, or if an argument needs more care: gradients, subclasses, what an error should name."""
        layout: list[Any] = []
        device: Any = None
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if value.requires_grad and torch.is_grad_enabled():
                    return None
                if value.is_neg() or value.layout is not torch.strided:
                    return None
                device = value.device
                layout.append((value.shape, value.stride(), value.dtype, device))
            elif kind is float:
                layout.append(float)
            elif kind is int or kind is bool:
                layout.append((kind, value))
            elif value is None and self.parameters[len(layout)] in self.optional:
                layout.append(None)
            else:
                return None
        if device is None or not serves(device):
            return None
        plan = self.plan(self, tuple(layout), out_dtype, capabilities_of(device))
        if plan is None:
            return None
        outputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            if like is None
            else torch.empty_like(values[like])
            for like, shape, strides, dtype in plan.outputs
        ]
        plan.bound(
            (*[values[i] for i in plan.tensors], *outputs),
            tuple([values[i] for i in plan.floats]) if plan.floats else (),
        )
        return outputs

    @functools.cached_property
    def plan(self) -> Any:
        from .launch import plan

        return plan

    def reference(self, a: Any) -> Any:
        values, shape = self.values(a), broadcast(self.tensors(a), self.dims)
        results = self.function_of(a).evaluate(values, shape, self.wide(values))
        if a.quantize is not None:
            matrix = results[0].reshape(math.prod(shape[:-1]), shape[-1])
            return result_reference(
                self.options(a), matrix, shape, next(t for t in values.values() if isinstance(t, Tensor))
            )
        return self.plain(
            result.to(dtype).contiguous()
            for result, dtype in zip(results, self.result_dtypes(a), strict=True)
        )

    def shard(self, a: Any) -> Sharding:
        """Any dimension outside of a row may be sharded, in all tensors that have it; of a quantized result only where
        no block is cut."""
        tensors = self.tensors(a)
        tables = {
            n: t for n, t in zip(self.parameters, a, strict=False) if n in self.tables and t is not None
        }
        shape = broadcast(tensors)
        names = [str(i) for i in range(len(shape))]
        whole = dict.fromkeys(names[len(shape) - self.dims :], "rows are computed whole")
        of_tables = {n: [f"{n}{i}" for i in range(t.dim())] for n, t in tables.items()}
        for dims in of_tables.values():
            whole |= dict.fromkeys(dims, "every rank reads the whole table")
        block = 1
        if a.quantize is not None:
            reasons, block = self.options(a).blocks()
            whole |= {names[-1]: "a block of the quantized result may span it", **reasons}
            # Blocks of rows are counted in the first tensor, which therefore has to have all of them.
            tensors = dict(sorted(tensors.items(), key=lambda named: named[1].shape != shape))
            if block > 1 and next(iter(tensors.values())).shape != shape:
                whole["..."] = "no argument has all rows of the quantized result"
        described = {
            name: " ".join(
                "_" if size != whole else dim
                for size, whole, dim in zip(
                    t.shape, shape[len(shape) - t.dim() :], names[len(shape) - t.dim() :], strict=True
                )
            )
            for name, t in tensors.items()
        }
        described |= {n: " ".join(dims) for n, dims in of_tables.items()}
        outputs = {
            output: " ".join(names[: len(self.scalar.shape_of(result, shape))])
            for output, result in zip(self.outputs.names, self.scalar.results, strict=False)
        }
        return Sharding(described, outputs, whole, block)

    @functools.cached_property
    def _kept(self) -> dict[tuple[str, ...], frozenset[str]]:
        return {}

    def kept(self, absent: tuple[str, ...]) -> frozenset[str]:
        """Parameters that the gradients read; of the others shape and dtype are enough."""
        if absent not in self._kept:
            wanted = tuple(n for n in self.parameters if n not in absent and n not in self.tables)
            upstream = tuple(f"d{name}" for name in self.scalar.results)
            try:
                scalar = self.backward_op.gradient(wanted, upstream, (), absent)
                self._kept[absent] = frozenset(scalar.parameters).union(scalar.tables)
            except TypeError:  # for some of its parameters the function has no gradient
                self._kept[absent] = frozenset(self.parameters)
        return self._kept[absent]

    def keep(self, a: Any, outputs: Any) -> Any:
        if is_transformed():  # what is made here would belong to another level than the arguments
            return a
        kept = self.kept(self.absent(a))
        unread = {n: stand_in(t) for n, t in self.tensors(a).items() if n not in kept}
        return a._replace(**unread) if unread else a

    def backward(self, b: Backward) -> Gradients:
        count = len(self.parameters)
        op = self.backward_op
        needs = (need and t is not None for need, t in zip(b.needs, b.kept[:count], strict=False))
        a = op.arguments.build(*b.kept[: 2 * count], *b.grads[: len(self.scalar.results)], *needs)
        return dict(zip(self.parameters, op(a), strict=True))


class BackwardOp(FunctionOp[A, O], name="", variants=VARIANTS):
    """Op that computes the gradients of the parameters of a function."""

    results: tuple[str, ...]
    narrow: frozenset[str]  # results that have one value for each row
    # Of the wanted parameters, for the results with a gradient, which of the first have one value for each row, and the
    # parameters that are left out.
    gradient: Callable[[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], Scalar]

    def call(self, a: Any) -> tuple[Scalar, dict[str, Any], torch.Size]:
        """Return the function of the wanted gradients, its arguments, and the shape they are broadcast to."""
        upstream = dict(zip(self.results, a[2 * len(self.parameters) :], strict=False))
        gradients = {f"d{name}": t for name, t in upstream.items() if t is not None}
        wanted = tuple(name for name in self.parameters if getattr(a.needs, name))
        ones = (..., *(None,) * self.dims)
        values = self.values(a) | {n: t[ones] if n[1:] in self.narrow else t for n, t in gradients.items()}
        shape = broadcast({n: t for n, t in values.items() if isinstance(t, Tensor) and n not in self.tables})
        # A function of elements, too, sums gradients over the last dimension, if a program reads it whole.
        dims = self.dims or int(0 < shape[-1:].numel() <= LONGEST_TILE)
        row = shape[len(shape) - dims :]
        narrow = [n for n in wanted if row.numel() > 1 and values[n].shape[-dims:].numel() == 1]
        return self.gradient(wanted, tuple(gradients), tuple(narrow), self.absent(a)), values, shape

    def has_kernel(self, a: Any, tensors: Iterable[Tensor]) -> bool:
        if not super().has_kernel(a, tensors):
            return False
        if not self.dims:
            return True
        scalar, _, shape = self.call(a)
        return serves_rows(scalar, shape[-self.dims :].numel())

    def allocate(self, a: Any) -> Any:
        return self.outputs.build(
            *(torch.empty_like(t) if need else None for t, need in zip(a, a.needs, strict=False))
        )

    def launch(self, outputs: Any, a: Any) -> None:
        from .launch import launch_scalar, room_for, sum_into

        scalar, values, shape = self.call(a)
        wanted = {name: t for name, t in outputs._asdict().items() if t is not None}
        whole = {}
        for name, t in wanted.items():
            own = scalar.shape_of(name, shape)
            whole[name] = t if t.shape == own else room_for(own, _without_row(scalar, name, t))
        launch_scalar(self.name, scalar, values, {f"{name}_gradient": t for name, t in whole.items()})
        for name, t in wanted.items():
            if whole[name] is not t:
                sum_into(_without_row(scalar, name, t), whole[name])

    def reference(self, a: Any) -> Any:
        scalar, values, shape = self.call(a)
        computed = zip(scalar.results, scalar.evaluate(values, shape, self.wide(values)), strict=True)
        ones = (..., *(None,) * scalar.dims)
        results = {name: t[ones] if name in scalar.narrow else t for name, t in computed}
        return self.outputs.build(
            *(
                results[name].sum_to_size(t.shape).to(t.dtype) if need else None
                for name, t, need in zip(self.parameters, a, a.needs, strict=False)
            )
        )


def _without_row(scalar: Scalar, name: str, gradient: Tensor) -> Tensor:
    """Return a gradient that has one value for each row without the dimensions of the row."""
    if name not in scalar.narrow:
        return gradient
    return gradient.view(gradient.shape[: max(gradient.dim() - scalar.dims, 0)])


def define(
    name: str,
    scalar: Scalar,
    parameters: tuple[str, ...],
    optional: frozenset[str],
    scalar_without: Any,
    gradient: Any,
) -> ForwardOp[Any, Any]:
    """Register the op of a scalar function, and that of its gradients."""
    names, count = name, 1
    while name in catalogue:
        count += 1
        name = f"{names}_{count}"
    inputs: list[tuple[str, Any]] = [(each, Maybe) for each in parameters]
    inputs += [(f"{each}_number", MaybeNumber) for each in parameters]
    results = tuple(scalar.results)
    options = [
        ("out_dtype", torch.dtype | None),
        ("quantize", str | None),
        ("rowwise", bool),
        ("columnwise", bool),
    ]
    Args = NamedTuple(f"{name}_args", [*inputs, *options])  # type: ignore[misc]
    one_result = len(results) == 1 and not scalar.narrow
    Plain = NamedTuple(f"{name}_outputs", [(each, Tensor) for each in results])  # type: ignore[misc]
    Outputs: Any = Result if one_result else Plain
    Needs = NamedTuple(f"{name}_needed", [(each, bool) for each in parameters])  # type: ignore[misc]
    upstream = [(f"d{each}", Maybe) for each in results]
    BackwardArgs = NamedTuple(f"{name}_backward_args", [*inputs, *upstream, ("needs", Needs)])  # type: ignore[misc]
    Gradients = NamedTuple(f"{name}_gradients", [(each, Maybe) for each in parameters])  # type: ignore[misc]
    backward = _instance(
        BackwardOp[BackwardArgs, Gradients],
        {"name": f"{name}_backward", "variants": VARIANTS},
        {
            "parameters": parameters,
            "tables": frozenset(scalar.tables),
            "results": results,
            "dims": scalar.dims,
            "narrow": scalar.narrow,
            "gradient": staticmethod(gradient),
        },
    )
    forward: ForwardOp[Any, Any] = _instance(
        ForwardOp[Args, Outputs],
        {"name": name, "variants": VARIANTS, "differentiable": ("y",) if one_result else results},
        {
            "parameters": parameters,
            "optional": optional,
            "tables": frozenset(scalar.tables),
            "dims": scalar.dims,
            "scalar": scalar,
            "scalar_without": staticmethod(scalar_without),
            "backward_op": backward,
            "one_result": one_result,
        },
    )
    return forward


def _instance(base: Any, options: dict[str, Any], members: dict[str, Any]) -> Any:
    return types.new_class(options["name"], (base,), options, lambda namespace: namespace.update(members))()
