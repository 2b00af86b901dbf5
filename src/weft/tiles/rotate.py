"""Rotations of pairs, and the cosine and sine of an angle that is an exact fraction of a turn."""

from ..language import tl, triton


@triton.jit
def rotate(a, b, cos, sin):
    """Each pair (a, b) turned by its angle."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def cos_sin(turns):
    """(cos, sin) in fp32 of angles, int64 [...] in units of 2^-64 of a turn, which leaves no room for whole turns.

    The nearest quarter is split off in integers, which is exact. What is left, an eighth of a turn at most, is rounded
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
    crosswise = (quarter & 1) != 0
    cos = tl.where(crosswise, s, c)
    sin = tl.where(crosswise, c, s)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, tl.where((quarter & 2) != 0, -sin, sin)
