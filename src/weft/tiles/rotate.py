"""Rotations of pairs, and cosine and sine of angles given as exact fractions of a turn."""

from ..language import tl, triton


@triton.jit
def rotate(a, b, cos, sin):
    """Rotate each pair (a, b) by its angle."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def cos_sin(turns):
    """Return (cos, sin) in fp32 of angles, int64 [...] in units of 2^-64 of a turn; whole turns wrap around.

    The nearest quarter turn is split off in integers, which is exact. The rest, at most an eighth of a turn, is rounded
    once to fp32 and goes into two Taylor polynomials whose next terms are below 2^-29.
    """
    quarter = (turns + 2305843009213693952) >> 62  # + 2^61
    r = (turns - (quarter << 62)).to(tl.float32) * 5.421010862427522e-20  # 2^-64
    t = r * r
    s = 81.60524927607504 + t * (-76.70585975306136 + t * 42.058693944897634)
    s = -1.7484556025237907e-07 + t * (-41.341702240399755 + t * s)  # begins with the rounding error of 2 pi
    s = r * 6.2831854820251465 + r * s
    c = -85.45681720669371 + t * (60.24464137187664 + t * -26.426256783374388)
    c = 1.0 + t * (-19.739208802178716 + t * (64.93939402266828 + t * c))
    swapped = (quarter & 1) != 0
    cos = tl.where(swapped, s, c)
    sin = tl.where(swapped, c, s)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, tl.where((quarter & 2) != 0, -sin, sin)
