"""Program of each rank in `test_gather`: `python ranks_gather.py RANK WORLD DIRECTORY` saves its results there.

The first rank also computes the results of a single process, with which the test compares.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.utils.checkpoint import checkpoint

import weft.nn
from weft.nn.gather import is_gathered_quantized

HIDDEN = 256


@dataclass(frozen=True)
class Case:
    recipe: str = "fp8_block"
    gathered: bool = True  # as codes
    param_dtype: torch.dtype | None = None
    way: str = "fsdp"  # or ddp
    experts: bool = False
    checkpointed: bool = False
    reused: bool = False  # weights are quantized once a step


QUICK = {
    "plain": Case(gathered=False),
    "codes": Case(),
    "codes, checkpointed": Case(checkpointed=True),
    "ddp": Case(gathered=False, way="ddp"),
    "plain, reused": Case(gathered=False, reused=True),
}
SLOW = {
    "plain": Case(gathered=False, experts=True),
    "codes": Case(experts=True),
    "plain in bf16": Case(gathered=False, param_dtype=torch.bfloat16, experts=True),
    "codes for bf16": Case(param_dtype=torch.bfloat16, experts=True),
    "mxfp8": Case(recipe="mxfp8", experts=True),
}


class Block(nn.Module):
    """Converted layers, plus experts in slow cases, whose kernels take long to build."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.experts = weft.nn.Experts(2, HIDDEN, HIDDEN) if case.experts else None
        self.checkpointed = case.checkpointed

    def compute(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(x)))
        if self.experts is None:
            return x + h
        every = torch.arange(2, dtype=torch.int32).expand(len(x), 2)
        routing = weft.ops.Routing(torch.full((len(x), 2), 0.5), every, torch.full((2,), len(x)))
        return x + h + self.experts(h, routing)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)


def build_model(case: Case) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(Block(case), Block(case))
    weft.nn.convert(model, case.recipe)
    return model


def distributed(case: Case, mesh: Any, moved: list[int]) -> nn.Module:
    """Return the model on all ranks; FSDP2 appends the bytes that an all-gather yields to `moved`."""

    class Counted(DefaultAllGather):
        def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            moved.append(output_tensor.nbytes)
            return super().__call__(output_tensor, *args, **kwargs)

    model = build_model(case)
    if case.way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if case.gathered:
        report = weft.nn.gather_quantized(model)
        assert len(report.changed) == (8 if case.experts else 4), report
    policy = MixedPrecisionPolicy(param_dtype=case.param_dtype)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy).set_custom_all_gather(Counted())
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch(step: int) -> Tensor:
    """Return inputs [2, tokens, HIDDEN], one batch per rank."""
    return torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(step))


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run_alone(case: Case) -> dict[str, Any]:
    """Run two steps in one process, with gradients averaged over the batches of both ranks."""
    model = build_model(case)
    optimizer = optimizer_of(model)
    results: dict[str, Any] = {}
    for step in range(2):
        ys = [model(x) for x in batch(step)]
        results[f"y{step}"] = [y.detach() for y in ys]
        gradients = [torch.autograd.grad(loss_of(y), list(model.parameters())) for y in ys]
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return results | {"weights": model.state_dict()}


def run(case: Case, mesh: Any) -> dict[str, Any]:
    """Run the same two steps on this rank."""
    moved: list[int] = []
    model = distributed(case, mesh, moved)
    optimizer = optimizer_of(model)
    results: dict[str, Any] = {"moved": moved}
    with weft.reuse_weights() if case.reused else nullcontext():
        for step in range(2):
            y = model(batch(step)[mesh.get_local_rank()])
            results[f"y{step}"] = y.detach()
            loss_of(y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    results["weights"] = {
        name.removeprefix("module."): (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in state.items()
    }
    assert all(type(t) in (Tensor, nn.Parameter) for t in results["weights"].values())
    assert is_gathered_quantized(next(p for n, p in model.named_parameters() if "up" in n)) == case.gathered
    if case.way == "fsdp":  # a checkpoint of shards can be loaded
        model.load_state_dict({name: t * 0 + 1 for name, t in state.items()})
        assert all((p.full_tensor() == 1).all() for p in model.parameters())
    return results


def refused(mesh: Any) -> str:
    layer = weft.nn.Linear(128, 128, recipe="fp8_block")  # 64 rows for each rank
    weft.nn.gather_quantized(layer)
    fully_shard(layer, mesh=mesh)
    try:
        layer(torch.randn(4, 128))
    except ValueError as error:
        return str(error)
    return ""


def main(rank: int, world: int, directory: Path, *, slow: bool = False) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    cases, results = SLOW if slow else QUICK, {}
    if rank == 0:  # before the other rank starts, so that kernels are built once
        results["alone"] = {name: run_alone(case) for name, case in cases.items() if case.param_dtype is None}
    dist.barrier()
    results |= {name: run(case, mesh) for name, case in cases.items()}
    results["refused"] = refused(mesh)
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
