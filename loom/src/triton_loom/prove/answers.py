"""What `prove` says: an answer to every obligation, as a table or as JSON."""

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
    "step",  # the counter of a loop fits its type after the last step too
    "sign",  # what is divided is not negative, and what it is divided by is positive
    "contract",  # what the contract says is possible: an argument fits its type, and no stride is negative
    "promise",  # what the compiler was told of a value is true
    "descriptor",  # a tensor descriptor describes memory of its buffer
    "reached",  # there are sizes for which an access happens at all: else the rest says nothing
    "race",  # no two programs touch one element, one of them writing
    "once",  # no program writes an element twice
    "covered",  # every element of an output is written
    "modelled",  # an operation is one that is understood here
]
Verdict = Literal["proven", "counterexample", "unknown"]


class UnsoundProof(AssertionError):
    """The prover has proven what is not true: a mistake in the prover, not in the kernel."""


@dataclass(frozen=True)
class Example:
    """Sizes for which an obligation is not met, and where."""

    sizes: Mapping[str, int]
    grid: tuple[int, int, int]
    program: tuple[int, int, int]
    lane: tuple[int, ...] = ()
    detail: str = ""  # in numbers: "element 1000 of 1000"
    other_program: tuple[int, int, int] | None = None  # of a race
    iterations: int = 1  # of all loops, multiplied
    loaded: tuple[
        tuple[str, int, int], ...
    ] = ()  # integers in memory it depends on: (argument, element, value)
    confirmed: bool | None = None  # by the sanitizer; None: it was not asked, or could not tell
    finding: str = ""  # what the sanitizer said, or why it was not asked

    @property
    def named_sizes(self) -> str:
        """The sizes as text: "n = 1, m = 5"."""
        return ", ".join(f"{name} = {value}" for name, value in self.sizes.items())

    def __str__(self) -> str:
        other = f" and {self.other_program}" if self.other_program else ""
        lane = f", lane {self.lane}" if self.lane else ""
        memory = "".join(f", {name}[{element}] = {value}" for name, element, value in self.loaded)
        where = f"program {self.program}{other} of {self.grid}{lane}{memory}"
        return f"{self.named_sizes or 'always'}: {where}: {self.detail}"


@dataclass(frozen=True)
class Answer:
    """To one obligation."""

    kind: Kind
    what: str  # "store y_ptr", "addi i32", ...
    place: str  # "file:line"
    verdict: Verdict
    why: str = ""  # the lemma that was needed, or the reason for which nothing is known
    example: Example | None = None
    query: str = ""  # of an unknown, in the language of SMT-LIB

    def __str__(self) -> str:
        file, _, line = self.place.rpartition(":")
        text = f"{self.verdict}: {self.kind} of {self.what} at {file.rpartition('/')[2]}:{line}"
        if self.why:
            text = f"{text}: {self.why}"
        if self.example is None:
            return text
        asked = {True: "confirmed by the sanitizer", False: "the sanitizer disagrees", None: "not replayed"}
        return f"{text}: {self.example} ({asked[self.example.confirmed]})"


@dataclass(frozen=True)
class Report:
    """All answers about one kernel under one contract."""

    kernel: str
    answers: tuple[Answer, ...]
    assumed: tuple[str, ...] = ()  # of what is in memory, which nobody has proven
    certificates: tuple[
        str, ...
    ] = ()  # of each compiled kernel: how random launches agree with what was proven
    seconds: float = field(default=0.0, compare=False)

    @property
    def verdict(self) -> Verdict:
        """Proven if everything is, a counterexample if there is one, else unknown. Nothing to prove is no proof."""
        verdicts = {answer.verdict for answer in self.answers}
        if "counterexample" in verdicts:
            return "counterexample"
        return "proven" if verdicts == {"proven"} else "unknown"

    @property
    def counterexamples(self) -> list[Answer]:
        """The answers that have one."""
        return [answer for answer in self.answers if answer.verdict == "counterexample"]

    @property
    def unknowns(self) -> list[Answer]:
        """The answers that are neither a proof nor a counterexample."""
        return [answer for answer in self.answers if answer.verdict == "unknown"]

    @property
    def smallest(self) -> Mapping[str, int]:
        """The smallest sizes that were found to break something, the first size counting most; empty if none were."""
        found = [dict(answer.example.sizes) for answer in self.counterexamples if answer.example]
        return min(found, key=lambda sizes: list(sizes.values()), default={})

    def of(self, *kinds: Kind) -> list[Answer]:
        """The answers of these kinds."""
        return [answer for answer in self.answers if answer.kind in kinds]

    def json(self) -> str:
        """All of it, for other programs."""
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
    """A report from what its `json` wrote."""
    told: dict[str, Any] = json.loads(text)
    answers = []
    for answer in told["answers"]:
        example = answer.pop("example")
        if example is not None:
            for name in ("grid", "program", "lane", "other_program"):
                example[name] = example[name] if example[name] is None else tuple(example[name])
            example["loaded"] = tuple(tuple(place) for place in example["loaded"])
        answers.append(Answer(**answer, example=Example(**example) if example else None))
    return Report(
        told["kernel"], tuple(answers), tuple(told["assumed"]), tuple(told["certificates"]), told["seconds"]
    )
