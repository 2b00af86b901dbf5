"""Reference of routing in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.rows import compute_dtype, count_rows
from .arguments import RouteArgs, RouteBackwardArgs, RouteGradients, RouteOutputs, Weighing

TINY = 1e-20  # added to the divisor in the balance loss


def _scores(x: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(x, -1)
    if score == "sigmoid":
        return torch.sigmoid(x)
    return torch.logaddexp(x, torch.zeros_like(x)).sqrt()


def _best(choice: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest along the last dimension, the lowest first among equals."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :k]


def _count(indices: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(experts, dtype=torch.int32, device=indices.device)
    flat = indices.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def _shares(s: Tensor, score: str) -> Tensor:
    """Return P of the balance loss."""
    return s if score == "softmax" else s / (s.sum(-1, keepdim=True) + TINY)


def _chosen_scores(x: Tensor, s: Tensor, chosen: Tensor, how: Weighing) -> Tensor:
    return torch.softmax(x.gather(1, chosen), -1) if how.post_softmax else s.gather(1, chosen)


def route_backward_reference(a: RouteBackwardArgs) -> RouteGradients:
    """Define the gradient; an upstream gradient of None counts as zero."""
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


def route_reference(a: RouteArgs) -> RouteOutputs:
    """Define the outputs of the op."""
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
        group_score = best[..., 0]
        for i in range(1, groups.best):
            group_score = group_score + best[..., i]
        allowed = torch.zeros(rows, groups.number, dtype=torch.bool, device=x.device)
        allowed.scatter_(1, _best(group_score, groups.topk), True)
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
