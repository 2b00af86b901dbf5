"""Statistics of many tensors at once: the norm of all gradients, clipping by it, zeros, numbers that are not finite.

    norm_p = (sum over tensors, sum over elements of |x|^p)^(1/p)          p = 1, 2, or the largest |x| for p = inf
    x *= c,  c = min(1, max_norm / (norm + 1e-6))                          rounded once to x's dtype
    zeros = number of elements with x == 0                                 -0.0 is one; NaN and subnormals are not
    nonfinite = whether any x is infinite or NaN

A tensor is cut into chunks of `CHUNK` neighbours. A table in the device's memory holds the address and the length of
every chunk, for all tensors of the device; it is made once and found again for as long as the tensors stay where they
are. One launch for each dtype gives a partial result for each chunk, in fp32 or int32; one more launch puts them
together. How the numbers are added depends on neither the device's size nor the number of threads:

- in a chunk, each lane adds every TILE-th number in fp32, and a tree adds the lanes;
- a partial 2-norm is a norm, not its square. Where the sum of squares is so small or so large that squares may have
  vanished or overflowed, and the chunk is not all zeros, it is read again and x scaled by 2^90 or 2^-80;
- partial norms are put together as multiples of a power of two near the largest, in fp32 with the rounding errors added
  up beside the sum, in the order of the table: dtypes as they first come in the list, then tensors.

A chunk begins at a multiple of 16 bytes; of a tensor that does not, the few elements before are a chunk of their own.
So all loads but those of a tensor's ends are 128 bits wide.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..language import tl, triton
from ..runtime import Launch, capabilities_of, define_flat_op, is_distributed, kernel
from .gradients import Kind, Tensors, check_strided, kinds_of, mark_clipped, memory_of, numbers_of

CHUNK = 65536  # elements of a program: 256 KiB of fp32, and a table of 1/16384 of the tensors
TABLES = 64  # that are kept: the lists of tensors that a training loop comes back to

_NORMS = {1.0: "norm1", 2.0: "norm2", math.inf: "norminf"}
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


# ---- reference ------------------------------------------------------------------------------------------


def multi_tensor_reduce_reference(tensors: list[Tensor], what: str) -> list[Tensor]:
    """The definition, in float64: a number for `what` of norm1, norm2, norminf, zeros, nonfinite."""
    check_strided(tensors)
    total = _allocate_reduce(tensors, what)[0]
    parts = [t for t in tensors if t.numel()]
    if not parts:
        return [total.zero_()]
    if what == "zeros":
        return [torch.stack([t.numel() - t.count_nonzero() for t in parts]).sum()]
    if what == "nonfinite":
        return [torch.stack([~t.isfinite().all() for t in parts]).any()]
    order = {"norm1": 1.0, "norm2": 2.0, "norminf": math.inf}[what]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in parts]
    return [torch.linalg.vector_norm(torch.stack(norms), order).to(total.dtype)]


def multi_tensor_clip_reference(tensors: list[Tensor], norm: Tensor, max_norm: float) -> list[Tensor]:
    """In place; a coefficient of 1 changes nothing."""
    _check_writable(tensors)
    coefficient = torch.full_like(norm, max_norm).div(norm + 1e-6).clamp(max=1.0)
    # Numbers of slices that share memory are read before they are written, so that each is scaled once.
    sources = [t if _is_dense(t) else t.contiguous() for t in tensors]
    for t, source in zip(tensors, sources, strict=True):
        t.copy_(source.to(torch.promote_types(t.dtype, norm.dtype)) * coefficient)
    return []


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _chunk(table_ptr, first):
    """Address and length of a program's chunk, and its place among all chunks."""
    chunk = tl.program_id(0).to(tl.int64) + first
    entry = table_ptr + 2 * chunk
    return tl.load(entry), tl.load(entry + 1), chunk


@triton.jit
def _add(x, sums, bits, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr):
    """Adds a tile to a program's sums, and to all bits that its numbers have. x: floats for a sum of them, else as
    integers."""
    if WHAT == "norm2":
        x = x.to(tl.float32)
        if scale is not None:
            x = x * scale
        elif EXPONENT != 0x7C00:  # squares of fp16 neither vanish nor overflow
            bits |= x.to(tl.int32, bitcast=True)
        sums += x * x
    elif WHAT == "norm1":
        sums += tl.abs(x.to(tl.float32))
    elif WHAT == "norminf":
        # As integers the magnitudes are ordered as the numbers are, and NaN comes last.
        sums = tl.maximum(sums, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    elif WHAT == "zeros":
        sums += ((x << 1) == 0).to(tl.int32)
    else:
        sums |= ((x & EXPONENT) == EXPONENT).to(tl.int32)
    return sums, bits


@triton.jit
def _over_chunk(start_ptr, count, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr, TILE: tl.constexpr):
    """The sums of each lane of a program over its chunk, [TILE]."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32 if WHAT == "norm2" or WHAT == "norm1" else tl.int32)
    bits = tl.zeros((TILE,), tl.int32)
    whole = (count // TILE) * TILE
    for begin in range(0, whole, TILE):
        # Where a chunk has a whole tile it begins at a multiple of 16 bytes.
        x = tl.load(tl.multiple_of(start_ptr + begin, 16) + lane)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    if whole < count:
        # What is not there is no zero where zeros are counted, and finite.
        OTHER: tl.constexpr = 1 if WHAT == "zeros" or WHAT == "nonfinite" else 0
        x = tl.load(start_ptr + whole + lane, mask=whole + lane < count, other=OTHER)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    return sums, bits


@kernel
def _multi_tensor_reduce_kernel(
    table_ptr,  # [chunks, 2]: address, length
    partial_ptr,  # [chunks]
    first,  # of the chunks of this dtype
    ELEMENT: tl.constexpr,  # what lies at the addresses: a float type, or an integer of as many bits
    EXPONENT: tl.constexpr,  # its exponent's bits
    WHAT: tl.constexpr,
    TILE: tl.constexpr,
):
    address, count, chunk = _chunk(table_ptr, first)
    start_ptr = address.to(tl.pointer_type(ELEMENT))
    sums, bits = _over_chunk(start_ptr, count, None, WHAT, EXPONENT, TILE)
    if WHAT == "norm2":
        squares = tl.sum(sums, axis=0)
        partial = tl.sqrt_rn(squares)
        if EXPONENT != 0x7C00:
            # Below 2^-80 every |x| is below 2^-40; squares that vanished from a larger sum do not show in it.
            small = squares < 8.271806125530277e-25
            if (small | (squares > 8.507059173023462e37)) & (tl.max(bits & 0x7FFFFFFF, axis=0) != 0):  # 2^126
                scale = tl.where(small, 1.2379400392853803e27, 8.271806125530277e-25)  # 2^90, 2^-80
                again, _ = _over_chunk(start_ptr, count, scale, WHAT, EXPONENT, TILE)
                up = tl.where(small, 8.077935669463161e-28, 1.2089258196146292e24)
                partial = tl.sqrt_rn(tl.sum(again, axis=0)) * up
    elif WHAT == "norminf":
        partial = tl.max(sums, axis=0).to(tl.float32, bitcast=True)
    elif WHAT == "nonfinite":
        partial = tl.max(sums, axis=0)
    else:
        partial = tl.sum(sums, axis=0)
    tl.store(partial_ptr + chunk, partial)


@triton.jit
def _norm_of_norms(partial_ptr, count, bits, WHAT: tl.constexpr, TILE: tl.constexpr):
    """The norm of partial norms that are all finite; bits: of the largest."""
    # Times 2^-e the largest lies in [1, 2), if it is not subnormal: no sum overflows.
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    lane = tl.arange(0, TILE)
    sums, lost = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for begin in range(0, count, TILE):
        term = tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0.0) * down
        if WHAT == "norm2":
            term = term * term
        sum_ = sums + term
        there = sum_ - sums
        lost += (sums - (sum_ - there)) + (term - there)  # what the addition rounded away (Knuth)
        sums = sum_
    total = tl.sum(sums, axis=0) + tl.sum(lost, axis=0)
    if WHAT == "norm2":
        total = tl.sqrt_rn(total)
    return total * up


@kernel
def _multi_tensor_total_kernel(
    partial_ptr,  # [count]
    total_ptr,  # one number
    count,
    WHAT: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.arange(0, TILE)
    if WHAT == "zeros":
        zeros = tl.zeros((TILE,), tl.int64)
        for begin in range(0, count, TILE):
            zeros += tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0)
        tl.store(total_ptr, tl.sum(zeros, axis=0))
    else:
        largest = tl.zeros((TILE,), tl.int32)
        for begin in range(0, count, TILE):
            partial = tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0)
            largest = tl.maximum(largest, partial.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        bits = tl.max(largest, axis=0)
        if WHAT == "nonfinite":
            tl.store(total_ptr, bits != 0)
        else:
            total = bits.to(tl.float32, bitcast=True)
            if WHAT == "norm1" or WHAT == "norm2":  # noqa: SIM102
                if bits < 0x7F800000:  # else the largest is infinite or NaN, and so is the norm
                    total = _norm_of_norms(partial_ptr, count, bits, WHAT, TILE)
            tl.store(total_ptr, total)


@kernel
def _multi_tensor_clip_kernel(
    table_ptr,  # [chunks, 2]
    norm_ptr,  # one number
    first,
    max_norm,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    coefficient = tl.div_rn(max_norm, tl.load(norm_ptr) + 1e-6)
    if not (coefficient >= 1.0):  # NaN goes on
        address, count, _ = _chunk(table_ptr, first)
        start_ptr = address.to(tl.pointer_type(ELEMENT))
        lane = tl.arange(0, TILE)
        whole = (count // TILE) * TILE
        for begin in range(0, whole, TILE):
            tile_ptr = tl.multiple_of(start_ptr + begin, 16) + lane  # [TILE]
            tl.store(tile_ptr, (tl.load(tile_ptr).to(tl.float32) * coefficient).to(ELEMENT))
        if whole < count:
            tile_ptr, mask = start_ptr + whole + lane, whole + lane < count  # [TILE]
            x = tl.load(tile_ptr, mask=mask, other=0.0).to(tl.float32)
            tl.store(tile_ptr, (x * coefficient).to(ELEMENT), mask=mask)


# ---- the table of chunks --------------------------------------------------------------------------------


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
    spans: tuple[list[int], list[int]]  # where they begin, in that order, and where they end
    host: Tensor  # what `entries` was copied from; a graph that holds the copy reads it again
    stream: Any  # the one that made the copy, and the event after it; None on a CPU
    ready: Any


_tables: OrderedDict[Any, Table] = OrderedDict()
_tables_lock = threading.Lock()
_held: dict[int, Table] = {}  # tables that captured graphs read


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each with a place of its own, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _table_of(tensors: list[Tensor]) -> tuple[Table, list[Tensor]]:
    """The table, and the tensors that it reaches: those given, or dense copies of those that have gaps."""
    device, given = tensors[0].device, tensors
    try:
        if not all(map(Tensor.is_contiguous, tensors)):
            tensors = [t if t.numel() == 0 or _is_dense(t) else t.contiguous() for t in tensors]
        # All that a table depends on: one whose tensors are gone is right for others in their place.
        key = (
            device,
            tuple(map(Tensor.data_ptr, tensors)),
            tuple(map(Tensor.numel, tensors)),
            tuple([t.dtype for t in tensors]),
        )
    except RuntimeError:  # a sparse tensor has no address
        check_strided(tensors)
        raise
    kept = tensors is given or all(a is b for a, b in zip(tensors, given, strict=True))
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _tables_lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
        else:
            table = _build(*key)
            if kept and not capturing and device.type != "meta":
                _tables[key] = table
                if len(_tables) > TABLES:
                    _tables.popitem(last=False)
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
    overlapping = device.type != "meta" and _overlap(*spans)
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
    """The first byte of each dense tensor, and the one after its last, in the order of the first ones."""
    pairs = zip(addresses, sizes, dtypes, strict=True)
    found = sorted((address, address + size * dtype.itemsize) for address, size, dtype in pairs if size)
    return [begin for begin, _ in found], [end for _, end in found]


def _overlap(begins: list[int], ends: list[int]) -> bool:
    """Whether two dense tensors share memory."""
    return any(address < end for address, end in zip(begins[1:], ends, strict=False))


def _check_writable(tensors: list[Tensor]) -> None:
    """Refuse tensors in which a number would be scaled twice. Slices may share memory: they are scaled in copies."""
    check_strided(tensors)
    for device in {t.device for t in tensors}:
        if device.type != "meta":
            here = [t for t in tensors if t.device == device]
            _refuse_expanded(here)
            dense = [t for t in here if _is_dense(t)]
            places = ([t.data_ptr() for t in dense], [t.numel() for t in dense], [t.dtype for t in dense])
            if _overlap(*_spans(*places)):
                raise _shared()


def _refuse_expanded(tensors: list[Tensor]) -> None:
    for t in tensors:
        if not t.is_contiguous() and torch._debug_has_internal_overlap(t) == 1:
            raise ValueError(
                "clip_grads_ writes to its tensors, but one of them was expanded, so that several of its elements "
                "are one in memory: clip a contiguous() copy of it"
            )


def _shared() -> ValueError:
    return ValueError(
        "clip_grads_ would scale a number twice: two of the tensors share memory. Give each gradient once"
    )


# ---- launch ---------------------------------------------------------------------------------------------

_ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def _tile(device: torch.device) -> int:
    """Numbers that a program reads at a time: 16 to each of the 256 threads of an NVIDIA GPU."""
    return 512 if capabilities_of(device).backend == "cpu" else 4096


def _allocate_reduce(tensors: list[Tensor], what: str) -> list[Tensor]:
    dtype = {"zeros": torch.int64, "nonfinite": torch.bool}.get(what)
    if dtype is None:
        dtype = torch.float64 if tensors and tensors[0].dtype is torch.float64 else torch.float32
    return [torch.empty((), dtype=dtype, device=tensors[0].device if tensors else None)]


def _launch_reduce(outputs: list[Tensor], tensors: list[Tensor], what: str) -> None:
    table, reached = _table_of(tensors)
    device, tile = table.entries.device, _tile(reached[0].device)
    as_bits = what in ("zeros", "nonfinite")
    partial = torch.empty(table.chunks, dtype=torch.int32 if as_bits else torch.float32, device=device)
    for dtype, first, chunks in table.segments:
        name = f"int{8 * dtype.itemsize}" if as_bits else _ELEMENTS[dtype]
        launch = Launch.of(
            _multi_tensor_reduce_kernel,
            num_warps=8,
            ELEMENT=getattr(tl, name),
            EXPONENT=_EXPONENTS[dtype],
            WHAT=what,
            TILE=tile,
        )
        launch((chunks, 1, 1), (table.entries, partial), (first,), reached=reached)
    total = Launch.of(_multi_tensor_total_kernel, num_warps=8, WHAT=what, TILE=tile)
    total((1, 1, 1), (partial, outputs[0]), (table.chunks,))


def _allocate_clip(tensors: list[Tensor], norm: Tensor, max_norm: float) -> list[Tensor]:
    return []


def _launch_clip(outputs: list[Tensor], tensors: list[Tensor], norm: Tensor, max_norm: float) -> None:
    table, reached = _table_of(tensors)
    if reached is not tensors:  # one of them is not contiguous
        _refuse_expanded(tensors)
    if table.overlapping:
        raise _shared()
    begins, ends = table.spans
    place = bisect_right(begins, norm.data_ptr()) - 1
    if place >= 0 and norm.data_ptr() < ends[place]:
        norm = norm.clone()  # some programs would read it when others have scaled it
    tile = _tile(reached[0].device)
    for dtype, first, chunks in table.segments:
        element = getattr(tl, _ELEMENTS[dtype])
        launch = Launch.of(_multi_tensor_clip_kernel, num_warps=8, ELEMENT=element, TILE=tile)
        launch((chunks, 1, 1), (table.entries, norm), (first,), (max_norm,), reached=reached)
    for t, dense in zip(tensors, reached, strict=True):
        if dense is not t:
            t.copy_(dense)


# ---- registration ---------------------------------------------------------------------------------------

multi_tensor_reduce_op = define_flat_op(
    "multi_tensor_reduce(Tensor[] tensors, str what) -> Tensor[]",
    allocate=_allocate_reduce,
    launch=_launch_reduce,
    reference=multi_tensor_reduce_reference,
    variants=4,  # one for each dtype that a list may have, and one that puts all together
)

multi_tensor_clip_op = define_flat_op(
    "multi_tensor_clip(Tensor(a!)[] tensors, Tensor norm, float max_norm) -> ()",
    allocate=_allocate_clip,
    launch=_launch_clip,
    reference=multi_tensor_clip_reference,
    variants=6,  # one for each dtype; the norm is a number of its own, or one of many
)


# ---- public functions -----------------------------------------------------------------------------------


def grad_norm(
    tensors: Tensors,
    norm_type: float | str = 2.0,
    *,
    groups: Sequence[Any] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """The p-norm of all numbers of all gradients together, as if they were one tensor: 1, 2 or `math.inf`.

    The result is a 0-dim tensor on the device, in fp32 (fp64 if a gradient is); nothing waits for it. A NaN anywhere
    makes it NaN, else an infinity makes it infinite; finite fp32 numbers neither overflow nor vanish on the way. The
    same tensors give the same bits.

    - tensors: an iterable of gradients or of parameters, such as `model.parameters()`; None is passed over. As in
      torch, a parameter, or another tensor that has a `.grad` or is a leaf that requires one, stands for its `.grad`,
      and is passed over where that is None: with no gradient at all the norm is 0. Every other tensor stands for
      itself; `p.detach()` is the weight.

      Gradients are of any shapes, empty ones too, in bf16, fp16, fp32 or fp64, mixed, on any devices. Each counts as
      often as it is in the list: give a tied weight's gradient once. Tensors with gaps (slices) are copied first; dense
      ones of any stride order are read where they lie. A `QTensor` is dequantised.
    - norm_type: 1, 2, `math.inf` or "inf".
    - groups: process groups over whose ranks the tensors are sharded. Where kinds of parameters are sharded
      differently, give a list of `Shards` instead, the same kinds in the same order on every rank:

          dense, split by tensor parallelism     Shards(a, (tp, pp))
          dense, replicated in it (norms)        Shards(b, (pp,))
          experts                                Shards(c, (ep, expert_tp, pp))

      A rank without tensors of a kind gives an empty list, and takes part. With a distributed optimizer, the
      data-parallel group is one more. A DTensor (FSDP2, tensor parallelism) says itself over which groups it is
      sharded; `groups` names only those that its mesh does not have, such as pipeline stages. All ranks of a mesh give
      their pieces of the same DTensors, in the same order.
    - device: of the result; that of the first tensor that is not on a CPU if it is not given. Name it where the list
      may be empty and a group needs tensors on a GPU.

    The sums of p-th powers are added over groups in fp64, with one collective for each group; the result is a plain
    tensor, the same on all ranks. A DTensor that is placed as `Partial` is summed up first, with a collective of its
    own.

    >>> import torch, weft
    >>> weft.grad_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]], dtype=torch.bfloat16)])
    tensor(5.)
    """
    return _statistic(kinds_of(tensors, groups), _what(norm_type), device)


def count_zeros(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """How many numbers are zero: an int64 0-dim tensor on the device. -0.0 is zero, subnormal numbers and NaN are not.

    Arguments are those of `grad_norm`.

    >>> import torch, weft
    >>> weft.count_zeros([torch.tensor([0.0, -0.0, 1e-45]), torch.zeros(3, dtype=torch.bfloat16)])
    tensor(5)
    """
    return _statistic(kinds_of(tensors, groups), "zeros", device)


def any_nonfinite(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """Whether any number is infinite or NaN: a bool 0-dim tensor on the device. Arguments are those of `grad_norm`.

    Ask before a tensor is quantised. Afterwards it may be too late: in the usual formats an Inf has become the largest
    code with a scale of 1 (±448 in e4m3), which is finite. See `quantize`.

    >>> import torch, weft
    >>> weft.any_nonfinite([torch.ones(3), torch.tensor([float("nan")])])
    tensor(True)
    """
    return _statistic(kinds_of(tensors, groups), "nonfinite", device)


def clip_grads_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    norm: Tensor | None = None,
    groups: Sequence[Any] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; gives the norm that they had. It takes the
    place of `torch.nn.utils.clip_grad_norm_`, with gradients in place of parameters as well.

    Each number is multiplied by min(1, max_norm / (norm + 1e-6)), the coefficient of torch's `clip_grad_norm_`, in
    fp32, and rounded once. The coefficient is made on the device, so nothing waits; where it is 1 nothing is read or
    written.

    - parameters, norm_type, groups, device: those of `grad_norm`. A tensor that stands for its `.grad` is never
      written to. Of a DTensor each rank scales its piece. A `QTensor` keeps its codes, and its fp32 scales (nvfp4: that
      of the whole tensor) are scaled: exactly if they are powers of two, which they are no longer, so that its format
      becomes the one without `pow2`. The scales of mx cannot be multiplied, and are refused.
    - error_if_nonfinite: raise a RuntimeError in place of clipping by a norm that is infinite or NaN. Then, and only
      then, the host waits for the device.
    - foreach: nothing; torch has it.
    - norm: to clip by, where `grad_norm` has been called before (of other tensors as well, perhaps); else it is
      computed here.

    As in torch, an infinite norm makes finite numbers 0 and infinite ones NaN, and a norm of NaN makes everything NaN:
    look at the norm, or at `any_nonfinite`, before the optimizer's step. Two tensors that share memory are refused.

    >>> import torch, weft
    >>> gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> weft.clip_grads_(gradients, max_norm=1.0)
    tensor(5.)
    >>> gradients
    [tensor([0.6000]), tensor([0.8000])]
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise TypeError(
            "max_norm must be a number: to read it from a tensor, the host would wait for the device"
        )
    max_norm = float(max_norm)
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0; got {max_norm}")
    what, kinds = _what(norm_type), kinds_of(parameters, groups)
    gradients = kinds[0].gradients if len(kinds) == 1 else [t for kind in kinds for t in kind.gradients]
    plain = all(kind.plain for kind in kinds)
    with torch.no_grad():
        sets = _sets(gradients if plain else memory_of(gradients))
        if len(sets) > 1 and not torch.compiler.is_compiling():
            # The op looks at one set, when others may have been clipped.
            _check_writable([t for alike in sets.values() for t in alike])
        norm = _statistic(kinds, what, device) if norm is None else _given_norm(norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}, so nothing was clipped: skip this step, or clip by "
                "such a norm with error_if_nonfinite=False"
            )
        for (on, double), alike in sets.items():
            here = norm.to(on, torch.float64 if double else torch.float32, non_blocking=on.type != "cpu")
            multi_tensor_clip_op(alike, here, max_norm)
        if not plain:
            mark_clipped(gradients)
    return norm


def _what(norm_type: float | str) -> str:
    try:
        return _NORMS[float(norm_type)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"norm_type must be 1, 2 or math.inf; got {norm_type}") from None


def _given_norm(norm: Any) -> Tensor:
    if not isinstance(norm, Tensor):
        raise TypeError(f"norm must be a tensor, as grad_norm gives it; got a {type(norm).__name__}")
    if norm.numel() != 1 or not norm.is_floating_point():
        raise ValueError(f"norm must be one floating-point number; got {norm.dtype} {tuple(norm.shape)}")
    return norm.full_tensor() if is_distributed(norm) else norm  # type: ignore[attr-defined]


def _sets(tensors: list[Tensor]) -> dict[tuple[torch.device, bool], list[Tensor]]:
    """The tensors that one call of an op takes: of a device, and of fp64 those or the others."""
    if not tensors:
        return {}
    dtypes = {t.dtype for t in tensors}
    if not _DTYPES.issuperset(dtypes):
        wrong = ", ".join(sorted(str(dtype) for dtype in dtypes - _DTYPES))
        raise ValueError(f"gradients must be of float32, bfloat16, float16 or float64; one is of {wrong}")
    double = torch.float64 in dtypes
    if not (double and len(dtypes) > 1) and _on_one_device(tensors):
        return {(tensors[0].device, double): tensors}
    found: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for t in tensors:
        found.setdefault((t.device, t.dtype is torch.float64), []).append(t)
    return found


def _on_one_device(tensors: list[Tensor]) -> bool:
    if tensors[0].is_cpu:  # to ask each for its device takes five times as long
        return all(t.is_cpu for t in tensors)
    if tensors[0].is_cuda:
        return all(t.is_cuda for t in tensors) and len({t.get_device() for t in tensors}) == 1
    return len({t.device for t in tensors}) == 1


class _Part(NamedTuple):
    """The numbers, one for each device and precision, of tensors that are sharded alike."""

    numbers: list[Tensor]
    kind: int
    groups: tuple[Any, ...]  # those of meshes over whose ranks they are added up


def _statistic(kinds: list[Kind], what: str, device: torch.device | str | None) -> Tensor:
    parts: list[_Part] = []
    rest = []  # groups of each kind besides those of its meshes
    with torch.no_grad():
        if device is None and len(kinds) == 1 and kinds[0].plain and not kinds[0].groups:
            sets = _sets(kinds[0].gradients)
            if len(sets) == 1:
                return multi_tensor_reduce_op(*sets.values(), what)[0]
        for number, kind in enumerate(kinds):
            tensors = numbers_of(kind)
            along = [group for placed in tensors for groups in placed for group in groups]
            shared = _of_a_mesh(kind.groups, along)
            rest.append([group for group in kind.groups if group not in shared])
            for placed, alike in tensors.items():
                numbers = [multi_tensor_reduce_op(some, what)[0] for some in _sets(alike).values()]
                given = [group for group in shared.values() if group not in placed.replicated]
                parts.append(_Part(numbers, number, tuple(dict.fromkeys((*placed.sharded, *given)))))
        if device is None:
            devices = [number.device for part in parts for number in part.numbers]
            device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return _together(parts, rest, what, torch.device(device))


def _of_a_mesh(groups: tuple[Any, ...], along: list[Any]) -> dict[Any, Any]:
    """Those of the given groups that DTensors know by themselves, with the groups of the same ranks of their meshes,
    `along`. Other tensors beside them are added up over these as well."""
    found: dict[Any, Any] = {}
    if not (groups and along):
        return found
    ranks_of = torch.distributed.get_process_group_ranks
    for group in groups:
        ranks = set(ranks_of(group))
        for own in along:
            of_own = set(ranks_of(own))
            if ranks == of_own:
                found[group] = own
            elif len(ranks & of_own) > 1:
                raise ValueError(
                    f"a DTensor is on a mesh with the group of ranks {sorted(of_own)}, and groups= has "
                    f"{sorted(ranks)}: what both have would be added up twice. A DTensor needs no groups of its mesh"
                )
    return found


def _together(parts: list[_Part], rest: list[list[Any]], what: str, device: torch.device) -> Tensor:
    """One number of those of all parts, over the ranks of their groups: first those of meshes, then, with one number
    for each kind of tensors, `rest`. So what ranks on other meshes have to add up is alike, whatever is on theirs.

    What is added is exact enough in float64 and int64; a largest norm is compared as an integer, which no NaN
    escapes."""
    result = _allocate_reduce([], what)[0].dtype
    if any(number.dtype is torch.float64 for part in parts for number in part.numbers):
        result = torch.float64
    dtype = torch.int64 if what in ("zeros", "nonfinite") else torch.float64
    largest = what in ("norminf", "nonfinite")
    local = []
    for part in parts:
        moved = [number.to(device, dtype, non_blocking=device.type != "cpu") for number in part.numbers]
        numbers = torch.stack([torch.zeros((), dtype=dtype, device=device), *moved])
        if what == "norminf":
            numbers = numbers.abs().view(torch.int64)
        elif what == "norm2":
            numbers = numbers.square()
        local.append(_combined(numbers, largest))
    local = _over_groups(local, [part.groups for part in parts], largest)
    kinds = []
    for kind in range(len(rest)):
        its = [number for number, part in zip(local, parts, strict=True) if part.kind == kind]
        kinds.append(_combined(torch.stack(its), largest))
    total = _combined(torch.stack(_over_groups(kinds, rest, largest)), largest)
    if what == "norminf":
        return total.view(torch.float64).to(result)
    if what == "nonfinite":
        return total != 0
    return total.sqrt().to(result) if what == "norm2" else total.to(result)


def _combined(numbers: Tensor, largest: bool) -> Tensor:
    return numbers.amax() if largest else numbers.sum()


def _over_groups(numbers: list[Tensor], groups: Sequence[Sequence[Any]], largest: bool) -> list[Tensor]:
    """Each number over the ranks of its groups, with one collective for each group."""
    numbers = list(numbers)
    for group in dict.fromkeys(group for some in groups for group in some):
        places = [place for place, some in enumerate(groups) if group in some]
        together = torch.stack([numbers[place] for place in places])
        op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(together, op, group)
        for place, number in zip(places, together.unbind(), strict=True):
            numbers[place] = number
    return numbers
