"""Script that each rank of `test_gradients` runs: `python ranks_gradients.py RANK WORLD DIRECTORY` saves its results
there. Every rank draws the same full tensors and takes its shard of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft
from weft.lab.families.multi_tensor import STATISTICS

MAX_NORM = 0.5
STEPS = 3

# ---- placements ----------------------------------------------------------------------------------------

# A shape and its placements on a mesh: a number is a sharded dimension, "r" is replicated, "p" partial.
Placed = tuple[tuple[int, ...], tuple[int | str, ...]]

PLACEMENTS: dict[str, tuple[Placed, ...]] = {
    "sharded": (((8, 6), (0,)), ((3, 10), (1,)), ((12,), (0,))),
    # Fewer rows than ranks: shards are empty at the start, in the middle and at the end.
    "empty shards": (((1, 5), (0,)), ((2, 3), (0,)), ((8,), (0,)), ((3, 1), (1,))),
    "replicated": (((8, 6), ("r",)), ((5,), ("r",))),
    "partial": (((8, 6), ("p",)), ((5,), ("p",))),
    "of every kind": (((8, 6), (0,)), ((7,), ("r",)), ((4, 3), ("p",)), ((9, 2), (1,)), ((1,), (0,))),
}
ON_TWO_DIMENSIONS: dict[str, tuple[Placed, ...]] = {
    "both of one": (((8, 6), (0, 0)), ((3, 2), (0, 0))),
    "one of each": (((8, 6), (0, 1)), ((5, 3), (1, 0))),
    "one and replicas": (((8, 6), (0, "r")), ((5, 3), ("r", 1)), ((7,), ("r", "r"))),
    "one and partial": (((8, 6), ("p", 1)), ((5, 3), (0, "p")), ((7,), ("p", "p"))),
    "all together": (
        ((8, 6), (0, 1)),
        ((5, 3), (0, "r")),
        ((7,), ("r", 0)),
        ((2, 2), ("r", "p")),
        ((4,), ("r", "r")),
    ),
}


def placements_of(world: int) -> dict[str, tuple[Placed, ...]]:
    return PLACEMENTS | (ON_TWO_DIMENSIONS if world == 4 else {})


def full_tensors(placed: tuple[Placed, ...]) -> list[Tensor]:
    """Return the full tensors, some elements of which are zero, and one tensor that is not distributed."""
    generator = torch.Generator().manual_seed(7)
    shapes = [*(shape for shape, _ in placed), (11,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    for t in tensors:
        t.flatten()[::5] = 0.0
    return tensors


def distributed(placed: tuple[Placed, ...], mesh: Any) -> list[Tensor]:
    """Return this rank's shards; the first is the gradient of a parameter, the last is the same on all ranks."""
    tensors = full_tensors(placed)
    shards: list[Tensor] = []
    for t, (_, placements) in zip(tensors[:-1], placed, strict=True):
        torch_placements = [Shard(h) if isinstance(h, int) else Replicate() for h in placements]
        shard = distribute_tensor(t, mesh, torch_placements)
        if "p" in placements:
            # Terms are larger than their sum, which is exact.
            factor = 1.0
            for dim, h in enumerate(placements):
                if h == "p":
                    rank = mesh.get_local_rank(dim)
                    factor *= 2.0 if rank == 0 else -1.0 if rank == 1 else 0.0
            terms = [Partial() if h == "p" else c for h, c in zip(placements, torch_placements, strict=True)]
            shard = DTensor.from_local(
                shard.to_local() * factor, mesh, terms, shape=shard.shape, stride=shard.stride()
            )
        shards.append(shard)
    parameter = nn.Parameter(torch.zeros_like(shards[0]))
    parameter.grad = shards[0]
    return [parameter, *shards[1:], tensors[-1]]


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Record the groups of the collectives that Weft starts."""
    groups: list[Any] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> Any:
        groups.append(group)
        return original(tensor, op, group)

    dist.all_reduce = all_reduce
    try:
        yield groups
    finally:
        dist.all_reduce = original


def statistics(placed: tuple[Placed, ...], mesh: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for what, statistic in STATISTICS.items():
        with counted() as groups:
            results[what] = statistic(distributed(placed, mesh))
        assert len(groups) == len(set(groups)), "expected one collective per group"
    tensors = distributed(placed, mesh)
    results["clip norm"] = weft.clip_grads_(iter(tensors), MAX_NORM)
    results["norm after"] = weft.grad_norm(tensors)
    gradients = [tensors[0].grad, *tensors[1:]]
    results["clipped"] = [t.full_tensor() if isinstance(t, DTensor) else t for t in gradients]
    results["parameter"] = tensors[0].detach().full_tensor()  # type: ignore[attr-defined]
    return results


def compiled(placed: tuple[Placed, ...], mesh: Any) -> dict[str, Any]:
    """Clip as `statistics` does, under torch.compile without a graph break."""
    tensors = distributed(placed, mesh)
    gradients = [tensors[0].grad, *tensors[1:]]
    clip = torch.compile(
        lambda *gradients_: weft.clip_grads_(gradients_, MAX_NORM), fullgraph=True, backend="aot_eager"
    )
    norm = clip(*gradients)
    return {
        "clip norm": norm,
        "clipped": [t.full_tensor() if isinstance(t, DTensor) else t for t in gradients],
    }


# ---- models --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Model with parameters that do not divide evenly, one of a single element, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10)
        self.last = nn.Linear(10, 3)
        self.sink = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        result: Tensor = self.last(y) * self.sink
        return result


def block() -> Block:
    torch.manual_seed(3)
    return Block()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, 8, 10, generator=generator), torch.randn(2, 8, 3, generator=generator)


def train(model: nn.Module, clip: Callable[..., Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train a few steps with clipping; return the norms and the final parameters."""
    x, target = (t.to(dtype) for t in batch())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9, foreach=False)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        (y - target).square().mean().mul(20.0).backward()
        norm = clip(model.parameters(), MAX_NORM)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    parameters_ = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "norms": torch.stack(norms),
        "parameters": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters_.items()},
        "placements": {
            n: str(p.grad.placements)
            for n, p in model.named_parameters()
            if p.grad is not None and isinstance(p.grad, DTensor)
        },
    }


def sharded(mesh: Any) -> nn.Module:
    model = block()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(mesh: Any) -> nn.Module:
    """Build the model with tensor parallelism and a sequence-parallel norm, whose gradients are sums over ranks."""
    model = block()
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def both(mesh: Any) -> nn.Module:
    model = tensor_parallel(mesh["tp"])
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


BY_TORCH = (
    "fully_shard",
    "replicas that are sharded",
)  # torch clips only lists of DTensors on one mesh


def models_of(world: int) -> dict[str, Callable[[], nn.Module]]:
    def line(name: str) -> Any:
        return init_device_mesh("cpu", (world,), mesh_dim_names=(name,))

    models: dict[str, Callable[[], nn.Module]] = {
        "fully_shard": lambda: sharded(line("dp")),
        "tensor parallel": lambda: tensor_parallel(line("tp")),
    }
    if world == 4:
        models["replicas that are sharded"] = lambda: sharded(
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
        models["both"] = lambda: both(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return models


# ---- meshes and groups ---------------------------------------------------------------------------------


def stages(rank: int, world: int) -> dict[str, Any]:
    """Compute norms over two pipeline stages of half the ranks each, with differently sharded parameters. The norm over
    stages needs their group; a stage contributes one value, whether it has one kind of placement or three."""
    half = world // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "dp"))
    stage, dp, pp = rank // half, mesh["dp"], mesh.get_group("pp")
    if stage:
        tensors = [distribute_tensor(torch.full((4,), 2.0), dp, [Shard(0)])]
    else:
        tensors = [
            distribute_tensor(torch.full((3,), 1.0), dp, [Shard(0)]),
            distribute_tensor(torch.full((2,), 1.0), dp, [Replicate()]),
            torch.full((4,), 1.0),
        ]
    norm = weft.grad_norm(tensors, groups=(pp,))  # 16 + 3 + 2 + 4 = 25
    # Naming the mesh's own group changes nothing for DTensors, but declares plain tensors sharded: 4 on each rank.
    with_mesh_group = weft.grad_norm(tensors, groups=(dp.get_group(), pp))
    kinds = weft.grad_norm([weft.Shards(tensors, (pp,)), weft.Shards([torch.tensor([12.0])])])
    # A new group of the same ranks counts as the same group.
    new_groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))][stage]
    same_ranks = weft.grad_norm(tensors[:1], groups=(new_groups,))
    everyone = distribute_tensor(torch.full((4,), 2.0), init_device_mesh("cpu", (world,)), [Shard(0)])
    line = weft.grad_norm([everyone, torch.full((4,), 1.0)], groups=(dist.new_group(list(range(world))),))
    return {
        "norm": norm,
        "with the group of the mesh": with_mesh_group,
        "with others": kinds,
        "anew": same_ranks,
        "anew, of all ranks": line,
    }


def kinds_of_tensors(rank: int, world: int) -> tuple[list[Tensor], list[weft.Shards]]:
    """Return the full tensors and this rank's part: a tensor-parallel matrix, a replicated norm weight, one expert per
    rank, and a tensor that only the last rank has."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((8, 6), (33,), (world, 50), (9,))
    matrix, weight, experts, late = (torch.randn(shape, generator=generator) for shape in shapes)
    matrix[0], weight[::3], late[4] = 0.0, 0.0, 0.0
    experts = experts.bfloat16()
    rows = 8 // world
    groups = [dist.new_group([r]) for r in range(world)] if dist.is_initialized() else [None] * world
    everyone = dist.group.WORLD if dist.is_initialized() else None
    part = [
        weft.Shards(iter([matrix.clone()[rows * rank : rows * (rank + 1)]]), (everyone,)),
        weft.Shards([weight.clone()]),
        weft.Shards([None, experts[rank].clone()], (everyone, groups[rank])),
        weft.Shards([late.clone()] if rank == world - 1 else [], (everyone,)),
    ]
    return [matrix, weight, experts, late], part


def over_groups(rank: int, world: int) -> dict[str, Any]:
    """Compute statistics and clip over groups, without DTensors."""
    everyone = dist.group.WORLD

    def part() -> list[weft.Shards]:
        return [kind._replace(tensors=list(kind.tensors)) for kind in kinds_of_tensors(rank, world)[1]]

    results: dict[str, Any] = {what: statistic(part()) for what, statistic in STATISTICS.items()}
    kinds = part()
    results["clip norm"] = weft.clip_grads_(kinds, MAX_NORM)
    results["norm after"] = weft.grad_norm(kinds)
    results["clipped"] = [t for kind in kinds for t in kind.tensors if t is not None]
    results["before"] = [t for kind in part() for t in kind.tensors if t is not None]
    mine = torch.tensor([math.nan if rank == 1 else 2.0])
    results["of NaN"] = [weft.grad_norm([mine], order, groups=(everyone,)) for order in (1, 2, math.inf)]
    results["any NaN"] = weft.any_nonfinite([mine], groups=(everyone,))
    results["zeros of a rank's number"] = weft.count_zeros([torch.zeros(rank)], groups=(everyone,))
    results["huge"] = weft.grad_norm([torch.tensor([2.0**100])], groups=(everyone,))
    try:
        weft.clip_grads_([mine], 1.0, error_if_nonfinite=True, groups=(everyone,))
    except RuntimeError as error:
        results["error"] = str(error)
    return results


def refused(world: int) -> list[str]:
    """Return the error messages for unsupported placements, after checking that nothing was written."""
    mesh = init_device_mesh("cpu", (world,))
    messages = []
    plain = torch.full((3,), 5.0)
    largest = DTensor.from_local(torch.ones(2), mesh, [Partial("max")])
    try:
        weft.clip_grads_([plain, largest], 1.0)
    except ValueError as error:
        messages.append(str(error))
    assert torch.equal(plain, torch.full((3,), 5.0))
    assert weft.grad_norm([largest], math.inf) == 1.0
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        half = distribute_tensor(torch.ones(4), grid, [Shard(0), Replicate()])
        try:
            weft.grad_norm([half], groups=(dist.group.WORLD,))
        except ValueError as error:
            messages.append(str(error))
    return messages


def quantized(rank: int, world: int) -> dict[str, Any]:
    """Clip a DTensor with QTensor shards, and clip by a norm that torch computed as a DTensor."""
    mesh = init_device_mesh("cpu", (world,))
    generators = [torch.Generator().manual_seed(shard) for shard in range(world)]
    shards = [weft.quantize(torch.randn(4, 256, generator=generator), "1x128") for generator in generators]
    wanted = torch.cat([shard.dequantize() for shard in shards])
    q = DTensor.from_local(shards[rank], mesh, [Shard(0)])
    norm = weft.clip_grads_([q], MAX_NORM)
    parameter = nn.Parameter(distribute_tensor(torch.zeros(world * 2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.full((world * 2,), 3.0), mesh, [Shard(0)])
    by_torch = nn.utils.get_total_norm([parameter.grad])
    clipped = weft.clip_grads_([parameter], 1.0, norm=by_torch)
    return {
        "norm": norm,
        "numbers": wanted,
        "spec": q.to_local().spec,
        "after": weft.grad_norm([q]),
        "plain norm": type(clipped) is Tensor,
        "clipped": parameter.grad.full_tensor(),
    }


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    results: dict[str, Any] = {
        name: statistics(placed, line if len(placed[0][1]) == 1 else grid)
        for name, placed in placements_of(world).items()
    }
    if world == 2:
        results["compiled"] = compiled(PLACEMENTS["of every kind"], line)
    for name, make in models_of(world).items():
        results[name] = train(make(), weft.clip_grads_)
        if name in BY_TORCH:
            results[f"{name}, by torch"] = train(make(), nn.utils.clip_grad_norm_)
    results["groups"] = over_groups(rank, world)
    results["refused"] = refused(world)
    results["quantized"] = quantized(rank, world)
    results["stages"] = stages(rank, world)
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
