"""Top-k routing of tokens to experts, with weights and the losses that balance the router.

    s = softmax(x), sigmoid(x) or sqrt(softplus(x))       scores of all experts, fp32
    c = s + bias                                          decides the choice; c = x with a softmax after the choice
    only the best groups of experts take part             the others' c is minus infinity (or 0, with SGLang)
    i_1 ... i_k = the k largest c                         the lowest index among equals, NaN above infinity
    w = s[i]                                              never c: the bias does not affect the weights
        softmax(x[i]) over the chosen                     with a softmax after the choice
    w = w / (sum(w) + eps)                                if renormalized
    weights = round(scale * w)

A group's score is the sum of its m largest c, added in descending order. Libraries and models differ in m, in eps, in
the mask and in the order of softmax and choice: `CONVENTIONS` lists them by name. With G = scale * dweights on the
chosen experts and 0 elsewhere, and D = sum(w) + eps:

    ds = (G - sum(G * s) / D) / D      on the chosen, if renormalized; else ds = G
    dx = s * (ds - sum(s * ds))        softmax of all; over the chosen alone with a softmax after the choice
    dx = ds * s * (1 - s)              sigmoid
    dx = ds * sigmoid(x) / (2 * s)     sqrt(softplus)

If the scores are returned, their gradient is added to ds.

In the balance loss P = s / (sum(s) + 1e-20) over all experts (P = s for softmax), and n_e counts how often a plain
top-k of s, without bias or groups, chooses expert e. In the z loss l = log(sum(exp(x))):

    balance = coefficient * E / (k * T^2) * sum_e n_e * sum_t P_te        n is a constant to the gradient
    z = coefficient * mean(l^2)

All arithmetic is fp32, and each result is rounded once. Each program writes partial sums over its tokens, which are
added in order: every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime import Backward, Gradients, Op, Present, Sharding, summed
from ...common.checks import FLOATS, check_input, check_out_dtype, check_tensor, real, whole
from ...common.rows import compute_dtype
from .arguments import (
    SCORES,
    Groups,
    RouteArgs,
    RouteBackwardArgs,
    RouteGradients,
    RouteOutputs,
    Score,
    Weighing,
)
from .reference import route_backward_reference, route_reference


@dataclass(frozen=True)
class Convention:
    """Defaults of a library or model for `route`, without the values of a model's configuration (k, groups, scale).

    - `score`: the function from logits to scores, unless the argument overrides it.
    - `post_softmax`: the softmax is taken after the choice, over the chosen logits alone.
    - `group_score`: the score of a group. "share": the sum of its k // group_topk best experts; "top2": of its two
      best; "top2 or max": of its two best with a bias, else its best alone. None: there are no groups.
    - `renormalize`: None to renormalize scores that are not a softmax if k > 1; otherwise the default of the argument.
    - `eps`: added to the sum that renormalization divides by.
    - `masked_is_zero`: without a bias, experts of other groups count as 0 instead of minus infinity.
    - `biased_softmax`: a bias is accepted with softmax.
    - `keeps_dtype`: weights have the dtype of the logits instead of fp32.
    - `scales_alone`: the scale also applies without renormalization.
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
    # TransformerEngine is equal but for recovering the score as (s + bias) - bias; here it is kept.
    "megatron": Convention(
        post_softmax=True, group_score="share", renormalize=None, biased_softmax=False, keeps_dtype=True
    ),
    "torchtitan": Convention(),
    "vllm": Convention(group_score="top2 or max", eps=0.0),
    "sglang": Convention(group_score="top2 or max", masked_is_zero=True, scales_alone=False),
    # Models as in HuggingFace transformers. Qwen3 renormalizes, since all its checkpoints set norm_topk_prob. The bias
    # of gpt-oss belongs to the router's linear layer, not to the choice.
    "qwen3": Convention(group_score=None, renormalize=True, eps=0.0, biased_softmax=False, keeps_dtype=True),
    "mixtral": Convention(group_score=None, renormalize=True, eps=0.0, biased_softmax=False),
    "gpt_oss": Convention(post_softmax=True, group_score=None, biased_softmax=False, keeps_dtype=True),
    "deepseek_v3": Convention(score="sigmoid", renormalize=True),
}


class Routing(NamedTuple):
    """Result of `route`.

    - `weights` [..., k] and `indices` [..., k], the best expert first.
    - `counts` [E], int32: the number of tokens for each expert.
    - `balance_loss`, `z_loss`: scalars, if requested.
    - `scores` [..., E], fp32: s of all experts, before bias, choice, renormalization and scale, if requested.
    - `score_sums` [E] and `score_counts` [E], int32: the sum over tokens of P, and n, in the balance loss. For a loss
      over several ranks, sum score_counts over the ranks and multiply by score_sums, which has the gradient.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor
    balance_loss: Tensor | None = None
    z_loss: Tensor | None = None
    score_sums: Tensor | None = None
    score_counts: Tensor | None = None
    scores: Tensor | None = None


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

    @cached_property
    def launch(self) -> Callable[[RouteGradients, RouteBackwardArgs], None]:
        from .launch import launch_route_backward

        return launch_route_backward

    def reference(self, a: RouteBackwardArgs) -> RouteGradients:
        return route_backward_reference(a)


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

    def present(self, a: RouteArgs) -> Present:
        return True, True, True, a.scores, a.balance, a.balance, a.z

    @cached_property
    def launch(self) -> Callable[[RouteOutputs, RouteArgs], None]:
        from .launch import launch_route

        return launch_route

    def reference(self, a: RouteArgs) -> RouteOutputs:
        return route_reference(a)

    def keep(self, a: RouteArgs, o: RouteOutputs) -> RouteBackwardArgs:
        return RouteBackwardArgs(a.logits, o.indices, None, None, None, None, a.weighing)

    def backward(self, b: Backward) -> Gradients:
        saved: RouteBackwardArgs = b.kept
        grads: RouteOutputs = b.grads
        args = saved._replace(
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
    """Choose k of E experts for each token, and weigh them.

    Also known as top-k router, gating.

    logits: [..., E] in fp32, bf16 or fp16, of any strides. k: the number of experts of a token.

    - `convention`: the variant of a library or model: "megatron" (Megatron-LM and TransformerEngine), "torchtitan",
      "vllm" or "sglang"; or "qwen3", "mixtral", "gpt_oss" or "deepseek_v3", as in HuggingFace transformers.
      `CONVENTIONS` lists what each does; arguments that are None take their default from it. A convention does not
      include the values of a model's configuration: DeepSeek-V3 itself also needs k=8, groups=8, group_topk=4,
      scale=2.5 and its bias.
    - `score`: "softmax", "sigmoid" or "sqrtsoftplus"; by default sigmoid for "deepseek_v3" and softmax for the others.
      `post_softmax`: softmax over the chosen logits, not over all.
    - `bias` [E]: added to the scores for the choice, never to the weights; it has no gradient.
    - `groups`, `group_topk`: split the experts into that many contiguous groups and choose only from the group_topk
      best groups. `group_score`: how a group is scored, "share", "top2" or "max".
    - `renormalize`: divide a token's weights by their sum. `scale`: multiply them by it, as the last step.
    - `balance_coefficient`, `z_coefficient`: compute the load-balance loss and the z loss of these tokens, times the
      coefficient. Add them to the model's loss. For a DTensor they cover the tokens of all ranks; the load-balance loss
      then needs an all-reduce of the experts' counts, E elements.
    - `return_scores`: also return the scores of all experts, in fp32 and with a gradient, for custom losses.
    - `out_dtype`: the dtype of the weights; `index_dtype`: int32 or int64.

    Among equal scores, the lowest index wins. Every row has k different indices, even if all its logits are equal,
    minus infinity or NaN. A token's result depends on that token alone.

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
            ". Its models route differently: choose the closest one" if convention == "transformers" else ""
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
                "and a softmax after the choice has no scores to add it to. Use convention='torchtitan' or 'vllm'; "
                "the bias of a router's linear layer goes to weft.router_linear"
            )
        bias = bias.detach()
    grouped = _ONE_GROUP
    if groups == 1:
        if group_topk not in (None, 1):
            raise ValueError(f"group_topk={group_topk} needs groups")
    else:
        scoring = group_score or rule.group_score
        if scoring is None:
            raise ValueError(
                f"{convention!r} does not define the score of a group: pass group_score='share', 'top2' or 'max'"
            )
        if scoring == "top2 or max":
            scoring = "max" if bias is None else "top2"
        grouped = _check_groups(experts, k, groups, group_topk, scoring)
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


def _check_groups(experts: int, k: int, groups: int, group_topk: int | None, group_score: str) -> Groups:
    if whole("groups", groups) < 1 or experts % groups:
        raise ValueError(f"groups must divide the number of experts, {experts}; got {groups}")
    if group_topk is None or not 1 <= whole("group_topk", group_topk) <= groups:
        raise ValueError(f"group_topk must be from 1 to the number of groups, {groups}; got {group_topk}")
    if group_score not in ("share", "top2", "max"):
        raise ValueError(f"group_score must be 'share', 'top2' or 'max'; got {group_score!r}")
    best = {"share": k // group_topk, "top2": 2, "max": 1}[group_score]
    size = experts // groups
    if not 1 <= best <= size:
        raise ValueError(
            f"a group's score would be the sum of its {best} best experts, but a group has {size}: "
            "group_topk must not exceed k, and k / group_topk must not exceed the number of experts in a group"
        )
    if k > group_topk * size:
        raise ValueError(
            f"k={k} experts cannot be chosen from group_topk={group_topk} groups of {size}: raise group_topk"
        )
    return Groups(groups, group_topk, best, False)
