"""Checks of memory that the caller provides: results by `out=`, and a workspace for everything else."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_loom.testing import NAN, Guarded, guarded_allocations
from triton_loom.testing.comparison import WORDS

import weft
from tests.catalogue.calls import arguments_of
from tests.support.allocations import allocations_of
from weft import QTensor
from weft.lab.calls import assert_same, returned, small
from weft.lab.checks import NotApplicable
from weft.lab.families import Call, Workload
from weft.quant.copies import with_padding


class Watching(TorchDispatchMode):
    """Mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def workspace_of(nbytes: int) -> Guarded:
    """Return bytes between bands."""
    return Guarded((nbytes,), torch.uint8, fill=NAN)


def launches_in_callers_memory(workload: Workload) -> None:
    """Check an op whose outputs and workspace are the caller's: the same bits, no allocation, nothing written beyond
    them, and a workspace that is too small is refused."""
    op = weft.catalogue[workload.op]
    with torch.no_grad():
        with Watching():  # or ops that are made of functions take a shortcut past `Op.__call__`
            a = arguments_of(small(workload), workload.op, lambda call: call())[-1]
        wanted = op(a)
        with guarded_allocations() as bands:
            outputs = op.allocate(a)
        for output in named(op, outputs).values():
            fill_with_nan(output)

        def call() -> Any:
            return op(a) if op.written else op.into(outputs, a)

        with weft.workspace() as needed:
            call()
        workspace = workspace_of(needed.nbytes)
        with weft.workspace(workspace.tensor):
            call()
            sizes = allocations_of(call)
        # On CPUs some ops read indices first, to check them.
        checking = [] if op.validate is None else allocations_of(lambda: op.validate(a))
        assert sizes == checking, f"{sizes} bytes were allocated"
        for band in (*bands, workspace):
            band.check()
        assert_same(named(op, outputs), named(op, wanted), "in the caller's memory")
        if needed.nbytes:
            few = workspace_of(needed.nbytes - 1)
            with weft.workspace(few.tensor), pytest.raises(ValueError, match=f"needs {needed.nbytes} bytes"):
                call()
            few.check()


def fill_with_nan(x: Tensor) -> None:
    """Set all bits of a tensor's elements; of padding between them none."""
    bits = x.view(WORDS[x.itemsize])
    bits.fill_(-1 if bits.dtype.is_signed else 255)


def results_in_callers_memory(workload: Workload) -> None:
    """Check a public function with `out=`: the same bits as without it, in the caller's memory and nowhere else, and no
    allocation besides results that `out=` does not take."""
    call = small(workload)
    accepted = inspect.signature(call.function).parameters
    if "out" not in accepted:
        raise NotApplicable("it takes no out=")
    with torch.no_grad():
        wanted = returned(call)
        bands: dict[str, list[Guarded]] = {}
        fresh = {name: guarded(value, bands.setdefault(name, [])) for name, value in wanted.items()}
        inputs = storages(call.kwargs)
        targets = {name: t for name, t in fresh.items() if not storages(wanted[name]).keys() & inputs.keys()}
        options = {}
        if "residual_out" in accepted:
            options["residual_out"] = targets.pop("residual", None)
        first, *more = targets.values()
        original = call()
        if hasattr(original, "_fields"):
            first, more = type(original)(**(dict.fromkeys(original._fields) | targets)), []
        into = call.with_(out=(first, *more) if more else first, **options)
        with weft.workspace() as needed:
            into()
        workspace = workspace_of(needed.nbytes)
        with weft.workspace(workspace.tensor):
            got = returned(into)
            sizes = allocations_of(into)
        assert_same(got, wanted, "out=")
        theirs = storages(into.kwargs)
        new = {storage: nbytes for storage, nbytes in storages(got).items() if storage not in theirs}
        assert sum(sizes) == sum(new.values()), (
            f"{sizes} bytes were allocated; new results have {[*new.values()]}"
        )
        assert storages(first).keys() & storages(got).keys(), "out is not returned"
        if not new:
            replays_without_allocation(into, workspace.tensor, wanted)
        workspace.check()
        for band in itertools.chain(*bands.values()):
            band.check()
        if type(first) is Tensor:
            refuses_wrong_memory(
                call, first, lambda out: into.with_(out=(out, *more) if more else out), wanted
            )


def replays_without_allocation(into: Call, workspace: Tensor, wanted: dict[str, Tensor]) -> None:
    """Check that a recording of the call allocates nothing and reads nothing on the host, which `capture` refuses."""
    names = list(into.tensors().keys() - {"out", "residual_out"})

    def function(*tensors: Tensor) -> dict[str, Tensor]:
        with weft.workspace(workspace):
            return returned(into.with_(**dict(zip(names, tensors, strict=False))))

    examples = [into[name] for name in names] or [torch.zeros(1)]
    step = weft.capture(function, *examples)
    assert_same(step(*examples), wanted, "replayed")
    sizes = allocations_of(lambda: step(*examples))
    assert not sizes, f"a replay allocates {sizes} bytes"


def refuses_wrong_memory(
    call: Call, out: Tensor, into: Callable[[Tensor], Call], wanted: dict[str, Tensor]
) -> None:
    """Check that an `out` that overlaps an argument, itself, or has another shape is refused, unless the results are
    right all the same, as with an argument that was converted to another dtype before."""
    more = torch.empty((out.shape[0] + 1, *out.shape[1:]), dtype=out.dtype)
    wrong = [more, out[:1].expand(out.shape)] if out.dim() and len(out) > 1 else [more]
    for each in wrong:
        with pytest.raises(ValueError, match=r"\bout (must|share)"):
            into(each)()
    for name, tensor in call.tensors().items():
        if not tensor.numel():
            continue
        # Two views of the same bytes, with starts that differ by one row of the result.
        offset = out.shape[-1] * out.itemsize
        if offset >= tensor.nbytes:
            continue
        nbytes = max(tensor.nbytes, offset + out.nbytes)
        shared = torch.zeros(-(-nbytes // 64) * 64, dtype=torch.uint8)
        argument = shared[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        target = shared[offset : offset + out.nbytes].view(out.dtype).view(out.shape)
        try:
            got = returned(into(target).with_(**{name: argument}))
        except ValueError as error:
            if "shares memory with" not in str(error):
                raise
        else:
            assert_same(got, wanted, f"out= that overlaps {name}")


def guarded(value: Tensor, bands: list[Guarded]) -> Tensor:
    """Return a tensor like this one between bands, filled with NaN; codes and scales of a QTensor each have bands."""

    def fresh(t: Tensor) -> Tensor:
        padded = with_padding(t) if isinstance(value, QTensor) and t.dim() == 2 and t.stride(1) == 1 else t
        bands.append(Guarded(padded.shape, t.dtype, padded.stride(), fill=NAN))
        return bands[-1].tensor.as_strided(t.shape, t.stride(), bands[-1].tensor.storage_offset())

    if not isinstance(value, QTensor):
        return fresh(value)
    shared = functools.cache(fresh)  # both copies have one global_scale
    copies = (None if codes is None else codes.map(shared) for codes in (value.rowwise, value.columnwise))
    return QTensor(value.shape, value.dtype, value.spec, *copies)


def storages(value: Any) -> dict[int, int]:
    """Return the bytes of each storage of the tensors in arguments or results."""
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    )
    found: dict[int, int] = {}
    for each in values:
        if isinstance(each, (dict, tuple, list)):
            found |= storages(each)
        elif isinstance(each, QTensor):
            found |= storages([each.rowwise, each.columnwise])
        elif isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def named(op: Any, outputs: Any) -> dict[str, Tensor]:
    """Return the outputs by name, without stand-ins."""
    pairs = zip(op.outputs.names, op.outputs.flatten(outputs), strict=True)
    return {name: t for name, t in pairs if t is not None and not (t.numel() > 1 and 0 in t.stride())}
