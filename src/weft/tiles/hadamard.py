"""Hadamard transform of columns, for operands of a product whose inner dimension is rotated."""

from ..language import tl, triton

# Bit i is set where TransformerEngine's sign of element i is -1; `quant.reference` lists the signs.
_NEGATIVE = tl.constexpr(0xD7E8)


@triton.jit
def hadamard_columns(x):
    """Multiply each 16 neighbors in a column of fp32 [R, C], as a row vector, by diag(signs) H / 4, where H is the
    Hadamard matrix of size 16 in Sylvester's order. Four steps of sums and differences, ordered as in the reference."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    sign = tl.where(((_NEGATIVE >> (tl.arange(0, R) % 16)) & 1) != 0, -1.0, 1.0)
    y = tl.trans(x * sign[:, None])  # [C, R]
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(y, (C * (R // 16), 8, 2)))
        # Sums become the first half of the 16 and differences the second: after four steps the order is right.
        y = tl.permute(tl.join(even + odd, even - odd), (0, 2, 1))
    return tl.trans(tl.reshape(y, (C, R))) * 0.25
