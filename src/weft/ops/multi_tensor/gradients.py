"""Resolution of gradient arguments: tensors or parameters, plain, quantized or distributed, on one rank or many.

`kinds_of` reads each argument of the public functions once and resolves it to gradients. `numbers_of` returns this
rank's values of them as plain tensors, and `memory_of` the plain tensors that clipping scales.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ...quant import QTensor
from ...runtime import is_distributed


class Shards(NamedTuple):
    """Tensors sharded over the ranks of some process groups.

    - `tensors`: this rank's shards, as `grad_norm` takes them; the list may be empty.
    - `groups`: the `torch.distributed` groups whose ranks together hold the full tensors. Leave out groups of replicas:
      each rank counts its own copy, so nothing counts twice.
    """

    tensors: Iterable[Tensor | None]
    groups: Sequence[Any] = ()


Tensors = Tensor | Shards | Iterable[Tensor | None] | Iterable[Shards]

_TENSOR = frozenset({Tensor})


class Kind(NamedTuple):
    """Gradients sharded over the same groups: one `Shards`, or all gradients of a call."""

    gradients: list[Tensor]
    groups: tuple[Any, ...]
    plain: bool  # no tensor is a subclass instance or requires a gradient


def kinds_of(tensors: Tensors, groups: Sequence[Any]) -> list[Kind]:
    """Normalize the arguments `tensors` and `groups` to a list of kinds. Iterators are consumed here, because they can
    be read only once."""
    items = _listed(tensors)
    types = set(map(type, items))
    if Shards not in types:
        return [_kind(items, types, groups)]
    if groups or len(types) > 1:
        raise ValueError(
            "weft.Shards cannot be mixed with tensors or groups=: pass tensors and groups=, or a list of weft.Shards "
            "that have their own groups"
        )
    lists = [_listed(shards.tensors) for shards in items]
    return [
        _kind(entries, set(map(type, entries)), shards.groups)
        for entries, shards in zip(lists, items, strict=True)
    ]


def _listed(tensors: Any) -> list[Any]:
    if type(tensors) is list:
        return tensors
    if isinstance(tensors, Tensor | Shards):
        return [tensors]
    if isinstance(tensors, Mapping | Module) or not isinstance(tensors, Iterable):
        raise _not_tensors("got", tensors)
    entries = list(tensors)
    if not entries and isinstance(tensors, Iterator):
        warnings.warn(
            f"the {type(tensors).__name__} of tensors is empty: if it was read before, create a new one",
            stacklevel=4,
        )
    return entries


def _not_tensors(where: str, wrong: Any) -> TypeError:
    advice = "give tensors, parameters or None"
    if isinstance(wrong, Module):
        advice = "give its parameters()"
    elif isinstance(wrong, Mapping):
        advice = "give its values()"
    elif isinstance(wrong, tuple):
        advice = "give parameters(), without their names"
    return TypeError(f"tensors must be an iterable of tensors; {where} a {type(wrong).__name__}: {advice}")


def _kind(entries: list[Any], types: set[type], groups: Sequence[Any]) -> Kind:
    """Resolve the entries of a list to gradients, by the rules of `grad_norm`."""
    # `requires_grad` is tested first: reading `.grad` of a non-leaf tensor that requires a gradient would warn.
    if types <= _TENSOR and not [t for t in entries if t.requires_grad or t.grad is not None]:
        return Kind(entries, _listed_groups(groups), True)
    gradients = []
    compiling = torch.compiler.is_compiling()
    for t in entries:
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise _not_tensors("one entry is", t)
        is_parameter = type(t) is Parameter or isinstance(t, Parameter)
        if is_parameter or t.is_leaf or t.retains_grad:
            grad = t.grad
            # When PyTorch 2.12 traces, an intermediate's missing gradient is neither None nor a tensor.
            if grad is not None and (not compiling or torch.is_tensor(grad)):
                t = grad
            elif is_parameter or t.requires_grad:
                continue
        gradients.append(t)
    plain = _TENSOR.issuperset(map(type, gradients)) and True not in {t.requires_grad for t in gradients}
    if not plain:
        check_strided(gradients)
    return Kind(gradients, _listed_groups(groups), plain)


def _listed_groups(groups: Any) -> tuple[Any, ...]:
    if not groups:
        return ()
    for group in groups if isinstance(groups, list | tuple) else (groups, None):
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(
                "groups must be a tuple of torch.distributed process groups, as a mesh's get_group() returns them; got "
                f"{groups!r}"
            )
    return tuple(groups)


def check_strided(tensors: list[Tensor]) -> None:
    """Raise ValueError for sparse and other tensors whose memory is not described by shape and strides."""
    for t in tensors:
        if t.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense tensors; one has the layout {t.layout}: pass its to_dense(), or leave it out"
            )


class Placed(NamedTuple):
    """Process groups of the mesh dimensions that shard or replicate a DTensor; empty for other tensors."""

    sharded: tuple[Any, ...] = ()
    replicated: tuple[Any, ...] = ()


def numbers_of(kind: Kind) -> dict[Placed, list[Tensor]]:
    """Return plain tensors with this rank's values, grouped by placement."""
    if kind.plain:
        return {Placed(): kind.gradients}
    by_placement: dict[Placed, list[Tensor]] = {}
    for t in kind.gradients:
        placed = Placed()
        if is_distributed(t):
            t, placed = _local_shard(t)
        by_placement.setdefault(placed, []).append(t.dequantize() if isinstance(t, QTensor) else t)
    return by_placement or {Placed(): []}


def _local_shard(t: Any) -> tuple[Tensor, Placed]:
    """Return this rank's shard of a DTensor, and its placement. A `Partial` DTensor is summed over the ranks first: the
    norm of a sum does not follow from the norms of its terms."""
    if any(placement.is_partial() for placement in t.placements):
        from torch.distributed.tensor import Replicate

        t = t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
    mesh = t.device_mesh
    groups = [(mesh.get_group(d), p.is_replicate()) for d, p in enumerate(t.placements) if mesh.size(d) > 1]
    sharded, replicated = (
        tuple(group for group, is_replicated in groups if is_replicated is wanted) for wanted in (False, True)
    )
    return _local(t), Placed(sharded, replicated)


def _local(t: Any) -> Tensor:
    """Return this rank's local tensor of a DTensor, after waiting for a collective that may still be running."""
    local = t.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def memory_of(gradients: list[Tensor]) -> list[Tensor]:
    """Return the tensors that clipping multiplies: this rank's shards of DTensors, and the scales of QTensors. Raise
    ValueError for a tensor that cannot be scaled, before anything is written."""
    scaled: list[Tensor] = []
    for t in gradients:
        if t.requires_grad and not torch.compiler.is_compiling():
            base = t._base
            if base is not None and base.is_leaf and base.requires_grad:
                raise ValueError(
                    f"clip_grads_ would change a parameter: one of its tensors, {tuple(t.shape)}, is a view of a leaf "
                    "that requires a gradient. Pass the leaf, which selects its .grad, or a view of its .grad"
                )
        if is_distributed(t):
            t = _scalable_shard(t)
        scaled += _scales(t) if isinstance(t, QTensor) else [t]
    return scaled


def _scalable_shard(t: Any) -> Tensor:
    """Return this rank's shard of a DTensor. Raise ValueError unless scaling all shards scales the DTensor."""
    for placement in t.placements:
        if placement.is_partial() and placement.reduce_op not in ("sum", "avg"):
            raise ValueError(
                f"one DTensor has placements {t.placements}, so ranks cannot scale it independently: "
                "redistribute it to Replicate() before clipping"
            )
    return _local(t)


def _scales(q: QTensor) -> list[Tensor]:
    """Return the scales of a QTensor, whose multiplication multiplies the whole tensor."""
    format = q.format
    if format.block == "mx":
        raise ValueError(
            f"a gradient is a QTensor in {q.spec}, whose scales can only be powers of two, so clipping cannot "
            "multiply them. Clip its dequantize(), or quantize gradients to a format with fp32 scales, such as 1x128"
        )
    if format.power_of_two and torch.compiler.is_compiling():
        raise ValueError(
            f"a gradient is a QTensor in {q.spec}; after clipping its scales are no longer powers of two, which "
            "changes its format. A compiled function cannot do that: clip outside of torch.compile"
        )
    copies = [copy for copy in (q.rowwise, q.columnwise) if copy is not None]
    scales = [copy.scale if copy.global_scale is None else copy.global_scale for copy in copies]
    if len(scales) == 2 and (scales[0] is scales[1] or _same_memory(*scales)):
        del scales[1]  # both copies may share one global_scale
    return scales


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return not torch.compiler.is_compiling() and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def mark_clipped(gradients: list[Tensor]) -> None:
    """Tell autograd that the contents of tensor subclasses have changed, and drop `pow2` from the formats of
    QTensors."""
    changed = [t for t in gradients if isinstance(t, QTensor) or is_distributed(t)]
    for t in changed:
        q = _local(t) if is_distributed(t) else t
        if isinstance(q, QTensor) and q.format.power_of_two:
            q._declare(replace(q.format, power_of_two=False).spec)
    if changed and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(changed)
