"""`Codes`, a quantized copy of a matrix: how it lies in memory, cutting rows out of it, and joining shards of rows.

Row-wise codes are [M, K] without padding. Column-wise codes are [K, M] with rows padded to 16 bytes, so that a kernel
stores 128 bits at a time and a GEMM can read them by bulk copies whatever M is. Scales of 1x128 lie column by column,
with M (in the column-wise copy K) contiguous and padded to a multiple of 4; other scales lie row by row.
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
    """One quantized copy of a matrix: codes, scales, and the format by which to read them.

    Quantizers make it, a `QTensor` holds one or two, and ops take it among their arguments. A column-wise copy is the
    row-wise copy of the transpose, and its format that of the transpose.
    """

    data: Maybe
    scale: Maybe
    global_scale: Tensor | None = None  # nvfp4's, one for the tensor
    format: MaybeStr = None  # type: ignore[assignment]  # the spec of the format in which the copy is a row-wise one

    def map(self, function: Callable[[Tensor], Tensor]) -> Codes:
        """Apply a function to each tensor."""
        data, scale, global_scale, format = self
        last = None if global_scale is None else function(global_scale)
        return Codes(function(data), function(scale), last, format)


# Among the arguments of an op: the tensor beside it is not quantized.
PLAIN = Codes(None, None)  # type: ignore[arg-type]

Copies = tuple[Codes | None, Codes | None]  # row-wise, column-wise


# ---- room -----------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """How a tensor of a copy lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    padded: int = 0  # numbers in memory, if there are more than the shape has
    zeroed: bool = False  # the pads are zero

    def allocate(self, device: torch.device) -> Tensor:
        if not self.padded:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        allocate = torch.zeros if self.zeroed else torch.empty
        return allocate(self.padded, dtype=self.dtype, device=device).as_strided(self.shape, self.stride)


def allocate_parts(
    spec: str, rows: int, cols: int, device: torch.device, *, rowwise: bool, columnwise: bool
) -> list[Tensor | None]:
    """Room for the copies of a [rows, cols] tensor in a format: codes and scales of the row-wise copy, codes and scales
    of the column-wise one, nvfp4's global_scale, and one for the column-wise copy alone if a copy is rotated; None for
    what there is not."""
    # The sizes of a traced call may be symbols, which no cache takes.
    find = _known_rooms if type(rows) is int and type(cols) is int else _rooms
    return [
        None if room is None else room.allocate(device)
        for room in find(spec, rows, cols, rowwise, columnwise)
    ]


def _rooms(spec: str, rows: int, cols: int, rowwise: bool, columnwise: bool) -> tuple[Room | None, ...]:
    """How the parts that `allocate_parts` makes lie in memory."""
    format = Format.of(spec)
    dtype = format.number.dtype
    data = scale = data_t = scale_t = last = last_t = None
    if rowwise:
        _, width = format.data_shape(rows, format.length(cols))
        data, scale = Room((rows, width), (width, 1), dtype), scale_room(format, rows, cols)
    if columnwise:
        _, width = format.data_shape(cols, format.length(rows, "columnwise"))
        step = -(-width // 16) * 16
        data_t = Room((cols, width), (step, 1), dtype, cols * step if step > width else 0)
        scale_t = scale_room(format, cols, rows)
    if format.stored.block == "nvfp4":
        apart = format.hadamard is not None
        last = Room((), (), torch.float32) if rowwise or not apart else None
        last_t = Room((), (), torch.float32) if columnwise and apart else None
    return data, scale, data_t, scale_t, last, last_t


_known_rooms = remembered(_rooms)


def scale_room(format: Format, rows: int, cols: int) -> Room:
    """That of the scales of a [rows, cols] copy."""
    height, width = format.scale_shape(rows, cols)
    if format.block != "1x128":
        return Room((height, width), (width, 1), format.scale_dtype)
    padded = -(-height // 4) * 4
    pads = padded * width if padded > height else 0
    return Room((height, width), (1, padded), format.scale_dtype, pads, zeroed=True)


def allocate_copies(
    format: Format, rows: int, cols: int, device: torch.device, *, rowwise: bool, columnwise: bool
) -> Copies:
    """Room for the copies of a [rows, cols] tensor that are asked for."""
    spec = format.spec
    data, scale, data_t, scale_t, last, last_t = allocate_parts(
        spec, rows, cols, device, rowwise=rowwise, columnwise=columnwise
    )
    row = None if data is None or scale is None else Codes(data, scale, last, spec)
    if data_t is None or scale_t is None:
        return row, None
    return row, Codes(data_t, scale_t, last if last_t is None else last_t, transposed_spec(spec))


# ---- what a reader of codes relies on -------------------------------------------------------------------


def check_codes(name: str, codes: Codes, rows: int, length: int, *, blocks: int | None = None) -> None:
    """Raise an error unless the codes are `PLAIN`, or those of `rows` rows of `length` elements in their format, alone
    or one such matrix for each group. `blocks`: how many scales a row has, if its blocks do not simply follow each
    other. Every op that reads codes calls this: misread bytes never become a result."""
    data, scale, global_scale, spec = codes
    if data is None or scale is None or spec is None:
        if data is not None or scale is not None or global_scale is not None:
            raise ValueError(f"{name} has codes, scales or a format without the others")
        if spec is not None:
            raise ValueError(f"{name} has the format {spec} and no codes")
        return
    shapes = (*data.shape[-2:], *scale.shape[-2:], rows, length, 0 if blocks is None else blocks)
    if any(type(size) is not int for size in shapes):  # symbols of a traced call, which no cache takes
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
    """Return what is wrong with codes that should be of a format, or None."""
    f = Format.of(spec)
    data_shape, scale_shape, (rows, length, blocks) = shapes[:2], shapes[2:4], shapes[4:]
    stored = f.length(length)
    wanted, wanted_scale = f.data_shape(rows, stored), f.scale_shape(rows, stored)
    if has_blocks:
        wanted_scale = (wanted_scale[0], blocks)
    if data_dtype != f.number.dtype:
        return f"its codes are {data_dtype} where {f.number.dtype} is meant"
    if scale_dtype != f.scale_dtype:
        return f"its scales are {scale_dtype} where {f.scale_dtype} is meant"
    if data_shape != wanted:
        return f"its codes have the shape {data_shape} where {wanted} is meant"
    if scale_shape != wanted_scale:
        return f"its scales have the shape {scale_shape} where {wanted_scale} is meant"
    if has_global_scale != (f.stored.block == "nvfp4"):
        return f"its global_scale is {'left over' if has_global_scale else 'missing'}"
    return None


# ---- rows -----------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A tensor of a copy, and where it has the rows of [M, K]: each index of its dimension `dim` belongs to `each`
    rows. If `each` is 0, all of it belongs to all rows."""

    tensor: Tensor
    dim: int
    each: int


def format_of(copies: Copies) -> Format:
    """Return the format of the tensor that has these copies."""
    row, col = copies
    assert row or col
    return Format.of(row.format) if row else Format.of(col.format).transposed  # type: ignore[union-attr]


def _parts(copies: Copies) -> list[_Part]:
    (rowwise, columnwise), format = copies, format_of(copies)
    found = []
    if rowwise is not None:
        found += [_Part(rowwise.data, 0, 1), _Part(rowwise.scale, 0, format.block_rows)]
    if columnwise is not None:
        found += [_Part(columnwise.data, 1, format.packed), _Part(columnwise.scale, 1, format.group)]
    held = [copy for copy in copies if copy is not None]
    for copy in held if format.hadamard else held[:1]:  # otherwise both have one global_scale
        if copy.global_scale is not None:
            found.append(_Part(copy.global_scale, 0, 0))
    return found


def _assembled(copies: Copies, tensors: Iterable[Tensor]) -> Copies:
    """Copies with the same members as these, made of tensors in the order of `_parts`."""
    rest, specs = list(tensors), [copy.format for copy in copies if copy is not None]
    last: list[Tensor | None] = [*rest[2 * len(specs) :]] or [None]  # of each copy, or one for both
    made = [
        Codes(rest[2 * i], rest[2 * i + 1], last[min(i, len(last) - 1)], spec) for i, spec in enumerate(specs)
    ]
    return made[0] if copies[0] is not None else None, made[-1] if copies[1] is not None else None


def row_unit(copies: Copies, rows: int) -> int:
    """The smallest number of rows such that cuts at its multiples split no block and no byte of these copies."""
    if in_slots(copies[1], rows):
        return max(rows, 1)  # rows cannot be cut anywhere
    return math.lcm(*(part.each for part in _parts(copies) if part.each))


def in_slots(columnwise: Codes | None, rows: int) -> bool:
    """Return whether the blocks of a column-wise copy begin anew with each group of rows, as `glu` and `permute` make
    it, rather than every so many rows: only who knows the groups can read it."""
    if columnwise is None:
        return False
    f = Format.of(columnwise.format)
    return f.group != 0 and columnwise.scale.shape[1] != -(-f.length(rows) // f.group)


def cut_rows(copies: Copies, start: int, stop: int) -> Copies:
    """The rows from `start` up to `stop`, as views. Both are multiples of `row_unit`, except that `stop` may be the
    end. A scale of the tensor or of a column is the same for the cut rows."""
    end = stop, format_of(copies).length(stop, "columnwise")
    cut = [
        tensor.narrow(dim, start // each, -(-end[dim] // each) - start // each) if each else tensor
        for tensor, dim, each in _parts(copies)
    ]
    return _assembled(copies, cut)


# ---- shards of ranks, as FSDP2 gathers them -------------------------------------------------------------


def shard_bytes(copies: Copies) -> list[Tensor]:
    """The tensors that ranks exchange: the parts of copies that have rows, with rows as the first dimension and
    contiguous; 8-bit types as uint8."""
    sent = []
    for tensor, dim, each in _parts(copies):
        if each:
            tensor = (tensor if dim == 0 else tensor.t()).contiguous()
            sent.append(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)
    return sent


def join_shards(
    shard: Copies, gathered: Sequence[Tensor], rows: int, cols: int, into: Copies | None = None
) -> tuple[Copies, list[Tensor]]:
    """(copies, allocated): the copies of [rows, cols] from the gathered `shard_bytes` of all ranks, and the tensors
    that had to be allocated for them. Parts with another memory layout are copied; the others are views.

    With `into`, the copies that an earlier call returned are filled again. The memory of the gathered tensors and of
    the allocated ones may have been freed in between.
    """
    wanted = {"rowwise": shard[0] is not None, "columnwise": shard[1] is not None}
    on_meta = allocate_copies(format_of(shard), rows, cols, torch.device("meta"), **wanted)
    meta = [part.tensor for part in _parts(on_meta)]
    rest = iter(gathered)
    filled: list[Tensor | None] = [None] * len(meta)
    if into is not None:
        filled = [part.tensor for part in _parts(into)]
    allocated: list[Tensor] = []
    for i, (part, like) in enumerate(zip(_parts(shard), meta, strict=True)):
        if part.each:
            found = next(rest).view(part.tensor.dtype)
            found = found if part.dim == 0 else found.t()
        else:
            found = part.tensor
        target = filled[i]
        if target is None and part.each and found.stride() != like.stride():
            room = torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8, device=found.device)
            target = room.view(like.dtype).as_strided(like.shape, like.stride())
            allocated.append(room)
        if target is None:
            filled[i] = found
        elif target.data_ptr() != found.data_ptr():
            storage = target.untyped_storage()
            if target.numel() * target.itemsize != storage.nbytes():  # pads are zero
                torch.empty(0, dtype=torch.uint8, device=target.device).set_(storage).zero_()
            # What autograd has saved for backward is the same numbers again, and not a change of them.
            with _unsafe_preserve_version_counter(target):
                filled[i] = target.copy_(found)
    return _assembled(shard, filled), allocated  # type: ignore[arg-type]
