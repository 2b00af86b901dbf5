"""`QTensor`, a tensor stored as quantized codes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..runtime import apply, register_gradient_decoder
from .copies import (
    PLAIN,
    Codes,
    Copies,
    allocate_copies,
    cut_rows,
    in_slots,
    join_shards,
    row_unit,
    shard_bytes,
)
from .dense import DecodedView, become_dense, is_view, is_view_from_outside, written_tensors
from .formats import SPECS, Format, transposed_spec

if TYPE_CHECKING:
    from .layouts import ForeignCodes

aten = torch.ops.aten

# Dtypes that a QTensor can declare. Converting it to any other dtype dequantizes it.
_DECLARABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# The tensor fields of `Codes`.
_TENSORS = Codes._fields[:3]


class QTensor(Tensor):
    """Tensor stored as codes and scales. `shape` and `dtype` are those of the tensor that was quantized, and gradients
    pass straight through.

    - `rowwise`: the copy quantized along the last dimension, codes [M, K] for a tensor of shape [..., K] with M
      rows in all.
    - `columnwise`: the copy quantized along M, stored transposed: codes [K, M]. Weight gradients read it.

    Operations without an implementation for QTensors receive it dequantized. `a @ b` and
    `torch.nn.functional.linear(x, w)` run `weft.matmul` on the codes if a product supports both formats.
    `weft.layouts` passes the bytes to other libraries.

    As a parameter or a buffer it moves with its module:

    - `.to(dtype)` and `.bfloat16()` change the declared dtype, in which `dequantize` returns; the codes stay.
    - Saving, loading, pickling and copying keep the codes. `load_state_dict` copies codes into a QTensor of the
      same format and dequantizes into a plain parameter; with `assign=True` it takes any tensor.
    - `fully_shard` (FSDP2) shards it along its first dimension and gathers codes and scales. All shards must have the
      same number of rows and consist of complete blocks.
    - Neither it nor its views, such as `q[0]`, can be written in place, except by `copy_` from a QTensor of the same
      format. When autograd adds to a gradient that is a QTensor, the gradient becomes dense: the sum of the
      dequantized gradients, in its dtype.

    >>> import torch, weft
    >>> q = weft.quantize(torch.randn(4, 256), "1x128")
    >>> q.shape, q.rowwise.data.dtype, q.rowwise.scale.shape
    (torch.Size([4, 256]), torch.float8_e4m3fn, torch.Size([4, 2]))
    >>> (q + 1).shape
    torch.Size([4, 256])
    >>> q.bfloat16()
    QTensor((4, 256), torch.bfloat16, e4m3:1x128:te:pow2, rowwise, device='cpu')
    """

    rowwise: Codes | None
    columnwise: Codes | None
    spec: str  # name of the format

    @staticmethod
    def __new__(
        cls,
        shape: Any,
        dtype: torch.dtype,
        format: Format | str,
        rowwise: Codes | None,
        columnwise: Codes | None = None,
    ) -> QTensor:
        present = rowwise or columnwise
        if present is None:
            raise ValueError("a QTensor needs a row-wise copy, a column-wise copy, or both; got neither")
        self: QTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=present.data.device
        )
        self.rowwise, self.columnwise = rowwise, columnwise
        self._declare(format if format in SPECS else Format.of(format).spec)
        return self

    def _declare(self, spec: str) -> None:
        """Set the format of the tensor and of its copies."""
        self.spec = spec
        if self.rowwise is not None and self.rowwise.format != spec:
            self.rowwise = self.rowwise._replace(format=spec)
        if self.columnwise is not None and self.columnwise.format != (spec := transposed_spec(spec)):
            self.columnwise = self.columnwise._replace(format=spec)

    @property
    def format(self) -> Format:
        return Format.of(self.spec)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized tensor in `dtype`, by default its own. The row-wise copy is read if there is one, a
        rotated copy only if there is no other. Gradients pass straight through."""
        return apply(_Unwrap, self, dtype or self.dtype)  # type: ignore[no-any-return]

    def to_layout(
        self, name: str, *, operand: Literal["a", "b"] = "a", columnwise: bool = False
    ) -> ForeignCodes:
        """Return the buffers that another library's GEMM takes, without copying where the layouts agree; see
        `weft.layouts` for the names.

        >>> import torch, weft
        >>> q = weft.quantize(torch.randn(8, 256), "1x128")
        >>> q.to_layout("te").scale.shape
        torch.Size([2, 8])
        """
        from .layouts import to_layout

        codes = self.columnwise if columnwise else self.rowwise
        if codes is None:
            raise ValueError(f"{self!r} has no {'column' if columnwise else 'row'}-wise copy")
        return to_layout(codes, name, operand=operand, columnwise=columnwise)

    def _matrix(self) -> tuple[int, int]:
        """Return (M, K). A flat view still holds the copies of the matrix it views."""
        if self.dim() == 1 and self.rowwise is not None:
            rows = self.rowwise.data.shape[0]
            return rows, self.numel() // rows if rows else self.shape[0]
        cols = self.shape[-1]
        if self.dim() == 1 and self.columnwise is not None:
            cols = self.columnwise.data.shape[0]
        return self.numel() // cols if cols else 0, cols

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        (row, col), (rows, cols) = self._copies, self._matrix()
        rotated = col is not None and Format.of(self.spec).hadamard == "rowwise"
        if row is not None and not rotated:  # prefer a copy that is not rotated
            return _ops.decode(row, cols, dtype).reshape(self.shape)
        assert col is not None
        return _ops.decode(col, rows, dtype).t().reshape(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        copies = [name for name in ("rowwise", "columnwise") if getattr(self, name) is not None]
        return (
            f"QTensor({tuple(self.shape)}, {self.dtype}, {self.spec}, {' and '.join(copies)}, "
            f"device={str(self.device)!r})"
        )

    # ---- saving, copying, sharing -------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the rebuild function and its arguments, for `torch.save`, pickle and copy."""
        parts = [None if codes is None else codes.map(_plain_bytes)[:3] for codes in self._copies]
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (tuple(self.shape), self.dtype, self.spec, *parts, self.requires_grad, is_parameter)

    def share_memory_(self) -> QTensor:
        self._map(lambda part: part.share_memory_())
        return self

    @property
    def data(self) -> QTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, QTensor):
            raise TypeError(
                f"cannot assign a plain tensor to the data of {self!r}: replace the whole tensor (or "
                "torch.nn.Parameter) instead"
            )
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.rowwise, self.columnwise, self.spec = new.rowwise, new.columnwise, new.spec

    # ---- torch.compile flattens it into plain tensors and rebuilds it -------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = []
        for side in ("rowwise", "columnwise"):
            for name, value in zip(_TENSORS, getattr(self, side) or (), strict=False):
                if value is not None:
                    setattr(self, f"_{side}_{name}", value)
                    names.append(f"_{side}_{name}")
        return names, (self.dtype, self.spec)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> QTensor:
        dtype, spec = meta
        parts = ([inner.get(f"_{side}_{name}") for name in _TENSORS] for side in ("rowwise", "columnwise"))
        copies = (None if tensors[0] is None else Codes(*tensors) for tensors in parts)  # type: ignore[arg-type]
        return QTensor(outer_size, dtype, spec, *copies)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Return a plain tangent. AOTAutograd assumes that the gradient of a graph's output has the output's type, but
        it is plain: zeros if the output is not differentiated, else the result of the backward of `dequantize` etc."""
        tangent = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        # AOTAutograd flattens the result without checking that it is still a wrapper.
        tangent.__tensor_flatten__ = _nothing_inside  # type: ignore[attr-defined]
        return tangent

    def __coerce_same_metadata_as_tangent__(self, meta: Any, kind: type | None = None) -> Tensor | None:
        """Return the decoded gradient if AOTAutograd expects a plain one, else None."""
        return self._decoded(self.dtype) if kind is Tensor else None

    # ---- FSDP2: `fully_shard` calls these around its all-gather -------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        ranks = mesh.size()
        if outer_size[0] % ranks:
            raise ValueError(
                f"FSDP gathers shards of a QTensor {tuple(outer_size)} only if all have the same length, but "
                f"{outer_size[0]} is not divisible by {ranks} ranks: pad it to a multiple, or pass the parameter to "
                "fully_shard(ignored_params=...)"
            )
        return tuple(shard_bytes(self._copies)), (self, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: QTensor | None = None,
    ) -> tuple[QTensor, list[Tensor]] | None:
        shard, shape = metadata
        cols = shard._matrix()[1]
        copies, allocated = join_shards(
            shard._copies, all_gather_outputs, math.prod(shape) // cols if cols else 0, cols,
            None if out is None else out._copies,
        )  # fmt: skip
        if out is not None:
            return None
        return QTensor(shape, param_dtype, shard.format, *copies), allocated

    # ---- operations ---------------------------------------------------------------------------------------

    @property
    def _copies(self) -> Copies:
        return self.rowwise, self.columnwise

    def _map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QTensor:
        """Return the tensor with `function` applied to all its parts, declared as `dtype`."""
        copies = (None if codes is None else codes.map(function) for codes in self._copies)
        return QTensor(self.shape, dtype or self.dtype, self.spec, *copies)

    def _allocated(self, shape: Any, dtype: torch.dtype, device: torch.device) -> QTensor:
        """Allocate an uninitialized QTensor of this format."""
        f, cols = self.format, self._matrix()[1]
        rows = math.prod(shape) // cols if cols else 0
        sides = {"rowwise": self.rowwise is not None, "columnwise": self.columnwise is not None}
        return QTensor(shape, dtype, f, *allocate_copies(f, rows, cols, device, **sides))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view_from_outside(func, args):
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        implementation = _IMPLEMENTED.get(func)
        if implementation is not None and isinstance(args[0], QTensor):
            result = implementation(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = _ops.run(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if any(isinstance(t, QTensor) for t in written_tensors(func, args, kwargs)):
            raise RuntimeError(f"{func} would change a QTensor in place: dequantize it, or create a new one")
        # Under inference_mode composite ops arrive undecomposed; elsewhere PyTorch has decomposed them already.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if is_view(func) and isinstance(args[0], QTensor):
            return _decoded_view(func, *args, **kwargs)
        convert = _undecoded if func in _METADATA_ONLY else decoded
        return func(*tree_map(convert, args), **tree_map(convert, kwargs))


class Ops(NamedTuple):
    """Hook through which QTensors call ops. `weft.ops` imports this package, so this package cannot import `weft.ops`;
    `weft.ops` sets the hook at import."""

    decode: Callable[[Codes, int, torch.dtype], Tensor]  # (codes, row length, dtype) -> decoded tensor
    # (operation, args, kwargs) -> result of an op that reads codes; NotImplemented if its QTensors must be decoded.
    run: Callable[[Any, Any, Any], Any]


_ops: Ops


def connect(ops: Ops) -> None:
    """Set the hook through which QTensors call ops."""
    global _ops
    _ops = ops


def stand_in(x: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor that autograd sees in place of a quantized one: a single element of `dtype` expanded to
    `shape`, by default x's dtype and shape."""
    shape = x.shape if shape is None else shape
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype or x.dtype, device=x.device)


# ---- operations on a QTensor; NotImplemented means: dequantize first -------------------------------------


def _alias(q: QTensor) -> QTensor:
    return q._map(lambda part: part)


def _clone(q: QTensor, **memory_format: Any) -> QTensor:
    return q._map(torch.clone)


def _to_copy(q: QTensor, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Copy to another device or declared dtype. The copy shares no memory, as with plain tensors."""
    if (dtype or q.dtype) not in _DECLARABLE:
        return NotImplemented
    moved = {name: options[name] for name in ("device", "pin_memory", "non_blocking") if name in options}
    return q._map(lambda part: aten._to_copy.default(part, **moved), dtype)


def _pin_memory(q: QTensor, device: Any = None) -> QTensor:
    return q._map(lambda part: aten._pin_memory.default(part, device))


def _is_pinned(q: QTensor, device: Any = None) -> bool:
    return all(aten.is_pinned.default(part, device) for part in _tensors(q))


def _view(q: QTensor, shape: Any) -> Any:
    """View with other leading dimensions, or flat, as FSDP stores a shard."""
    new_shape = torch.empty(q.shape, device="meta").view(shape).shape
    if len(new_shape) != 1 and new_shape[-1:] != q._matrix()[1:]:
        return NotImplemented
    return QTensor(new_shape, q.dtype, q.format, *q._copies)


def _transpose(q: QTensor, first: int, second: int) -> Any:
    """Transpose a matrix by exchanging its row-wise and column-wise copies. Transposes of batches are decoded, from the
    column-wise copy if there is one."""
    dims = q.dim()
    if dims < 2 or {first % dims, second % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    if dims > 2:
        if q.columnwise is None or in_slots(q.columnwise, q._matrix()[0]):
            return NotImplemented
        columns = QTensor(q.shape, q.dtype, q.format, None, q.columnwise)
        return _decoded_view(aten.transpose.int, columns, first, second)
    rows, cols = q.shape
    return QTensor((cols, rows), q.dtype, q.format.transposed, q.columnwise, q.rowwise)


def _t(q: QTensor) -> Any:
    return _transpose(q, 0, 1) if q.dim() == 2 else NotImplemented


def _permute(q: QTensor, dims: Any) -> Any:
    return _transpose(q, 0, 1) if q.dim() == 2 and [dim % 2 for dim in dims] == [1, 0] else NotImplemented


def _as_strided(q: QTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return an alias if size and strides are q's own, the only case that FSDP needs."""
    unchanged = tuple(size) == tuple(q.shape) and tuple(stride) == q.stride() and not storage_offset
    return _alias(q) if unchanged else NotImplemented


def _rows(q: QTensor, starts: list[int], stops: list[int]) -> list[QTensor] | None:
    """Slice the first dimension into views, or return None if a slice would cut a block or a row."""
    if q.dim() < 2:
        return None
    inner = math.prod(q.shape[1:-1])
    rows = q.shape[0] * inner
    unit = row_unit(q._copies, rows)
    if any(edge % unit and edge != rows for i in (*starts, *stops) for edge in (i * inner,)):
        return None
    # The last row may lie inside a block, so an empty slice is cut at the start instead.
    spans = [
        (start * inner, stop * inner) if start < stop else (0, 0)
        for start, stop in zip(starts, stops, strict=True)
    ]
    return [
        QTensor((stop - start, *q.shape[1:]), q.dtype, q.spec, *cut_rows(q._copies, *span))
        for start, stop, span in zip(starts, stops, spans, strict=True)
    ]


def _enclosing_blocks(q: QTensor, start: int, stop: int) -> tuple[QTensor, int] | None:
    """Return the smallest slice of the first dimension that holds these indices in complete blocks, and its start."""
    inner = math.prod(q.shape[1:-1])
    unit = row_unit(q._copies, q.shape[0] * inner)
    step = math.lcm(unit, inner) // inner if inner else 1
    first, last = start // step * step, min(-(-stop // step) * step, q.shape[0])
    slices = _rows(q, [first], [max(first, last)])
    return None if slices is None else (slices[0], first)


def _slice(q: QTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Slice rows as a view; rows that cut a block are decoded together with the rest of the block."""
    if dim % max(q.dim(), 1) or step != 1 or q.dim() < 2:
        return NotImplemented
    first, last, _ = slice(start, end).indices(q.shape[0])
    last = max(first, last)
    slices = _rows(q, [first], [last])
    if slices is not None:
        return slices[0]
    enclosing = _enclosing_blocks(q, first, last)
    if enclosing is None:
        return NotImplemented
    blocks, blocks_start = enclosing
    return _decoded_view(aten.slice.Tensor, blocks, 0, first - blocks_start, last - blocks_start)


def _select(q: QTensor, dim: int, index: int) -> Any:
    """Select one index of the first dimension, decoded together with the rest of its block."""
    size = q.shape[0]
    if dim % max(q.dim(), 1) or q.dim() < 2 or not -size <= index < size:
        return NotImplemented
    enclosing = _enclosing_blocks(q, index % size, index % size + 1)
    if enclosing is None:
        return NotImplemented
    blocks, blocks_start = enclosing
    return _decoded_view(aten.select.int, blocks, 0, index % size - blocks_start)


def _split_with_sizes(q: QTensor, sizes: list[int], dim: int = 0) -> Any:
    if dim % max(q.dim(), 1):
        return NotImplemented
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    slices = _rows(q, [0, *stops[:-1]], stops)
    return NotImplemented if slices is None else slices


def _split(q: QTensor, size: int, dim: int = 0) -> Any:
    if dim % max(q.dim(), 1) or not size:
        return NotImplemented
    starts = range(0, max(q.shape[0], 1), size)
    return _split_with_sizes(q, [min(size, q.shape[0] - start) for start in starts], dim)


def _new_zeros(q: QTensor, shape: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Allocate a QTensor for rows of q's length, as FSDP does for a shard, and a plain tensor for any other shape."""
    same_rows = len(shape) == q.dim() >= 2 and tuple(shape[1:]) == tuple(q.shape[1:])
    if not same_rows or dtype is not None:
        return NotImplemented
    zeros = q._allocated(shape, q.dtype, device or q.device)
    for part in _tensors(zeros):
        part.zero_()
    return zeros


def _empty_like(q: QTensor, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Allocate a QTensor of the same format, as `Module.to_empty` does before weights are loaded."""
    if (dtype or q.dtype) not in _DECLARABLE:
        return NotImplemented
    return q._allocated(q.shape, dtype or q.dtype, device or q.device)


def _copy_(q: QTensor, source: Tensor, non_blocking: bool = False) -> QTensor:
    """Copy codes and scales from a tensor of the same format that has at least q's copies."""
    if isinstance(source, QTensor) and (source.spec, source.shape) == (q.spec, q.shape):
        pairs = [
            (target, origin)
            for target, origin in zip(q._copies, source._copies, strict=True)
            if target is not None
        ]
        if all(origin is not None and origin.scale.shape == target.scale.shape for target, origin in pairs):
            for target, origin in pairs:
                for part, source_part in zip(target[:3], (origin or PLAIN)[:3], strict=True):
                    if part is not None and source_part is not None:
                        part.copy_(source_part, non_blocking)
            return q
    description = repr(source) if isinstance(source, QTensor) else f"a plain tensor {tuple(source.shape)}"
    message = (
        f"{description} cannot be copied into {q!r}, which needs codes of its own format and shape: quantize it first "
        f'(weft.quantize(x, "{q.spec}")), or replace the tensor, as load_state_dict(..., assign=True) does'
    )
    rows, unit = q._matrix()[0], row_unit(q._copies, q._matrix()[0])
    if rows % unit:
        message += (
            f". If these {rows} rows are a shard: shards cannot cut blocks, here of {unit} rows. Pad the rows to a "
            f"multiple of {unit} on each rank, or pass the parameter to fully_shard(ignored_params=...)"
        )
    raise RuntimeError(message)


def _add_(q: QTensor, other: Any, alpha: Any = 1) -> Any:
    """Accumulate a gradient in place for autograd; the result becomes dense."""
    if torch._C._current_graph_task_id() == -1:
        return NotImplemented
    return become_dense(q, torch.add(q._decoded(q.dtype), other, alpha=alpha))


_IMPLEMENTED: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.as_strided.default: _as_strided,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.new_zeros.default: _new_zeros,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.add_.Tensor: _add_,
}

# The results of these operations depend only on a tensor's shape, dtype and device.
_METADATA_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
}


def _tensors(q: QTensor) -> Iterator[Tensor]:
    return (part for codes in q._copies if codes is not None for part in codes[:3] if part is not None)


def decoded(value: Any) -> Any:
    """Return the argument, decoded if it is a QTensor."""
    return value._decoded(value.dtype) if isinstance(value, QTensor) else value


def _undecoded(value: Any) -> Any:
    return stand_in(value) if isinstance(value, QTensor) else value


def _decoded_view(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> Any:
    """Return a read-only view of the decoded tensor, for views that have no codes of their own."""
    plain = q._decoded(q.dtype)
    if plain.stride() != q.stride():  # decoded from columnwise codes, it may not fit the view
        plain = plain.new_empty_strided(q.shape, q.stride()).copy_(plain)
    result = func(plain, *args, **kwargs)
    return tree_map(lambda t: DecodedView(t) if isinstance(t, Tensor) else t, result)


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(q: QTensor, dtype: torch.dtype) -> Tensor:
        return q._decoded(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _nothing_inside() -> tuple[list[str], None]:
    return [], None


def _plain_bytes(part: Tensor) -> Tensor:
    """Return 8-bit floats as bytes, because pickle does not support their storage."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, spec: str, rowwise: Any, columnwise: Any, requires_grad: bool,
    is_parameter: bool = False,
) -> QTensor:  # fmt: skip
    f = Format.of(spec)

    def codes(parts: Any) -> Codes | None:
        if parts is None:
            return None
        data, scale, *rest = parts
        return Codes(data.view(f.number.dtype), scale.view(f.scale_dtype), *rest)

    q = QTensor(shape, dtype, f, codes(rowwise), codes(columnwise))
    if is_parameter:
        return torch.nn.Parameter(q, requires_grad)  # type: ignore[return-value]
    return q.requires_grad_(requires_grad)  # type: ignore[return-value]


register_gradient_decoder(QTensor, QTensor.dequantize)

# `torch.load` rebuilds only objects whose constructors are registered.
torch.serialization.add_safe_globals([_rebuild])
