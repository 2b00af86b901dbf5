"""What a list of gradients stands for: tensors and parameters, plain, quantised or distributed, on one rank or many.

`kinds_of` reads the arguments of the functions of `multi_tensor`, each once, and finds the gradients that they stand
for. `numbers_of` gives this rank's numbers of these as plain tensors, and `memory_of` the plain tensors that clipping
scales.
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
    """Tensors that the ranks of some process groups hold different pieces of.

    - `tensors`: this rank's pieces, as `grad_norm` takes them; the list may be empty.
    - `groups`: the `torch.distributed` groups over whose ranks the pieces add up to the whole. A group whose ranks
      hold the same tensors (replicas) is not among them: then each rank counts its own, and nothing counts twice.
    """

    tensors: Iterable[Tensor | None]
    groups: Sequence[Any] = ()


Tensors = Tensor | Shards | Iterable[Tensor | None] | Iterable[Shards]

_TENSOR = frozenset({Tensor})


class Kind(NamedTuple):
    """Gradients that are sharded over the same groups: those of one `Shards`, or all gradients of a call."""

    gradients: list[Tensor]
    groups: tuple[Any, ...]
    plain: bool  # no tensor is of a subclass or requires a gradient


def kinds_of(tensors: Tensors, groups: Sequence[Any]) -> list[Kind]:
    """The arguments `tensors` and `groups` in their general form. An iterator, which can be read only once, is read
    here."""
    given = _listed(tensors)
    types = set(map(type, given))
    if Shards not in types:
        return [_kind(given, types, groups)]
    if groups or len(types) > 1:
        raise ValueError("give tensors and groups=, or a list of weft.Shards that each have their own groups")
    lists = [_listed(shards.tensors) for shards in given]
    return [
        _kind(entries, set(map(type, entries)), shards.groups)
        for entries, shards in zip(lists, given, strict=True)
    ]


def _listed(tensors: Any) -> list[Any]:
    if type(tensors) is list:
        return tensors
    if isinstance(tensors, Tensor | Shards):
        return [tensors]
    if isinstance(tensors, Mapping | Module) or not isinstance(tensors, Iterable):
        raise _not_tensors("got", tensors)
    given = list(tensors)
    if not given and isinstance(tensors, Iterator):
        warnings.warn(
            f"the {type(tensors).__name__} of tensors is empty: if it has been read before, make a new one",
            stacklevel=4,
        )
    return given


def _not_tensors(where: str, wrong: Any) -> TypeError:
    advice = "give tensors, parameters or None"
    if isinstance(wrong, Module):
        advice = "give its parameters()"
    elif isinstance(wrong, Mapping):
        advice = "give its values()"
    elif isinstance(wrong, tuple):
        advice = "give parameters(), without their names"
    return TypeError(f"tensors must be an iterable of tensors; {where} a {type(wrong).__name__}: {advice}")


def _kind(given: list[Any], types: set[type], groups: Sequence[Any]) -> Kind:
    """The gradients that the entries of a list stand for; see `grad_norm`."""
    # `.grad` is read only of a tensor that requires no gradient: of one that does and is not a leaf, it would warn.
    if types <= _TENSOR and not [t for t in given if t.requires_grad or t.grad is not None]:
        return Kind(given, _listed_groups(groups), True)
    found = []
    compiling = torch.compiler.is_compiling()
    for t in given:
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise _not_tensors("one entry is", t)
        is_parameter = type(t) is Parameter or isinstance(t, Parameter)
        if is_parameter or t.is_leaf or t.retains_grad:
            grad = t.grad
            # In a graph that PyTorch 2.12 traces, the missing gradient of an intermediate is neither None nor a tensor.
            if grad is not None and (not compiling or torch.is_tensor(grad)):
                t = grad
            elif is_parameter or t.requires_grad:
                continue
        found.append(t)
    plain = _TENSOR.issuperset(map(type, found)) and True not in {t.requires_grad for t in found}
    if not plain:
        check_strided(found)
    return Kind(found, _listed_groups(groups), plain)


def _listed_groups(groups: Any) -> tuple[Any, ...]:
    if not groups:
        return ()
    for group in groups if isinstance(groups, list | tuple) else (groups, None):
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(
                "groups must be a tuple of torch.distributed process groups, as a mesh's get_group() gives them; got "
                f"{groups!r}"
            )
    return tuple(groups)


def check_strided(tensors: list[Tensor]) -> None:
    """Refuse sparse and other tensors whose memory is not described by shape and strides."""
    for t in tensors:
        if t.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense tensors; one has the layout {t.layout}: clip its to_dense(), or leave it out"
            )


class Placed(NamedTuple):
    """How tensors lie on a mesh: the groups of its dimensions. A tensor that is no DTensor lies on none."""

    sharded: tuple[Any, ...] = ()
    replicated: tuple[Any, ...] = ()


def numbers_of(kind: Kind) -> dict[Placed, list[Tensor]]:
    """Plain tensors with this rank's numbers, by how they are placed."""
    if kind.plain:
        return {Placed(): kind.gradients}
    found: dict[Placed, list[Tensor]] = {}
    for t in kind.gradients:
        placed = Placed()
        if is_distributed(t):
            t, placed = _piece(t)
        found.setdefault(placed, []).append(t.dequantize() if isinstance(t, QTensor) else t)
    return found or {Placed(): []}


def _piece(t: Any) -> tuple[Tensor, Placed]:
    """This rank's piece of a DTensor, and how it is placed. A `Partial` one is summed over the ranks first, since the
    norm of a sum does not follow from the norms of its terms."""
    if any(placement.is_partial() for placement in t.placements):
        from torch.distributed.tensor import Replicate

        t = t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
    mesh = t.device_mesh
    groups = [(mesh.get_group(d), p.is_replicate()) for d, p in enumerate(t.placements) if mesh.size(d) > 1]
    sharded, replicated = (tuple(group for group, whole in groups if whole is how) for how in (False, True))
    return _local(t), Placed(sharded, replicated)


def _local(t: Any) -> Tensor:
    """This rank's local tensor of a DTensor, after waiting for a collective that may still be under way."""
    local = t.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def memory_of(gradients: list[Tensor]) -> list[Tensor]:
    """The tensors that clipping multiplies: this rank's pieces of DTensors, and the scales of QTensors. What cannot be
    multiplied is refused here, before anything is written."""
    found: list[Tensor] = []
    for t in gradients:
        if t.requires_grad and not torch.compiler.is_compiling():
            base = t._base
            if base is not None and base.is_leaf and base.requires_grad:
                raise ValueError(
                    f"clip_grads_ would change a parameter: one of its tensors, {tuple(t.shape)}, is a view of a leaf "
                    "that requires a gradient. Give the leaf, which stands for its .grad, or a view of its .grad"
                )
        if is_distributed(t):
            t = _scalable_piece(t)
        found += _scales(t) if isinstance(t, QTensor) else [t]
    return found


def _scalable_piece(t: Any) -> Tensor:
    """This rank's piece of a DTensor, checked: scaling the pieces of all ranks must scale the whole."""
    for placement in t.placements:
        if placement.is_partial() and placement.reduce_op not in ("sum", "avg"):
            raise ValueError(
                f"one DTensor is placed as {t.placements}, which ranks cannot scale each by itself: "
                "redistribute it to Replicate() before it is clipped"
            )
    return _local(t)


def _scales(q: QTensor) -> list[Tensor]:
    """The scales of a QTensor; multiplying them multiplies all its numbers."""
    format = q.format
    if format.block == "mx":
        raise ValueError(
            f"a gradient is a QTensor in {q.spec}, whose scales are bytes for powers of two: no other multiple of it "
            "can be stored. Clip its dequantize(), or quantise gradients to a format with fp32 scales, such as 1x128"
        )
    if format.power_of_two and torch.compiler.is_compiling():
        raise ValueError(
            f"a gradient is a QTensor in {q.spec}; clipping makes its scales other than powers of two, and so changes "
            "its format, which a compiled function cannot do: clip it outside of torch.compile"
        )
    copies = [copy for copy in (q.rowwise, q.columnwise) if copy is not None]
    scales = [copy.scale if copy.global_scale is None else copy.global_scale for copy in copies]
    if len(scales) == 2 and (scales[0] is scales[1] or _same_memory(*scales)):
        del scales[1]  # both copies may share one global_scale
    return scales


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return not torch.compiler.is_compiling() and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def mark_clipped(gradients: list[Tensor]) -> None:
    """Record for autograd that numbers inside of subclasses have changed, and that scales of QTensors are no longer
    powers of two."""
    changed = [t for t in gradients if isinstance(t, QTensor) or is_distributed(t)]
    for t in changed:
        q = _local(t) if is_distributed(t) else t
        if isinstance(q, QTensor) and q.format.power_of_two:
            q._declare(replace(q.format, power_of_two=False).spec)
    if changed and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(changed)
