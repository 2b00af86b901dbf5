"""Tensor maps that are made on the host: the content of their 128 bytes, and maps that CUDA would not encode."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .conftest import Recorder

LAYOUT = struct.Struct("<Q8B5Q4Q5H5BxI20x")  # `TensorMap` of include/gpu/tensor_map.h
assert LAYOUT.size == 128


class Map(NamedTuple):
    address: int
    rank: int
    type: int
    swizzle: int
    fill: int
    dimensions: list[int]  # the innermost first, as all below
    strides: list[int]
    box: list[int]
    element_strides: list[int]


def read(content: bytes) -> Map:
    address, last, type_, swizzle, _, _, fill, _, _, *rest = LAYOUT.unpack(content)
    rank = last + 1
    dimensions, strides, box, steps = (
        rest[:rank],
        rest[5 : 4 + rank],
        rest[9 : 9 + rank],
        rest[14 : 14 + rank],
    )
    assert rest[19] == 2**32 - 1  # every field was given
    return Map(address, rank, type_, swizzle, fill, dimensions, strides, box, steps)


# ---- descriptors as arguments ------------------------------------------------------------------------------------


@triton.jit
def load_rank_1(descriptor, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), descriptor.load([0]))


@triton.jit
def load_rank_2(descriptor, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), descriptor.load([0, 0]).reshape(64))


@triton.jit
def load_rank_3(descriptor, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), descriptor.load([0, 0, 0]).reshape(64))


@triton.jit
def load_rank_4(descriptor, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), descriptor.load([0, 0, 0, 0]).reshape(64))


@triton.jit
def load_rank_5(descriptor, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), descriptor.load([0, 0, 0, 0, 0]).reshape(64))


KERNELS = [load_rank_1, load_rank_2, load_rank_3, load_rank_4, load_rank_5]
BLOCKS = [[64], [2, 32], [2, 1, 32], [1, 2, 2, 16], [2, 1, 2, 1, 16]]


@pytest.mark.compat
@pytest.mark.parametrize("rank", range(1, 6))
def test_descriptors_of_every_rank(recorder: Recorder, rank: int) -> None:
    shape = [3, 2, 5, 4, 96][-rank:]
    x = torch.randn(*shape[:-1], shape[-1] + 8, dtype=torch.bfloat16)[..., : shape[-1]]
    block = BLOCKS[rank - 1]
    descriptor = TensorDescriptor(x, shape, list(x.stride()), block, padding="nan")
    out = torch.empty(64, dtype=torch.bfloat16)
    with triton_loom.emulate("sm_90"):
        kernel = KERNELS[rank - 1][(1,)](descriptor, out)
    map_ = read(recorder.last["parameters"][:128])
    (meta,) = kernel.metadata.tensordesc_meta
    assert (
        map_
        == Map(
            address=x.data_ptr(),
            rank=rank,
            type=10,  # bf16 in PTX
            swizzle=meta["swizzle"],
            fill=1,
            dimensions=shape[::-1],
            strides=[2 * stride for stride in x.stride()[-2::-1]],
            box=meta["block_size"][::-1],
            element_strides=[1] * rank,
        )
    )
    assert meta["block_size"] == block
    # The shape and the strides follow, then a tensor and two kinds of scratch memory.
    after = struct.pack(f"@{rank}i{rank}qQQQ", *shape, *x.stride(), out.data_ptr(), 0, 0)
    assert recorder.last["parameters"][128:] == after
    first, last = x.data_ptr(), x[(-1,) * rank].data_ptr() + 2
    assert [(each.name, each.begin, each.end) for each in recorder.last["memory"]] == [
        ("descriptor", first, last),
        ("out_ptr", out.data_ptr(), out.data_ptr() + 128),
    ]


def test_without_bulk_copies_a_descriptor_is_a_pointer(recorder: Recorder) -> None:
    x, out = torch.randn(4, 32, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    with triton_loom.emulate("sm_80"):
        load_rank_2[(1,)](TensorDescriptor.from_tensor(x, [2, 32]), out)
    (address,) = struct.unpack("=Q", recorder.last["parameters"][:8])
    assert address == x.data_ptr()


# ---- what is refused ---------------------------------------------------------------------------------------------


class Tiled(NamedTuple):
    """Arguments of Triton's `fill_tma_descriptor_tiled`; sizes are outermost dimension first."""

    address: int = 1 << 20
    swizzle: int = 3
    element_bytes: int = 2
    type: int = 6  # fp16, in CUDA's numbers as all of these
    box: Any = (64, 64)
    shape: Any = (100, 128)
    strides: Any = (128, 1)
    nan: int = 0


@pytest.fixture
def sm_90() -> Iterator[Any]:
    with triton_loom.emulate("sm_90"):
        yield driver.active.utils


REFUSED = [
    (Tiled(address=(1 << 20) + 8), "lies at 0x100008, which is no multiple of 16 bytes"),
    (Tiled(type=16), "no type of elements with the number 16"),
    (Tiled(type=14), "elements of 4 bits are for sm_100 and later"),
    (Tiled(shape=(0, 128)), "dimension 1, the innermost being 0, has 0 elements"),
    (Tiled(shape=(2**32 + 1, 128)), "dimension 1, the innermost being 0, has 4294967297 elements"),
    (
        Tiled(strides=(132, 1)),
        "stride of dimension 1, the innermost being 0, is 264 bytes: no multiple of 16",
    ),
    (Tiled(strides=(2**39, 1)), "is 1099511627776 bytes: no multiple of 16 below 2^40"),
    (Tiled(box=(257, 64)), "the box has 257 elements along dimension 1"),
    (Tiled(box=(0, 64)), "the box has 0 elements along dimension 1"),
    (Tiled(box=(64, 4), swizzle=0), "a row of the box has 4 elements of 16 bits, no multiple of 16 bytes"),
    (Tiled(box=(64, 128)), "a row of the box has 256 bytes, more than the 128 of the swizzle"),
    (Tiled(box=(64, 64), swizzle=2), "a row of the box has 128 bytes, more than the 64 of the swizzle"),
    (Tiled(box=(64, 32), swizzle=1), "a row of the box has 64 bytes, more than the 32 of the swizzle"),
    (Tiled(swizzle=4), "swizzles of more than 16 bytes at a time are for sm_100"),
    (Tiled(swizzle=7), "no swizzle with the number 7"),
    (Tiled(type=1, nan=1), "can be NaN only if they are floating-point numbers"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_maps_that_cuda_refuses(sm_90: Any, call: Tiled, words: str) -> None:
    sm_90.fill_tma_descriptor_tiled(*Tiled())
    with pytest.raises(RuntimeError, match="Failed to create tensor map descriptor") as error:
        sm_90.fill_tma_descriptor_tiled(*call)
    assert words in str(error.value)


@pytest.mark.parametrize("call", [
    Tiled(box=(256, 64)),
    Tiled(box=(64, 256), swizzle=0),  # rows as long as they may be
    Tiled(strides=(0, 1)),  # every row is the same one
    Tiled(shape=(2**32, 128)),
    Tiled(nan=1),
])  # fmt: skip
def test_maps_that_cuda_encodes(sm_90: Any, call: Tiled) -> None:
    sm_90.fill_tma_descriptor_tiled(*call)


def test_no_tensor_maps_before_sm_90() -> None:
    with triton_loom.emulate("sm_80"), pytest.raises(RuntimeError, match="for sm_90 and later"):
        driver.active.utils.fill_tma_descriptor_tiled(*Tiled())


# Of CUtensorMapDataType: its number in tensormap.replace of PTX.
TYPES = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14, 15]


class Encode:
    """Call of cuTensorMapEncodeTiled itself, with features that Triton does not use."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        room = ctypes.create_string_buffer(256)
        self.room, self.map = room, -(-ctypes.addressof(room) // 64) * 64

    def __call__(
        self, *, type: int = 6, shape: Any = (128, 4, 4), strides: Any = (256, 1024), box: Any = (64, 1, 1),
        steps: Any = (1, 1, 1), interleave: int = 0, swizzle: int = 3, address: int = 1 << 20, offset: int = 0,
        fill: int = 0,
    ) -> Map | str:  # fmt: skip
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        code = self.library.cuTensorMapEncodeTiled(
            *[ctypes.c_void_p(self.map + offset), type, len(shape), ctypes.c_void_p(address)],
            *[(u64 * len(shape))(*shape), (u64 * len(strides))(*strides)],
            *[(u32 * len(shape))(*box), (u32 * len(shape))(*steps)],
            *[interleave, swizzle, 0, fill],
        )
        if code == 0:
            return read(ctypes.string_at(self.map, 128))
        assert code == 1  # CUDA_ERROR_INVALID_VALUE
        words = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(words))
        return (words.value or b"").decode()


def test_types_have_ptxs_numbers() -> None:
    bits = [8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6]
    with triton_loom.emulate("sm_100"):
        encode = Encode()
        for number, (in_ptx, size) in enumerate(zip(TYPES, bits, strict=True)):
            map_ = encode(type=number, box=(128 if size < 8 else 1024 // size, 1, 1))
            assert isinstance(map_, Map), map_
            assert map_.type == in_ptx


def test_features_that_triton_does_not_use() -> None:
    with triton_loom.emulate("sm_100"):
        encode = Encode()
        map_ = encode(steps=(7, 2, 8), swizzle=0)
        assert isinstance(map_, Map)
        assert map_.element_strides == [1, 2, 8]  # that of the innermost dimension is ignored
        for refused, words in [
            (encode(steps=(1, 9, 1)), "the element stride of dimension 1 is 9"),
            (encode(offset=32), "a tensor map must lie at a multiple of 64 bytes"),
            (encode(interleave=2), "an interleaving of 32 bytes needs a swizzle of 32 bytes"),
            (encode(interleave=2, swizzle=1, strides=(272, 1024)), "is 272 bytes: no multiple of 32"),
            (encode(interleave=3), "no interleaving with the number 3"),
            (
                encode(interleave=1, shape=(128, 4), strides=(256,), box=(64, 1), steps=(1, 1)),
                "3 dimensions or more",
            ),
            (encode(shape=(), strides=(), box=(), steps=()), "1 to 5 dimensions, not 0"),
            (encode(type=14, shape=(130, 4, 4), box=(128, 1, 1)), "no multiple of 128"),
            (encode(type=14, box=(64, 1, 1)), "and not 128"),
            (encode(type=14, box=(128, 1, 1), address=(1 << 20) + 16), "no multiple of 32 bytes"),
            (encode(type=15, box=(128, 1, 1), swizzle=5), "do not go with swizzle 5"),
            (encode(type=13, shape=(129, 4, 4)), "no multiple of 2"),
            (encode(type=13, fill=1), "only if they are floating-point numbers"),
        ]:
            assert isinstance(refused, str), refused
            assert words in refused
