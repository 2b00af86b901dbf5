"""What the router must compute, in float64 and by autograd, written from the documented formulas alone."""

from __future__ import annotations

import torch
from accuracy import EPS32
from torch import Tensor
from truth import Near

# A sum of n terms in chains of at most 64, then of the chains: the roundings of a random walk over both, with room.
CHAIN = 64


def _noise(sizes: Tensor, terms: int) -> Tensor:
    """What adding up in fp32 may add to a sum of `terms` numbers whose squares sum up to sizes^2."""
    chains = -(-terms // CHAIN)
    # Partial sums grow like sqrt(i): their roundings add up to some sqrt(n/2) of the last one's.
    steps = (min(terms, CHAIN) / 2 + chains / 2) ** 0.5
    return 4 * EPS32 * (1 + steps) * sizes


def _product(a: Tensor, b: Tensor) -> Near:
    a, b = a.detach().double(), b.detach().double()
    return Near(a @ b, _noise((a.square() @ b.square()).sqrt(), a.shape[-1]))


def router_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor | None = None
) -> dict[str, Near]:
    """y, and with an upstream gradient that of each input."""
    flat = x.detach().reshape(-1, x.shape[-1])
    y = _product(flat, weight.t())
    if bias is not None:
        y = Near(y.truth + bias.detach().double(), y.noise + EPS32 * bias.detach().double().abs())
    shape = (*x.shape[:-1], weight.shape[0])
    found = {"y": Near(y.truth.view(shape), (y.noise + EPS32 * y.truth.abs()).view(shape))}
    if dy is None:
        return found
    d = dy.detach().reshape(-1, weight.shape[0])
    dx = _product(d, weight)
    found["dx"] = Near(dx.truth.view(x.shape), dx.noise.view(x.shape))
    found["dweight"] = _product(d.t(), flat)
    if bias is not None:
        ones = torch.ones(1, len(d), dtype=torch.float64)
        dbias = _product(ones, d)
        found["dbias"] = Near(dbias.truth[0], dbias.noise[0])
    return found
