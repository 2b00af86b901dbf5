"""Top-k routing: which experts a token goes to, with what weights, and the losses that keep the router in balance.

    s = softmax(x), sigmoid(x) or sqrt(softplus(x))       scores of all experts, fp32
    c = s + bias                                          what is chosen by; x itself with a softmax after the choice
    only the best groups of experts take part             the others' c is minus infinity (or 0, with SGLang)
    i_1 ... i_k = the k largest c                         the lowest index among equals, NaN above infinity
    w = s[i]                                              never c: the bias does not reach the weights
        softmax(x[i]) over the chosen                     with a softmax after the choice
    w = w / (sum(w) + eps)                                if renormalised
    weights = round(scale * w)

A group's score is the sum of its m largest c, added from the largest on. What m, eps, the mask and the order of softmax
and choice are, libraries and models do not agree on: `CONVENTIONS` names them. With G = scale * dweights on the chosen
and 0 elsewhere, D = sum(w) + eps:

    ds = (G - sum(G * s) / D) / D      on the chosen, if renormalised; else ds = G
    dx = s * (ds - sum(s * ds))        softmax of all; over the chosen alone with a softmax after the choice
    dx = ds * s * (1 - s)              sigmoid
    dx = ds * sigmoid(x) / (2 * s)     sqrt(softplus)

For the balance loss P = s / (sum(s) + 1e-20) over all experts (softmax as it is) and n counts a plain top-k of s,
without bias or groups. For the z loss l = log(sum(exp(x))):

    balance = coefficient * E / (k * T^2) * sum_e n_e * sum_t P_te        n is a constant to the gradient
    z = coefficient * mean(l^2)

Everything in fp32, with one rounding to each result. Sums over tokens are partial sums, one per program, added up in
order: the same bits every run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Launch, Sharding, capabilities_of, define_flat_op, kernel, summed
from ...tiles.scores import LEAST, NOTHING, TAKEN, best_of, key_of, number_of, sigmoid, softmax, softplus
from ..common.checks import FLOATS, check_input, check_out_dtype, check_tensor, real, whole
from ..common.rows import align_of, compute_dtype, count_rows, flat_rows

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
TINY = 1e-20  # added to the sum that the balance loss divides by


@dataclass(frozen=True)
class Convention:
    """How a library or a model routes, where they differ. It says how, never how many: k, groups and the scale are
    numbers of each model's own configuration.

    - `score`: of the logits, where the argument is not given.
    - `post_softmax`: softmax is taken after the choice, over the chosen logits.
    - `group_score`: what a group is worth. "share": the sum of its k // group_topk best; "top2": of its two best;
      "top2 or max": of its two best with a bias, else its best. None: there are no groups.
    - `renormalize`: None for scores that are not a softmax, if k > 1; otherwise the default of the argument.
    - `eps`: added to the sum that renormalising divides by.
    - `masked_is_zero`: experts of other groups count as 0 where there is no bias, instead of minus infinity.
    - `biased_softmax`: a bias is accepted with softmax.
    - `keeps_dtype`: weights have the dtype of the logits instead of fp32.
    - `scales_alone`: the scale applies without renormalising too.
    """

    score: Score = "softmax"
    post_softmax: bool = False
    group_score: str | None = "top2"
    renormalize: bool | None = False
    eps: float = 1e-20
    masked_is_zero: bool = False
    biased_softmax: bool = True
    keeps_dtype: bool = False
    scales_alone: bool = True


CONVENTIONS: dict[str, Convention] = {
    # Also TransformerEngine's, which recovers the score as (s + bias) - bias where this one keeps it.
    "megatron": Convention(
        post_softmax=True, group_score="share", renormalize=None, biased_softmax=False, keeps_dtype=True
    ),
    "torchtitan": Convention(),
    "vllm": Convention(group_score="top2 or max", eps=0.0),
    "sglang": Convention(group_score="top2 or max", masked_is_zero=True, scales_alone=False),
    # Models, as HuggingFace transformers computes them; Qwen3 with norm_topk_prob, which all its checkpoints have. The
    # bias of gpt-oss is the linear layer's, not one of the choice.
    "qwen3": Convention(group_score=None, renormalize=True, eps=0.0, biased_softmax=False, keeps_dtype=True),
    "mixtral": Convention(group_score=None, renormalize=True, eps=0.0, biased_softmax=False),
    "gpt_oss": Convention(post_softmax=True, group_score=None, biased_softmax=False, keeps_dtype=True),
    "deepseek_v3": Convention(score="sigmoid", renormalize=True),
}


class Routing(NamedTuple):
    """What `route` returns.

    - `weights` [..., k] and `indices` [..., k], the best expert first.
    - `counts` [E], int32: how many tokens go to each expert.
    - `balance_loss`, `z_loss`: scalars, if asked for.
    - `score_sums` [E] and `score_counts` [E], int32: sum over tokens of P, and n, of the balance loss. Across ranks,
      add up score_counts over them and multiply by score_sums anew: the gradient goes through score_sums.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor
    balance_loss: Tensor | None = None
    z_loss: Tensor | None = None
    score_sums: Tensor | None = None
    score_counts: Tensor | None = None


# ---- reference ------------------------------------------------------------------------------------------


def _scores(x: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(x, -1)
    if score == "sigmoid":
        return torch.sigmoid(x)
    return torch.logaddexp(x, torch.zeros_like(x)).sqrt()


def _best(choice: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last dimension, the lowest first among equals."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :k]


def _count(indices: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(experts, dtype=torch.int32, device=indices.device)
    flat = indices.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def _shares(s: Tensor, score: str) -> Tensor:
    """P of the balance loss."""
    return s if score == "softmax" else s / (s.sum(-1, keepdim=True) + TINY)


def route_reference(
    logits: Tensor, bias: Tensor | None, k: int, score: str, post: bool, groups: int, group_topk: int,
    group_best: int, masked_is_zero: bool, renormalize: bool, eps: float, scale: float, weight_dtype: torch.dtype,
    index_dtype: torch.dtype, balance: bool, z: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition. logits [..., E], bias [E]."""
    experts, rows = logits.shape[-1], count_rows(logits)
    x = logits.reshape(rows, experts).to(compute_dtype(logits))
    s = _scores(x, score)
    choice = x if post else s
    if bias is not None:
        choice = choice + bias.to(x.dtype)
    if groups > 1:
        by_group = choice.view(rows, groups, experts // groups)
        best = by_group.sort(dim=-1, descending=True).values[..., :group_best]
        worth = best[..., 0]
        for i in range(1, group_best):
            worth = worth + best[..., i]
        allowed = torch.zeros(rows, groups, dtype=torch.bool, device=x.device)
        allowed.scatter_(1, _best(worth, group_topk), True)
        by_group = by_group.masked_fill(~allowed[..., None], 0.0 if masked_is_zero else -torch.inf)
        choice = by_group.view(rows, experts)
    indices = _best(choice, k)
    weights = torch.softmax(x.gather(1, indices), -1) if post else s.gather(1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    lead = logits.shape[:-1]
    outputs = [
        (weights * scale).to(weight_dtype).view(*lead, k),
        indices.to(index_dtype).view(*lead, k),
        _count(indices, experts),
    ]
    if balance:
        plain = _best(x if post else s, k)
        outputs += [_shares(s, score).sum(0), _count(plain, experts)]
    if z:
        outputs.append(torch.logsumexp(x, -1).square().sum())
    return outputs


def route_backward_reference(
    logits: Tensor, indices: Tensor, dweights: Tensor | None, dscore_sums: Tensor | None, dz: Tensor | None,
    score: str, post: bool, renormalize: bool, eps: float, scale: float,
) -> list[Tensor]:  # fmt: skip
    """dlogits, from the gradients that there are."""
    experts, rows = logits.shape[-1], count_rows(logits)
    x = logits.reshape(rows, experts).to(compute_dtype(logits))
    chosen = indices.reshape(rows, indices.shape[-1]).long()
    s = _scores(x, score)
    ds = torch.zeros_like(s)
    dx = torch.zeros_like(s)
    if dweights is not None:
        g = dweights.reshape(chosen.shape).to(x.dtype) * scale
        w = torch.softmax(x.gather(1, chosen), -1) if post else s.gather(1, chosen)
        if post:
            dx.scatter_(1, chosen, w * (g - (w * g).sum(-1, keepdim=True)))
        else:
            if renormalize:
                total = w.sum(-1, keepdim=True) + eps
                g = (g - (g * w).sum(-1, keepdim=True) / total) / total
            ds.scatter_(1, chosen, g)
    if dscore_sums is not None:
        c = dscore_sums.to(x.dtype)
        if score == "softmax":
            ds = ds + c
        else:
            total = s.sum(-1, keepdim=True) + TINY
            ds = ds + (c - (c * s).sum(-1, keepdim=True) / total) / total
    if score == "softmax":
        dx = dx + s * (ds - (s * ds).sum(-1, keepdim=True))
    elif score == "sigmoid":
        dx = ds * s * torch.sigmoid(-x)
    else:
        dx = ds * torch.where(s > 0, torch.sigmoid(x) / (2 * s), 0.0)
    if dz is not None:
        dx = dx + dz.to(x.dtype) * 2 * torch.logsumexp(x, -1, keepdim=True) * torch.softmax(x, -1)
    return [dx.to(logits.dtype).view(logits.shape)]


# ---- kernels --------------------------------------------------------------------------------------------

SOFTMAX, SIGMOID, SQRTSOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _places(experts, group_size, GROUPS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """(place, expert, exists) [GROUPS * TILE]: a group begins at a multiple of TILE."""
    group_size = (group_size // ALIGN) * ALIGN
    place = tl.arange(0, GROUPS * TILE)
    if GROUPS == 1:
        expert = place
        exists = expert < group_size
    else:
        # Of a quotient and a remainder the compiler does not see that neighbours stay neighbours.
        within = tl.max_contiguous(tl.multiple_of(place % TILE, ALIGN), ALIGN)
        expert = tl.max_contiguous(tl.multiple_of((place // TILE) * group_size + within, ALIGN), ALIGN)
        exists = (within < group_size) & (expert < (experts // ALIGN) * ALIGN)
    return place, expert, exists


@triton.jit
def _score_of(x, SCORE: tl.constexpr):
    """Scores of logits [R, C]."""
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
    """Whether an expert belongs to one of the group_topk best groups; key [ROWS, GROUPS * TILE]."""
    rest = tl.reshape(key, (ROWS, GROUPS, TILE))
    within = tl.arange(0, TILE)[None, None, :] + tl.zeros((ROWS, GROUPS, TILE), tl.int32)
    worth = tl.zeros((ROWS, GROUPS), tl.float32)
    for _ in range(group_best):
        best, at = best_of(rest, within, 2)
        worth += number_of(best)
        rest = tl.where(within == at[:, :, None], TAKEN, rest)
    group = tl.arange(0, GROUPS)[None, :] + tl.zeros((ROWS, GROUPS), tl.int32)
    left = tl.where(group < groups, key_of(worth), NOTHING)
    for _ in range(group_topk):
        _, at = best_of(left, group, 1)
        left = tl.where(group == at[:, None], TAKEN, left)
    allowed = (left == TAKEN)[:, :, None] & (within >= 0)
    return tl.reshape(allowed, (ROWS, GROUPS * TILE))


@kernel
def _route_kernel(
    logits_ptr,  # [rows, experts]
    bias_ptr,  # [experts], or None
    weights_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    counts_ptr,  # [programs, experts], int32
    score_sums_ptr,  # fp32 [programs, experts], or None
    score_counts_ptr,  # int32 like it
    z_ptr,  # fp32 [programs], or None
    rows,
    experts,
    stride,
    k,
    groups,
    group_size,
    group_topk,
    group_best,
    program_rows,  # rows of a program, a multiple of ROWS
    eps,
    scale,
    SCORE: tl.constexpr,
    POST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    MASKED_IS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two that holds the groups; 1 without groups
    TILE: tl.constexpr,  # a power of two that holds a group
    K: tl.constexpr,  # a power of two that holds k
    ALIGN: tl.constexpr,  # group_size and stride are multiples of it
):
    """A run of rows, ROWS at a time: k rounds of choosing the best that is left."""
    place, expert, exists = _places(experts, group_size, GROUPS, TILE, ALIGN)  # [GROUPS * TILE]
    program = tl.program_id(0).to(tl.int64)
    first = program * program_rows
    last = tl.minimum(first + program_rows, rows)
    slot = tl.arange(0, K)[None, :]  # [1, K]
    counts = tl.zeros((GROUPS * TILE,), tl.int32)
    score_counts = tl.zeros((GROUPS * TILE,), tl.int32)
    score_sums = tl.zeros((GROUPS * TILE,), tl.float32)
    z_sum = tl.zeros((ROWS,), tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)  # [ROWS]
        there = row < last
        mask = there[:, None] & exists[None, :]
        off = tl.multiple_of(row * stride, ALIGN)
        x = tl.load(logits_ptr + off[:, None] + expert[None, :], mask=mask, other=-float("inf")).to(
            tl.float32
        )
        s = _score_of(x, SCORE)
        value = x if POST else s  # the weights come from it
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
            _, at = best_of(key, place[None, :], 1)  # [ROWS]
            hit = place[None, :] == at[:, None]
            weight = tl.sum(tl.where(hit, value, 0.0), axis=1)
            weights = tl.where(slot == j, weight[:, None], weights)
            index = ((at // TILE) * group_size + at % TILE).to(tl.int32)
            indices = tl.where(slot == j, index[:, None], indices)
            key = tl.where(hit, TAKEN, key)
        chosen = there[:, None] & (key == TAKEN)
        counts += tl.sum(chosen.to(tl.int32), axis=0)
        if POST:
            weights, _ = softmax(weights)
        if RENORMALIZE:
            weights = weights / (tl.sum(weights, axis=1) + eps)[:, None]
        weights = weights * scale
        out_off = (row * k)[:, None] + slot
        out_mask = there[:, None] & (slot < k)
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
                    _, at = best_of(key, place[None, :], 1)
                    key = tl.where(place[None, :] == at[:, None], TAKEN, key)
                chosen = there[:, None] & (key == TAKEN)
            score_counts += tl.sum(chosen.to(tl.int32), axis=0)
        if z_ptr is not None:
            _, lse = softmax(x)
            z_sum += tl.where(there, lse * lse, 0.0)
    total_off = program * experts + expert
    tl.store(counts_ptr + total_off, counts, mask=exists)
    if score_sums_ptr is not None:
        tl.store(score_sums_ptr + total_off, score_sums, mask=exists)
        tl.store(score_counts_ptr + total_off, score_counts, mask=exists)
    if z_ptr is not None:
        tl.store(z_ptr + program, tl.sum(z_sum, axis=0))


@kernel
def _route_totals_kernel(
    counts_ptr,  # int32 [programs, experts]
    score_sums_ptr,  # fp32 [programs, experts], or None
    score_counts_ptr,  # int32 like it
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
    """The sums over programs, ROWS at a time, in order."""
    expert = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    exists = expert < experts
    counts = tl.zeros((TILE,), tl.int32)
    score_counts = tl.zeros((TILE,), tl.int32)
    score_sums = tl.zeros((TILE,), tl.float32)
    z_sum = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, programs, ROWS):
        program = begin + tl.arange(0, ROWS)  # [ROWS]
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


@kernel
def _route_backward_kernel(
    logits_ptr,  # [rows, experts]
    indices_ptr,  # [rows, k]
    dweights_ptr,  # [rows, k], or None
    dscore_sums_ptr,  # [experts], or None
    dz_ptr,  # a scalar, or None
    dlogits_ptr,  # [rows, experts]
    rows,
    experts,
    stride,
    k,
    dweights_stride,
    eps,
    scale,
    SCORE: tl.constexpr,
    POST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # a power of two that holds the experts
    ALIGN: tl.constexpr,  # experts and stride are multiples of it
):
    """dlogits of ROWS rows: scores and choice are made anew from the logits and the indices."""
    _, expert, exists = _places(experts, experts, 1, TILE, ALIGN)  # [TILE]
    experts = (experts // ALIGN) * ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    there = row < rows
    mask = there[:, None] & exists[None, :]
    off = tl.multiple_of(row * stride, ALIGN)
    x = tl.load(logits_ptr + off[:, None] + expert[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    ds = tl.zeros((ROWS, TILE), tl.float32)
    chosen = tl.zeros((ROWS, TILE), tl.int32)
    if dweights_ptr is not None:
        for j in range(k):
            at = tl.load(indices_ptr + row * k + j, mask=there, other=0).to(tl.int32)  # [ROWS]
            gradient = tl.load(dweights_ptr + row * dweights_stride + j, mask=there, other=0.0).to(tl.float32)
            hit = expert[None, :] == at[:, None]
            ds = tl.where(hit, gradient[:, None] * scale, ds)
            chosen = tl.where(hit, 1, chosen)

    if dscore_sums_ptr is not None:
        share_grad = tl.load(dscore_sums_ptr + expert, mask=exists, other=0.0).to(tl.float32)[
            None, :
        ]  # [1, TILE]
    dx = tl.zeros((ROWS, TILE), tl.float32)
    if SCORE == SOFTMAX:
        if POST and dweights_ptr is not None:
            w, _ = softmax(tl.where(chosen != 0, x, -float("inf")))
            dx = w * (ds - tl.sum(w * ds, axis=1)[:, None])
            ds = tl.zeros((ROWS, TILE), tl.float32)
        if not POST or dscore_sums_ptr is not None or dz_ptr is not None:
            s, lse = softmax(x)
            if RENORMALIZE and not POST:
                ds = _through_sum(ds, s, chosen, eps)
            if dscore_sums_ptr is not None:
                ds += share_grad
            if not POST or dscore_sums_ptr is not None:
                dx += s * (ds - tl.sum(s * ds, axis=1)[:, None])
            if dz_ptr is not None:
                dx += tl.load(dz_ptr).to(tl.float32) * 2.0 * lse[:, None] * s
    else:
        s = _score_of(x, SCORE)
        if RENORMALIZE:
            ds = _through_sum(ds, s, chosen, eps)
        if dscore_sums_ptr is not None:
            total = tl.sum(s, axis=1)[:, None] + 1e-20
            ds += (share_grad - tl.sum(share_grad * s, axis=1)[:, None] / total) / total
        if SCORE == SIGMOID:
            dx = ds * s * sigmoid(-x)
        else:
            dx = ds * tl.where(s > 0.0, sigmoid(x) / (2.0 * tl.where(s > 0.0, s, 1.0)), 0.0)
        if dz_ptr is not None:
            p, lse = softmax(x)
            dx += tl.load(dz_ptr).to(tl.float32) * 2.0 * lse[:, None] * p
    out_off = tl.multiple_of(row * experts, ALIGN)
    tl.store(dlogits_ptr + out_off[:, None] + expert[None, :], dx.to(dlogits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _through_sum(ds, s, chosen, eps):
    """The gradient of s where s / (sum of the chosen s + eps) has the gradient ds."""
    total = tl.sum(tl.where(chosen != 0, s, 0.0), axis=1)[:, None] + eps
    return tl.where(chosen != 0, (ds - tl.sum(ds * s, axis=1)[:, None] / total) / total, 0.0)


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouteConfig:
    """How rows are cut: `rows` of them at a time, in `groups` tiles of `tile` experts."""

    rows: int
    groups: int
    tile: int
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(groups: int, group_size: int, target: str) -> RouteConfig:
        group_tiles = 1 << max(groups - 1, 0).bit_length()
        tile = max(1 << max(group_size - 1, 0).bit_length(), 64 // group_tiles, 1)
        width = group_tiles * tile
        if target == "cpu":
            return RouteConfig(max(1, CPU_NUMBERS // width), group_tiles, tile, 4)
        # One warp to a few rows: the k rounds then reduce by shuffles alone. Long rows take more warps.
        lanes = 64 if target.startswith("gfx") else 32
        num_warps = min(16, max(1, width // (16 * lanes)))
        return RouteConfig(max(1, 16 * lanes * num_warps // width), group_tiles, tile, num_warps)


CPU_NUMBERS = 1024


@functools.cache
def _route_launch(
    score: str, post: bool, renormalize: bool, masked_is_zero: bool, config: RouteConfig, k: int, align: int
) -> Launch:
    return Launch.of(
        _route_kernel, num_warps=config.num_warps, SCORE=SCORES.index(score), POST=post, RENORMALIZE=renormalize,
        MASKED_IS_ZERO=masked_is_zero, ROWS=config.rows, GROUPS=config.groups, TILE=config.tile,
        K=1 << (k - 1).bit_length(), ALIGN=align,
    )  # fmt: skip


def _allocate_route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, post: bool, groups: int, group_topk: int,
    group_best: int, masked_is_zero: bool, renormalize: bool, eps: float, scale: float, weight_dtype: torch.dtype,
    index_dtype: torch.dtype, balance: bool, z: bool,
) -> list[Tensor]:  # fmt: skip
    *lead, experts = logits.shape
    device = logits.device
    sums = torch.float64 if logits.dtype == torch.float64 else torch.float32
    outputs = [
        torch.empty((*lead, k), dtype=weight_dtype, device=device),
        torch.empty((*lead, k), dtype=index_dtype, device=device),
        torch.empty((experts,), dtype=torch.int32, device=device),
    ]
    if balance:
        outputs.append(torch.empty((experts,), dtype=sums, device=device))
        outputs.append(torch.empty((experts,), dtype=torch.int32, device=device))
    if z:
        outputs.append(torch.empty((), dtype=sums, device=device))
    return outputs


def _launch_route(
    outputs: list[Tensor], logits: Tensor, bias: Tensor | None, k: int, score: str, post: bool, groups: int,
    group_topk: int, group_best: int, masked_is_zero: bool, renormalize: bool, eps: float, scale: float,
    weight_dtype: torch.dtype, index_dtype: torch.dtype, balance: bool, z: bool,
) -> None:  # fmt: skip
    target = capabilities_of(logits.device)
    logits = flat_rows(logits)
    bias = None if bias is None else bias.contiguous()
    rows, experts = logits.shape
    stride, group_size = logits.stride(0), experts // groups
    config = RouteConfig.choose(groups, group_size, target.target)
    # Each program leaves a row of counts, so few of them; but k rounds in a row need other warps to hide behind.
    programs = min(-(-rows // config.rows), max(1, 8 * target.multiprocessors // config.num_warps))
    program_rows = -(-rows // programs)
    program_rows = -(-program_rows // config.rows) * config.rows
    programs = -(-rows // program_rows)
    weights, indices, counts, *rest = outputs
    score_sums, score_counts = rest[:2] if balance else (None, None)
    z_sum = rest[-1] if z else None
    totals: tuple[Tensor | None, ...] = (counts, score_sums, score_counts, z_sum)
    partial = totals
    if programs > 1:
        partial = tuple(
            None if t is None else torch.empty((programs, *t.shape), dtype=t.dtype, device=t.device)
            for t in totals
        )
    launch = _route_launch(
        score, post, renormalize, masked_is_zero, config, k, align_of(group_size, stride, least=4)
    )
    launch(
        (programs, 1, 1),
        (logits, bias, weights, indices, *partial),
        (rows, experts, stride, k, groups, group_size, group_topk, group_best, program_rows),
        (eps, scale),
    )
    if programs > 1:
        piece, tile = (1, 256) if target.target == "cpu" else (32, 32)
        launch = Launch.of(_route_totals_kernel, num_warps=4, ROWS=piece, TILE=tile)
        launch((-(-experts // tile), 1, 1), (*partial, *totals), (programs, experts))


def _allocate_route_backward(
    logits: Tensor, indices: Tensor, dweights: Tensor | None, dscore_sums: Tensor | None, dz: Tensor | None,
    score: str, post: bool, renormalize: bool, eps: float, scale: float,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)]


def _launch_route_backward(
    outputs: list[Tensor], logits: Tensor, indices: Tensor, dweights: Tensor | None, dscore_sums: Tensor | None,
    dz: Tensor | None, score: str, post: bool, renormalize: bool, eps: float, scale: float,
) -> None:  # fmt: skip
    target = capabilities_of(logits.device)
    logits, indices = flat_rows(logits), indices.contiguous()
    k = indices.shape[-1]
    dweights = None if dweights is None else flat_rows(dweights)
    dscore_sums = None if dscore_sums is None else dscore_sums.contiguous()
    rows, experts = logits.shape
    stride = logits.stride(0)
    config = RouteConfig.choose(1, experts, target.target)
    launch = Launch.of(
        _route_backward_kernel, num_warps=config.num_warps, SCORE=SCORES.index(score), POST=post,
        RENORMALIZE=renormalize, ROWS=config.rows, TILE=config.tile, ALIGN=align_of(experts, stride, least=4),
    )  # fmt: skip
    launch(
        (-(-rows // config.rows), 1, 1),
        (logits, indices, dweights, dscore_sums, dz, outputs[0]),
        (rows, experts, stride, k, 0 if dweights is None else dweights.stride(0)),
        (eps, scale),
    )


# ---- registration ---------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    score, post, renormalize, eps, scale = inputs[3], inputs[4], inputs[9], inputs[10], inputs[11]
    balance, z = inputs[14], inputs[15]
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = (score, post, renormalize, eps, scale)
    ctx.balance, ctx.z, ctx.inputs = balance, z, len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[2], *([output[4]] if balance else []))


def _gradients(ctx: Any, grads: Any) -> Any:
    logits, indices = ctx.saved_tensors
    dweights = grads[0]
    dscore_sums = grads[3] if ctx.balance else None
    dz = grads[-1] if ctx.z else None
    nothing = (None,) * (ctx.inputs - 1)
    if not ctx.needs_input_grad[0] or (dweights is None and dscore_sums is None and dz is None):
        return (None, *nothing)
    return (route_backward_op(logits, indices, dweights, dscore_sums, dz, *ctx.options)[0], *nothing)


def _shard_route(a: Any) -> Sharding:
    outputs: dict[str, str | None] = {"weights": "... j", "indices": "... j", "counts": "sum: e"}
    if a.balance:
        outputs |= {"score_sums": "sum: e", "score_counts": "sum: e"}
    if a.z:
        outputs["z"] = "sum:"
    return Sharding({"logits": "... e", "bias": "e"}, outputs, {"e": "a token chooses among all experts"})


route_backward_op = define_flat_op(
    "route_backward(Tensor logits, Tensor indices, Tensor? dweights, Tensor? dscore_sums, Tensor? dz, str score, "
    "bool post, bool renormalize, float eps, float scale) -> Tensor[]",
    allocate=_allocate_route_backward,
    launch=_launch_route_backward,
    reference=route_backward_reference,
    variants=64,
)

route_op = define_flat_op(
    "route(Tensor logits, Tensor? bias, int k, str score, bool post, int groups, int group_topk, int group_best, "
    "bool masked_is_zero, bool renormalize, float eps, float scale, ScalarType weight_dtype, "
    "ScalarType index_dtype, bool balance, bool z) -> Tensor[]",
    allocate=_allocate_route,
    launch=_launch_route,
    reference=route_reference,
    setup_context=_setup,
    backward=_gradients,
    sharding=_shard_route,
    variants=72,
)


# ---- public function ------------------------------------------------------------------------------------


def route(
    logits: Tensor,
    k: int,
    *,
    convention: str = "megatron",
    score: Score | None = None,
    post_softmax: bool | None = None,
    bias: Tensor | None = None,
    groups: int = 1,
    group_topk: int | None = None,
    group_score: str | None = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    balance_coefficient: float | None = None,
    z_coefficient: float | None = None,
    out_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> Routing:
    """Choose k of E experts for each token, and weigh them. logits: [..., E] in fp32, bf16 or fp16, of any strides.

    `convention` decides what libraries and models do differently: "megatron" (Megatron-LM and TransformerEngine),
    "torchtitan", "vllm" or "sglang"; or "qwen3", "mixtral", "gpt_oss" or "deepseek_v3", as HuggingFace transformers
    computes them. `CONVENTIONS` says how, and the arguments that are None by default take it from there. The numbers of
    a model's configuration are no part of it: DeepSeek-V3 itself is k=8, groups=8, group_topk=4, scale=2.5 and its
    bias, and other models of its kind have others.

    - `score`: "softmax", "sigmoid" or "sqrtsoftplus"; softmax by all conventions but "deepseek_v3", with sigmoid.
      `post_softmax`: softmax over the chosen logits, not over all.
    - `bias` [E]: added to the scores that are chosen by, never to the weights; it has no gradient.
    - `groups`, `group_topk`: experts come in that many groups of neighbours, and only those of the group_topk best
      groups are chosen from. `group_score`: what a group is worth, "share", "top2" or "max".
    - `renormalize`: divide a token's weights by their sum. `scale`: multiplies them at last.
    - `balance_coefficient`, `z_coefficient`: compute the load-balance loss and the z loss of these tokens, times the
      coefficient. Add them to the model's loss. Of a DTensor they are those of all ranks' tokens; for the load-balance
      loss the counts of the experts are added up over the ranks, an all-reduce of E numbers.
    - `out_dtype`: of the weights; `index_dtype`: int32 or int64.

    Equal scores: the lowest index wins. Every row has k different indices, also if its logits are all equal, minus
    infinity or NaN. A token's result depends on nothing but the token.

    >>> import torch, weft
    >>> logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    >>> weights, indices, counts, *_ = weft.route(logits, 2)
    >>> indices, counts
    (tensor([[1, 2]], dtype=torch.int32), tensor([0, 1, 1, 0], dtype=torch.int32))
    >>> weft.route(logits, 2, convention="deepseek_v3", scale=2.5, balance_coefficient=1e-2).weights.sum()
    tensor(2.5000)
    """
    rule = CONVENTIONS.get(convention) if isinstance(convention, str) else None
    if rule is None:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}; got {convention!r}")
    if score is None:
        score = rule.score
    elif score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
    check_input("logits", logits)
    experts = logits.shape[-1]
    if not 1 <= whole("k", k) <= experts:
        raise ValueError(f"k must be from 1 to the number of experts, {experts}; got {k}")
    post = rule.post_softmax and score == "softmax" if post_softmax is None else post_softmax
    if post and score != "softmax":
        raise ValueError(f"post_softmax goes with score='softmax'; got {score!r}")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, logits.device, (experts,))
        if score == "softmax" and (post or not rule.biased_softmax):
            raise ValueError(
                f"a bias of the choice goes with sigmoid and sqrtsoftplus scores: {convention!r} has none for softmax, "
                "and a softmax after the choice has no scores to add it to. Take convention='torchtitan' or 'vllm'; "
                "the bias of a router's linear layer goes to weft.router_linear"
            )
        bias = bias.detach()
    group_best = 1
    if groups != 1:
        if whole("groups", groups) < 1 or experts % groups:
            raise ValueError(f"groups must divide the number of experts, {experts}; got {groups}")
        if group_topk is None or not 1 <= whole("group_topk", group_topk) <= groups:
            raise ValueError(f"group_topk must be from 1 to the number of groups, {groups}; got {group_topk}")
        kind = group_score or rule.group_score
        if kind is None:
            raise ValueError(
                f"{convention!r} has no groups: say with group_score= what one is worth, 'share', 'top2' or 'max'"
            )
        if kind == "top2 or max":
            kind = "max" if bias is None else "top2"
        if kind not in ("share", "top2", "max"):
            raise ValueError(f"group_score must be 'share', 'top2' or 'max'; got {kind!r}")
        group_best = {"share": k // group_topk, "top2": 2, "max": 1}[kind]
        if not 1 <= group_best <= experts // groups:
            raise ValueError(
                f"a group's score is the sum of its {group_best} best, of {experts // groups} experts: "
                "group_topk must not be above k, nor k / group_topk above the experts of a group"
            )
        if k > group_topk * (experts // groups):
            raise ValueError(f"{group_topk} groups of {experts // groups} experts have no {k} to choose")
    elif group_topk not in (None, 1):
        raise ValueError(f"group_topk={group_topk} needs groups")
    if index_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_dtype must be torch.int32 or torch.int64; got {index_dtype}")
    if renormalize is None:
        divide = rule.renormalize if rule.renormalize is not None else score != "softmax" and k > 1
    else:
        divide = renormalize
    if not (divide or rule.scales_alone):
        scale = 1.0
    check_out_dtype(out_dtype)
    if out_dtype is None:
        out_dtype = logits.dtype if rule.keeps_dtype or logits.dtype == torch.float64 else torch.float32
    balance, z = balance_coefficient is not None, z_coefficient is not None
    outputs = route_op(
        logits, bias, k, score, post, groups, group_topk or 1, group_best, rule.masked_is_zero and bias is None,
        divide and not post, rule.eps, real("scale", scale), out_dtype, index_dtype, balance, z,
    )  # fmt: skip
    if not (balance or z):
        return Routing(outputs[0], outputs[1], outputs[2])
    tokens = max(1, logits.numel() // experts)
    balance_loss = z_loss = score_sums = score_counts = None
    if balance_coefficient is not None:
        score_sums, score_counts = outputs[3:5]
        factor = balance_coefficient * experts / (k * tokens * tokens)
        balance_loss = (score_sums * summed(score_counts)).sum() * factor
    if z_coefficient is not None:
        z_loss = outputs[-1] * (z_coefficient / tokens)
    return Routing(outputs[0], outputs[1], outputs[2], balance_loss, z_loss, score_sums, score_counts)
