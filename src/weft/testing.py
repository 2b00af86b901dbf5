"""`check(op)` asks of an op that `@weft.pointwise` or `@weft.rowwise` made what Weft's tests ask of Weft's own ops."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ops.generated.pointwise import Pointwise

if TYPE_CHECKING:
    from .lab.problem import Workload

ROWS, COLS = 5, 33  # neither a multiple of what a GPU loads at a time
FORMAT = "1x128"  # of a quantized result


def check(op: Pointwise, *examples: Tensor | float) -> list[str]:
    """Raise an error unless an op is right; return the names of the checks.

    Results and gradients are compared with float64, in fp32 and bf16, and gradients with finite differences. Memory
    around the tensors must stay untouched, every run must give the same bits, with gradients or without, and the op has
    to compile without a graph break. A launch under the sanitizer finds what leaves a tensor or races.

    `examples` are arguments for functions that are not defined everywhere; by default, all arguments are tensors of
    normal numbers, some of them broadcast. Then the bytes that the op moves are counted, too, and if z3 is installed
    its launch is proven to be safe for every number of rows.

    A float result with a last dimension is also quantized, and its codes are compared with those that an independent
    oracle makes of the op's own fp32 result.
    """
    from .lab.checks import CHECKS, NotApplicable
    from .lab.problem import Call, Inputs, Workload

    if not isinstance(op, Pointwise):
        raise TypeError(f"check takes an op that @weft.pointwise or @weft.rowwise made; got {op!r}")
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

    def quantized(workload: Workload) -> Workload:
        return replace(workload, build=lambda *of: build(*of).with_(quantize=FORMAT))

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
    large = replace(workload_of(torch.float32), shape=("rows", 1024), rows=512)
    if op.op.one_result and (y := call()).is_floating_point() and y.dim():
        plain = workload_of(torch.bfloat16)
        workload = quantized(plain)
        for name in ("quantized_bytes", "guard_bands", "determinism"):
            run(f"{name} in {FORMAT}", functools.partial(CHECKS[name], workload))
        run(f"sanitized in {FORMAT}", lambda: _sanitized(workload.make()))
        if tracked:
            run(f"gradients in {FORMAT}", lambda: _same_gradients(workload.make(), plain.make()))
        if not examples:
            run(f"bytes in {FORMAT}", lambda: _bytes(quantized(large)))
    if not examples:
        run("bytes", lambda: _bytes(large))
        run("proven", lambda: _proven(workload_of(torch.float32)))
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


def _same_gradients(quantized: Any, call: Any) -> None:
    """Compare the gradients of a quantized result with those of a plain one."""
    from .lab.calls import assert_same, run, upstreams

    gradients = upstreams({"y": call.requiring_grad()()})
    got, wanted = run(quantized, gradients), run(call, gradients)
    assert_same(
        {n: t for n, t in got.items() if n != "y"}, {n: t for n, t in wanted.items() if n != "y"}, FORMAT
    )


def _compiled(op: Pointwise, call: Any) -> None:
    got = torch.compile(op, fullgraph=True, backend="aot_eager")(**call.kwargs)
    for mine, wanted in zip(_tuple(got), _tuple(call()), strict=True):
        assert torch.equal(mine, wanted), "the compiled result differs"


def _bytes(workload: Workload) -> None:
    from .lab.traffic import count_traffic

    moved = count_traffic(workload)
    assert moved.as_promised, f"{moved.total.modelled} bytes are moved; {moved.least} would do"


def _proven(workload: Workload) -> None:
    """Ask the solver about the forward launch; an answer that it leaves open is not one of the checks that passed."""
    from .lab.checks import NotApplicable

    if importlib.util.find_spec("z3") is None:
        raise NotApplicable("z3 is not installed")
    from .lab.symbolic.proofs import proven

    result = proven(workload, "sm_90", regions=1)
    answers = [a for proof in result.proofs for a in (*proof.answers, *proof.races)]
    wrong = [str(a) for a in answers if a.verdict == "counterexample"]
    assert not wrong, "\n".join(wrong)
    if result.skipped or not answers or any(a.verdict != "proven" for a in answers):
        raise NotApplicable("the solver left an answer open")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
