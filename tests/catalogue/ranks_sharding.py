"""Program of each rank of `test_sharding`: `python ranks_sharding.py RANK WORLD DIRECTORY` saves its findings there.

Every op with a sharding rule is called with its workloads' arguments as DTensors, once for each dimension that the rule
allows to cut, and compared with the op on complete tensors: by the reference, and by kernels for one workload of each
kind, or for every one. `CALLS` are calls of public functions, `refusals` has calls that cannot be sharded.
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
    """Distribute a gradient like a result: replicated where the ranks add up."""
    assert isinstance(like, DTensor)
    placement_of_gradient = [Replicate() if p.is_partial() else p for p in like.placements]
    return distribute_tensor(t, like.device_mesh, placement_of_gradient, src_data_rank=None)


def is_summed(t: DTensor) -> bool:
    return any(p.is_partial() and p.reduce_op == "sum" for p in t.placements)


def check_sum(t: DTensor, truth: Tensor) -> None:
    """Check a sum of ranks in fp32: a few dozen terms, accurate to a few ulp of the largest."""
    check(t.full_tensor(), truth, 4e-6 * truth.abs().max().item())


# ---- every op, by its sharding rule ------------------------------------------------------------------


def workloads() -> Iterator[Workload]:
    """Yield the workload with the shortest rows for each op that can be sharded and each set of its options."""
    shortest: dict[tuple[str, str], Workload] = {}
    for w in distinct():
        key = (w.op, w.options)
        if (
            weft.catalogue[w.op].shard is not None
            and w.cols > 1
            and (key not in shortest or w.cols < shortest[key].cols)
        ):
            shortest[key] = w
    return iter(shortest.values())


class Called(Exception):
    """Carries the arguments of an op out of the function that calls it."""


def arguments_of(workload: Workload, rows: int) -> Any:
    """Return the arguments with which a workload calls its op."""
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
        self.joined: dict[str, int] = {}  # number of leading dimensions that the op takes flattened
        for name, described in self.sharding.inputs.items():
            t = self.arguments[name]
            if t is None:
                continue
            leading_part, bracket, _ = described.partition(")")
            if bracket:
                lead = dimensions(leading_part, leading, 0)
                t = t.unflatten(0, [1 if dim == "_" else shape[int(dim)] for dim in lead])
                self.joined[name] = len(lead)
            self.tensors[name] = t.detach()
            self.dims[name] = dimensions(described, leading, t.dim())

    def cuts(self, world: int) -> list[str]:
        """Return the dimensions that can be sharded and have elements for every rank."""
        unsharded = self.sharding.whole
        sizes: dict[str, int] = {}
        for name, t in self.tensors.items():
            for dim, size in zip(self.dims[name], t.shape, strict=True):
                if dim != "_" and dim not in unsharded and not (dim.isdigit() and "..." in unsharded):
                    sizes[dim] = min(size, sizes.get(dim, size))
        return [dim for dim, size in sizes.items() if size >= world]

    def run(
        self,
        dtype: torch.dtype | None = None,
        place_tensor: Callable[[Tensor, list[str]], Tensor] = lambda t, dims: t,
        place_like: Callable[[Tensor, Tensor], Tensor] = lambda t, like: t,
    ) -> dict[str, Tensor]:
        """Return outputs and gradients, computed with floating-point tensors of a dtype."""
        leaves = {}
        arguments = {
            name: dtype if dtype is not None and value is torch.bfloat16 else value
            for name, value in self.arguments.items()
        }
        for name, t in self.tensors.items():
            t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
            leaf = place_tensor(t.clone(), self.dims[name]).requires_grad_(self.arguments[name].requires_grad)
            if leaf.requires_grad:
                leaves[name] = leaf
            is_unflattened = name not in self.joined or isinstance(leaf, DTensor)
            arguments[name] = leaf if is_unflattened else leaf.flatten(0, self.joined[name] - 1)
        outputs = self.op(self.fields.build(*arguments.values()))
        outputs_by_name = dict(zip(self.op.outputs.names, self.op.outputs.flatten(outputs), strict=True))
        outputs_by_name = {name: t for name, t in outputs_by_name.items() if t is not None}
        generator = torch.Generator().manual_seed(3)
        differentiable = [t for t in outputs_by_name.values() if t.requires_grad]
        upstream = [
            place_like(torch.randn(t.shape, generator=generator).to(t.dtype), t) for t in differentiable
        ]
        if differentiable and leaves:
            grads = torch.autograd.grad(differentiable, list(leaves.values()), upstream, allow_unused=True)
            outputs_by_name |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
        # Drop the stand-ins of quantized results, which nobody reads.
        return {name: t.detach() for name, t in outputs_by_name.items() if t.dim() == 0 or any(t.stride())}


def compare(problem: Problem, cuts: list[str | None], mesh: DeviceMesh, exactly: bool) -> None:
    """Compare sharded with complete tensors. Kernels give the same bits unless ranks add up; sums are compared with
    float64, and computed by the reference in fp32, so that nothing else is rounded on the way."""

    def distribute(t: Tensor, dims: list[str]) -> Tensor:
        return distribute_tensor(t, mesh, placements(dims, cuts), src_data_rank=None)

    dtype = None if exactly else torch.float32
    complete = problem.run(dtype)
    sharded = problem.run(dtype, distribute, placed_like)
    assert sharded.keys() == complete.keys(), f"{list(sharded)}, but complete tensors give {list(complete)}"
    truth: dict[str, Tensor] = {}
    for name, t in sharded.items():
        if not isinstance(t, DTensor):
            assert problem.sharding.outputs.get(name) is None, name
            if cuts == ["0"] and name.startswith(("copy", "result_")):
                compare_copies(t, complete[name])
        elif not t.is_floating_point() or not is_summed(t):
            # The reference may sum in another order, for example in a product of fewer rows.
            if exactly or not t.is_floating_point():
                assert torch.equal(t.full_tensor(), complete[name]), name
        elif not exactly:
            truth = truth or problem.run(torch.float64)
            check_sum(t, truth[name])


def compare_copies(shard: Tensor, complete: Tensor) -> None:
    """Compare the ranks' codes and scales, concatenated; a scale shared by all rows is on every rank."""
    local, expected = (
        t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (shard, complete)
    )
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    dims = [i for i, size in enumerate(shard.shape) if size != complete.shape[i]]
    assert torch.equal(torch.cat(gathered, dims[0]) if dims else local, expected)


def compare_ops(mesh: DeviceMesh, square: DeviceMesh | None, every: bool) -> dict[str, str]:
    """Return what was wrong with each case; an empty string, if nothing. In a square mesh, both of its dimensions cut
    something, for the first workload of each op. Kernels run the first workload of each op for each block height of its
    quantized results, since tensor placement depends on nothing else, or every workload."""
    world = mesh.size()
    failures: dict[str, str] = {}
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
            failures[f"{workload} {free[:1]}, by kernels"] = attempt(compare, problem, free[:1], mesh, True)
        if not free or block > 1 or (square is not None and workload.op in seen):
            continue
        seen.add(workload.op)
        cases = [([cut], mesh) for cut in free] if square is None else [([free[0], free[-1]], square)]
        with weft.backend("reference"):
            for cuts, case_mesh in cases:
                failures[f"{workload} {cuts}"] = attempt(compare, problem, cuts, case_mesh, False)
    return failures


def attempt(what: Callable[..., Any], *args: Any) -> str:
    """Return the traceback of an error, or an empty string."""
    try:
        what(*args)
    except Exception:
        return traceback.format_exc()
    return ""


# ---- public functions ----------------------------------------------------------------------------------

BATCH, TOKENS, WIDTH, EXPERTS = 4, 8, 64, 8
ALWAYS, BY_NIGHT = "always", "by night"


@dataclass(frozen=True)
class Call:
    """A function, the dimensions and sizes of its tensors, other arguments, and the dimensions to cut."""

    function: Callable[..., Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    options: dict[str, Any] = field(default_factory=dict)
    cuts: tuple[str | None, ...] = ("b", "s", None)
    exact: bool = True  # no result depends on sums over ranks
    compiled: str = ""  # also test compiled: ALWAYS (one call of each op and one that quantizes) or BY_NIGHT

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
    """Use a quantized result inside the compiled function that makes it."""
    results = weft.rms_norm(x, weight, **options)
    q, *rest = results if isinstance(results, tuple) else (results,)
    return weft.dequantize(q), *rest


def routed(x: Tensor, logits: Tensor) -> Any:
    """Send tokens to this rank's rows and back."""
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
    "quantized rows": Call(quantized, {"x": X, "weight": WEIGHT}, {"quantize": "1x128"}, compiled=ALWAYS),
    "quantized, scaled": Call(
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
    "glu, its gradient quantized": Call(
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


def run_call(call: Call, function: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return results and gradients."""
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    results = function(**leaves, **call.options)
    by_name = {
        str(i): t
        for i, t in enumerate(results if isinstance(results, tuple) else (results,))
        if t is not None
    }
    generator = torch.Generator().manual_seed(8)
    differentiable = [t for t in by_name.values() if t.requires_grad]
    drawn = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in differentiable]
    upstream = [
        placed_like(d, t) if isinstance(t, DTensor) else d for d, t in zip(drawn, differentiable, strict=True)
    ]
    torch.autograd.backward(differentiable, upstream)
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient"
        by_name[f"d{name}"] = leaf.grad
    return {name: t.detach() for name, t in by_name.items()}


def dense(t: Tensor) -> Tensor:
    """Return all elements of a tensor."""
    is_quantized = isinstance(t.to_local() if isinstance(t, DTensor) else t, QTensor)
    t = weft.dequantize(t) if is_quantized else t  # type: ignore[arg-type]
    return t.full_tensor() if isinstance(t, DTensor) else t


def compare_call(call: Call, cut: str | None, mesh: DeviceMesh, function: Callable[..., Any]) -> None:
    complete = run_call(call, call.function, call.inputs())
    truth = None
    placements_by_name = {name: placements(dims.split(), [cut]) for name, (dims, _) in call.tensors.items()}
    shards = {
        name: distribute_tensor(t, mesh, placements_by_name[name], src_data_rank=None)
        for name, t in call.inputs().items()
    }
    sharded = run_call(call, function, shards)
    assert sharded.keys() == complete.keys()
    for name, t in sharded.items():
        assert isinstance(t, DTensor), f"{name} is not a DTensor"
        if name.startswith("d"):  # placed like the tensor it is the gradient of, or to be summed
            gradient_placements = [
                p if p.is_shard() else Partial() if cut else p for p in placements_by_name[name[1:]]
            ]
            assert list(t.placements) == gradient_placements, f"{name}: {t.placements}"
        if t.is_floating_point() and (is_summed(t) or not call.exact):
            with weft.backend("reference"):
                truth = truth or run_call(call, call.function, call.inputs(torch.float64))
            check(dense(t), truth[name], 1e-5 * truth[name].abs().max().item())
        else:
            assert torch.equal(dense(t), dense(complete[name])), name


def compare_calls(mesh: DeviceMesh) -> dict[str, str]:
    """Return failures of eager calls: in a group of two with every cut, in a larger one with the first."""
    return {
        f"{name}, {cut}": attempt(compare_call, call, cut, mesh, call.function)
        for name, call in CALLS.items()
        for cut in (call.cuts if mesh.size() == 2 else call.cuts[:1])
    }


def compare_compiled(mesh: DeviceMesh, when: str) -> dict[str, str]:
    """Return failures of calls compiled to one graph, with the first cut."""
    failures = {}
    for name, call in CALLS.items():
        if call.compiled == when:
            torch._dynamo.reset()
            compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
            failures[name] = attempt(compare_call, call, call.cuts[0], mesh, compiled)
    return failures


# ---- refusals ------------------------------------------------------------------------------------------


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Return the messages about calls that cannot be sharded, raised before anything is moved."""

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
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def main(rank: int, world: int, directory: Path, every: bool = False) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    findings: dict[str, dict[str, str]] = {"ops": compare_ops(mesh, square, every)}
    if not every:
        findings |= {"calls": compare_calls(mesh), "refusals": refusals(mesh)}
    if world == 2:
        findings["compiled"] = compare_compiled(mesh, BY_NIGHT if every else ALWAYS)
    torch.save(findings, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
