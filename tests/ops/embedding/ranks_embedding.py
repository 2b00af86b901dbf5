"""Script of one rank for `test.py`: embeddings of a vocabulary in uneven shards, and of DTensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import weft

CUTS = (0, 5, 31)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 31, (6, 10), generator=generator)
    return ids, torch.randn(31, 64, generator=generator), torch.randn(6, 10, 64, generator=generator)


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    ids, weight, dy = inputs()
    part = weight[CUTS[rank] : CUTS[rank + 1]].clone().requires_grad_()
    shard = weft.VocabShard(dist.group.WORLD, CUTS[rank], CUTS[rank + 1], 31)
    y = weft.embedding(ids, part, scale=3.0, shard=shard)
    y.backward(dy)
    results = {"y": y.detach(), "dweight": part.grad}
    mesh = init_device_mesh("cpu", (world,))
    whole = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    y = weft.embedding(distribute_tensor(ids, mesh, [Shard(0)]), whole, scale=3.0)
    y.backward(distribute_tensor(dy, mesh, [Shard(0)]))
    results |= {"mesh y": y.full_tensor().detach(), "mesh dweight": whole.grad.full_tensor()}
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()
