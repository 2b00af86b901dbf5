"""Kernels of routing; `route` documents the formulas."""

from __future__ import annotations

from ....language import tl, triton
from ....runtime import kernel
from ....tiles.scores import LEAST, NOTHING, TAKEN, best_of, key_of, number_of, sigmoid, softmax, softplus

SOFTMAX, SIGMOID, SQRTSOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _expert_positions(experts, group_size, GROUPS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Return (position, expert, exists), [GROUPS * TILE] each: the layout of the experts in a tile in which each group
    begins at a multiple of TILE."""
    group_size = (group_size // ALIGN) * ALIGN
    position = tl.arange(0, GROUPS * TILE)
    if GROUPS == 1:
        expert = position
        exists = expert < group_size
    else:
        # The compiler cannot see that consecutive positions within a group are consecutive experts.
        within = tl.max_contiguous(tl.multiple_of(position % TILE, ALIGN), ALIGN)
        expert = tl.max_contiguous(tl.multiple_of((position // TILE) * group_size + within, ALIGN), ALIGN)
        exists = (within < group_size) & (expert < (experts // ALIGN) * ALIGN)
    return position, expert, exists


@triton.jit
def _score_of(x, SCORE: tl.constexpr):
    """Return the scores of logits [R, C]."""
    if SCORE == SOFTMAX:
        s, _ = softmax(x)
    elif SCORE == SIGMOID:
        s = sigmoid(x)
    else:
        s = tl.sqrt_rn(softplus(x))
    return s


@triton.jit
def _in_best_groups(
    key, groups, group_topk, group_best, ROWS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """Return whether each expert belongs to one of the group_topk best groups; key [ROWS, GROUPS * TILE]."""
    remaining = tl.reshape(key, (ROWS, GROUPS, TILE))
    within = tl.arange(0, TILE)[None, None, :] + tl.zeros((ROWS, GROUPS, TILE), tl.int32)
    group_score = tl.zeros((ROWS, GROUPS), tl.float32)
    for _ in range(group_best):
        best, best_at = best_of(remaining, within, 2)
        group_score += number_of(best)
        remaining = tl.where(within == best_at[:, :, None], TAKEN, remaining)
    group = tl.arange(0, GROUPS)[None, :] + tl.zeros((ROWS, GROUPS), tl.int32)
    remaining_groups = tl.where(group < groups, key_of(group_score), NOTHING)
    for _ in range(group_topk):
        _, best_at = best_of(remaining_groups, group, 1)
        remaining_groups = tl.where(group == best_at[:, None], TAKEN, remaining_groups)
    allowed = (remaining_groups == TAKEN)[:, :, None] & (within >= 0)
    return tl.reshape(allowed, (ROWS, GROUPS * TILE))


@kernel
def route_kernel(
    logits_ptr,  # [rows, experts]
    bias_ptr,  # [experts], or None
    weights_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    scores_ptr,  # fp32 [rows, experts], or None
    counts_ptr,  # [programs, experts], int32
    score_sums_ptr,  # fp32 [programs, experts], or None
    score_counts_ptr,  # int32 [programs, experts], or None
    z_ptr,  # fp32 [programs], or None
    rows,
    experts,
    stride,
    k,
    groups,
    group_size,
    group_topk,
    group_best,
    program_rows,  # rows per program, a multiple of ROWS
    eps: float,
    scale: float,
    SCORE: tl.constexpr,
    POST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    MASKED_IS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # the number of groups, rounded up to a power of two; 1 without groups
    TILE: tl.constexpr,  # the experts of a group, rounded up to a power of two
    K: tl.constexpr,  # k, rounded up to a power of two
    ALIGN: tl.constexpr,  # group_size and stride are multiples of it
):
    """Route consecutive rows, ROWS at a time, in k rounds that each choose the best remaining expert."""
    position, expert, exists = _expert_positions(experts, group_size, GROUPS, TILE, ALIGN)  # [GROUPS * TILE]
    program = tl.program_id(0).to(tl.int64)
    first = program * program_rows
    last = tl.minimum(first + program_rows, rows)
    slot = tl.arange(0, K)[None, :]  # [1, K]
    counts = tl.zeros((GROUPS * TILE,), tl.int32)
    score_counts = tl.zeros((GROUPS * TILE,), tl.int32)
    score_sums = tl.zeros((GROUPS * TILE,), tl.float32)
    z_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)  # [ROWS]
        row_mask = row < last
        mask = row_mask[:, None] & exists[None, :]
        off = tl.multiple_of(row * stride, ALIGN)
        x = tl.load(logits_ptr + off[:, None] + expert[None, :], mask=mask, other=-float("inf")).to(
            tl.float32
        )
        s = _score_of(x, SCORE)
        if scores_ptr is not None:
            scores_off = tl.multiple_of(row * ((experts // ALIGN) * ALIGN), ALIGN)
            tl.store(scores_ptr + scores_off[:, None] + expert[None, :], s, mask=mask)
        value = x if POST else s  # the weights are computed from it
        choice = value
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
        key = tl.where(exists[None, :], key_of(choice), NOTHING)
        if GROUPS > 1:
            allowed = _in_best_groups(key, groups, group_topk, group_best, ROWS, GROUPS, TILE)
            key = tl.where(allowed, key, tl.where(exists[None, :], 0 if MASKED_IS_ZERO else LEAST, NOTHING))
        weights = tl.full((ROWS, K), -float("inf") if POST else 0.0, tl.float32)
        indices = tl.zeros((ROWS, K), tl.int32)
        for j in range(k):
            _, best_at = best_of(key, position[None, :], 1)  # [ROWS]
            hit = position[None, :] == best_at[:, None]
            weight = tl.sum(tl.where(hit, value, 0.0), axis=1)
            weights = tl.where(slot == j, weight[:, None], weights)
            index = ((best_at // TILE) * group_size + best_at % TILE).to(tl.int32)
            indices = tl.where(slot == j, index[:, None], indices)
            key = tl.where(hit, TAKEN, key)
        chosen = row_mask[:, None] & (key == TAKEN)
        counts += tl.sum(chosen.to(tl.int32), axis=0)
        if POST:
            weights, _ = softmax(weights)
        if RENORMALIZE:
            weights = weights / (tl.sum(weights, axis=1) + eps)[:, None]
        weights = weights * scale
        out_off = (row * k)[:, None] + slot
        out_mask = row_mask[:, None] & (slot < k)
        tl.store(weights_ptr + out_off, weights.to(weights_ptr.dtype.element_ty), mask=out_mask)
        tl.store(indices_ptr + out_off, indices.to(indices_ptr.dtype.element_ty), mask=out_mask)

        if score_sums_ptr is not None:
            if SCORE == SOFTMAX:
                share = s
            else:
                share = s / (tl.sum(s, axis=1) + 1e-20)[:, None]
            score_sums += tl.sum(tl.where(mask, share, 0.0), axis=0)
            if bias_ptr is not None or GROUPS > 1:
                key = tl.where(exists[None, :], key_of(value), NOTHING)
                for _ in range(k):
                    _, best_at = best_of(key, position[None, :], 1)
                    key = tl.where(position[None, :] == best_at[:, None], TAKEN, key)
                chosen = row_mask[:, None] & (key == TAKEN)
            score_counts += tl.sum(chosen.to(tl.int32), axis=0)
        if z_ptr is not None:
            _, lse = softmax(x)
            z_sum += tl.where(row_mask, lse * lse, 0.0)
    total_off = program * experts + expert
    tl.store(counts_ptr + total_off, counts, mask=exists)
    if score_sums_ptr is not None:
        tl.store(score_sums_ptr + total_off, score_sums, mask=exists)
        tl.store(score_counts_ptr + total_off, score_counts, mask=exists)
    if z_ptr is not None:
        tl.store(z_ptr + program, tl.sum(z_sum, axis=0))


@kernel
def route_totals_kernel(
    counts_ptr,  # int32 [programs, experts]
    score_sums_ptr,  # fp32 [programs, experts], or None
    score_counts_ptr,  # int32 [programs, experts], or None
    z_ptr,  # fp32 [programs], or None
    total_counts_ptr,  # [experts]
    total_score_sums_ptr,  # [experts], or None
    total_score_counts_ptr,
    total_z_ptr,  # a scalar, or None
    programs,
    experts,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum over programs, ROWS at a time, in order."""
    expert = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    exists = expert < experts
    counts = tl.zeros((TILE,), tl.int32)
    score_counts = tl.zeros((TILE,), tl.int32)
    score_sums = tl.zeros((TILE,), tl.float32)
    z_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)  # [ROWS]
        mask = (program < programs)[:, None] & exists[None, :]
        off = (program.to(tl.int64) * experts)[:, None] + expert[None, :]
        counts += tl.sum(tl.load(counts_ptr + off, mask=mask, other=0), axis=0)
        if score_sums_ptr is not None:
            score_sums += tl.sum(tl.load(score_sums_ptr + off, mask=mask, other=0.0), axis=0)
            score_counts += tl.sum(tl.load(score_counts_ptr + off, mask=mask, other=0), axis=0)
        if z_ptr is not None:
            z_sum += tl.load(z_ptr + program, mask=program < programs, other=0.0)
    tl.store(total_counts_ptr + expert, counts, mask=exists)
    if score_sums_ptr is not None:
        tl.store(total_score_sums_ptr + expert, score_sums, mask=exists)
        tl.store(total_score_counts_ptr + expert, score_counts, mask=exists)
    if z_ptr is not None and tl.program_id(0) == 0:
        tl.store(total_z_ptr, tl.sum(z_sum, axis=0))


@triton.jit
def _normalization_gradient(ds, s, chosen, eps):
    """Return the gradient of s, given the gradient ds of s / (sum of the chosen s + eps)."""
    total = tl.sum(tl.where(chosen != 0, s, 0.0), axis=1)[:, None] + eps
    return tl.where(chosen != 0, (ds - tl.sum(ds * s, axis=1)[:, None] / total) / total, 0.0)


@kernel
def route_backward_kernel(
    logits_ptr,  # [rows, experts]
    indices_ptr,  # [rows, k]
    dweights_ptr,  # [rows, k], or None
    dscores_ptr,  # [rows, experts], or None
    dscore_sums_ptr,  # [experts], or None
    dz_ptr,  # a scalar, or None
    dlogits_ptr,  # [rows, experts]
    rows,
    experts,
    stride,
    k,
    dweights_stride,
    dscores_stride,
    eps: float,
    scale: float,
    SCORE: tl.constexpr,
    POST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # the number of experts, rounded up to a power of two
    ALIGN: tl.constexpr,  # experts, stride and dscores_stride are multiples of it
):
    """Compute dlogits of ROWS rows. Scores are recomputed from the logits; the choice is read from the indices."""
    _, expert, exists = _expert_positions(experts, experts, 1, TILE, ALIGN)  # [TILE]
    experts = (experts // ALIGN) * ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_mask = row < rows
    mask = row_mask[:, None] & exists[None, :]
    off = tl.multiple_of(row * stride, ALIGN)
    x = tl.load(logits_ptr + off[:, None] + expert[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    ds = tl.zeros((ROWS, TILE), tl.float32)
    chosen = tl.zeros((ROWS, TILE), tl.int32)
    if dweights_ptr is not None:
        for j in range(k):
            index = tl.load(indices_ptr + row * k + j, mask=row_mask, other=0).to(tl.int32)  # [ROWS]
            gradient = tl.load(dweights_ptr + row * dweights_stride + j, mask=row_mask, other=0.0).to(
                tl.float32
            )
            hit = expert[None, :] == index[:, None]
            ds = tl.where(hit, gradient[:, None] * scale, ds)
            chosen = tl.where(hit, 1, chosen)

    if dscore_sums_ptr is not None:
        share_grad = tl.load(dscore_sums_ptr + expert, mask=exists, other=0.0).to(tl.float32)[
            None, :
        ]  # [1, TILE]
    if dscores_ptr is not None:
        scores_off = tl.multiple_of(row * dscores_stride, ALIGN)
        score_grad = tl.load(dscores_ptr + scores_off[:, None] + expert[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    # True if the scores of all experts have a gradient, not only those of the chosen ones.
    ALL: tl.constexpr = dscores_ptr is not None or dscore_sums_ptr is not None
    dx = tl.zeros((ROWS, TILE), tl.float32)
    if SCORE == SOFTMAX:
        if POST and dweights_ptr is not None:
            w, _ = softmax(tl.where(chosen != 0, x, -float("inf")))
            dx = w * (ds - tl.sum(w * ds, axis=1)[:, None])
            ds = tl.zeros((ROWS, TILE), tl.float32)
        if not POST or ALL or dz_ptr is not None:
            s, lse = softmax(x)
            if RENORMALIZE and not POST:
                ds = _normalization_gradient(ds, s, chosen, eps)
            if dscore_sums_ptr is not None:
                ds += share_grad
            if dscores_ptr is not None:
                ds += score_grad
            if not POST or ALL:
                dx += s * (ds - tl.sum(s * ds, axis=1)[:, None])
            if dz_ptr is not None:
                dx += tl.load(dz_ptr).to(tl.float32) * 2.0 * lse[:, None] * s
    else:
        s = _score_of(x, SCORE)
        if RENORMALIZE:
            ds = _normalization_gradient(ds, s, chosen, eps)
        if dscore_sums_ptr is not None:
            total = tl.sum(s, axis=1)[:, None] + 1e-20
            ds += (share_grad - tl.sum(share_grad * s, axis=1)[:, None] / total) / total
        if dscores_ptr is not None:
            ds += score_grad
        if SCORE == SIGMOID:
            dx = ds * s * sigmoid(-x)
        else:
            dx = ds * tl.where(s > 0.0, sigmoid(x) / (2.0 * tl.where(s > 0.0, s, 1.0)), 0.0)
        if dz_ptr is not None:
            p, lse = softmax(x)
            dx += tl.load(dz_ptr).to(tl.float32) * 2.0 * lse[:, None] * p
    out_off = tl.multiple_of(row * experts, ALIGN)
    tl.store(dlogits_ptr + out_off[:, None] + expert[None, :], dx.to(dlogits_ptr.dtype.element_ty), mask=mask)
