"""Checks for ops of your own: `check(op)` asks of a `@weft.pointwise` op what Weft's tests ask of Weft's ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ops.generated.pointwise import Pointwise

ROWS, COLS = 5, 33  # neither a multiple of what a GPU loads at a time


def check(op: Pointwise, *examples: Tensor | float) -> list[str]:
    """Raise an error unless an op is right; return the names of the checks.

    Results and gradients are compared with float64, in fp32 and bf16, and gradients with finite differences. Memory
    around the tensors must stay untouched, every run must give the same bits, with gradients or without, and the op has
    to compile without a graph break. A launch under the sanitizer finds what leaves a tensor or races.

    `examples` are arguments for functions that are not defined everywhere; by default, all arguments are tensors of
    normal numbers, some of them broadcast.
    """
    from .lab.checks import CHECKS, NotApplicable
    from .lab.problem import Call, Inputs, Workload

    if not isinstance(op, Pointwise):
        raise TypeError(f"check takes an op that @weft.pointwise made; got {op!r}")
    if examples and len(examples) != len(op.parameters):
        raise TypeError(f"{op.name} takes {', '.join(op.parameters)}; got {len(examples)} examples")

    def build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
        if examples:
            return Call(op, {n: _like(x, inputs) for n, x in zip(op.parameters, examples, strict=True)})
        shapes = (shape, shape[1:], (shape[0], 1))
        return Call(op, {n: inputs.normal(*shapes[i % 3]) for i, n in enumerate(op.parameters)})

    passed: list[str] = []

    def run(name: str, function: Callable[[], object]) -> None:
        try:
            function()
        except NotApplicable:
            return
        except AssertionError as error:
            raise AssertionError(f"{op.name}, {name}: {error}") from error
        passed.append(name)

    def workload_of(dtype: torch.dtype) -> Workload:
        return Workload(op.op.name, "own", "all", ("rows", COLS), ROWS, build, dtype=dtype)

    call = workload_of(torch.float32).make()
    tracked = any(t.requires_grad for t in _tuple(call.requiring_grad()()))
    for dtype in (torch.float32, torch.bfloat16):
        workload = workload_of(dtype)
        for name, each in CHECKS.items():
            if name == "no_grad" and not tracked:
                continue
            run(f"{name} in {str(dtype).removeprefix('torch.')}", functools.partial(each, workload))
    if tracked:
        run("gradients", lambda: _gradients(op, call))
    run("sanitized", lambda: _sanitized(call))
    run("compiled", lambda: _compiled(op, call))
    return passed


def _like(example: Tensor | float, inputs: Any) -> Tensor | float:
    if not isinstance(example, Tensor):
        return example
    dtype = inputs.dtype if example.is_floating_point() else example.dtype
    return example.detach().to(device=inputs.device, dtype=dtype)


def _gradients(op: Pointwise, call: Any) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = _tuple(op(**call.kwargs | dict(zip(exact, tensors, strict=True))))
        return tuple(each for each in results if each.requires_grad)

    exact = {n: t.double().requires_grad_() for n, t in call.tensors().items() if t.is_floating_point()}
    try:
        torch.autograd.gradcheck(function, tuple(exact.values()))
    except RuntimeError as error:  # gradcheck's own error
        raise AssertionError(str(error)) from None


def _sanitized(call: Any) -> None:
    import triton_loom

    with triton_loom.sanitize():
        call()


def _compiled(op: Pointwise, call: Any) -> None:
    got = torch.compile(op, fullgraph=True, backend="aot_eager")(**call.kwargs)
    for mine, wanted in zip(_tuple(got), _tuple(call()), strict=True):
        assert torch.equal(mine, wanted), "the compiled result differs"


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
