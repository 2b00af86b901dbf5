"""Program of each rank in `test_two_ranks_match_the_unchanged_model`: with Weft and without, under DDP and FSDP2.

`torchrun --nproc-per-node 2 ranks_adopt.py` prints a line for each way: the distance of the gradients, and how often
logits were computed; and a line for each way to read logits on one rank alone.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
import weft.integrations
from tests.integrations.tiny import batch, build, distance
from weft.integrations.logits import DeferredLogits

computed_count = 0


def count(self: DeferredLogits, make: Any = DeferredLogits.tensor) -> Any:
    global computed_count
    computed_count += self.computed is None and self.origin is None
    return make(self)


DeferredLogits.tensor = count  # type: ignore[method-assign]


def sharded(model: Any, *, head: bool = False, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head:
        fully_shard(model.lm_head, **options)
    return fully_shard(model, **options)


def ways(mesh: Any) -> dict[str, Any]:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def checkpointed(model: Any) -> Any:
        model.gradient_checkpointing_enable()
        return sharded(model, mesh=mesh)

    return {
        "ddp": DistributedDataParallel,
        "fsdp2": lambda model: sharded(model, mesh=mesh),
        "fsdp2, checkpointed": checkpointed,
        "fsdp2, head apart": lambda model: sharded(model, mesh=mesh, head=True),
        "fsdp2, norm and head as one": lambda model: as_one(model, mesh),
        "fsdp2, head apart, bf16": lambda model: sharded(model, mesh=mesh, head=True, mp_policy=bf16),
    }


def as_one(model: Any, mesh: Any) -> Any:
    """Shard the last norm and the head together, as torchtitan does: each must be called once."""
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def read_alone(wrap: Any, inputs: dict[str, Any], when: str) -> str:
    """Return the outcome of a read on rank 0 while rank 1 continues."""
    model = build("qwen3")
    weft.integrations.apply(model, strict=True)
    model = wrap(model)
    output = model(**inputs, use_cache=False)
    if when == "after backward":
        output.loss.backward()
    result = "nothing"
    if dist.get_rank() == 0:
        try:
            result = f"logits {tuple(output.logits.argmax(-1).shape)}"
        except RuntimeError as error:
            result = str(error)
    if when == "before backward":
        output.logits.tensor()  # on both ranks
        output.loss.backward()
    return result


def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model(**inputs, use_cache=False).loss.backward()
    return {
        name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = {name: value.chunk(world)[rank] for name, value in batch(samples=4).items()}
    for name, wrap in ways(init_device_mesh("cpu", (world,))).items():
        global computed_count
        computed_count = 0
        wanted = gradients(wrap(build("qwen3")), inputs)
        model = build("qwen3")
        weft.integrations.apply(model, strict=True)
        error = distance(gradients(wrap(model), inputs), wanted)
        if rank == 0:
            print(f"{name}: {error:.2e} apart, logits made {computed_count} times", flush=True)
    mesh = init_device_mesh("cpu", (world,))
    reads = {
        "head apart": lambda model: sharded(model, mesh=mesh, head=True),
        "head in the root": lambda model: sharded(model, mesh=mesh),
    }
    for (name, wrap), when in itertools.product(reads.items(), ("before backward", "after backward")):
        result = read_alone(wrap, inputs, when)
        if rank == 0:
            print(f"read alone, {name}, {when}: {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
