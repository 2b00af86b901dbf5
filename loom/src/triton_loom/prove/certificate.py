"""Test proofs by random launches of the contract under the sanitizer, and the prover's facts at random sizes.

A proof covers all sizes: one launch with a finding of the sanitizer, or one size that the prover's own facts exclude,
shows that the prover is wrong. That raises `UnsoundProof` and is never an answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ..errors import Finding
from .answers import Answer, Example, Kind, UnsoundProof
from .contract import Buffer, Contract
from .proving import Prover
from .replay import Launcher, NotCompiled, NotReplayed, Spins
from .scope import integer
from .solver import QUICK, Search, Solution, ask, z3

_EFFORT, _EFFORT_FOR_SIZES = QUICK // 8, QUICK // 64
_LARGEST = 2**14  # largest size of a launch
_MAX_BYTES, _MAX_WORK = 2**25, 2**22
_ARITHMETIC: tuple[Kind, ...] = ("contract", "overflow", "sign", "step", "promise", "modelled")
# Kinds of findings, and the answers that each contradicts if all of them are proofs.
_CONTRADICTS: dict[str, tuple[Kind, ...]] = {
    "out-of-bounds load": ("bounds", *_ARITHMETIC),
    "out-of-bounds store": ("bounds", *_ARITHMETIC),
    "offset overflow": _ARITHMETIC,
    "broken promise": ("descriptor", *_ARITHMETIC),
    "race": ("race", "bounds", *_ARITHMETIC),
}


def certified(prover: Prover, launcher: Launcher, answers: Sequence[Answer], trials: int) -> str:
    """Compare proofs with random launches and report how many agree. Raise `UnsoundProof` if one does not."""
    if not any(answer.verdict == "proven" for answer in answers):
        return "not launched: nothing was proven"
    draw = random.Random(0)
    launches = Search(prover.contract.facts, _EFFORT_FOR_SIZES)
    facts = _Facts(prover, draw, all(a.verdict == "proven" for a in answers if a.kind == "contract"))
    for sizes in _corners(prover.contract, launches):
        facts.check(sizes)
    if trials < 1:
        return "not launched: not asked for"
    agree, why, uncompiled = 0, "the contract has no small sizes", ""
    for sizes in _some_sizes(prover.contract, launches, trials, draw):
        example = facts.check(sizes)
        if example is None:
            continue
        try:
            _launch(launcher, example, answers, draw)
        except NotReplayed as reason:
            why = str(reason)
            if isinstance(reason, NotCompiled):
                uncompiled = f"; {reason}"
            if isinstance(reason, Spins):
                break
            continue
        agree += 1
    return f"{agree} random launches agree{uncompiled}" if agree else f"not launched: {why}"


def _launch(launcher: Launcher, example: Example, answers: Sequence[Answer], draw: random.Random) -> None:
    """Raise `UnsoundProof` if a launch contradicts a proof."""

    def launched(fill: int, draw: random.Random) -> list[Finding]:
        return launcher.launched(example, draw=draw, fill=fill, most_bytes=_MAX_BYTES, most_work=_MAX_WORK)

    repeated_draw, fill = random.Random(), draw.getrandbits(8)
    repeated_draw.setstate(draw.getstate())
    findings = launched(fill, draw)
    for finding in findings:
        contradicted = _contradicted(finding, answers)
        if contradicted and all(answer.verdict == "proven" for answer in contradicted):
            raise UnsoundProof(_UNSOUND.format(example.named_sizes, finding))
    covered = _fully_covered(answers) if not findings else []
    unwritten = {n: u for n, u in launcher.unwritten.items() if n in covered and u.any()}
    if unwritten:  # the kernel may have written the fill value itself: repeat with another fill
        launched(fill ^ 0xFF, repeated_draw)
        for name, before in unwritten.items():
            if number := int((before & launcher.unwritten[name]).sum()):
                raise UnsoundProof(
                    _UNSOUND.format(example.named_sizes, f"{number} elements of {name} are not written")
                )


_UNSOUND = "the prover is wrong, please report it: it has proven what a launch refutes for {}: {}"


def _contradicted(finding: Finding, answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers that cannot all be proofs."""
    contradicted = [answer for answer in answers if answer.kind in _CONTRADICTS.get(finding.kind, ())]
    at_line = [answer for answer in contradicted if answer.place.endswith(f":{finding.line}")]
    if finding.kind.startswith("out-of-bounds"):
        bounds = [answer for answer in at_line if answer.kind == "bounds"]
        return bounds and [*bounds, *(answer for answer in contradicted if answer.kind != "bounds")]
    if finding.kind == "offset overflow" and not any(answer.kind == "overflow" for answer in at_line):
        return answers  # no obligation covers these integers: something that depends on them is unknown
    return contradicted


def _fully_covered(answers: Sequence[Answer]) -> list[str]:
    """Return the outputs that are proven to be written completely, if the proofs this relies on hold."""
    prerequisites = [a for a in answers if a.kind in ("bounds", *_ARITHMETIC)]
    if not all(a.verdict == "proven" for a in prerequisites):
        return []
    return [a.what.removeprefix("all of ") for a in answers if a.kind == "covered" and a.verdict == "proven"]


class _Facts:
    """Facts that the prover assumes of every program of every launch.

    `all_fit` is true if it has proven that they exclude no sizes of the contract.
    """

    def __init__(self, prover: Prover, draw: random.Random, all_fit: bool) -> None:
        self.contract, self.evaluator, self.draw, self.all_fit = (
            prover.contract,
            prover.evaluator,
            draw,
            all_fit,
        )
        scope = prover.evaluator.scope
        self.possible = Search([*prover.common, *scope.relevant(prover.common)], _EFFORT)
        self.all = Search([*prover.common, *scope.facts], _EFFORT)

    def check(self, sizes: Solution) -> Example | None:
        """Raise `UnsoundProof` if the facts exclude a random program of a possible launch.

        Return the launch, or None if it has no program.
        """
        contract, evaluator = self.contract, self.evaluator
        grid = [sizes.value(axis) for axis in contract.grid]
        values = {size.name: sizes.value(size) for size in contract.sizes}
        if min(grid) < 1 or not _are_allowed(values, contract):
            return None
        program = [self.draw.randrange(axis) for axis in grid]
        equalities = [size == values[size.name] for size in contract.sizes]
        equalities += [p == number for p, number in zip(evaluator.programs, program, strict=True)]
        if self.all.with_(equalities).verdict == "proven":
            if self.possible.with_(equalities).verdict == "counterexample":
                scope = evaluator.scope
                reasons = sorted({scope.reasons[fact.get_id()] for fact in scope.facts})
                raise UnsoundProof(
                    "the prover is wrong, please report it: its facts contradict each other in program "
                    f"{tuple(program)} for {values}; they come from {', '.join(reasons)}"
                )
            if self.all_fit and max(grid) < 2**31 and self._bytes(sizes) < 2**47:
                raise UnsoundProof(
                    f"the prover is wrong, please report it: it leaves out {values}, which the contract allows"
                )
        x, y, z = grid
        return Example(values, (x, y, z), (program[0], program[1], program[2]))

    def _bytes(self, sizes: Solution) -> int:
        """Return the size of the largest tensor."""
        return max((sizes.value(b.extent) * b.itemsize for b in self.evaluator.buffers.values()), default=0)


def _are_allowed(values: dict[str, int], contract: Contract) -> bool:
    """Return whether there are launches of these sizes.

    z3's solutions of products and quotients do not always obey the contract. And the contract may leave no value for
    the elements of a buffer, as 0 <= v < n does where n is 0.
    """
    numbers = [(size, z3.IntVal(values[size.name])) for size in contract.sizes]
    if any(z3.is_false(z3.simplify(z3.substitute(fact, *numbers))) for fact in contract.facts):
        return False
    value, nothing = z3.Int("value!any"), z3.BoolVal(False)
    for argument in contract.arguments.values():
        if isinstance(argument, Buffer) and argument.values is not None:
            possible = z3.Or(integer(argument.extent) <= 0, argument.assumed(value, z3.IntVal(0)))
            if ask([z3.substitute(possible, *numbers)], nothing, _EFFORT_FOR_SIZES).verdict == "proven":
                return False
    return True


def _corners(contract: Contract, launches: Search) -> Iterator[Solution]:
    """Yield solutions near the smallest and the largest sizes that a contract allows."""
    for side in ("low", "high"):
        if solution := launches.nearest([[size == getattr(size, side)] for size in contract.sizes]):
            yield solution


def _some_sizes(contract: Contract, launches: Search, count: int, draw: random.Random) -> Iterator[Solution]:
    """Yield random sizes, most of them small."""
    for number in range(count):
        limit = (3, 9, 40, 150, 600, _LARGEST)[number % 6]
        wishes = []
        for size in contract.sizes:
            start = draw.randint(size.low, max(size.low, min(size.high, limit)))
            wishes.append([size == start, z3.And(size >= start, size <= 2 * start + 16), size <= _LARGEST])
        if solution := launches.nearest(wishes):
            yield solution
