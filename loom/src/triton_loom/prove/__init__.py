"""Prove that a kernel stays inside of its tensors, for all sizes at once; or find the sizes for which it does not.

n = symbol("n", 1, 2**31 - 1)
contract = Contract.of(
    grid=(cdiv(n, 1024),),
    arguments={"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n},
    constants={"BLOCK": 1024},
)
print(prove(kernel, contract))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .answers import Answer, Example, Report, UnsoundProof
from .contract import Buffer, Contract, ContractError, Symbol, cdiv, symbol
from .solver import THOROUGH

__all__ = [
    "Answer",
    "Buffer",
    "Contract",
    "ContractError",
    "Example",
    "Report",
    "Symbol",
    "UnsoundProof",
    "cdiv",
    "prove",
    "symbol",
]


_TRIALS = 20


def prove(
    kernel: Any,
    contract: Contract | None = None,
    *,
    grid: Sequence[Any] | Callable[..., Sequence[Any]] | None = None,
    args: Mapping[str, Any] | None = None,
    effort: int = THOROUGH,
    replay: bool = True,
    trials: int | None = None,
    **more: Any,
) -> Report:
    """Prove or refute that a kernel stays within its contract.

    The kernel is a `@triton.jit` function, possibly with `@triton.autotune` or `@triton.heuristics` (every
    configuration is proven), or its TTIR as text.

    Instead of a contract, pass a `grid` and `args`, which includes the constants, and in `more` further arguments
    of `Contract.of`:

        n = symbol("n")
        x = Buffer("f32", n)
        prove(kernel, grid=(cdiv(n, 64),), args={"x_ptr": x, "y_ptr": x, "n": n, "BLOCK": 64}, outputs=("y_ptr",))

    `effort` limits the solver's work on one question, in z3's own units, so that a slow machine proves as much as a
    fast one: more effort may turn an unknown into an answer. With `replay`, counterexamples are launched under the
    sanitizer. Proven kernels are launched with `trials` random sizes of the contract (default: 20 with `replay`,
    else none): `UnsoundProof` is raised if the sanitizer finds something there that was proven absent.
    """
    from .certificate import certified
    from .compiling import Compiled, configured, variants
    from .coverage import covered
    from .proving import Prover
    from .replay import Launcher, replayed

    if contract is None:
        if grid is None or args is None:
            raise ContractError("prove needs a contract, or a grid and args")
        launches = list(configured(kernel, grid, args, **more))
    else:
        launches = [(kernel, contract)]
    cases: list[Compiled] = []
    for function, specialization in launches:
        cases += (
            [Compiled(function, specialization)]
            if isinstance(function, str)
            else variants(function, specialization)
        )
    reports, answers, certificates = [], [], []
    launches_of_proofs = (_TRIALS if replay else 0) if trials is None else trials
    start = time.perf_counter()
    for ttir, case, with_descriptors, launch in cases:
        prover = Prover(ttir, case, effort)
        report = prover.report()
        reports.append(report)
        descriptor_answers = (
            Prover(with_descriptors, case, effort).answers("descriptor") if with_descriptors else []
        )
        results = (
            *report.answers,
            *descriptor_answers,
            *(covered(prover, output) for output in case.outputs),
        )
        certificates.append(certified(prover, Launcher(ttir, case, launch), results, launches_of_proofs))
        for answer in results:
            if replay and answer.example is not None:
                answer = replayed(ttir, case, answer)
            answers.append(answer)
    return replace(
        reports[0],
        answers=tuple(answers),
        certificates=tuple(certificates),
        seconds=time.perf_counter() - start,
    )
