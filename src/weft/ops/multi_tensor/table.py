"""The table of chunks, by which one launch reaches the elements of many tensors.

A tensor is cut into chunks of `CHUNK` neighbours. A table in the device's memory holds the address and the length of
every chunk, for all tensors of the device; it is made once and found again as long as the tensors stay where they are.
A chunk begins at a multiple of 16 bytes. If a tensor does not, the few elements before the first such address are a
chunk of their own. So all loads except those at the ends of a tensor are 128 bits wide.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gradients import check_strided

CHUNK = 65536  # elements of a program: 256 KiB of fp32, and a table of 1/16384 of the tensors' bytes
TABLES = 64  # how many are kept, for the lists of tensors that a training loop uses again


class Segment(NamedTuple):
    """The chunks of the tensors of one dtype."""

    dtype: torch.dtype
    first: int
    chunks: int


class Table(NamedTuple):
    """Where the elements of a list of tensors lie."""

    entries: Tensor  # [chunks, 2] int64 on the device: address and number of elements
    segments: tuple[Segment, ...]
    chunks: int
    overlapping: bool  # two of the tensors share memory
    spans: tuple[list[int], list[int]]  # (begins, ends) in bytes, sorted by begin
    host: Tensor  # what `entries` was copied from; a captured graph that contains the copy reads it again
    stream: Any  # the stream that copied `entries`, and next the event after the copy; None on a CPU
    ready: Any


_tables: OrderedDict[Any, Table] = OrderedDict()
_latest: Table | None = None  # the table of the last call
_tables_lock = threading.Lock()
_held: dict[int, Table] = {}  # tables that captured graphs read


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def table_of(tensors: list[Tensor]) -> tuple[Table, list[Tensor]]:
    """(table, reached): the table, and the tensors that its addresses are of: those given, or dense copies of tensors
    with gaps."""
    device, given = tensors[0].device, tensors
    try:
        if not all(map(Tensor.is_contiguous, tensors)):
            tensors = [t if t.numel() == 0 or is_dense(t) else t.contiguous() for t in tensors]
        # The key has all that a table depends on: if tensors are freed, the table is right for others in their memory.
        key = (
            device,
            tuple(map(Tensor.data_ptr, tensors)),
            tuple(map(Tensor.numel, tensors)),
            tuple([t.dtype for t in tensors]),
        )
    except RuntimeError:  # a sparse tensor has no address
        check_strided(tensors)
        raise
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    global _latest
    with _tables_lock:
        table = _tables.get(key)
        if table is None:
            table = _build(*key)
            copied = any(a is not b for a, b in zip(tensors, given, strict=True))
            if not (copied or capturing or device.type == "meta"):
                _tables[key] = table
                if len(_tables) > TABLES:
                    _tables.popitem(last=False)
        elif table is not _latest:  # skipped if it is the latest: hashing a key of many addresses takes time
            _tables.move_to_end(key)
        _latest = table
    if capturing:  # the graph reads it for as long as the process lives
        _held[id(table)] = table
    elif table.stream is not None:
        stream = torch.cuda.current_stream(device)
        if stream != table.stream:
            stream.wait_event(table.ready)
    return table, tensors


def _build(
    device: torch.device, addresses: tuple[int, ...], sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Table:
    pieces: list[Tensor] = []
    segments = []
    first = 0
    for dtype in dict.fromkeys(dtypes):
        begin = first
        for address, size, its in zip(addresses, sizes, dtypes, strict=True):
            if its is not dtype or size == 0:
                continue
            # Elements before the first multiple of 16 bytes; on the meta device there are none, and no table.
            before = min(-address % 16 // dtype.itemsize, size)
            chunks = -(-(size - before) // CHUNK)
            first += chunks + bool(before)
            if device.type == "meta":
                continue
            if before:
                pieces.append(torch.tensor([[address, before]], device="cpu"))
            starts = torch.arange(chunks, device="cpu") * CHUNK
            places = address + (starts + before) * dtype.itemsize
            pieces.append(torch.stack([places, (size - before - starts).clamp(max=CHUNK)], 1))
        if first > begin:
            segments.append(Segment(dtype, begin, first - begin))
    host = torch.cat(pieces) if pieces else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    spans = _spans(addresses, sizes, dtypes)
    overlapping = device.type != "meta" and _do_overlap(*spans)
    entries, stream, ready = host, None, None
    if device.type == "meta":
        entries = torch.empty((first, 2), dtype=torch.int64, device=device)
    elif device.type != "cpu":
        host = host.pin_memory()
        entries = host.to(device, non_blocking=True)
        stream, ready = torch.cuda.current_stream(device), torch.cuda.Event()
        if not torch.cuda.is_current_stream_capturing():
            ready.record(stream)
    return Table(entries, tuple(segments), first, overlapping, spans, host, stream, ready)


def _spans(
    addresses: Sequence[int], sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> tuple[list[int], list[int]]:
    """(begins, ends): the first byte of each dense tensor and the one after its last, sorted by the first."""
    pairs = zip(addresses, sizes, dtypes, strict=True)
    found = sorted((address, address + size * dtype.itemsize) for address, size, dtype in pairs if size)
    return [begin for begin, _ in found], [end for _, end in found]


def _do_overlap(begins: list[int], ends: list[int]) -> bool:
    """Whether two dense tensors share memory."""
    return any(address < end for address, end in zip(begins[1:], ends, strict=False))


def check_writable(tensors: list[Tensor]) -> None:
    """Refuse tensors in which a number would be scaled twice. Slices may share memory: they are scaled in copies."""
    check_strided(tensors)
    for device in {t.device for t in tensors}:
        if device.type != "meta":
            here = [t for t in tensors if t.device == device]
            refuse_expanded(here)
            dense = [t for t in here if is_dense(t)]
            places = ([t.data_ptr() for t in dense], [t.numel() for t in dense], [t.dtype for t in dense])
            if _do_overlap(*_spans(*places)):
                raise shared_memory()


def refuse_expanded(tensors: list[Tensor]) -> None:
    """Refuse expanded tensors, in which several elements share memory."""
    for t in tensors:
        if not t.is_contiguous() and torch._debug_has_internal_overlap(t) == 1:
            raise ValueError(
                "clip_grads_ writes to its tensors, but one of them was expanded, so that several of its elements "
                "share memory: clip a contiguous() copy of it"
            )


def shared_memory() -> ValueError:
    """The error for tensors that share memory."""
    return ValueError(
        "clip_grads_ would scale a number twice: two of the tensors share memory. Give each gradient once"
    )
