"""Verdict of a project's tests on each of its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Results = dict[str, dict[str, Any]]  # by test; see `plugin`


@dataclass
class Kernel:
    """A kernel that tests requested. It is right if a test that ran it passed and none that ran it failed."""

    name: str
    passed: list[str] = field(default_factory=list)  # tests that ran it and passed
    failed: dict[str, str] = field(
        default_factory=dict
    )  # tests that ran it and found a wrong result -> their messages
    stopped: dict[str, str] = field(
        default_factory=dict
    )  # tests that requested it and stopped before it had run -> the reasons
    began: bool = False  # it ran in a test that fails for another reason
    checked: bool = False  # a test that ran it completed under the sanitizer
    findings: list[str] = field(default_factory=list)  # of the sanitizer

    @property
    def ran(self) -> bool:
        return bool(self.passed or self.failed or self.began)

    @property
    def flagged(self) -> bool:
        return any(finding != NOT_CHECKED for finding in self.findings)

    @property
    def right(self) -> bool:
        return bool(self.passed) and not self.failed

    @property
    def why_not(self) -> str:
        reasons = [*self.failed.values(), *self.stopped.values()]
        return "" if self.right else reasons[0] if reasons else "no test that ran it came to its end"


def kernels(plain: Results, sanitized: Results, explain: Callable[[str], str | None]) -> list[Kernel]:
    """Return the kernels of a project's results, sorted by name.

    `explain` returns why a test fails, if a reason is known that is not the kernels' fault."""
    by_name: dict[str, Kernel] = {}
    for test, result in plain.items():
        known_reason = explain(test) if result["outcome"] != "passed" else None
        for name in result["asked"]:
            kernel = by_name.setdefault(name, Kernel(name))
            if known_reason or name not in result["ran"]:
                kernel.stopped[test] = known_reason or result["reason"]
                kernel.began |= name in result["ran"]
            elif result["outcome"] == "passed":
                kernel.passed.append(test)
            elif result["outcome"] == "failed":
                kernel.failed[test] = result["reason"]
    for result in sanitized.values():
        completed = result["outcome"] in ("passed", "failed")
        for name in set(result["ran"]) & set(by_name) if completed else ():
            by_name[name].checked = True
        for finding in result["findings"]:
            for kernel in by_name.values():
                if kernel.name.rpartition(":")[2] == finding["kernel"] and kernel.name in result["ran"]:
                    kernel.findings.append(describe(finding))
    return sorted(by_name.values(), key=lambda kernel: kernel.name)


NOT_CHECKED = "not checked: it follows addresses that it finds in memory"


def describe(finding: dict[str, Any]) -> str:
    """Describe a finding; if the kernel reads addresses from a tensor, the sanitizer cannot know its memory."""
    if "in none of the tensor arguments" in finding["text"]:
        return NOT_CHECKED
    return f"{finding['kind']} at line {finding['line']}"


Entry = TypeVar("Entry")


def matching(table: Mapping[tuple[str, ...], Entry], *texts: str) -> Entry | None:
    """Return the first entry of a table whose patterns all match the texts, or None."""
    for patterns, entry in table.items():
        if all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, texts, strict=True)):
            return entry
    return None


def cover(results: Results) -> list[str]:
    """Return few, quick tests that passed and together ran every kernel that passing tests ran."""
    passed = {test: set(result["ran"]) for test, result in results.items() if result["outcome"] == "passed"}
    left: set[str] = set().union(*passed.values())
    selection = []
    while left:
        test = max(passed, key=lambda t: len(passed[t] & left) / (1 + results[t]["seconds"]))
        selection.append(test)
        left -= passed[test]
    return selection


def failures(results: Results) -> Iterable[tuple[str, str]]:
    """Yield tests that neither passed nor were skipped by their project, with the reason."""
    for test, result in results.items():
        if result["outcome"] not in ("passed", "skipped"):
            yield test, result["reason"]
