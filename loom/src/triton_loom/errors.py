"""Exceptions that a launch may raise, and the findings that the sanitizer attaches to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FindingKind = Literal[  # in the order of `Kind` in include/witness_data.h
    "out-of-bounds load",
    "out-of-bounds store",
    "uninitialized read",
    "race",
    "offset overflow",
    "broken promise",
    "undefined value",
]


class DeviceAssertion(RuntimeError):
    """A program of a launch failed a `tl.device_assert`."""


class SpinError(DeviceAssertion):
    """A loop of a program ran longer than TRITON_LOOM_SPIN_LIMIT, or the launch option `spin_limit`."""


@dataclass(frozen=True)
class Reason:
    """Cause of a finding: expressions of the kernel's source with their values at the offending lane."""

    expression: str  # the address of an access, or the arithmetic that went wrong
    mask: str | None = None  # of an access; true at this lane
    values: Mapping[str, int | str] = field(
        default_factory=dict
    )  # of names in both expressions; only certain ones

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        masked = f", mask {self.mask}" if self.mask else ""
        return f"{self.expression}{masked}{f' where {values}' if values else ''}"


@dataclass(frozen=True)
class Finding:
    """A violation at one line of a launch: the first program that committed it, and how often it happened."""

    kind: FindingKind
    kernel: str
    file: str
    line: int
    detail: str
    launch: int  # index among the checked launches of the scope
    launched_from: str
    program: tuple[int, int, int] | None = None
    argument: str | None = None
    index: tuple[int, ...] | None = None  # into the tensor; out of range if the access was
    count: int = 1
    reason: Reason | None = None  # None where nothing is certain

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: {self.kind} in {self.kernel}"
        times = f", {self.count} times, first" if self.count > 1 else ""
        program = f"{times} by program {self.program}" if self.program else times
        why = f"; {self.reason}" if self.reason else ""
        return f"{where}{program}: {self.detail}{why} (launch {self.launch}, from {self.launched_from})"


class SanitizerError(RuntimeError):
    """A launch inside `sanitize()` violated a rule; `findings` lists the violations."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings
