"""How an op is cut into shards, and the call with DTensors that follows from it.

An op describes the dimensions of its tensors by names, as einops does:

    Sharding({"x": "... k", "weight": "k"}, {"y": "... k"}, whole={"k": "the norm is taken over whole rows"})

`...` are the leading dimensions of the first tensor, one name each. Each dimension of a mesh cuts at most one named
dimension, that of the tensors it shards. Then every rank computes with its shards, and without any communication:

- A tensor that has the dimension must be sharded along it. A replicated one that wants no gradient is cut: that moves
  nothing.
- A tensor that does not have it must be replicated, and its gradient is a partial sum: `Partial()`.
- An output that has it is sharded along it. One that does not have it is what the ranks' values add up to, and says so:
  "sum: e" is `Partial("sum")`, "max:" is `Partial("max")`.

A rank's shard of a result is that part of the unsharded result, bit for bit. What can't be computed so is refused, with
the redistribution that would help: nothing is moved without a word. A gradient comes in as DTensor's autograd gives it:
`DTensor.from_local` redistributes it to the placement of the result that it belongs to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class Sharding(NamedTuple):
    """The dimensions of an op's tensors, by their names.

    - `inputs`: of each tensor among the arguments; the first one is there in every call. "_" is a dimension of size 1
      that is broadcast, and "" is one number. Dimensions in parentheses, "(0 1) k", are joined into one when the shard is taken.
    - `outputs`: of each output; None for what stays with the rank and is no DTensor.
    - `whole`: dimensions that can't be sharded, with the reason; "..." for all the leading ones.
    - `block`: so many consecutive rows, counted over all leading dimensions, lie on one rank.
    - `counted`: tensors of indices along a dimension that may be absent, where they count from 0.
    - `sizes`: arguments that are the size of a dimension, and become that of the shard.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str | None]
    whole: Mapping[str, str] = {}
    block: int = 1
    counted: Mapping[str, str] = {}
    sizes: Mapping[str, str] = {}


class Shards(NamedTuple):
    """What a rank computes with, and how its results are placed."""

    mesh: DeviceMesh
    cuts: list[str | None]  # for each dimension of the mesh, the dimension that it cuts
    extents: dict[str, tuple[int, int]]  # of each dimension: its size, and that of this rank's shard
    leading: list[str]
    local: dict[str, Any]  # arguments that differ from those of the call

    def place(self, value: Tensor, dims: str | None) -> Tensor:
        """This rank's part of an output as a DTensor."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if dims is None:
            return value
        reduction, _, rest = dims.rpartition(":")
        names = dimensions(rest, self.leading, value.ndim)
        placements: list[Placement] = []
        shape = list(value.shape)
        for cut in self.cuts:
            if cut is None:
                placements.append(Replicate())
            elif cut in names:
                dim = names.index(cut)
                placements.append(Shard(dim))
                whole, part = self.extents[cut]
                shape[dim] = whole if value.shape[dim] == part else value.shape[dim] * whole // part
            elif reduction:
                placements.append(Partial(reduction))
            else:
                raise AssertionError(f"an output {dims!r} without the dimension {cut} has no reduction")
        return DTensor.from_local(
            value,
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=_stride_like(value, shape),
        )


def is_distributed(*tensors: object) -> bool:
    """Whether any of them is a DTensor."""
    if all(t is None or type(t) is Tensor or type(t) is Parameter for t in tensors):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def place_like(local: Tensor, like: Tensor) -> Tensor:
    """A rank's tensor as its shard of a DTensor of the shape and placements of another."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_of(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, with a gradient that is placed as x is."""
    local: Tensor = x.to_local(grad_placements=x.placements)  # type: ignore[attr-defined]
    return local


def local_rows(op: str, name: str, x: Tensor, whole: str) -> Tensor:
    """This rank's rows of a DTensor, and any other tensor as it is. `whole` says why a row is not cut."""
    if not is_distributed(x):
        return x
    local: Tensor = cut(op, Sharding({name: "... k"}, {}, {"k": whole}), {name: x}).local[name]
    return local


def cut(op: str, sharding: Sharding, arguments: Mapping[str, Any]) -> Shards:
    """This rank's part of a call; of `arguments`, tensors are those that `sharding` names."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    tensors = {name: arguments[name] for name in sharding.inputs if arguments[name] is not None}
    mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
    first, described = next(iter(sharding.inputs.items()))
    leading = [str(i) for i in range(tensors[first].ndim - len(described.split()) + 1)]
    dims = {name: dimensions(sharding.inputs[name], leading, t.ndim) for name, t in tensors.items()}
    cuts = [_cut_of(op, sharding, tensors, dims, mesh, along) for along in range(mesh.ndim)]
    wanted = {
        name: [Replicate() if c is None or c not in dims[name] else Shard(dims[name].index(c)) for c in cuts]
        for name in tensors
    }
    _check_sizes(op, sharding, arguments, first, dims[first], wanted[first], mesh)
    local: dict[str, Any] = {}
    extents: dict[str, tuple[int, int]] = {}
    for name, t in tensors.items():
        part = _part(op, name, t, wanted[name], cuts, mesh)
        for dim, whole, size in zip(dims[name], t.shape, part.shape, strict=True):
            extents.setdefault(dim, (whole, size))
        joined = sharding.inputs[name].partition(")")
        local[name] = part.flatten(0, part.ndim - 1 - len(joined[2].split())) if joined[1] else part
    for name, dim in sharding.counted.items():
        if arguments[name] is None and dim in cuts:
            numbers = torch.arange(extents[dim][0], device=tensors[first].device)
            local[name] = _cut_plain(numbers, [Shard(0) if c == dim else Replicate() for c in cuts], mesh)
    for name, dim in sharding.sizes.items():
        if dim in cuts:
            whole, size = extents[dim]
            local[name] = arguments[name] * size // whole
    return Shards(mesh, cuts, extents, leading, local)


def refuse(op: str) -> ValueError:
    """What to say where an op that has no `Sharding` is given DTensors."""
    return ValueError(
        f"{op} takes no DTensors: give it this rank's tensors, x.to_local(), and place what it returns with "
        "DTensor.from_local"
    )


def dimensions(described: str, leading: list[str], count: int) -> list[str]:
    """The names of a tensor's dimensions; of one number, however many it has."""
    words = described.replace("(", "").replace(")", "").split() or ["_"] * count
    return [name for word in words for name in (leading if word == "..." else [word])]


def _cut_of(
    op: str,
    sharding: Sharding,
    tensors: Mapping[str, Tensor],
    dims: Mapping[str, list[str]],
    mesh: DeviceMesh,
    along: int,
) -> str | None:
    """The dimension that a dimension of the mesh cuts."""
    from torch.distributed.tensor import DTensor, Shard

    found: str | None = None
    by = ""
    for name, t in tensors.items():
        if not isinstance(t, DTensor):
            continue
        if t.device_mesh != mesh:
            raise ValueError(f"{op}: all DTensors must be on one mesh; got {mesh} and {t.device_mesh}")
        placement = t.placements[along]
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            what = "terms of a sum" if placement.is_partial() else "rows in another order"
            raise _refusal(op, name, t, f"each rank has {what}", "Replicate() or a Shard")
        dim = dims[name][placement.dim]
        reason = sharding.whole.get("..." if dim.isdigit() and "..." in sharding.whole else dim)
        if dim == "_":
            reason = "a dimension of size 1 is broadcast"
        if reason is not None:
            free = [i for i, other in enumerate(dims[name]) if _is_free(other, sharding)]
            to = " or ".join(["Replicate()", *(f"Shard({i})" for i in free)])
            raise _refusal(op, name, t, f"dimension {placement.dim} is not sharded: {reason}", to)
        if found is None:
            found, by = dim, name
        elif found != dim:
            to = f"Shard({dims[name].index(found)})" if found in dims[name] else "Replicate()"
            raise _refusal(op, name, t, f"it does not go with {by}, {_placed(tensors[by])}", to)
    return found


def _is_free(dim: str, sharding: Sharding) -> bool:
    return dim not in sharding.whole and dim != "_" and not (dim.isdigit() and "..." in sharding.whole)


def _check_sizes(
    op: str, sharding: Sharding, arguments: Mapping[str, Any], name: str, dims: list[str], placements: list[Placement],
    mesh: DeviceMesh,
) -> None:  # fmt: skip
    """Complain about shards of the first tensor whose sizes do not do: every rank comes to the same answer."""
    t = arguments[name]
    parts = dict.fromkeys(dims, 1)
    for along, placement in enumerate(placements):
        if placement.is_shard():
            parts[dims[placement.dim]] *= mesh.size(along)  # type: ignore[attr-defined]
    for size, dim in sharding.sizes.items():
        if arguments[size] % parts.get(dim, 1):
            raise ValueError(
                f"{op}: {name} is sharded over {parts[dim]} ranks, and {size}={arguments[size]} is no multiple of them"
            )
    for i, dim in enumerate(dims):
        if sharding.block > 1 and parts[dim] > 1 and dim.isdigit():
            rows = t.shape[i + 1 : -1].numel()  # to a step along this dimension
            shard, stretch = -(-t.shape[i] // parts[dim]) * rows, t.shape[i] * rows
            if shard % sharding.block or (t.shape[:i].numel() > 1 and stretch % sharding.block):
                raise ValueError(
                    f"{op}: {name} is placed as {_words(t.placements)}, in shards that begin every {shard} rows, and a "
                    f"block of the result has {sharding.block}. Pad it to a multiple of {sharding.block} rows for each "
                    "shard, choose a format and copies whose blocks lie in one row (1x128, mx or row, without "
                    "columnwise=True), or quantise each rank's shard by itself: x.to_local()"
                )


def _part(
    op: str, name: str, t: Tensor, wanted: list[Placement], cuts: list[str | None], mesh: DeviceMesh
) -> Tensor:
    """This rank's part of a tensor."""
    from torch.distributed.tensor import DTensor, Partial

    wants_gradient = torch.is_grad_enabled() and t.requires_grad
    if not isinstance(t, DTensor):
        # The same on all ranks, as what a module keeps in a buffer is.
        if wants_gradient:
            raise ValueError(
                f"{op}: {name} is a plain tensor that requires a gradient, among DTensors: each rank would have a part "
                f"of it. Give a DTensor: distribute_tensor({name}, mesh, {_words(wanted)})"
            )
        return _cut_plain(t, wanted, mesh)
    if any(old != new for old, new in zip(t.placements, wanted, strict=True)):
        if wants_gradient:
            raise _refusal(op, name, t, "to cut it here would gather its gradient", _words(wanted))
        return t.redistribute(mesh, wanted).to_local()
    gradients = [
        Partial() if cut is not None and new.is_replicate() else new
        for cut, new in zip(cuts, wanted, strict=True)
    ]
    return t.to_local(grad_placements=gradients)


def _cut_plain(t: Tensor, wanted: list[Placement], mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if all(placement.is_replicate() for placement in wanted):
        return t
    whole = DTensor.from_local(t.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, wanted).to_local()


def _stride_like(value: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a larger tensor whose dimensions lie in memory in the order of those of `value`."""
    sizes = list(shape)
    if value.is_contiguous():
        return tuple(torch.empty(sizes, device="meta").stride())
    stride, step = list(value.stride()), 1
    for dim in sorted(range(len(sizes)), key=lambda i: value.stride(i)):
        if stride[dim]:
            stride[dim], step = step, step * max(sizes[dim], 1)
    return tuple(stride)


def _refusal(op: str, name: str, t: Tensor, why: str, to: str) -> ValueError:
    return ValueError(f"{op}: {name} is placed as {_placed(t)}: {why}. Redistribute it to {to}")


def _placed(t: Any) -> str:
    return _words(t.placements)


def _words(placements: Iterable[Placement]) -> str:
    return f"({', '.join(str(p) for p in placements)},)" if placements else "()"
