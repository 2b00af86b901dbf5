"""Reference in plain PyTorch of the random numbers of tokens in `weft.tiles.noise`, with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

# Streams, as in `weft.tiles.noise`.
GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2

_LOW = 0xFFFFFFFF
_LOG_2 = 0.693147182464599609375  # in fp32
# Coefficients of q in log(1 + f) = f - f^2/2 + f^3 q, from the highest power.
_LOG1P = (
    -0.08101558685302734, 0.12712307274341583, -0.12972238659858704, 0.14202174544334412, -0.16642247140407562,
    0.20001468062400818, -0.25000298023223877, 0.333333283662796,
)  # fmt: skip


def random_bits(seed: Tensor, step: Tensor, tokens: Tensor, stream: int) -> Tensor:
    """Return 32 random bits of each token as int64; the int64 arguments broadcast. A block of Philox 4x32-10 with the
    key `seed` and the counter (token // 4, step, stream) serves four tokens."""
    seed, step, tokens = torch.broadcast_tensors(seed, step, tokens)
    counter = [tokens >> 2 & _LOW, step & _LOW, step >> 32 & _LOW, torch.full_like(tokens, stream)]
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        # Products wrap at 64 bits, which keeps both halves.
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        high_a, high_b = a >> 32 & _LOW, b >> 32 & _LOW
        counter = [high_b ^ counter[1] ^ key[0], b & _LOW, high_a ^ counter[3] ^ key[1], a & _LOW]
        key = [key[0] + 0x9E3779B9 & _LOW, key[1] + 0xBB67AE85 & _LOW]
    return torch.stack(counter).gather(0, (tokens & 3)[None])[0]


def uniform(bits: Tensor) -> Tensor:
    """Map 32 random bits to fp32 in (0, 1)."""
    return _fma(bits.float(), 2.0**-32, 2.0**-33).clamp(max=0.99999994)


def gumbel(seed: Tensor, step: Tensor, tokens: Tensor) -> Tensor:
    """Return the Gumbel noise of tokens, fp32; the int64 arguments broadcast."""
    return gumbel_of(random_bits(seed, step, tokens, GUMBEL))


def gumbel_of(bits: Tensor) -> Tensor:
    """Map 32 random bits to -log(-log(1 - u)) of a uniform u."""
    u = uniform(bits)
    return -_log(torch.where(u < 0.29, -_log1p(-u.clamp(max=0.29)), -_log(1.0 - u)))


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Return a * b + c of fp32 numbers, rounded once. The product is exact in fp64, where the sum is rounded to odd: a
    last bit of 1 keeps an inexact sum from looking like the middle between two fp32 numbers."""
    product = a.double() * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = total.view(torch.int64) & 1 == 0
    outward = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where((error != 0) & is_even, outward, total).float()


def _log1p(f: Tensor) -> Tensor:
    q: Tensor | float = _LOG1P[0]
    for coefficient in _LOG1P[1:]:
        q = _fma(f, q, coefficient)
    return _fma(f * _fma(f, q, -0.5), f, f)


def _log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return _fma(exponent.float(), _LOG_2, _log1p(f))
