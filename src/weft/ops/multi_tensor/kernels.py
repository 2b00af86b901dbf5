"""The kernels of `multi_tensor`: partial results of chunks, all of them put together, and scaling in place."""

from ...language import tl, triton
from ...runtime import kernel


@triton.jit
def _chunk(table_ptr, first):
    """(address, length, place): those of the chunk of this program, and its place among all chunks."""
    chunk = tl.program_id(0).to(tl.int64) + first
    entry = table_ptr + 2 * chunk
    return tl.load(entry), tl.load(entry + 1), chunk


@triton.jit
def _add(x, sums, bits, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr):
    """(sums, bits) with a tile added: to the sums of a program, and to the bits that are set in any of its numbers. x
    has floats if they are summed, else their bits as integers."""
    if WHAT == "norm2":
        x = x.to(tl.float32)
        if scale is not None:
            x = x * scale
        elif EXPONENT != 0x7C00:  # squares of fp16 neither vanish nor overflow
            bits |= x.to(tl.int32, bitcast=True)
        sums += x * x
    elif WHAT == "norm1":
        sums += tl.abs(x.to(tl.float32))
    elif WHAT == "norminf":
        # As integers the magnitudes are ordered as the numbers are, and NaN comes last.
        sums = tl.maximum(sums, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    elif WHAT == "zeros":
        sums += ((x << 1) == 0).to(tl.int32)
    else:
        sums |= ((x & EXPONENT) == EXPONENT).to(tl.int32)
    return sums, bits


@triton.jit
def _over_chunk(start_ptr, count, scale, WHAT: tl.constexpr, EXPONENT: tl.constexpr, TILE: tl.constexpr):
    """(sums, bits) of each lane of a program over its chunk, [TILE] each."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32 if WHAT == "norm2" or WHAT == "norm1" else tl.int32)
    bits = tl.zeros((TILE,), tl.int32)
    whole = (count // TILE) * TILE
    for begin in range(0, whole, TILE):
        # Where a chunk has a whole tile it begins at a multiple of 16 bytes.
        x = tl.load(tl.multiple_of(start_ptr + begin, 16) + lane)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    if whole < count:
        # Past the end the value must not count: not a zero where zeros are counted, and finite.
        OTHER: tl.constexpr = 1 if WHAT == "zeros" or WHAT == "nonfinite" else 0
        x = tl.load(start_ptr + whole + lane, mask=whole + lane < count, other=OTHER)  # [TILE]
        sums, bits = _add(x, sums, bits, scale, WHAT, EXPONENT)
    return sums, bits


@kernel
def multi_tensor_reduce_kernel(
    table_ptr,  # [chunks, 2]: address, length
    partial_ptr,  # [chunks]
    first,  # the place of the first chunk of this dtype
    ELEMENT: tl.constexpr,  # what lies at the addresses: a float type, or an integer of as many bits
    EXPONENT: tl.constexpr,  # a mask of the exponent's bits
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
            # If the sum is below 2^-80 then every |x| is below 2^-40, and squares may have vanished. In a larger sum,
            # squares that vanished are too small to count.
            small = squares < 8.271806125530277e-25
            if (small | (squares > 8.507059173023462e37)) & (tl.max(bits & 0x7FFFFFFF, axis=0) != 0):  # 2^126
                scale = tl.where(small, 1.2379400392853803e27, 8.271806125530277e-25)  # 2^90, 2^-80
                again, _ = _over_chunk(start_ptr, count, scale, WHAT, EXPONENT, TILE)
                up = tl.where(small, 8.077935669463161e-28, 1.2089258196146292e24)
                partial = tl.sqrt_rn(tl.sum(again, axis=0)) * up
    elif WHAT == "norminf":
        partial = tl.max(sums, axis=0).to(tl.float32, bitcast=True)
    elif WHAT == "nonfinite":
        partial = tl.max(sums, axis=0)
    else:
        partial = tl.sum(sums, axis=0)
    tl.store(partial_ptr + chunk, partial)


@triton.jit
def _norm_of_norms(partial_ptr, count, bits, WHAT: tl.constexpr, TILE: tl.constexpr):
    """The norm of partial norms, all of them finite; `bits` are the bits of the largest."""
    # All are multiplied by a power of two that brings the largest into [1, 2), unless it is subnormal: no sum
    # overflows.
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    lane = tl.arange(0, TILE)
    sums, lost = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for begin in range(0, count, TILE):
        term = tl.load(partial_ptr + begin + lane, mask=begin + lane < count, other=0.0) * down
        if WHAT == "norm2":
            term = term * term
        sum_ = sums + term
        there = sum_ - sums
        lost += (sums - (sum_ - there)) + (term - there)  # what the addition rounded away (Knuth)
        sums = sum_
    total = tl.sum(sums, axis=0) + tl.sum(lost, axis=0)
    if WHAT == "norm2":
        total = tl.sqrt_rn(total)
    return total * up


@kernel
def multi_tensor_total_kernel(
    partial_ptr,  # [count]
    total_ptr,  # one number
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
                if bits < 0x7F800000:  # else the largest is infinite or NaN, and so is the norm
                    total = _norm_of_norms(partial_ptr, count, bits, WHAT, TILE)
            tl.store(total_ptr, total)


@kernel
def multi_tensor_clip_kernel(
    table_ptr,  # [chunks, 2]
    norm_ptr,  # one number
    first,
    max_norm: float,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    coefficient = tl.div_rn(max_norm, tl.load(norm_ptr) + 1e-6)
    if not (coefficient >= 1.0):  # a coefficient of NaN is applied as well
        address, count, _ = _chunk(table_ptr, first)
        start_ptr = address.to(tl.pointer_type(ELEMENT))
        lane = tl.arange(0, TILE)
        whole = (count // TILE) * TILE
        for begin in range(0, whole, TILE):
            tile_ptr = tl.multiple_of(start_ptr + begin, 16) + lane  # [TILE]
            tl.store(tile_ptr, (tl.load(tile_ptr).to(tl.float32) * coefficient).to(ELEMENT))
        if whole < count:
            tile_ptr, mask = start_ptr + whole + lane, whole + lane < count  # [TILE]
            x = tl.load(tile_ptr, mask=mask, other=0.0).to(tl.float32)
            tl.store(tile_ptr, (x * coefficient).to(ELEMENT), mask=mask)
