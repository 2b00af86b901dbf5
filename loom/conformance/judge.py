"""What the tests of a project say about each of its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Results = dict[str, dict[str, Any]]  # by test; see `plugin`


@dataclass
class Kernel:
    """A kernel that tests asked for. It is right if a test that ran it passed and none that ran it failed."""

    name: str
    passed: list[str] = field(default_factory=list)  # tests that ran it and passed
    failed: dict[str, str] = field(
        default_factory=dict
    )  # tests that ran it and found a result wrong, and what they say
    stopped: dict[str, str] = field(
        default_factory=dict
    )  # tests that asked for it and stopped before it had run
    began: bool = False  # it ran in a test that fails for another reason
    checked: bool = False  # a test that ran it came to its end under the sanitizer
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
    """`explain` tells of a test that fails why, if that is known and says nothing against the kernels."""
    found: dict[str, Kernel] = {}
    for test, result in plain.items():
        why = explain(test) if result["outcome"] != "passed" else None
        for name in result["asked"]:
            kernel = found.setdefault(name, Kernel(name))
            if why or name not in result["ran"]:
                kernel.stopped[test] = why or result["reason"]
                kernel.began |= name in result["ran"]
            elif result["outcome"] == "passed":
                kernel.passed.append(test)
            elif result["outcome"] == "failed":
                kernel.failed[test] = result["reason"]
    for result in sanitized.values():
        ended = result["outcome"] in ("passed", "failed")
        for name in set(result["ran"]) & set(found) if ended else ():
            found[name].checked = True
        for finding in result["findings"]:
            for kernel in found.values():
                if kernel.name.rpartition(":")[2] == finding["kernel"] and kernel.name in result["ran"]:
                    kernel.findings.append(describe(finding))
    return sorted(found.values(), key=lambda kernel: kernel.name)


NOT_CHECKED = "not checked: it follows addresses that it finds in memory"


def describe(finding: dict[str, Any]) -> str:
    """Of a kernel that is given addresses in a tensor, the sanitizer cannot know which memory it may use."""
    if "in none of the tensor arguments" in finding["text"]:
        return NOT_CHECKED
    return f"{finding['kind']} at line {finding['line']}"


Entry = TypeVar("Entry")


def matching(table: Mapping[tuple[str, ...], Entry], *texts: str) -> Entry | None:
    """The first entry of a table whose patterns match the texts, each one of them."""
    for patterns, entry in table.items():
        if all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, texts, strict=True)):
            return entry
    return None


def cover(results: Results) -> list[str]:
    """Tests that passed and together ran every kernel that passing tests ran; few, and quick ones first."""
    passed = {test: set(result["ran"]) for test, result in results.items() if result["outcome"] == "passed"}
    left: set[str] = set().union(*passed.values())
    chosen = []
    while left:
        test = max(passed, key=lambda t: len(passed[t] & left) / (1 + results[t]["seconds"]))
        chosen.append(test)
        left -= passed[test]
    return chosen


def failures(results: Results) -> Iterable[tuple[str, str]]:
    """Tests that neither passed nor were skipped by their project, and why."""
    for test, result in results.items():
        if result["outcome"] not in ("passed", "skipped"):
            yield test, result["reason"]
