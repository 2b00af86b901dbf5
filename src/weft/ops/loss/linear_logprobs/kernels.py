"""Kernels of `linear_logprobs`: the order of the tokens, the statistics of splits, and the three products of the
backward."""

from typing import Any, NamedTuple

from ....language import tl, triton
from ....runtime import kernel
from ....tiles.softmax import LOWEST, add_exponentials, add_moments, add_squares, cap
from ....tiles.split import dot_fp32
from ..join import CAPPED, DRAWN, FEW, PLAIN, Scaling
from .draws import Best, Listed, Noise, best_column, first_largest, list_largest


@triton.jit
def _dot(a, b, total, SPLIT: tl.constexpr):
    """Return total + a @ b. Operands of one 16-bit dtype are multiplied natively, others with fp32 accuracy."""
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return tl.dot(a, b, total)
    else:
        return total + dot_fp32(a, b, SPLIT)


@kernel
def linear_order_kernel(
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1]
    rows,
    vocab,
    ignore_index,
    TILE: tl.constexpr,
):
    """Write the tokens with a target in ascending order, then the others, then the number of tokens with a target."""
    tile_off = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + tile_off
        y = tl.load(target_ptr + row, mask=row < rows, other=-1)
        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)
        count += tl.sum(valid.to(tl.int32), axis=0)
    tl.store(order_ptr + rows, count)
    valid_before = tl.zeros((), tl.int32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + tile_off
        y = tl.load(target_ptr + row, mask=row < rows, other=-1)
        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)
        valid_upto = (valid_before + tl.cumsum(valid.to(tl.int32), axis=0)).to(tl.int64)  # inclusive
        position = tl.where(valid, valid_upto - 1, count + row - valid_upto)
        # Positions stay below `rows` unless the targets change after they were counted.
        tl.store(order_ptr + position, row.to(tl.int32), mask=(row < rows) & (position < rows))
        valid_before += tl.sum(valid.to(tl.int32), axis=0)


class Tokens(NamedTuple):
    """Tokens of a tile."""

    ptr: Any  # hidden states [rows, cols]
    off: Any  # int64 [ROWS], offset of each hidden state
    live: Any  # bool [ROWS]: False past the last token


class Weight(NamedTuple):
    ptr: Any  # [vocab, cols]
    stride: Any
    vocab: Any
    cols: Any


class ProductCut(NamedTuple):
    """Tiling of hidden @ weight^T; all members are constants."""

    SPLIT: Any
    ROWS: Any
    VOCAB: Any
    TILE: Any
    ALIGN: Any
    COLS_MASKED: Any
    TMA: Any


@triton.jit
def _product(tokens, weight, first, CUT):
    """Return hidden @ weight^T [ROWS, VOCAB] of a tile of tokens and the rows of weight from `first` on."""
    col_vocab = first + tl.arange(0, CUT.VOCAB)  # [VOCAB]
    cols = (weight.cols // CUT.ALIGN) * CUT.ALIGN
    weight_off = tl.multiple_of(col_vocab.to(tl.int64) * weight.stride, CUT.ALIGN)
    if CUT.TMA:
        descriptor = tl.make_tensor_descriptor(
            weight.ptr, [weight.vocab, cols], [weight.stride, 1], [CUT.VOCAB, CUT.TILE]
        )
    x = tl.zeros((CUT.ROWS, CUT.VOCAB), tl.float32)
    for start in range(0, cols, CUT.TILE):
        col = start + tl.arange(0, CUT.TILE)  # [TILE]
        exists = tokens.live[:, None] & (col >= 0)[None, :]
        if CUT.COLS_MASKED:
            exists = tokens.live[:, None] & (col < cols)[None, :]
        a = tl.load(tokens.ptr + tokens.off[:, None] + col[None, :], mask=exists, other=0.0)
        if CUT.TMA:
            # [VOCAB, TILE], zeros out of bounds. Descriptors take 32-bit coordinates.
            b = descriptor.load([tl.cast(first, tl.int32), tl.cast(start, tl.int32)])
        else:
            exists = (col_vocab < weight.vocab)[:, None] & (col >= 0)[None, :]
            if CUT.COLS_MASKED:
                exists = exists & (col < cols)[None, :]
            b = tl.load(weight.ptr + weight_off[:, None] + col[None, :], mask=exists, other=0.0)
        x = _dot(a, tl.trans(b), x, CUT.SPLIT)
    return x


@triton.jit
def _capped(x, bias_ptr, col, vocab, scaling):
    """Return (z, dz/dx) of products x [ROWS, VOCAB]; z is minus infinity past the vocabulary."""
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
    slope = scaling.scale
    z = x
    if scaling.KIND == CAPPED:
        z, dcap = cap(x, scaling.softcap)
        slope = scaling.scale * dcap
    if scaling.KIND != PLAIN:
        z = z * scaling.scale
    return tl.where((col < vocab)[None, :], z, -float("inf")), slope


@triton.jit
def _column(y, start_col, vocab):
    """Return the row of weight for target y, or -1 if it is not in this shard."""
    inside = (y >= start_col) & (y < start_col + vocab)
    column = tl.where(inside, y, start_col) - start_col  # the difference of arbitrary targets may overflow
    return tl.where(inside, column, -1).to(tl.int32)


@kernel
def linear_logprobs_kernel(
    hidden_ptr,  # [rows, cols]
    weight_ptr,  # [vocab, cols]
    bias_ptr,  # [vocab], or None
    target_ptr,  # [rows], or None to draw the targets
    order_ptr,  # int32 [rows + 1], or None if all rows have a target
    classes_ptr,  # [vocab], or None
    seed_ptr,  # int64 [rows] or one element; None to draw without noise
    step_ptr,
    stats_ptr,  # fp32 [splits, STATS, rows], tokens in the order of `order`
    listed: Listed,  # of targets that another kernel draws
    rows,
    cols,
    vocab,
    hidden_stride,
    weight_stride,
    start_col,  # index of weight's first row in the whole vocabulary
    span,  # columns per split, a multiple of VOCAB
    seed_stride,
    step_stride,
    softcap: float,
    scale: float,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,
    ACCURACY: tl.constexpr,
    SQUARES: tl.constexpr,
    SPLIT: tl.constexpr,  # multiply bf16 parts of fp32 operands
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,  # elements of the hidden dimension at a time
    ALIGN: tl.constexpr,  # cols, hidden_stride and weight_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,  # start_col is a multiple of 4
    LISTED: tl.constexpr,  # columns of a tile that are listed, a power of two
):
    """Compute the statistics of ROWS tokens over one split of the vocabulary."""
    IS_DRAWN: tl.constexpr = target_ptr is None
    STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + SQUARES + ACCURACY + DRAWN * IS_DRAWN
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    split = tl.program_id(1).to(tl.int64)
    if order_ptr is not None:
        count = tl.load(order_ptr + rows)
        live = position < count
        row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)
    else:
        count = rows
        live = position < count
        row = tl.where(live, position, 0).to(tl.int64)
    noise = Noise(None, None, ALIGNED)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr + row * seed_stride, mask=live, other=0)
        noise = Noise(seed, tl.load(step_ptr + row * step_stride, mask=live, other=0), ALIGNED)
    if not IS_DRAWN:
        y = _column(tl.load(target_ptr + row, mask=live, other=-1), start_col, vocab)
    hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
    span = (span // VOCAB) * VOCAB
    first = (split * span).to(tl.int32)
    last = tl.minimum(first + span, vocab)
    last = tl.where(tl.program_id(0) * ROWS < count, last, first)  # a tile without tokens skips the loop
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    columns = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS,), -1, tl.int32)  # the first column with the largest z
    drawn = Best(tl.full((ROWS,), -float("inf"), tl.float32), best, picked)
    tokens, weight = Tokens(hidden_ptr, hidden_off, live), Weight(weight_ptr, weight_stride, vocab, cols)
    for start in range(first, last, VOCAB):
        x = _product(tokens, weight, start, ProductCut(SPLIT, ROWS, VOCAB, TILE, ALIGN, COLS_MASKED, TMA))
        col = start + tl.arange(0, VOCAB)  # [VOCAB]
        z, _ = _capped(x, bias_ptr, col, vocab, Scaling(softcap, scale, KIND))  # [ROWS, VOCAB]
        if listed.value is not None:
            list_largest(listed, z, live, position, tl.cdiv(vocab, VOCAB), start, start_col, LISTED)
        elif IS_DRAWN:
            drawn = best_column(drawn, z, start, start_col, noise)
        else:
            picked += tl.sum(tl.where(col[None, :] == y[:, None], z, 0.0), axis=1)
        if ACCURACY:
            top, argmax = first_largest(z, col)
            best = tl.where(top > largest, argmax, best)
        if SPREAD:
            finite = z > -float("inf")
            if classes_ptr is not None:
                w = tl.load(classes_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
                weighted += tl.sum(tl.where(finite, w * z, 0.0), axis=1)
                mass += tl.sum(tl.where(finite, w, 0.0), axis=1)
            else:
                weighted += tl.sum(tl.where(finite, z, 0.0), axis=1)
            columns += tl.sum(tl.where(finite, 1.0, 0.0), axis=1)
        if SQUARES:
            squares = add_squares(largest, squares, z, 1)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 1)
        else:
            largest, total = add_exponentials(largest, total, z, 1)
    stats_stride = rows.to(tl.int64)  # int64: multiples of it may exceed 32 bits
    out_ptr = stats_ptr + split * STATS * stats_stride + position
    if IS_DRAWN:
        picked, best = drawn.z, drawn.column
        tl.store(out_ptr + (STATS - 2) * stats_stride, drawn.score, mask=live)
    tl.store(out_ptr, largest, mask=live)
    tl.store(out_ptr + stats_stride, total, mask=live)
    tl.store(out_ptr + 2 * stats_stride, picked, mask=live)
    if ENTROPY:
        tl.store(out_ptr + FEW * stats_stride, moment, mask=live)
    if SPREAD:
        if classes_ptr is None:
            mass = columns
        spread_ptr = out_ptr + (FEW + ENTROPY) * stats_stride
        below = tl.where(columns > 0.0, weighted - mass * largest, 0.0)
        tl.store(spread_ptr, below, mask=live)
        tl.store(spread_ptr + stats_stride, mass, mask=live)
        tl.store(spread_ptr + 2 * stats_stride, columns, mask=live)
    if SQUARES:
        tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stats_stride, squares, mask=live)
    if ACCURACY or IS_DRAWN:
        best = tl.where(best < 0, best, best + start_col)
        tl.store(
            out_ptr + (STATS - 1) * stats_stride, best.to(tl.int32).to(tl.float32, bitcast=True), mask=live
        )


@kernel
def linear_factors_kernel(
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1]
    largest_ptr,  # fp32 [rows]
    total_ptr,
    entropy_ptr,  # or None
    shares_ptr,  # [2, rows], or None
    # Gradients [rows]; None for a result that was not used
    dlogprob_ptr,
    dlse_ptr,
    dentropy_ptr,
    dspread_ptr,
    factors_ptr,  # fp32 [5, rows], tokens in the order of `order`
    labels_ptr,  # int32 [rows], in the same order
    rows,
    vocab,
    start_col,
    dlogprob_stride,
    dlse_stride,
    dentropy_stride,
    dspread_stride,
    ROWS: tl.constexpr,
):
    """Compute the factors of each token's dz. With t = z - largest,
    dz_j = exp(t) * (factor - dentropy * t) + at_target * [j = y] - part."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = position < tl.load(order_ptr + rows)
    row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)
    largest = tl.load(largest_ptr + row, mask=live, other=0.0)
    total = tl.load(total_ptr + row, mask=live, other=1.0)
    factor = tl.zeros((ROWS,), tl.float32)
    dentropy = tl.zeros((ROWS,), tl.float32)
    at_target = tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS,), tl.float32)
    if dlogprob_ptr is not None:
        at_target = tl.load(dlogprob_ptr + row * dlogprob_stride, mask=live, other=0.0).to(tl.float32)
        factor -= at_target
    if dlse_ptr is not None:
        factor += tl.load(dlse_ptr + row * dlse_stride, mask=live, other=0.0).to(tl.float32)
    if dspread_ptr is not None:
        g = tl.load(dspread_ptr + row * dspread_stride, mask=live, other=0.0).to(tl.float32)
        factor += g * tl.load(shares_ptr + row, mask=live, other=0.0)
        part = g * tl.load(shares_ptr + rows + row, mask=live, other=0.0)
    if dentropy_ptr is not None:
        dentropy = tl.load(dentropy_ptr + row * dentropy_stride, mask=live, other=0.0).to(tl.float32)
        factor -= dentropy * (tl.load(entropy_ptr + row, mask=live, other=0.0) - tl.log(total))
    exists = position < rows
    factor_stride = rows.to(tl.int64)  # int64: multiples of it may exceed 32 bits
    tl.store(factors_ptr + position, largest, mask=exists)
    tl.store(factors_ptr + factor_stride + position, factor / total, mask=exists)
    tl.store(factors_ptr + 2 * factor_stride + position, dentropy / total, mask=exists)
    tl.store(factors_ptr + 3 * factor_stride + position, at_target, mask=exists)
    tl.store(factors_ptr + 4 * factor_stride + position, part, mask=exists)
    y = tl.load(target_ptr + row, mask=live, other=-1)
    tl.store(labels_ptr + position, _column(y, start_col, vocab), mask=exists)


@kernel
def linear_dlogits_kernel(
    hidden_ptr,  # [rows, cols]
    weight_ptr,  # [vocab, cols]
    bias_ptr,  # [vocab], or None
    order_ptr,  # int32 [rows + 1]
    classes_ptr,  # [vocab], or None
    total_ptr,  # fp32 [rows], for the probabilities if tiles may be skipped, or None
    factors_ptr,  # fp32 [5, rows]
    labels_ptr,  # int32 [rows]
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    dlogits_ptr,  # [rows rounded up to a whole tile, block]
    rows,
    cols,
    vocab,
    hidden_stride,
    weight_stride,
    begin,  # first column of the block of the vocabulary
    block,  # its columns, a multiple of VOCAB
    softcap: float,
    scale: float,
    skip_below: float,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write a tile of the gradient of a block's logits. Rows past the last token get zeros."""
    tiles = tl.cdiv(rows, ROWS)
    # Consecutive programs share vocabulary rows, so they read the same weight.
    tile = tl.program_id(0) % tiles
    block_col = (tl.program_id(0) // tiles) * VOCAB  # column within the block
    count = tl.load(order_ptr + rows)
    if tile * ROWS < count:
        position = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
        live = position < count
        row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)
        hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
        tokens, weight = Tokens(hidden_ptr, hidden_off, live), Weight(weight_ptr, weight_stride, vocab, cols)
        x = _product(
            tokens, weight, begin + block_col, ProductCut(SPLIT, ROWS, VOCAB, TILE, ALIGN, COLS_MASKED, TMA)
        )
        col = begin + block_col + tl.arange(0, VOCAB)  # [VOCAB]
        z, slope = _capped(x, bias_ptr, col, vocab, Scaling(softcap, scale, KIND))
        factor_stride = rows.to(tl.int64)
        largest = tl.load(factors_ptr + position, mask=live, other=0.0)
        factor = tl.load(factors_ptr + factor_stride + position, mask=live, other=0.0)
        at_target = tl.load(factors_ptr + 3 * factor_stride + position, mask=live, other=0.0)
        y = tl.load(labels_ptr + position, mask=live, other=-1)
        t = z - largest[:, None]
        e = tl.exp(t)
        if ENTROPY:
            dentropy = tl.load(factors_ptr + 2 * factor_stride + position, mask=live, other=0.0)
            dz = tl.where(e == 0.0, 0.0, e * (factor[:, None] - dentropy[:, None] * t))
        else:
            dz = e * factor[:, None]
        if SPREAD:
            part = tl.load(factors_ptr + 4 * factor_stride + position, mask=live, other=0.0)[:, None]
            if classes_ptr is not None:
                part = part * tl.load(classes_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
            dz -= tl.where(z > -float("inf"), part, 0.0)
        at_column = col[None, :] == y[:, None]
        dz = tl.where(at_column, dz + at_target[:, None], dz)
        if KIND != PLAIN:
            dz = dz * slope
        dz = tl.where(live[:, None] & (col < vocab)[None, :], dz, 0.0)
        if kept_ptr is not None:
            total = tl.load(total_ptr + row, mask=live, other=1.0)
            # The comparison keeps a tile with a NaN: NaN is not below the threshold.
            significant = live[:, None] & ((e < skip_below * total[:, None]) == 0)
            # One full reduction: Triton 3.7.1 fails for sm_100 on a reduction by rows and then over them.
            keep = tl.max((significant | (at_column & live[:, None])).to(tl.int32))
            tl.store(kept_ptr + tile * (block // VOCAB) + block_col // VOCAB, keep.to(tl.int8))
        out_off = tl.multiple_of(position.to(tl.int64) * ((block // VOCAB) * VOCAB), VOCAB)
        out = (block_col + tl.arange(0, VOCAB))[None, :]
        tl.store(dlogits_ptr + out_off[:, None] + out, dz.to(dlogits_ptr.dtype.element_ty))


@kernel
def linear_dweight_kernel(
    hidden_ptr,  # [rows, cols]
    dlogits_ptr,  # [rows rounded up to a whole tile, block]
    order_ptr,  # int32 [rows + 1]
    unit_ptr,  # fp32 scalar that results are multiplied by, or None
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    dweight_ptr,  # [vocab, cols], or None
    dbias_ptr,  # [vocab], or None
    rows,
    cols,
    vocab,
    hidden_stride,
    begin,
    block,
    SPLIT: tl.constexpr,
    VOCAB: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # tokens at a time
    KEPT_ROWS: tl.constexpr,  # tokens and columns per element of kept_ptr
    KEPT_VOCAB: tl.constexpr,
    ALIGN: tl.constexpr,  # cols and hidden_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
    TMA: tl.constexpr,
):
    """Compute a tile of dweight, and of dbias, over all tokens."""
    cols = (cols // ALIGN) * ALIGN
    block = (block // VOCAB) * VOCAB
    tiles = tl.cdiv(cols, COLS) if dweight_ptr is not None else 1
    # Consecutive programs share vocabulary rows, so they read the same dlogits.
    block_start = (tl.program_id(0) // tiles) * VOCAB
    block_row = block_start + tl.arange(0, VOCAB)  # [VOCAB], within the block
    col = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    count = tl.load(order_ptr + rows)
    if TMA:
        descriptor = tl.make_tensor_descriptor(dlogits_ptr, [rows + TILE, block], [block, 1], [TILE, VOCAB])
    total = tl.zeros((VOCAB, COLS), tl.float32)
    total_bias = tl.zeros((VOCAB,), tl.float32)
    for start in range(0, count, TILE):
        position = start + tl.arange(0, TILE)  # [TILE]
        keep = True
        if kept_ptr is not None:
            kept_index = (start // KEPT_ROWS) * (block // KEPT_VOCAB) + block_start // KEPT_VOCAB
            keep = tl.load(kept_ptr + kept_index) > 0
        if keep:
            if TMA:
                dlogits = descriptor.load(
                    [tl.cast(start, tl.int32), tl.cast(block_start, tl.int32)]
                )  # [TILE, VOCAB]
            else:
                in_off = tl.multiple_of(position.to(tl.int64) * block, VOCAB)
                dlogits = tl.load(dlogits_ptr + in_off[:, None] + block_row[None, :])
            if dbias_ptr is not None:
                total_bias += tl.sum(dlogits.to(tl.float32), axis=0)
            if dweight_ptr is not None:
                live = position < count
                row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)
                hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
                exists = live[:, None] & (col >= 0)[None, :]
                if COLS_MASKED:
                    exists = live[:, None] & (col < cols)[None, :]
                hidden = tl.load(hidden_ptr + hidden_off[:, None] + col[None, :], mask=exists, other=0.0)
                total = _dot(tl.trans(dlogits), hidden, total, SPLIT)
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
        total *= unit
        total_bias *= unit
    vocab_row = begin + block_row
    if dweight_ptr is not None:
        exists = (vocab_row < vocab)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            exists = exists & (col < cols)[None, :]
        out_off = tl.multiple_of(vocab_row.to(tl.int64) * cols, ALIGN)
        out = total.to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + out_off[:, None] + col[None, :], out, mask=exists)
    if dbias_ptr is not None:
        bias_mask = (vocab_row < vocab) & (tl.program_id(0) % tiles == 0)
        tl.store(dbias_ptr + vocab_row, total_bias.to(dbias_ptr.dtype.element_ty), mask=bias_mask)


@kernel
def linear_dhidden_kernel(
    dlogits_ptr,  # [rows rounded up to a whole tile, block]
    weight_ptr,  # [vocab, cols]
    order_ptr,  # int32 [rows + 1]
    unit_ptr,  # fp32 scalar, or None
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    sums_ptr,  # fp32 [rows, cols], tokens in the order of `order`: the sum over earlier blocks; or None
    dhidden_ptr,  # [rows, cols], or None if this is not the last block
    rows,
    cols,
    vocab,
    weight_stride,
    begin,
    block,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # vocabulary rows at a time
    KEPT_ROWS: tl.constexpr,
    KEPT_VOCAB: tl.constexpr,
    FIRST: tl.constexpr,  # this is the first block, so sums are not read
    ALIGN: tl.constexpr,  # cols and weight_stride are multiples of it
    COLS_MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute a tile of dhidden: the product over one block of the vocabulary, added to the sum over earlier blocks."""
    cols = (cols // ALIGN) * ALIGN
    block = (block // TILE) * TILE
    tiles = tl.cdiv(cols, COLS)
    # Consecutive programs share tokens, so they read the same dlogits.
    tile = tl.program_id(0) // tiles
    position = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    first_col = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS)
    col = first_col + tl.arange(0, COLS)  # [COLS]
    count = tl.load(order_ptr + rows)
    length = tl.where(tile * ROWS < count, tl.minimum(block, vocab - begin), 0)
    in_off = tl.multiple_of(position.to(tl.int64) * block, TILE)
    if TMA:
        gradients = tl.make_tensor_descriptor(dlogits_ptr, [rows + ROWS, block], [block, 1], [ROWS, TILE])
        weights = tl.make_tensor_descriptor(weight_ptr, [vocab, cols], [weight_stride, 1], [TILE, COLS])
    exists = (position < rows)[:, None] & (col >= 0)[None, :]
    if COLS_MASKED:
        exists = exists & (col < cols)[None, :]
    sums_off = tl.multiple_of(position.to(tl.int64) * cols, ALIGN)
    if FIRST:
        total = tl.zeros((ROWS, COLS), tl.float32)
    else:
        total = tl.load(sums_ptr + sums_off[:, None] + col[None, :], mask=exists, other=0.0)
    for start in range(0, length, TILE):
        keep = True
        if kept_ptr is not None:
            kept_index = (tile * ROWS // KEPT_ROWS) * (block // KEPT_VOCAB) + start // KEPT_VOCAB
            keep = tl.load(kept_ptr + kept_index) > 0
        if keep:
            vocab_row = begin + start + tl.arange(0, TILE)  # [TILE]
            if TMA:
                block_row = tl.cast(start, tl.int32)
                dlogits = gradients.load([tl.cast(tile * ROWS, tl.int32), block_row])  # [ROWS, TILE]
                weight = weights.load(
                    [tl.cast(begin, tl.int32) + block_row, tl.cast(first_col, tl.int32)]
                )  # [TILE, COLS]
            else:
                dlogits = tl.load(dlogits_ptr + in_off[:, None] + (start + tl.arange(0, TILE))[None, :])
                weight_mask = (vocab_row < vocab)[:, None] & (col >= 0)[None, :]
                if COLS_MASKED:
                    weight_mask = weight_mask & (col < cols)[None, :]
                weight_off = tl.multiple_of(vocab_row.to(tl.int64) * weight_stride, ALIGN)
                weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=weight_mask, other=0.0)
            total = _dot(dlogits, weight, total, SPLIT)
    total = tl.where((position < count)[:, None], total, 0.0)
    if dhidden_ptr is not None:
        if unit_ptr is not None:
            total *= tl.load(unit_ptr)
        row = tl.load(order_ptr + position, mask=position < rows, other=0).to(tl.int64)
        out_off = tl.multiple_of(row * cols, ALIGN)
        out = total.to(dhidden_ptr.dtype.element_ty)
        tl.store(dhidden_ptr + out_off[:, None] + col[None, :], out, mask=exists)
    else:
        tl.store(sums_ptr + sums_off[:, None] + col[None, :], total, mask=exists)
