"""Quantised bytes and scales are exactly those of the oracle: every format, every path, no tolerance.

A kernel variant takes about half a second to compile, so a format that is local (its blocks lie within a row, or
within 128 rows) meets all of the adversarial inputs in one tensor, and everything of a format shares a shape as
far as the variant depends on it. The exhaustive product of formats and kernels is marked slow; what always runs
is `_always`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.quant import oracle
from weft import Format

INF, NAN = float("inf"), float("nan")
FORMATS = Format.all()
BACKENDS = ("auto", "reference")
# The modules, whose names in `weft.ops` are those of functions.
QUANTIZE, NORM = importlib.import_module("weft.ops.quantize"), importlib.import_module("weft.ops.norm.norm")


# ------------------------------------------------------------------------------
# Comparing
# ------------------------------------------------------------------------------


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def how(f: Format) -> dict[str, Any]:
    return {
        "block": f.block,
        "element": f.element,
        "convention": f.convention,
        "power_of_two": f.power_of_two,
    }


def expected(x: torch.Tensor, f: Format, **more: Any) -> oracle.Quantized:
    return oracle.quantize(x, **how(f), **more)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Integers that are equal when the numbers are the same: all NaN of fp32 are one."""
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
    """`copy` of a [rows, cols] tensor: dtypes, layout, pads, and every byte."""
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
        assert (buffer.view(-1, padded)[:, rows:].contiguous().view(torch.int32) == 0).all(), f"{what}: pads"
    else:
        assert copy.scale.is_contiguous()
    if f.block == "nvfp4":
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
    """Both copies of q, and no others, are the oracle's of x [M, K]."""
    rows, cols = x.shape
    assert q.format == f
    assert (q.rowwise is not None) == rowwise
    assert (q.columnwise is not None) == columnwise
    if rowwise:
        assert_copy(q.rowwise, f, expected(x, f, **more), (rows, cols), f"{f} {what} row-wise")
    if columnwise:
        want = expected(x, f, transpose=True, **more)
        assert_copy(q.columnwise, f, want, (cols, rows), f"{f} {what} column-wise")


def check(x: torch.Tensor, f: Format, what: str = "", *, columnwise: bool, backend: str = "auto") -> None:
    before = x.clone()
    with weft.backend("triton" if backend == "auto" else "reference"):  # "triton": no silent detour
        q = weft.quantize(x, f, columnwise=columnwise)
    assert torch.equal(bits(x), bits(before)) if x.dtype == torch.float32 else True
    assert q.shape == x.shape
    assert q.dtype == x.dtype
    assert_quantized(q, x, f, f"{what} ({backend})", columnwise=columnwise)


# ------------------------------------------------------------------------------
# Inputs
# ------------------------------------------------------------------------------


@functools.cache
def adversarial(rows: int, cols: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return oracle.adversarial(rows, cols, dtype, 1) | near_ties(rows, cols, dtype)


def near_ties(rows: int, cols: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One amax for all, and x within an ulp of midpoint * amax / MAX: here x * (1 / d), x / d and x * (MAX / amax)
    round to different codes, which ordinary data show in a few elements of ten thousand."""
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
    """All adversarial inputs, one below the other."""
    return torch.cat(list(adversarial(rows, cols, dtype).values()))


@functools.cache
def stripes(cols: int, dtype: torch.dtype) -> torch.Tensor:
    """One adversarial input to each stripe of 128 rows: every one alone in its groups along either dimension."""
    parts = [part.t() for part in adversarial(cols, 128, dtype).values()]
    return torch.cat([*parts, parts[0][:5]]).contiguous()


def inputs(f: Format, columnwise: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adversarial inputs, in as few tensors as a format allows. All shapes make the same variant."""
    if f.block in ("tensor", "nvfp4"):
        return adversarial(10, 90, dtype)
    if f.block == "row" and columnwise:
        return adversarial(100, 19, dtype)
    if columnwise or f.block == "128x128":
        return {"all": stripes(19, dtype)}
    return {"all": stacked(4, 300, dtype)}


def test_inputs_are_what_they_are_for() -> None:
    x = stacked(4, 300, torch.float32)
    assert x.isnan().any()
    assert x.isinf().any()
    assert (x.abs().amax(1) == 0).any()
    assert x.shape[1] % 128 != 0
    assert stripes(19, torch.float32).shape[0] % 128 == 5


# ------------------------------------------------------------------------------
# Every format
# ------------------------------------------------------------------------------


def _always(f: Format, columnwise: bool) -> bool:
    """What runs without -m slow: 1x128 e4m3, mx and nvfp4 by both kernels; the other elements of 1x128 by one of
    them; of the other blocks, whose scales the same functions make, each convention once, in turn with either kind
    of scale, with each element and by either kernel."""
    turn = list(oracle.FLOOR).index(f.convention)
    if f.block in ("mx", "nvfp4") or (f.block == "1x128" and f.element == "e4m3"):
        return True
    if f.block == "1x128":
        return (turn // 2 + bool(f.power_of_two)) % 2 == int(columnwise)
    turn = (turn + ("tensor", "row", "128x128").index(f.block)) % 7
    element = ("e4m3", "e5m2", "int8").index(f.element or "")
    return (element, f.power_of_two, columnwise) == (turn % 3, turn % 2 == 1, turn >= 3)


ALL = [
    pytest.param(
        f,
        columnwise,
        id=f"{f}-{'both' if columnwise else 'rows'}",
        marks=() if _always(f, columnwise) else pytest.mark.slow,
    )
    for f in FORMATS
    for columnwise in (False, True)
]


@pytest.mark.parametrize(("f", "columnwise"), ALL)
def test_every_format(f: Format, columnwise: bool) -> None:
    for name, x in inputs(f, columnwise, torch.float32).items():
        check(x, f, name, columnwise=columnwise)


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_every_format_in_the_reference(f: Format) -> None:
    if f.block in ("tensor", "row", "nvfp4"):
        for name, x in adversarial(5, 37, torch.float32).items():
            check(x, f, name, columnwise=True, backend="reference")
    else:
        check(stripes(3, torch.float32), f, columnwise=True, backend="reference")
    if f.group:
        check(stacked(2, 150, torch.float32), f, columnwise=False, backend="reference")


def test_what_always_runs_covers_each_choice() -> None:
    chosen = {parameters.values for parameters in ALL if not parameters.marks}
    for block in ("tensor", "row", "1x128", "128x128"):
        for columnwise in (False, True):
            here = [f for f, c in chosen if f.block == block and c == columnwise]
            assert {f.element for f in here} == {"e4m3", "e5m2", "int8"}
            assert {f.power_of_two for f in here} == {False, True}
        assert {f.convention for f, _ in chosen if f.block == block} == set(oracle.FLOOR)
    assert {f for f, _ in chosen if f.block in ("1x128", "mx", "nvfp4")} == {
        f for f in FORMATS if f.block in ("1x128", "mx", "nvfp4")
    }


BF16 = [
    "e4m3:1x128:te:pow2", "e5m2:1x128:te", "int8:1x128:vllm", "e4m3:1x128:sglang_col_major", "e4m3:row:deepep:pow2",
    "int8:row:torchao", "e4m3:tensor:deepgemm", "e5m2:tensor:te", "e4m3:128x128:sglang", "e2m1:mx:torchao",
    "e2m1:nvfp4:te",
]  # fmt: skip
FP16 = ["e4m3:1x128:te", "e5m2:1x128:te:pow2", "int8:row:te", "e5m2:tensor:te", "e4m3:128x128:te"]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("dtype", "spec"),
    [(torch.bfloat16, spec) for spec in BF16] + [(torch.float16, spec) for spec in FP16],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_sixteen_bit_inputs(dtype: torch.dtype, spec: str) -> None:
    """te's rule for MAX / amax = inf depends on the dtype; everything else must not."""
    f = Format.of(spec)
    columnwise = f.block in ("128x128", "mx")
    for name, x in inputs(f, columnwise, dtype).items():
        check(x, f, name, columnwise=columnwise)
        check(x[:300], f, name, columnwise=True, backend="reference")


def test_sixteen_bit_formats_cover_each_choice() -> None:
    formats = [Format.of(spec) for spec in BF16]
    assert {f.block for f in formats} == {f.block for f in FORMATS}
    assert {f.element for f in formats} == {f.element for f in FORMATS}
    assert {f.convention for f in formats} == {f.convention for f in FORMATS}


SHAPES = [(1, 1), (3, 15), (5, 129), (127, 16), (128, 128), (130, 1100)]


@pytest.mark.parametrize(
    "spec",
    [
        "e4m3:1x128:te:pow2",
        "int8:row:te",
        "e2m1:mx:te",
        "e2m1:nvfp4:te",
        "e5m2:tensor:te",
        "e4m3:128x128:te:pow2",
    ],
)
def test_shapes(spec: str) -> None:
    """Tails in both dimensions, tiles that fit exactly, single rows and columns, several tiles to a row."""
    f = Format.of(spec)
    for rows, cols in SHAPES if f.block in ("1x128", "row") else SHAPES[:4]:
        x = torch.randn(rows, cols)
        if rows > 2:
            x[1] = 0
        for columnwise in (False, True):
            # Of the blocks that take several passes, the tall tiles are enough.
            if columnwise or f.block in ("1x128", "row", "mx"):
                check(x, f, f"{rows}x{cols}", columnwise=columnwise)
        check(x, f, f"{rows}x{cols}", columnwise=True, backend="reference")


def test_column_wise_alone() -> None:
    for spec in ("e4m3:1x128:te:pow2", "e2m1:nvfp4:te", "e4m3:row:deepgemm", "e4m3:128x128:te:pow2"):
        f = Format.of(spec)
        x = torch.randn(150, 37)
        for backend in BACKENDS:
            with weft.backend(backend):
                q = weft.quantize(x, f, rowwise=False, columnwise=True)
            assert_quantized(q, x, f, backend, rowwise=False, columnwise=True)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "int8:row:te", "e2m1:nvfp4:te", "e4m3:tensor:te"])
def test_several_rows_to_a_program(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: on a CPU a program has one row, so that the mask over rows would never be compiled."""
    monkeypatch.setattr(QUANTIZE, "_rows_tile", lambda cols, target: (8, 256, 4))
    f = Format.of(spec)
    for rows in (1, 13):
        x = torch.randn(rows, 300)
        check(x, f, columnwise=False)
        assert_same(
            weft.dequantize(weft.quantize(x, f)), decoded(expected(x, f), f, (rows, 300)), "dequantize"
        )


# ------------------------------------------------------------------------------
# The comparison notices
# ------------------------------------------------------------------------------


def test_a_wrong_byte_is_noticed() -> None:
    f = Format.of("e4m3:1x128:te:pow2")
    x = torch.randn(5, 300)

    def broken(change: Callable[[Any], Any]) -> None:
        q = weft.quantize(x, f, columnwise=True)
        assert_quantized(q, x, f, columnwise=True)
        change(q)
        with pytest.raises(AssertionError):
            assert_quantized(q, x, f, columnwise=True)

    def raise_by_one(t: torch.Tensor, *at: int) -> None:
        t[at] += 1

    broken(lambda q: raise_by_one(q.rowwise.data.view(torch.uint8), 4, 299))
    broken(lambda q: raise_by_one(q.columnwise.data.view(torch.uint8), 299, 4))
    broken(lambda q: raise_by_one(q.rowwise.scale.view(torch.int32), 4, 2))
    broken(lambda q: raise_by_one(q.columnwise.scale.view(torch.int32), 0, 0))
    # A pad that is not zero.
    broken(lambda q: q.rowwise.scale.as_strided((8,), (1,)).__setitem__(7, 1.0))


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
def test_a_wrong_convention_is_noticed(element: Any, power_of_two: bool) -> None:
    """The inputs tell any two conventions apart, but those that are the same by their formulas."""
    x = stacked(4, 300, torch.float32)
    results = {
        c: expected(x, Format("1x128", element, c, power_of_two))
        for c in oracle.FLOOR  # type: ignore[arg-type]
    }
    same = set()
    for a, b in itertools.combinations(results, 2):
        equal = torch.equal(results[a].data, results[b].data)
        if equal and torch.equal(bits(results[a].scale), bits(results[b].scale)):
            same.add((a, b))
    floats = {
        ("deepgemm", "deepep"),
        ("sglang", "sglang_col_major"),
        ("sglang", "vllm"),
        ("sglang_col_major", "vllm"),
    }
    assert same == (
        set() if not power_of_two else floats if element != "int8" else {("sglang", "sglang_col_major")}
    )


def test_a_wrong_format_is_noticed() -> None:
    x = stacked(4, 300, torch.float32)
    for right, wrong in (
        ("e4m3:1x128:te", "e4m3:1x128:torchao"),
        ("e4m3:1x128:sglang", "e4m3:1x128:sglang_col_major"),
        ("e4m3:1x128:te:pow2", "e4m3:1x128:te"),
    ):
        q = weft.quantize(x, right)
        assert_quantized(q, x, Format.of(right))
        with pytest.raises(AssertionError, match="differ"):
            assert_copy(q.rowwise, Format.of(right), expected(x, Format.of(wrong)), (len(x), 300), "")


# ------------------------------------------------------------------------------
# Encoders
# ------------------------------------------------------------------------------


@functools.cache
def encoder_samples() -> torch.Tensor:
    """Every bf16 number (with every kind of NaN), and fp32 numbers around each number, midpoint and limit of every
    element type."""
    every_bf16 = (torch.arange(65536, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32)
    centres = [np.array([2.0**-149, 2.0**-126, 448, 464, 480, 57344, 61440, 65536, 127, 127.5, 6, 3.4e38])]
    for values in oracle.VALUES.values():
        centres += [values, (values[:-1] + values[1:]) / 2]
    centre = torch.from_numpy(np.concatenate(centres).astype(np.float32)).view(torch.int32)
    around = torch.cat([torch.arange(-40, 41), torch.tensor([-(2**16), -(2**12), -300, 300, 2**12, 2**16])])
    near = (centre[:, None] + around[None, :].int()).clamp(min=0).flatten().view(torch.float32)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(3))
    return torch.cat([every_bf16, near, -near, patterns.to(torch.int32).view(torch.float32)])


def encoded(x: torch.Tensor, element: str) -> torch.Tensor:
    with np.errstate(invalid="ignore"):  # the signalling NaN among them
        return torch.from_numpy(oracle.encode(x.numpy(), element))


def in_rows(values: torch.Tensor, cols: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(-values.numel() % cols)]).view(-1, cols)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["integers", "conversion", "clamped"])
def test_each_encoder(element: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a given scale of 1 a code is that of x itself. sm_80, sm_89 and gfx942 encode by integers, gfx950 by a
    clamp and a conversion, other targets by their conversion; Loom runs all three."""
    monkeypatch.setattr(QUANTIZE, "cast_mode", lambda capabilities: mode)
    f = Format.of(f"{element}:tensor:te")
    x = in_rows(encoder_samples(), 1000)
    q = weft.quantize(x, f, scale=torch.tensor(1.0))
    want = encoded(x, element)
    assert len(want.unique()) == 2 * len(oracle.VALUES[element]) + 1  # every code, and one for NaN
    assert_same(q.rowwise.data.view(torch.uint8), want, f"{element} mode {mode}")
    f = Format.of(f"{element}:1x128:te:pow2")
    check(stacked(4, 300, torch.float32), f, f"mode {mode}", columnwise=False)
    if element == "e4m3":
        check(stripes(19, torch.float32), f, f"mode {mode}", columnwise=True)


def test_encoders_differ_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing an encoder compiles another kernel: otherwise the test above would show the same thing thrice."""
    x = torch.randn(3, 300)
    seen = set()
    for mode in (0, 1, 2):
        monkeypatch.setattr(QUANTIZE, "cast_mode", lambda capabilities, mode=mode: mode)
        weft.quantize(x, "e4m3:1x128:te:pow2")
    for variant, _ in QUANTIZE._quantize_rows_kernel.variants:
        seen.add(dict(variant.constants).get("CAST", dict(variant.constants)))
    assert len(seen) >= 3


def test_int8_and_e2m1_encoders() -> None:
    samples = encoder_samples()
    f = Format.of("int8:tensor:te")
    x = in_rows(samples, 1000)
    for backend in BACKENDS:
        with weft.backend(backend):
            q = weft.quantize(x, f, scale=torch.tensor(1.0))
        assert_same(q.rowwise.data.view(torch.uint8), encoded(x, "int8"), backend)
    f = Format.of("e2m1:mx:te")  # a 6 in every group makes its scale 1
    x = in_rows(samples[samples.abs() <= 6], 310)
    x[:, ::32] = 6
    want = expected(x, f)
    assert (want.scale == 127).all()
    assert len(want.data.unique()) > 100
    check(x, f, columnwise=False)


@pytest.mark.slow
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_each_encoder_on_sixteen_million_numbers(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.arange(0, 2**32, 251, dtype=torch.int64) - 2**31).to(torch.int32).view(torch.float32)
    x = in_rows(x, 4096)
    want = torch.cat([encoded(part, element) for part in x.split(256)])
    for mode in (0, 1, 2):
        monkeypatch.setattr(QUANTIZE, "cast_mode", lambda capabilities, mode=mode: mode)
        q = weft.quantize(x, f"{element}:tensor:te", scale=torch.tensor(1.0))
        assert_same(q.rowwise.data.view(torch.uint8), want, f"{element} mode {mode}")


def boundary_rows(limit: float, dtype: torch.dtype) -> torch.Tensor:
    """[N, 128]: amax = limit * 2^k + n ulps of the dtype, k = -90 .. 89, n = -6 .. 6."""
    exponents = torch.arange(-90, 90, dtype=torch.float64)
    peak = (limit * torch.exp2(exponents)).to(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    peaks = (peak.view(integer)[:, None] + torch.arange(-6, 7, dtype=integer)[None, :]).flatten().view(dtype)
    x = (torch.rand(len(peaks), 128, generator=torch.Generator().manual_seed(5)) * 0.9).to(dtype) * peaks[
        :, None
    ]
    x[:, 77] = -peaks
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "spec",
    ["e4m3:1x128:te:pow2", "e5m2:1x128:deepgemm:pow2", "int8:1x128:vllm:pow2", "e4m3:mx:te", "e2m1:mx:te"],
)
def test_powers_of_two_next_to_a_boundary(spec: str, dtype: torch.dtype) -> None:
    """A power of two from a logarithm is one step too small here in a third of the cases."""
    f = Format.of(spec)
    x = torch.nn.functional.pad(boundary_rows(oracle.MAX[f.element or ""], dtype), (0, 172))  # K = 300
    check(x, f, columnwise=False)


@pytest.mark.parametrize("convention", ["te", "torchao"])
def test_nvfp4_scales_next_to_a_boundary(convention: Any) -> None:
    """Blocks whose scale is within two ulps of the middle between two e4m3 numbers: another order of the same
    multiplications rounds to the other one. Ordinary data show it in one block of a million."""
    f = Format("nvfp4", convention=convention)
    values = torch.from_numpy(oracle.VALUES["e4m3"])
    middles = ((values[:-1] + values[1:]) / 2)[-110:]
    for largest in (1.0 + torch.rand(8, generator=torch.Generator().manual_seed(9))).tolist():
        peaks = (middles * 6 * (torch.tensor(largest).double() / 2688)).float()
        peaks = (peaks.view(torch.int32)[:, None] + torch.arange(-2, 3).int()).view(torch.float32).flatten()
        x = torch.zeros(-(-(len(peaks) + 1) // 9), 9, 16)
        x.view(-1, 16)[: len(peaks), 3] = peaks
        x.view(-1, 16)[: len(peaks), 4] = -peaks / 3
        x[-1, -1, 0] = largest
        check(torch.nn.functional.pad(x.flatten(1), (0, 6)), f, columnwise=False)  # K = 150


def ordinary(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize(
    ("rows", "cols"), [(64, 1000), pytest.param(4096, 7168, marks=pytest.mark.slow)], ids=["small", "large"]
)
def test_power_of_two_conventions_agree_on_ordinary_data(rows: int, cols: int) -> None:
    x = ordinary(rows, cols)
    te = weft.quantize(x, "e4m3:1x128:te:pow2").rowwise
    for other in ("deepgemm", "vllm"):
        q = weft.quantize(x, f"e4m3:1x128:{other}:pow2").rowwise
        assert_same(q.data, te.data, other)
        assert_same(q.scale, te.scale, other)
    without = weft.quantize(x, "e4m3:1x128:te").rowwise
    assert not torch.equal(without.scale, te.scale)
    if rows == 64:
        assert_quantized(weft.quantize(x, "e4m3:1x128:te:pow2"), x, Format("1x128"))


# What blocks with nothing, with little, with an infinity and with a NaN become: d, and the values of elements 0
# and 1. As published; where only codes are, d is None.
EDGES: dict[str, list[tuple[float | None, float, float]]] = {
    "deepgemm": [(2.232e-7, 0, 0), (2.232e-7, 4.5, 4.5), (None, 0, 0), (INF, NAN, 0), (NAN, NAN, NAN)],
    "deepgemm:pow2": [
        (2.0**-22, 0, 0),
        (2.0**-22, 4, 4),
        (None, 0, 0),
        (2.0**127, 448, 0),
        (2.0**127, NAN, 0),
    ],
    "te": [(1.0, 0, 0), (2.232e-9, 448, 448), (None, 448, 448), (1.0, 448, 1), (1.0, NAN, 1)],
    "te:pow2": [(1.0, 0, 0), (2.0**-28, 256, 256), (None, 320, 320), (1.0, 448, 1), (1.0, NAN, 1)],
    "torchao": [(2.232e-15, 0, 0), (2.232e-9, 448, 448), (None, 0, 0), (INF, NAN, 0), (NAN, NAN, NAN)],
    "vllm": [(2.232e-13, 0, 0), (2.232e-9, 448, 448), (None, 0, 0), (INF, NAN, 0), (NAN, NAN, NAN)],
}


@pytest.mark.compat
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("convention", EDGES)
def test_edge_blocks(convention: str, backend: str) -> None:
    x = torch.empty(5, 300)
    for row, (first, rest) in enumerate([(0.0, 0.0), (1e-6, 1e-6), (1e-30, 1e-30), (INF, 1.0), (NAN, 1.0)]):
        x[row] = rest
        x[row, ::128] = first
    with weft.backend(backend):  # type: ignore[arg-type]
        q = weft.quantize(x, f"e4m3:1x128:{convention}").rowwise
    values = q.data.float()
    for row, (d, first, second) in enumerate(EDGES[convention]):
        for start in (0, 128, 256):
            got = (
                q.scale[row, start // 128].item(),
                values[row, start].item(),
                values[row, start + 1].item(),
            )
            want = (got[0] if d is None else d, first, second)
            assert got == pytest.approx(want, rel=1e-3, nan_ok=True), (row, start)


def with_one_special(f: Format, special: float) -> tuple[float, float, float]:
    """The table of `weft.quant.formats`: what the special number, the ones of its block, and the ones of other blocks
    dequantise to."""
    te, torchao = f.convention == "te", f.convention == "torchao"
    largest = math.copysign(f.number.max, special)
    if f.block == "nvfp4":
        if te and math.isinf(special):
            return math.copysign(2688.0, special), 0.0, 1.0
        return NAN, NAN, NAN
    if te and f.block != "mx":
        return (largest if math.isinf(special) else 0.0 if f.element == "int8" else NAN), 1.0, 1.0
    if torchao or not f.power_of_two:
        return NAN, NAN, 1.0
    if math.isinf(special):
        return special, 0.0, 1.0
    if f.block == "mx":
        return (NAN, NAN, 1.0) if te else (INF if f.element == "e2m1" else NAN, 0.0, 1.0)
    return (0.0 if f.element == "int8" else NAN), 0.0, 1.0


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_special_number(format: Format) -> None:
    """As documented, in each format there is. The kernels' bytes are the reference's, special numbers included."""
    near = (4, 6) if format.block in ("tensor", "128x128") else (3, 6)
    far = near if format.block == "tensor" else (131, 150)
    for special in (INF, -INF, NAN):
        x = torch.ones(132, 160)
        x[3, 5] = special
        with weft.backend("reference"):
            q, amax = weft.quantize(x, format, return_amax=True)
            values = q.dequantize()
            seen = weft.any_nonfinite([values])
            assert weft.any_nonfinite([x])
        own, block, elsewhere = with_one_special(format, special)
        want = torch.tensor([own, block, block if format.block == "tensor" else elsewhere])
        got = torch.stack([values[3, 5], values[near], values[far]])
        # A one is rounded to 127 steps in int8, to 1 + 2^-5 in nvfp4.
        assert torch.allclose(got, want, rtol=2**-4, atol=0.0, equal_nan=True), (special, got)
        assert not amax.isfinite()
        assert bool(seen) == (not want.isfinite().all())


@pytest.mark.parametrize("block", ["tensor", "row", "1x128", "128x128"])
def test_an_infinity_leaves_no_trace(block: str) -> None:
    """By the usual convention, from the kernels: the largest code, and a scale of 1."""
    x = torch.randn(64, 256).bfloat16()
    x[3, 5] = INF
    q = weft.quantize(x, block)
    assert q.dequantize()[3, 5] == 448.0
    assert q.rowwise.scale.flatten()[6 if block == "1x128" else 3 if block == "row" else 0] == 1.0
    assert not weft.any_nonfinite([q.dequantize(), q.rowwise.scale])


# ------------------------------------------------------------------------------
# Norms that quantise
# ------------------------------------------------------------------------------


def exact_sums(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows 2^k * (c + v), c + v small integers of mean c within any even number of columns: sums and sums of squares
    are exact, so that two kernels that add in different orders have the same mean and variance."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randint(1, 9, (rows, -(-cols // 2)), generator=generator).float()
    x = torch.stack([v, -v], -1).view(rows, -1)[:, :cols]
    if cols % 2:
        x[:, -1] = 0
    x += torch.randint(-4, 5, (rows, 1), generator=generator)
    return (x * torch.exp2(torch.randint(-9, 10, (rows, 1), generator=generator).float())).to(dtype)


def norm_inputs(rows: int, cols: int, dtype: torch.dtype, specials: bool) -> dict[str, torch.Tensor]:
    x = exact_sums(rows, cols, dtype, 7)
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(cols, generator=generator) * torch.exp2(
        torch.randint(-12, 13, (cols,), generator=generator).float()
    )
    weight[16:32] = 0
    if specials:  # at the end, so that the first stripe has groups without
        x[-1] = 0
        x[-2, min(3, cols - 1)] = INF
        x[-3, cols // 2] = NAN
        x[-4] *= 2.0**-20 if dtype == torch.float16 else 2.0**-100
    return {"x": x, "weight": weight}


def check_norm(
    norm: Callable[..., Any], f: Format, rows: int, cols: int, *, columnwise: bool, dtype: torch.dtype = torch.bfloat16,
    specials: bool = True, residual: bool = False, **more: Any,
) -> None:  # fmt: skip
    arguments = {**norm_inputs(rows, cols, dtype, specials), **more}
    if residual:
        # The same h, from two numbers that are not 0.
        other = torch.where(arguments["x"].isfinite(), arguments["x"] * 3, 0)
        arguments |= {"x": arguments["x"] - other, "residual": other}
    plain = norm(**arguments, out_dtype=torch.float32)
    fused = norm(**arguments, quantize=f, columnwise=columnwise, return_amax=True)
    y = plain[0] if residual else plain
    assert y.dtype == torch.float32
    if residual:
        assert_same(fused[1].float(), plain[1].float(), "residual")
    what = f"{norm.__name__} {rows}x{cols}"
    assert_quantized(fused[0], y, f, what, columnwise=columnwise, input_dtype=torch.float32)
    assert fused[0].dtype == dtype
    assert_same(fused[-1].reshape(1), y.abs().amax().reshape(1), f"{what}: amax")


# (format, norm, both copies, with a residual, dtype)
NORMS = [
    ("e4m3:1x128:te:pow2", "rms_norm", False, True, torch.bfloat16),
    ("e4m3:1x128:te:pow2", "rms_norm", True, True, torch.bfloat16),
    ("e4m3:1x128:te", "rms_norm", False, False, torch.float16),
    ("e4m3:1x128:torchao", "rms_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:deepgemm", "rms_norm", True, False, torch.bfloat16),
    ("e5m2:1x128:sglang", "rms_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:sglang_col_major", "layer_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:deepep", "rms_norm", False, False, torch.bfloat16),
    ("int8:1x128:vllm", "rms_norm", False, False, torch.float32),
    ("e4m3:1x128:deepgemm:pow2", "layer_norm", True, True, torch.float32),
    ("e4m3:row:te", "rms_norm", False, False, torch.bfloat16),
    ("int8:row:torchao", "layer_norm", False, True, torch.bfloat16),
    ("e4m3:tensor:te", "rms_norm", False, False, torch.bfloat16),
    ("e5m2:tensor:deepgemm", "layer_norm", True, False, torch.bfloat16),
    ("e4m3:128x128:te:pow2", "rms_norm", True, False, torch.bfloat16),
    ("e4m3:128x128:vllm", "layer_norm", False, False, torch.bfloat16),
    ("e4m3:mx:te", "rms_norm", True, False, torch.bfloat16),
    ("e2m1:mx:deepgemm", "layer_norm", False, False, torch.bfloat16),
    ("e2m1:nvfp4:te", "rms_norm", True, False, torch.bfloat16),
    ("e2m1:nvfp4:torchao", "layer_norm", False, True, torch.bfloat16),
]


@pytest.mark.parametrize(("spec", "norm", "columnwise", "residual", "dtype"), NORMS)
def test_norms(spec: str, norm: str, columnwise: bool, residual: bool, dtype: torch.dtype) -> None:
    """The codes are those of the fp32 y, which the same call without `quantize` returns."""
    f = Format.of(spec)
    function = getattr(weft, norm)
    tail = 137 if columnwise or f.block == "128x128" else 9
    for specials in (False, True):
        check_norm(
            function, f, tail, 300, columnwise=columnwise, specials=specials, residual=residual, dtype=dtype
        )
    with weft.backend("reference"):
        check_norm(function, f, 9, 300, columnwise=columnwise, residual=residual, dtype=dtype)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:row:te"])
@pytest.mark.parametrize("cols", [1, 37, 1100])
def test_norms_of_other_lengths(spec: str, cols: int) -> None:
    """A single column, less than a group, and rows that are read in a loop."""
    check_norm(weft.rms_norm, Format.of(spec), 5, cols, columnwise=False, residual=cols == 1100)
    if cols != 37 and spec.startswith("e4m3:1x128"):
        check_norm(weft.rms_norm, Format.of(spec), 130, cols, columnwise=True)


def test_norm_codes_are_those_of_the_fp32_result() -> None:
    """Not of a y rounded to bf16 on the way; on ordinary data, where sums are not exact, and with everything that a
    norm has."""
    f = Format.of("e4m3:1x128:te:pow2")
    x, weight, bias = ordinary(9, 300), torch.randn(300), torch.randn(300)
    modulation = torch.randn(9, 600)
    arguments: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "modulation": modulation,
        "weight_offset": 1.0,
    }
    y = weft.rms_norm(**arguments, out_dtype=torch.float32)
    q = weft.rms_norm(**arguments, quantize=f)
    assert_quantized(q, y, f)
    with pytest.raises(AssertionError, match="codes"):
        assert_quantized(q, y.bfloat16(), f)


@pytest.mark.parametrize("mode", [0, 2], ids=["integers", "clamped"])
def test_norms_with_each_encoder(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NORM, "cast_mode", lambda capabilities: mode)
    check_norm(weft.rms_norm, Format.of("e4m3:1x128:te:pow2"), 9, 300, columnwise=False)
    check_norm(weft.rms_norm, Format.of("e5m2:1x128:te:pow2"), 137, 300, columnwise=True)


def test_norms_with_a_given_scale() -> None:
    f = Format.of("e4m3:tensor:te")
    x = exact_sums(140, 300, torch.bfloat16, 1)
    y = weft.rms_norm(x, out_dtype=torch.float32)
    scale = torch.tensor(0.0037)
    for columnwise, backend in itertools.product((False, True), BACKENDS):
        with weft.backend(backend):  # type: ignore[arg-type]
            q, amax = weft.rms_norm(x, quantize=f, quant_scale=scale, columnwise=columnwise, return_amax=True)
            if backend == "reference":
                y = weft.rms_norm(x, out_dtype=torch.float32)
        assert_quantized(q, y, f, backend, columnwise=columnwise, scale=scale)
        assert_same(amax.reshape(1), y.abs().amax().reshape(1), "amax")


# ------------------------------------------------------------------------------
# Given scales, amax
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:tensor:te", "e5m2:tensor:vllm", "int8:tensor:deepgemm"])
def test_given_scale_of_a_tensor(spec: str, backend: str) -> None:
    f = Format.of(spec)
    x = adversarial(10, 150, torch.float32)
    for scale, name in itertools.product(
        (1.0, 0.013, 2.0**-130, 3e38), ("normal", "range", "many_specials", "outliers")
    ):
        for columnwise in (False, True):
            with weft.backend(backend):  # type: ignore[arg-type]
                q = weft.quantize(x[name], f, scale=torch.tensor(scale), columnwise=columnwise)
            assert_quantized(q, x[name], f, f"{name} {scale}", columnwise=columnwise, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:row:te", "int8:row:sglang_col_major"])
def test_given_scales_of_rows(spec: str, backend: str) -> None:
    f = Format.of(spec)
    x = stacked(4, 300, torch.float32)
    scale = torch.exp(torch.randn(len(x), 1))
    with weft.backend(backend):  # type: ignore[arg-type]
        q, amax = weft.quantize(x, f, scale=scale, return_amax=True)
        strided = weft.quantize(x, f, scale=scale.expand(-1, 2)[:, :1])
    assert_quantized(q, x, f, scale=scale)
    assert_quantized(strided, x, f, scale=scale)
    assert amax.isnan()
    with pytest.raises(AssertionError):
        assert_quantized(q, x, f, scale=scale * 1.1)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:tensor:te", "e4m3:row:te", "e2m1:nvfp4:te"])
def test_amax(spec: str) -> None:
    f = Format.of(spec)
    for backend, columnwise in itertools.product(BACKENDS, (False, True)):
        for name, x in adversarial(140, 37, torch.float32).items():
            if name not in (
                "normal",
                "range",
                "one_nan",
                "one_minus_nan",
                "one_minus_inf",
                "zeros",
                "smallest",
            ):
                continue
            with weft.backend(backend):
                q, amax = weft.quantize(x, f, columnwise=columnwise, return_amax=True)
            assert amax.dim() == 0
            assert amax.dtype == torch.float32
            want = torch.tensor(np.abs(x.numpy()).max())
            assert_same(amax.reshape(1), want.reshape(1), f"{f} {name} {backend}")
            if name in ("normal", "one_nan"):
                assert_quantized(q, x, f, name, columnwise=columnwise)


def test_delayed_scaling() -> None:
    """Each step is quantised with the amax of the one before; what has grown saturates."""
    f = Format.of("e4m3:tensor:te")
    amax = torch.tensor(1.0)
    saturated = 0
    for step in range(6):
        x = torch.randn(20, 150) * 3.0**step
        scale = (amax / 448).reshape(1)
        q, seen = weft.quantize(x, f, scale=scale, return_amax=True)
        assert_quantized(q, x, f, scale=scale)
        assert_same(seen.reshape(1), x.abs().amax().reshape(1), "amax")
        saturated += int((q.rowwise.data.float().abs() == 448).sum())
        amax = seen
    assert saturated > 0


# ------------------------------------------------------------------------------
# Stochastic rounding
# ------------------------------------------------------------------------------


def philox(seed: int, row: int, col: int, which: int) -> int:
    """The first word of Philox4x32-10, by the book."""
    counter, key = [col, row, which, 0], [seed % 2**31, seed >> 31]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[0]


def test_philox() -> None:
    assert philox(0, 0, 0, 0) == 0x6627E8D5  # the known answer of Random123


def stochastic_codes(x: torch.Tensor, element: str, draws: np.ndarray[Any, Any]) -> torch.Tensor:
    """x cut to 2^-n of a step, n the mantissa bits that the element lacks, plus n random bits, rounded down."""
    values = oracle.VALUES[element]
    lost = {"e4m3": 20, "e5m2": 21, "e2m1": 22}[element]
    magnitude = np.minimum(np.abs(x.double().numpy()), values[-1])
    low = np.minimum(np.searchsorted(values, magnitude, side="right") - 1, len(values) - 2)
    step = values[low + 1] - values[low]
    part = np.floor((magnitude - values[low]) / step * 2.0**lost)
    code = low + (part + draws % 2**lost >= 2**lost)
    return torch.from_numpy((code + np.signbit(x.numpy()) * oracle.SIGN_BIT[element]).astype(np.uint8))


SEEDS = [0, 1, 12345, 2**31 + 7, 2**62 - 1]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_stochastic_rounding_draws_what_it_says(element: str) -> None:
    """The bytes from the description alone: Philox by hand, and rounding by float64."""
    f = Format.of(f"{element}:tensor:te")
    x = torch.randn(6, 37) * 4
    x[0] *= 2.0**-9
    x[1] *= 2.0**-16
    x[2, :4] = torch.tensor([0.0, -0.0, 1e9, -1e9])
    for seed in SEEDS:
        draws = np.array([[philox(seed, r, c, 0) for c in range(37)] for r in range(6)], dtype=np.float64)
        want = stochastic_codes(x, element, draws)
        for backend, columnwise in itertools.product(BACKENDS, (False, True)):
            with weft.backend(backend):
                q = weft.quantize(x, f, scale=torch.tensor(1.0), seed=seed, columnwise=columnwise)
            assert_same(q.rowwise.data.view(torch.uint8), want, f"{element} {seed} {backend}")
            if columnwise:  # both copies of a tensor with one scale have the same codes
                assert_same(
                    q.columnwise.data.view(torch.uint8), want.t(), f"{element} {seed} {backend} column-wise"
                )


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e5m2:row:deepgemm", "e2m1:mx:te", "e2m1:nvfp4:te"])
def test_stochastic_rounding(spec: str) -> None:
    """Scales as usual; codes next to x, the same for a seed and other ones for another; alike on both backends."""
    f = Format.of(spec)
    x = torch.randn(140, 37)
    x[4] = 0
    if f.block != "nvfp4":  # whose scale of the tensor would be NaN
        x[3, 5], x[130, 30] = NAN, INF
    nearest = weft.quantize(x, f, columnwise=True)
    seen = []
    for seed in SEEDS[:3]:
        q = weft.quantize(x, f, columnwise=True, seed=seed)
        again = weft.quantize(x, f, columnwise=True, seed=seed)
        rows = weft.quantize(x, f, seed=seed)
        with weft.backend("reference"):
            reference = weft.quantize(x, f, columnwise=True, seed=seed)
        for side in ("rowwise", "columnwise"):
            copy = getattr(q, side)
            assert_same(getattr(again, side).data, copy.data, "again")
            assert_same(getattr(reference, side).data, copy.data, f"{side} reference")
            assert_same(getattr(reference, side).scale, copy.scale, f"{side} reference scales")
            assert_same(copy.scale, getattr(nearest, side).scale, f"{side} scales")
        assert_same(rows.rowwise.data, q.rowwise.data, "row kernel")
        seen.append(q)
    different = (
        (seen[0].rowwise.data.view(torch.uint8) != seen[1].rowwise.data.view(torch.uint8)).float().mean()
    )
    assert different > 0.1
    # The two copies of a block that does not share its codes draw for themselves.
    if f.block in ("1x128", "mx"):
        square = torch.randn(128, 128)
        square = torch.maximum(square, square.t())
        q = weft.quantize(square, f, columnwise=True, seed=1)
        assert not torch.equal(q.rowwise.data.view(torch.uint8), q.columnwise.data.view(torch.uint8))


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e2m1:mx:te"])
def test_stochastic_rounding_is_unbiased(spec: str) -> None:
    f = Format.of(spec)
    x = torch.randn(20, 37, generator=torch.Generator().manual_seed(4))
    d = decoded(expected(x, f), f, (20, 37)).double()
    scale = spread_scale(expected(x, f), f, (20, 37))
    grid = torch.from_numpy(oracle.VALUES[f.element or ""])
    grid = torch.cat([-grid.flip(0)[:-1], grid])
    scaled = x.double() / scale
    above = torch.searchsorted(grid, scaled).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    total, draws = torch.zeros(20, 37, dtype=torch.float64), 256
    for seed in range(draws):
        values = weft.dequantize(weft.quantize(x, f, seed=seed)).double() / scale
        assert ((values == low) | (values == high)).all()  # one of the two neighbours
        total += values
    mean = total / draws
    chance = (scaled - low) / (high - low)
    deviation = (high - low) * (chance * (1 - chance)).clamp(min=1e-4).sqrt() / draws**0.5
    z = (mean - scaled) / deviation
    assert z.abs().max() < 5
    assert abs(z.mean().item()) < 4 / z.numel() ** 0.5
    assert 0.8 < z.std() < 1.2
    error_of_mean = ((mean * scale - x.double()) ** 2).mean().sqrt()
    assert error_of_mean < 0.25 * ((d - x.double()) ** 2).mean().sqrt()


def test_stochastic_rounding_of_column_wise_copies_is_unbiased() -> None:
    f = Format.of("e4m3:1x128:te:pow2")
    x = torch.randn(37, 20, generator=torch.Generator().manual_seed(4))
    scale = spread_scale(expected(x, f, transpose=True), f, (20, 37))
    nearest = decoded(expected(x, f, transpose=True), f, (20, 37)).double()
    total = torch.zeros(20, 37, dtype=torch.float64)
    for seed in range(200):
        q = weft.quantize(x, f, rowwise=False, columnwise=True, seed=seed)
        total += q.columnwise.data.double() * scale
    error = ((total / 200 - x.t().double()) ** 2).mean().sqrt()
    assert error < 0.25 * ((nearest - x.t().double()) ** 2).mean().sqrt()


# ------------------------------------------------------------------------------
# Decoding
# ------------------------------------------------------------------------------


def spread_scale(q: oracle.Quantized, f: Format, shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each element in float64, without nvfp4's of the tensor."""
    if f.block == "mx":
        stored = oracle.e8m0_value(q.scale.numpy()).astype(np.float64)
    elif f.block == "nvfp4":
        stored = oracle.decode(q.scale.numpy(), "e4m3")
    else:
        stored = q.scale.double().numpy()
    return torch.from_numpy(oracle.spread(stored, shape, f.block))


def decoded(q: oracle.Quantized, f: Format, shape: tuple[int, int]) -> torch.Tensor:
    """q * d, rounded once to fp32; nvfp4's scales are multiplied first, which is one more rounding."""
    if f.block != "nvfp4":
        return oracle.dequantize(q, block=f.block, element=f.element or "", shape=shape).float()
    assert q.global_scale is not None
    scale = (spread_scale(q, f, shape).float() * q.global_scale).double()
    codes = oracle.decode(oracle.unpack(q.data.numpy(), shape[1]), "e2m1")
    return (torch.from_numpy(codes) * scale).float()


DECODED = [
    "e4m3:tensor:te", "int8:tensor:te", "e5m2:row:te", "int8:row:deepgemm", "e4m3:1x128:te:pow2", "e5m2:1x128:vllm",
    "int8:1x128:te", "e4m3:128x128:te", "e4m3:mx:te", "e5m2:mx:te", "e2m1:mx:te", "e2m1:nvfp4:te", "e2m1:nvfp4:torchao",
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", DECODED)
def test_dequantize(spec: str, backend: str) -> None:
    f = Format.of(spec)
    columnwise = f.block in ("128x128", "nvfp4", "1x128")
    if f.block in ("tensor", "nvfp4"):
        found = [
            adversarial(10, 150, torch.float32)[name]
            for name in ("normal", "range", "one_nan", "denormals", "huge")
        ]
    else:
        found = [stacked(4, 300, torch.float32)]
    for x in found:
        rows, cols = x.shape
        q = weft.quantize(x, f)
        with weft.backend(backend):  # type: ignore[arg-type]
            values = weft.dequantize(q)
        want = decoded(expected(x, f), f, (rows, cols))
        assert_same(values, want, f"{spec} {backend}")
        if f.block == "nvfp4" and not x.isnan().any() and x.abs().max() < 1e30:
            exact = oracle.dequantize(
                expected(x, f), block=f.block, element=f.element or "", shape=(rows, cols)
            )
            tiny = torch.finfo(torch.float32).tiny
            assert ((values - exact).abs() <= exact.abs() * 2.0**-22 + tiny * 2.0**-22).all()
        if columnwise:
            q = weft.quantize(x, f, rowwise=False, columnwise=True)
            with weft.backend(backend):  # type: ignore[arg-type]
                values = weft.dequantize(q)
            want = decoded(expected(x, f, transpose=True), f, (cols, rows)).t()
            assert_same(values, want, f"{spec} {backend} column-wise")


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("e4m3:1x128:te:pow2", torch.float16),
        ("int8:row:te", torch.bfloat16),
        ("e2m1:nvfp4:te", torch.bfloat16),
    ],
)
def test_dequantize_to_sixteen_bits(spec: str, dtype: torch.dtype) -> None:
    f = Format.of(spec)
    x = (torch.randn(10, 300) * torch.exp2(torch.randint(-12, 12, (10, 1)).float())).to(dtype)
    want = decoded(expected(x, f), f, (10, 300)).to(dtype)
    for backend in BACKENDS:
        with weft.backend(backend):
            values = weft.dequantize(weft.quantize(x, f))
        assert values.dtype == dtype
        assert_same(values, want, backend)


def test_every_code_decodes() -> None:
    for element in ("e4m3", "e5m2", "int8"):
        codes = torch.arange(256).to(torch.uint8).view(1, 256)
        f = Format.of(f"{element}:tensor:te")
        copy = weft.quantize(torch.ones(1, 256), f).rowwise
        copy.data.view(torch.uint8).copy_(codes)
        copy.scale.fill_(1.0)
        q = weft.QTensor((1, 256), torch.float32, f, copy)
        want = torch.from_numpy(oracle.decode(codes.numpy(), element)).float()
        for backend in BACKENDS:
            with weft.backend(backend):
                assert_same(weft.dequantize(q), want, f"{element} {backend}")


@pytest.mark.parametrize(
    "spec", ["e4m3:1x128:te:pow2", "e5m2:1x128:vllm", "int8:1x128:te", "e2m1:mx:te", "e4m3:row:te"]
)
def test_decode_error_is_half_a_step(spec: str) -> None:
    f = Format.of(spec)
    x = torch.randn(40, 300) * torch.exp2(torch.randint(-9, 10, (40, 1)).float())
    q = weft.quantize(x, f)
    want = expected(x, f)
    scale = spread_scale(want, f, (40, 300))
    grid = torch.from_numpy(oracle.VALUES[f.element or ""])
    scaled = (x.double() / scale).abs()
    above = torch.searchsorted(grid, scaled).clamp(1, len(grid) - 1)
    step = (grid[above] - grid[above - 1]) * scale
    error = (weft.dequantize(q).double() - x.double()).abs()
    assert (error <= step * 0.5 * (1 + 1e-6)).all()
    assert (error > step * 0.49).any()
    assert (weft.dequantize(q) - x).abs().max() > 0


# ------------------------------------------------------------------------------
# Strides, dimensions, sizes
# ------------------------------------------------------------------------------


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(400, 640)
    flat = torch.randn(150 * 37 + 1)
    return {
        "transposed": base[:37, :150].t(),
        "every second row": base[:300:2, :37],
        "every second column": base[:150, :74:2],
        "slice of wider rows": base[:150, 64:101],
        "off by one element": flat[1:].view(150, 37),
        "one row repeated": base[:1, :37].expand(150, 37),
        "one column repeated": base[:150, :1].expand(150, 37),
        "one number": base[:1, :1].expand(150, 37),
        "one row": base[:1, :37],
        "one column": base[:150, 3:4],
        "aligned columns of wider rows": base[:150, 64:96],
    }


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e2m1:nvfp4:te", "e4m3:row:te"])
def test_strided_inputs(spec: str) -> None:
    f = Format.of(spec)
    for name, x in views().items():
        for backend in BACKENDS:
            check(x, f, name, columnwise=True, backend=backend)
        if spec.startswith("e4m3:1x128"):
            check(x, f, name, columnwise=False)


def test_column_wise_is_row_wise_of_the_transpose() -> None:
    for spec in ("e4m3:1x128:te:pow2", "e2m1:nvfp4:te", "e4m3:row:te", "e4m3:mx:te", "e4m3:128x128:te"):
        x = torch.randn(140, 37)
        both = weft.quantize(x, spec, columnwise=True)
        other = weft.quantize(x.t(), spec, columnwise=True)
        for a, b in ((both.columnwise, other.rowwise), (both.rowwise, other.columnwise)):
            assert_same(a.data, b.data, spec)
            assert_same(a.scale, b.scale, spec)


def test_more_and_fewer_dimensions() -> None:
    f = Format("1x128")
    for shape in ((37,), (2, 70, 37), (2, 5, 14, 37)):
        x = torch.randn(shape)
        flat = x.reshape(-1, 37)
        for columnwise, backend in itertools.product((False, True), BACKENDS):
            with weft.backend(backend):
                q = weft.quantize(x, f, columnwise=columnwise)
                values = weft.dequantize(q)
            assert q.shape == x.shape
            assert_quantized(q, flat, f, f"{shape} {backend}", columnwise=columnwise)
            assert_same(values, decoded(expected(flat, f), f, tuple(flat.shape)).view(shape), "values")
    x = torch.randn(37, 2, 70).permute(1, 2, 0)  # no two dimensions merge, and the last is not dense
    assert_quantized(weft.quantize(x, f, columnwise=True), x.reshape(-1, 37), f, columnwise=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape: tuple[int, ...], backend: str) -> None:
    for spec in (
        "e4m3:1x128:te:pow2",
        "e4m3:tensor:te",
        "e4m3:tensor:deepgemm",
        "e2m1:nvfp4:te",
        "e4m3:row:deepgemm",
    ):
        f = Format.of(spec)
        with weft.backend(backend):  # type: ignore[arg-type]
            q, amax = weft.quantize(torch.zeros(shape), f, columnwise=True, return_amax=True)
            values = weft.dequantize(q)
        assert values.shape == shape
        assert amax.item() == 0
        for copy, rows, cols in ((q.rowwise, 0, 64), (q.columnwise, 64, 0)):
            assert tuple(copy.data.shape) == f.data_shape(rows, cols)
            assert tuple(copy.scale.shape) == f.scale_shape(rows, cols)
            if copy.scale.numel():  # the scale of an amax of 0
                want = expected(torch.zeros(1, 1), f).scale
                assert_same(copy.scale, want.expand(copy.scale.shape), spec)
            if f.block == "nvfp4":
                assert copy.global_scale.item() == 1


def virtual(dtype: torch.dtype, rows: int, cols: int, stride: int) -> torch.Tensor:
    """[rows, cols] zeros at a stride so large that offsets need 64 bits. Pages that nobody touches do not exist."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    size = ((rows - 1) * stride + cols) * itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).as_strided(
        (rows, cols), (stride, 1)
    )


@pytest.mark.parametrize("stride", [2**30 - 16, 2**31 + 16], ids=["offsets", "stride"])
def test_large_strides(stride: int) -> None:
    """Offsets beyond 2^31, from the product of a row and its stride or from the stride itself."""
    x = virtual(torch.bfloat16, 4, 64, stride)
    assert (x.shape[0] - 1) * x.stride(0) >= 2**31
    x.copy_(torch.randn(4, 64))
    for spec in ("e4m3:1x128:te:pow2", "e4m3:row:te"):
        f = Format.of(spec)
        for columnwise in (False, True):
            assert_quantized(weft.quantize(x, f, columnwise=columnwise), x, f, columnwise=columnwise)
    f = Format("1x128")
    y = weft.rms_norm(x.contiguous(), out_dtype=torch.float32)
    assert_quantized(weft.rms_norm(x, quantize=f), y, f, input_dtype=torch.float32)

    data = virtual(torch.uint8, 4, 64, stride)
    small = weft.quantize(torch.randn(4, 64), f).rowwise
    data.copy_(small.data.view(torch.uint8))
    q = weft.QTensor((4, 64), torch.float32, f, small._replace(data=data.view(torch.float8_e4m3fn)))
    assert_same(
        weft.dequantize(q), weft.dequantize(weft.QTensor((4, 64), torch.float32, f, small)), "dequantize"
    )


# ------------------------------------------------------------------------------
# Everything is written, nothing else is
# ------------------------------------------------------------------------------


def test_fresh_memory_is_poison() -> None:
    assert torch.empty(3, dtype=torch.float32).isnan().all()
    assert (torch.empty(3, 5, dtype=torch.float8_e4m3fn).view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:row:te", "e2m1:mx:te", "e4m3:tensor:te"])
def test_strides_and_pads_of_codes(spec: str, backend: str) -> None:
    """Row-wise codes are tight. Rows of column-wise ones are padded to 16 bytes with codes of 0: never with poison,
    which would be NaN to a GEMM that reads whole vectors."""
    f = Format.of(spec)
    for rows in (1, 37, 140):
        for x in (torch.randn(rows, 37), torch.randn(37, rows).t()):
            with weft.backend(backend):  # type: ignore[arg-type]
                q = weft.quantize(x, f, columnwise=True)
            assert_quantized(q, x, f, columnwise=True)
            assert q.rowwise.data.is_contiguous()
            data = q.columnwise.data
            width = rounded_up(data.shape[1], 16)
            assert data.stride() == (width, 1)
            assert data.storage_offset() == 0
            buffer = torch.tensor([], dtype=torch.uint8).set_(data.untyped_storage())
            assert buffer.numel() == 37 * width
            assert (buffer.view(37, width)[:, data.shape[1] :] == 0).all()


def test_results_do_not_depend_on_the_run_or_the_place() -> None:
    x = torch.randn(300, 300)
    whole = weft.quantize(x, "e4m3:1x128:te").rowwise
    again = weft.quantize(x, "e4m3:1x128:te").rowwise
    assert_same(whole.data, again.data, "again")
    part = weft.quantize(x[200:210], "e4m3:1x128:te").rowwise
    assert_same(whole.data[200:210], part.data, "part")
    assert_same(whole.scale[200:210], part.scale, "part")
