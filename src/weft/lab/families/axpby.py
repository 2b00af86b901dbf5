"""Workloads of weighted sums: states of action experts and of video transformers, and gated residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import axpby
from ...runtime import catalogue
from ..chain import chain
from ..family import Family
from ..problem import Call, Inputs, Size, Workload, run_op

SHAPES: dict[str, tuple[tuple[Size, ...], int]] = {
    "pi05/action": (("rows", 32), 10),
    "pi05/actions": (("rows", 50, 32), 64),
    "wan22/latent": ((1, "rows", 3072), 32760),
    "odd/33": (("rows", 3, 33), 1024),
}
STEPS = 10
_SUMS: dict[str, Any] = {
    "rereads": "sums of a row's terms, which the gradients of coefficients are made of", "moves": 1.09,
}  # fmt: skip
_COLUMNS: dict[str, Any] = {
    "rereads": "gradients of gate and bias are written in fp32 for every element, and then summed", "moves": 3.05,
}  # fmt: skip


def _residual(x: Tensor, y: Tensor) -> Tensor:
    return axpby(x, y)


def _euler(x: Tensor, v: Tensor, dt: Tensor) -> Tensor:
    return axpby(x, (dt, v))


def _guided(
    x: Tensor, u: Tensor, c: Tensor, rest: Tensor, scale: Tensor, table: Tensor, step: Tensor
) -> Tensor:
    return axpby(x, (rest, u), (scale, c), coefficients=table.detach(), step=step)


def _multistep(x: Tensor, v: Tensor, v1: Tensor, v2: Tensor, table: Tensor, step: Tensor) -> Tensor:
    return axpby(x, v, v1, v2, coefficients=table.detach(), step=step)


def _gated(x: Tensor, y: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return axpby(x, (gate, y), bias)


def _build(options: str) -> Callable[[Workload, Inputs, tuple[int, ...]], Call]:
    def build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
        function, tensors = _TENSORS[options](inputs, shape)
        return Call(function, tensors)

    return build


def _state(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    return inputs.normal(*shape, dtype=torch.float32)


def _of_table(inputs: Inputs, terms: int) -> dict[str, Tensor]:
    step = (
        torch.tensor(3) if inputs.device.type != "meta" else torch.empty((), dtype=torch.int64, device="meta")
    )
    return {"table": inputs.normal(STEPS, terms, dtype=torch.float32), "step": step.to(inputs.device)}


def _tensors_of(*names: str) -> Callable[[Inputs, tuple[int, ...]], dict[str, Tensor]]:
    return lambda inputs, shape: {name: inputs.normal(*shape) for name in names}


_TENSORS: dict[str, Callable[[Inputs, tuple[int, ...]], tuple[Any, dict[str, Tensor]]]] = {
    "residual": lambda inputs, shape: (_residual, _tensors_of("x", "y")(inputs, shape)),
    "euler": lambda inputs, shape: (
        _euler,
        {"x": _state(inputs, shape), **_tensors_of("v")(inputs, shape), "dt": inputs.normal(dtype=torch.float32)},
    ),
    "guided": lambda inputs, shape: (
        _guided,
        {
            "x": _state(inputs, shape),
            **_tensors_of("u", "c")(inputs, shape),
            "rest": inputs.normal(shape[0], dtype=torch.float32),
            "scale": inputs.normal(shape[0], dtype=torch.float32),
            **_of_table(inputs, 3),
        },
    ),
    "multistep": lambda inputs, shape: (
        _multistep,
        {"x": _state(inputs, shape), **_tensors_of("v", "v1", "v2")(inputs, shape), **_of_table(inputs, 4)},
    ),
    "gated": lambda inputs, shape: (
        _gated,
        {
            **_tensors_of("x", "y")(inputs, shape),
            "gate": inputs.normal(*shape[:-2], *(1,) * (len(shape) > 1), shape[-1]),
            "bias": inputs.normal(shape[-1]),
        },
    ),
}  # fmt: skip


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Return the call of the backward op for the same sum."""
    t = _TENSORS[workload.options](inputs, shape)[1]
    ones = (..., *(None,) * (len(shape) - 1))
    names = {
        "euler": {"t0": "x", "t1": "v", "a1": "dt"},
        "guided": {"t0": "x", "t1": "u", "a1": "rest", "t2": "c", "a2": "scale", "table": "table", "step": "step"},
        "gated": {"t0": "x", "t1": "y", "a1": "gate", "t2": "bias"},
    }[workload.options]  # fmt: skip
    tensors = {name: t[own] for name, own in names.items()}
    tensors |= {name: t[ones] for name, t in tensors.items() if name in ("a1", "a2") and t.dim() == 1}
    wide = workload.options != "gated"
    tensors["dout"] = inputs.normal(*shape, dtype=torch.float32 if wide else None)
    arguments = catalogue["axpby_backward"].arguments
    absent = dict.fromkeys((n for n in arguments.cls._fields if n != "needs"), None)
    needed = arguments.cls.__annotations__["needs"]
    needs = needed(*(name in tensors and name not in ("table", "step") for name in needed._fields))
    return Call(functools.partial(run_op, "axpby_backward"), {**absent, **tensors, "needs": needs})


def _workloads() -> Iterator[Workload]:
    used = (
        ("residual", "wan22/latent"),
        ("residual", "odd/33"),
        ("euler", "pi05/action"),
        ("euler", "pi05/actions"),
        ("euler", "wan22/latent"),
        ("euler", "odd/33"),
        ("guided", "pi05/actions"),
        ("guided", "odd/33"),
        ("guided", "wan22/latent"),
        ("multistep", "pi05/actions"),
        ("multistep", "wan22/latent"),
        ("multistep", "odd/33"),
        ("gated", "odd/33"),
        ("gated", "wan22/latent"),
    )
    tags = frozenset({"training", "inference"})
    for options, name in used:
        shape, rows = SHAPES[name]
        yield Workload("axpby", name, options, shape, rows, _build(options), tags)
    for options, name in used:
        shape, rows = SHAPES[name]
        if options in ("euler", "guided", "gated") and name != "pi05/action":
            sums = _COLUMNS if options == "gated" else {} if name == "wan22/latent" else _SUMS
            yield Workload(
                "axpby_backward", name, options, shape, rows, _build_backward, frozenset({"training", "backward"}),
                unread=("t0", "t2") if options == "gated" else ("t0",), **sums,
            )  # fmt: skip


FAMILY = Family(
    workloads=tuple(_workloads()),
    chains={
        ("axpby", "residual"): chain(lambda x, y: x + y, "x", "y"),
        ("axpby", "euler"): chain(lambda x, v, dt: x + dt * v.float(), "x", "v", "dt"),
        ("axpby", "gated"): chain(lambda x, y, gate, bias: x + gate * y + bias, "x", "y", "gate", "bias"),
    },
)
