"""Norms, zero counts and finiteness of many tensors at once, and gradient clipping.

    norm_p = (sum over tensors, sum over elements of |x|^p)^(1/p)          p = 1, 2, or the largest |x| for p = inf
    x *= c,  c = min(1, max_norm / (norm + 1e-6))                          rounded once to x's dtype
    zeros = number of elements with x == 0                                 -0.0 counts; NaN and subnormals do not
    nonfinite = any x is infinite or NaN

A `table` cuts tensors into chunks. One launch per dtype computes a partial result for each chunk, in fp32 or int32;
one more launch combines them. The order of additions depends on neither the device's size nor the number of threads:

- within a chunk, each lane adds every TILE-th element in fp32, and a tree adds the lanes;
- a partial 2-norm is a norm, not its square. If the sum of squares is so small or large that squares may have
  underflowed or overflowed, and the chunk is not all zeros, it is read again with x scaled by 2^90 or 2^-80;
- partial norms are combined as multiples of a power of two near the largest, in compensated fp32 summation, in the
  order of the table: dtypes in order of first appearance, then tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import Nothing, Op, is_distributed
from ..common.checks import real
from .arguments import NORMS, ClipArgs, ReduceArgs, ReduceOutputs, allocate_reduce, dtype_of_total
from .gradients import Kind, Tensors, kinds_of, mark_clipped, memory_of, numbers_of
from .reference import multi_tensor_clip_reference, multi_tensor_reduce_reference
from .table import check_writable

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class MultiTensorReduceOp(Op[ReduceArgs, ReduceOutputs], name="multi_tensor_reduce", variants=4):
    def allocate(self, a: ReduceArgs) -> ReduceOutputs:
        return allocate_reduce(a)

    @cached_property
    def launch(self) -> Callable[[ReduceOutputs, ReduceArgs], None]:
        from .launch import launch_multi_tensor_reduce

        return launch_multi_tensor_reduce

    def reference(self, a: ReduceArgs) -> ReduceOutputs:
        return multi_tensor_reduce_reference(a)


multi_tensor_reduce_op = MultiTensorReduceOp()


class MultiTensorClipOp(Op[ClipArgs, Nothing], name="multi_tensor_clip", variants=6):
    def allocate(self, a: ClipArgs) -> Nothing:
        return Nothing()

    @cached_property
    def launch(self) -> Callable[[Nothing, ClipArgs], None]:
        from .launch import launch_multi_tensor_clip

        return launch_multi_tensor_clip

    def reference(self, a: ClipArgs) -> Nothing:
        return multi_tensor_clip_reference(a)


multi_tensor_clip_op = MultiTensorClipOp()


# ---- public functions -----------------------------------------------------------------------------------


def grad_norm(
    tensors: Tensors,
    norm_type: float | str = 2.0,
    *,
    groups: Sequence[Any] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the p-norm (1, 2 or `math.inf`) of all gradients together, as if they were one tensor.

    The result is a 0-dim tensor on the device, in fp32 (fp64 if a gradient is); the host does not wait for it. A NaN
    anywhere makes it NaN, else an infinity makes it infinite; finite fp32 values neither overflow nor underflow in
    between. Equal tensors give equal bits.

    - `tensors`: an iterable of gradients or of parameters, such as `model.parameters()`; None is skipped. As in torch,
      a parameter, or another tensor that has a `.grad` or is a leaf that requires one, contributes its `.grad` and is
      skipped if that is None; with no gradient at all the norm is 0. Every other tensor contributes itself, so
      `p.detach()` counts the weight.

      Gradients may have any shape, even empty, in bf16, fp16, fp32 or fp64, mixed, on any devices. Each counts once per
      occurrence in the list: pass a tied weight's gradient once. Non-dense tensors (slices) are copied first; dense
      tensors of any stride order are read in place. A `QTensor` is dequantized.
    - `norm_type`: 1, 2, `math.inf` or "inf".
    - `groups`: process groups over whose ranks the tensors are sharded. If parameters are sharded in different ways,
      pass a list of `Shards` instead, in the same order on every rank:

          dense, split by tensor parallelism     Shards(a, (tp, pp))
          dense, replicated in it (norms)        Shards(b, (pp,))
          experts                                Shards(c, (ep, expert_tp, pp))

      A rank that holds none of them passes an empty list and still takes part. A distributed optimizer adds the
      data-parallel group. A DTensor (FSDP2, tensor parallelism) knows the groups that shard it; `groups` names only
      groups outside its mesh, such as pipeline stages. All ranks of a mesh pass their shards of the same DTensors, in
      the same order.
    - `device`: device of the result, by default that of the first tensor that is not on a CPU. Set it if the list may
      be empty and a group needs tensors on a GPU.

    Sums of p-th powers are added over groups in fp64, with one collective per group; the result is a plain tensor, the
    same on all ranks. A DTensor placed as `Partial` is summed first, with a collective of its own.

    >>> import torch, weft
    >>> weft.grad_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]], dtype=torch.bfloat16)])
    tensor(5.)
    """
    return _statistic(kinds_of(tensors, groups), _what(norm_type), device)


def count_zeros(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """Return the number of zeros as a 0-dim int64 tensor on the device. -0.0 counts; subnormals and NaN do not.

    Takes the arguments of `grad_norm`.

    >>> import torch, weft
    >>> weft.count_zeros([torch.tensor([0.0, -0.0, 1e-45]), torch.zeros(3, dtype=torch.bfloat16)])
    tensor(5)
    """
    return _statistic(kinds_of(tensors, groups), "zeros", device)


def any_nonfinite(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """Return whether any element is infinite or NaN, as a 0-dim bool tensor on the device.

    Takes the arguments of `grad_norm`. Call it before quantizing: in the default formats an Inf becomes the largest
    code with scale 1 (±448 in e4m3), which is finite. See `quantize`.

    >>> import torch, weft
    >>> weft.any_nonfinite([torch.ones(3), torch.tensor([float("nan")])])
    tensor(True)
    """
    return _statistic(kinds_of(tensors, groups), "nonfinite", device)


def clip_grads_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    norm: Tensor | None = None,
    groups: Sequence[Any] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`, and return the norm before scaling. A drop-in
    replacement for `torch.nn.utils.clip_grad_norm_` that takes gradients as well as parameters.

    Also known as clip_grad_norm_, gradient clipping.

    Each element is multiplied by min(1, max_norm / (norm + 1e-6)), torch's coefficient, in fp32, and rounded once. The
    coefficient is computed on the device, so the host does not wait; if it is 1, nothing is read or written.

    - `max_norm`: the largest norm that leaves the gradients as they are.
    - `parameters`, `norm_type`, `groups`, `device`: as in `grad_norm`. A tensor that contributes its `.grad` is never
      written itself. Each rank scales its shard of a DTensor. A `QTensor` keeps its codes; its fp32 scales (for nvfp4
      the global scale) are multiplied. Power-of-two scales then no longer are, so `pow2` is dropped from its format.
      mx scales can only be powers of two, so mx gradients raise ValueError.
    - `error_if_nonfinite`: raise RuntimeError instead of clipping by an infinite or NaN norm. Only this option makes
      the host wait for the device.
    - `foreach`: ignored; accepted for compatibility with torch.
    - `norm`: the norm to clip by, if `grad_norm` was called before (perhaps with more tensors); computed by default.

    As in torch, an infinite norm turns finite elements into 0 and infinite ones into NaN, and a NaN norm turns
    everything into NaN: check the norm, or `any_nonfinite`, before the optimizer step. Tensors that share memory raise
    ValueError.

    >>> import torch, weft
    >>> gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> weft.clip_grads_(gradients, max_norm=1.0)
    tensor(5.)
    >>> gradients
    [tensor([0.6000]), tensor([0.8000])]
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise TypeError(
            "max_norm must be a number, because reading it from a device tensor would make the host wait; got a tensor "
            f"on {max_norm.device}"
        )
    max_norm = float(max_norm) if isinstance(max_norm, Tensor) else real("max_norm", max_norm)
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0; got {max_norm}")
    what, kinds = _what(norm_type), kinds_of(parameters, groups)
    norm_override = None if norm is None else _checked_norm(norm)
    if all(kind.plain for kind in kinds) and (norm_override is None or not norm_override.requires_grad):
        return _clip(kinds, max_norm, what, norm_override, device, error_if_nonfinite)
    with torch.no_grad():
        return _clip(kinds, max_norm, what, norm_override, device, error_if_nonfinite)


def _clip(
    kinds: list[Kind],
    max_norm: float,
    what: str,
    norm: Tensor | None,
    device: torch.device | str | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """Run `clip_grads_` where autograd records nothing: for plain tensors, or under `no_grad`."""
    gradients = kinds[0].gradients if len(kinds) == 1 else [t for kind in kinds for t in kind.gradients]
    plain = all(kind.plain for kind in kinds)
    sets = _sets(gradients if plain else memory_of(gradients))
    if len(sets) > 1 and not torch.compiler.is_compiling():
        # The op sees one set at a time, so memory shared between sets must be detected before any is clipped.
        check_writable([t for members in sets.values() for t in members])
    if norm is None:
        norm = _statistic(kinds, what, device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so nothing was clipped: skip this step, or pass "
            "error_if_nonfinite=False to clip by it anyway"
        )
    for (set_device, double), members in sets.items():
        local_norm = norm.to(
            set_device, torch.float64 if double else torch.float32, non_blocking=set_device.type != "cpu"
        )
        multi_tensor_clip_op(ClipArgs(members, local_norm, max_norm))
    if not plain:
        mark_clipped(gradients)
    return norm


def _what(norm_type: float | str) -> str:
    try:
        return NORMS[float(norm_type)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"norm_type must be 1, 2 or math.inf; got {norm_type}") from None


def _checked_norm(norm: Any) -> Tensor:
    if not isinstance(norm, Tensor):
        raise TypeError(f"norm must be a tensor, as grad_norm returns it; got a {type(norm).__name__}")
    if norm.numel() != 1 or not norm.is_floating_point():
        raise ValueError(f"norm must have one floating-point element; got {norm.dtype} {tuple(norm.shape)}")
    return norm.full_tensor() if is_distributed(norm) else norm  # type: ignore[attr-defined]


_Sets = dict[tuple[torch.device, bool], list[Tensor]]


def _sets(tensors: list[Tensor]) -> _Sets:
    """Group tensors into sets that one op call can take: one device, and all or none in fp64."""
    if not tensors:
        return {}
    dtypes = {t.dtype for t in tensors}
    if not _DTYPES.issuperset(dtypes):
        wrong = ", ".join(sorted(str(dtype) for dtype in dtypes - _DTYPES))
        raise ValueError(f"gradients must be float32, bfloat16, float16 or float64; got {wrong}")
    double = torch.float64 in dtypes
    if not (double and len(dtypes) > 1) and _on_one_device(tensors):
        return {(tensors[0].device, double): tensors}
    sets: _Sets = {}
    for t in tensors:
        sets.setdefault((t.device, t.dtype is torch.float64), []).append(t)
    return sets


def _on_one_device(tensors: list[Tensor]) -> bool:
    if tensors[0].is_cpu:  # comparing devices takes five times as long
        return False not in {t.is_cpu for t in tensors}
    if tensors[0].is_cuda:
        return all(t.is_cuda for t in tensors) and len({t.get_device() for t in tensors}) == 1
    return len({t.device for t in tensors}) == 1


class _Part(NamedTuple):
    """Statistics of tensors with one placement, one per device and precision."""

    totals: list[Tensor]
    kind: int
    groups: tuple[Any, ...]  # mesh groups over whose ranks the statistics are combined


def _statistic(kinds: list[Kind], what: str, device: torch.device | str | None) -> Tensor:
    if device is None and len(kinds) == 1 and kinds[0].plain and not kinds[0].groups:
        sets = _sets(kinds[0].gradients)
        if len(sets) == 1:
            (members,) = sets.values()
            return multi_tensor_reduce_op(ReduceArgs(members, what)).total
    parts: list[_Part] = []
    rest = []  # per kind, its groups outside of meshes
    with torch.no_grad():
        for number, kind in enumerate(kinds):
            tensors = numbers_of(kind)
            mesh_groups = [group for placed in tensors for groups in placed for group in groups]
            shared = _mesh_groups(kind.groups, mesh_groups)
            rest.append([group for group in kind.groups if group not in shared])
            for placed, members in tensors.items():
                totals = [
                    multi_tensor_reduce_op(ReduceArgs(subset, what)).total
                    for subset in _sets(members).values()
                ]
                remaining = [group for group in shared.values() if group not in placed.replicated]
                parts.append(_Part(totals, number, tuple(dict.fromkeys((*placed.sharded, *remaining)))))
        if device is None:
            devices = [number.device for part in parts for number in part.totals]
            device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return _combine_ranks(parts, rest, what, torch.device(device))


def _mesh_groups(groups: tuple[Any, ...], mesh_groups: list[Any]) -> dict[Any, Any]:
    """Return the groups that are also mesh groups of the DTensors, each with the mesh group of the same ranks. Plain
    tensors next to the DTensors are summed over them too."""
    matches: dict[Any, Any] = {}
    if not (groups and mesh_groups):
        return matches
    ranks_of = torch.distributed.get_process_group_ranks
    for group in groups:
        ranks = set(ranks_of(group))
        for mesh_group in mesh_groups:
            mesh_ranks = set(ranks_of(mesh_group))
            if ranks == mesh_ranks:
                matches[group] = mesh_group
            elif len(ranks & mesh_ranks) > 1:
                raise ValueError(
                    f"a DTensor's mesh has the group of ranks {sorted(mesh_ranks)}, and groups= has {sorted(ranks)}: "
                    "ranks in both would be added up twice. Remove groups of the mesh from groups="
                )
    return matches


def _combine_ranks(parts: list[_Part], rest: list[list[Any]], what: str, device: torch.device) -> Tensor:
    """Combine the statistics of all parts over the ranks of their groups: first over mesh groups, then over `rest`,
    with one value per kind. Ranks on different meshes thus take part in the same collectives.

    Sums are float64 or int64, which is exact enough. Maximum norms are compared by their bits as integers, which keeps
    NaN."""
    result = dtype_of_total([], what)
    if any(value.dtype is torch.float64 for part in parts for value in part.totals):
        result = torch.float64
    dtype = torch.int64 if what in ("zeros", "nonfinite") else torch.float64
    largest = what in ("norminf", "nonfinite")
    local = []
    for part in parts:
        moved = [value.to(device, dtype, non_blocking=device.type != "cpu") for value in part.totals]
        values = torch.stack([torch.zeros((), dtype=dtype, device=device), *moved])
        if what == "norminf":
            values = values.abs().view(torch.int64)
        elif what == "norm2":
            values = values.square()
        local.append(_combined(values, largest))
    local = _over_groups(local, [part.groups for part in parts], largest)
    kinds = []
    for kind in range(len(rest)):
        members = [value for value, part in zip(local, parts, strict=True) if part.kind == kind]
        kinds.append(_combined(torch.stack(members), largest))
    total = _combined(torch.stack(_over_groups(kinds, rest, largest)), largest)
    if what == "norminf":
        return total.view(torch.float64).to(result)
    if what == "nonfinite":
        return total != 0
    return total.sqrt().to(result) if what == "norm2" else total.to(result)


def _combined(values: Tensor, largest: bool) -> Tensor:
    return values.amax() if largest else values.sum()


def _over_groups(values: list[Tensor], groups: Sequence[Sequence[Any]], largest: bool) -> list[Tensor]:
    """Reduce each value by sum or maximum over the ranks of its groups, with one collective per group."""
    values = list(values)
    for group in dict.fromkeys(group for own_groups in groups for group in own_groups):
        indices = [index for index, own_groups in enumerate(groups) if group in own_groups]
        stacked = torch.stack([values[index] for index in indices])
        op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(stacked, op, group)
        for index, value in zip(indices, stacked.unbind(), strict=True):
            values[index] = value
    return values
