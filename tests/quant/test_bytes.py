"""Quantized bytes and scales equal the oracle's exactly, in every format and on every path.

A kernel variant takes about half a second to compile, so local formats (whose blocks lie within a row or within 128
rows) see all adversarial inputs in one tensor, and the tests of a format share shapes as far as the variant depends on
them. The exhaustive product of formats and kernels is marked slow; `_always` selects the cases that always run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.quant.checks import (
    BACKENDS,
    FORMATS,
    INF,
    NAN,
    QUANTIZE,
    adversarial,
    assert_copy,
    assert_quantized,
    assert_same,
    bits,
    check,
    decoded,
    expected,
    inputs,
    ordinary,
    stacked,
    stripes,
)
from weft import Format
from weft.lab import oracle
from weft.runtime import recording


def test_inputs_contain_the_hard_cases() -> None:
    x = stacked(4, 300, torch.float32)
    assert x.isnan().any()
    assert x.isinf().any()
    assert (x.abs().amax(1) == 0).any()
    assert x.shape[1] % 128 != 0
    assert stripes(19, torch.float32).shape[0] % 128 == 5


def _always(f: Format, columnwise: bool) -> bool:
    """Return whether a case runs without -m slow: mx and both kinds of nvfp4 on both kernels; 1x128 on one of them,
    alternating; each convention once for the other blocks, which share scale functions, alternating kind of scale,
    element and kernel."""
    turn = list(oracle.FLOOR).index(f.convention)
    if f.block in ("mx", *oracle.NVFP4):
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
    if f.block in ("tensor", "row", *oracle.NVFP4):
        for name, x in adversarial(5, 37, torch.float32).items():
            check(x, f, name, columnwise=True, backend="reference")
    else:
        check(stripes(3, torch.float32), f, columnwise=True, backend="reference")
    if f.group:
        check(stacked(2, 150, torch.float32), f, columnwise=False, backend="reference")


def test_cases_that_always_run_cover_each_choice() -> None:
    chosen = {parameters.values for parameters in ALL if not parameters.marks}
    for block in ("tensor", "row", "1x128", "128x128"):
        for columnwise in (False, True):
            formats = [f for f, c in chosen if f.block == block and c == columnwise]
            assert {f.element for f in formats} == {f.element for f in FORMATS if f.block == block}
            assert {f.power_of_two for f in formats} == {False, True}
        assert {f.convention for f, _ in chosen if f.block == block} == set(oracle.FLOOR)
    exhaustive = ("1x128", "mx", *oracle.NVFP4)
    assert {f for f, _ in chosen if f.block in exhaustive} == {f for f in FORMATS if f.block in exhaustive}


BF16 = [
    "e4m3:1x128:te:pow2", "e5m2:1x128:te", "int8:1x128:vllm", "e4m3:1x128:sglang_col_major", "e4m3:row:deepep:pow2",
    "int8:row:torchao", "e4m3:tensor:deepgemm", "e5m2:tensor:te", "e4m3:128x128:sglang", "e2m1:mx:torchao",
    "e2m1:nvfp4:te", "e2m1:nvfp4_16x16:te", "int4:1x128:te",
]  # fmt: skip


FP16 = ["e4m3:1x128:te", "e5m2:1x128:te:pow2", "int8:row:te", "e5m2:tensor:te", "e4m3:128x128:te"]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("dtype", "spec"),
    [(torch.bfloat16, spec) for spec in BF16] + [(torch.float16, spec) for spec in FP16],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_sixteen_bit_inputs(dtype: torch.dtype, spec: str) -> None:
    """Only te's rule for MAX / amax = inf depends on the dtype."""
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


ROTATED = "e2m1:nvfp4:te:hadamard-columnwise"

SHAPES = [(1, 1), (3, 15), (5, 129), (127, 16), (128, 128), (130, 1100)]


@pytest.mark.parametrize(
    "spec",
    [
        "e4m3:1x128:te:pow2",
        "int8:row:te",
        "e2m1:mx:te",
        "e2m1:nvfp4:te",
        "e2m1:nvfp4_16x16:te",
        ROTATED,
        "e5m2:tensor:te",
        "e4m3:128x128:te:pow2",
    ],
)
def test_shapes(spec: str) -> None:
    """Tails in both dimensions, tiles that fit exactly, single rows and columns, and several tiles per row."""
    f = Format.of(spec)
    for rows, cols in SHAPES if f.block in ("1x128", "row") else SHAPES[:4]:
        x = torch.randn(rows, cols)
        if rows > 2:
            x[1] = 0
        for columnwise in (False, True):
            # For blocks that take several passes the tall tiles are enough.
            if columnwise or f.block in ("1x128", "row", "mx"):
                check(x, f, f"{rows}x{cols}", columnwise=columnwise)
        check(x, f, f"{rows}x{cols}", columnwise=True, backend="reference")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_rotated_copies(dtype: torch.dtype) -> None:
    """Rotated copies of hard inputs, with a number of rows that is not a multiple of 16. The row-wise copy is not
    rotated and has its own global scale."""
    f = Format.of(ROTATED)
    for name, x in adversarial(37, 19, dtype).items():
        check(x, f, name, columnwise=True)
        check(x, f, name, columnwise=True, backend="reference")
    x = torch.zeros(64, 32, dtype=dtype)
    x[5, 7] = 1024
    q, amax = weft.quantize(x, f, columnwise=True, return_amax=True)
    assert amax == 1024
    assert (
        q.rowwise.global_scale == 4 * q.columnwise.global_scale
    )  # the outlier became 16 elements of a quarter its size


def test_rotated_copies_decode_to_the_original_values() -> None:
    """An unrotated copy is preferred; a rotated copy alone decodes too, and so does the transpose."""
    x = torch.randn(37, 40)
    x[3] *= 30
    both = weft.quantize(x, ROTATED, columnwise=True)
    rows, rotated = weft.quantize(x, "nvfp4"), weft.quantize(x, ROTATED, rowwise=False, columnwise=True)
    assert torch.equal(both.dequantize(), rows.dequantize())
    assert torch.equal(both.T.dequantize(), rows.dequantize().T)
    assert both.T.format.hadamard == "rowwise"
    assert both.T.T.format == both.format
    decoded_copy = expected(x, both.format, transpose=True)
    values = oracle.dequantize(decoded_copy, block="nvfp4", element="e2m1", shape=(40, 48))
    matrix = (
        torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]).double() / 4
    )
    wanted = (values.reshape(-1, 16) @ matrix * torch.from_numpy(oracle.SIGNS)).reshape(40, 48)[:, :37].T
    for got in (
        rotated.dequantize(),
        rotated.T.dequantize().T,
        rotated[:32].dequantize(),
        rotated[32:].dequantize(),
    ):
        part = wanted[:32] if len(got) == 32 else wanted[32:] if len(got) == 5 else wanted
        assert torch.allclose(got.double(), part, rtol=1e-5, atol=1e-5)
    assert (rotated.dequantize() - x).norm() < 0.12 * x.norm()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Format("mx", hadamard="columnwise"), "only for block 'nvfp4'"),
        (lambda: Format("nvfp4", hadamard="both"), "must be one of rowwise, columnwise"),  # type: ignore[arg-type]
        (lambda: Format.of("e4m3:1x128:te:hadamard-columnwise"), "only for block 'nvfp4'"),
        (lambda: Format.of("e2m1:nvfp4:te:hadamard"), "unknown format"),
        (
            lambda: weft.quantize(torch.ones(16, 16), Format("nvfp4", hadamard="rowwise")),
            "transpose the result",
        ),
        (lambda: weft.rms_norm(torch.ones(16, 16), quantize=ROTATED), r"only weft\.quantize rotates"),
        (lambda: weft.glu(torch.ones(16, 16), quantize_grad=ROTATED), r"only weft\.quantize rotates"),
    ],
    ids=["mx", "both", "spec", "no side", "row-wise", "a result", "a gradient"],
)
def test_unsupported_rotations_raise(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_column_wise_copy_alone() -> None:
    for spec in (
        "e4m3:1x128:te:pow2",
        "e2m1:nvfp4_16x16:te",
        ROTATED,
        "e4m3:row:deepgemm",
        "e4m3:128x128:te:pow2",
    ):
        f = Format.of(spec)
        x = torch.randn(150, 37)
        for backend in BACKENDS:
            with weft.backend(backend):
                q = weft.quantize(x, f, rowwise=False, columnwise=True)
            assert_quantized(q, x, f, backend, rowwise=False, columnwise=True)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "int8:row:te", "e2m1:nvfp4:te", "e4m3:tensor:te"])
def test_several_rows_to_a_program(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU programs take several rows. On a CPU they take one, and the mask over rows would never be compiled."""
    monkeypatch.setattr(QUANTIZE, "row_config", lambda kernel, cols, target: (8, 256, 4))
    f = Format.of(spec)
    for rows in (1, 13):
        x = torch.randn(rows, 300)
        check(x, f, columnwise=False)
        assert_same(
            weft.dequantize(weft.quantize(x, f)), decoded(expected(x, f), f, (rows, 300)), "dequantize"
        )


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
    # Nonzero padding.
    broken(lambda q: q.rowwise.scale.as_strided((8,), (1,)).__setitem__(7, 1.0))


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
def test_a_wrong_convention_is_noticed(element: Any, power_of_two: bool) -> None:
    """The inputs distinguish any two conventions whose formulas differ."""
    x = stacked(4, 300, torch.float32)
    results = {
        c: expected(x, Format("1x128", element, c, power_of_two))
        for c in oracle.FLOOR  # type: ignore[arg-type]
    }
    indistinguishable = set()
    for a, b in itertools.combinations(results, 2):
        equal = torch.equal(results[a].data, results[b].data)
        if equal and torch.equal(bits(results[a].scale), bits(results[b].scale)):
            indistinguishable.add((a, b))
    floats = {
        ("deepgemm", "deepep"),
        ("sglang", "sglang_col_major"),
        ("sglang", "vllm"),
        ("sglang_col_major", "vllm"),
    }
    assert indistinguishable == (
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


@functools.cache
def encoder_samples() -> torch.Tensor:
    """Return every bf16 value (including every NaN), and fp32 values around each value, midpoint and limit of every
    element type."""
    every_bf16 = (torch.arange(65536, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32)
    centers = [np.array([2.0**-149, 2.0**-126, 448, 464, 480, 57344, 61440, 65536, 127, 127.5, 6, 3.4e38])]
    for values in oracle.VALUES.values():
        centers += [values, (values[:-1] + values[1:]) / 2]
    center = torch.from_numpy(np.concatenate(centers).astype(np.float32)).view(torch.int32)
    around = torch.cat([torch.arange(-40, 41), torch.tensor([-(2**16), -(2**12), -300, 300, 2**12, 2**16])])
    near = (center[:, None] + around[None, :].int()).clamp(min=0).flatten().view(torch.float32)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(3))
    return torch.cat([every_bf16, near, -near, patterns.to(torch.int32).view(torch.float32)])


def encoded(x: torch.Tensor, element: str) -> torch.Tensor:
    with np.errstate(invalid="ignore"):  # samples include signaling NaNs
        return torch.from_numpy(oracle.encode(x.numpy(), element))


def in_rows(values: torch.Tensor, cols: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(-values.numel() % cols)]).view(-1, cols)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["integers", "conversion", "clamped"])
def test_each_encoder(element: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of 1 encodes x itself. sm_80, sm_89 and gfx942 encode with integer arithmetic, gfx950 with a clamp and a
    conversion, other targets with a conversion; Loom runs all three."""
    monkeypatch.setattr(QUANTIZE, "cast_mode", lambda capabilities: mode)
    f = Format.of(f"{element}:tensor:te")
    x = in_rows(encoder_samples(), 1000)
    q = weft.quantize(x, f, scale=torch.tensor(1.0))
    want = encoded(x, element)
    assert len(want.unique()) == 2 * len(oracle.VALUES[element]) + 1  # every code, plus NaN
    assert_same(q.rowwise.data.view(torch.uint8), want, f"{element} mode {mode}")
    f = Format.of(f"{element}:1x128:te:pow2")
    check(stacked(4, 300, torch.float32), f, f"mode {mode}", columnwise=False)
    if element == "e4m3":
        check(stripes(19, torch.float32), f, f"mode {mode}", columnwise=True)


def test_encoders_differ_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each encoder compiles a different kernel; otherwise the test above would run the same one three times."""
    compiled = set()
    for mode in (0, 1, 2):
        monkeypatch.setattr(QUANTIZE, "cast_mode", lambda capabilities, mode=mode: mode)
        with recording("sm_90") as variants:
            weft.quantize(torch.empty(3, 300, device="meta"), "e4m3:1x128:te:pow2")
        compiled.update(variants)
    assert len(compiled) == 3


def test_integer_and_e2m1_encoders() -> None:
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
    f = Format.of("int4:1x128:te")  # a 7 in every group does
    x = in_rows(samples[samples.abs() <= 7], 310)
    x[:, ::128] = 7
    want = expected(x, f)
    assert (want.scale == 1).all()
    assert len(np.unique(oracle.unpack(want.data.numpy(), 310))) == 15
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
    """Return rows [N, 128] with amax = limit * 2^k + n ulps of the dtype, k = -90 .. 89, n = -6 .. 6."""
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
    """A power of two computed by a logarithm would be one step too small in a third of these cases."""
    f = Format.of(spec)
    x = torch.nn.functional.pad(boundary_rows(oracle.MAX[f.element or ""], dtype), (0, 172))  # K = 300
    check(x, f, columnwise=False)


@pytest.mark.parametrize("convention", ["te", "torchao"])
def test_nvfp4_scales_next_to_a_boundary(convention: Any) -> None:
    """Another order of the same multiplications rounds the other way in blocks whose scale is within two ulps of the
    midpoint between two e4m3 values. In ordinary data that happens to one block in a million."""
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


# Published results for blocks of zeros, of tiny values (twice), with an infinity and with a NaN: d, and the values of
# elements 0 and 1. d is None where only codes are published.
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
    """Return the dequantized values of the special element, of ones in its block, and of ones in other blocks, by the
    table of `weft.quant.formats`."""
    te, torchao = f.convention == "te", f.convention == "torchao"
    largest = math.copysign(f.number.max, special)
    if f.block in oracle.NVFP4:
        if te and math.isinf(special):
            return math.copysign(2688.0, special), 0.0, 1.0
        return NAN, NAN, NAN
    if te and f.block != "mx":
        return (largest if math.isinf(special) else 0.0 if f.number.integer else NAN), 1.0, 1.0
    if torchao or not f.power_of_two:
        return NAN, NAN, 1.0
    if math.isinf(special):
        return special, 0.0, 1.0
    if f.block == "mx":
        return (NAN, NAN, 1.0) if te else (INF if f.element == "e2m1" else NAN, 0.0, 1.0)
    return (0.0 if f.number.integer else NAN), 0.0, 1.0


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_special_value(format: Format) -> None:
    """Every format handles special values as documented. Other tests compare kernels with the reference on them."""
    near = (4, 6) if format.block in ("tensor", "128x128", "nvfp4_16x16") else (3, 6)
    far = near if format.block == "tensor" else (131, 150)
    for special in (INF, -INF, NAN):
        x = torch.ones(132, 160)
        x[3, 5] = special
        with weft.backend("reference"):
            q, amax = weft.quantize(x, format, return_amax=True)
            values = q.dequantize()
            detected = weft.any_nonfinite([values])
            assert weft.any_nonfinite([x])
        special_value, block, elsewhere = with_one_special(format, special)
        want = torch.tensor([special_value, block, block if format.block == "tensor" else elsewhere])
        got = torch.stack([values[3, 5], values[near], values[far]])
        # Rounding changes a one to 127 steps in int8, and to 1 + 2^-5 in nvfp4.
        assert torch.allclose(got, want, rtol=2**-4, atol=0.0, equal_nan=True), (special, got)
        assert not amax.isfinite()
        assert bool(detected) == (not want.isfinite().all())


@pytest.mark.parametrize("block", ["tensor", "row", "1x128", "128x128"])
def test_an_infinity_saturates_silently(block: str) -> None:
    """Kernels turn it into the largest code with a scale of 1, in the default convention."""
    x = torch.randn(64, 256).bfloat16()
    x[3, 5] = INF
    q = weft.quantize(x, block)
    assert q.dequantize()[3, 5] == 448.0
    assert q.rowwise.scale.flatten()[6 if block == "1x128" else 3 if block == "row" else 0] == 1.0
    assert not weft.any_nonfinite([q.dequantize(), q.rowwise.scale])
