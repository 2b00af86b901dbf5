"""Random numbers: Philox 4x32-10 to the bit, and the distributions made from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_loom.testing import assert_same

SEEDS = [0, 1, 42, 0x9E3779B9, 2**31 - 1, 2**40 + 12345, 2**63 - 1]


def philox(seed: int, offsets: np.ndarray, rounds: int = 10) -> list[np.ndarray]:
    """Return Philox 4x32 by its definition (Salmon et al. 2011): the offset is the counter, the seed the key."""
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    offsets = offsets.astype(np.uint64)
    zero = np.zeros_like(offsets)
    counter = [offsets & mask, offsets >> low, zero, zero]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(rounds):
        first = np.uint64(0xD2511F53) * counter[0]
        second = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (second >> low) ^ counter[1] ^ np.uint64(key[0]),
            second & mask,
            (first >> low) ^ counter[3] ^ np.uint64(key[1]),
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [word.astype(np.uint32) for word in counter]


def uniform(word: np.ndarray) -> np.ndarray:
    """Map to [0, 1): the magnitude of the number read as a signed one, times a float32 just below 2^-31."""
    signed = word.view(np.int32)
    magnitude = np.where(signed < 0, -(signed.astype(np.int64)) - 1, signed)
    return magnitude.astype(np.float32) * np.float32(4.6566127342e-10)


def normal(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Box-Muller transform of a float32 angle: the radius, and the number, in float64."""
    radius = np.sqrt(-2 * np.log(np.maximum(np.float32(1e-7), first).astype(np.float64)))
    angle = np.float32(2 * np.pi) * second
    return radius, radius * np.cos(angle.astype(np.float64))


def test_reference_meets_the_published_answers() -> None:
    """The result is Random123's known answer of philox4x32 with 10 rounds for a zero counter and key."""
    words = [int(word[0]) for word in philox(0, np.array([0], np.uint64))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@triton.jit
def draw_ints(seed, out_ptr, start, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, start + offs)
    tl.store(out_ptr + offs, a)
    tl.store(out_ptr + BLOCK + offs, b)
    tl.store(out_ptr + 2 * BLOCK + offs, c)
    tl.store(out_ptr + 3 * BLOCK + offs, d)
    tl.store(out_ptr + 4 * BLOCK + offs, tl.randint(seed, start + offs))
    tl.store(out_ptr + 5 * BLOCK + offs, tl.randint(seed, start + offs, n_rounds=7))


@pytest.mark.compat
@pytest.mark.parametrize("start", [0, 77, 2**31 - 100, 2**35 + 3])
def test_integers(start: int) -> None:
    block = 128
    offsets = start + np.arange(block, dtype=np.int64)
    if start < 2**32:
        offsets &= 0xFFFFFFFF  # an int32 offset wraps, and Philox sees 32 bits
    for seed in SEEDS:
        out = torch.from_numpy(np.empty((6, block), np.uint32))
        draw_ints[(1,)](seed, out, start, BLOCK=block)
        words = philox(seed, offsets)
        want = [*words, words[0], philox(seed, offsets, 7)[0]]
        assert_same(out, np.stack(want), f"seed {seed}")


@triton.jit
def draw_floats(seed, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = BLOCK * tl.num_programs(0)
    tl.store(out_ptr + offs, tl.rand(seed, offs))
    a, b, c, d = tl.rand4x(seed, offs)
    tl.store(out_ptr + size + offs, b)
    tl.store(out_ptr + 2 * size + offs, c)
    tl.store(out_ptr + 3 * size + offs, d - a)
    tl.store(out_ptr + 4 * size + offs, tl.randn(seed, offs))
    _, _, third, _ = tl.randn4x(seed, offs)
    tl.store(out_ptr + 5 * size + offs, third)


@pytest.mark.compat
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_floats(seed: int) -> None:
    programs, block = 8, 1024
    out = torch.empty(6, programs * block)
    draw_floats[(programs,)](seed, out, BLOCK=block)
    words = philox(seed, np.arange(programs * block))
    a, b, c, d = (uniform(word) for word in words)
    assert_same(out[:4], np.stack([a, b, c, d - a]))
    for got, (radius, want) in [(out[4], normal(a, b)), (out[5], normal(c, d))]:
        assert (np.abs(got.numpy() - want) <= 4 * 2**-24 * radius).all()  # log, sqrt, cos and a product
    assert ((out[:3] >= 0) & (out[:3] < 1)).all()


@triton.jit
def draw_tile(seed_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out_ptr + at, tl.randint(tl.load(seed_ptr), at))


def test_tiles_and_loaded_seeds() -> None:
    seed = torch.tensor([2**33 + 7])
    out = torch.from_numpy(np.empty((16, 32), np.uint32))
    draw_tile[(1,)](seed, out, ROWS=16, COLS=32)
    assert_same(out, philox(2**33 + 7, np.arange(512))[0].reshape(16, 32))


@triton.jit
def draw_wide(seed, out_ptr, BLOCK: tl.constexpr):
    """Draw from Philox 4x64, the generator on 64-bit words."""
    offs = tl.arange(0, BLOCK).to(tl.uint64)
    zero = offs * 0
    a, b, c, d = tl.philox(seed, offs, zero, zero, zero)
    tl.store(out_ptr + offs, a)
    tl.store(out_ptr + BLOCK + offs, b)
    tl.store(out_ptr + 2 * BLOCK + offs, c)
    tl.store(out_ptr + 3 * BLOCK + offs, d)


def test_philox_on_64_bit_words() -> None:
    def reference(seed: int, offset: int) -> list[int]:
        word = 2**64 - 1
        c, key = [offset, 0, 0, 0], [seed, 0]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [second >> 64 ^ c[1] ^ key[0], second & word, first >> 64 ^ c[3] ^ key[1], first & word]
            key = [key[0] + 0x9E3779B97F4A7C15 & word, key[1] + 0xBB67AE8584CAA73B & word]
        return c

    out = torch.from_numpy(np.empty((4, 64), np.uint64))
    draw_wide[(1,)](12345, out, BLOCK=64)
    assert_same(out, np.array([reference(12345, i) for i in range(64)], np.uint64).T.copy())
