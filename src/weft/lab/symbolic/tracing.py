"""Trace calls of ops with symbols in place of sizes: their launches, as expressions of those symbols.

A workload is built and called on fake tensors whose sizes are `SymInt`s. The host code runs unchanged: grids, integers,
shapes and strides come out as expressions, and every comparison on the way is recorded as a guard. Together the guards
describe the sizes for which the same launches are made.
"""

from __future__ import annotations

import itertools
import linecache
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import SymBool, SymInt, Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from ...ops.heads import launch as heads
from ...runtime import Launch, Op, Variant, catalogue, recorded_by
from ...runtime.launch import WIDE
from ...runtime.remembered import forget
from ..families import Inputs, Workload

LARGEST = 2**31 - 1  # maximum of a size: the largest 32-bit integer


# ---- sizes that can vary --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """An integer of a workload that may vary."""

    name: str
    usual: int  # the workload's own, or another one for which it can be traced


def _numbers(workload: Workload) -> Iterator[tuple[str, int]]:
    """Yield the integers that define a workload: those of its shape, and its settings."""
    for dim, size in enumerate(workload.shape):
        if size == "rows":
            yield "rows", workload.rows
        else:
            yield ("cols" if dim == len(workload.shape) - 1 else f"dim{dim}"), size
    for name, value in workload.settings:
        if type(value) is int and value > 0:
            yield name, value


def candidates(workload: Workload) -> list[Size]:
    """Return all integers of a workload. Trial determines which of them host code need not know: `variable`."""
    return [Size(name, value) for name, value in _numbers(workload)]


def variable(workload: Workload, target: str) -> list[Size]:
    """Return the integers of a workload that can be symbols: the call can be traced, and does not pin them."""
    accepted: list[Size] = []
    for size in candidates(workload):
        for usual in (size.usual, size.usual + 1000):  # a single row or column may be a special case
            tried = [*accepted, Size(size.name, usual)]
            trace = Trace.of(workload, target, tried)
            if trace.failure is None and trace.refused is None and not trace.pinned:
                accepted = tried
                break
    return accepted


# ---- traces ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pointer:
    """A tensor argument of a launch."""

    dtype: torch.dtype
    shape: tuple[Any, ...]  # Python's or sympy's integers, as in the next fields
    stride: tuple[Any, ...]
    offset: Any  # of its first element within its storage
    storage: int

    @property
    def elements(self) -> tuple[Any, ...]:
        """Key of the elements of its storage: tensors with equal keys have the same elements, but not conversely.
        Contiguous neighboring dimensions are merged."""
        dims: list[tuple[Any, Any]] = []
        for size, stride in zip(self.shape, self.stride, strict=True):
            if size == 1:
                continue
            if dims and sympy.expand(dims[-1][1] - size * stride) == 0:
                dims[-1] = (sympy.expand(dims[-1][0] * size), stride)
            else:
                dims.append((sympy.expand(size), sympy.expand(stride)))
        return self.dtype.itemsize, sympy.expand(self.offset), tuple(sorted(dims, key=str))


@dataclass(frozen=True)
class Launched:
    """A launch with expressions for integers."""

    variant: Variant
    grid: tuple[Any, ...]
    pointers: dict[str, Pointer]  # absent ones left out
    integers: dict[str, Any]
    symbols: Mapping[str, sympy.Symbol]  # sizes that occur in the expressions
    # Tensors that host code has allocated in this call and passed to the kernel uninitialized.
    empty: frozenset[str] = frozenset()


@dataclass
class Trace:
    """Launches of a call, and the sizes for which they are the same."""

    sizes: Mapping[str, sympy.Symbol]
    launches: list[Launched] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)  # sizes that a guard fixes to one value
    refused: str | None = None  # the op's message, if it refuses such sizes
    failure: str | None = None  # why the call cannot be traced

    @classmethod
    def of(
        cls,
        workload: Workload,
        target: str,
        sizes: Sequence[Size],
        hints: Mapping[str, int] | None = None,
    ) -> Trace:
        """Trace the call of a workload with symbols for `sizes`; the branches are those that it takes at `hints`."""
        env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        numbers = {
            size.name: _symbol(env, size.name, (hints or {}).get(size.name, size.usual)) for size in sizes
        }
        trace = cls({name: number.node.expr for name, number in numbers.items()})
        try:
            with warnings.catch_warnings():  # about features that fake tensors lack
                warnings.simplefilter("ignore")
                _call(trace, env, with_sizes(workload, numbers), numbers.get("rows", workload.rows), target)
        except Exception as error:  # the op's own, or anything that a fake tensor does not support
            message = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            if _is_refusal(error):
                trace.refused = message
            else:
                trace.failure = message
        trace.guards = [guard.expr for guard in env.guards]
        for name in numbers:
            if env.simplify(trace.sizes[name]).is_Integer:
                trace.pinned.append(name)
        return trace


def _is_refusal(error: Exception) -> bool:
    """Return whether an op refused its arguments on purpose: Weft's own host code has raised the error."""
    if not isinstance(error, ValueError | TypeError | NotImplementedError) or error.__traceback__ is None:
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    raised = linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise")
    return raised and module.startswith("weft.") and not module.startswith("weft.lab")


def with_sizes(workload: Workload, numbers: Mapping[str, Any]) -> Workload:
    """Return the workload with other integers; "rows" stays as it is."""
    names = [name for name, _ in itertools.islice(_numbers(workload), len(workload.shape))]
    shape = tuple(
        size if size == "rows" else numbers.get(name, size)
        for name, size in zip(names, workload.shape, strict=True)
    )
    settings = tuple(
        (name, numbers.get(name, value) if type(value) is int and value > 0 else value)
        for name, value in workload.settings
    )
    return replace(workload, shape=shape, settings=settings)


def _symbol(env: ShapeEnv, name: str, hint: int) -> Any:
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    number = env.create_symintnode(symbol, hint=hint, source=source)
    if not (1 <= number <= LARGEST):
        raise ValueError(f"{name} is traced at {hint}, which is not between 1 and {LARGEST}")
    return number


def _call(trace: Trace, env: ShapeEnv, workload: Workload, rows: Any, target: str) -> None:
    """Build and call a workload whose integers are symbols."""
    # Without symbols, use meta tensors: they support more than fake tensors do.
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) if trace.sizes else nullcontext()

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        trace.launches.append(_launched(trace, launch, grid, pointers, integers))

    with without_numbers(), mode:
        with recorded_by(lambda *_: None, target):
            shape = tuple(rows if size == "rows" else size for size in workload.shape)
            call = workload.build(workload, Inputs("meta", workload.dtype, seed=0), shape)
        if "training" in workload.tags and catalogue[workload.op].backward is not None:
            call = call.requiring_grad()
        with recorded_by(note, target), _Allocations() as allocations:
            call()
    trace.launches = [
        replace(each, empty=allocations.uninitialized(each.pointers)) for each in trace.launches
    ]


class _Allocations(TorchDispatchMode):
    """Records tensors that are allocated uninitialized: PyTorch names all functions that do so `empty…`. Tensors that
    another PyTorch function writes to, then or later, are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Pointer] = {}  # by storage number
        self._filled: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("empty", "new_empty")) and isinstance(result, Tensor):
            pointer = _pointer(result)
            self._made[pointer.storage] = pointer
        for position, declared in enumerate(func._schema.arguments):
            if declared.alias_info is not None and declared.alias_info.is_write:
                value = args[position] if position < len(args) else keywords.get(declared.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        self._filled.add(_number_of(tensor))
        return result

    def uninitialized(self, pointers: Mapping[str, Pointer]) -> frozenset[str]:
        """Return the arguments of a launch that cover all of such a tensor, which no other argument overlaps."""
        shared = Counter(pointer.storage for pointer in pointers.values())
        return frozenset(
            name
            for name, pointer in pointers.items()
            if pointer.storage in self._made
            and pointer.storage not in self._filled
            and shared[pointer.storage] == 1
            and pointer.elements == self._made[pointer.storage].elements
        )


def _launched(trace: Trace, launch: Any, grid: Any, pointers: Any, integers: Any) -> Launched:
    wide = any(number >= WIDE for number in integers)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.constants}
    variant = _launch_of(launch.kernel, **options).variant(pointers, wide, len(integers))
    leaves = [leaf.name for leaf in launch.kernel.layout.leaves]
    named = dict(zip(leaves, pointers, strict=False))
    return Launched(
        variant,
        tuple(map(expression, grid)),
        {name: _pointer(tensor) for name, tensor in named.items() if tensor is not None},
        dict(zip(leaves[len(pointers) :], map(expression, integers), strict=False)),
        trace.sizes,
    )


def _pointer(tensor: Tensor) -> Pointer:
    return Pointer(
        tensor.dtype,
        tuple(map(expression, tensor.shape)),
        tuple(map(expression, tensor.stride())),
        expression(tensor.storage_offset()),
        _number_of(tensor),
    )


def expression(value: Any) -> Any:
    """Return an integer, or sympy's expression for a symbolic one."""
    return value.node.expr if isinstance(value, SymInt) else int(value)


def _decided(value: Any) -> Any:
    """Return concrete values for what decides a kernel's code: asking for them adds guards."""
    if isinstance(value, SymBool):
        return bool(value)
    if isinstance(value, SymInt):
        return int(value)
    if isinstance(value, tuple):
        values = map(_decided, value)
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    if is_dataclass(value) and not isinstance(value, type):
        values_by_field = {f.name: _decided(getattr(value, f.name)) for f in fields(value) if f.init}
        return (
            replace(value, **values_by_field)
            if any(getattr(value, n) is not p for n, p in values_by_field.items())
            else value
        )
    return value


def _launch_of(kernel: Any, **options: Any) -> Launch:
    return Launch(kernel, **{name: _decided(value) for name, value in options.items()})


# ---- patches that let host code run on symbols --------------------------------------------------------


@contextmanager
def without_numbers() -> Iterator[None]:
    """Let ops run on fake tensors as on real ones, with symbols for integers, within the block. All patches are undone
    at the end."""
    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(SymInt, "bit_length", _bit_length, create=True))
        stack.enter_context(patch(SymInt, "__hash__", _hash))
        # Host code uses truth values as cache keys: evaluate them.
        stack.enter_context(patch(SymBool, "__hash__", lambda truth: hash(bool(truth))))
        stack.enter_context(patch(SymBool, "__eq__", lambda truth, other: bool(truth) == bool(other)))
        stack.enter_context(patch(Launch, "of", staticmethod(_launch_of)))
        stack.enter_context(patch(FakeTensor, "data_ptr", _address, create=True))
        # Ops detect tracing compilers by the type of tensors, but here the host code itself must run.
        stack.enter_context(patch(Op, "dispatch", _run))
        stack.enter_context(patch(Op, "is_traced", lambda op, a: False))
        # Only the size of the table of angles matters; its elements are computed one by one with floats.
        stack.enter_context(patch(heads, "frequencies", lambda base, dim, scaling: ((), 1.0)))
        stack.enter_context(patch(heads, "turns", _turns))
        try:
            yield
        finally:
            _storages.clear()
            forget()  # caches of symbols that are gone


def _run(op: Any, a: Any) -> Any:
    with torch.no_grad():
        return op.run(a)


def _turns(base: float, dim: Any, scaling: str, device: torch.device) -> Tensor:
    """Return a table like that of `weft.ops.heads.angles.turns`, uninitialized."""
    return torch.empty(dim // 2, dtype=torch.int64, device=device)


def _bit_length(number: SymInt) -> int:
    bits = int(number.node.hint).bit_length()
    if not (number < 2**bits and (bits == 0 or number >= 2 ** (bits - 1))):
        raise AssertionError("a symbol does not have the bit length of its hint")
    return bits


def _hash(number: SymInt) -> int:
    """Hash the expression and its shape environment, so that cache entries are found for equal expressions only."""
    node = number.node
    return hash((id(getattr(node, "shape_env", None)), str(node.expr)))


_storages: dict[
    int, tuple[int, Any]
] = {}  # storages by address with their numbers, kept alive so that no address is reused


def _number_of(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    number, _ = _storages.setdefault(storage._cdata, (len(_storages) + 1, storage))
    return number


def _address(tensor: Tensor) -> Any:
    """Return a fake address: storages begin at multiples of 16 bytes, far enough from each other."""
    return _number_of(tensor) * 2**50 + tensor.storage_offset() * tensor.element_size()
