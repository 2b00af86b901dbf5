"""The loss head over two ranks, each with half of the vocabulary: once with plain tensors and once with DTensors.

    python examples/sharded_vocabulary.py

On GPUs, run the same lines under torchrun with the backend "nccl".
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import weft

RANKS, TOKENS, HIDDEN, VOCAB = 2, 64, 128, 4001  # an odd vocabulary: shards of 2001 and 2000 columns


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    head = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
    return hidden, head, torch.randint(VOCAB, (TOKENS,))


def rank_main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    hidden, head, target = problem()

    # Plain tensors: the rank declares which columns it holds.
    shard = weft.VocabShard.of(dist.group.WORLD, VOCAB)
    hidden.requires_grad_()
    local = head.chunk(RANKS)[rank].clone().requires_grad_()
    loss = weft.linear_cross_entropy(hidden, local, target, shard=shard, label_smoothing=0.1)
    loss.backward()

    # DTensors: their placements declare it.
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(head, mesh, [Shard(0)]).requires_grad_()
    inputs = distribute_tensor(hidden.detach(), mesh, [Replicate()]).requires_grad_()
    again = weft.linear_cross_entropy(inputs, sharded, target, label_smoothing=0.1)
    again.backward()

    expected = weft.linear_cross_entropy(hidden.detach(), head, target, label_smoothing=0.1)
    if rank == 0:
        print(f"one process       {expected.item():.7f}")
        print(f"two ranks         {loss.item():.7f}   the gradient of {tuple(local.grad.shape)} weights here")
        print(f"two, as DTensors  {again.full_tensor().item():.7f}   {sharded.grad.placements}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(rank_main, (f"{directory}/rendezvous",), RANKS)
