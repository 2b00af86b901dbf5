"""What a launch may raise, and what the sanitizer has found when it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FindingKind = Literal[  # in the order of `Kind` in include/witness_data.h
    "out-of-bounds load",
    "out-of-bounds store",
    "uninitialised read",
    "race",
    "offset overflow",
    "broken promise",
    "undefined value",
]


class DeviceAssertion(RuntimeError):
    """A program of a launch failed a `tl.device_assert`."""


class SpinError(DeviceAssertion):
    """A loop of a program lasted longer than TRITON_LOOM_SPIN_LIMIT, or `spin_limit` among the launch's options."""


@dataclass(frozen=True)
class Reason:
    """How it came to that: expressions of the kernel's text, and what they were at the lane that went wrong."""

    expression: str  # the address of an access, or the arithmetic that went wrong
    mask: str | None = None  # of an access; it was true, or the lane would have been off
    values: Mapping[str, int | str] = field(default_factory=dict)  # of names in the two; only what is certain

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        masked = f", mask {self.mask}" if self.mask else ""
        return f"{self.expression}{masked}{f' where {values}' if values else ''}"


@dataclass(frozen=True)
class Finding:
    """What a launch did wrong at one line: the first program that did, and how often it happened."""

    kind: FindingKind
    kernel: str
    file: str
    line: int
    detail: str
    launch: int  # the launches of a scope that were checked count from 0
    launched_from: str
    program: tuple[int, int, int] | None = None
    argument: str | None = None
    index: tuple[int, ...] | None = None  # into the tensor; outside of its shape if the access was
    count: int = 1
    reason: Reason | None = None  # None where nothing is certain

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: {self.kind} in {self.kernel}"
        times = f", {self.count} times, first" if self.count > 1 else ""
        program = f"{times} by program {self.program}" if self.program else times
        why = f"; {self.reason}" if self.reason else ""
        return f"{where}{program}: {self.detail}{why} (launch {self.launch}, from {self.launched_from})"


class SanitizerError(RuntimeError):
    """A launch inside `sanitize()` did what it must not; `findings` says what."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings
