"""The table in the documentation, with a row for each project, and a CSV file with a row for each kernel."""

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
# Kernels of other projects on Loom

See which kernels of public projects give the right result on the CPU, as they are published: no kernel is changed.
`python -m conformance table`, run in `loom/`, writes this page ([how it works](../conformance/__init__.py)).
"""
TERMS = """\
## What is counted

A kernel is a function under `@triton.jit` that was launched. The project's own tests drive it; if none fit, a driver in
`loom/conformance/cases` does. Results are compared with the project's own reference, at the project's own tolerance.
Each test runs with its smallest sets of parameters, and an autotuner takes the first of its configurations.

- **tried**: a test asked for the kernel. **ran**: Loom built it and ran it to its end.
- **right**: a test that ran it passed, and none that ran it failed.
- **checked**: a test that ran it also finished under the sanitizer. **flagged**: the sanitizer had findings in it;
  [found.md](found.md) has those that were looked into.
- **tests passed**: of those that the project did not skip.

[conformance.csv](conformance.csv) lists each kernel, and why it is not right if it is not.
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
        project_kernels = kernels(plain, sanitized, project.explain)
        counts = [
            len(project_kernels),
            sum(kernel.ran for kernel in project_kernels),
            sum(kernel.right for kernel in project_kernels),
            sum(kernel.checked for kernel in project_kernels),
            sum(kernel.flagged for kernel in project_kernels),
        ]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        outcomes = [result["outcome"] for result in plain.values() if result["outcome"] != "skipped"]
        cells = [source(project), project.version, *counts, f"{outcomes.count('passed')} of {len(outcomes)}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        rows += [row(project, kernel) for kernel in project_kernels]
        notes += list(explanations(project, plain))
    tools = f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Loom {triton_loom.__version__}."
    table = [
        "| project | version | tried | ran | right | checked | flagged | tests passed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *lines,
        f"| all | | {' | '.join(f'**{count}**' for count in total)} | |",
    ]
    text = "\n".join(
        [
            HEADER,
            tools,
            "",
            *table,
            "",
            TERMS,
            "## Tests that did not pass",
            "",
            "How many, and why:",
            "",
            *notes,
            "",
        ]
    )
    (DOCS / "conformance.md").write_text(text)
    with open(DOCS / "conformance.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["project", "version", "kernel", "ran", "right", "flagged by the sanitizer", "why not"]
        )
        writer.writerows(rows)


def load(project: Project, ending: str, what: str = "tests") -> Results:
    """Return the saved results of all suites: by test, or by kernel if `what` is "proofs"."""
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
    """Return the numbers of tests that did not pass, by reason."""
    reasons: dict[str, int] = {}
    for test, reason in failures(results):
        text = project.explain(test) or reason
        reasons[text] = reasons.get(text, 0) + 1
    return [f"- {project.name}, {count}: {reason}" for reason, count in sorted(reasons.items())]
