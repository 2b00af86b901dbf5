"""Launches of the multi-tensor kernels."""

from __future__ import annotations

import functools
from bisect import bisect_right
from typing import NamedTuple

import torch

from ...language import tl
from ...runtime import Capabilities, Launch, Nothing, capabilities_of, choice, contiguous_copy, scratch
from .arguments import ClipArgs, ReduceArgs, ReduceOutputs
from .kernels import multi_tensor_clip_kernel, multi_tensor_reduce_kernel, multi_tensor_total_kernel
from .table import refuse_expanded, shared_memory, table_of

_ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


_EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


class ChunkConfig(NamedTuple):
    """Launch choice of the chunk kernels: `tile` elements at a time."""

    tile: int
    num_warps: int


@choice("multi_tensor", tile=(128, 16384), num_warps=(1, 16))
def chunk_config(kernel: str, what: str, itemsize: int, target: Capabilities) -> ChunkConfig:
    """Return 16 elements for each of the 256 threads of an NVIDIA GPU, for "reduce", "total" and "clip"."""
    return ChunkConfig(512 if target.is_cpu else 4096, 8)


@functools.cache
def _reduce_launch(dtype: torch.dtype, what: str, target: Capabilities) -> Launch:
    tile, num_warps = chunk_config("reduce", what, dtype.itemsize, target)
    name = f"int{8 * dtype.itemsize}" if what in ("zeros", "nonfinite") else _ELEMENTS[dtype]
    return Launch.of(
        multi_tensor_reduce_kernel,
        num_warps=num_warps,
        ELEMENT=getattr(tl, name),
        EXPONENT=_EXPONENTS[dtype],
        WHAT=what,
        TILE=tile,
    )


@functools.cache
def _total_launch(what: str, target: Capabilities) -> Launch:
    tile, num_warps = chunk_config("total", what, 4, target)
    return Launch.of(multi_tensor_total_kernel, num_warps=num_warps, WHAT=what, TILE=tile)


@functools.cache
def _clip_launch(dtype: torch.dtype, target: Capabilities) -> Launch:
    tile, num_warps = chunk_config("clip", "clip", dtype.itemsize, target)
    element = getattr(tl, _ELEMENTS[dtype])
    return Launch.of(multi_tensor_clip_kernel, num_warps=num_warps, ELEMENT=element, TILE=tile)


def launch_multi_tensor_reduce(o: ReduceOutputs, a: ReduceArgs) -> None:
    what = a.what
    table, reached = table_of(a.tensors)
    device = table.entries.device
    target = capabilities_of(device)
    dtype = torch.int32 if what in ("zeros", "nonfinite") else torch.float32
    partial = scratch((table.chunks,), dtype, device)
    for segment in table.segments:
        _reduce_launch(segment.dtype, what, target)(
            (segment.chunks, 1, 1),
            *multi_tensor_reduce_kernel.arguments(
                table_ptr=table.entries, partial_ptr=partial, first=segment.first
            ),
            reached=reached,
        )
    _total_launch(what, target)(
        (1, 1, 1),
        *multi_tensor_total_kernel.arguments(partial_ptr=partial, total_ptr=o.total, count=table.chunks),
    )


def launch_multi_tensor_clip(_: Nothing, a: ClipArgs) -> None:
    table, reached = table_of(a.tensors)
    if reached is not a.tensors:  # some tensor is not contiguous
        refuse_expanded(a.tensors)
    if table.overlapping:
        raise shared_memory()
    norm = a.norm
    begins, ends = table.spans
    address = norm.data_ptr()
    index = bisect_right(begins, address) - 1
    if index >= 0 and address < ends[index]:
        # It lies inside a tensor to be scaled, so programs could read it after scaling.
        norm = contiguous_copy(norm)
    target = capabilities_of(table.entries.device)
    for segment in table.segments:
        _clip_launch(segment.dtype, target)(
            (segment.chunks, 1, 1),
            *multi_tensor_clip_kernel.arguments(
                table_ptr=table.entries, norm_ptr=norm, first=segment.first, max_norm=a.max_norm
            ),
            reached=reached,
        )
    if reached is not a.tensors:
        for t, dense in zip(a.tensors, reached, strict=True):
            if dense is not t:
                t.copy_(dense)
