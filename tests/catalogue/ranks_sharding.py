"""What each rank runs for `test_sharding`: `python ranks_sharding.py RANK WORLD DIRECTORY` saves what it found there.

Every op that says how it is sharded is called with the arguments of its workloads as DTensors, once for each dimension
that can be cut by what it says, and compared with the op that is called with whole tensors: by the reference, and by
kernels for one workload of each kind, or for every one of them. `CALLS` are calls of public functions, `REFUSED` those
that cannot be sharded.
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

sys.path.append(str(Path(__file__).parents[2] / "loom" / "tests"))

from triton_loom.testing import check

import weft
from weft import QTensor
from weft.lab.families import Workload, distinct
from weft.runtime import Op
from weft.runtime.sharding import dimensions

ROWS = 12


def placements(dims: list[str], cuts: list[str | None]) -> list[Placement]:
    return [Shard(dims.index(cut)) if cut in dims else Replicate() for cut in cuts]


def placed_like(t: Tensor, like: Tensor) -> Tensor:
    """A gradient of a result: whole where the ranks add up."""
    assert isinstance(like, DTensor)
    wanted = [Replicate() if p.is_partial() else p for p in like.placements]
    return distribute_tensor(t, like.device_mesh, wanted, src_data_rank=None)


def is_summed(t: DTensor) -> bool:
    return any(p.is_partial() and p.reduce_op == "sum" for p in t.placements)


def check_sum(t: DTensor, truth: Tensor) -> None:
    """What ranks add up in fp32: a few dozen terms that are right to a few ulp, and are as large as the largest."""
    check(t.full_tensor(), truth, 4e-6 * truth.abs().max().item())


# ---- every op, by what it says -----------------------------------------------------------------------


def workloads() -> Iterator[Workload]:
    """For each op that can be sharded, and each set of its options, the one with the shortest rows."""
    found: dict[tuple[str, str], Workload] = {}
    for w in distinct():
        key = (w.op, w.options)
        if (
            weft.catalogue[w.op].shard is not None
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
    call = Op.__call__

    def intercepted(self: Any, a: Any) -> Any:
        if self is op:
            raise Called(a)
        return call(self, a)

    Op.__call__ = intercepted  # type: ignore[method-assign]
    try:
        workload.make(rows=rows).requiring_grad()()
    except Called as called:
        (a,) = called.args
        return a
    finally:
        Op.__call__ = call  # type: ignore[method-assign]
    raise AssertionError(f"{workload} does not call {workload.op}")


class Problem:
    """An op with arguments, of which `tensors` are those that can be DTensors."""

    def __init__(self, workload: Workload, rows: int) -> None:
        self.op: Any = weft.catalogue[workload.op]
        a = arguments_of(workload, rows)
        self.sharding = self.op.shard(a)
        self.fields = self.op.arguments
        self.arguments = dict(zip(self.fields.names, self.fields.flatten(a), strict=True))
        first = next(name for name in self.sharding.inputs if self.arguments[name] is not None)
        shape = self.arguments[first].shape
        leading = [str(i) for i in range(len(shape) - len(self.sharding.inputs[first].split()) + 1)]
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
                t = t.unflatten(0, [1 if dim == "_" else shape[int(dim)] for dim in lead])
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
        leaves = {}
        arguments = {
            name: dtype if dtype is not None and value is torch.bfloat16 else value
            for name, value in self.arguments.items()
        }
        for name, t in self.tensors.items():
            t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
            leaf = place(t.clone(), self.dims[name]).requires_grad_(self.arguments[name].requires_grad)
            if leaf.requires_grad:
                leaves[name] = leaf
            apart = name not in self.joined or isinstance(leaf, DTensor)
            arguments[name] = leaf if apart else leaf.flatten(0, self.joined[name] - 1)
        outputs = self.op(self.fields.build(*arguments.values()))
        found = dict(zip(self.op.outputs.names, self.op.outputs.flatten(outputs), strict=True))
        found = {name: t for name, t in found.items() if t is not None}
        generator = torch.Generator().manual_seed(3)
        made = [t for t in found.values() if t.requires_grad]
        upstream = [place_like(torch.randn(t.shape, generator=generator).to(t.dtype), t) for t in made]
        if made and leaves:
            grads = torch.autograd.grad(made, list(leaves.values()), upstream, allow_unused=True)
            found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
        # Nobody reads what stands for a quantised result.
        return {name: t.detach() for name, t in found.items() if t.dim() == 0 or any(t.stride())}


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
        elif not t.is_floating_point() or not is_summed(t):
            # The reference may add up in another order, as a product of fewer rows does.
            if exactly or not t.is_floating_point():
                assert torch.equal(t.full_tensor(), whole[name]), name
        elif not exactly:
            truth = truth or problem.run(torch.float64)
            check_sum(t, truth[name])


def compare_copies(shard: Tensor, whole: Tensor) -> None:
    """Codes and scales of the ranks' rows, next to each other; one scale of all rows is on every rank."""
    mine, of_all = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (shard, whole))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    dims = [i for i, size in enumerate(shard.shape) if size != whole.shape[i]]
    assert torch.equal(torch.cat(parts, dims[0]) if dims else mine, of_all)


def compare_ops(mesh: DeviceMesh, square: DeviceMesh | None, every: bool) -> dict[str, str]:
    """What was wrong with each case; nothing, if all is well. In a square, both dimensions of the mesh cut something:
    of each op, the first workload. By kernels runs the first workload of each op for each height of the blocks of its
    quantised results, since placing tensors does not depend on more, or every workload."""
    world = mesh.size()
    found: dict[str, str] = {}
    seen = set()
    by_kernels = set()
    for workload in workloads():
        problem = Problem(workload, ROWS)
        block = problem.sharding.block
        if block > 1:
            problem = Problem(workload, block * world)
        free = problem.cuts(world)
        if free and square is None and (every or (workload.op, block) not in by_kernels):
            by_kernels.add((workload.op, block))
            found[f"{workload} {free[:1]}, by kernels"] = attempt(compare, problem, free[:1], mesh, True)
        if not free or block > 1 or (square is not None and workload.op in seen):
            continue
        seen.add(workload.op)
        tried = [([cut], mesh) for cut in free] if square is None else [([free[0], free[-1]], square)]
        with weft.backend("reference"):
            for cuts, over in tried:
                found[f"{workload} {cuts}"] = attempt(compare, problem, cuts, over, False)
    return found


def attempt(what: Callable[..., Any], *args: Any) -> str:
    """Nothing, or what went wrong."""
    try:
        what(*args)
    except Exception:
        return traceback.format_exc()
    return ""


# ---- functions, as they are called ---------------------------------------------------------------------

BATCH, TOKENS, WIDTH, EXPERTS = 4, 8, 64, 8
ALWAYS, BY_NIGHT = "always", "by night"


@dataclass(frozen=True)
class Call:
    """A function, the dimensions and sizes of its tensors, other arguments, and what is cut."""

    function: Callable[..., Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    options: dict[str, Any] = field(default_factory=dict)
    cuts: tuple[str | None, ...] = ("b", "s", None)
    exact: bool = True  # no result depends on what ranks add up
    compiled: str = ""  # as well: ALWAYS, one call of each op and one that quantises, or BY_NIGHT

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        return {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, (_, shape) in self.tensors.items()
        }


def adaln(x: Tensor, modulation: Tensor) -> Any:
    return weft.layer_norm(x, modulation=modulation)


def adaln_of_rows(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
    return weft.layer_norm(x, modulation=(scale, shift))


def quantized(x: Tensor, weight: Tensor, **options: Any) -> Any:
    """In a compiled function a quantised result is used where it was made."""
    found = weft.rms_norm(x, weight, **options)
    q, *rest = found if isinstance(found, tuple) else (found,)
    return weft.dequantize(q), *rest


def routed(x: Tensor, logits: Tensor) -> Any:
    """Tokens to rows of this rank and back."""
    weights, indices, *_ = weft.route(logits, 2)
    rows = weft.row_map(indices, EXPERTS, align=4)
    y, probs = weft.permute(x, rows, weights)
    assert not isinstance(y, DTensor)
    back = weft.unpermute(weft.glu(y, layout="none", probs=probs), rows)
    return (
        DTensor.from_local(back, x.device_mesh, x.placements, run_check=False)
        if isinstance(x, DTensor)
        else back
    )


def losses(logits: Tensor) -> Any:
    return tuple(weft.route(logits, 2, balance_coefficient=1e-2, z_coefficient=1e-3))


X = ("b s k", (BATCH, TOKENS, WIDTH))
WEIGHT = ("k", (WIDTH,))


def biased_heads(qkv: Tensor, bias: Tensor) -> Any:
    heads = weft.Heads(q=8, kv=4, dim=16, packing="groups")
    return weft.qkv_prepare(qkv, heads=heads, bias=bias, rotation=weft.Rotation(1e4))


def prepared(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, **options: Any) -> Any:
    norm = weft.HeadNorm("rms", q_weight, k_weight)
    return weft.qkv_prepare(qkv, norm=norm, rotation=weft.Rotation(1e4), **options)


HEADS = {
    "qkv": ("b s h d", (BATCH, TOKENS, 8, 16)),
    "k": ("b s h d", (BATCH, TOKENS, 4, 16)),
    "v": ("b s h d", (BATCH, TOKENS, 4, 16)),
    "q_weight": ("d", (16,)),
    "k_weight": ("d", (16,)),
}
CALLS = {
    "rms_norm": Call(weft.rms_norm, {"x": X, "weight": WEIGHT, "residual": X}, compiled=ALWAYS),
    "modulated samples": Call(adaln, {"x": X, "modulation": ("b k", (BATCH, 3 * WIDTH))}, compiled=BY_NIGHT),
    "gated samples": Call(
        weft.layer_norm,
        {"x": X, "residual": X, "pre_bias": WEIGHT, "residual_gate": ("b k", (BATCH, WIDTH))},
        compiled=BY_NIGHT,
    ),
    "gated rows": Call(weft.rms_norm, {"x": X, "residual": X, "residual_gate": X}),
    "modulated rows": Call(adaln_of_rows, {"x": X, "scale": X, "shift": X}),
    "quantised rows": Call(quantized, {"x": X, "weight": WEIGHT}, {"quantize": "1x128"}, compiled=ALWAYS),
    "quantised, scaled": Call(
        quantized,
        {"x": X, "weight": WEIGHT},
        {"quantize": "tensor", "quant_scale": torch.tensor(0.01), "return_amax": True},
    ),
    "glu": Call(weft.glu, {"x": X, "probs": ("b s", (BATCH, TOKENS))}),
    "glu of two": Call(
        weft.glu,
        {"x": X, "up": X, "probs": ("b s _", (BATCH, TOKENS, 1))},
        cuts=("k", "b"),
        exact=False,
        compiled=ALWAYS,
    ),
    "glu with a bias": Call(
        weft.glu,
        {"x": X, "bias": WEIGHT},
        {"layout": "none"},
        cuts=("k", "b"),
        compiled=BY_NIGHT,
    ),
    "glu, its gradient quantised": Call(
        weft.glu, {"x": X}, {"quantize_grad": "1x128", "grad_columnwise": False}, ("s",)
    ),
    "gated_norm": Call(
        weft.gated_norm,
        {
            "x": ("b s h d", (BATCH, TOKENS, 2, 32)),
            "gate": ("s b k", (TOKENS, BATCH, WIDTH)),
            "weight": WEIGHT,
        },
        {"groups": 2, "transpose": True},
        compiled=ALWAYS,
    ),
    "rope": Call(
        weft.rope,
        {"x": ("b s h d", (BATCH, TOKENS, 4, 16))},
        {"rotation": weft.Rotation(1e4)},
        ("s", "h", "b"),
        compiled=ALWAYS,
    ),
    "rope of tables": Call(
        weft.rope,
        {"x": ("b s h d", (BATCH, TOKENS, 4, 16))},
        {
            "rotation": weft.Rotation(
                cos=torch.linspace(0, 1, 80).view(10, 8), sin=torch.linspace(1, 0, 80).view(10, 8)
            )
        },
        ("s",),
    ),
    "qkv_prepare": Call(
        prepared,
        {"qkv": ("b s w", (BATCH, TOKENS, 8 * 16)), "q_weight": ("d", (16,)), "k_weight": ("d", (16,))},
        {"heads": weft.Heads(q=4, kv=2, dim=16), "out_layout": "bhsd"},
    ),
    "qkv_prepare with a bias": Call(
        biased_heads,
        {"qkv": ("b s h", (BATCH, TOKENS, 16 * 16)), "bias": ("h", (16 * 16,))},
        cuts=("h", "b"),
        compiled=BY_NIGHT,
    ),
    "qkv_prepare of heads": Call(prepared, HEADS, {}, ("h", "s"), compiled=ALWAYS),
    "router_linear": Call(
        weft.router_linear,
        {"x": X, "weight": ("e k", (EXPERTS, WIDTH)), "bias": ("e", (EXPERTS,))},
        {},
        ("e", "b"),
        compiled=ALWAYS,
    ),
    "route": Call(losses, {"logits": ("b s e", (BATCH, TOKENS, EXPERTS))}, exact=False, compiled=ALWAYS),
    "permute": Call(
        routed,
        {"x": ("b k", (BATCH * TOKENS, WIDTH)), "logits": ("b e", (BATCH * TOKENS, EXPERTS))},
        {},
        ("b", None),
        compiled=ALWAYS,
    ),
}


def run_call(call: Call, function: Callable[..., Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients."""
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    results = function(**leaves, **call.options)
    found = {
        str(i): t
        for i, t in enumerate(results if isinstance(results, tuple) else (results,))
        if t is not None
    }
    generator = torch.Generator().manual_seed(8)
    made = [t for t in found.values() if t.requires_grad]
    drawn = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in made]
    upstream = [placed_like(d, t) if isinstance(t, DTensor) else d for d, t in zip(drawn, made, strict=True)]
    torch.autograd.backward(made, upstream)
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient"
        found[f"d{name}"] = leaf.grad
    return {name: t.detach() for name, t in found.items()}


def dense(t: Tensor) -> Tensor:
    """All numbers of a tensor."""
    quantised = isinstance(t.to_local() if isinstance(t, DTensor) else t, QTensor)
    t = weft.dequantize(t) if quantised else t  # type: ignore[arg-type]
    return t.full_tensor() if isinstance(t, DTensor) else t


def compare_call(call: Call, cut: str | None, mesh: DeviceMesh, function: Callable[..., Any]) -> None:
    whole = run_call(call, call.function, call.inputs())
    truth = None
    place = {name: placements(dims.split(), [cut]) for name, (dims, _) in call.tensors.items()}
    shards = {
        name: distribute_tensor(t, mesh, place[name], src_data_rank=None) for name, t in call.inputs().items()
    }
    found = run_call(call, function, shards)
    assert found.keys() == whole.keys()
    for name, t in found.items():
        assert isinstance(t, DTensor), f"{name} is no DTensor"
        if name.startswith("d"):  # sharded as what it is the gradient of, and else to be added up
            of = [p if p.is_shard() else Partial() if cut else p for p in place[name[1:]]]
            assert list(t.placements) == of, f"{name}: {t.placements}"
        if t.is_floating_point() and (is_summed(t) or not call.exact):
            with weft.backend("reference"):
                truth = truth or run_call(call, call.function, call.inputs(torch.float64))
            check(dense(t), truth[name], 1e-5 * truth[name].abs().max().item())
        else:
            assert torch.equal(dense(t), dense(whole[name])), name


def compare_calls(mesh: DeviceMesh) -> dict[str, str]:
    """Eager: in a group of two every cut, in a larger one the first."""
    return {
        f"{name}, {cut}": attempt(compare_call, call, cut, mesh, call.function)
        for name, call in CALLS.items()
        for cut in (call.cuts if mesh.size() == 2 else call.cuts[:1])
    }


def compare_compiled(mesh: DeviceMesh, when: str) -> dict[str, str]:
    """In one graph, with the first cut."""
    found = {}
    for name, call in CALLS.items():
        if call.compiled == when:
            torch._dynamo.reset()
            compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
            found[name] = attempt(compare_call, call, call.cuts[0], mesh, compiled)
    return found


# ---- what is refused -----------------------------------------------------------------------------------


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What is said about calls that cannot be sharded, before anything is moved."""

    def of(*shape: int, to: Placement, wants_gradient: bool = False) -> Tensor:
        local = distribute_tensor(
            torch.ones(shape), mesh, [Replicate() if to.is_partial() else to], src_data_rank=None
        )
        t = DTensor.from_local(local.to_local(), mesh, [to], run_check=False) if to.is_partial() else local
        return t.requires_grad_(wants_gradient)

    rows, weight = of(8, 256, to=Shard(0)), torch.ones(256)
    packed, grouped = (weft.Heads(q=4, kv=1, dim=32, packing=packing) for packing in ("flat", "groups"))
    calls: dict[str, Callable[[], Any]] = {
        "columns": lambda: weft.rms_norm(of(8, 256, to=Shard(1))),
        "partial": lambda: weft.rms_norm(of(8, 256, to=Partial())),
        "a sharded weight": lambda: weft.rms_norm(of(8, 256, to=Replicate()), of(256, to=Shard(0))),
        "another placement": lambda: weft.rms_norm(rows, residual=of(8, 256, to=Replicate(), wants_gradient=True)),
        "two placements": lambda: weft.glu(rows, of(8, 256, to=Shard(1))),
        "a plain weight": lambda: weft.rms_norm(rows, weight.requires_grad_()),
        "one scale": lambda: weft.rms_norm(rows, quantize="tensor"),
        "nvfp4": lambda: weft.quantize(rows, "nvfp4"),
        "whole columns": lambda: weft.quantize(rows, "row", columnwise=True),
        "a block on two ranks": lambda: weft.quantize(rows, "128x128"),
        "random": lambda: weft.quantize(rows, "1x128", seed=1),
        "gate and up": lambda: weft.glu(of(8, 256, to=Shard(1))),
        "experts": lambda: weft.glu(rows, ends=torch.tensor([4, 8])),
        "q, k and v": lambda: weft.qkv_prepare(of(1, 8, 192, to=Shard(2)), heads=packed),
        "kv_heads": lambda: weft.qkv_prepare(of(1, 8, 192, to=Shard(2)), heads=grouped),
        "no rule": lambda: weft.glu_backward(rows, of(8, 512, to=Shard(0))),
        "out": lambda: weft.rms_norm(rows, out=torch.empty(8, 256)),
        "rows of a rank": lambda: weft.unpermute(rows, weft.row_map(torch.zeros(8, 1, dtype=torch.int32), 1)),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def main(rank: int, world: int, directory: Path, every: bool = False) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    found: dict[str, dict[str, str]] = {"ops": compare_ops(mesh, square, every)}
    if not every:
        found |= {"calls": compare_calls(mesh), "refusals": refusals(mesh)}
    if world == 2:
        found["compiled"] = compare_compiled(mesh, BY_NIGHT if every else ALWAYS)
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
