"""Statistics of many tensors at once: the norm of all gradients, clipping by it, zeros, numbers that are not finite.

    norm_p = (sum over tensors, sum over elements of |x|^p)^(1/p)          p = 1, 2, or the largest |x| for p = inf
    x *= c,  c = min(1, max_norm / (norm + 1e-6))                          rounded once to x's dtype
    zeros = number of elements with x == 0                                 -0.0 is one; NaN and subnormals are not
    nonfinite = whether any x is infinite or NaN

A `table` cuts tensors into chunks. One launch for each dtype gives a partial result for each chunk, in fp32 or int32;
one more launch puts them together. How the numbers are added depends on neither the device's size nor the number of
threads:

- in a chunk, each lane adds every TILE-th number in fp32, and a tree adds the lanes;
- a partial 2-norm is a norm, not its square. Where the sum of squares is so small or so large that squares may have
  vanished or overflowed, and the chunk is not all zeros, it is read again and x scaled by 2^90 or 2^-80;
- partial norms are put together as multiples of a power of two near the largest, in fp32 with the rounding errors added
  up beside the sum, in the order of the table: dtypes as they first come in the list, then tensors.
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
    """The p-norm of all numbers of all gradients together, as if they were one tensor: 1, 2 or `math.inf`.

    The result is a 0-dim tensor on the device, in fp32 (fp64 if a gradient is); nothing waits for it. A NaN anywhere
    makes it NaN, else an infinity makes it infinite; finite fp32 numbers neither overflow nor vanish on the way. The
    same tensors give the same bits.

    - tensors: an iterable of gradients or of parameters, such as `model.parameters()`; None is passed over. As in
      torch, a parameter, or another tensor that has a `.grad` or is a leaf that requires one, stands for its `.grad`,
      and is passed over where that is None: with no gradient at all the norm is 0. Every other tensor stands for
      itself; `p.detach()` is the weight.

      Gradients are of any shapes, empty ones too, in bf16, fp16, fp32 or fp64, mixed, on any devices. Each counts as
      often as it is in the list: give a tied weight's gradient once. Tensors with gaps (slices) are copied first; dense
      ones of any stride order are read where they lie. A `QTensor` is dequantised.
    - norm_type: 1, 2, `math.inf` or "inf".
    - groups: process groups over whose ranks the tensors are sharded. Where kinds of parameters are sharded
      differently, give a list of `Shards` instead, the same kinds in the same order on every rank:

          dense, split by tensor parallelism     Shards(a, (tp, pp))
          dense, replicated in it (norms)        Shards(b, (pp,))
          experts                                Shards(c, (ep, expert_tp, pp))

      A rank without tensors of a kind gives an empty list, and takes part. With a distributed optimizer, the
      data-parallel group is one more. A DTensor (FSDP2, tensor parallelism) says itself over which groups it is
      sharded; `groups` names only those that its mesh does not have, such as pipeline stages. All ranks of a mesh give
      their pieces of the same DTensors, in the same order.
    - device: of the result; that of the first tensor that is not on a CPU if it is not given. Name it where the list
      may be empty and a group needs tensors on a GPU.

    The sums of p-th powers are added over groups in fp64, with one collective for each group; the result is a plain
    tensor, the same on all ranks. A DTensor that is placed as `Partial` is summed up first, with a collective of its
    own.

    >>> import torch, weft
    >>> weft.grad_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]], dtype=torch.bfloat16)])
    tensor(5.)
    """
    return _statistic(kinds_of(tensors, groups), _what(norm_type), device)


def count_zeros(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """How many numbers are zero: an int64 0-dim tensor on the device. -0.0 is zero, subnormal numbers and NaN are not.

    Arguments are those of `grad_norm`.

    >>> import torch, weft
    >>> weft.count_zeros([torch.tensor([0.0, -0.0, 1e-45]), torch.zeros(3, dtype=torch.bfloat16)])
    tensor(5)
    """
    return _statistic(kinds_of(tensors, groups), "zeros", device)


def any_nonfinite(
    tensors: Tensors, *, groups: Sequence[Any] = (), device: torch.device | str | None = None
) -> Tensor:
    """Whether any number is infinite or NaN: a bool 0-dim tensor on the device. Arguments are those of `grad_norm`.

    Ask before a tensor is quantised. Afterwards it may be too late: in the usual formats an Inf has become the largest
    code with a scale of 1 (±448 in e4m3), which is finite. See `quantize`.

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
    """Scale gradients in place so that their norm is at most `max_norm`; returns the norm that they had. It replaces
    `torch.nn.utils.clip_grad_norm_`, and takes gradients as well as parameters.

    Each number is multiplied by min(1, max_norm / (norm + 1e-6)), the coefficient of torch's `clip_grad_norm_`, in
    fp32, and rounded once. The coefficient is made on the device, so nothing waits; where it is 1 nothing is read or
    written.

    - parameters, norm_type, groups, device: those of `grad_norm`. A tensor that stands for its `.grad` is never written
      to. Each rank scales its piece of a DTensor. A `QTensor` keeps its codes, and its fp32 scales (for nvfp4 the one
      of the whole tensor) are multiplied. Scales that were powers of two are then no longer such, so its format becomes
      the one without `pow2`. The scales of mx can only be powers of two, so mx is refused.
    - error_if_nonfinite: raise a RuntimeError instead of clipping by a norm that is infinite or NaN. Only with this
      option the host waits for the device.
    - foreach: ignored; it is accepted because torch's function has it.
    - norm: the norm to clip by, if `grad_norm` has been called before (perhaps with more tensors); by default it is
      computed here.

    As in torch, an infinite norm makes finite numbers 0 and infinite ones NaN, and a norm of NaN makes everything NaN:
    look at the norm, or at `any_nonfinite`, before the optimizer's step. Two tensors that share memory are refused.

    >>> import torch, weft
    >>> gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> weft.clip_grads_(gradients, max_norm=1.0)
    tensor(5.)
    >>> gradients
    [tensor([0.6000]), tensor([0.8000])]
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise TypeError(
            "max_norm must be a number: to read it from a tensor, the host would wait for the device"
        )
    max_norm = float(max_norm) if isinstance(max_norm, Tensor) else real("max_norm", max_norm)
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0; got {max_norm}")
    what, kinds = _what(norm_type), kinds_of(parameters, groups)
    given = None if norm is None else _given_norm(norm)
    if all(kind.plain for kind in kinds) and (given is None or not given.requires_grad):
        return _clip(kinds, max_norm, what, given, device, error_if_nonfinite)
    with torch.no_grad():
        return _clip(kinds, max_norm, what, given, device, error_if_nonfinite)


def _clip(
    kinds: list[Kind],
    max_norm: float,
    what: str,
    norm: Tensor | None,
    device: torch.device | str | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """`clip_grads_` where autograd records nothing: for plain tensors, or under `no_grad`."""
    gradients = kinds[0].gradients if len(kinds) == 1 else [t for kind in kinds for t in kind.gradients]
    plain = all(kind.plain for kind in kinds)
    sets = _sets(gradients if plain else memory_of(gradients))
    if len(sets) > 1 and not torch.compiler.is_compiling():
        # The op sees one set at a time, so memory shared between sets has to be found before any is clipped.
        check_writable([t for alike in sets.values() for t in alike])
    if norm is None:
        norm = _statistic(kinds, what, device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so nothing was clipped: skip this step, or clip by "
            "such a norm with error_if_nonfinite=False"
        )
    for (on, double), alike in sets.items():
        here = norm.to(on, torch.float64 if double else torch.float32, non_blocking=on.type != "cpu")
        multi_tensor_clip_op(ClipArgs(alike, here, max_norm))
    if not plain:
        mark_clipped(gradients)
    return norm


def _what(norm_type: float | str) -> str:
    try:
        return NORMS[float(norm_type)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"norm_type must be 1, 2 or math.inf; got {norm_type}") from None


def _given_norm(norm: Any) -> Tensor:
    if not isinstance(norm, Tensor):
        raise TypeError(f"norm must be a tensor, as grad_norm gives it; got a {type(norm).__name__}")
    if norm.numel() != 1 or not norm.is_floating_point():
        raise ValueError(f"norm must be one floating-point number; got {norm.dtype} {tuple(norm.shape)}")
    return norm.full_tensor() if is_distributed(norm) else norm  # type: ignore[attr-defined]


_Sets = dict[tuple[torch.device, bool], list[Tensor]]


def _sets(tensors: list[Tensor]) -> _Sets:
    """The tensors in sets that one call of an op can take: of one device, and all or none in fp64."""
    if not tensors:
        return {}
    dtypes = {t.dtype for t in tensors}
    if not _DTYPES.issuperset(dtypes):
        wrong = ", ".join(sorted(str(dtype) for dtype in dtypes - _DTYPES))
        raise ValueError(f"gradients must be of float32, bfloat16, float16 or float64; one is of {wrong}")
    double = torch.float64 in dtypes
    if not (double and len(dtypes) > 1) and _on_one_device(tensors):
        return {(tensors[0].device, double): tensors}
    found: _Sets = {}
    for t in tensors:
        found.setdefault((t.device, t.dtype is torch.float64), []).append(t)
    return found


def _on_one_device(tensors: list[Tensor]) -> bool:
    if tensors[0].is_cpu:  # to ask each for its device takes five times as long
        return False not in {t.is_cpu for t in tensors}
    if tensors[0].is_cuda:
        return all(t.is_cuda for t in tensors) and len({t.get_device() for t in tensors}) == 1
    return len({t.device for t in tensors}) == 1


class _Part(NamedTuple):
    """The numbers, one for each device and precision, of tensors that are sharded alike."""

    numbers: list[Tensor]
    kind: int
    groups: tuple[Any, ...]  # the groups of their meshes over whose ranks numbers are added up


def _statistic(kinds: list[Kind], what: str, device: torch.device | str | None) -> Tensor:
    if device is None and len(kinds) == 1 and kinds[0].plain and not kinds[0].groups:
        sets = _sets(kinds[0].gradients)
        if len(sets) == 1:
            (alike,) = sets.values()
            return multi_tensor_reduce_op(ReduceArgs(alike, what)).total
    parts: list[_Part] = []
    rest = []  # for each kind, the groups that do not belong to its meshes
    with torch.no_grad():
        for number, kind in enumerate(kinds):
            tensors = numbers_of(kind)
            along = [group for placed in tensors for groups in placed for group in groups]
            shared = _of_a_mesh(kind.groups, along)
            rest.append([group for group in kind.groups if group not in shared])
            for placed, alike in tensors.items():
                numbers = [
                    multi_tensor_reduce_op(ReduceArgs(some, what)).total for some in _sets(alike).values()
                ]
                given = [group for group in shared.values() if group not in placed.replicated]
                parts.append(_Part(numbers, number, tuple(dict.fromkeys((*placed.sharded, *given)))))
        if device is None:
            devices = [number.device for part in parts for number in part.numbers]
            device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return _together(parts, rest, what, torch.device(device))


def _of_a_mesh(groups: tuple[Any, ...], along: list[Any]) -> dict[Any, Any]:
    """The given groups that DTensors know from their meshes, each with the group of the same ranks in `along`, the
    groups of these meshes. Plain tensors beside the DTensors are added up over them as well."""
    found: dict[Any, Any] = {}
    if not (groups and along):
        return found
    ranks_of = torch.distributed.get_process_group_ranks
    for group in groups:
        ranks = set(ranks_of(group))
        for own in along:
            of_own = set(ranks_of(own))
            if ranks == of_own:
                found[group] = own
            elif len(ranks & of_own) > 1:
                raise ValueError(
                    f"a DTensor is on a mesh with the group of ranks {sorted(of_own)}, and groups= has "
                    f"{sorted(ranks)}: what both have would be added up twice. A DTensor needs no groups of its mesh"
                )
    return found


def _together(parts: list[_Part], rest: list[list[Any]], what: str, device: torch.device) -> Tensor:
    """One number from those of all parts, over the ranks of their groups: first over the groups of meshes, then, with
    one number for each kind of tensors, over `rest`. So ranks on different meshes take part in the same collectives,
    whatever they have on their meshes.

    Sums are in float64 or int64, which is exact enough. A largest norm is compared by its bits as an integer, which
    keeps NaN."""
    result = dtype_of_total([], what)
    if any(number.dtype is torch.float64 for part in parts for number in part.numbers):
        result = torch.float64
    dtype = torch.int64 if what in ("zeros", "nonfinite") else torch.float64
    largest = what in ("norminf", "nonfinite")
    local = []
    for part in parts:
        moved = [number.to(device, dtype, non_blocking=device.type != "cpu") for number in part.numbers]
        numbers = torch.stack([torch.zeros((), dtype=dtype, device=device), *moved])
        if what == "norminf":
            numbers = numbers.abs().view(torch.int64)
        elif what == "norm2":
            numbers = numbers.square()
        local.append(_combined(numbers, largest))
    local = _over_groups(local, [part.groups for part in parts], largest)
    kinds = []
    for kind in range(len(rest)):
        its = [number for number, part in zip(local, parts, strict=True) if part.kind == kind]
        kinds.append(_combined(torch.stack(its), largest))
    total = _combined(torch.stack(_over_groups(kinds, rest, largest)), largest)
    if what == "norminf":
        return total.view(torch.float64).to(result)
    if what == "nonfinite":
        return total != 0
    return total.sqrt().to(result) if what == "norm2" else total.to(result)


def _combined(numbers: Tensor, largest: bool) -> Tensor:
    return numbers.amax() if largest else numbers.sum()


def _over_groups(numbers: list[Tensor], groups: Sequence[Sequence[Any]], largest: bool) -> list[Tensor]:
    """Each number, summed or compared over the ranks of its groups, with one collective for each group."""
    numbers = list(numbers)
    for group in dict.fromkeys(group for some in groups for group in some):
        places = [place for place, some in enumerate(groups) if group in some]
        together = torch.stack([numbers[place] for place in places])
        op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(together, op, group)
        for place, number in zip(places, together.unbind(), strict=True):
            numbers[place] = number
    return numbers
