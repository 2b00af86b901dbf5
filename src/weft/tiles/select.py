"""Selection of the largest elements of a tile, by their order as integers."""

from ..language import tl, triton
from .scores import key_of


@triton.jit
def rank_bits(x, exists, BITS: tl.constexpr):
    """Map values to unsigned integers of BITS bits in the same order: 0 for NaN and for what does not exist. Zeros of
    both signs are equal. BITS: 32, 19 for fp16 and 16 for bf16, which lose nothing."""
    x = x.to(tl.float32)
    rank = key_of(x).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(exists & (x == x), rank, tl.zeros((), tl.uint32)) >> (32 - BITS)


@triton.jit
def threshold(rank, weight, least, BITS: tl.constexpr):
    """Return the largest rank t such that the elements of rank t and above weigh at least `least`: 0 if all weigh less.
    The weights are integers, so their sums are exact in any order."""
    t = tl.zeros((), tl.uint32)
    bit = tl.full((), 1 << (BITS - 1), tl.uint32)
    while bit != 0:
        weighs = tl.sum(tl.where(rank >= (t | bit), weight, 0), axis=0)
        t = tl.where(weighs >= least, t | bit, t)
        bit = tl.where(weighs == least, tl.zeros((), tl.uint32), bit >> 1)  # found
    return t


@triton.jit
def places(rank, exists, t, k):
    """Return which elements are the first k by (rank, lowest place), t being the threshold of k, and how many of them
    come before each, itself not counted."""
    above = exists & (rank > t)
    equal = exists & (rank == t)
    wanted = k - tl.sum(above.to(tl.int32), axis=0)
    # Both counts in one scan: a tile has less than 2^16 elements.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = counts >> 16
    return above | (equal & (equals <= wanted)), (counts & 0xFFFF) + tl.minimum(equals, wanted) - 1
