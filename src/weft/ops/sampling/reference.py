"""References of selections and draws in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.rows import compute_dtype
from .arguments import SampleArgs, Sampled, TopK, TopKArgs
from .noise import gumbel


def descending(x: Tensor, exists: Tensor | None = None) -> Tensor:
    """Return the columns of x [..., V] by (value, lowest column), with NaN after all values and then what does not
    exist."""
    order = x.masked_fill(x.isnan(), -torch.inf).argsort(dim=-1, descending=True, stable=True)
    late = x.isnan().int() if exists is None else torch.where(exists, x.isnan().int(), 2)
    return order.gather(-1, late.gather(-1, order).argsort(dim=-1, stable=True))


def top_k_reference(a: TopKArgs) -> TopK:
    """Define the outputs of the op."""
    x, cols = a.x, a.x.shape[-1]
    col = torch.arange(cols, device=x.device)
    exists = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if a.starts is not None:
        exists &= col >= a.starts[..., None]
    if a.ends is not None:
        exists &= col < a.ends[..., None]
    indices = torch.nn.functional.pad(descending(x, exists), (0, max(a.k - cols, 0)), value=-1)[..., : a.k]
    real = indices >= 0
    if cols:
        real &= exists.gather(-1, indices.clamp(min=0))
        values = x.gather(-1, indices.clamp(min=0)).masked_fill(~real, -torch.inf)
    else:
        values = x.new_full(indices.shape, -torch.inf)
    return TopK(values, indices.masked_fill(~real, -1))


# ---- draws ----------------------------------------------------------------------------------------------

UNIT = 2.0**40


def kept_tokens(a: SampleArgs, z: Tensor, m: Tensor, total: Tensor) -> Tensor:
    """Return which tokens of z [N, V] a draw may take."""
    rows, cols = z.shape
    flat = a.logits.reshape(rows, cols)

    k, p, least = (number.column(rows, z.float()) for number in (a.top_k, a.top_p, a.min_p))
    has_k, has_p = (k >= 1) & (k < cols), p < 1
    e = torch.where(z == m, 1.0, (z - m).exp()).masked_fill(z.isnan() | (z == -torch.inf), 0.0)
    order = descending(flat)
    place = torch.arange(cols, device=z.device).expand(rows, cols)
    among = ~has_k | (place < k)
    units = (e * UNIT).long().gather(-1, order)
    mass = (units * among).sum(-1, keepdim=True)
    part = (p * mass.float()).long().minimum(mass)
    of_all = (p * total * UNIT).nan_to_num(0).long()
    wanted = torch.where(has_k, of_all if a.joint else part, of_all).clamp(min=1)
    among = among & (~has_p | (units.cumsum(-1) - units < wanted))
    kept = torch.zeros_like(among).scatter(-1, order, among)
    return kept & (e >= least) & (z > -torch.inf)


def sample_reference(a: SampleArgs) -> Sampled:
    """Define the outputs of the op."""
    rows = a.logits.shape[:-1]
    cols = a.logits.shape[-1]
    flat = a.logits.reshape(rows.numel(), cols)
    t = a.temperature.column(len(flat), flat.float())
    z = flat.to(compute_dtype(flat)) * (1.0 / torch.where(t > 0, t, 1.0))
    m = z.masked_fill(z.isnan(), -torch.inf).amax(-1, keepdim=True)
    total = torch.where(z == m, 1.0, (z - m).exp()).masked_fill(z == -torch.inf, 0.0).sum(-1, keepdim=True)
    token = torch.arange(cols, device=z.device)
    noise = gumbel(a.seed.column(len(flat), flat.device), a.step.column(len(flat), flat.device), token)
    score = torch.where(t > 0, z + noise, z).masked_fill(~kept_tokens(a, z, m, total), -torch.inf)
    best = score.amax(-1, keepdim=True)
    chosen = torch.where((score == best) & (score > -torch.inf), token, cols).amin(-1, keepdim=True)
    z_best = z.gather(-1, chosen.clamp(max=cols - 1))
    logprobs = torch.where(z_best == m, 0.0, z_best - m) - total.log()
    exists = chosen < cols
    return Sampled(
        torch.where(exists, chosen, -1).reshape(rows),
        logprobs.masked_fill(~exists, torch.nan).reshape(rows),
        (m + total.log()).reshape(rows),
    )
