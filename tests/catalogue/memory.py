"""Checks of memory that the caller provides: results by `out=`, and a workspace for everything else."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_loom.testing import NAN, Guarded, guarded_allocations

import weft
from tests.catalogue.calls import arguments_of
from tests.support.allocations import allocations_of
from weft import QTensor
from weft.lab.calls import assert_same, returned, small
from weft.lab.checks import NotApplicable
from weft.lab.families import Workload
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
            into()
            got = returned(into)
            sizes = allocations_of(into)
        assert_same(got, wanted, "out=")
        theirs = storages(into.kwargs)
        new = {storage: nbytes for storage, nbytes in storages(got).items() if storage not in theirs}
        assert sum(sizes) == sum(new.values()), (
            f"{sizes} bytes were allocated; new results have {[*new.values()]}"
        )
        assert storages(first).keys() & storages(got).keys(), "out is not returned"
        workspace.check()
        for band in itertools.chain(*bands.values()):
            band.check()


def guarded(value: Tensor, bands: list[Guarded]) -> Tensor:
    """Return a tensor like this one between bands, filled with NaN; codes and scales of a QTensor each have bands."""

    def fresh(t: Tensor) -> Tensor:
        padded = with_padding(t) if isinstance(value, QTensor) and t.dim() == 2 and t.stride(1) == 1 else t
        bands.append(Guarded(padded.shape, t.dtype, padded.stride(), fill=NAN))
        return bands[-1].tensor.as_strided(t.shape, t.stride(), bands[-1].tensor.storage_offset())

    if not isinstance(value, QTensor):
        return fresh(value)
    copies = (None if codes is None else codes.map(fresh) for codes in (value.rowwise, value.columnwise))
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
