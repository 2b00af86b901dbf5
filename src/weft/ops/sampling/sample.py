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
depend on the order of addition.

Each tile of a row passes its 64 largest tokens on, with the rank above which none is missing. The kernel that draws
finds the limits among those. Where a limit lies lower, as with a flat distribution and a top_p near 1, it reads the row
again: 4 bits of the limit with each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ...runtime import Op, Sharding
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, real, whole
from .arguments import SampleArgs, Sampled
from .reference import sample_reference

Order = Literal["k_then_p", "joint"]


class SampleOp(Op[SampleArgs, Sampled], name="sample", variants=64):
    def validate(self, a: SampleArgs) -> None:
        if a.logits.dim() == 0 or not 0 < a.logits.shape[-1] < 2**31:
            raise ValueError(f"logits must be [..., V] with 0 < V < 2**31; got {tuple(a.logits.shape)}")
        rows, device = a.logits.shape[:-1], a.logits.device
        for name in ("temperature", "top_p", "min_p"):
            t = getattr(a, name)
            if t is not None:
                check_tensor(name, t, (torch.float32,), device, rows)
        if a.top_k is not None:
            check_tensor("top_k", a.top_k, INTEGERS, device, rows)
        for name, t in (("seed", a.seed), ("step", a.step)):
            check_tensor(name, t, (torch.int64,), device, rows)

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
        of_rows = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "step"), "...")
        return Sharding(
            {"logits": "... v", **of_rows},
            {"tokens": "...", "logprobs": "...", "lse": "..."},
            {"v": "a token is drawn from all of a row"},
        )


sample_op = SampleOp()


def _of_rows(
    name: str, value: Tensor | float | None, off: float, logits: Tensor
) -> tuple[Tensor | None, float]:
    """Return (tensor with a value for each row or None, number) of a parameter."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.expand(logits.shape[:-1]).contiguous() if value.dim() == 0 else value), off
    number = off if value is None else real(name, value)
    return None, number


def integers_of(name: str, value: Tensor | int, rows: torch.Size, device: torch.device) -> Tensor:
    """Return a seed or a step as an int64 tensor of the rows."""
    if not isinstance(value, Tensor):
        value = torch.full((), whole(name, value), dtype=torch.int64, device=device)
    return value.expand(rows) if value.dim() == 0 else value


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
    t, t_number = _of_rows("temperature", temperature, 1.0, logits)
    p, p_number = _of_rows("top_p", top_p, 1.0, logits)
    least, least_number = _of_rows("min_p", min_p, 0.0, logits)
    k, k_number = None, 0
    if isinstance(top_k, Tensor):
        k = top_k.expand(logits.shape[:-1]).contiguous() if top_k.dim() == 0 else top_k
    elif top_k is not None:
        k_number = max(whole("top_k", top_k), 0)
    if not 0.0 <= t_number < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite; got {t_number}")
    for name, number in (("top_p", p_number), ("min_p", least_number)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be from 0 to 1; got {number}")
    check_noise(seed, step, t is None and t_number == 0.0)
    rows, device = logits.shape[:-1], logits.device
    seeds, steps = (
        integers_of(name, 0 if n is None else n, rows, device) for name, n in (("seed", seed), ("step", step))
    )
    numbers = t_number, k_number, p_number, least_number
    return sample_op(SampleArgs(logits.detach(), t, k, p, least, seeds, steps, *numbers, order == "joint"))
