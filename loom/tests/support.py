"""Helpers of Loom's tests: dtypes, random values, small device functions, Hypothesis settings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, settings

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
needs_block_pointers = pytest.mark.skipif(TRITON >= (3, 9), reason="Triton 3.9 has no block pointers")

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = SIGNED + UNSIGNED
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]

drawn = settings(
    max_examples=60, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
)


def short(parameter: object) -> str | None:
    """Return a test id: `bfloat16` rather than `torch.bfloat16`."""
    return str(parameter).removeprefix("torch.") if isinstance(parameter, torch.dtype) else None


def compat(parameters: Sequence[object], *chosen: object) -> list[object]:
    """Return the parameters, with the chosen ones marked as part of the quick subset."""
    return [pytest.param(p, marks=pytest.mark.compat) if p in chosen else p for p in parameters]


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(short(dtype))


def random_values(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """Return random values: any bit pattern of an integer type, any magnitude of a float, both bools."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point and dtype not in FLOAT8:
        return torch.randn(shape, dtype=torch.float64).mul(4).to(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    noise = np.frombuffer(np.random.bytes(count), np.uint8).copy()
    return torch.from_numpy(noise).view(dtype).reshape(shape)


@triton.jit
def put(out_ptr, value):
    """Store a tile of any shape (or a scalar) in row-major order; return the offset of the next one."""
    if isinstance(value, tl.tensor) and value.type.is_block():
        tl.store(out_ptr + tl.arange(0, value.numel), tl.reshape(value, [value.numel]))
        return out_ptr + value.numel
    else:
        tl.store(out_ptr, value)
        return out_ptr + 1


@triton.jit
def load_tile(x_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    return tl.reshape(tl.load(x_ptr + tl.arange(0, SIZE)), SHAPE)
