"""`Codes`, one quantized copy of a matrix: its memory layout, slices of its rows, and joined shards.

Row-wise codes are [M, K], contiguous. Column-wise codes are [K, M] with rows padded to 16 bytes, so that a kernel
stores 128 bits at a time and a GEMM can read them by bulk copies whatever M is. 1x128 scales are stored column-major,
with M (in the column-wise copy K) contiguous and padded to a multiple of 4; other scales are row-major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..runtime import Maybe, MaybeStr, remembered
from .formats import Format, transposed_spec


class Codes(NamedTuple):
    """Codes and scales of one quantized copy of a matrix, and the format that says how to read them.

    Quantizers return it, a `QTensor` holds one or two, and ops take it as an argument. A column-wise copy is the
    row-wise copy of the transpose, in the transpose's format.
    """

    data: Maybe
    scale: Maybe
    global_scale: Tensor | None = None  # one per tensor; nvfp4 only
    format: MaybeStr = None  # type: ignore[assignment]  # spec of the format in which this is a row-wise copy

    def map(self, function: Callable[[Tensor], Tensor]) -> Codes:
        """Return the copy with `function` applied to each of its tensors."""
        data, scale, global_scale, format = self
        mapped_global_scale = None if global_scale is None else function(global_scale)
        return Codes(function(data), function(scale), mapped_global_scale, format)


# Tells an op that the tensor argument next to it is not quantized.
PLAIN = Codes(None, None)  # type: ignore[arg-type]

Copies = tuple[Codes | None, Codes | None]  # row-wise, column-wise


# ---- allocation -----------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """Memory layout of one tensor of a copy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    padded: int = 0  # elements to allocate, if more than the shape has
    zeroed: bool = False  # whether the padding is zero

    def allocate(self, device: torch.device) -> Tensor:
        if not self.padded:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        allocate = torch.zeros if self.zeroed else torch.empty
        return allocate(self.padded, dtype=self.dtype, device=device).as_strided(self.shape, self.stride)


def allocate_parts(
    spec: str, rows: int, cols: int, device: torch.device, *, rowwise: bool, columnwise: bool
) -> list[Tensor | None]:
    """Allocate the copies of a [rows, cols] tensor in the format `spec`. Return codes and scales of the row-wise copy,
    codes and scales of the column-wise copy, nvfp4's global_scale, and, if one copy is rotated, the column-wise copy's
    own global_scale; None for each that does not exist."""
    # A traced call may have symbolic sizes, which cannot be cache keys.
    layout_of = _cached_layouts if type(rows) is int and type(cols) is int else _layouts
    return [
        None if layout is None else layout.allocate(device)
        for layout in layout_of(spec, rows, cols, rowwise, columnwise)
    ]


def _layouts(
    spec: str, rows: int, cols: int, rowwise: bool, columnwise: bool
) -> tuple[TensorLayout | None, ...]:
    """Return the layouts of the tensors that `allocate_parts` allocates."""
    format = Format.of(spec)
    dtype = format.number.dtype
    data = scale = data_t = scale_t = global_scale = global_scale_t = None
    if rowwise:
        _, width = format.data_shape(rows, format.length(cols))
        data, scale = TensorLayout((rows, width), (width, 1), dtype), scale_room(format, rows, cols)
    if columnwise:
        _, width = format.data_shape(cols, format.length(rows, "columnwise"))
        step = -(-width // 16) * 16
        data_t = TensorLayout((cols, width), (step, 1), dtype, cols * step if step > width else 0)
        scale_t = scale_room(format, cols, rows)
    if format.stored.block == "nvfp4":
        own_scales = format.hadamard is not None
        global_scale = TensorLayout((), (), torch.float32) if rowwise or not own_scales else None
        global_scale_t = TensorLayout((), (), torch.float32) if columnwise and own_scales else None
    return data, scale, data_t, scale_t, global_scale, global_scale_t


_cached_layouts = remembered(_layouts)


def scale_room(format: Format, rows: int, cols: int) -> TensorLayout:
    """Return the layout of the scales of a [rows, cols] copy."""
    height, width = format.scale_shape(rows, cols)
    if format.block != "1x128":
        return TensorLayout((height, width), (width, 1), format.scale_dtype)
    padded = -(-height // 4) * 4
    allocated = padded * width if padded > height else 0
    return TensorLayout((height, width), (1, padded), format.scale_dtype, allocated, zeroed=True)


def allocate_copies(
    format: Format, rows: int, cols: int, device: torch.device, *, rowwise: bool, columnwise: bool
) -> Copies:
    """Allocate the requested copies of a [rows, cols] tensor."""
    spec = format.spec
    data, scale, data_t, scale_t, global_scale, global_scale_t = allocate_parts(
        spec, rows, cols, device, rowwise=rowwise, columnwise=columnwise
    )
    row = None if data is None or scale is None else Codes(data, scale, global_scale, spec)
    if data_t is None or scale_t is None:
        return row, None
    return row, Codes(
        data_t, scale_t, global_scale if global_scale_t is None else global_scale_t, transposed_spec(spec)
    )


def with_padding(data: Tensor) -> Tensor:
    """Return codes with the padding of their rows, which kernels write too."""
    rows, cols = data.shape
    stride = data.stride(0)
    return data.as_strided((rows, stride), (stride, 1)) if stride > cols else data


# ---- validation -----------------------------------------------------------------------------------------


def check_codes(name: str, codes: Codes, rows: int, length: int, *, blocks: int | None = None) -> None:
    """Raise ValueError unless the codes are `PLAIN` or fit `rows` rows of `length` elements in their format, as one
    matrix or as one per group. `blocks` overrides the number of scales per row where blocks restart within a row.
    Every op that reads codes calls this, so misread bytes never become a result."""
    data, scale, global_scale, spec = codes
    if data is None or scale is None or spec is None:
        if data is not None or scale is not None or global_scale is not None:
            raise ValueError(
                f"{name} is incomplete: codes, scales and a format go together; give all three or none"
            )
        if spec is not None:
            raise ValueError(f"{name} names the format {spec} but has no codes")
        return
    shapes = (*data.shape[-2:], *scale.shape[-2:], rows, length, 0 if blocks is None else blocks)
    if {*map(type, shapes)} != {int}:  # symbolic sizes of a traced call cannot be cache keys
        return
    problem = _problem_of_codes(
        spec, data.dtype, scale.dtype, global_scale is not None, shapes, blocks is not None
    )
    if problem is not None:
        raise ValueError(f"{name} cannot be read as {spec}: {problem}")


@remembered
def _problem_of_codes(
    spec: str,
    data_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_global_scale: bool,
    shapes: tuple[int, ...],
    has_blocks: bool,
) -> str | None:
    """Return why the codes do not fit the format `spec`, or None if they do."""
    f = Format.of(spec)
    data_shape, scale_shape, (rows, length, blocks) = shapes[:2], shapes[2:4], shapes[4:]
    stored_length = f.length(length)
    expected, expected_scale = f.data_shape(rows, stored_length), f.scale_shape(rows, stored_length)
    if has_blocks:
        expected_scale = (expected_scale[0], blocks)
    if data_dtype != f.number.dtype:
        return f"its codes are {data_dtype}, expected {f.number.dtype}"
    if scale_dtype != f.scale_dtype:
        return f"its scales are {scale_dtype}, expected {f.scale_dtype}"
    if data_shape != expected:
        return f"its codes have the shape {data_shape}, expected {expected}"
    if scale_shape != expected_scale:
        return f"its scales have the shape {scale_shape}, expected {expected_scale}"
    if has_global_scale != (f.stored.block == "nvfp4"):
        return f"its global_scale is {'left over' if has_global_scale else 'missing'}"
    return None


# ---- rows -----------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A tensor of a copy, and how the rows of [M, K] map to it: each index of its dimension `dim` covers `each`
    rows. If `each` is 0, the whole tensor belongs to all rows."""

    tensor: Tensor
    dim: int
    each: int


def format_of(copies: Copies) -> Format:
    """Return the format of the tensor whose copies these are."""
    row, col = copies
    assert row or col
    return Format.of(row.format) if row else Format.of(col.format).transposed  # type: ignore[union-attr]


def _parts(copies: Copies) -> list[_Part]:
    (rowwise, columnwise), format = copies, format_of(copies)
    parts = []
    if rowwise is not None:
        parts += [_Part(rowwise.data, 0, 1), _Part(rowwise.scale, 0, format.block_rows)]
    if columnwise is not None:
        parts += [_Part(columnwise.data, 1, format.packed), _Part(columnwise.scale, 1, format.group)]
    present = [copy for copy in copies if copy is not None]
    for copy in present if format.hadamard else present[:1]:  # unrotated copies share one global_scale
        if copy.global_scale is not None:
            parts.append(_Part(copy.global_scale, 0, 0))
    return parts


def _assembled(copies: Copies, tensors: Iterable[Tensor]) -> Copies:
    """Return copies like these, made of `tensors` in the order of `_parts`."""
    rest, specs = list(tensors), [copy.format for copy in copies if copy is not None]
    global_scales: list[Tensor | None] = [*rest[2 * len(specs) :]] or [None]  # one per copy, or one for both
    codes = [
        Codes(rest[2 * i], rest[2 * i + 1], global_scales[min(i, len(global_scales) - 1)], spec)
        for i, spec in enumerate(specs)
    ]
    return codes[0] if copies[0] is not None else None, codes[-1] if copies[1] is not None else None


def row_unit(copies: Copies, rows: int) -> int:
    """Return the smallest number of rows such that cuts at its multiples split no block and no byte."""
    if in_slots(copies[1], rows):
        return max(rows, 1)  # rows cannot be cut anywhere
    return math.lcm(*(part.each for part in _parts(copies) if part.each))


def in_slots(columnwise: Codes | None, rows: int) -> bool:
    """Return whether the blocks of a column-wise copy restart at each group of rows, as `glu` and `permute` store
    them. Reading such a copy requires the groups."""
    if columnwise is None:
        return False
    f = Format.of(columnwise.format)
    return f.group != 0 and columnwise.scale.shape[1] != -(-f.length(rows) // f.group)


def cut_rows(copies: Copies, start: int, stop: int) -> Copies:
    """Return rows `start` to `stop` (exclusive) as views. Both are multiples of `row_unit`, except that `stop` may be
    the end. Scales of the whole tensor or of a column are shared."""
    stops = stop, format_of(copies).length(stop, "columnwise")
    cut = [
        tensor.narrow(dim, start // each, -(-stops[dim] // each) - start // each) if each else tensor
        for tensor, dim, each in _parts(copies)
    ]
    return _assembled(copies, cut)


# ---- shards of ranks, as FSDP2 gathers them -------------------------------------------------------------


def shard_bytes(copies: Copies) -> list[Tensor]:
    """Return the tensors that ranks exchange: the parts of the copies that have rows, contiguous with rows as the first
    dimension; 8-bit types as uint8."""
    sent = []
    for tensor, dim, each in _parts(copies):
        if each:
            tensor = (tensor if dim == 0 else tensor.t()).contiguous()
            sent.append(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)
    return sent


def join_shards(
    shard: Copies, gathered: Sequence[Tensor], rows: int, cols: int, into: Copies | None = None
) -> tuple[Copies, list[Tensor]]:
    """Return (copies, allocated): the [rows, cols] copies made of the gathered `shard_bytes` of all ranks, and the
    tensors allocated for them. Parts whose memory layout differs are copied; the others are views.

    `into` takes the copies that an earlier call returned and refills them. The memory of the gathered and of the
    allocated tensors may have been freed in between.
    """
    sides = {"rowwise": shard[0] is not None, "columnwise": shard[1] is not None}
    template = allocate_copies(format_of(shard), rows, cols, torch.device("meta"), **sides)
    layouts = [part.tensor for part in _parts(template)]
    remaining = iter(gathered)
    filled: list[Tensor | None] = [None] * len(layouts)
    if into is not None:
        filled = [part.tensor for part in _parts(into)]
    allocated: list[Tensor] = []
    for i, (part, like) in enumerate(zip(_parts(shard), layouts, strict=True)):
        if part.each:
            source = next(remaining).view(part.tensor.dtype)
            source = source if part.dim == 0 else source.t()
        else:
            source = part.tensor
        target = filled[i]
        if target is None and part.each and source.stride() != like.stride():
            memory = torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8, device=source.device)
            target = memory.view(like.dtype).as_strided(like.shape, like.stride())
            allocated.append(memory)
        if target is None:
            filled[i] = source
        elif target.data_ptr() != source.data_ptr():
            storage = target.untyped_storage()
            if target.numel() * target.itemsize != storage.nbytes():  # padding must be zero
                torch.empty(0, dtype=torch.uint8, device=target.device).set_(storage).zero_()
            # Refilling restores the values that autograd saved for backward, so it is no version change.
            with _unsafe_preserve_version_counter(target):
                filled[i] = target.copy_(source)
    return _assembled(shard, filled), allocated  # type: ignore[arg-type]
