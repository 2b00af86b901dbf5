"""Kernels of `cross_entropy`.

A row is read in whole tiles that begin at its first multiple of 16 bytes, so accesses are wide for any V. The few
elements before and after these tiles are read last. If V is not a multiple of 8, the order of a row's sums depends on
where the row begins in memory, and so does the last bit of its lse.
"""

from typing import Any, NamedTuple

from ....language import tl, triton
from ....runtime import kernel
from ....tiles.softmax import LOWEST, add_exponentials, add_moments, cap, join_exponentials, join_moments
from ...common.loads import load_tile, row_offset
from ..join import CAPPED, FEW, PLAIN, Scaling


@triton.jit
def _scaled_logits(x, softcap, scale, KIND: tl.constexpr):
    """Return z in fp32 of logits x in their stored dtype."""
    z = x.to(tl.float32)
    if KIND == CAPPED:
        z, _ = cap(z, softcap)
    if KIND != PLAIN:
        z = z * scale
    return z


@triton.jit
def _split_row(offset, cols, ALIGN: tl.constexpr, TILE: tl.constexpr, ELEMENT: tl.constexpr):
    """Return (head, body), the lengths of the first two parts of a row of `cols` logits at `offset`. The head is a few
    elements up to the next multiple of 16 bytes, the body is whole tiles, and the remaining elements are the rest."""
    if ALIGN > 1:
        head = 0
    else:
        head = ((16 // ELEMENT - offset % (16 // ELEMENT)) % (16 // ELEMENT)).to(tl.int32)
    return head, tl.maximum(cols - head, 0) // TILE * TILE


@triton.jit
def _edge_columns(start, lane, head, body, cols, ALIGN: tl.constexpr):
    """Return (columns, whether they exist) of lanes outside of the body: first the head, then the rest."""
    if ALIGN > 1:
        col = body + start + lane
        return col, col < (cols // ALIGN) * ALIGN
    else:
        i = start + lane
        col = tl.where(i < head, i, i + body)
        return col, col < cols


class Spread(NamedTuple):
    """Per-lane sums over the columns that are not minus infinity, for label smoothing."""

    below: Any  # sum of weight * (z - origin)
    mass: Any  # sum of weights
    count: Any  # number of columns


@triton.jit
def _add_spread(sums, z, origin, weight_ptr, col, mask):
    """Return (below, mass, count) of `Spread` with the columns of a tile added."""
    below, mass, count = sums.below, sums.mass, sums.count
    finite = z > -float("inf")
    if mask is not None:
        finite = finite & mask
    if weight_ptr is not None:
        w = load_tile(weight_ptr + col, mask)
        mass += tl.sum(tl.where(finite, w, 0.0), axis=0)
        below += tl.sum(tl.where(finite, w * (z - origin), 0.0), axis=0)
    else:
        below += tl.sum(tl.where(finite, z - origin, 0.0), axis=0)
    count += tl.sum(tl.where(finite, 1.0, 0.0), axis=0)
    return below, mass, count


@triton.jit
def _load_target(target_ptr, row, start_col, cols, vocab, ignore_index):
    """Return (column, valid, wrong): the target's column in this shard or -1, whether the target is a column of the
    whole vocabulary, and whether it is neither a column nor ignore_index."""
    y = tl.load(target_ptr + row)
    labeled = y != ignore_index
    inside = (y >= 0) & (y < vocab)
    owned = labeled & inside & (y >= start_col) & (y < start_col + cols)
    column = tl.where(owned, y, start_col) - start_col  # the difference of arbitrary targets may overflow
    return tl.where(owned, column, -1).to(tl.int32), labeled & inside, labeled & (inside == 0)


@triton.jit
def _update_argmax(best, largest, z, col):
    """Return each lane's first column with the largest z, [LANES], from `best` so far and a tile z [STEPS, LANES]."""
    top = tl.max(z, axis=0)
    argmax = tl.min(tl.where(z == tl.expand_dims(top, 0), col.to(tl.int32), 2147483647), axis=0)
    # The head is read after the body, so a column of this tile may precede `best`.
    return tl.where(top > largest, argmax, tl.where(top == largest, tl.minimum(best, argmax), best))


@kernel
def cross_entropy_kernel(
    logits_ptr,  # [rows, cols]
    target_ptr,  # [rows]
    weight_ptr,  # [cols], or None
    stats_ptr,  # fp32 [STATS, rows], the only output for a shard of the vocabulary; else None
    # Results, fp32 [rows] each
    loss_ptr,
    lse_ptr,
    entropy_ptr,  # or None
    hit_ptr,  # or None; 1 if the target has the largest logit, else 0
    largest_ptr,
    total_ptr,
    share_ptr,  # or None; w_y, and 0 for a row without a target
    smooth_ptr,  # [2, rows], or None; a / V * sum(w), and a / V
    rows,
    cols,
    inner,
    outer_stride,
    inner_stride,
    start_col,  # index of the first column in the whole vocabulary
    vocab,
    ignore_index,
    softcap: float,
    scale: float,
    label_smoothing: float,
    z_loss: float,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,  # compute the sums for label smoothing
    ACCURACY: tl.constexpr,
    MARK_MISSING: tl.constexpr,  # store hit = -1 for rows without a target, which a mean leaves out
    TILE: tl.constexpr,  # logits at a time, in rows of LANES
    LANES: tl.constexpr,  # interleaved parts of the row, each with its own statistics
    NESTED: tl.constexpr,  # logits have two row strides
    ALIGN: tl.constexpr,  # cols and all row strides are multiples of it
):
    """Compute one row from the statistics of LANES interleaved parts, which are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    y, valid, wrong = _load_target(target_ptr, row, start_col, cols, vocab, ignore_index)
    cols = tl.where(valid, cols, 0)  # without a target nothing is read
    offset = row_offset(row, inner, outer_stride, inner_stride, NESTED, ALIGN)
    ELEMENT: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    STEPS: tl.constexpr = TILE // LANES
    head, body = _split_row(offset, cols, ALIGN, TILE, ELEMENT)
    picked = tl.load(logits_ptr + offset + y, mask=y >= 0, other=0.0)
    picked = _scaled_logits(picked, softcap, scale, KIND)
    origin = tl.where(picked > -float("inf"), picked, 0.0)
    if stats_ptr is not None and SPREAD:
        # If the target is in another shard, any finite element of the row serves as origin.
        first = _scaled_logits(tl.load(logits_ptr + offset, mask=valid, other=0.0), softcap, scale, KIND)
        origin = tl.where((y < 0) & (first > -float("inf")), first, origin)

    lane = tl.arange(0, LANES)
    tile_off = (tl.arange(0, STEPS) * LANES)[:, None] + lane[None, :]  # [STEPS, LANES]
    largest = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    below = tl.zeros((LANES,), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    count = tl.zeros((LANES,), tl.float32)
    ahead = tl.zeros((LANES,), tl.int32)  # columns before the target: larger, or as large and to the left
    best = tl.full((LANES,), 2147483647, tl.int32)  # the first column with the largest z
    BEST: tl.constexpr = ACCURACY and stats_ptr is not None
    body_ptr = logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)
    for start in range(0, body, TILE):
        z = _scaled_logits(tl.load(body_ptr + start + tile_off), softcap, scale, KIND)
        col = head + start + tile_off
        if BEST:
            best = _update_argmax(best, largest, z, col)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 0)
        else:
            largest, total = add_exponentials(largest, total, z, 0)
        if SPREAD:
            sums = Spread(below, mass, count)
            below, mass, count = _add_spread(sums, z, origin, weight_ptr, col, None)
        if ACCURACY and stats_ptr is None:
            ahead += tl.sum(((z > picked) | ((z == picked) & (col < y))).to(tl.int32), axis=0)
    for start in range(0, cols - body, LANES):
        col, exists = _edge_columns(start, lane[None, :], head, body, cols, ALIGN)  # [1, LANES]
        x = tl.load(logits_ptr + offset + col, mask=exists, other=-float("inf"))
        z = tl.where(exists, _scaled_logits(x, softcap, scale, KIND), -float("inf"))
        if BEST:
            best = _update_argmax(best, largest, z, col)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 0)
        else:
            largest, total = add_exponentials(largest, total, z, 0)
        if SPREAD:
            sums = Spread(below, mass, count)
            below, mass, count = _add_spread(sums, z, origin, weight_ptr, col, exists)
        if ACCURACY and stats_ptr is None:
            ahead += tl.sum((exists & ((z > picked) | ((z == picked) & (col < y)))).to(tl.int32), axis=0)

    row_moment = 0.0
    if ENTROPY:
        row_largest, row_total, row_moment = join_moments(largest, total, moment, 0)
    else:
        row_largest, row_total = join_exponentials(largest, total, 0)
    row_count = tl.sum(count, axis=0)
    row_mass = tl.sum(mass, axis=0) if weight_ptr is not None else row_count
    row_below = tl.sum(below, axis=0)
    if stats_ptr is not None:
        STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + ACCURACY
        stats_stride = rows.to(tl.int64)  # some multiples of it do not fit 32 bits
        out_ptr = stats_ptr + row
        tl.store(out_ptr, row_largest)
        tl.store(out_ptr + stats_stride, row_total)
        tl.store(out_ptr + 2 * stats_stride, picked)
        if ENTROPY:
            tl.store(out_ptr + FEW * stats_stride, row_moment)
        if SPREAD:
            row_below = tl.where(row_count > 0.0, row_below + row_mass * (origin - row_largest), 0.0)
            tl.store(out_ptr + (FEW + ENTROPY) * stats_stride, row_below)
            tl.store(out_ptr + (FEW + ENTROPY + 1) * stats_stride, row_mass)
            tl.store(out_ptr + (FEW + ENTROPY + 2) * stats_stride, row_count)
        if ACCURACY:
            argmax = tl.min(tl.where(largest == row_largest, best, 2147483647), axis=0)
            argmax = tl.where(argmax == 2147483647, -1, argmax + start_col)
            tl.store(out_ptr + (STATS - 1) * stats_stride, argmax.to(tl.int32).to(tl.float32, bitcast=True))
    else:
        missing = tl.where(wrong, float("nan"), 0.0)
        log_total = tl.log(row_total)
        if ENTROPY:
            entropy = log_total - row_moment / row_total
            tl.store(entropy_ptr + row, tl.where(valid, entropy, missing))
        lse = row_largest + log_total
        share = 1.0
        if weight_ptr is not None:
            share = tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        loss = share * ((row_largest - picked) + log_total)
        if SPREAD:
            part = label_smoothing / row_count
            spread = row_mass * ((row_largest - origin) + log_total) - row_below
            loss = (1.0 - label_smoothing) * loss + part * spread
            tl.store(smooth_ptr + row, tl.where(valid, part * row_mass, 0.0))
            tl.store(smooth_ptr + rows + row, tl.where(valid, part, 0.0))
        loss += z_loss * lse * lse
        tl.store(loss_ptr + row, tl.where(valid, loss, missing))
        tl.store(lse_ptr + row, tl.where(valid, lse, missing))
        tl.store(largest_ptr + row, tl.where(valid, row_largest, 0.0))
        tl.store(total_ptr + row, tl.where(valid, row_total, 1.0))
        if share_ptr is not None:
            tl.store(share_ptr + row, tl.where(valid, share, 0.0))
        if ACCURACY:
            leads = tl.where(tl.sum(ahead, axis=0) == 0, 1.0, 0.0)
            tl.store(hit_ptr + row, tl.where(valid, leads, -1.0 if MARK_MISSING else 0.0))


@kernel
def cross_entropy_totals_kernel(
    loss_ptr,  # fp32 [rows]
    share_ptr,  # fp32 [rows] for means, None for sums
    hit_ptr,  # fp32 [rows], or None
    total_loss_ptr,  # a scalar
    inverse_ptr,  # a scalar, or None: 1 / sum(share)
    accuracy_ptr,  # a scalar, or None
    rows,
    ZERO_IF_NONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum over all rows, TILE at a time, in order."""
    tile_off = tl.arange(0, TILE)
    losses = tl.zeros((TILE,), tl.float32)
    shares = tl.zeros((TILE,), tl.float32)
    hits = tl.zeros((TILE,), tl.float32)
    counts = tl.zeros((TILE,), tl.float32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + tile_off
        exists = row < rows
        losses += tl.load(loss_ptr + row, mask=exists, other=0.0)
        if share_ptr is not None:
            shares += tl.load(share_ptr + row, mask=exists, other=0.0)
        if hit_ptr is not None:
            hit = tl.load(hit_ptr + row, mask=exists, other=-1.0)
            hits += tl.maximum(hit, 0.0)
            counts += tl.where(hit >= 0.0, 1.0, 0.0)
    loss = tl.sum(losses, axis=0)
    hit_sum = tl.sum(hits, axis=0)
    if share_ptr is not None:
        share = tl.sum(shares, axis=0)
        inverse = 1.0 / share
        mean = loss / share
        counted = tl.sum(counts, axis=0)
        accuracy = hit_sum / counted
        if ZERO_IF_NONE:
            inverse = tl.where(share == 0.0, 0.0, inverse)
            mean = tl.where((share == 0.0) & (loss == loss), 0.0, mean)
            accuracy = tl.where(counted == 0.0, 0.0, accuracy)
        tl.store(total_loss_ptr, mean)
        tl.store(inverse_ptr, inverse)
        if hit_ptr is not None:
            tl.store(accuracy_ptr, accuracy)
    else:
        tl.store(total_loss_ptr, loss)
        if hit_ptr is not None:
            tl.store(accuracy_ptr, hit_sum)


class RowGradient(NamedTuple):
    """Factors of the gradient of a row's logits."""

    y: Any  # the target's column, or -1
    largest: Any
    factor: Any
    dentropy: Any  # None if the entropy has no gradient
    at_target: Any
    part: Any  # None without label smoothing


@triton.jit
def _logits_gradient(x, col, mask, row, weight_ptr, scaling):
    """Return dx of a tile of logits. With t = z - largest, dz = exp(t) * (factor - dentropy * t), minus
    `part * class weight` with smoothing, and minus `at_target` in the target's column."""
    z = x.to(tl.float32)
    slope = scaling.scale
    if scaling.KIND == CAPPED:
        z, dcap = cap(z, scaling.softcap)
        slope = slope * dcap
    if scaling.KIND != PLAIN:
        z = z * scaling.scale
    t = z - row.largest
    e = tl.exp(t)
    if row.dentropy is not None:
        dz = tl.where(e == 0.0, 0.0, e * (row.factor - row.dentropy * t))
    else:
        dz = e * row.factor
    if row.part is not None:
        if weight_ptr is not None:
            w = row.part * load_tile(weight_ptr + col, mask)
            dz -= tl.where(z > -float("inf"), w, 0.0)
        else:
            dz -= tl.where(z > -float("inf"), row.part, 0.0)
    dz = tl.where(col == row.y, dz - row.at_target, dz)
    if scaling.KIND != PLAIN:
        dz = dz * slope
    return dz


@kernel
def cross_entropy_backward_kernel(
    logits_ptr,  # [rows, cols]
    target_ptr,  # [rows]
    weight_ptr,  # [cols], or None
    largest_ptr,  # fp32 [rows]
    total_ptr,  # fp32 [rows]
    inverse_ptr,  # a scalar, or None
    smooth_ptr,  # fp32 [2, rows], or None
    entropy_ptr,  # fp32 [rows], or None
    dloss_ptr,  # [rows], or None
    dlse_ptr,  # [rows], or None
    dentropy_ptr,  # [rows], or None
    dspread_ptr,  # [rows], or None; with it, class weights belong to the spread and not to the loss
    dlogits_ptr,  # [rows, cols]; aliases logits if INPLACE
    rows,
    cols,
    inner,
    outer_stride,
    inner_stride,
    start_col,  # index of the first column in the whole vocabulary
    vocab,
    ignore_index,
    dloss_stride,
    dlse_stride,
    dentropy_stride,
    dspread_stride,
    span,  # columns per program, a multiple of TILE
    softcap: float,
    scale: float,
    label_smoothing: float,
    z_loss: float,
    KIND: tl.constexpr,
    INPLACE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,  # elements at a time where rows begin and end
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIKE: tl.constexpr,  # rows of dlogits and logits begin at equal addresses modulo 16 bytes
):
    """Write a span of one row's gradient. Rows without a target get zeros, and their logits are not read."""
    row = tl.program_id(0).to(tl.int64)
    y, valid, _ = _load_target(target_ptr, row, start_col, cols, vocab, ignore_index)
    offset = row_offset(row, inner, outer_stride, inner_stride, NESTED, ALIGN)
    ELEMENT: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    DTYPE: tl.constexpr = dlogits_ptr.dtype.element_ty
    head, body = _split_row(offset, cols, ALIGN, TILE, ELEMENT)
    if INPLACE:
        out_offset = offset
    else:
        out_offset = tl.multiple_of(row * cols, ALIGN)
    x_ptr = logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)
    out_off = out_offset + head
    if ALIKE:
        out_off = tl.multiple_of(out_off, 16 // ELEMENT)
    dx_ptr = dlogits_ptr + out_off

    largest = tl.load(largest_ptr + row)
    total = tl.load(total_ptr + row)
    log_total = tl.log(total)
    factor = 0.0
    at_target = 0.0
    part = None
    dentropy = None
    if dloss_ptr is not None:
        g = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
        if inverse_ptr is not None:
            g *= tl.load(inverse_ptr)
        at_target = g * (1.0 - label_smoothing)
        if weight_ptr is not None and dspread_ptr is None:
            at_target *= tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        factor = at_target + g * 2.0 * z_loss * (largest + log_total)
        if smooth_ptr is not None and dspread_ptr is None:
            factor += g * tl.load(smooth_ptr + row)
            part = g * tl.load(smooth_ptr + rows + row)
    if dspread_ptr is not None:
        g = tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)
        factor += g * tl.load(smooth_ptr + row)
        part = g * tl.load(smooth_ptr + rows + row)
    if dlse_ptr is not None:
        factor += tl.load(dlse_ptr + row * dlse_stride).to(tl.float32)
    if dentropy_ptr is not None:
        dentropy = tl.load(dentropy_ptr + row * dentropy_stride).to(tl.float32)
        factor -= dentropy * (tl.load(entropy_ptr + row) - log_total)
        dentropy = dentropy / total
    row_gradient = RowGradient(y, largest, factor / total, dentropy, at_target, part)

    first = tl.multiple_of(tl.program_id(1) * span, TILE)
    last = tl.minimum(first + span, body)
    tile_off = tl.arange(0, TILE)
    read = tl.multiple_of(tl.where(valid, last, first), TILE)
    for start in range(first, read, TILE):
        x = tl.load(x_ptr + start + tile_off)
        col = head + start + tile_off
        dz = _logits_gradient(x, col, None, row_gradient, weight_ptr, Scaling(softcap, scale, KIND))
        tl.store(dx_ptr + start + tile_off, dz.to(DTYPE))
    for start in range(read, last, TILE):
        tl.store(dx_ptr + start + tile_off, tl.zeros((TILE,), DTYPE))
    if tl.program_id(1) == tl.num_programs(1) - 1:
        lane = tl.arange(0, LANES)
        for start in range(0, cols - body, LANES):
            col, exists = _edge_columns(start, lane, head, body, cols, ALIGN)
            x = tl.load(logits_ptr + offset + col, mask=exists & valid, other=0.0)
            dz = _logits_gradient(x, col, exists, row_gradient, weight_ptr, Scaling(softcap, scale, KIND))
            dz = tl.where(valid, dz, 0.0)
            tl.store(dlogits_ptr + out_offset + col, dz.to(DTYPE), mask=exists)
