"""Sharding of an op's tensors, and the call with DTensors that follows from it.

An op describes the dimensions of its tensors by names, as einops does:

    Sharding({"x": "... k", "weight": "k"}, {"y": "... k"}, whole={"k": "the norm is taken over whole rows"})

`...` are the leading dimensions of the first tensor, one name each. Each mesh dimension shards at most one named
dimension, in every tensor that has it. Every rank then computes with its shards, without communication:

- A tensor that has the dimension must be sharded along it. A replicated one that needs no gradient is sliced, which
  moves nothing.
- A tensor that does not have it must be replicated, and its gradient is a partial sum: `Partial()`.
- An output that has it is sharded along it. One that does not is a reduction over the ranks' values, which its
  description names: "sum: e" is `Partial("sum")`, "max:" is `Partial("max")`.

A rank's shard of a result equals that part of the unsharded result, bit for bit. A call that cannot be computed this
way is refused with an error that names the redistribution that would help: nothing is moved silently. Gradients arrive
with the placement of the result they belong to, since `DTensor.from_local` redistributes them to it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class Sharding(NamedTuple):
    """Names of the dimensions of an op's tensors.

    - `inputs`: the dimensions of each tensor argument; the first that is not None has all leading dimensions. "_" is a
      broadcast dimension of size 1, and "" is a scalar. Dimensions in parentheses, "(0 1) k", are joined into one when
      the shard is taken.
    - `outputs`: the dimensions of each output; None if it stays a plain tensor of the rank.
    - `whole`: dimensions that cannot be sharded, with the reason, and in a second sentence the remedy if it is
      something other than redistributing; "..." stands for all leading ones.
    - `block`: rows come in blocks of this many, counted over all leading dimensions; a block must lie on one rank.
    - `counted`: tensors of indices, with the dimension they index. If one is absent, its indices count from 0.
    - `sizes`: arguments that are the size of a dimension, which a rank replaces by the size in its shard.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str | None]
    whole: Mapping[str, str] = {}
    block: int = 1
    counted: Mapping[str, str] = {}
    sizes: Mapping[str, str] = {}


class Shards(NamedTuple):
    """Arguments of one rank, and the placement of its results."""

    mesh: DeviceMesh
    cuts: list[str | None]  # per mesh dimension, the dimension that it shards
    extents: dict[str, tuple[int, int]]  # per dimension: its size, and the size of this rank's shard
    leading: list[str]
    local: dict[str, Any]  # arguments that differ from those of the call

    def place(self, value: Tensor, dims: str | None) -> Tensor:
        """Return this rank's part of an output as a DTensor."""
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
                total, part = self.extents[cut]
                shape[dim] = total if value.shape[dim] == part else value.shape[dim] * total // part
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
    """Return whether any of the tensors is a DTensor."""
    for t in tensors:
        if not (t is None or type(t) is Tensor or type(t) is Parameter):
            break
    else:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it there cannot be any DTensor
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def place_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a rank's tensor as its shard of a DTensor with the shape and placements of `like`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_of(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; its gradient is placed as x is."""
    local: Tensor = x.to_local(grad_placements=x.placements)  # type: ignore[attr-defined]
    return local


def local_rows(op: str, **tensors: Tensor | None) -> list[Any]:
    """Return this rank's rows of tensors that share leading dimensions; all rows if none is a DTensor."""
    if not is_distributed(*tensors.values()):
        return [*tensors.values()]
    described = {name: f"... {name}" for name in tensors}
    shards = cut(op, Sharding(described, {}, dict.fromkeys(tensors, "a row must not be split")), tensors)
    return [shards.local.get(name) for name in tensors]


def summed(x: Tensor) -> Tensor:
    """Return a DTensor replicated on every rank; partial sums are reduced by a collective."""
    if not is_distributed(x):
        return x
    from torch.distributed.tensor import Replicate

    replicated: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)  # type: ignore[attr-defined]
    return replicated


def cut(op: str, sharding: Sharding, arguments: Mapping[str, Any]) -> Shards:
    """Return this rank's part of a call. `arguments` are all arguments of the op, by name. A tensor that is not in
    `sharding.inputs` belongs to the rank and must not be a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, value in arguments.items():
        if name not in sharding.inputs and is_distributed(value):
            raise ValueError(f"{op}: {name} must be a plain tensor of this rank: pass {name}.to_local()")
    tensors = {name: arguments[name] for name in sharding.inputs if arguments[name] is not None}
    mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
    first = next(iter(tensors))
    leading = [str(i) for i in range(tensors[first].ndim - len(sharding.inputs[first].split()) + 1)]
    dims = {name: dimensions(sharding.inputs[name], leading, t.ndim) for name, t in tensors.items()}
    call = _Call(op, sharding, tensors, dims, mesh)
    cuts = [call.cut_along(i) for i in range(mesh.ndim)]
    call.check_blocks(first, cuts)
    local: dict[str, Any] = {}
    extents: dict[str, tuple[int, int]] = {}
    for name, t in tensors.items():
        part = call.part(name, cuts)
        for dim, total, size in zip(dims[name], t.shape, part.shape, strict=True):
            extents.setdefault(dim, (total, size))
        _, parenthesis, after = sharding.inputs[name].partition(")")
        local[name] = part.flatten(0, part.ndim - 1 - len(after.split())) if parenthesis else part
    for name, dim in sharding.counted.items():
        if arguments[name] is None and dim in cuts:
            indices = torch.arange(extents[dim][0], device=tensors[first].device)
            local[name] = _cut_plain(indices, [Shard(0) if c == dim else Replicate() for c in cuts], mesh)
    for name, dim in sharding.sizes.items():
        if dim in cuts:
            parts = call.parts(dim, cuts)
            if arguments[name] % parts:
                raise ValueError(
                    f"{op}: {name}={arguments[name]} must be a multiple of the {parts} ranks it is sharded over"
                )
            local[name] = arguments[name] // parts
    return Shards(mesh, cuts, extents, leading, local)


def dimensions(described: str, leading: list[str], count: int) -> list[str]:
    """Return the names of a tensor's `count` dimensions from their description."""
    words = described.replace("(", "").replace(")", "").split() or ["_"] * count
    return [name for word in words for name in (leading if word == "..." else [word])]


def refuse(op: str) -> ValueError:
    """Return the error for DTensors passed to an op without a `Sharding`."""
    return ValueError(
        f"{op} takes no DTensors: pass it this rank's tensors, x.to_local(), and place its results with "
        "DTensor.from_local"
    )


class _Call(NamedTuple):
    """Call with DTensors that is being cut: its tensors, the names of their dimensions, and the mesh."""

    op: str
    sharding: Sharding
    tensors: dict[str, Any]
    dims: dict[str, list[str]]
    mesh: DeviceMesh

    def cut_along(self, mesh_dim: int) -> str | None:
        """Return the dimension that a mesh dimension shards, or None."""
        from torch.distributed.tensor import DTensor, Shard

        sharded: str | None = None
        sharded_by = ""
        for name, t in self.tensors.items():
            if not isinstance(t, DTensor):
                continue
            if t.device_mesh != self.mesh:
                raise ValueError(
                    f"{self.op}: all DTensors must be on one mesh; got {self.mesh} and {t.device_mesh}"
                )
            placement = t.placements[mesh_dim]
            if placement.is_replicate():
                continue
            if type(placement) is not Shard:
                holds = "terms of a sum" if placement.is_partial() else "pieces of several shards"
                raise self.refusal(name, f"each rank holds {holds}", self.possible(name))
            dim = self.dims[name][placement.dim]
            if not self.is_free(dim):
                why = self.sharding.whole.get(dim) or self.sharding.whole.get("...", "it is broadcast")
                raise self.refusal(
                    name, f"its dimension {placement.dim} cannot be sharded, since {why}", self.possible(name)
                )
            if sharded is None:
                sharded, sharded_by = dim, name
            elif sharded != dim:
                target = (
                    f"Shard({self.dims[name].index(sharded)})"
                    if sharded in self.dims[name]
                    else "Replicate()"
                )
                placements = _words(self.tensors[sharded_by].placements)
                raise self.refusal(
                    name, f"that does not match {sharded_by}, which is placed as {placements}", target
                )
        return sharded

    def is_free(self, dim: str) -> bool:
        """Return whether the dimension may be sharded."""
        whole = self.sharding.whole
        return dim not in whole and dim != "_" and not (dim.isdigit() and "..." in whole)

    def possible(self, name: str) -> str:
        shards = [f"Shard({i})" for i, dim in enumerate(self.dims[name]) if self.is_free(dim)]
        return " or ".join(["Replicate()", *shards])

    def parts(self, dim: str, cuts: list[str | None]) -> int:
        """Return the number of shards of a dimension."""
        count = 1
        for mesh_dim, cut in enumerate(cuts):
            if cut == dim:
                count *= self.mesh.size(mesh_dim)
        return count

    def check_blocks(self, name: str, cuts: list[str | None]) -> None:
        """Raise if shards begin within a block of rows. Every rank reaches the same verdict."""
        block, shape = self.sharding.block, self.tensors[name].shape
        for i, dim in enumerate(self.dims[name]):
            if block == 1 or dim not in cuts or not dim.isdigit():
                continue
            rows = shape[i + 1 : -1].numel()  # per step along this dimension
            shard, all_shards = -(-shape[i] // self.parts(dim, cuts)) * rows, shape[i] * rows
            if shard % block or (shape[:i].numel() > 1 and all_shards % block):
                raise self.refusal(
                    name,
                    f"a block of the quantized result has {block} rows, and shards have {shard} at a time. Pad it so "
                    f"that these are multiples of {block}, choose blocks that lie in one row (1x128, mx or row, and no "
                    "column-wise copy), handle each rank's shard by itself with x.to_local()",
                    "Replicate()",
                )

    def part(self, name: str, cuts: list[str | None]) -> Tensor:
        """Return this rank's part of a tensor."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        t, dims = self.tensors[name], self.dims[name]
        wanted = [Shard(dims.index(cut)) if cut in dims else Replicate() for cut in cuts]
        needs_gradient = torch.is_grad_enabled() and t.requires_grad
        if not isinstance(t, DTensor):
            # A plain tensor is assumed to be equal on all ranks, like the buffers of a module.
            if needs_gradient:
                raise ValueError(
                    f"{self.op}: {name} is a plain tensor that requires a gradient, among DTensors: each rank would "
                    f"have a part of it. Pass a DTensor, distribute_tensor({name}, mesh, {_words(wanted)})"
                )
            return _cut_plain(t, wanted, self.mesh)
        if any(old != new for old, new in zip(t.placements, wanted, strict=True)):
            if needs_gradient:
                raise self.refusal(
                    name, "if it were sliced here, its gradient would have to be gathered", _words(wanted)
                )
            return t.redistribute(self.mesh, wanted).to_local()
        gradients = [
            Partial() if cut is not None and cut not in dims else new
            for cut, new in zip(cuts, wanted, strict=True)
        ]
        return t.to_local(grad_placements=gradients)

    def refusal(self, name: str, why: str, to: str) -> ValueError:
        placements = _words(self.tensors[name].placements)
        advice = f"{why}, or redistribute it to {to}" if ". " in why else f"{why}. Redistribute it to {to}"
        return ValueError(f"{self.op}: {name} is placed as {placements}; {advice}")


def _cut_plain(t: Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    from torch.distributed.tensor import DTensor, Replicate

    if all(placement.is_replicate() for placement in placements):
        return t
    replicated = DTensor.from_local(t.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, placements).to_local()


def _stride_like(value: Tensor, shape: list[int]) -> tuple[int, ...]:
    """Return strides for a larger tensor whose dimensions have the memory order of `value`'s."""
    if value.is_contiguous():
        return tuple(torch.empty(shape, device="meta").stride())
    stride, step = list(value.stride()), 1
    for dim in sorted(range(len(shape)), key=lambda i: value.stride(i)):
        if stride[dim]:
            stride[dim], step = step, step * max(shape[dim], 1)
    return tuple(stride)


def _words(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(_word(p) for p in placements)}]"


def _word(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate()"
    return f"Shard({placement.dim})" if placement.is_shard() else repr(placement)
