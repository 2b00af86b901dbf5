"""References of the verification of drafts in plain PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.rows import compute_dtype
from ..noise import ACCEPT, GUMBEL, RESIDUAL, gumbel_of, random_bits, uniform
from .arguments import AcceptArgs, Verified, VerifyArgs

# ---- tokens that were chosen ----------------------------------------------------------------------------


def accept_reference(a: AcceptArgs) -> Verified:
    """Define the outputs of the op: all requests walk together."""
    nodes = a.chosen.shape[1]
    child = torch.arange(1, nodes, device=a.chosen.device)  # the row of each draft
    parents = child - 1 if a.parents is None else a.parents
    row = torch.zeros_like(a.chosen[:, :1])  # -1 after the last
    tokens, path = [], []
    for _ in range(nodes):
        token = torch.where(row < 0, -1, a.chosen.gather(1, row.clamp(min=0)))
        tokens.append(token)
        path.append(row)
        follows = (parents == row) & (child > row) & (a.drafts == token) & (token >= 0)
        first = torch.where(follows, child, nodes).amin(1, keepdim=True) if nodes > 1 else row + nodes
        row = torch.where(first < nodes, first, -1)
    rows = torch.cat(path, 1)
    return Verified(torch.cat(tokens, 1), (rows >= 0).sum(1) - 1, rows)


# ---- drafts with distributions --------------------------------------------------------------------------


class Chances(NamedTuple):
    """How likely each draft is accepted, and what is drawn after the last one that is."""

    accept: Tensor  # [B, N - 1]; in a block, of the drafts up to each one
    residual: Tensor  # [B, N, V]: not normalized


def chances(p: Tensor, q: Tensor, drafts: Tensor, joint: bool) -> Chances:
    """Return the chances of drafts [B, K] with target probabilities p [B, K + 1, V] and draft probabilities q
    [B, K, V]. A draft that is no token was drawn from nothing."""
    real = (drafts >= 0) & (drafts < p.shape[-1])
    at = torch.where(real, drafts, 0).long()[..., None]
    p_draft, q_draft = (torch.where(real, x.gather(-1, at)[..., 0], 0.0) for x in (p[:, :-1], q))
    ratio = torch.where(q_draft > 0, p_draft / torch.where(q_draft > 0, q_draft, 1.0), 0.0).nan_to_num(
        nan=0.0
    )
    q = torch.cat([torch.where(real[..., None], q, 0.0), torch.zeros_like(p[:, -1:])], 1)
    weight = torch.ones_like(p[..., 0])
    if joint:
        for i in range(drafts.shape[1]):
            weight[:, i + 1] = (weight[:, i] * ratio[:, i]).clamp(max=1.0)
    residual = (weight[..., None] * p - q).clamp(min=0.0)
    if not joint:
        return Chances(ratio.clamp(max=1.0), residual)
    mass, w = residual[:, 1:].sum(-1), weight[:, 1:]
    share = mass / torch.where(w < 1, mass + (1 - w), 1.0)
    after = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], 1)  # whether another draft follows
    return Chances(torch.where(w < 1, torch.where(after, share, w), 1.0), residual)


def verify_reference(a: VerifyArgs) -> Verified:
    """Define the outputs of the op."""
    dtype, device = compute_dtype(a.logits), a.logits.device
    requests, nodes, cols = a.logits.shape
    t = a.temperature.column(requests, a.logits.to(dtype))[..., None]  # [B, 1, 1]
    z = a.logits.to(dtype) * (1.0 / torch.where(t > 0, t, 1.0))
    token, place = (torch.arange(n, device=device) for n in (cols, nodes))
    c = chances(_target(z, t), torch.where(t > 0, a.draft_probs.to(dtype), 1.0), a.drafts, a.joint)
    seed, step = (x.column(requests, device) for x in (a.seed, a.step))
    real = (a.drafts >= 0) & (a.drafts < cols)
    drafts = torch.where(real, a.drafts, 0).long()
    passed = uniform(random_bits(seed, step + place[:-1], drafts, ACCEPT)) < c.accept
    if a.joint:
        length = (passed * place[1:]).amax(1, keepdim=True)
    else:
        length = passed.cumprod(1).sum(1, keepdim=True)  # [B, 1]
    # The row after the accepted drafts.
    row = length[..., None].expand(-1, 1, cols)
    z, r = z.gather(1, row)[:, 0], c.residual.gather(1, row)[:, 0]
    own, other = (gumbel_of(random_bits(seed, step + length, token, s)).to(dtype) for s in (GUMBEL, RESIDUAL))
    drafted = torch.nn.functional.pad(real, (0, 1)).gather(1, length)
    score = torch.where(drafted & (r > 0).any(-1, keepdim=True), r.log(), z) + torch.where(
        drafted, other, own
    )
    drawn = _first_largest(torch.where((t[..., 0] > 0) & ~z.isnan(), score, z))
    drafts = torch.cat([a.drafts.long(), torch.full_like(drawn, -1)], 1)
    tokens = torch.where(place < length, drafts, torch.where(place == length, drawn, -1))
    return Verified(tokens, length[:, 0], torch.where(place <= length, place, -1))


def _target(z: Tensor, t: Tensor) -> Tensor:
    """Return the probabilities of scaled logits [B, N, V]: all at the first largest one for temperatures of 0."""
    if not z.numel():
        return z
    m = z.masked_fill(z.isnan(), -math.inf).amax(-1, keepdim=True)
    e = torch.where((z == m) & (z > -math.inf), 1.0, torch.exp(z - m))
    first = torch.zeros_like(z).scatter(-1, (z == m).to(torch.int8).argmax(-1, keepdim=True), 1.0)
    return torch.where(t > 0, e / e.sum(-1, keepdim=True), first)


def _first_largest(score: Tensor) -> Tensor:
    """Return the first of the largest scores of each row, [B, 1]; -1 if all are minus infinity or NaN."""
    if not score.shape[-1]:
        return torch.full((len(score), 1), -1, dtype=torch.int64, device=score.device)
    largest = score.masked_fill(score.isnan(), -math.inf).amax(-1, keepdim=True)
    first = (score == largest).to(torch.int8).argmax(-1, keepdim=True)
    return torch.where(largest > -math.inf, first, -1)
