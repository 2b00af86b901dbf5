"""JAX: Weft's functions on JAX arrays, on CPUs.

    from weft.integrations.jax import matmul, quantize, wrap

    y = matmul(quantize(x, "1x128"), quantize(w, "128x128").T)  # also inside jit, grad and vmap
    rms_norm = wrap(weft.rms_norm)

XLA calls back into Python. It copies the operands before and the results after; nothing else is copied. Each call is
checked when it is traced: the function runs on meta tensors, which also tells the shapes of its results.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..quant import QTensor
from ..quant.formats import transposed_spec
from ..runtime import remembered
from .common import needs

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.custom_derivatives import SymbolicZero
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir, xla
except ImportError as error:
    raise needs("jax", ">=0.10.2,<0.11", error) from error

_OPERAND = object()  # the place of an operand among the options
_SUBNORMAL = 5e-324

# ---- arrays ---------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """Array stored as codes and scales, the JAX form of `weft.QTensor`.

    `shape` and `dtype` are those of the array that was quantized; `parts` are the tensors of its copies, by name.
    `gradient` holds zeros of this shape, in whose place JAX passes the gradient. They take no memory inside `jit`;
    `frozen()` drops them from an array that is kept.
    """

    parts: dict[str, Any]
    gradient: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    spec: str = field(metadata={"static": True})

    def frozen(self) -> QArray:
        """Return the array without a gradient, as for a weight that is not trained."""
        return replace(self, gradient=None)

    @property
    def T(self) -> QArray:
        """The transposed matrix, whose row-wise copy is the column-wise copy of this one, and vice versa."""
        if len(self.shape) != 2:
            raise ValueError(f"only a matrix can be transposed, not a QArray of shape {self.shape}")
        sides = {"row": "column", "column": "row"}
        parts = {}
        for name, part in self.parts.items():  # "_rowwise_scale"
            side, rest = name[1:].split("wise_")
            parts[f"_{sides[side]}wise_{rest}"] = part
        gradient = None if self.gradient is None else self.gradient.T
        return QArray(parts, gradient, self.shape[::-1], self.dtype, transposed_spec(self.spec))


def _is_operand(x: Any) -> bool:
    return isinstance(x, QArray | jax.Array | np.ndarray)


def _torch_dtype(dtype: Any) -> torch.dtype:
    result = getattr(torch, jnp.dtype(dtype).name if isinstance(dtype, type) else dtype.name, None)
    if not isinstance(result, torch.dtype):
        raise TypeError(f"Weft has no tensors of dtype {dtype}")
    return result


def _jax_dtype(dtype: torch.dtype) -> Any:
    """Return JAX's dtype, which has 32 bits instead of 64 unless `jax_enable_x64` is set."""
    return jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))


def _tensor_over(view: Any) -> Tensor:
    """Return a tensor over the memory of a NumPy array."""
    dtype = _torch_dtype(view.dtype)
    if view.size == 0:
        return torch.empty(view.shape, dtype=dtype)
    # Unlike torch.from_numpy, this takes float8 and does not warn of arrays that cannot be written.
    memory: Any = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    memory.keeps = view
    return torch.frombuffer(memory, dtype=dtype).view(view.shape)


def _array_over(tensor: Tensor) -> Any:
    """Return a NumPy array over the memory of a tensor."""
    view = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return view.view(jnp.dtype(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def _to_torch(tree: Any) -> Any:
    """Replace QArrays, whose parts are tensors here, by QTensors."""

    def convert(x: Any) -> Any:
        if not isinstance(x, QArray):
            return x
        shape, dtype = torch.Size(x.shape), _torch_dtype(x.dtype)
        return QTensor.__tensor_unflatten__(x.parts, (dtype, x.spec), shape, None)

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, QArray))


def _from_torch(tree: Any) -> Any:
    """Replace QTensors by QArrays, whose parts are tensors here."""

    def convert(x: Any) -> Any:
        if not isinstance(x, QTensor):
            return x
        names, (dtype, spec) = x.__tensor_flatten__()
        return QArray(
            {name: getattr(x, name) for name in names}, None, tuple(x.shape), _jax_dtype(dtype), spec
        )

    return jax.tree.map(convert, tree)


def _replaced(items: Iterable[Any], flags: Iterable[bool], new: Iterable[Any]) -> list[Any]:
    """Replace the flagged items by the new ones, in order."""
    rest = iter(new)
    return [next(rest) if flag else x for x, flag in zip(items, flags, strict=True)]


# ---- calling back ---------------------------------------------------------------------------------------------

# `body` maps tensors to a list of tensors; `results` are the abstract values of these.
_call_p = Primitive("weft")
_call_p.multiple_results = True
_call_p.def_impl(functools.partial(xla.apply_primitive, _call_p))
_call_p.def_abstract_eval(lambda *arrays, body, results: results)


@contextmanager
def _subnormals() -> Iterator[None]:
    """Compute with subnormal numbers, through which kernels decode 4-bit codes. XLA's threads flush them to zero, and
    so would PyTorch's threads that start there."""
    flushed = _SUBNORMAL * 2 == 0
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def _call_on_cpu(ctx: Any, *values: Any, body: Callable[..., list[Tensor]], results: Any) -> Any:
    def call(*views: Any) -> tuple[Any, ...]:
        with _subnormals():
            return tuple(map(_array_over, body(*map(_tensor_over, views))))

    return mlir.emit_python_callback(
        ctx, call, None, values, ctx.avals_in, ctx.avals_out, has_side_effect=False, returns_token=False
    )[0]


def _refuse_platform(ctx: Any, *values: Any, **parameters: Any) -> Any:
    raise NotImplementedError(
        f"weft.integrations.jax runs on CPUs only, but this program is compiled for "
        f"{', '.join(ctx.module_context.platforms)}: move its arrays to jax.devices('cpu')[0]"
    )


def _refuse_derivative(primals: Any, tangents: Any, **parameters: Any) -> Any:
    raise NotImplementedError("the gradients of Weft's functions cannot be differentiated")


def _call_one_by_one(args: Sequence[Any], dims: Sequence[int | None], **parameters: Any) -> Any:
    """Batch a call by a loop over the batch."""
    batched = [dim is not None for dim in dims]
    moved = [jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True) if dim is not None]
    results = jax.lax.map(lambda own: _call_p.bind(*_replaced(args, batched, own), **parameters), moved)
    return results, [0] * len(results)


mlir.register_lowering(_call_p, _refuse_platform)
mlir.register_lowering(_call_p, _call_on_cpu, platform="cpu")
batching.primitive_batchers[_call_p] = _call_one_by_one
ad.primitive_jvps[_call_p] = _refuse_derivative

# ---- functions ------------------------------------------------------------------------------------------------


@jax.tree_util.register_static
class _Flags(tuple[bool, ...]):
    """Flags that JAX does not trace."""


class _Bound:
    """Function with its options, called with its operands. Equal calls share one, so that JAX compiles them once."""

    def __init__(self, function: Callable[..., Any], tree: Any, *options: Any) -> None:
        self.function, self.tree, self.options = function, tree, options
        for method in (self._results, self._forward, self._backward):
            setattr(self, method.__name__, functools.cache(method))
        self.differentiable = jax.custom_vjp(self.apply)
        self.differentiable.defvjp(self.apply_and_save, self.gradients, symbolic_zeros=True)

    def run(self, operands: Iterable[Any]) -> Any:
        """Call the function with tensors and QTensors."""
        leaves = _replaced(self.options, (option is _OPERAND for option in self.options), operands)
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.function(*args, **kwargs)

    def _results(self, tree: Any, kinds: Any, wide: bool) -> tuple[Any, Any]:
        """Return the structure and the abstract values of the results for operands of these shapes and dtypes. `wide`:
        JAX has dtypes of 64 bits."""
        tensors = [torch.empty(shape, dtype=_torch_dtype(dtype), device="meta") for shape, dtype in kinds]
        with torch.no_grad():
            results = self.run(_to_torch(jax.tree.unflatten(tree, tensors)))
        if any(tensor._version for tensor in tensors):
            raise ValueError(
                f"{self.function.__name__} would write to an operand, but JAX arrays are immutable"
            )
        leaves, structure = jax.tree.flatten(_from_torch(results))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise TypeError(
                f"{self.function.__name__} returns something besides tensors, which JAX cannot trace"
            )
        return structure, tuple(jax.core.ShapedArray(t.shape, _jax_dtype(t.dtype)) for t in leaves)

    def _forward(self, tree: Any) -> Callable[..., list[Tensor]]:
        def body(*tensors: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return jax.tree.leaves(_from_torch(self.run(_to_torch(jax.tree.unflatten(tree, tensors)))))

        return body

    def _backward(self, tree: Any, wanted: _Flags, upstream: _Flags) -> Callable[..., list[Tensor]]:
        """Return the body that computes the gradients of the wanted operands by running the function with autograd. The
        gradients of the results flagged in `upstream` follow its operands."""

        def body(*tensors: Tensor) -> list[Tensor]:
            gradients = tensors[tree.num_leaves :]
            with torch.enable_grad():
                operands = _to_torch(jax.tree.unflatten(tree, tensors[: tree.num_leaves]))
                sources = [x.detach().requires_grad_() for x in compress(operands, wanted)]
                results = jax.tree.leaves(self.run(_replaced(operands, wanted, sources)))
            pairs = [
                (y, dy)
                for y, dy in zip(compress(results, upstream), gradients, strict=True)
                if y.requires_grad
            ]
            if not pairs:
                return [torch.zeros(x.shape, dtype=x.dtype) for x in sources]
            ys, dys = zip(*pairs, strict=True)
            grads = torch.autograd.grad(ys, sources, dys, allow_unused=True, materialize_grads=True)
            return [dx.dequantize() if isinstance(dx, QTensor) else dx for dx in grads]

        return body

    # JAX calls these.

    def apply(self, operands: list[Any]) -> Any:
        arrays, tree = jax.tree.flatten([_frozen(x) for x in operands])
        wide = bool(jax.config.jax_enable_x64)
        structure, kinds = self._results(tree, tuple((x.shape, x.dtype) for x in arrays), wide)
        results = jax.tree.unflatten(
            structure, _call_p.bind(*arrays, body=self._forward(tree), results=kinds)
        )
        return jax.tree.map(_with_gradient, results, is_leaf=lambda x: isinstance(x, QArray))

    def apply_and_save(self, operands: list[Any]) -> Any:
        places = [x.gradient if isinstance(x, QArray) else x for x in operands]
        wanted = _Flags(x is not None and x.perturbed and _is_real(x.value) for x in places)
        values = jax.tree.map(lambda x: x.value, operands)
        return self.apply(values), ([_frozen(x) for x in values], wanted)

    def gradients(self, saved: tuple[list[Any], _Flags], upstream: Any) -> Any:
        operands, wanted = saved
        leaves = jax.tree.leaves(upstream, is_leaf=lambda x: isinstance(x, QArray | SymbolicZero))
        places = [x.gradient if isinstance(x, QArray) else x for x in leaves]
        present = _Flags(not isinstance(x, SymbolicZero) and _is_real(x) for x in places)
        arrays, tree = jax.tree.flatten(operands)
        kinds = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in compress(operands, wanted))
        found: Sequence[Any] = [None] * len(kinds)
        if kinds and any(present):
            body = self._backward(tree, wanted, present)
            found = _call_p.bind(*arrays, *compress(places, present), body=body, results=kinds)
        gradients = _replaced([None] * len(operands), wanted, found)
        return ([_in_place(x, dx) for x, dx in zip(operands, gradients, strict=True)],)


def _is_real(x: Any) -> bool:
    """Return whether an array can have a gradient; codes and integers cannot."""
    return x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def _frozen(x: Any) -> Any:
    return x.frozen() if isinstance(x, QArray) else x


def _with_gradient(x: Any) -> Any:
    return replace(x, gradient=jnp.zeros(x.shape, x.dtype)) if isinstance(x, QArray) else x


def _in_place(x: Any, gradient: Any) -> Any:
    """Return an operand's gradient in the structure of the operand."""
    return replace(x, parts=dict.fromkeys(x.parts), gradient=gradient) if isinstance(x, QArray) else gradient


_bound = remembered(_Bound, typed=True)


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function on JAX arrays that computes what a function on tensors does, such as `weft.rms_norm`.

    It works under `jit`, `grad` and `vmap`, which calls it for one element of the batch after another. The backward
    runs the function again, with PyTorch's autograd. Arguments that are not arrays are options. The function must
    return tensors, or tuples of them, and must not write to its arguments.

    >>> import jax.numpy as jnp, weft
    >>> from weft.integrations.jax import wrap
    >>> wrap(weft.rms_norm)(jnp.ones((4, 256)), eps=1e-6).shape
    (4, 256)
    """

    @functools.wraps(function)
    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, QArray))
        operands = [_checked(x) for x in leaves if _is_operand(x)]
        if not operands:
            raise TypeError(f"{function.__name__} was called without a JAX array")
        options = [_OPERAND if _is_operand(x) else _option(x, function.__name__) for x in leaves]
        return _bound(function, tree, *options).differentiable(operands)

    return on_arrays


def _checked(x: Any) -> Any:
    if not isinstance(x, QArray):
        return jnp.asarray(x)
    if any(part.ndim > 2 for part in x.parts.values()):
        raise ValueError(
            f"this QArray of shape {x.shape} was stacked by vmap, scan or map: use it inside them, or quantize the "
            "whole batch at once"
        )
    return x


def _option(x: Any, name: str) -> Any:
    if isinstance(x, Tensor):
        raise TypeError(f"{name} got a torch.Tensor: pass a JAX array")
    if isinstance(x, np.dtype | type(jnp.float32)) or (isinstance(x, type) and issubclass(x, np.generic)):
        return _torch_dtype(x)
    try:
        hash(x)
    except TypeError:
        raise TypeError(f"{name} got {x!r}: pass an array, or an option that is hashable") from None
    return x


quantize, dequantize = wrap(ops.quantize), wrap(ops.dequantize)
matmul, linear = wrap(ops.matmul), wrap(ops.linear)
