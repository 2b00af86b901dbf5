"""The table in the documentation: a row for each project, and beside it a file with a row for each kernel."""

from __future__ import annotations

import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

from .judge import Kernel, Results, failures, kernels
from .projects import PROJECTS, Project
from .sources import FIELD

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = FIELD / "results"
HEADER = """\
# The field's kernels on Loom

Public projects, as they are published, through Loom on CPU tensors. No kernel is changed. Written by
`python -m conformance table`; [how it works](../conformance/__init__.py).

A kernel is a function under `@triton.jit` that was launched. The project's own tests drive it, or a driver in
`conformance/cases` where it has none that fit, and compare it with the project's own reference, at the project's own
tolerance. Of each test the smallest sets of parameters are run, and an autotuner takes the first of its configurations.

- **tried**: a test asked for the kernel. **ran**: Loom built it and ran it to its end.
- **right**: a test that ran it passed and none that ran it failed.
- **checked**: a test that ran it came to its end with the sanitizer, too. **flagged**: the sanitizer had findings in
  it; [found.md](found.md) has those that were looked into.
- **tests passed**: of those that the project did not skip.

Each kernel with the reason why it is not right is in [conformance.csv](conformance.csv).
"""


def write() -> None:
    import torch
    import triton
    import triton_loom

    rows, lines, notes = [], [], []
    total = [0, 0, 0, 0, 0]
    for project in PROJECTS:
        plain, sanitized = load(project, ".json"), load(project, ".sanitized.json")
        if not plain:
            continue
        found = kernels(plain, sanitized, project.explain)
        counts = [
            len(found),
            sum(kernel.ran for kernel in found),
            sum(kernel.right for kernel in found),
            sum(kernel.checked for kernel in found),
            sum(kernel.flagged for kernel in found),
        ]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        outcomes = [result["outcome"] for result in plain.values() if result["outcome"] != "skipped"]
        cells = [source(project), project.version, *counts, f"{outcomes.count('passed')} of {len(outcomes)}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        rows += [row(project, kernel) for kernel in found]
        notes += list(explanations(project, plain))
    made = f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Loom {triton_loom.__version__}."
    table = [
        "| project | version | tried | ran | right | checked | flagged | tests passed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *lines,
        f"| all | | {' | '.join(f'**{count}**' for count in total)} | |",
    ]
    text = "\n".join(
        [HEADER, made, "", *table, "", "## Tests that did not pass", "", "How many, and why.", "", *notes, ""]
    )
    (DOCS / "conformance.md").write_text(text)
    with open(DOCS / "conformance.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["project", "version", "kernel", "ran", "right", "flagged by the sanitizer", "why not"]
        )
        writer.writerows(rows)


def load(project: Project, ending: str, what: str = "tests") -> Results:
    """What earlier runs have kept, of all suites: by test, or by kernel if proofs are asked for."""
    results: Results = {}
    for suite in project.suites:
        file = RESULTS / f"{project.name}.{suite.name}{ending}"
        if file.exists():
            results |= json.loads(file.read_text())[what]
    return results


def source(project: Project) -> str:
    if project.github:
        return f"[{project.name}](https://github.com/{project.github})"
    return f"[{project.name}](https://pypi.org/project/{project.pip})"


def row(project: Project, kernel: Kernel) -> list[Any]:
    yes = {True: "yes", False: "no"}
    flags = "; ".join(sorted(set(kernel.findings)))
    return [
        project.name,
        project.version,
        kernel.name,
        yes[kernel.ran],
        yes[kernel.right],
        flags,
        kernel.why_not,
    ]


def explanations(project: Project, results: Results) -> list[str]:
    """The tests that did not pass, by reason."""
    reasons: dict[str, int] = {}
    for test, reason in failures(results):
        text = project.explain(test) or reason
        reasons[text] = reasons.get(text, 0) + 1
    return [f"- {project.name}, {count}: {reason}" for reason, count in sorted(reasons.items())]
