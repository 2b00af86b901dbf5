"""Prove that the launches of workloads stay inside their tensors, for all sizes: contracts given to Loom's prover.

An answer depends only on the kernel's TTIR, the contract and the prover. It is cached in Triton's cache directory until
one of the three changes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton_loom.prove
from triton_loom.prove import Buffer, Contract, UnsoundProof
from triton_loom.prove.answers import Answer, Report, from_json
from triton_loom.prove.proving import Prover
from triton_loom.prove.solver import QUICK, z3

from ..families import Workload
from .contracts import Case, Contracts, contracts_of, ttir_by_name

# Kinds of obligations that are not about memory safety but about results, reported separately.
RACES = ("race",)
OUTPUTS = ("covered", "once")
EFFORT = 2 * QUICK  # per question
TRIALS = 20  # launches that test a proof; counterexamples may depend on memory that another launch has filled


@dataclass
class Proof:
    """The prover's report on one case."""

    case: Case
    report: Report

    @property
    def answers(self) -> list[Answer]:
        """Answers about memory safety."""
        return [answer for answer in self.report.answers if answer.kind not in (*RACES, *OUTPUTS)]

    @property
    def races(self) -> list[Answer]:
        """Answers about races between programs. There are none if arguments share a storage at different offsets, which
        the prover is not told."""
        if self.case.overlapping:
            return []
        return [answer for answer in self.report.answers if answer.kind in RACES]

    @property
    def outputs(self) -> dict[str, list[Answer]]:
        """By tensor that the launch must fill: whether every element is written, and by only one program."""
        by_output: dict[str, list[Answer]] = {name: [] for name in self.case.contract.outputs}
        for answer in self.report.answers:
            if answer.kind in OUTPUTS:
                by_output[answer.what.rpartition(" ")[2]].append(answer)
        return by_output

    @property
    def verdict(self) -> str:
        return Report(self.report.kernel, tuple(self.answers)).verdict


@dataclass
class Proven:
    """Everything that is known about a workload on a target."""

    contracts: Contracts
    proofs: list[Proof] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # kernels without a proof, and why

    @property
    def verdict(self) -> str:
        """Verdict on all sizes and kernels together."""
        verdicts = {proof.verdict for proof in self.proofs}
        if "counterexample" in verdicts:
            return "counterexample"
        is_complete = verdicts == {"proven"} and not self.skipped and self.contracts.complete
        return "proven" if is_complete else "unknown"

    def counts(self, *, races: bool = False) -> Counter[str]:
        """Count the answers by verdict."""
        return Counter(
            answer.verdict for proof in self.proofs for answer in (proof.races if races else proof.answers)
        )


def proven(workload: Workload, target: str, *, regions: int = 64, effort: int = EFFORT) -> Proven:
    """Prove every launch of a workload, for at most `regions` of its regions."""
    contracts = contracts_of(workload, target, regions=regions)
    result = Proven(contracts)
    for case in contracts.cases:
        try:
            result.proofs.append(Proof(case, _report(case, target, effort)))
        except UnsoundProof:
            raise
        except Exception as error:  # the prover does not read every kernel
            result.skipped.append(
                f"{case.variant.kernel}: {type(error).__name__}: {error}".partition("\n")[0][:300]
            )
    return result


def _report(case: Case, target: str, effort: int) -> Report:
    """Prove a case under the conditions common to all its regions, or else under the regions. The former is often
    enough and easier."""
    ttir = ttir_by_name(case.variant, target)
    report = _answered(ttir, case.contract, effort)
    # More assumptions help only where the prover had a question to ask.
    retryable = [
        a for a in report.answers if a.verdict == "counterexample" or (a.verdict == "unknown" and a.query)
    ]
    if retryable and len(case.regions) > 1:
        report = _answered(ttir, case.narrow, effort)
    return _reached(ttir, case, report, effort)


def _reached(ttir: str, case: Case, report: Report, effort: int) -> Report:
    """Retry unproven reachability of accesses at the regions' example sizes, and return the updated report."""
    answers = list(report.answers)
    for region in case.regions[:4]:
        unresolved = [
            i for i, a in enumerate(answers) if a.kind == "reached" and a.verdict == "unknown" and a.query
        ]
        if not unresolved:
            break
        at_example = [z3.Int(name) == value for name, value in region.example.items()]
        prover = Prover(
            ttir, replace(case.narrow, assumptions=(*case.narrow.assumptions, *at_example)), effort
        )
        obligations = [o for o in prover.question.obligations if o.kind == "reached"]
        indices = [i for i, a in enumerate(answers) if a.kind == "reached"]
        for index, obligation in zip(indices, obligations, strict=True):
            answer = prover.answer(obligation) if index in unresolved else answers[index]
            if answer.verdict == "proven" and (answer.what, answer.place) == (
                answers[index].what,
                answers[index].place,
            ):
                answers[index] = answer
    return replace(report, answers=tuple(answers))


def _answered(ttir: str, contract: Contract, effort: int) -> Report:
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256("\n".join([*_text_of(contract), ttir, str(effort), _prover()]).encode()).hexdigest()
    manager = get_cache_manager(key)
    cached = manager.get_file("weft-prove.json")
    if cached is not None:
        return from_json(Path(cached).read_text())
    report = triton_loom.prove.prove(ttir, contract, effort=effort, replay=False, trials=TRIALS)
    manager.put(report.json(), "weft-prove.json", binary=False)
    return report


def _text_of(contract: Contract) -> Iterator[str]:
    """Yield everything that a contract states, as text."""

    def text(value: Any) -> str:
        return value.sexpr() if z3.is_expr(value) else str(value)

    for name, argument in contract.arguments.items():
        yield name
        if isinstance(argument, Buffer):
            values = argument.assumed(z3.Int("v"), z3.Int("place"))
            dims = [part for dim in argument.dims or () for part in dim] + list(argument.shape or ())
            yield from map(
                text,
                (
                    argument.element,
                    argument.extent,
                    argument.first,
                    argument.dims is None,
                    *dims,
                    argument.align,
                ),
            )
            yield from map(
                text, (values, argument.ascending, argument.storage, argument.inverse, argument.unreached)
            )
            yield text(argument.differs(z3.Int("v"), z3.Int("place")))
        else:
            yield text(argument)
    yield from map(text, (*contract.grid, *contract.facts))
    yield from ("outputs", *contract.outputs)


@cache
def _prover() -> str:
    """Return a hash of the prover's own sources and the solver's version."""
    digest = hashlib.sha256(z3.get_version_string().encode())
    package = Path(triton_loom.prove.__file__).parent
    for file in (*sorted(package.glob("*.py")), *sorted((package.parent / "ir").glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()
