"""Results of `prove`: an answer to every obligation, as a table or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..tables import table

Kind = Literal[
    "bounds",  # an access is to an element of its buffer
    "overflow",  # an integer that an address, a mask or a loop depends on fits its type
    "step",  # a loop counter fits its type after the last step too
    "sign",  # a dividend is nonnegative, and its divisor is positive
    "contract",  # the contract is satisfiable: an argument fits its type, and no stride is negative
    "promise",  # a hint given to the compiler is true
    "descriptor",  # a tensor descriptor describes memory of its buffer
    "reached",  # some sizes reach the access: otherwise its other proofs are vacuous
    "race",  # no two programs access one element if one of them writes it
    "once",  # no program writes an element twice
    "covered",  # every element of an output is written
    "modelled",  # the prover supports the operation
]
Verdict = Literal["proven", "counterexample", "unknown"]


class UnsoundProof(AssertionError):
    """The prover has proven something false: a bug in the prover, not in the kernel."""


@dataclass(frozen=True)
class Example:
    """Sizes that violate an obligation, and where they do."""

    sizes: Mapping[str, int]
    grid: tuple[int, int, int]
    program: tuple[int, int, int]
    lane: tuple[int, ...] = ()
    detail: str = ""  # the violation in numbers: "element 1000 of 1000"
    other_program: tuple[int, int, int] | None = None  # of a race
    iterations: int = 1  # product of the iteration counts of all loops
    loaded: tuple[
        tuple[str, int, int], ...
    ] = ()  # integers in memory it depends on: (argument, element, value)
    confirmed: bool | None = None  # by the sanitizer; None: not replayed, or inconclusive
    finding: str = ""  # the sanitizer's finding, or why it was not replayed

    @property
    def named_sizes(self) -> str:
        """Format the sizes: "n = 1, m = 5"."""
        return ", ".join(f"{name} = {value}" for name, value in self.sizes.items())

    def __str__(self) -> str:
        other = f" and {self.other_program}" if self.other_program else ""
        lane = f", lane {self.lane}" if self.lane else ""
        memory = "".join(f", {name}[{element}] = {value}" for name, element, value in self.loaded)
        where = f"program {self.program}{other} of {self.grid}{lane}{memory}"
        return f"{self.named_sizes or 'always'}: {where}: {self.detail}"


@dataclass(frozen=True)
class Answer:
    """Answer to one obligation."""

    kind: Kind
    what: str  # "store y_ptr", "addi i32", ...
    place: str  # "file:line"
    verdict: Verdict
    why: str = ""  # the lemma that was needed, or the reason for an unknown
    example: Example | None = None
    query: str = ""  # of an unknown, in SMT-LIB

    def __str__(self) -> str:
        file, _, line = self.place.rpartition(":")
        text = f"{self.verdict}: {self.kind} of {self.what} at {file.rpartition('/')[2]}:{line}"
        if self.why:
            text = f"{text}: {self.why}"
        if self.example is None:
            return text
        replay_result = {
            True: "confirmed by the sanitizer",
            False: "the sanitizer disagrees",
            None: "not replayed",
        }
        return f"{text}: {self.example} ({replay_result[self.example.confirmed]})"


@dataclass(frozen=True)
class Report:
    """All answers about one kernel under one contract."""

    kernel: str
    answers: tuple[Answer, ...]
    assumed: tuple[str, ...] = ()  # unproven assumptions about memory contents
    certificates: tuple[str, ...] = ()  # for each compiled kernel: how random launches agree with the proofs
    seconds: float = field(default=0.0, compare=False)

    @property
    def verdict(self) -> Verdict:
        """Return proven if everything is, counterexample if there is one, else unknown. No answers are no proof."""
        verdicts = {answer.verdict for answer in self.answers}
        if "counterexample" in verdicts:
            return "counterexample"
        return "proven" if verdicts == {"proven"} else "unknown"

    @property
    def counterexamples(self) -> list[Answer]:
        """Return the answers with a counterexample."""
        return [answer for answer in self.answers if answer.verdict == "counterexample"]

    @property
    def unknowns(self) -> list[Answer]:
        """Return the answers that are neither proofs nor counterexamples."""
        return [answer for answer in self.answers if answer.verdict == "unknown"]

    @property
    def smallest(self) -> Mapping[str, int]:
        """Return the smallest violating sizes, comparing the first size first; empty if there are none."""
        examples = [dict(answer.example.sizes) for answer in self.counterexamples if answer.example]
        return min(examples, key=lambda sizes: list(sizes.values()), default={})

    def of(self, *kinds: Kind) -> list[Answer]:
        """Return the answers of these kinds."""
        return [answer for answer in self.answers if answer.kind in kinds]

    def json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"verdict": self.verdict, **asdict(self)}, indent=1, default=str)

    def __str__(self) -> str:
        counts = Counter((answer.kind, answer.verdict) for answer in self.answers)
        rows: list[Sequence[str]] = [("obligation", "proven", "counterexample", "unknown")]
        for kind in dict.fromkeys(answer.kind for answer in self.answers):
            numbers = [counts[kind, verdict] for verdict in ("proven", "counterexample", "unknown")]
            rows.append((kind, *(str(number) if number else "" for number in numbers)))
        failed = [f"  {answer}" for answer in self.answers if answer.verdict != "proven"]
        assumed = [f"  assumed: {assumption}" for assumption in self.assumed]
        return "\n".join([f"{self.kernel}: {self.verdict}", *table(rows, "<>>>"), *failed, *assumed])


def from_json(text: str) -> Report:
    """Parse a report written by `json`."""
    data: dict[str, Any] = json.loads(text)
    answers = []
    for answer in data["answers"]:
        example = answer.pop("example")
        if example is not None:
            for name in ("grid", "program", "lane", "other_program"):
                example[name] = example[name] if example[name] is None else tuple(example[name])
            example["loaded"] = tuple(tuple(place) for place in example["loaded"])
        answers.append(Answer(**answer, example=Example(**example) if example else None))
    return Report(
        data["kernel"], tuple(answers), tuple(data["assumed"]), tuple(data["certificates"]), data["seconds"]
    )
