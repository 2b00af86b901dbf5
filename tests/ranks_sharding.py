"""What each rank runs for `test_sharding`: `python ranks_sharding.py RANK WORLD DIRECTORY` saves what it found there.

Every op that says how it is sharded is called with the arguments of its workloads as DTensors, once for each dimension
that can be cut by what it says, and compared with the op that is called with whole tensors. `CASES` are calls of
functions, eager and compiled.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accuracy import check
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import weft
from weft.runtime import Fields, Op
from weft.runtime.sharding import dimensions
from weft.workloads import Workload, distinct

ROWS = 12

# ---- every op, by what it says -----------------------------------------------------------------------


def workloads() -> Iterator[Workload]:
    """For each op that can be sharded, and each set of its options, the one with the shortest rows."""
    found: dict[tuple[str, str], Workload] = {}
    for w in distinct():
        key = (w.op, w.options)
        if (
            weft.catalogue[w.op].sharding is not None
            and w.cols > 1
            and (key not in found or w.cols < found[key].cols)
        ):
            found[key] = w
    return iter(found.values())


class Called(Exception):
    """Carries the arguments of an op out of the function that calls it."""


def arguments_of(workload: Workload, rows: int) -> Any:
    """What the op of a workload is called with."""
    op = weft.catalogue[workload.op]
    kind = type(op)
    call = kind.__call__

    def intercepted(self: Any, *args: Any) -> Any:
        if self is op:
            raise Called(args)
        return call(self, *args)

    kind.__call__ = intercepted  # type: ignore[method-assign]
    try:
        workload.make(rows=rows).requiring_grad()()
    except Called as called:
        (a,) = called.args[0] if isinstance(op, Op) else (op.arguments(*called.args[0]),)
        return a
    finally:
        kind.__call__ = call  # type: ignore[method-assign]
    raise AssertionError(f"{workload} does not call {workload.op}")


class Problem:
    """An op with arguments, of which `tensors` are those that can be DTensors."""

    def __init__(self, workload: Workload, rows: int) -> None:
        self.op = weft.catalogue[workload.op]
        a = arguments_of(workload, rows)
        assert self.op.sharding is not None
        self.sharding = self.op.sharding(a)
        self.fields = Fields(type(a)) if isinstance(self.op, Op) else None
        self.arguments = (
            dict(zip(self.fields.names, self.fields.flatten(a), strict=True)) if self.fields else a._asdict()
        )
        first, described = next(iter(self.sharding.inputs.items()))
        leading = [str(i) for i in range(self.arguments[first].dim() - len(described.split()) + 1)]
        self.tensors: dict[str, Tensor] = {}
        self.dims: dict[str, list[str]] = {}
        self.joined: dict[
            str, int
        ] = {}  # of tensors that an op takes with fewer dimensions than a caller has
        for name, described in self.sharding.inputs.items():
            t = self.arguments[name]
            if t is None:
                continue
            before, bracket, _ = described.partition(")")
            if bracket:
                lead = dimensions(before, leading, 0)
                t = t.unflatten(
                    0, [1 if dim == "_" else self.arguments[first].shape[int(dim)] for dim in lead]
                )
                self.joined[name] = len(lead)
            self.tensors[name] = t.detach()
            self.dims[name] = dimensions(described, leading, t.dim())

    def cuts(self, world: int) -> list[str]:
        """The dimensions that can be sharded and have numbers for every rank."""
        whole = self.sharding.whole
        sizes: dict[str, int] = {}
        for name, t in self.tensors.items():
            for dim, size in zip(self.dims[name], t.shape, strict=True):
                if dim != "_" and dim not in whole and not (dim.isdigit() and "..." in whole):
                    sizes[dim] = min(size, sizes.get(dim, size))
        return [dim for dim, size in sizes.items() if size >= world]

    def run(
        self,
        dtype: torch.dtype | None = None,
        place: Callable[[Tensor, list[str]], Tensor] = lambda t, dims: t,
        place_like: Callable[[Tensor, Tensor], Tensor] = lambda t, like: t,
    ) -> dict[str, Tensor]:
        """Outputs and gradients, computed with floating-point tensors of a dtype."""
        given, taken = {}, {}
        for name, t in self.tensors.items():
            t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
            leaf = given[name] = place(t.clone(), self.dims[name]).requires_grad_(
                self.arguments[name].requires_grad
            )
            apart = name not in self.joined or isinstance(leaf, DTensor)
            taken[name] = leaf if apart else leaf.flatten(0, self.joined[name] - 1)
        arguments = {
            name: dtype if dtype is not None and value is torch.bfloat16 else value
            for name, value in {**self.arguments, **taken}.items()
        }
        if self.fields is None:
            outputs = dict(zip(self.sharding.outputs, self.op(*arguments.values()), strict=True))
        else:
            found = self.op.outputs.flatten(self.op(self.fields.build(*arguments.values())))
            outputs = {name: t for name, t in zip(self.op.outputs.names, found, strict=True) if t is not None}
        generator = torch.Generator().manual_seed(3)
        made = [t for t in outputs.values() if t.requires_grad]
        upstream = [place_like(torch.randn(t.shape, generator=generator).to(t.dtype), t) for t in made]
        leaves = {name: t for name, t in given.items() if t.requires_grad}
        if made and leaves:
            grads = torch.autograd.grad(made, list(leaves.values()), upstream, allow_unused=True)
            outputs |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
        # Nobody reads what stands for a quantised result.
        return {name: t.detach() for name, t in outputs.items() if t.dim() == 0 or any(t.stride())}


def placements(dims: list[str], cuts: list[str | None]) -> list[Placement]:
    return [Shard(dims.index(cut)) if cut in dims else Replicate() for cut in cuts]


def placed_like(t: Tensor, like: Tensor) -> Tensor:
    """A gradient of a result: whole where the ranks add up."""
    assert isinstance(like, DTensor)
    wanted = [Replicate() if p.is_partial() else p for p in like.placements]
    return distribute_tensor(t, like.device_mesh, wanted, src_data_rank=None)


def compare(problem: Problem, cuts: list[str | None], mesh: DeviceMesh, exactly: bool) -> None:
    """Whole tensors against shards. Kernels give the same bits, but where ranks add up; sums are compared with float64,
    and computed by the reference in fp32, so that nothing else is rounded on the way."""

    def place(t: Tensor, dims: list[str]) -> Tensor:
        return distribute_tensor(t, mesh, placements(dims, cuts), src_data_rank=None)

    dtype = None if exactly else torch.float32
    whole = problem.run(dtype)
    found = problem.run(dtype, place, placed_like)
    assert found.keys() == whole.keys(), f"{list(found)}, and of whole tensors {list(whole)}"
    truth: dict[str, Tensor] = {}
    for name, t in found.items():
        if not isinstance(t, DTensor):
            assert problem.sharding.outputs.get(name) is None, name
            if cuts == ["0"] and name.startswith(("copy", "result_")):
                compare_copies(t, whole[name])
            continue
        full = t.full_tensor()
        summed = any(p.is_partial() and p.reduce_op == "sum" for p in t.placements)
        assert not summed or cuts != [None], f"{name} of replicated tensors is a partial sum"
        if not full.is_floating_point() or (exactly and not summed):
            assert torch.equal(full, whole[name]), name
        elif not exactly and problem.op.name != "quantize":
            truth = truth or problem.run(torch.float64)
            # Sums of a few dozen terms in fp32, of terms that are right to a few ulp.
            check(full, truth[name], 4e-6 * truth[name].abs().max().item())


def compare_copies(shard: Tensor, whole: Tensor) -> None:
    """Codes and scales of the ranks' rows, next to each other."""
    mine, all_of_them = (
        t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (shard, whole)
    )
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    dims = [i for i, size in enumerate(shard.shape) if size != whole.shape[i]]
    assert torch.equal(
        torch.cat(parts, dims[0]) if dims else mine, all_of_them
    )  # one scale of all is on every rank


def compare_ops(mesh: DeviceMesh, square: DeviceMesh | None) -> dict[str, str]:
    """What was wrong with each case; nothing, if all is well."""
    world = mesh.size()
    found: dict[str, str] = {}
    import time

    for workload in workloads():
        t0 = time.time()
        problem = Problem(workload, ROWS)
        if problem.sharding.block > 1:
            problem = Problem(workload, problem.sharding.block * world)
        if not any(problem.sharding.outputs.values()):
            continue  # its results belong to the rank
        free = problem.cuts(world)
        for cut in (None, *free):
            with weft.backend("reference"):
                found[f"{workload} {cut}"] = attempt(lambda: compare(problem, [cut], mesh, False))  # noqa: B023
        t1 = time.time()
        for cut in free[:1]:
            found[f"{workload} {cut}, kernels"] = attempt(lambda: compare(problem, [cut], mesh, True))  # noqa: B023
        t2 = time.time()
        print(workload, round(t1 - t0, 2), round(t2 - t1, 2), flush=True)
        if square is not None and len(free) > 1:
            with weft.backend("reference"):
                found[f"{workload} {free[:2]}"] = attempt(
                    lambda: compare(problem, [*free[:2]], square, False)
                )  # noqa: B023
    return found


def attempt(what: Callable[[], Any]) -> str:
    try:
        what()
    except Exception:
        return traceback.format_exc()
    return ""


def main(rank: int, world: int, directory: Path) -> None:
    import time

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    t0 = time.time()
    found: dict[str, Any] = {"ops": compare_ops(mesh, square)}
    print("ops", time.time() - t0, len(found["ops"]))
    for k, v in found["ops"].items():
        if v:
            print(k, v[-400:])
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
