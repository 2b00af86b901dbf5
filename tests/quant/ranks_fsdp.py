"""Script that each rank of `test_qtensor` runs: `python ranks_fsdp.py RANK WORLD DIRECTORY` saves its results there.

`run_alone` computes the expected results.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft import QTensor

HIDDEN = 256


@dataclass(frozen=True)
class Case:
    format: str = "1x128"
    columnwise: bool = False
    trained: bool = False
    experts: int = 0
    param_dtype: torch.dtype | None = None
    rows: int = 512
    offloaded: bool = False


CASES = {
    "1x128": Case(),
    "1x128, trained": Case(trained=True),
    "1x128, both copies": Case(columnwise=True),
    "128x128": Case("128x128", columnwise=True, trained=True),
    "mxfp8": Case("mx", columnwise=True),
    "nvfp4": Case("nvfp4", columnwise=True),
    "nvfp4, rotated": Case("e2m1:nvfp4:te:hadamard-columnwise", columnwise=True),
    "nvfp4 in squares": Case("nvfp4_16x16", columnwise=True, trained=True),
    "one scale": Case("tensor", columnwise=True),
    "row": Case("e4m3:row:deepgemm", columnwise=True),
    "int8": Case("int8:row:vllm"),
    "experts": Case("128x128", columnwise=True, experts=4),
    "mixed precision": Case("128x128", param_dtype=torch.bfloat16),
    "rows that scales pad": Case(rows=6),
    "offloaded": Case("tensor", offloaded=True),
}
REFUSED = {"a block on two ranks": Case("128x128", rows=192), "uneven": Case(rows=5)}


class Block(nn.Module):
    """Quantized weight between two plain layers, dequantized once explicitly and once by torch."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (case.experts, case.rows, HIDDEN) if case.experts else (case.rows, HIDDEN)
        values = torch.randn(shape, generator=generator) / 16
        q = weft.quantize(values, case.format, columnwise=case.columnwise)
        self.weight = nn.Parameter(q, requires_grad=case.trained)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(case.rows, HIDDEN)
        for plain in (*self.first.parameters(), *self.last.parameters()):
            plain.data = torch.randn(plain.shape, generator=generator) / 16

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, QTensor)
        x = self.first(x)
        y = x @ self.weight.dequantize().transpose(-1, -2)
        y = y + torch.matmul(x, self.weight.transpose(-1, -2))
        return self.last((y.sum(0) if y.dim() == 3 else y) / 8)


def sharded(case: Case, mesh: Any, seed: int, moved: list[int]) -> nn.Module:
    """Build the model under FSDP2; each all-gather appends its number of bytes to `moved`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Counted(DefaultAllGather):
        def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            moved.append(output_tensor.nbytes)
            return super().__call__(output_tensor, *args, **kwargs)

    model = build_model(case, seed)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=case.param_dtype)}
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if case.offloaded else OffloadPolicy()
    for block in model:
        fully_shard(block, **options).set_custom_all_gather(Counted())
    return fully_shard(model, **options)


def build_model(case: Case, seed: int) -> nn.Sequential:
    return nn.Sequential(Block(case, seed), Block(case, seed + 1))


def batch(step: int) -> Tensor:
    """Return the inputs [2, tokens, HIDDEN] of both ranks."""
    return torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(step))


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def run_alone(case: Case) -> dict[str, Any]:
    """Run two steps in one process; return both ranks' results, and gradients averaged over ranks, as FSDP does."""
    model = build_model(case, 1)
    weight = model[0].weight.detach().clone()
    model.to(case.param_dtype)
    trained = {f"d{name}": p for name, p in model.named_parameters() if p.requires_grad}
    results: dict[str, Any] = {name: torch.zeros(p.shape) for name, p in trained.items()}
    for step in range(2):
        ys = [model(x.to(case.param_dtype)) for x in batch(step)]
        results[f"y{step}"] = [y.detach() for y in ys]
        gradients = [torch.autograd.grad(loss_of(y), list(trained.values())) for y in ys]
        for name, first, second in zip(trained, *gradients, strict=True):
            results[name] += (first + second) / 2
    return results | {"weight": weight}


def run(case: Case, mesh: Any) -> dict[str, Any]:
    """Run this rank's two steps; return results, gradients, and the parameter sharded, gathered and reloaded."""
    moved: list[int] = []
    model = sharded(case, mesh, 1, moved)
    results: dict[str, Any] = {"moved": moved}
    for step in range(2):
        y = model(batch(step)[mesh.get_local_rank()])
        results[f"y{step}"] = y.detach()
        loss_of(y).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"d{name}"] = parameter.grad.full_tensor()
    weight = model[0].weight
    results |= {"shard": weight.to_local().detach().clone(), "full_tensor": weight.full_tensor().detach()}
    other = sharded(case, mesh, 2, [])
    model.load_state_dict(other.state_dict())
    model[0].unshard()
    results["loaded"] = model[0].weight.detach()
    return results


def refused(case: Case, mesh: Any) -> str:
    try:
        run(case, mesh)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    results: dict[str, Any] = {name: run(case, mesh) for name, case in CASES.items()}
    results |= {name: refused(case, mesh) for name, case in REFUSED.items()}
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
