"""References of the verification of drafts in plain PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.rows import compute_dtype
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


# ---- random numbers -------------------------------------------------------------------------------------

_GUMBEL, _ACCEPT, _RESIDUAL = range(3)  # streams of `weft.tiles.noise`
_LOW = 0xFFFFFFFF


def _times(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit integers, which are held in int64."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    return ((low >> 16) + high) >> 16, (low + (high << 16)) & _LOW


def _bits(seed: Tensor, step: Tensor, token: Tensor, stream: int) -> Tensor:
    """Return `random_bits` of `weft.tiles.noise` as int64, in the shape to which the arguments broadcast."""
    seed, step, token = torch.broadcast_tensors(seed, step, token)
    c = [token >> 2, step & _LOW, (step >> 32) & _LOW, torch.full_like(token, stream)]
    key = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(10):
        (a_high, a_low), (b_high, b_low) = _times(c[0], 0xD2511F53), _times(c[2], 0xCD9E8D57)
        c = [b_high ^ c[1] ^ key[0], b_low, a_high ^ c[3] ^ key[1], a_low]
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return torch.stack(c, -1).gather(-1, (token & 3)[..., None])[..., 0]


def _uniform(bits: Tensor) -> Tensor:
    """Map bits to the fp32 numbers in (0, 1) that kernels have, in float64."""
    rounded = (bits.float().double() * 2.0**-32 + 2.0**-33).float()
    return rounded.clamp(max=0.99999994).double()


def _gumbel(bits: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-_uniform(bits)))


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
    t = a.temperature.column(requests, a.logits.to(dtype))[..., None]
    z = a.logits.to(dtype) / torch.where(t == 0, 1.0, t)
    token = torch.arange(cols, device=device)
    greedy = t == 0
    if cols:
        # The largest, and the first of them: one of several infinities, too.
        top = (z == z.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
        m = z.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
        e = torch.where(z == m, 1.0, torch.exp(z - m))
        p = torch.where(greedy, (token == top).to(dtype), e / e.sum(-1, keepdim=True))
    else:
        p = z
    c = chances(p, a.draft_probs.to(dtype), a.drafts, a.joint)
    seed, step = (x.column(requests, device) for x in (a.seed, a.step))
    steps = step + torch.arange(nodes, device=device)
    real = (a.drafts >= 0) & (a.drafts < cols)
    u = _uniform(_bits(seed, steps[:, :-1], torch.where(real, a.drafts, 0).long(), _ACCEPT))
    passed = u < c.accept
    if a.joint:
        length = (passed * torch.arange(1, nodes, device=device)).amax(1) if nodes > 1 else passed.sum(1)
    else:
        length = passed.cumprod(1).sum(1)
    row = length[:, None, None]
    real = torch.cat([real, torch.zeros_like(real[:, :1] if nodes > 1 else length[:, None] > 0)], 1)
    drafted = real.gather(1, length[:, None]) & ~greedy[:, 0]  # [B, 1]
    z = z.gather(1, row.expand(-1, 1, cols))[:, 0]
    r = c.residual.gather(1, row.expand(-1, 1, cols))[:, 0]
    now = steps.gather(1, length[:, None])
    own, other = (_gumbel(_bits(seed, now, token, stream)).to(dtype) for stream in (_GUMBEL, _RESIDUAL))
    score = torch.where(greedy[:, 0], z, z + torch.where(drafted, other, own))
    score = torch.where(drafted & (r > 0).any(-1, keepdim=True), r.log() + other, score)
    drawn = _first_largest(torch.where(z.isnan(), math.nan, score))
    place = torch.arange(nodes, device=device)
    drafts = torch.cat([a.drafts.long(), torch.full_like(drawn[:, None], -1)], 1)
    tokens = torch.where(
        place < length[:, None], drafts, torch.where(place == length[:, None], drawn[:, None], -1)
    )
    return Verified(tokens, length, torch.where(place <= length[:, None], place, -1))


def _first_largest(score: Tensor) -> Tensor:
    """Return the first of the largest scores of each row, [B]; -1 if there is a NaN, or only minus infinity."""
    if not score.shape[-1]:
        return torch.full(score.shape[:1], -1, dtype=torch.int64, device=score.device)
    largest = score.amax(-1, keepdim=True)
    first = (score == largest).to(torch.int8).argmax(-1)
    return torch.where((largest[:, 0] > -math.inf), first, -1)
