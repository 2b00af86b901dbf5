"""`QTensor`: a tensor that is stored quantised."""

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

# The dtypes that a QTensor can state for its numbers. If it is converted to another one, it is dequantised.
_STATED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# The members of `Codes` that are tensors.
_TENSORS = Codes._fields[:3]


class QTensor(Tensor):
    """A tensor stored as codes and scales. It stands for the numbers it was made from: `shape` and `dtype` are
    theirs, and gradients pass straight through.

    - `rowwise`: the copy quantised along the last dimension, codes [M, K] for a tensor of shape [..., K] with M
      rows in all.
    - `columnwise`: the copy quantised along M, stored transposed: codes [K, M]. It is what a weight gradient
      reads.

    An operation that does not know a QTensor gets it dequantised. `a @ b` and `torch.nn.functional.linear(x, w)` of two
    matrices whose formats multiply each other are those of `weft.matmul`, without decoded copies. `weft.layouts` hands
    its bytes to other libraries.

    As a parameter or a buffer it goes where the module goes:

    - `.to(dtype)` and `.bfloat16()` change the dtype that it states and that `dequantize` gives; its codes stay.
    - It is saved, loaded, pickled and copied with its codes. `load_state_dict` copies codes into a QTensor of the
      same format, and dequantises into a plain parameter; with `assign=True` it takes any tensor.
    - `fully_shard` (FSDP2) shards it along its first dimension and gathers codes and scales. All shards must have the
      same number of rows, and whole blocks.
    - It cannot be written to in place, except by `copy_` from a QTensor of the same format; nor can its views, such as
      `q[0]`. Where autograd adds to a gradient that is a QTensor, that gradient becomes dense: the sum of dequantised
      numbers, in its dtype.

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
    spec: str  # of the format

    @staticmethod
    def __new__(
        cls,
        shape: Any,
        dtype: torch.dtype,
        format: Format | str,
        rowwise: Codes | None,
        columnwise: Codes | None = None,
    ) -> QTensor:
        held = rowwise or columnwise
        if held is None:
            raise ValueError("a QTensor needs its row-wise copy, its column-wise copy, or both")
        self: QTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=held.data.device)
        self.rowwise, self.columnwise = rowwise, columnwise
        self._declare(format if format in SPECS else Format.of(format).spec)
        return self

    def _declare(self, spec: str) -> None:
        """State the format of the codes."""
        self.spec = spec
        if self.rowwise is not None and self.rowwise.format != spec:
            self.rowwise = self.rowwise._replace(format=spec)
        if self.columnwise is not None and self.columnwise.format != (spec := transposed_spec(spec)):
            self.columnwise = self.columnwise._replace(format=spec)

    @property
    def format(self) -> Format:
        return Format.of(self.spec)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers in `dtype`, by default the tensor's own: from the row-wise copy if there is one, and from a
        rotated copy only if there is no other. Gradients pass straight through."""
        return apply(_Unwrap, self, dtype or self.dtype)  # type: ignore[no-any-return]

    def to_layout(
        self, name: str, *, operand: Literal["a", "b"] = "a", columnwise: bool = False
    ) -> ForeignCodes:
        """The buffers that another library's GEMM takes, without a copy where its layout is this one; see
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
        """M and K. A flat view still has the copies of the matrix that it is a view of."""
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
        if row is not None and not rotated:  # a copy that is not rotated comes first
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
        """For `torch.save`, pickling and copying: the parts, and how to put them together."""
        parts = [None if codes is None else codes.map(_plain_bytes)[:3] for codes in self._copies]
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (tuple(self.shape), self.dtype, self.spec, *parts, self.requires_grad, is_parameter)

    def share_memory_(self) -> QTensor:
        self._map(lambda part: part.share_memory_())  # type: ignore[no-untyped-call]
        return self

    @property
    def data(self) -> QTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, QTensor):
            raise TypeError(
                f"the data of {self!r} cannot become a plain tensor: put another tensor (or torch.nn.Parameter) in its "
                "place"
            )
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.rowwise, self.columnwise, self.spec = new.rowwise, new.columnwise, new.spec

    # ---- torch.compile takes it apart into plain tensors and puts it together again -----------------------

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
        """AOTAutograd asks what the gradient of a graph's output will be, and assumes what the output is. It is plain:
        zeros if nobody differentiates this output, and otherwise what `dequantize` and other operations pass on."""
        tangent = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        # AOTAutograd then flattens the answer without checking that it is still a wrapper.
        tangent.__tensor_flatten__ = _nothing_inside  # type: ignore[attr-defined]
        return tangent

    def __coerce_same_metadata_as_tangent__(self, meta: Any, kind: type | None = None) -> Tensor | None:
        """The plain form of a gradient that is a QTensor, where AOTAutograd expects a plain one."""
        return self._decoded(self.dtype) if kind is Tensor else None

    # ---- FSDP2: `fully_shard` calls these around its all-gather -------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        ranks = mesh.size()
        if outer_size[0] % ranks:
            raise ValueError(
                f"FSDP gathers shards of a QTensor {tuple(outer_size)} only if all have the same length, and "
                f"{outer_size[0]} does not divide by {ranks} ranks: pad it to a multiple, or give the parameter to "
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
        """The same tensor with a function applied to all its parts, and in `dtype`."""
        copies = (None if codes is None else codes.map(function) for codes in self._copies)
        return QTensor(self.shape, dtype or self.dtype, self.spec, *copies)

    def _allocated(self, shape: Any, dtype: torch.dtype, device: torch.device) -> QTensor:
        """An uninitialised QTensor of the same format."""
        f, cols = self.format, self._matrix()[1]
        rows = math.prod(shape) // cols if cols else 0
        wanted = {"rowwise": self.rowwise is not None, "columnwise": self.columnwise is not None}
        return QTensor(shape, dtype, f, *allocate_copies(f, rows, cols, device, **wanted))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view_from_outside(func, args):
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        known = _KNOWN.get(func)
        if known is not None and isinstance(args[0], QTensor):
            result = known(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = _ops.run(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if any(isinstance(t, QTensor) for t in written_tensors(func, args, kwargs)):
            raise RuntimeError(f"{func} would change a QTensor in place: dequantize it, or make a new one")
        # Under inference_mode an op that is made of others arrives whole; elsewhere its parts do.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if is_view(func) and isinstance(args[0], QTensor):
            return _decoded_view(func, *args, **kwargs)
        plain = _undecoded if func in _OF_METADATA else decoded
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


class Ops(NamedTuple):
    """The hook by which QTensors call ops. `weft.ops` is built on this package, which therefore must not import it; it
    sets the hook when it is imported itself."""

    decode: Callable[[Codes, int, torch.dtype], Tensor]  # (codes, elements of a row, dtype) -> elements
    # (operation, args, kwargs) -> the result of one that reads codes; NotImplemented if its QTensors must be decoded.
    run: Callable[[Any, Any, Any], Any]


_ops: Ops


def connect(ops: Ops) -> None:
    """Set the hook."""
    global _ops
    _ops = ops


def stand_in(x: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that autograd sees in place of a quantised one: one element of this dtype, expanded to this shape, by
    default those of x."""
    shape = x.shape if shape is None else shape
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype or x.dtype, device=x.device)


# ---- operations on a QTensor; NotImplemented means that the numbers are dequantised first ---------------


def _alias(q: QTensor) -> QTensor:
    return q._map(lambda part: part)


def _clone(q: QTensor, **memory_format: Any) -> QTensor:
    return q._map(torch.clone)


def _to_copy(q: QTensor, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A copy on another device, or with another stated dtype. Like any such conversion it shares no memory."""
    if (dtype or q.dtype) not in _STATED:
        return NotImplemented
    moved = {name: options[name] for name in ("device", "pin_memory", "non_blocking") if name in options}
    return q._map(lambda part: aten._to_copy.default(part, **moved), dtype)


def _pin_memory(q: QTensor, device: Any = None) -> QTensor:
    return q._map(lambda part: aten._pin_memory.default(part, device))


def _is_pinned(q: QTensor, device: Any = None) -> bool:
    return all(aten.is_pinned.default(part, device) for part in _tensors(q))


def _view(q: QTensor, shape: Any) -> Any:
    """A view with other leading dimensions, or a flat one, as FSDP keeps a shard."""
    wanted = torch.empty(q.shape, device="meta").view(shape).shape
    if len(wanted) != 1 and wanted[-1:] != q._matrix()[1:]:
        return NotImplemented
    return QTensor(wanted, q.dtype, q.format, *q._copies)


def _transpose(q: QTensor, first: int, second: int) -> Any:
    """The transpose of a matrix: its row-wise copy is the column-wise copy of q, and the other way round. Transposes of
    several matrices are decoded, from the column-wise copy as well."""
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
    """The tensor itself, if size and strides are its own: FSDP asks for no other case."""
    same = tuple(size) == tuple(q.shape) and tuple(stride) == q.stride() and not storage_offset
    return _alias(q) if same else NotImplemented


def _rows(q: QTensor, starts: list[int], stops: list[int]) -> list[QTensor] | None:
    """Pieces of the first dimension as views; None if one of them would cut a block, or a row."""
    if q.dim() < 2:
        return None
    inner = math.prod(q.shape[1:-1])
    rows = q.shape[0] * inner
    unit = row_unit(q._copies, rows)
    if any(edge % unit and edge != rows for i in (*starts, *stops) for edge in (i * inner,)):
        return None
    # The end of the rows may lie inside of a block: no rows are cut from there, but from the beginning.
    spans = [
        (start * inner, stop * inner) if start < stop else (0, 0)
        for start, stop in zip(starts, stops, strict=True)
    ]
    return [
        QTensor((stop - start, *q.shape[1:]), q.dtype, q.spec, *cut_rows(q._copies, *span))
        for start, stop, span in zip(starts, stops, spans, strict=True)
    ]


def _whole_blocks(q: QTensor, start: int, stop: int) -> tuple[QTensor, int] | None:
    """Return the smallest piece of the first dimension that has these indices and cuts no block, and its begin."""
    inner = math.prod(q.shape[1:-1])
    unit = row_unit(q._copies, q.shape[0] * inner)
    step = math.lcm(unit, inner) // inner if inner else 1
    first, last = start // step * step, min(-(-stop // step) * step, q.shape[0])
    found = _rows(q, [first], [max(first, last)])
    return None if found is None else (found[0], first)


def _slice(q: QTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Rows as a view; rows that cut a block are decoded, together with what shares it."""
    if dim % max(q.dim(), 1) or step != 1 or q.dim() < 2:
        return NotImplemented
    first, last, _ = slice(start, end).indices(q.shape[0])
    last = max(first, last)
    found = _rows(q, [first], [last])
    if found is not None:
        return found[0]
    around = _whole_blocks(q, first, last)
    if around is None:
        return NotImplemented
    piece, begin = around
    return _decoded_view(aten.slice.Tensor, piece, 0, first - begin, last - begin)


def _select(q: QTensor, dim: int, index: int) -> Any:
    """One index of the first dimension, decoded together with what shares a block with it."""
    size = q.shape[0]
    if dim % max(q.dim(), 1) or q.dim() < 2 or not -size <= index < size:
        return NotImplemented
    around = _whole_blocks(q, index % size, index % size + 1)
    if around is None:
        return NotImplemented
    piece, begin = around
    return _decoded_view(aten.select.int, piece, 0, index % size - begin)


def _split_with_sizes(q: QTensor, sizes: list[int], dim: int = 0) -> Any:
    if dim % max(q.dim(), 1):
        return NotImplemented
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    found = _rows(q, [0, *stops[:-1]], stops)
    return NotImplemented if found is None else found


def _split(q: QTensor, size: int, dim: int = 0) -> Any:
    if dim % max(q.dim(), 1) or not size:
        return NotImplemented
    starts = range(0, max(q.shape[0], 1), size)
    return _split_with_sizes(q, [min(size, q.shape[0] - start) for start in starts], dim)


def _new_zeros(q: QTensor, shape: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Rows of q's length, which FSDP allocates for a shard, become a QTensor; any other shape a plain tensor."""
    rows_alike = len(shape) == q.dim() >= 2 and tuple(shape[1:]) == tuple(q.shape[1:])
    if not rows_alike or dtype is not None:
        return NotImplemented
    zeros = q._allocated(shape, q.dtype, device or q.device)
    for part in _tensors(zeros):
        part.zero_()
    return zeros


def _empty_like(q: QTensor, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Room for a QTensor of the same format, which `Module.to_empty` asks for before weights are loaded."""
    if (dtype or q.dtype) not in _STATED:
        return NotImplemented
    return q._allocated(q.shape, dtype or q.dtype, device or q.device)


def _copy_(q: QTensor, source: Tensor, non_blocking: bool = False) -> QTensor:
    """Copy the codes and scales of a tensor of the same format that has at least the copies that q has."""
    if isinstance(source, QTensor) and (source.spec, source.shape) == (q.spec, q.shape):
        pairs = [(mine, its) for mine, its in zip(q._copies, source._copies, strict=True) if mine is not None]
        if all(its is not None and its.scale.shape == mine.scale.shape for mine, its in pairs):
            for mine, its in pairs:
                for part, its_part in zip(mine[:3], (its or PLAIN)[:3], strict=True):
                    if part is not None and its_part is not None:
                        part.copy_(its_part, non_blocking)
            return q
    what = repr(source) if isinstance(source, QTensor) else f"a plain tensor {tuple(source.shape)}"
    message = (
        f"{what} cannot be copied into {q!r}, which takes codes of its own format and shape: quantise it first "
        f'(weft.quantize(x, "{q.spec}")), or replace the tensor, as load_state_dict(..., assign=True) does'
    )
    rows, unit = q._matrix()[0], row_unit(q._copies, q._matrix()[0])
    if rows % unit:
        message += (
            f". If these {rows} rows are a shard: none can cut blocks, which have {unit} rows here. Pad the rows to a "
            f"multiple of {unit} for each rank, or give the parameter to fully_shard(ignored_params=...)"
        )
    raise RuntimeError(message)


def _add_(q: QTensor, other: Any, alpha: Any = 1) -> Any:
    """Called by autograd, which accumulates gradients in place: the result becomes dense."""
    if torch._C._current_graph_task_id() == -1:
        return NotImplemented
    return become_dense(q, torch.add(q._decoded(q.dtype), other, alpha=alpha))


_KNOWN: dict[Any, Callable[..., Any]] = {
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

# The results of these operations depend on a tensor's shape, dtype and device alone.
_OF_METADATA = {
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
    """Return an argument of an operation, decoded if it is a QTensor."""
    return value._decoded(value.dtype) if isinstance(value, QTensor) else value


def _undecoded(value: Any) -> Any:
    return stand_in(value) if isinstance(value, QTensor) else value


def _decoded_view(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> Any:
    """Return a view that has no codes of its own, as decoded numbers that refuse to be written."""
    result = func(q._decoded(q.dtype), *args, **kwargs)
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
    """8-bit floats as bytes: `pickle` does not know their storage."""
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

# `torch.load` only builds objects whose constructors are registered.
torch.serialization.add_safe_globals([_rebuild])
