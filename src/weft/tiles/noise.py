"""Random numbers of tokens: functions of (seed, step, token) alone, wherever and in whichever tile a token is computed.
They consist of integer arithmetic and of fused multiply-adds, so all targets have the same bits."""

from ..language import tl, triton

# Streams: each use of the numbers of a step has its own.
GUMBEL = tl.constexpr(0)
ACCEPT = tl.constexpr(1)
RESIDUAL = tl.constexpr(2)  # a drafter may have drawn from the first one with the same seed and step


@triton.jit
def random_bits(seed, step, token, stream):
    """Return 32 random bits for each token: number token % 4 of the Philox block with the key `seed` and the counter
    (token // 4, step, stream). `seed` and `step` are int64, in shapes that broadcast with the tokens."""
    low, high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    block = (token >> 2).to(tl.uint32)
    a, b, c, d = tl.philox(seed, block, low, high, (step * 0).to(tl.uint32) + stream)
    odd = (token & 1) == 1
    return tl.where((token & 2) == 2, tl.where(odd, d, c), tl.where(odd, b, a))


@triton.jit
def random_tile(seed, step, first, TOKENS: tl.constexpr, stream):
    """Return `random_bits` [ROWS, TOKENS] of the tokens from `first` on, a multiple of 4: a block serves four of them.
    `seed` and `step` are [ROWS]."""
    low, high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    block = (first // 4 + tl.arange(0, TOKENS // 4)).to(tl.uint32)[None, :]
    streams = (step * 0).to(tl.uint32) + stream
    a, b, c, d = tl.philox(seed[:, None], block, low[:, None], high[:, None], streams[:, None])
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (seed.shape[0], TOKENS))


@triton.jit
def uniform(bits):
    """Map 32 random bits to fp32 in (0, 1), with 24 significant bits at 0, too."""
    return tl.minimum(tl.fma(bits.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), 0.99999994)


@triton.jit
def _log1p(f):
    """Return log(1 + f) for f in [-0.293, 0.415], to 8e-8 of its size: f - f^2/2 + f^3 q with a fitted q."""
    q = tl.fma(f, -0.08101558685302734, 0.12712307274341583)
    q = tl.fma(q, f, -0.12972238659858704)
    q = tl.fma(q, f, 0.14202174544334412)
    q = tl.fma(q, f, -0.16642247140407562)
    q = tl.fma(q, f, 0.20001468062400818)
    q = tl.fma(q, f, -0.25000298023223877)
    q = tl.fma(q, f, 0.333333283662796)
    return tl.fma(f * tl.fma(q, f, -0.5), f, f)


@triton.jit
def _log(x):
    """Return log(x) of a normal number, to 1.2e-7 of its size."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # of the power of two that brings x to [0.707, 1.414)
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return tl.fma(exponent.to(tl.float32), 0.6931471805599453, _log1p(f))


@triton.jit
def gumbel(bits):
    """Map 32 random bits to -log(-log(1 - u)) of a uniform u. The larger the result, the finer its steps: large ones
    decide."""
    u = uniform(bits)
    return -_log(tl.where(u < 0.29, -_log1p(-tl.minimum(u, 0.29)), -_log(1.0 - u)))
