"""Verification of drafts: which of them the target model accepts, and the token after them.

Greedy, or drafts without distributions (n-grams, greedy drafters, trees): the target model chooses a token in every
row, with the random numbers of (seed, step + depth of the row). The walk goes from row 0 to the child whose draft is
that token. A draft x is accepted with its probability p(x), and a rejected draw has the distribution of p without x:
the residual of a point mass. The tokens are those that decoding without drafts would draw.

Drafts x_i drawn from distributions q_i, with target probabilities p_i = softmax(logits_i / temperature), i from 0:

    chain:  x_i is accepted if u_i < p_i(x_i) / q_i(x_i)
            after the first that is not, a token is drawn from max(p_i - q_i, 0), normalized
    block:  w_0 = 1      w_{i+1} = min(w_i p_i(x_i) / q_i(x_i), 1)      S_i = sum of max(w_i p_i - q_i, 0)
            the largest n is accepted with n = 0 or u_{n-1} < h_n       h_n = S_n / (S_n + 1 - w_n), and w_K for n = K
            then a token is drawn from max(w_n p_n - q_n, 0), normalized                    (Sun et al., 2024)
    after all K drafts, a token is drawn from p_K

in fp32; u_i is a random number of (seed, step + i, x_i), and draws add Gumbel numbers of (seed, step + n, token) to
logarithms. A draft that is no token was drawn from nothing: q_i counts as 0, and verification ends there with a draw
from p_i. If rounding leaves nothing of a residual, its draw is from p_n. NaN is never drawn, and no draft is accepted
where a logit is NaN. At temperature 0, p_i is all at the largest logit, and q_i does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ....runtime import Op
from ...common.checks import FLOATS, INTEGERS, check_input, check_tensor, dtypes_beside, nonnegative, whole
from ...common.rows import compute_dtype
from ..parameters import Integer, Number
from ..sample import check_noise, sample
from .arguments import AcceptArgs, Relaxed, Verified, VerifyArgs
from .reference import accept_reference, verify_reference


def _allocate(like: Tensor, requests: int, nodes: int) -> Verified:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=like.device)

    return Verified(empty(requests, nodes), empty(requests), empty(requests, nodes))


class AcceptOp(Op[AcceptArgs, Verified], name="accept", variants=8):
    def validate(self, a: AcceptArgs) -> None:
        if a.chosen.dim() != 2 or a.chosen.dtype is not torch.int64:
            raise ValueError(f"chosen must be int64 [B, N]; got {a.chosen.dtype} {tuple(a.chosen.shape)}")
        requests, nodes = a.chosen.shape
        _check_drafts(a.drafts, a.chosen, requests, nodes)
        if a.parents is not None:
            shapes = (nodes - 1,), (requests, nodes - 1)
            check_tensor("parents", a.parents, INTEGERS, a.chosen.device, *shapes)

    def allocate(self, a: AcceptArgs) -> Verified:
        return _allocate(a.chosen, *a.chosen.shape)

    @cached_property
    def launch(self) -> Callable[[Verified, AcceptArgs], None]:
        from .launch import launch_accept

        return launch_accept

    def reference(self, a: AcceptArgs) -> Verified:
        return accept_reference(a)


class VerifyOp(Op[VerifyArgs, Verified], name="verify", variants=24):
    def validate(self, a: VerifyArgs) -> None:
        if a.logits.dim() != 3:
            raise ValueError(f"logits must be [B, K + 1, V]; got {tuple(a.logits.shape)}")
        requests, nodes, cols = a.logits.shape
        if nodes == 1:
            raise ValueError("there are no drafts: draw with weft.sample")
        if cols >= 2**30:
            raise ValueError(f"tokens are numbered in 32 bits: at most {2**30 - 1} of them; got {cols}")
        _check_drafts(a.drafts, a.logits, requests, nodes)
        dtypes = dtypes_beside(a.logits.dtype)
        check_tensor("draft_probs", a.draft_probs, dtypes, a.logits.device, (requests, nodes - 1, cols))
        _check_numbers(requests, temperature=a.temperature, seed=a.seed, step=a.step)

    def allocate(self, a: VerifyArgs) -> Verified:
        return _allocate(a.logits, a.logits.shape[0], a.logits.shape[1])

    @cached_property
    def launch(self) -> Callable[[Verified, VerifyArgs], None]:
        from .launch import launch_verify

        return launch_verify

    def reference(self, a: VerifyArgs) -> Verified:
        return verify_reference(a)


accept_op = AcceptOp()
verify_op = VerifyOp()


def _check_drafts(drafts: Tensor, like: Tensor, requests: int, nodes: int) -> None:
    check_tensor("drafts", drafts, INTEGERS, like.device)
    if nodes == 0 or drafts.shape != (requests, nodes - 1):
        raise ValueError(
            f"drafts must be [B, K] for [B, K + 1] rows of the target model; got {tuple(drafts.shape)} for "
            f"{(requests, nodes)}"
        )


def _check_numbers(requests: int, **numbers: Number | Integer) -> None:
    for name, (tensor, _) in numbers.items():
        if tensor is not None and tensor.shape != (requests,):
            raise ValueError(f"{name} must be a number or ({requests},); got {tuple(tensor.shape)}")


# ---- chosen tokens --------------------------------------------------------------------------------------


def _depths(parents: Tensor | None, nodes: int, device: torch.device) -> Tensor:
    """Return how many drafts precede each row, and its own: [N] or [B, N]. Each step doubles the distance to the
    ancestor that a row knows."""
    depth = torch.arange(nodes, device=device)
    if parents is None:
        return depth
    ancestor = torch.nn.functional.pad(parents.long().clamp(0, nodes - 1), (1, 0))
    depth = (depth > 0).long().expand(ancestor.shape)
    for _ in range((nodes - 1).bit_length()):
        depth, ancestor = depth + depth.gather(-1, ancestor), ancestor.gather(-1, ancestor)
    return depth


def _relax(chosen: Tensor, logits: Tensor, drafts: Tensor, relaxed: Relaxed, inside: Tensor) -> Tensor:
    """Return the chosen tokens, or the drafts where relaxed verification accepts them."""
    z, drafts = logits[:, :-1].float(), drafts.long()
    token = torch.arange(z.shape[-1], device=z.device)
    real = (drafts >= 0) & (drafts < z.shape[-1])
    own = z.gather(-1, torch.where(real, drafts, 0)[..., None])
    ahead = (z > own) | ((z == own) & (token < drafts[..., None]))
    near = (ahead.sum(-1) < relaxed.top_k) & (z.amax(-1) - own[..., 0] <= relaxed.margin)
    closes = drafts == relaxed.close
    closed = (closes.cumsum(-1) - closes.long()) > 0  # by a draft before this one
    accepted = real & near & ~closed & inside[:, None]
    return torch.cat([torch.where(accepted, drafts, chosen[:, :-1]), chosen[:, -1:]], -1)


# ---- public function ------------------------------------------------------------------------------------


def verify(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    step: int | Tensor | None = None,
    parents: Tensor | None = None,
    method: Literal["chain", "block"] = "chain",
    relaxed: Relaxed | None = None,
    inside: Tensor | None = None,
) -> Verified:
    """Verify drafts of speculative decoding: accept some of them, and draw the token after them.

    Also known as rejection sampling, speculative sampling.

    - `logits`: [B, K + 1, V], of the target model after the context (row 0) and after each draft, in any strides.
    - `drafts`: int32 or int64 [B, K]. A draft that is no token, such as -1, is not accepted.
    - `draft_probs`: [B, K, V], the distributions from which the drafts were drawn, fp32, bf16 or fp16. Without it a
      draft is accepted if the target model itself draws it.
    - `temperature`, `top_k`, `top_p`, `min_p`: as in `sample`, numbers or tensors [B]. With draft_probs only
      `temperature`: give tokens that are not to be drawn the logit -inf, and the probability 0.
    - `seed`, `step`: of the random numbers, integers or int64 [B]; needed unless temperature is the number 0. `step` is
      that of the first token, and counts tokens. A drafter may draw with the same ones.
    - `parents`: int32 or int64 [K] or [B, K], the row after which each draft of a tree comes: 0, or i + 1 for draft i,
      which must come before it. By default each follows the previous one. Of equal siblings the first counts.
    - `method`: with draft_probs, verify drafts one after another ("chain"), or jointly ("block"), which accepts more.
    - `relaxed`: at temperature 0, `weft.Relaxed(top_k, margin, close)` accepts other drafts, too, for requests `inside`
      (bool [B]), for instance while they think. It changes what is generated.

    Returns `Verified(tokens, accepted, path)` in int64 on the device: `tokens` [B, K + 1] are the accepted drafts, one
    more token, and -1; `accepted` [B] counts the drafts; `path` [B, K + 1] lists the rows whose keys and values stay in
    the cache, then -1. The tokens have the distribution of those without drafts. Without draft_probs they are even the
    same: those that `sample` draws, one step after another. As there, NaN is never drawn, and the last token is -1 if
    none can be.

    >>> import torch, weft
    >>> logits = torch.eye(4)[None, :3] * 9.0  # the largest are the tokens 0, 1 and 2
    >>> weft.verify(logits, torch.tensor([[0, 3]]), temperature=0.0)
    Verified(tokens=tensor([[ 0,  1, -1]]), accepted=tensor([1]), path=tensor([[ 0,  1, -1]]))
    """
    check_input("logits", logits)
    device = logits.device
    if logits.dim() != 3 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [B, K + 1, V]; got {tuple(logits.shape)}")
    requests, nodes, _ = logits.shape
    _check_drafts(drafts, logits, requests, nodes)
    if method not in ("chain", "block"):
        raise ValueError(f"method must be 'chain' or 'block'; got {method!r}")
    numbers = Number.of("temperature", temperature, device, compute_dtype(logits), 0.0)
    check_noise(seed, step, numbers.is_always(0.0))
    seed, step = 0 if seed is None else seed, 0 if step is None else step
    seeds, steps = Integer.of("seed", seed, device), Integer.of("step", step, device)
    _check_numbers(requests, temperature=numbers, seed=seeds, step=steps)
    if parents is not None:
        check_tensor("parents", parents, INTEGERS, device, (nodes - 1,), (requests, nodes - 1))
    _check_relaxed(relaxed, inside, numbers, requests, device)
    logits = logits.detach()
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "parents": parents, "relaxed": relaxed}
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, FLOATS, device)
        for name, option in options.items():
            if option is not None:
                raise ValueError(f"{name}= goes without draft_probs=: leave one of them out")
        if nodes > 1:
            probs = draft_probs.detach()
            return verify_op(VerifyArgs(logits, drafts, probs, numbers, seeds, steps, method == "block"))
    elif method == "block":
        raise ValueError("method='block' needs draft_probs=, the distributions of the drafts")
    if relaxed is not None and parents is not None:
        raise ValueError("relaxed= verifies chains: leave parents= out")

    def of_rows(value: Any) -> Any:
        """Return a tensor with an element for each request as one with an element for each row."""
        return value[:, None].expand(requests, nodes) if isinstance(value, Tensor) and value.dim() else value

    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    depths = _depths(parents, nodes, device) + of_rows(step)
    chosen = sample(
        logits,
        step=depths.expand(requests, nodes),
        **{name: of_rows(value) for name, value in settings.items()},
    ).tokens
    if relaxed is not None and inside is not None:
        chosen = _relax(chosen, logits, drafts, relaxed, inside)
    return accept_op(AcceptArgs(chosen, drafts, parents))


def _check_relaxed(
    relaxed: Relaxed | None, inside: Tensor | None, temperature: Number, requests: int, device: torch.device
) -> None:
    if (relaxed is None) != (inside is None):
        raise ValueError("relaxed= and inside= go together: the rule, and the requests for which it holds")
    if relaxed is None or inside is None:
        return
    if not isinstance(relaxed, Relaxed):
        raise TypeError(f"relaxed must be a weft.Relaxed; got {type(relaxed).__name__}")
    check_tensor("inside", inside, (torch.bool,), device, (requests,))
    whole("relaxed.top_k", relaxed.top_k, 1)
    whole("relaxed.close", relaxed.close)
    nonnegative("relaxed.margin", relaxed.margin)
    if not temperature.is_always(0.0):
        raise ValueError("relaxed= is for greedy verification: pass temperature=0.0")
