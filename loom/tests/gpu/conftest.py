"""A machine that executes nothing and records its launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from triton_loom.emulator import machine
from triton_loom.emulator.findings import Finding
from triton_loom.ptx import text


@dataclass
class Recorder:
    """Stand-in for the machine: records the arguments of `machine.run`, and returns a given outcome."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    error: BaseException | None = None

    def run(self, program: str, **launch: Any) -> machine.Outcome:
        if self.error is not None:
            raise self.error
        self.launches.append({"ptx": program, **launch})
        return machine.Outcome(self.findings, [1, 2, 3], statements=text.read(program).statements)

    @property
    def last(self) -> dict[str, Any]:
        return self.launches[-1]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(machine.Program, "of", lambda ptx: ptx)
    monkeypatch.setattr(machine, "run", recorder.run)
    return recorder
