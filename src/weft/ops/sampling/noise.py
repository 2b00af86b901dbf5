"""The random numbers of tokens in plain PyTorch; see `weft.tiles.noise`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tiles.noise import GUMBEL

_LOW = 0xFFFFFFFF
_LOG1P = (
    -0.08101558685302734, 0.12712307274341583, -0.12972238659858704, 0.14202174544334412, -0.16642247140407562,
    0.20001468062400818, -0.25000298023223877, 0.333333283662796, -0.5,
)  # fmt: skip


def random_bits(seed: Tensor, step: Tensor, token: Tensor, stream: int = GUMBEL.value) -> Tensor:
    """Return 32 random bits for each token, as int64. All are int64, in shapes that broadcast."""
    seed, step, block = torch.broadcast_tensors(seed, step, token >> 2)
    c = [block & _LOW, step & _LOW, step >> 32 & _LOW, torch.full_like(step, stream)]
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]  # products wrap: their 64 bits are right
        c = [(b >> 32 & _LOW) ^ c[1] ^ key[0], b & _LOW, (a >> 32 & _LOW) ^ c[3] ^ key[1], a & _LOW]
        key = [key[0] + 0x9E3779B9 & _LOW, key[1] + 0xBB67AE85 & _LOW]
    return torch.stack(c, -1).gather(-1, (token & 3).expand_as(block)[..., None])[..., 0]


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    return (a.double() * (b.double() if isinstance(b, Tensor) else b) + c).float()


def _log1p(f: Tensor) -> Tensor:
    q = torch.full_like(f, _LOG1P[0])
    for coefficient in _LOG1P[1:]:
        q = _fma(q, f, coefficient)
    return _fma(f * q, f, f)


def _log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    return _fma(
        exponent.float(), 0.6931471824645996, _log1p((bits - (exponent << 23)).view(torch.float32) - 1.0)
    )


def uniform(bits: Tensor) -> Tensor:
    return _fma(bits.float(), 2.0**-32, 2.0**-33).clamp(max=1 - 2**-24)


def gumbel(bits: Tensor) -> Tensor:
    """Return the Gumbel numbers of random bits, in fp32."""
    u = uniform(bits)
    return -_log(torch.where(u < 0.29, -_log1p(-u.clamp(max=0.29)), -_log(1.0 - u)))
