"""Stochastic rounding draws the documented random bits and is unbiased."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.quant.checks import BACKENDS, INF, NAN, assert_same, decoded, expected, spread_scale
from weft import Format, QTensor
from weft.lab import oracle


def philox(seed: int, row: int, col: int, which: int) -> int:
    """Return the first word of Philox4x32-10, by its published definition."""
    counter, key = [col, row, which, 0], [seed % 2**31, seed >> 31]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[0]


def test_philox() -> None:
    assert philox(0, 0, 0, 0) == 0x6627E8D5  # known answer from Random123


def stochastic_codes(x: torch.Tensor, element: str, draws: np.ndarray[Any, Any]) -> torch.Tensor:
    """Truncate x to 2^-n of a step, n the mantissa bits that the element lacks, add n random bits, and round down."""
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
    """Bytes equal those of an independent Philox and float64 rounding."""
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
            if columnwise:  # both copies of a tensor with one scale hold the same codes
                assert_same(
                    q.columnwise.data.view(torch.uint8), want.t(), f"{element} {seed} {backend} column-wise"
                )


@pytest.mark.parametrize(
    "spec",
    [
        "e4m3:1x128:te:pow2",
        "e5m2:row:deepgemm",
        "e2m1:mx:te",
        "e2m1:nvfp4:te",
        "e2m1:nvfp4_16x16:te",
        "e2m1:nvfp4:te:hadamard-columnwise",
    ],
)
def test_stochastic_rounding(spec: str) -> None:
    """Scales do not change; codes are reproducible for a seed, differ between seeds, and agree on both backends."""
    f = Format.of(spec)
    x = torch.randn(140, 37)
    x[4] = 0
    if f.block not in oracle.NVFP4:  # its global scale would be NaN
        x[3, 5], x[130, 30] = NAN, INF
    nearest = weft.quantize(x, f, columnwise=True)
    results = []
    for seed in SEEDS[:3]:
        q = weft.quantize(x, f, columnwise=True, seed=seed)
        repeated = weft.quantize(x, f, columnwise=True, seed=seed)
        rows = weft.quantize(x, f, seed=seed)
        with weft.backend("reference"):
            reference = weft.quantize(x, f, columnwise=True, seed=seed)
        for side in ("rowwise", "columnwise"):
            copy = getattr(q, side)
            assert_same(getattr(repeated, side).data, copy.data, "again")
            assert_same(getattr(reference, side).data, copy.data, f"{side} reference")
            assert_same(getattr(reference, side).scale, copy.scale, f"{side} reference scales")
            assert_same(copy.scale, getattr(nearest, side).scale, f"{side} scales")
        assert_same(rows.rowwise.data, q.rowwise.data, "row kernel")
        results.append(q)
    different = (
        (results[0].rowwise.data.view(torch.uint8) != results[1].rowwise.data.view(torch.uint8))
        .float()
        .mean()
    )
    assert different > 0.1
    if f.block == "nvfp4_16x16":  # both copies share their draws
        for q in results:
            column_only = QTensor(q.shape, q.dtype, f, None, q.columnwise)
            assert_same(column_only.dequantize(), q.dequantize(), "column-wise values")
    # Copies that do not share codes draw independently.
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
        assert ((values == low) | (values == high)).all()  # one of the two neighbors
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
