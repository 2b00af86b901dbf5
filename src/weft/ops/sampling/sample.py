"""Draws of tokens from logits.

    z = logits / temperature                  fp32; not scaled at temperature 0
    m = max(z)    l = sum(exp(z - m))         lse = m + log(l)      NaN is never drawn, but makes l NaN
    token = argmax over the kept v of z_v + g_v
    logprob = (z_token - m) - log(l)          among all tokens, not only the kept ones

g_v = -log(-log u) is a Gumbel number of (seed, step, v), 0 at temperature 0. The largest sum is a draw from the softmax
of the kept tokens. Because its noise depends on nothing else, a draw does not depend on the batch, on the other
requests, on tiles or on shards of the vocabulary. Of equal sums the lowest token is taken.

Which tokens are kept, in this order:

    top_k: the k largest logits, of equal ones the lowest tokens
    top_p: the fewest largest that together have the part p of the mass of those (`order="joint"`: of all tokens)
    min_p: those with at least the part min_p of the largest probability

Masses are counted in units of 2^-40 of the largest probability. Sums of integers are exact, so the kept set does not
depend on the order of addition; a top_p takes rows of at most 2^22 tokens, whose sums fit into 63 bits.

Each tile of a row passes its 64 largest tokens on, with the rank above which none is missing. The kernel that draws
finds the limits among those; a top_k of at most 64 is always found there. Where a limit lies lower, as with a flat
distribution and a top_p near 1, it reads the row again, two or three times for most rows: each pass but the last counts
what 16 pivots keep, and the last collects the few elements around the limit, and draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ...runtime import Op, Sharding
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, whole
from .arguments import SampleArgs, Sampled
from .parameters import Integer, Number
from .reference import sample_reference

Order = Literal["k_then_p", "joint"]
MASSES = 2**22  # tokens of a row whose masses, of at most 2^40 units each, have a sum in 63 bits
OF_REQUESTS = ("temperature", "top_k", "top_p", "min_p", "seed", "step")


class SampleOp(Op[SampleArgs, Sampled], name="sample", variants=64):
    def validate(self, a: SampleArgs) -> None:
        if a.logits.dim() == 0 or not 0 < a.logits.shape[-1] < 2**31:
            raise ValueError(f"logits must be [..., V] with 0 < V < 2**31; got {tuple(a.logits.shape)}")
        if a.logits.shape[-1] > MASSES and not a.top_p.is_always(1.0):
            raise ValueError(
                f"top_p sums masses of at most {MASSES:,} tokens; logits have {a.logits.shape[-1]:,}. "
                "Keep the likeliest with weft.top_k, and draw from its values"
            )
        rows, device = a.logits.shape[:-1], a.logits.device
        dtypes = {"top_k": INTEGERS, "seed": (torch.int64,), "step": (torch.int64,)}
        for name in OF_REQUESTS:
            t = getattr(a, name).tensor
            if t is not None:
                check_tensor(name, t, dtypes.get(name, (torch.float32,)), device, rows, ())

    def allocate(self, a: SampleArgs) -> Sampled:
        rows, device = a.logits.shape[:-1], a.logits.device
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        return Sampled(tokens, *(torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2)))

    @cached_property
    def launch(self) -> Callable[[Sampled, SampleArgs], None]:
        from .launch import launch_sample

        return launch_sample

    def reference(self, a: SampleArgs) -> Sampled:
        return sample_reference(a)

    def shard(self, a: SampleArgs) -> Sharding:
        given = ((name, getattr(a, name).tensor) for name in OF_REQUESTS)
        of_rows = {f"{name}_tensor": "..." if t.dim() else "" for name, t in given if t is not None}
        return Sharding(
            {"logits": "... v", **of_rows},
            {"tokens": "...", "logprobs": "...", "lse": "..."},
            {"v": "a token is drawn from all of a row"},
        )


sample_op = SampleOp()


def of_part(name: str, value: Tensor | float, device: torch.device) -> Number:
    """Return an argument that is a number from 0 to 1 or a tensor."""
    number = Number.of(name, value, device, torch.float32, -math.inf)
    if not 0.0 <= number.value <= 1.0:
        raise ValueError(f"{name} must be from 0 to 1; got {number.value}")
    return number


def _detached(value: Any, default: float) -> Any:
    return default if value is None else value.detach() if isinstance(value, Tensor) else value


def check_noise(seed: object, step: object, is_greedy: bool) -> None:
    """Raise an error if a draw has no seed or no step."""
    if not is_greedy and (seed is None or step is None):
        raise ValueError(
            "a draw needs seed= and step=: a seed for each request, and for each of its tokens the next step. "
            "temperature=0.0 takes the largest logit without them"
        )


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    step: int | Tensor | None = None,
    order: Order = "k_then_p",
) -> Sampled:
    """Draw a token from each row of logits.

    - `logits`: [..., V], in bf16, fp16 or fp32, of any strides.
    - `temperature`: at 0 the largest logit is taken, of equal ones the lowest token.
    - `top_k`, `top_p`, `min_p`: keep the k largest logits; of these, the largest that have this part of their mass,
      always at least one; of these, tokens with at least this part of the largest probability. `top_k` below 1 and
      `top_p` 1 keep all.
    - `order`: with "joint" the mass of top_p is measured on all tokens, with "k_then_p" on the k largest.
    - `seed`, `step`: int64; needed unless temperature is the number 0. A draw is a function of (seed, step, token):
      give each request its own seed, and each of its tokens the next step. Rows that share both have the same noise. A
      captured graph must be given a tensor for `step`, and advance it.

    Parameters are numbers, or tensors on the device with one value for each row; nothing waits for the device.

    Returns `tokens` (int64; -1 where no logit is above minus infinity), `logprobs` (fp32: of the token among all
    tokens, at the temperature, before anything is left out; at temperature 0 as at 1) and `lse`. For the
    log-probabilities of the n most likely tokens: `weft.top_k(logits, n).values / temperature - lse[:, None]`.

    >>> import torch, weft
    >>> logits = torch.tensor([[0.0, 5.0, 1.0], [2.0, 2.0, -torch.inf]])
    >>> weft.sample(logits, temperature=0.0).tokens
    tensor([1, 0])
    >>> weft.sample(logits, top_k=2, top_p=0.9, seed=7, step=torch.tensor([3, 4])).tokens.shape
    torch.Size([2])
    """
    check_input("logits", logits, FLOATS)
    if order not in ("k_then_p", "joint"):
        raise ValueError(f"order must be 'k_then_p' or 'joint'; got {order!r}")
    device = logits.device
    t = Number.of("temperature", _detached(temperature, 1.0), device, torch.float32, 0.0)
    if isinstance(top_k, Tensor):
        k = Number(top_k, 0.0)
    else:
        k = Number(None, 0.0 if top_k is None else float(max(whole("top_k", top_k), 0)))
    p, least = (
        of_part("top_p", _detached(top_p, 1.0), device),
        of_part("min_p", _detached(min_p, 0.0), device),
    )
    check_noise(seed, step, t.is_always(0.0))
    seeds, steps = (
        Integer.of("seed", _detached(seed, 0), device),
        Integer.of("step", _detached(step, 0), device),
    )
    return sample_op(SampleArgs(logits.detach(), t, k, p, least, seeds, steps, order == "joint"))
