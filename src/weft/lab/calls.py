"""Call ops on the device under test: results and gradients by name, and their comparison.

Inputs are drawn and results are judged on the CPU. The op runs on the device of `conditions`, to and from which tensors
are copied, also inside an autograd graph; so one truth serves all devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import words

from ..quant import Codes, QTensor
from ..runtime import catalogue, recording
from .families import Call, Workload, results_of
from .problem import moved

# ---- device and inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    device: torch.device
    seed: int


_conditions = Conditions(torch.device("cpu"), seed=0)


def conditions() -> Conditions:
    """Return the device under test and the seed of the inputs."""
    return _conditions


@contextmanager
def under(**changed: Any) -> Iterator[None]:
    """Run calls on another device or with another seed: `with under(device=..., seed=...):`."""
    global _conditions
    before = _conditions
    _conditions = replace(before, **changed)
    try:
        yield
    finally:
        _conditions = before


def few_rows(workload: Workload) -> int:
    """Return a number of rows that exercises every tail: more than 128 where programs own stripes of 128 rows."""
    tall = dict(workload.settings).get("columnwise") and workload.cols <= 2048
    return 131 if tall else 3 if len(workload.shape) > 2 else 5


def small(workload: Workload, **changed: Any) -> Call:
    """Return the call of a workload with few rows and its inputs on the CPU."""
    return workload.make(**{"rows": few_rows(workload), "seed": _conditions.seed} | changed)


# ---- results as flat lists of named tensors ------------------------------------------------------------


def results(call: Call) -> dict[str, Tensor]:
    """Return a call's results by name, computed on the device under test. Gradients are named d…"""
    got: dict[str, Tensor] = moved(returned(call.to(_conditions.device)), call.device)
    return got


def returned(call: Call) -> dict[str, Tensor]:
    """Return a call's results by name on the call's own device."""
    got = call()
    if hasattr(got, "_fields"):
        named = {name: value for name, value in got._asdict().items() if isinstance(value, (Tensor, QTensor))}
        gradients = call.function.__name__.endswith("_backward")
        return {f"d{name}" if gradients else name: value for name, value in named.items()}
    values = (got,) if isinstance(got, Tensor) else tuple(got)
    names = ["y", *(f"output{i}" for i in range(1, len(values)))]
    naming = results_of(call.function)
    if naming is not None:
        names = naming(call)
    return dict(zip(names, values, strict=True))


def parts(named: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by name, with each quantized tensor split into its fields."""
    flat: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, QTensor):
            for side in ("rowwise", "columnwise"):
                for field, part in zip(Codes._fields, getattr(value, side) or (), strict=False):
                    if isinstance(part, Tensor):
                        flat[f"{name}.{side}.{field}"] = part.detach()
        elif value is not None:
            flat[name] = value.detach().resolve_neg()
    return flat


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Raise unless both sets of tensors are equal bit for bit."""
    got, wanted = parts(got), parts(wanted)
    assert got.keys() == wanted.keys()
    for name in got:
        assert got[name].shape == wanted[name].shape, f"{what}: shape of {name}"
        different = (words(got[name]) != words(wanted[name])).sum()
        assert not different, f"{what}: {different} of {got[name].numel()} elements of {name} differ"


# ---- gradients --------------------------------------------------------------------------------------


def handed_through(value: Tensor) -> bool:
    """Return whether a result is a view of an input, as the gate of a modulation is."""
    base = value._base
    return base is not None and base.is_leaf and base.requires_grad


def upstreams(outputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Return a random upstream gradient for each differentiable output."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in outputs.items()
        if value.requires_grad and not handed_through(value)
    }


def run(call: Call, gradients: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Run forward and backward; return outputs, and gradients named d…"""
    call = call.requiring_grad()
    outputs = results(call)
    return {**outputs, **backward(call, outputs, gradients or upstreams(outputs))}


def backward(
    call: Call, outputs: dict[str, Tensor], gradients: dict[str, Tensor], **kwargs: Any
) -> dict[str, Tensor]:
    leaves = {name: t for name, t in call.tensors().items() if t.requires_grad}
    dense = [o.dequantize() if isinstance(o, QTensor) else o for o in (outputs[name] for name in gradients)]
    gradients_of_leaves = torch.autograd.grad(
        dense, list(leaves.values()), list(gradients.values()), allow_unused=True, **kwargs
    )
    return {
        f"d{name}": grad for name, grad in zip(leaves, gradients_of_leaves, strict=True) if grad is not None
    }


def tracked(op: str, call: Call) -> bool:
    """Return whether a call's tensors are leaves of a graph; integers and quantized ones are not."""
    if not catalogue[op].differentiable or any(isinstance(value, QTensor) for value in call.kwargs.values()):
        return False
    return any(t.requires_grad for t in call.requiring_grad().tensors().values())


_differentiable: dict[str, bool] = {}


def differentiable(workload: Workload) -> bool:
    if str(workload) not in _differentiable:
        with recording("sm_90"):
            call = workload.make("meta", rows=few_rows(workload))
            _differentiable[str(workload)] = tracked(workload.op, call)
    return _differentiable[str(workload)]


# ---- elements before quantization -------------------------------------------------------------------


def own_numbers(call: Call) -> dict[str, Tensor]:
    """Return the fp32 elements that quantized results encode, from a call whose inputs are fp32."""
    unquantized = {k: v for k, v in call.kwargs.items() if k not in ("quantize", "columnwise", "quant_scale")}
    floats = {
        name: t.float() for name, t in call.tensors().items() if t.is_floating_point() and name in unquantized
    }
    return results(Call(call.function, {**unquantized, **floats}))
