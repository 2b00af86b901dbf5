"""Proofs that the launches of workloads stay inside of their tensors, for all sizes: contracts given to Loom's prover.

An answer depends on the kernel's TTIR, the contract and the prover alone. It is kept in Triton's cache directory, and
found again there until one of the three changes.
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

# What is not asked of memory safety is told apart: it is about results rather than about memory.
RACES = ("race",)
OUTPUTS = ("covered", "once")
EFFORT = 2 * QUICK  # for one question
TRIALS = 20  # launches of what is proven; counterexamples may rest on memory that another launch has filled


@dataclass
class Proof:
    """What the prover says of one case."""

    case: Case
    report: Report

    @property
    def answers(self) -> list[Answer]:
        """Of memory safety."""
        return [answer for answer in self.report.answers if answer.kind not in (*RACES, *OUTPUTS)]

    @property
    def races(self) -> list[Answer]:
        """Of programs that meet in memory. Nothing is said where arguments lie in one storage at different places: the
        prover is not told where."""
        if self.case.apart:
            return []
        return [answer for answer in self.report.answers if answer.kind in RACES]

    @property
    def outputs(self) -> dict[str, list[Answer]]:
        """Of each tensor that the launch is to fill: whether every element is written, and by no program twice."""
        found: dict[str, list[Answer]] = {name: [] for name in self.case.contract.outputs}
        for answer in self.report.answers:
            if answer.kind in OUTPUTS:
                found[answer.what.rpartition(" ")[2]].append(answer)
        return found

    @property
    def verdict(self) -> str:
        return Report(self.report.kernel, tuple(self.answers)).verdict


@dataclass
class Proven:
    """All that is known of a workload on a target."""

    contracts: Contracts
    proofs: list[Proof] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # kernels of which nothing is said, and why

    @property
    def verdict(self) -> str:
        """Of all sizes and kernels together."""
        verdicts = {proof.verdict for proof in self.proofs}
        if "counterexample" in verdicts:
            return "counterexample"
        whole = verdicts == {"proven"} and not self.skipped and self.contracts.complete
        return "proven" if whole else "unknown"

    def counts(self, *, races: bool = False) -> Counter[str]:
        """How many answers there are of each verdict."""
        return Counter(
            answer.verdict for proof in self.proofs for answer in (proof.races if races else proof.answers)
        )


def proven(workload: Workload, target: str, *, regions: int = 64, effort: int = EFFORT) -> Proven:
    """Every launch of a workload, for as many of its regions as `regions`."""
    contracts = contracts_of(workload, target, regions=regions)
    found = Proven(contracts)
    for case in contracts.cases:
        try:
            found.proofs.append(Proof(case, _report(case, target, effort)))
        except UnsoundProof:
            raise
        except Exception as error:  # the prover does not read every kernel
            found.skipped.append(
                f"{case.variant.kernel}: {type(error).__name__}: {error}".partition("\n")[0][:300]
            )
    return found


def _report(case: Case, target: str, effort: int) -> Report:
    """Under what the regions have in common, which is often enough and easier; else under the regions."""
    ttir = ttir_by_name(case.variant, target)
    report = _answered(ttir, case.contract, effort)
    # What is not modelled does not become so under more assumptions.
    hopeful = [
        a for a in report.answers if a.verdict == "counterexample" or (a.verdict == "unknown" and a.query)
    ]
    if hopeful and len(case.regions) > 1:
        report = _answered(ttir, case.narrow, effort)
    return _reached(ttir, case, report, effort)


def _reached(ttir: str, case: Case, report: Report, effort: int) -> Report:
    """The same, with accesses shown to happen at the sizes of an example, where the solver found none by itself."""
    answers = list(report.answers)
    for region in case.regions[:4]:
        missing = [
            i for i, a in enumerate(answers) if a.kind == "reached" and a.verdict == "unknown" and a.query
        ]
        if not missing:
            break
        here = [z3.Int(name) == value for name, value in region.example.items()]
        prover = Prover(ttir, replace(case.narrow, assumptions=(*case.narrow.assumptions, *here)), effort)
        obligations = [o for o in prover.question.obligations if o.kind == "reached"]
        places = [i for i, a in enumerate(answers) if a.kind == "reached"]
        for place, obligation in zip(places, obligations, strict=True):
            found = prover.answer(obligation) if place in missing else answers[place]
            if found.verdict == "proven" and (found.what, found.place) == (
                answers[place].what,
                answers[place].place,
            ):
                answers[place] = found
    return replace(report, answers=tuple(answers))


def _answered(ttir: str, contract: Contract, effort: int) -> Report:
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256("\n".join([*_said(contract), ttir, str(effort), _prover()]).encode()).hexdigest()
    kept = get_cache_manager(key)
    found = kept.get_file("weft-prove.json")
    if found is not None:
        return from_json(Path(found).read_text())
    report = triton_loom.prove.prove(ttir, contract, effort=effort, replay=False, trials=TRIALS)
    kept.put(report.json(), "weft-prove.json", binary=False)
    return report


def _said(contract: Contract) -> Iterator[str]:
    """All that a contract says, as text."""

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
    """The prover's own text, and the solver's version."""
    whole = hashlib.sha256(z3.get_version_string().encode())
    package = Path(triton_loom.prove.__file__).parent
    for file in (*sorted(package.glob("*.py")), *sorted((package.parent / "ir").glob("*.py"))):
        whole.update(file.read_bytes())
    return whole.hexdigest()
