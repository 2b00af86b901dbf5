"""Table of chunks through which one launch reaches the elements of many tensors.

A tensor is cut into chunks of `CHUNK` consecutive elements. A table in device memory holds the address and the length
of every chunk, for all tensors of the device; it is cached as long as the tensors stay in place. Chunks are 16-byte
aligned: if a tensor is not, the few elements before its first aligned address form a chunk of their own. So all loads
except those at the ends of a tensor are 128 bits wide.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gradients import check_strided

CHUNK = 65536  # elements per program: 256 KiB of fp32; the table takes 1/16384 of the tensors' bytes
TABLES = 64  # cache size, for the tensor lists that a training loop reuses


class Segment(NamedTuple):
    """Range of chunks of one dtype."""

    dtype: torch.dtype
    first: int
    chunks: int


class Table(NamedTuple):
    """Addresses of the chunks of a list of tensors, and what launches over them need."""

    entries: Tensor  # [chunks, 2] int64 on the device: address and number of elements
    segments: tuple[Segment, ...]
    chunks: int
    overlapping: bool  # two of the tensors share memory
    spans: tuple[list[int], list[int]]  # (begins, ends) in bytes, sorted by begin
    host: Tensor  # source of `entries`; a captured graph that contains the copy reads it again
    stream: Any  # stream that copied `entries`, followed by the event after the copy; None on a CPU
    ready: Any


_tables: OrderedDict[Any, Table] = OrderedDict()
_latest: Table | None = None  # the table of the last call
_tables_lock = threading.Lock()
_captured: dict[int, Table] = {}  # tables that captured graphs read


def is_dense(t: Tensor) -> bool:
    """Return whether the elements fill one range of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def table_of(tensors: list[Tensor]) -> tuple[Table, list[Tensor]]:
    """Return (table, reached): the table, and the tensors its addresses point into, which are the arguments or dense
    copies of non-dense ones."""
    device, originals = tensors[0].device, tensors
    try:
        if not all(map(Tensor.is_contiguous, tensors)):
            tensors = [t if t.numel() == 0 or is_dense(t) else t.contiguous() for t in tensors]
        # A table depends on nothing but its key, so it stays valid for new tensors at freed addresses.
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
            copied = any(a is not b for a, b in zip(tensors, originals, strict=True))
            if not (copied or capturing or device.type == "meta"):
                _tables[key] = table
                if len(_tables) > TABLES:
                    _tables.popitem(last=False)
        elif table is not _latest:  # skip the latest: hashing a key of many addresses takes time
            _tables.move_to_end(key)
        _latest = table
    if capturing:  # the graph reads it until the process ends
        _captured[id(table)] = table
    elif table.stream is not None:
        stream = torch.cuda.current_stream(device)
        if stream != table.stream:
            stream.wait_event(table.ready)
    return table, tensors


def _build(
    device: torch.device, addresses: tuple[int, ...], sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Table:
    chunk_rows: list[Tensor] = []
    segments = []
    first = 0
    for dtype in dict.fromkeys(dtypes):
        begin = first
        for address, size, element_dtype in zip(addresses, sizes, dtypes, strict=True):
            if element_dtype is not dtype or size == 0:
                continue
            # Elements before the first 16-byte boundary. Meta tensors have no addresses, hence no table.
            before = min(-address % 16 // dtype.itemsize, size)
            chunks = -(-(size - before) // CHUNK)
            first += chunks + bool(before)
            if device.type == "meta":
                continue
            if before:
                chunk_rows.append(torch.tensor([[address, before]], device="cpu"))
            starts = torch.arange(chunks, device="cpu") * CHUNK
            chunk_addresses = address + (starts + before) * dtype.itemsize
            chunk_rows.append(torch.stack([chunk_addresses, (size - before - starts).clamp(max=CHUNK)], 1))
        if first > begin:
            segments.append(Segment(dtype, begin, first - begin))
    host = torch.cat(chunk_rows) if chunk_rows else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
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
    """Return (begins, ends): the address range of each dense tensor, end exclusive, sorted by begin."""
    pairs = zip(addresses, sizes, dtypes, strict=True)
    ranges = sorted((address, address + size * dtype.itemsize) for address, size, dtype in pairs if size)
    return [begin for begin, _ in ranges], [end for _, end in ranges]


def _do_overlap(begins: list[int], ends: list[int]) -> bool:
    """Return whether two dense tensors share memory."""
    return any(address < end for address, end in zip(begins[1:], ends, strict=False))


def check_writable(tensors: list[Tensor]) -> None:
    """Raise ValueError if an element would be scaled twice. Slices may share memory, because copies are scaled."""
    check_strided(tensors)
    for device in {t.device for t in tensors}:
        if device.type != "meta":
            on_device = [t for t in tensors if t.device == device]
            refuse_expanded(on_device)
            dense = [t for t in on_device if is_dense(t)]
            layouts = ([t.data_ptr() for t in dense], [t.numel() for t in dense], [t.dtype for t in dense])
            if _do_overlap(*_spans(*layouts)):
                raise shared_memory()


def refuse_expanded(tensors: list[Tensor]) -> None:
    """Raise ValueError for expanded tensors, in which several elements share memory."""
    for t in tensors:
        if not t.is_contiguous() and torch._debug_has_internal_overlap(t) == 1:
            raise ValueError(
                "clip_grads_ cannot write to an expanded tensor, in which several elements share memory: clip a "
                "contiguous() copy of it"
            )


def shared_memory() -> ValueError:
    """Return the error for tensors that share memory."""
    return ValueError(
        "clip_grads_ would scale an element twice, because two tensors share memory: pass each gradient once"
    )
