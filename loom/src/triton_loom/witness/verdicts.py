"""Verdict on each launch of a scope, so that "no finding" is never mistaken for "not checked"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["clean", "findings", "counted", "not checked", "not counted"]
MISSED: tuple[Outcome, ...] = ("not checked", "not counted")


@dataclass(frozen=True)
class Verdict:
    """Verdict on one launch."""

    kernel: str
    outcome: Outcome
    reason: str = ""  # why it was missed, or what was left out of the check

    @property
    def missed(self) -> bool:
        """Return whether the launch went unobserved."""
        return self.outcome in MISSED

    def __str__(self) -> str:
        return f"{self.kernel}: {self.outcome}{f': {self.reason}' if self.reason else ''}"


@dataclass
class Judged:
    """Scope with a verdict for every launch in it, in order."""

    verdicts: list[Verdict] = field(default_factory=list, init=False)

    @property
    def summary(self) -> str:
        """Return all verdicts in one line: how many launches had each, and why launches were missed."""
        return summary(self.verdicts)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Count the launches by verdict; name the kernels that were missed, with the reason."""
    if not verdicts:
        return "not checked: nothing was launched"
    counts = Counter(verdict.outcome for verdict in verdicts)
    text = f"{_launches(len(verdicts))}: " + ", ".join(f"{n:,} {outcome}" for outcome, n in counts.items())
    missed = Counter(str(verdict) for verdict in verdicts if verdict.missed)
    return "; ".join([text, *(f"{description} ({_launches(n)})" for description, n in missed.items())])


def _launches(number: int) -> str:
    return f"{number:,} launch{'es' if number != 1 else ''}"
