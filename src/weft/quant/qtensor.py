"""`QTensor`: a tensor that is stored quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..runtime import catalogue
from .formats import Format

if TYPE_CHECKING:
    from .layouts import Buffers


class Copy(NamedTuple):
    """One quantised copy of a 2-D tensor: codes, scales, and nvfp4's scale of the whole tensor."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None = None


class QTensor(Tensor):
    """A tensor stored as codes and scales. It stands for the numbers it was made from: `shape` and `dtype` are
    theirs, and gradients pass straight through.

    - `rowwise`: the copy quantised along the last dimension, codes [M, K] for a tensor of shape [..., K] with M
      rows in all.
    - `columnwise`: the copy quantised along M, stored transposed: codes [K, M]. It is what a weight gradient
      reads.

    An operation that does not know a QTensor gets it dequantised. `weft.layouts` hands its bytes to other
    libraries.

    >>> import torch, weft
    >>> q = weft.quantize(torch.randn(4, 256), "1x128")
    >>> q.shape, q.rowwise.data.dtype, q.rowwise.scale.shape
    (torch.Size([4, 256]), torch.float8_e4m3fn, torch.Size([4, 2]))
    >>> (q + 1).shape
    torch.Size([4, 256])
    """

    rowwise: Copy | None
    columnwise: Copy | None
    spec: str  # of the format

    @staticmethod
    def __new__(
        cls,
        shape: Any,
        dtype: torch.dtype,
        format: Format,
        rowwise: Copy | None,
        columnwise: Copy | None = None,
    ) -> QTensor:
        held = rowwise or columnwise
        if held is None:
            raise ValueError("a QTensor needs its row-wise copy, its column-wise copy, or both")
        self: QTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=held.data.device)
        self.rowwise, self.columnwise, self.spec = rowwise, columnwise, format.spec
        return self

    @property
    def format(self) -> Format:
        return Format.of(self.spec)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers in `dtype`, by default the tensor's own: from the row-wise copy if there is one. Gradients
        pass straight through."""
        return _Unwrap.apply(self, dtype or self.dtype)  # type: ignore[no-any-return, no-untyped-call]

    def to_layout(self, name: str, *, operand: Literal["a", "b"] = "a", columnwise: bool = False) -> Buffers:
        """The buffers that another library's GEMM takes, without a copy where its layout is this one; see
        `weft.layouts` for the names.

        >>> import torch, weft
        >>> q = weft.quantize(torch.randn(8, 256), "1x128")
        >>> q.to_layout("te").scale.shape
        torch.Size([2, 8])
        """
        from .layouts import to_layout

        copy = self.columnwise if columnwise else self.rowwise
        if copy is None:
            raise ValueError(f"{self!r} has no {'column' if columnwise else 'row'}-wise copy")
        return to_layout(copy, self.format, name, operand=operand, columnwise=columnwise)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For `torch.save`, pickling and copying: the parts, and how to put them together."""
        parts = [None if copy is None else tuple(copy) for copy in (self.rowwise, self.columnwise)]
        return _rebuild, (tuple(self.shape), self.dtype, self.spec, *parts, self.requires_grad)

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        held = self.rowwise or self.columnwise
        assert held is not None
        cols = self.shape[-1]
        rows = self.numel() // cols if cols else 0
        length = cols if self.rowwise is not None else rows
        # By its name: the op is defined above this package.
        (values,) = catalogue["dequantize"](*held, self.spec, length, dtype)
        return (values if self.rowwise is not None else values.t()).reshape(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        copies = [name for name in ("rowwise", "columnwise") if getattr(self, name) is not None]
        return (
            f"QTensor({tuple(self.shape)}, {self.dtype}, {self.spec}, {' and '.join(copies)}, "
            f"device={str(self.device)!r})"
        )

    # ---- torch.compile takes it apart into plain tensors and puts it together again -----------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = []
        for side in ("rowwise", "columnwise"):
            copy = getattr(self, side)
            if copy is not None:
                for name, value in zip(Copy._fields, copy, strict=True):
                    if value is not None:
                        setattr(self, f"_{side}_{name}", value)
                        names.append(f"_{side}_{name}")
        return names, (self.dtype, self.spec)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> QTensor:
        dtype, spec = meta
        copies = {}
        for side in ("rowwise", "columnwise"):
            parts = [inner.get(f"_{side}_{name}") for name in Copy._fields]
            copies[side] = None if parts[0] is None else Copy(*parts)  # type: ignore[arg-type]
        return QTensor(outer_size, dtype, Format.of(spec), copies["rowwise"], copies["columnwise"])

    # ---- operations ---------------------------------------------------------------------------------------

    def _map(self, function: Callable[[Tensor], Tensor]) -> QTensor:
        """The same tensor with a function applied to all its parts."""

        def mapped(copy: Copy | None) -> Copy | None:
            if copy is None:
                return None
            last = None if copy.global_scale is None else function(copy.global_scale)
            return Copy(function(copy.data), function(copy.scale), last)

        return QTensor(self.shape, self.dtype, self.format, mapped(self.rowwise), mapped(self.columnwise))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._map(lambda t: t)
        if func is aten.clone.default:
            return args[0]._map(torch.clone)
        if func is aten._to_copy.default and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            moved = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
            return args[0]._map(lambda t: aten._to_copy.default(t, **moved))
        if func in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            shape = torch.empty(args[0].shape, device="meta").view(args[1]).shape
            if shape[-1:] == args[0].shape[-1:]:
                q = args[0]
                return QTensor(shape, q.dtype, q.format, q.rowwise, q.columnwise)
        if func.namespace == "weft":
            apart = _with_codes(func, args)
            if apart is not None:
                return func(*apart, **kwargs)
        if func._schema.is_mutable and _is_written(func, args, kwargs):
            raise RuntimeError(f"{func} would change a QTensor in place: dequantise it, or make a new one")
        plain = lambda t: t._decoded(t.dtype) if isinstance(t, QTensor) else t  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _is_written(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op writes to a QTensor, or to a list with one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if any(isinstance(t, QTensor) for t in (given if isinstance(given, list | tuple) else (given,))):
                return True
    return False


def stand_in(x: Tensor) -> Tensor:
    """What autograd holds on to in place of a quantised tensor: of x's shape and dtype, and one element."""
    return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)


def _with_codes(func: Any, args: Any) -> list[Any] | None:
    """The arguments of an op that takes `codes` and `codes_scale` after a tensor, with those of a QTensor given there;
    None if there are none to give."""
    names = [argument.name for argument in func._schema.arguments]
    for i, q in enumerate(args[:-2]):
        if (
            isinstance(q, QTensor)
            and names[i + 1 : i + 3] == ["codes", "codes_scale"]
            and q.rowwise is not None
        ):
            return [*args[:i], stand_in(q), q.rowwise.data, q.rowwise.scale, *args[i + 3 :]]
    return None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: QTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = q.dtype
        return q._decoded(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, spec: str, rowwise: Any, columnwise: Any, requires_grad: bool
) -> QTensor:
    copies = [None if parts is None else Copy(*parts) for parts in (rowwise, columnwise)]
    return QTensor(shape, dtype, Format.of(spec), *copies).requires_grad_(requires_grad)  # type: ignore[return-value]


# `torch.load` builds nothing it does not know.
torch.serialization.add_safe_globals([_rebuild])
