"""Script of one rank for `test_linear_sample.py`: draws from a vocabulary in uneven shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft

CUTS = (0, 131, 300)


def inputs() -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(20, 40, generator=generator), torch.randn(300, 40, generator=generator) / 4
    noise = {"seed": torch.arange(20), "step": 7}
    return {"hidden": hidden.bfloat16(), "weight": weight.bfloat16()}, {"temperature": 0.8, **noise}


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    tensors, options = inputs()
    hidden, weight = tensors["hidden"], tensors["weight"][CUTS[rank] : CUTS[rank + 1]].clone()
    shard = weft.VocabShard(dist.group.WORLD, CUTS[rank], CUTS[rank + 1], 300)
    tokens, logprobs = weft.linear_sample(hidden, weight, shard=shard, **options)
    wanted = weft.linear_logprobs(hidden, weight, tokens, temperature=0.8, shard=shard)

    def sample(hidden: Tensor, weight: Tensor) -> Any:
        return weft.linear_sample(hidden, weight, shard=shard, **options)

    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")(hidden, weight)
    results = {"tokens": tokens, "logprobs": logprobs, "wanted": wanted}
    results |= {"compiled tokens": compiled.tokens, "compiled logprobs": compiled.logprobs}
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()
