"""Products of fp32 tiles on units that multiply bf16.

A product of two bf16 numbers is exact in fp32. An fp32 number is the exact sum of three bf16 numbers, so a product
with it is a sum of exact products of its parts; only the additions round. For two fp32 numbers, six of the nine
products are computed: the others are smaller than 2^-25 of the result.
"""

from ..language import tl, triton

BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def _nearest(x):
    """Return the finite bf16 nearest to x, as fp32. The excess of an x too large for bf16 (such as infinity) is left to
    the next part. NaN makes every remainder NaN."""
    return tl.minimum(tl.maximum(x, -BF16_MAX), BF16_MAX).to(tl.bfloat16).to(tl.float32)


@triton.jit
def split_once(x):
    """Return (the bf16 nearest to an fp32 x, the remainder)."""
    part = _nearest(x)
    return part.to(tl.bfloat16), x - part


@triton.jit
def dot_fp32(a, b, SPLIT: tl.constexpr):
    """Compute a [M, K] @ b [K, N] with the accuracy of fp32. Operands are bf16, fp16 or fp32.

    With SPLIT the result is a sum of products of bf16 parts, the smallest first, so that only the last addition rounds
    at full size; otherwise it is computed by fp32 multiply-adds. Two parts hold the 11 bits of fp16, three the 24
    of fp32.
    """
    A_WHOLE: tl.constexpr = a.dtype == tl.bfloat16
    B_WHOLE: tl.constexpr = b.dtype == tl.bfloat16
    A_THREE: tl.constexpr = a.dtype == tl.float32
    B_THREE: tl.constexpr = b.dtype == tl.float32
    if not SPLIT:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif A_WHOLE and B_WHOLE:
        total = tl.dot(a, b)
    elif B_WHOLE:
        a1, a_rest = split_once(a.to(tl.float32))
        a2, a_rest = split_once(a_rest)
        if A_THREE:
            total = tl.dot(a2, b, tl.dot(a_rest.to(tl.bfloat16), b))
        else:
            total = tl.dot(a2, b)
        total = tl.dot(a1, b, total)
    elif A_WHOLE:
        b1, b_rest = split_once(b.to(tl.float32))
        b2, b_rest = split_once(b_rest)
        if B_THREE:
            total = tl.dot(a, b2, tl.dot(a, b_rest.to(tl.bfloat16)))
        else:
            total = tl.dot(a, b2)
        total = tl.dot(a, b1, total)
    else:
        a1, a_rest = split_once(a.to(tl.float32))
        b1, b_rest = split_once(b.to(tl.float32))
        a2, a_rest = split_once(a_rest)
        b2, b_rest = split_once(b_rest)
        total = tl.dot(a2, b2)
        if A_THREE:
            total = tl.dot(a_rest.to(tl.bfloat16), b1, total)
        if B_THREE:
            total = tl.dot(a1, b_rest.to(tl.bfloat16), total)
        total = tl.dot(a2, b1, total)
        total = tl.dot(a1, b2, total)
        total = tl.dot(a1, b1, total)
    return total
