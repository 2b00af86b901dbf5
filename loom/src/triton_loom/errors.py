"""What a launch may raise, and what the sanitizer has found when it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal[  # in the order of `Kind` in include/witness_data.h
    "out-of-bounds load",
    "out-of-bounds store",
    "uninitialised read",
    "race",
    "offset overflow",
    "broken promise",
]


class DeviceAssertion(RuntimeError):
    """A program of a launch failed a `tl.device_assert`."""


@dataclass(frozen=True)
class Finding:
    """What a launch did wrong at one line: the first program that did, and how often it happened."""

    kind: FindingKind
    kernel: str
    file: str
    line: int
    program: tuple[int, int, int] | None
    argument: str | None
    index: tuple[int, ...] | None  # into the tensor; outside of its shape if the access was
    launch: int  # the launches of a scope count from 0
    launched_from: str
    count: int
    detail: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: {self.kind} in {self.kernel}"
        times = f", {self.count} times, first" if self.count > 1 else ""
        program = f"{times} by program {self.program}" if self.program else times
        return f"{where}{program}: {self.detail} (launch {self.launch}, from {self.launched_from})"


class SanitizerError(RuntimeError):
    """A launch inside `sanitize()` did what it must not; `findings` says what."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings
