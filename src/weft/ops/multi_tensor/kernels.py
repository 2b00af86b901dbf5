"""Kernels of `multi_tensor`: partial results per chunk, their total, and scaling in place."""

from ...language import tl, triton
from ...runtime import kernel


@triton.jit
def _chunk(table_ptr, first):
    """Return (address, length, index among all chunks) of this program's chunk."""
    chunk = tl.program_id(0).to(tl.int64) + first
    entry = table_ptr + 2 * chunk
    return tl.load(entry), tl.load(entry + 1), chunk


@triton.jit
def _add(x, sums, bits, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr):
    """Add a tile to the lane sums and OR its bits into `bits`; return both. x holds floats if they are summed, else
    their bits as integers."""
    if WHAT == "norm2":
        x = x.to(tl.float32)
        if scale is not None:
            x = x * scale
        elif EXPONENT != 0x7C00:  # fp16 squares neither underflow nor overflow
            bits |= x.to(tl.int32, bitcast=True)
        sums += x * x
    elif WHAT == "norm1":
        sums += tl.abs(x.to(tl.float32))
    elif WHAT == "norminf":
        # Magnitudes compare alike as integers and as floats, with NaN last.
        sums = tl.maximum(sums, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    elif WHAT == "zeros":
        sums += ((x << 1) == 0).to(tl.int32)
    else:
        sums |= ((x & EXPONENT) == EXPONENT).to(tl.int32)
    return sums, bits


@triton.jit
def _over_chunk(start_ptr, count, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr, TILE: tl.constexpr):
    """Return each lane's (sums, bits) over this program's chunk, [TILE] each."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32 if WHAT == "norm2" or WHAT == "norm1" else tl.int32)
    bits = tl.zeros((TILE,), tl.int32)
    full = (count // TILE) * TILE
    for begin in range(0, full, TILE):
        # A chunk that has a full tile is 16-byte aligned.
        x = tl.load(tl.multiple_of(start_ptr + begin, 16) + lane)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    if full < count:
        # Padding lanes must not count: nonzero where zeros are counted, and finite.
        OTHER: tl.constexpr = 1 if WHAT == "zeros" or WHAT == "nonfinite" else 0
        x = tl.load(start_ptr + full + lane, mask=full + lane < count, other=OTHER)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    return sums, bits


@kernel
def multi_tensor_reduce_kernel(
    table_ptr,  # [chunks, 2]: address, length
    partial_ptr,  # [chunks]
    first,  # index of the first chunk of this dtype
    ELEMENT: tl.constexpr,  # element type at the addresses: a float type, or an integer of equal width
    EXPONENT: tl.constexpr,  # mask of the exponent bits
    WHAT: tl.constexpr,
    TILE: tl.constexpr,
):
    address, count, chunk = _chunk(table_ptr, first)
    start_ptr = address.to(tl.pointer_type(ELEMENT))
    sums, bits = _over_chunk(start_ptr, count, None, WHAT, EXPONENT, TILE)
    if WHAT == "norm2":
        squares = tl.sum(sums, axis=0)
        partial = tl.sqrt_rn(squares)
        if EXPONENT != 0x7C00:
            # If the sum is below 2^-80, every |x| is below 2^-40 and squares may have underflowed. In a larger sum,
            # squares that underflowed are too small to matter.
            small = squares < 8.271806125530277e-25
            if (small | (squares > 8.507059173023462e37)) & (tl.max(bits & 0x7FFFFFFF, axis=0) != 0):  # 2^126
                scale = tl.where(small, 1.2379400392853803e27, 8.271806125530277e-25)  # 2^90, 2^-80
                rescaled, _ = _over_chunk(start_ptr, count, scale, WHAT, EXPONENT, TILE)
                up = tl.where(small, 8.077935669463161e-28, 1.2089258196146292e24)
                partial = tl.sqrt_rn(tl.sum(rescaled, axis=0)) * up
    elif WHAT == "norminf":
        partial = tl.max(sums, axis=0).to(tl.float32, bitcast=True)
    elif WHAT == "nonfinite":
        partial = tl.max(sums, axis=0)
    else:
        partial = tl.sum(sums, axis=0)
    tl.store(partial_ptr + chunk, partial)


@triton.jit
def _norm_of_norms(partial_ptr, count, bits, WHAT: tl.constexpr, TILE: tl.constexpr):
    """Combine finite partial norms into one norm; `bits` are the bits of the largest."""
    # A power of two scales all of them so that the largest is in [1, 2) unless it is subnormal: no sum overflows.
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    lane = tl.arange(0, TILE)
    sums, error = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for begin in range(0, count, TILE):
        term = tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0.0) * down
        if WHAT == "norm2":
            term = term * term
        sum_ = sums + term
        added = sum_ - sums
        error += (sums - (sum_ - added)) + (term - added)  # rounding error of the addition (Knuth's TwoSum)
        sums = sum_
    total = tl.sum(sums, axis=0) + tl.sum(error, axis=0)
    if WHAT == "norm2":
        total = tl.sqrt_rn(total)
    return total * up


@kernel
def multi_tensor_total_kernel(
    partial_ptr,  # [count]
    total_ptr,  # one element
    count,
    WHAT: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.arange(0, TILE)
    if WHAT == "zeros":
        zeros = tl.zeros((TILE,), tl.int64)
        for begin in range(0, count, TILE):
            zeros += tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0)
        tl.store(total_ptr, tl.sum(zeros, axis=0))
    else:
        largest = tl.zeros((TILE,), tl.int32)
        for begin in range(0, count, TILE):
            partial = tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0)
            largest = tl.maximum(largest, partial.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        bits = tl.max(largest, axis=0)
        if WHAT == "nonfinite":
            tl.store(total_ptr, bits != 0)
        else:
            total = bits.to(tl.float32, bitcast=True)
            if WHAT == "norm1" or WHAT == "norm2":  # noqa: SIM102
                if bits < 0x7F800000:  # otherwise the norm is infinite or NaN, like the largest
                    total = _norm_of_norms(partial_ptr, count, bits, WHAT, TILE)
            tl.store(total_ptr, total)


@kernel
def multi_tensor_clip_kernel(
    table_ptr,  # [chunks, 2]
    norm_ptr,  # one element
    first,
    max_norm: float,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    coefficient = tl.div_rn(max_norm, tl.load(norm_ptr) + 1e-6)
    if not (coefficient >= 1.0):  # a NaN coefficient is applied too
        address, count, _ = _chunk(table_ptr, first)
        start_ptr = address.to(tl.pointer_type(ELEMENT))
        lane = tl.arange(0, TILE)
        full = (count // TILE) * TILE
        for begin in range(0, full, TILE):
            tile_ptr = tl.multiple_of(start_ptr + begin, 16) + lane  # [TILE]
            tl.store(tile_ptr, (tl.load(tile_ptr).to(tl.float32) * coefficient).to(ELEMENT))
        if full < count:
            tile_ptr, mask = start_ptr + full + lane, full + lane < count  # [TILE]
            x = tl.load(tile_ptr, mask=mask, other=0.0).to(tl.float32)
            tl.store(tile_ptr, (x * coefficient).to(ELEMENT), mask=mask)
