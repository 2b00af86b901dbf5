"""Top-k routing: which experts a token goes to, with what weights, and the losses that keep the router in balance.

    s = softmax(x), sigmoid(x) or sqrt(softplus(x))       scores of all experts, fp32
    c = s + bias                                          the choice goes by it; c = x with a softmax after the choice
    only the best groups of experts take part             the others' c is minus infinity (or 0, with SGLang)
    i_1 ... i_k = the k largest c                         the lowest index among equals, NaN above infinity
    w = s[i]                                              never c: the bias does not reach the weights
        softmax(x[i]) over the chosen                     with a softmax after the choice
    w = w / (sum(w) + eps)                                if renormalised
    weights = round(scale * w)

A group's score is the sum of its m largest c, added from the largest on. Libraries and models differ in m, in eps, in
the mask and in the order of softmax and choice: `CONVENTIONS` has them by name. With G = scale * dweights on the chosen
experts and 0 elsewhere, and D = sum(w) + eps:

    ds = (G - sum(G * s) / D) / D      on the chosen, if renormalised; else ds = G
    dx = s * (ds - sum(s * ds))        softmax of all; over the chosen alone with a softmax after the choice
    dx = ds * s * (1 - s)              sigmoid
    dx = ds * sigmoid(x) / (2 * s)     sqrt(softplus)

A gradient of the scores themselves, where they are returned, is added to ds.

In the balance loss P = s / (sum(s) + 1e-20) over all experts (P = s for softmax), and n_e counts how often a plain
top-k of s, without bias or groups, chooses expert e. In the z loss l = log(sum(exp(x))):

    balance = coefficient * E / (k * T^2) * sum_e n_e * sum_t P_te        n is a constant to the gradient
    z = coefficient * mean(l^2)

All arithmetic is fp32, and each result is rounded once. Each program leaves partial sums over its tokens, which are
added up in order: every run gives the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...runtime import (
    Backward,
    Capabilities,
    Gradients,
    Launch,
    Op,
    Sharding,
    capabilities_of,
    choice,
    summed,
)
from ..common.checks import FLOATS, check_input, check_out_dtype, check_tensor, real, whole
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, flat_rows, one_stride
from ..common.sums import SumConfig
from .route_kernels import route_backward_kernel, route_kernel, route_totals_kernel

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
TINY = 1e-20  # added to the sum that the balance loss divides by


@dataclass(frozen=True)
class Convention:
    """How a library or a model routes, in what they do differently. It has no numbers: k, groups and the scale belong
    to the configuration of each model.

    - `score`: the function that makes scores of logits, unless the argument says another.
    - `post_softmax`: the softmax is taken after the choice, over the chosen logits alone.
    - `group_score`: how the score of a group is made. "share": the sum of its k // group_topk best experts; "top2": of
      its two best; "top2 or max": of its two best with a bias, else its best alone. None: there are no groups.
    - `renormalize`: None for scores that are not a softmax, if k > 1; otherwise the default of the argument.
    - `eps`: added to the sum that renormalising divides by.
    - `masked_is_zero`: experts of other groups count as 0 where there is no bias, instead of minus infinity.
    - `biased_softmax`: a bias is accepted with softmax.
    - `keeps_dtype`: weights have the dtype of the logits instead of fp32.
    - `scales_alone`: the scale also applies without renormalising.
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
    # Models as HuggingFace transformers computes them. Qwen3 renormalises, since all its checkpoints set
    # norm_topk_prob. The bias of gpt-oss belongs to the router's linear layer and not to the choice.
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
    - `scores` [..., E], fp32: s of all experts, as it is before bias, choice, renormalising and scale, if asked for.
    - `score_sums` [E] and `score_counts` [E], int32: the sum over tokens of P, and n, in the balance loss. For a loss
      over several ranks, add up score_counts over the ranks and multiply the sum by score_sums, which has the gradient.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor
    balance_loss: Tensor | None = None
    z_loss: Tensor | None = None
    score_sums: Tensor | None = None
    score_counts: Tensor | None = None
    scores: Tensor | None = None


# ---- arguments and outputs ------------------------------------------------------------------------------


class Weighing(NamedTuple):
    """How the weights of the chosen experts come from the logits."""

    score: str
    post_softmax: bool
    renormalize: bool
    eps: float
    scale: float


class Groups(NamedTuple):
    """Which groups of experts a token chooses from."""

    number: int
    topk: int  # how many groups are chosen from
    best: int  # how many of a group's best experts make up its score
    masked_is_zero: bool  # experts of the other groups count as 0, not as minus infinity


class RouteArgs(NamedTuple):
    logits: Tensor  # [..., E]
    bias: Tensor | None  # [E]
    k: int
    weighing: Weighing
    groups: Groups
    weight_dtype: torch.dtype
    index_dtype: torch.dtype
    scores: bool  # those of all experts are wanted
    balance: bool  # score_sums and score_counts are wanted
    z: bool


class RouteOutputs(NamedTuple):
    weights: Tensor  # [..., k]
    indices: Tensor  # [..., k]
    counts: Tensor  # int32 [E]
    scores: Tensor | None  # fp32 [..., E]
    score_sums: Tensor | None  # fp32 [E]
    score_counts: Tensor | None  # int32 [E]
    z: Tensor | None  # fp32, the sum over tokens of l^2


class RouteBackwardArgs(NamedTuple):
    logits: Tensor
    indices: Tensor
    dweights: Tensor | None
    dscores: Tensor | None
    dscore_sums: Tensor | None
    dz: Tensor | None
    weighing: Weighing


class RouteGradients(NamedTuple):
    logits: Tensor


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
    """P in the balance loss."""
    return s if score == "softmax" else s / (s.sum(-1, keepdim=True) + TINY)


def _chosen_scores(x: Tensor, s: Tensor, chosen: Tensor, how: Weighing) -> Tensor:
    return torch.softmax(x.gather(1, chosen), -1) if how.post_softmax else s.gather(1, chosen)


# ---- launch ---------------------------------------------------------------------------------------------


class RouteConfig(NamedTuple):
    """How rows are cut: `rows` of them at a time, in `groups` tiles of `tile` experts."""

    rows: int
    groups: int
    tile: int
    num_warps: int


@choice("route", rows=(1, 1024), num_warps=(1, 16))
def route_config(kernel: str, groups: int, group_size: int, target: Capabilities) -> RouteConfig:
    """For a kernel: "forward" or "backward"."""
    group_tiles = 1 << max(groups - 1, 0).bit_length()
    tile = max(1 << max(group_size - 1, 0).bit_length(), 64 // group_tiles, 1)
    width = group_tiles * tile
    if target.is_cpu:
        return RouteConfig(max(1, CPU_NUMBERS // width), group_tiles, tile, 4)
    # One warp has a few rows, so that the k rounds reduce by shuffles alone. Long rows take more warps.
    lanes = target.warp_size
    num_warps = min(16, max(1, width // (16 * lanes)))
    return RouteConfig(max(1, 16 * lanes * num_warps // width), group_tiles, tile, num_warps)


CPU_NUMBERS = 1024


@choice("route.totals", rows=(1, 128), tile=(16, 1024), num_warps=(1, 16))
def totals_config(experts: int, target: Capabilities) -> SumConfig:
    return SumConfig(1, 256, 4) if target.is_cpu else SumConfig(32, 32, 4)


@functools.lru_cache(maxsize=1024)
def _route_launch(how: Weighing, masked_is_zero: bool, config: RouteConfig, k: int, align: int) -> Launch:
    return Launch.of(
        route_kernel,
        num_warps=config.num_warps,
        SCORE=SCORES.index(how.score),
        POST=how.post_softmax,
        RENORMALIZE=how.renormalize,
        MASKED_IS_ZERO=masked_is_zero,
        ROWS=config.rows,
        GROUPS=config.groups,
        TILE=config.tile,
        K=1 << (k - 1).bit_length(),
        ALIGN=align,
    )


# ---- registration ---------------------------------------------------------------------------------------


_SHARDING = Sharding(
    {"logits": "... e", "bias": "e"},
    {
        "weights": "... j",
        "indices": "... j",
        "counts": "sum: e",
        "scores": "... e",
        "score_sums": "sum: e",
        "score_counts": "sum: e",
        "z": "sum:",
    },
    {"e": "a token chooses among all experts"},
)


class RouteBackwardOp(Op[RouteBackwardArgs, RouteGradients], name="route_backward", variants=64):
    def allocate(self, a: RouteBackwardArgs) -> RouteGradients:
        return RouteGradients(torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device))

    def launch(self, o: RouteGradients, a: RouteBackwardArgs) -> None:
        how = a.weighing
        logits, indices = flat_rows(a.logits), a.indices.contiguous()
        dweights, dweights_stride = one_stride(a.dweights)
        dscores, dscores_stride = one_stride(a.dscores)
        rows, experts = logits.shape
        stride = logits.stride(0)
        config = route_config("backward", 1, experts, capabilities_of(logits.device))
        launch = Launch.of(
            route_backward_kernel,
            num_warps=config.num_warps,
            SCORE=SCORES.index(how.score),
            POST=how.post_softmax,
            RENORMALIZE=how.renormalize,
            ROWS=config.rows,
            TILE=config.tile,
            ALIGN=align_of(experts, stride, dscores_stride, least=4),
        )
        launch(
            (-(-rows // config.rows), 1, 1),
            (logits, indices, dweights, dscores, contiguous(a.dscore_sums), a.dz, o.logits),
            (rows, experts, stride, indices.shape[-1], dweights_stride, dscores_stride),
            (how.eps, how.scale),
        )

    def reference(self, a: RouteBackwardArgs) -> RouteGradients:
        """The definition; a gradient that is None counts as zero."""
        logits, how = a.logits, a.weighing
        experts, rows = logits.shape[-1], count_rows(logits)
        x = logits.reshape(rows, experts).to(compute_dtype(logits))
        chosen = a.indices.reshape(rows, a.indices.shape[-1]).long()
        s = _scores(x, how.score)
        ds = torch.zeros_like(s)
        dx = torch.zeros_like(s)
        if a.dweights is not None:
            g = a.dweights.reshape(chosen.shape).to(x.dtype) * how.scale
            w = _chosen_scores(x, s, chosen, how)
            if how.post_softmax:
                dx.scatter_(1, chosen, w * (g - (w * g).sum(-1, keepdim=True)))
            else:
                if how.renormalize:
                    total = w.sum(-1, keepdim=True) + how.eps
                    g = (g - (g * w).sum(-1, keepdim=True) / total) / total
                ds.scatter_(1, chosen, g)
        if a.dscores is not None:
            ds = ds + a.dscores.reshape(s.shape).to(x.dtype)
        if a.dscore_sums is not None:
            c = a.dscore_sums.to(x.dtype)
            if how.score == "softmax":
                ds = ds + c
            else:
                total = s.sum(-1, keepdim=True) + TINY
                ds = ds + (c - (c * s).sum(-1, keepdim=True) / total) / total
        if how.score == "softmax":
            dx = dx + s * (ds - (s * ds).sum(-1, keepdim=True))
        elif how.score == "sigmoid":
            dx = ds * s * torch.sigmoid(-x)
        else:
            dx = ds * torch.where(s > 0, torch.sigmoid(x) / (2 * s), 0.0)
        if a.dz is not None:
            dx = dx + a.dz.to(x.dtype) * 2 * torch.logsumexp(x, -1, keepdim=True) * torch.softmax(x, -1)
        return RouteGradients(dx.to(logits.dtype).view(logits.shape))


route_backward_op = RouteBackwardOp()


class RouteOp(
    Op[RouteArgs, RouteOutputs],
    name="route",
    variants=72,
    differentiable=("weights", "scores", "score_sums", "z"),
):
    def allocate(self, a: RouteArgs) -> RouteOutputs:
        *lead, experts = a.logits.shape
        device = a.logits.device
        sums = compute_dtype(a.logits)
        return RouteOutputs(
            torch.empty(*lead, a.k, dtype=a.weight_dtype, device=device),
            torch.empty(*lead, a.k, dtype=a.index_dtype, device=device),
            torch.empty(experts, dtype=torch.int32, device=device),
            torch.empty(*lead, experts, dtype=sums, device=device) if a.scores else None,
            torch.empty(experts, dtype=sums, device=device) if a.balance else None,
            torch.empty(experts, dtype=torch.int32, device=device) if a.balance else None,
            torch.empty((), dtype=sums, device=device) if a.z else None,
        )

    def present(self, a: RouteArgs) -> Any:
        return RouteOutputs(True, True, True, a.scores, a.balance, a.balance, a.z)  # type: ignore[arg-type]

    def launch(self, o: RouteOutputs, a: RouteArgs) -> None:
        how, groups = a.weighing, a.groups
        target = capabilities_of(a.logits.device)
        logits = flat_rows(a.logits)
        rows, experts = logits.shape
        stride, group_size = logits.stride(0), experts // groups.number
        config = route_config("forward", groups.number, group_size, target)
        # Few programs, since each leaves a row of counts; yet enough warps to hide the latency of the k rounds, each of
        # which waits for the one before.
        programs = min(-(-rows // config.rows), max(1, 8 * target.multiprocessors // config.num_warps))
        program_rows = -(-rows // programs)
        program_rows = -(-program_rows // config.rows) * config.rows
        programs = -(-rows // program_rows)
        totals: tuple[Tensor | None, ...] = (o.counts, o.score_sums, o.score_counts, o.z)
        partials = totals
        if programs > 1:
            partials = tuple(
                None if t is None else torch.empty((programs, *t.shape), dtype=t.dtype, device=t.device)
                for t in totals
            )
        align = align_of(group_size, stride, least=4)
        _route_launch(how, groups.masked_is_zero, config, a.k, align)(
            (programs, 1, 1),
            (logits, contiguous(a.bias), o.weights, o.indices, o.scores, *partials),
            (rows, experts, stride, a.k, groups.number, group_size, groups.topk, groups.best, program_rows),
            (how.eps, how.scale),
        )
        if programs > 1:
            piece, tile, num_warps = totals_config(experts, target)
            launch = Launch.of(route_totals_kernel, num_warps=num_warps, ROWS=piece, TILE=tile)
            launch((-(-experts // tile), 1, 1), (*partials, *totals), (programs, experts))

    def reference(self, a: RouteArgs) -> RouteOutputs:
        """The definition."""
        logits, k, how, groups = a.logits, a.k, a.weighing, a.groups
        experts, rows = logits.shape[-1], count_rows(logits)
        x = logits.reshape(rows, experts).to(compute_dtype(logits))
        s = _scores(x, how.score)
        value = choice = x if how.post_softmax else s
        if a.bias is not None:
            choice = choice + a.bias.to(x.dtype)
        if groups.number > 1:
            by_group = choice.view(rows, groups.number, experts // groups.number)
            best = by_group.sort(dim=-1, descending=True).values[..., : groups.best]
            worth = best[..., 0]
            for i in range(1, groups.best):
                worth = worth + best[..., i]
            allowed = torch.zeros(rows, groups.number, dtype=torch.bool, device=x.device)
            allowed.scatter_(1, _best(worth, groups.topk), True)
            by_group = by_group.masked_fill(~allowed[..., None], 0.0 if groups.masked_is_zero else -torch.inf)
            choice = by_group.view(rows, experts)
        indices = _best(choice, k)
        weights = _chosen_scores(x, s, indices, how)
        if how.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + how.eps)
        lead = logits.shape[:-1]
        return RouteOutputs(
            (weights * how.scale).to(a.weight_dtype).view(*lead, k),
            indices.to(a.index_dtype).view(*lead, k),
            _count(indices, experts),
            s.view(logits.shape) if a.scores else None,
            _shares(s, how.score).sum(0) if a.balance else None,
            _count(_best(value, k), experts) if a.balance else None,
            torch.logsumexp(x, -1).square().sum() if a.z else None,
        )

    def keep(self, a: RouteArgs, o: RouteOutputs) -> RouteBackwardArgs:
        return RouteBackwardArgs(a.logits, o.indices, None, None, None, None, a.weighing)

    def backward(self, b: Backward) -> Gradients:
        kept: RouteBackwardArgs = b.kept
        grads: RouteOutputs = b.grads
        args = kept._replace(
            dweights=grads.weights, dscores=grads.scores, dscore_sums=grads.score_sums, dz=grads.z
        )
        return {"logits": route_backward_op(args).logits}

    def shard(self, a: RouteArgs) -> Sharding:
        return _SHARDING


route_op = RouteOp()


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
    return_scores: bool = False,
    out_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> Routing:
    """Choose k of E experts for each token, and weigh them. logits: [..., E] in fp32, bf16 or fp16, of any strides.

    `convention` decides what libraries and models do differently: "megatron" (Megatron-LM and TransformerEngine),
    "torchtitan", "vllm" or "sglang"; or "qwen3", "mixtral", "gpt_oss" or "deepseek_v3", as HuggingFace transformers
    computes them. `CONVENTIONS` has what each does; arguments that are None take their default from it. A convention
    does not include the numbers of a model's configuration: DeepSeek-V3 itself needs k=8, groups=8, group_topk=4,
    scale=2.5 and its bias as well.

    - `score`: "softmax", "sigmoid" or "sqrtsoftplus"; by default sigmoid for "deepseek_v3" and softmax for the others.
      `post_softmax`: softmax over the chosen logits, not over all.
    - `bias` [E]: added to the scores that are chosen by, never to the weights; it has no gradient.
    - `groups`, `group_topk`: experts come in that many groups of neighbours, and only those of the group_topk best
      groups are chosen from. `group_score`: how a group is scored, "share", "top2" or "max".
    - `renormalize`: divide a token's weights by their sum. `scale`: multiply them by it, as the last step.
    - `balance_coefficient`, `z_coefficient`: compute the load-balance loss and the z loss of these tokens, times the
      coefficient. Add them to the model's loss. Of a DTensor they are those of all ranks' tokens; for the load-balance
      loss the counts of the experts are added up over the ranks, an all-reduce of E numbers.
    - `return_scores`: also return the scores of all experts, in fp32 and with a gradient, for losses of one's own.
    - `out_dtype`: the dtype of the weights; `index_dtype`: int32 or int64.

    Equal scores: the lowest index wins. Every row has k different indices, also if its logits are all equal, minus
    infinity or NaN. A token's result depends on that token alone.

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
        note = (
            ". Its models route differently: take the one that is closest"
            if convention == "transformers"
            else ""
        )
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}; got {convention!r}{note}")
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
    grouped = _ONE_GROUP
    if groups == 1:
        if group_topk not in (None, 1):
            raise ValueError(f"group_topk={group_topk} needs groups")
    else:
        worth = group_score or rule.group_score
        if worth is None:
            raise ValueError(
                f"{convention!r} does not say how to score a group: give group_score='share', 'top2' or 'max'"
            )
        if worth == "top2 or max":
            worth = "max" if bias is None else "top2"
        grouped = _checked_groups(experts, k, groups, group_topk, worth)
        if rule.masked_is_zero and bias is None:
            grouped = grouped._replace(masked_is_zero=True)
    if index_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_dtype must be torch.int32 or torch.int64; got {index_dtype}")
    if renormalize is None:
        renormalize = rule.renormalize if rule.renormalize is not None else score != "softmax" and k > 1
    if not (renormalize or rule.scales_alone):
        scale = 1.0
    check_out_dtype(out_dtype)
    if out_dtype is None:
        out_dtype = logits.dtype if rule.keeps_dtype or logits.dtype == torch.float64 else torch.float32
    o = route_op(
        RouteArgs(
            logits,
            bias,
            k,
            Weighing(score, post, renormalize and not post, rule.eps, real("scale", scale)),
            grouped,
            out_dtype,
            index_dtype,
            bool(return_scores),
            balance_coefficient is not None,
            z_coefficient is not None,
        )
    )
    balance_loss = z_loss = None
    tokens = max(1, logits.numel() // experts)
    if balance_coefficient is not None and o.score_sums is not None and o.score_counts is not None:
        factor = balance_coefficient * experts / (k * tokens * tokens)
        balance_loss = (o.score_sums * summed(o.score_counts)).sum() * factor
    if z_coefficient is not None and o.z is not None:
        z_loss = o.z * (z_coefficient / tokens)
    return Routing(
        o.weights, o.indices, o.counts, balance_loss, z_loss, o.score_sums, o.score_counts, o.scores
    )


_ONE_GROUP = Groups(1, 1, 1, False)


def _checked_groups(experts: int, k: int, groups: int, group_topk: int | None, worth: str) -> Groups:
    if whole("groups", groups) < 1 or experts % groups:
        raise ValueError(f"groups must divide the number of experts, {experts}; got {groups}")
    if group_topk is None or not 1 <= whole("group_topk", group_topk) <= groups:
        raise ValueError(f"group_topk must be from 1 to the number of groups, {groups}; got {group_topk}")
    if worth not in ("share", "top2", "max"):
        raise ValueError(f"group_score must be 'share', 'top2' or 'max'; got {worth!r}")
    best = {"share": k // group_topk, "top2": 2, "max": 1}[worth]
    size = experts // groups
    if not 1 <= best <= size:
        raise ValueError(
            f"a group's score would be the sum of its {best} best experts, but a group has {size}: "
            "group_topk must not be above k, nor k / group_topk above the number of experts in a group"
        )
    if k > group_topk * size:
        raise ValueError(
            f"k={k} experts cannot be chosen from group_topk={group_topk} groups of {size}: raise group_topk"
        )
    return Groups(groups, group_topk, best, False)
