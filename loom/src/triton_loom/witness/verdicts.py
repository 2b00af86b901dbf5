"""What became of each launch in a scope, so that no finding is never mistaken for no check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["clean", "findings", "counted", "not checked", "not counted"]
MISSED: tuple[Outcome, ...] = ("not checked", "not counted")


@dataclass(frozen=True)
class Verdict:
    """Of one launch."""

    kernel: str
    outcome: Outcome
    reason: str = ""  # why it was missed; of one that was checked, what was left out

    @property
    def missed(self) -> bool:
        """Whether nobody looked."""
        return self.outcome in MISSED

    def __str__(self) -> str:
        return f"{self.kernel}: {self.outcome}{f': {self.reason}' if self.reason else ''}"


@dataclass
class Judged:
    """A scope with a verdict for every launch in it, in their order."""

    verdicts: list[Verdict] = field(default_factory=list, init=False)

    @property
    def summary(self) -> str:
        """All verdicts in a line: how many launches had which one, and why the others were missed."""
        return summary(self.verdicts)


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many launches had which verdict. Kernels that were missed are named, with the reason."""
    if not verdicts:
        return "not checked: nothing was launched"
    counts = Counter(verdict.outcome for verdict in verdicts)
    text = f"{_launches(len(verdicts))}: " + ", ".join(f"{n:,} {outcome}" for outcome, n in counts.items())
    missed = Counter(str(verdict) for verdict in verdicts if verdict.missed)
    return "; ".join([text, *(f"{which} ({_launches(n)})" for which, n in missed.items())])


def _launches(number: int) -> str:
    return f"{number:,} launch{'es' if number != 1 else ''}"
