"""Runner of tests in child processes: each test has a time limit, and a crash affects no other test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .projects import Project, Suite
from .proven import unanswered
from .sources import tests_of

LOOM = Path(__file__).parent.parent


class Run:
    """The tests of one suite of a project, run in one child after another until all have run."""

    def __init__(
        self,
        project: Project,
        suite: Suite,
        where: list[Path],
        *,
        limit: float,
        sanitize: bool = False,
        emulate: str | None = None,
        prove: bool = False,
        only: list[str] | None = None,
    ) -> None:
        self.project, self.suite, self.where, self.limit = project, suite, where, limit
        self.sanitize, self.emulate, self.prove, self.only = sanitize, emulate, prove, only
        self.results: dict[str, dict[str, Any]] = {}
        self.proofs: dict[str, dict[str, Any]] = {}  # by kernel; see `proven`
        self.selected: list[str] | None = None
        self.scratch: list[Path] = []  # of the children; kept for their logs if something goes wrong

    @property
    def complete(self) -> bool:
        return self.selected is not None and len(self.results) == len(self.selected)

    def events(self) -> Iterator[str]:
        """Run everything; yield a line for each test that has ended."""
        failures = 0
        while not self.complete:
            before = len(self.results), len(self.proofs)
            yield from self._child()
            if self.selected is None:
                yield f"{self.project.name}: the tests of {self.suite.files} could not be collected; see {self.log}"
                return
            failures = failures + 1 if (len(self.results), len(self.proofs)) == before else 0
            if failures > 1:
                yield f"{self.project.name}: a child ended without a result; see {self.log}"
                return
        for scratch in self.scratch:
            shutil.rmtree(scratch)

    def _child(self) -> Iterator[str]:
        scratch = Path(tempfile.mkdtemp(prefix=f"conformance-{self.project.name}-"))
        self.scratch.append(scratch)
        events, self.log = scratch / "events", scratch / "log"
        events.touch()
        order: dict[str, Any] = {
            "project": self.project.name,
            "events": str(events),
            "roots": [str(root / part) for root in self.where for part in self.project.kernels],
            "each": self.suite.each,
            "by_text": self.suite.by_text,
            "at_most": self.suite.at_most,
            "skip": list(self.suite.skip),
            "done": list(self.results),
            "only": self.only,
            "sanitize": self.sanitize,
            "emulate": self.emulate,
            "prove": self.prove,
            "proofs": list(self.proofs),
            "capability": _capability(self.emulate) if self.emulate else list(self.project.capability),
            "prepare": self.project.prepare,
        }
        generated = scratch / "generated"
        if self.project.generated:
            order["roots"].append(str(generated))
        (scratch / "order").write_text(json.dumps(order))
        root = LOOM if self.suite.own else tests_of(self.project)
        files = sorted(str(file) for pattern in self.suite.files for file in root.glob(pattern))
        if not files:
            raise FileNotFoundError(f"{self.project.name}: nothing matches {self.suite.files} in {root}")
        path = [
            str(LOOM),
            str(LOOM / "src"),
            *(str(w / part) for w in self.where for part in self.project.path),
        ]
        environment = {
            **os.environ,
            **self.project.environment,
            **({self.project.generated: str(generated)} if self.project.generated else {}),
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
            "CONFORMANCE_ORDER": str(scratch / "order"),
            "TRITON_DEFAULT_BACKEND": "cpu",
            "TORCHDYNAMO_DISABLE": "1",  # references under torch.compile run eagerly
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if self.emulate else {}),  # no real GPU beside an emulated one
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conformance.plugin",
            "-c",
            "/dev/null",
            f"--rootdir={root}",
        ]
        command += [
            "-q",
            "--no-header",
            "--tb=short",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
        ]
        command += [*self.suite.options, *files]
        with open(self.log, "w") as log:
            child = subprocess.Popen(
                command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield from self._follow(child, events)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _follow(self, child: subprocess.Popen[bytes], events: Path) -> Iterator[str]:
        running, proving, start, rest = None, None, time.time(), ""
        with open(events) as file:
            while True:
                has_ended = child.poll() is not None
                *lines, rest = (rest + file.read()).split("\n")  # the last may be half written
                for line in lines:
                    event = json.loads(line)
                    start = time.time()
                    if event["event"] == "selected":
                        self.selected = [*event["tests"], *event["unreadable"]]
                        for unreadable, reason in event["unreadable"].items():
                            if unreadable not in self.results:
                                yield self._take({**_lost(unreadable, reason), "outcome": "error"})
                    elif event["event"] == "start":
                        running = event["test"]
                    elif event["event"] == "proving":
                        proving = event["kernel"]
                        self.proofs[proving] = unanswered(running, f"no answer within {self.limit:.0f} s")
                    elif event["event"] == "proof":
                        proving = None
                        yield self._take_proof(event)
                    else:
                        running = None
                        yield self._take(event)
                limit = self.limit if running else 10 * self.limit
                if not has_ended and time.time() - start > limit:
                    if proving:  # the next child runs the test again, and proves its other kernels
                        yield f"{self.project.name} {proving}: {self.proofs[proving]['why']}"
                    elif running:
                        yield self._take(_lost(running, f"no result within {self.limit:.0f} s"))
                    return
                if has_ended:
                    if proving:
                        self.proofs[proving]["why"] = f"the process ended with status {child.returncode}"
                    elif running:
                        yield self._take(_lost(running, f"the process ended with status {child.returncode}"))
                    return
                time.sleep(0.2)

    def _take(self, event: dict[str, Any]) -> str:
        test = event.pop("test")
        event.pop("event", None)
        self.results[test] = event
        count = f"{len(self.results)}/{len(self.selected or ())}"
        why = f"  {event['reason']}" if event["reason"] else ""
        findings = f"  {len(event['findings'])} findings" if event["findings"] else ""
        return f"{self.project.name} {count} {event['outcome']} {event['seconds']} s {test}{findings}{why}"

    def _take_proof(self, event: dict[str, Any]) -> str:
        kernel = event.pop("kernel")
        event.pop("event")
        self.proofs[kernel] = event
        return f"{self.project.name} {event['verdict']} {event['seconds']} s {kernel}  {event['why']}"


def _capability(target: str) -> list[int]:
    """Return the capability of a GPU by its target.

    >>> _capability("sm_90")
    [9, 0]
    """
    return list(divmod(int(target.removeprefix("sm_")), 10))


def _lost(test: str, reason: str) -> dict[str, Any]:
    return {
        "test": test,
        "outcome": "lost",
        "reason": reason,
        "seconds": 0,
        "asked": [],
        "ran": [],
        "findings": [],
    }
