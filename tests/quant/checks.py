"""Byte-for-byte comparisons of quantized results with the oracle, and the inputs that are hardest to quantize."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch

import weft
from weft import Format
from weft.lab import oracle

INF, NAN = float("inf"), float("nan")


FORMATS = Format.all()


BACKENDS = ("auto", "reference")


# Modules; `weft.ops` has functions of the same names.
QUANTIZE, NORM = (
    importlib.import_module("weft.ops.quantize.launch"),
    importlib.import_module("weft.ops.norm.launch"),
)


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def how(f: Format) -> dict[str, Any]:
    return {
        "block": f.block,
        "element": f.element,
        "convention": f.convention,
        "power_of_two": f.power_of_two,
    }


def expected(x: torch.Tensor, f: Format, transpose: bool = False, **more: Any) -> oracle.Quantized:
    if transpose and f.hadamard:
        return oracle.quantize(oracle.rotated(x), **how(f), **more)
    return oracle.quantize(x, transpose=transpose, **how(f), **more)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal iff the values are, with all fp32 NaNs equal."""
    if t.dtype == torch.float32:
        return torch.where(t.isnan(), 0x7FC00000, t.contiguous().view(torch.int32))
    return t.contiguous().view(torch.uint8)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    a, b = bits(got), bits(want)
    if not torch.equal(a, b):
        wrong = (a != b).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.numel()} differ, first at {at}: {got[at].item()} ({a[at].item():#x}), "
            f"not {want[at].item()} ({b[at].item():#x})"
        )


def assert_copy(copy: Any, f: Format, want: oracle.Quantized, shape: tuple[int, int], what: str) -> None:
    """Compare dtypes, layout, padding and every byte of a copy of a [rows, cols] tensor with the oracle's."""
    rows, cols = shape
    assert copy is not None, what
    assert copy.data.dtype == f.number.dtype
    assert tuple(copy.data.shape) == f.data_shape(rows, cols)
    assert copy.scale.dtype == f.scale_dtype
    assert tuple(copy.scale.shape) == f.scale_shape(rows, cols)
    assert_same(copy.data.view(torch.uint8), want.data, f"{what}: codes")
    scale = copy.scale if f.scale_dtype == torch.float32 else copy.scale.view(torch.uint8)
    assert_same(scale, want.scale, f"{what}: scales")
    if f.block == "1x128":  # rows contiguous and padded to 4 with zeros
        padded = rounded_up(rows, 4)
        assert rows == 1 or copy.scale.stride(0) == 1
        assert copy.scale.shape[1] == 1 or copy.scale.stride(1) == padded
        buffer = torch.tensor([], dtype=torch.float32).set_(copy.scale.untyped_storage())
        assert buffer.numel() == padded * copy.scale.shape[1]
        assert (buffer.view(-1, padded)[:, rows:].contiguous().view(torch.int32) == 0).all(), (
            f"{what}: padding"
        )
    else:
        assert copy.scale.is_contiguous()
    if f.block in oracle.NVFP4:
        assert want.global_scale is not None
        assert copy.global_scale.dim() == 0
        assert_same(copy.global_scale.reshape(1), want.global_scale.reshape(1), f"{what}: global scale")
    else:
        assert copy.global_scale is None


def assert_quantized(
    q: Any,
    x: torch.Tensor,
    f: Format,
    what: str = "",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    **more: Any,
) -> None:
    """Assert that q has exactly the requested copies of x [M, K], equal to the oracle's."""
    rows, cols = x.shape
    assert q.format == f
    assert (q.rowwise is not None) == rowwise
    assert (q.columnwise is not None) == columnwise
    if rowwise:
        assert_copy(q.rowwise, f, expected(x, f, **more), (rows, cols), f"{f} {what} row-wise")
    if columnwise:
        want = expected(x, f, transpose=True, **more)
        length = rounded_up(rows, 16) if f.hadamard else rows
        assert_copy(q.columnwise, f, want, (cols, length), f"{f} {what} column-wise")


def check(x: torch.Tensor, f: Format, what: str = "", *, columnwise: bool, backend: str = "auto") -> None:
    before = x.clone()
    with weft.backend("triton" if backend == "auto" else "reference"):  # "triton" forbids a silent fallback
        q = weft.quantize(x, f, columnwise=columnwise)
    assert torch.equal(bits(x), bits(before)) if x.dtype == torch.float32 else True
    assert q.shape == x.shape
    assert q.dtype == x.dtype
    assert_quantized(q, x, f, f"{what} ({backend})", columnwise=columnwise)


@functools.cache
def adversarial(rows: int, cols: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return oracle.adversarial(rows, cols, dtype, 1) | near_ties(rows, cols, dtype)


def near_ties(rows: int, cols: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return inputs within an ulp of midpoint * amax / MAX, with one amax for all. Here x * (1 / d), x / d and
    x * (MAX / amax) round to different codes, which in ordinary data happens to a few elements in ten thousand."""
    generator = torch.Generator().manual_seed(6)
    results = {}
    for element in ("e4m3", "e5m2", "int8"):
        values = torch.from_numpy(oracle.VALUES[element])
        midpoints = ((values[:-1] + values[1:]) / 2)[-64:]
        candidates = 1 + torch.rand(100, generator=generator)
        limit = torch.tensor(oracle.MAX[element])
        scale = candidates / limit
        x = (midpoints[None, :] * scale.double()[:, None]).float()
        differ = (x * (1 / scale)[:, None] != x / scale[:, None]).any(1) & (1 / scale != limit / candidates)
        candidates = candidates[differ]
        for number, amax in enumerate(candidates[:3]):
            x = midpoints[torch.randint(len(midpoints), (rows, cols), generator=generator)]
            x = (x * (amax.double() / oracle.MAX[element])).float()
            x = (x.view(torch.int32) + torch.randint(-1, 2, x.shape, generator=generator).int()).view(
                torch.float32
            )
            x[:, ::16] = amax
            results[f"near_ties_{element}_{number}"] = x.to(dtype)
    return results


@functools.cache
def stacked(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate all adversarial inputs along the rows."""
    return torch.cat(list(adversarial(rows, cols, dtype).values()))


@functools.cache
def stripes(cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one adversarial input per stripe of 128 rows, so that no group mixes two of them."""
    parts = [part.t() for part in adversarial(cols, 128, dtype).values()]
    return torch.cat([*parts, parts[0][:5]]).contiguous()


def inputs(f: Format, columnwise: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the adversarial inputs in as few tensors as the format allows; all shapes share one variant."""
    if f.block in ("tensor", *oracle.NVFP4):
        return adversarial(10, 90, dtype)
    if f.block == "row" and columnwise:
        return adversarial(100, 19, dtype)
    if columnwise or f.block == "128x128":
        return {"all": stripes(19, dtype)}
    return {"all": stacked(4, 300, dtype)}


def ordinary(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)).bfloat16()


def decoded(q: oracle.Quantized, f: Format, shape: tuple[int, int]) -> torch.Tensor:
    """Return q * d rounded once to fp32; nvfp4 multiplies its two scales first, with one more rounding."""
    if f.block not in oracle.NVFP4:
        return oracle.dequantize(q, block=f.block, element=f.element or "", shape=shape).float()
    assert q.global_scale is not None
    scale = (spread_scale(q, f, shape).float() * q.global_scale).double()
    codes = oracle.decode(oracle.unpack(q.data.numpy(), shape[1]), "e2m1")
    return (torch.from_numpy(codes) * scale).float()


def spread_scale(q: oracle.Quantized, f: Format, shape: tuple[int, int]) -> torch.Tensor:
    """Return each element's scale in float64, without nvfp4's global scale."""
    if f.block == "mx":
        stored = oracle.e8m0_value(q.scale.numpy()).astype(np.float64)
    elif f.block in oracle.NVFP4:
        stored = oracle.decode(q.scale.numpy(), "e4m3")
    else:
        stored = q.scale.double().numpy()
    return torch.from_numpy(oracle.spread(stored, shape, f.block))
