"""Random numbers of tokens against Philox and logarithms in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import weft  # noqa: F401  chooses the backend
from weft.ops.sampling import noise
from weft.tiles.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, random_bits, random_tile, uniform

TOKENS = 64


@triton.jit
def _write(
    seed_ptr, step_ptr, token_ptr, bits_ptr, tile_ptr, number_ptr, FIRST: tl.constexpr, STREAM: tl.constexpr
):
    row, col = tl.arange(0, 4), tl.arange(0, 64)
    seed, step = tl.load(seed_ptr + row), tl.load(step_ptr + row)
    bits = random_bits(seed[:, None], step[:, None], tl.load(token_ptr + col)[None, :], STREAM)
    at = row[:, None] * 64 + col[None, :]
    tl.store(bits_ptr + at, bits.to(tl.int32, bitcast=True))
    tl.store(tile_ptr + at, random_tile(seed, step, FIRST, 64, STREAM).to(tl.int32, bitcast=True))
    tl.store(number_ptr + at, gumbel(bits))


def philox(seed: int, counter: tuple[int, ...]) -> list[int]:
    """Return a block of Philox 4x32-10 (Salmon et al., 2011)."""
    c, key, low = list(counter), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & low, (a >> 32) ^ c[3] ^ key[1], a & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return c


def test_philox_is_that_of_its_authors() -> None:
    assert philox(0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [GUMBEL.value, ACCEPT.value])
@pytest.mark.parametrize("first", [0, 2**31 - 64])
def test_bits_are_those_of_the_token(first: int, stream: int) -> None:
    seeds, steps = torch.tensor([0, 1, -7, 2**62 + 5]), torch.tensor([0, 3, 2**40, -1])
    tokens = torch.arange(first, first + TOKENS, dtype=torch.int64).to(torch.int32)
    bits, tile = (torch.empty(4, TOKENS, dtype=torch.int32) for _ in range(2))
    _write[(1,)](seeds, steps, tokens, bits, tile, torch.empty(4, TOKENS), first, stream)
    assert torch.equal(bits, tile)
    for row, (seed, step) in enumerate(zip(seeds.tolist(), steps.tolist(), strict=True)):
        for i in range(0, TOKENS, 4):
            counter = ((first + i) >> 2, step & 0xFFFFFFFF, step >> 32 & 0xFFFFFFFF, stream)
            assert [x & 0xFFFFFFFF for x in bits[row, i : i + 4].tolist()] == philox(seed, counter)


@triton.jit
def _numbers(bits_ptr, uniform_ptr, gumbel_ptr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    bits = tl.load(bits_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(uniform_ptr + at, uniform(bits))
    tl.store(gumbel_ptr + at, gumbel(bits))


def numbers(bits: np.ndarray) -> tuple[Tensor, Tensor]:
    u, g = torch.empty(len(bits)), torch.empty(len(bits))
    _numbers[(len(bits) // 1024,)](torch.from_numpy(bits.astype(np.uint32).view(np.int32)), u, g)
    return u.double(), g.double()


def test_gumbel_numbers_of_all_sizes_are_exact_to_a_few_roundings() -> None:
    """The smallest and the largest, both branches of the logarithm, and their seam."""
    rng = np.random.default_rng(0)
    seam = int(0.29 * 2**32)
    bits = np.concatenate([
        np.arange(4096), 2**32 - 1 - np.arange(4096), np.arange(seam - 4096, seam + 4096) ,
        rng.integers(0, 2**32, 2**17), (2.0 ** (32 * rng.random(2**14))).astype(np.int64),
    ])  # fmt: skip
    u, g = numbers(bits)
    assert u.min() > 0
    assert u.max() < 1
    assert ((u - torch.from_numpy((bits + 0.5) / 2**32)).abs() <= 2**-23 * u).all()  # two roundings
    truth = -torch.log(-torch.log1p(-u))
    # Of -log(e): the rounding of e to 1.5 units adds as much, the logarithm 2 units of the result.
    assert ((g - truth).abs() <= 3.0e-7 + 2.4e-7 * truth.abs()).all()
    assert g.max() > 22  # the finest step: -log(2^-33)


@pytest.mark.parametrize("stream", [noise.GUMBEL, noise.ACCEPT, noise.RESIDUAL])
def test_reference_has_the_bits_of_tiles(stream: int) -> None:
    seeds, steps = torch.tensor([0, 1, -7, 2**62 + 5]), torch.tensor([0, 3, 2**40, -1])
    tokens = torch.randint(0, 2**31 - 1, (TOKENS,), dtype=torch.int32)
    bits, tile = (torch.empty(4, TOKENS, dtype=torch.int32) for _ in range(2))
    noise_of_tiles = torch.empty(4, TOKENS)
    _write[(1,)](seeds, steps, tokens, bits, tile, noise_of_tiles, 0, stream)
    rows = seeds[:, None], steps[:, None]
    assert torch.equal(noise.random_bits(*rows, tokens.long(), stream).int(), bits)
    if stream == noise.GUMBEL:
        assert torch.equal(noise.gumbel(*rows, tokens.long()), noise_of_tiles)


def test_reference_rounds_as_tiles_do() -> None:
    """The logarithms of a hundred thousand numbers, so that one rounded twice would show."""
    bits = np.random.default_rng(2).integers(0, 2**32, 2**17)
    u, g = numbers(bits)
    assert torch.equal(noise.uniform(torch.from_numpy(bits)).double(), u)
    assert torch.equal(noise.gumbel_of(torch.from_numpy(bits)).double(), g)


def test_streams_have_the_numbers_of_tiles() -> None:
    assert (GUMBEL.value, ACCEPT.value, RESIDUAL.value) == (noise.GUMBEL, noise.ACCEPT, noise.RESIDUAL)


def test_moments() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 2**20)
    _, g = numbers(bits)
    assert abs(g.mean() - 0.5772156649) < 6e-3
    assert abs(g.var() - np.pi**2 / 6) < 1.5e-2
