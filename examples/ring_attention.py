"""Context parallelism: one long sequence over several ranks, with attention in a ring.

    torchrun --nproc-per-node 4 examples/ring_attention.py

Each rank has a chunk of the queries and, at first, the keys and values of the same chunk. In every step it computes
attention over its current keys, merges the result with its previous ones, and passes the keys on to the next rank. The
causal mask applies only within a rank's own chunk: earlier chunks are fully visible, and later ones not at all.

Backward is autograd's: gradients flow through the merge into the lse of every step, which `weft.attention` accepts, and
keys travel back the way they came. The result is compared with attention over the complete sequence on one rank.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft


class PassOn(torch.autograd.Function):
    """Send a tensor to the next rank and receive the previous one's; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _exchange(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _exchange(grad, -1)


def _exchange(x: Tensor, step: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank + step) % world),
            dist.P2POp(dist.irecv, received, (rank - step) % world),
        ]
    )
    for each in work:
        each.wait()
    return received


def ring_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of a rank's queries [batch, heads, tokens, dim] over the keys of all ranks up to it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    keys = torch.stack([key, value])
    out = lse = None
    for step in range(world):
        if step:
            keys = PassOn.apply(keys)
        owner = (rank - step) % world
        if owner > rank:
            continue
        part = weft.attention(query, *keys, is_causal=owner == rank, return_lse=True)
        assert isinstance(part, weft.Attention)
        if out is None or lse is None:
            out, lse = part.out.float(), part.lse
        else:
            out, lse, _ = weft.merge_attention([out, part.out], [lse, part.lse])
    assert out is not None
    # A rank that needs no more keys still passes them on; this makes its gradient wait for theirs.
    return out.to(query.dtype) + 0.0 * keys.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=512, help="length of the whole sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("there are no ranks: run torchrun --nproc-per-node 4 examples/ring_attention.py")
    if options.tokens % int(os.environ["WORLD_SIZE"]):
        parser.error(f"--tokens {options.tokens} is not a multiple of the {os.environ['WORLD_SIZE']} ranks")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, options.tokens, options.dim)
    dtype = getattr(torch, options.dtype)
    complete = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, generator=generator).to(device, dtype)
    chunk = slice(rank * options.tokens // world, (rank + 1) * options.tokens // world)
    local = [x.detach()[:, :, chunk].requires_grad_() for x in complete]

    reference = weft.attention(*complete, is_causal=True)
    gradients = torch.autograd.grad(reference, complete, upstream)
    result = ring_attention(*local)
    local_gradients = torch.autograd.grad(result, local, upstream[:, :, chunk])

    for name, got, expected in zip(
        ("out", "dquery", "dkey", "dvalue"),
        (result, *local_gradients),
        (reference[:, :, chunk], *(g[:, :, chunk] for g in gradients)),
        strict=True,
    ):
        error = ((got - expected).abs().max() / expected.abs().max()).detach()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name:8} largest difference from one rank {error.item():.1e}")
        assert error < (1e-5 if dtype is torch.float32 else 2e-2), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
