"""Calls of ops with symbols in place of sizes: what they would launch, as expressions of those symbols.

A workload is built and called on fake tensors whose sizes are `SymInt`s. The host code runs as it is: grids, integers,
shapes and strides come out as expressions, and every comparison that it made on the way is noted as a guard. Together
the guards say for which sizes the same launches are made.
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

LARGEST = 2**31 - 1  # of a size: the most that 32 bits hold


# ---- which sizes can vary -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A number of a workload that may be another one."""

    name: str
    usual: int  # that of the workload, or another one for which it can be traced


def _numbers(workload: Workload) -> Iterator[tuple[str, int]]:
    """The numbers that a workload is made of: those of its shape, and its settings."""
    for place, size in enumerate(workload.shape):
        if size == "rows":
            yield "rows", workload.rows
        else:
            yield ("cols" if place == len(workload.shape) - 1 else f"dim{place}"), size
    for name, value in workload.settings:
        if type(value) is int and value > 0:
            yield name, value


def candidates(workload: Workload) -> list[Size]:
    """All numbers of a workload. Which of them host code can do without knowing is found by trying: `variable`."""
    return [Size(name, value) for name, value in _numbers(workload)]


def variable(workload: Workload, target: str) -> list[Size]:
    """The numbers of a workload that can be symbols: the call can be traced, and does not ask which number it is."""
    kept: list[Size] = []
    for size in candidates(workload):
        for usual in (size.usual, size.usual + 1000):  # at one row, or column, all may be different
            tried = [*kept, Size(size.name, usual)]
            trace = Trace.of(workload, target, tried)
            if trace.failure is None and trace.refused is None and not trace.pinned:
                kept = tried
                break
    return kept


# ---- one trace ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pointer:
    """A tensor that a launch is given."""

    dtype: torch.dtype
    shape: tuple[Any, ...]  # integers of Python's or sympy's, as all that follows
    stride: tuple[Any, ...]
    offset: Any  # of its first element in its storage
    storage: int

    @property
    def elements(self) -> tuple[Any, ...]:
        """Which elements of its storage it has: two tensors of which this is the same have the same elements, though
        not the other way round. Neighbouring dimensions that lie together are one."""
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
    """A launch with expressions for numbers."""

    variant: Variant
    grid: tuple[Any, ...]
    pointers: dict[str, Pointer]  # without those that are absent
    integers: dict[str, Any]
    symbols: Mapping[str, sympy.Symbol]  # the sizes that the expressions are of
    # What host code has allocated in this call without filling it, and given to the kernel as it was allocated.
    empty: frozenset[str] = frozenset()


@dataclass
class Trace:
    """What a call launches, and for which sizes it is the same."""

    sizes: Mapping[str, sympy.Symbol]
    launches: list[Launched] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)  # sizes that a guard says to be one number
    refused: str | None = None  # what the op said, if it does not take such sizes
    failure: str | None = None  # why the call cannot be traced

    @classmethod
    def of(
        cls,
        workload: Workload,
        target: str,
        sizes: Sequence[Size],
        hints: Mapping[str, int] | None = None,
    ) -> Trace:
        """The call of a workload with symbols for `sizes`; the branches are those that it takes at `hints`."""
        env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        numbers = {
            size.name: _symbol(env, size.name, (hints or {}).get(size.name, size.usual)) for size in sizes
        }
        trace = cls({name: number.node.expr for name, number in numbers.items()})
        try:
            with warnings.catch_warnings():  # of what fake tensors do not have
                warnings.simplefilter("ignore")
                _call(trace, env, with_sizes(workload, numbers), numbers.get("rows", workload.rows), target)
        except Exception as error:  # an op's own, or whatever a fake tensor cannot do
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            if _is_refusal(error):
                trace.refused = said
            else:
                trace.failure = said
        trace.guards = [guard.expr for guard in env.guards]
        for name in numbers:
            if env.simplify(trace.sizes[name]).is_Integer:
                trace.pinned.append(name)
        return trace


def _is_refusal(error: Exception) -> bool:
    """Whether an op refused its arguments in words, rather than that something went wrong: Weft's own host code has
    raised the error."""
    if not isinstance(error, ValueError | TypeError | NotImplementedError) or error.__traceback__ is None:
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    raised = linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise")
    return raised and module.startswith("weft.") and not module.startswith("weft.lab")


def with_sizes(workload: Workload, numbers: Mapping[str, Any]) -> Workload:
    """The workload with other numbers; "rows" stays what it is."""
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
    """Build and call a workload whose numbers are symbols."""
    # Without symbols, what cannot be done with fake tensors can be with meta tensors.
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) if trace.sizes else nullcontext()

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        trace.launches.append(_launched(trace, launch, grid, pointers, integers))

    with without_numbers(), mode:
        with recorded_by(lambda *_: None, target):
            shape = tuple(rows if size == "rows" else size for size in workload.shape)
            call = workload.build(workload, Inputs("meta", workload.dtype, seed=0), shape)
        if "training" in workload.tags and catalogue[workload.op].backward is not None:
            call = call.requiring_grad()
        with recorded_by(note, target), _Allocations() as made:
            call()
    trace.launches = [replace(each, empty=made.whole(each.pointers)) for each in trace.launches]


class _Allocations(TorchDispatchMode):
    """Notes the tensors that are allocated without being filled: PyTorch names all functions that do so after `empty`.
    One that another function of PyTorch's writes to, then or later, is no such tensor any more."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Pointer] = {}  # by the number of the storage
        self._filled: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("empty", "new_empty")) and isinstance(result, Tensor):
            made = _pointer(result)
            self._made[made.storage] = made
        for number, declared in enumerate(func._schema.arguments):
            if declared.alias_info is not None and declared.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(declared.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        self._filled.add(_number_of(tensor))
        return result

    def whole(self, pointers: Mapping[str, Pointer]) -> frozenset[str]:
        """The arguments of a launch that are all of such a tensor, which no other argument is a part of."""
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
    chosen = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.constants}
    variant = _launch_of(launch.kernel, **chosen).variant(pointers, wide, len(integers))
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
    """An integer as sympy's expression, if it is not Python's."""
    return value.node.expr if isinstance(value, SymInt) else int(value)


def _decided(value: Any) -> Any:
    """What decides the code of a kernel is a number, not an expression: asking for it is a guard."""
    if isinstance(value, SymBool):
        return bool(value)
    if isinstance(value, SymInt):
        return int(value)
    if isinstance(value, tuple):
        decided = map(_decided, value)
        return type(value)(*decided) if hasattr(value, "_fields") else tuple(decided)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _decided(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **parts) if any(getattr(value, n) is not p for n, p in parts.items()) else value
    return value


def _launch_of(kernel: Any, **chosen: Any) -> Launch:
    return Launch(kernel, **{name: _decided(value) for name, value in chosen.items()})


# ---- what host code asks of sizes and tensors ---------------------------------------------------------


@contextmanager
def without_numbers() -> Iterator[None]:
    """Inside, ops run on fake tensors as they do on real ones, and symbols can do what host code does with integers.
    All of it is undone at the end."""
    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(SymInt, "bit_length", _bit_length, create=True))
        stack.enter_context(patch(SymInt, "__hash__", _hash))
        # Truth values that host code has as keys of caches are asked for.
        stack.enter_context(patch(SymBool, "__hash__", lambda truth: hash(bool(truth))))
        stack.enter_context(patch(SymBool, "__eq__", lambda truth, other: bool(truth) == bool(other)))
        stack.enter_context(patch(Launch, "of", staticmethod(_launch_of)))
        stack.enter_context(patch(FakeTensor, "data_ptr", _address, create=True))
        # Ops look at the type of tensors for what compilers trace: here the host code itself is to run.
        stack.enter_context(patch(Op, "dispatch", _run))
        stack.enter_context(patch(Op, "is_traced", lambda op, a: False))
        # Of the table of angles only its size matters; its numbers are computed one by one with floats.
        stack.enter_context(patch(heads, "frequencies", lambda base, dim, scaling: ((), 1.0)))
        stack.enter_context(patch(heads, "turns", _turns))
        try:
            yield
        finally:
            _storages.clear()
            forget()  # what is known of symbols that are gone


def _run(op: Any, a: Any) -> Any:
    with torch.no_grad():
        return op.run(a)


def _turns(base: float, dim: Any, scaling: str, device: torch.device) -> Tensor:
    """A table as `weft.ops.heads.angles.turns` makes it, without its numbers."""
    return torch.empty(dim // 2, dtype=torch.int64, device=device)


def _bit_length(number: SymInt) -> int:
    bits = int(number.node.hint).bit_length()
    if not (number < 2**bits and (bits == 0 or number >= 2 ** (bits - 1))):
        raise AssertionError("a symbol is not what its hint is")
    return bits


def _hash(number: SymInt) -> int:
    """Of the expression and of whose it is: caches then find what they know of the same expression alone."""
    node = number.node
    return hash((id(getattr(node, "shape_env", None)), str(node.expr)))


_storages: dict[
    int, tuple[int, Any]
] = {}  # numbers of storages, which are kept so that none gets another's place


def _number_of(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    number, _ = _storages.setdefault(storage._cdata, (len(_storages) + 1, storage))
    return number


def _address(tensor: Tensor) -> Any:
    """Storages begin at multiples of 16 bytes, and far enough from each other."""
    return _number_of(tensor) * 2**50 + tensor.storage_offset() * tensor.element_size()
