"""The suite on emulated GPUs: the table of its results, and the explanations of its findings.

If a kernel is right everywhere else and has a finding here, either the kernel or the finding is wrong. So every finding
is examined, and the result recorded in `EXAMINED`; a finding that is not there is a failure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import date
from typing import Any

from .judge import Kernel, Results, failures, kernels, matching
from .projects import PROJECTS, Project
from .report import DOCS, RESULTS, load

FOUND = "A true finding: see [found.md](found.md)."
FOLLOWS = "The kernel gets addresses as integers, and the test does not say which memory they belong to."

# Explanations of findings by project, kernel and kind, each a pattern.
EXAMINED: dict[tuple[str, ...], str] = {
    ("fla-core", "fused_recurrent_bwd_kernel", "lanes disagree"): FOUND,
    ("tutorials", "_layer_norm_bwd_dx_fused", "global memory race"): FOUND,
    ("liger", "_moe_router_histogram_kernel", "global memory race"): FOUND,
    ("torchao", "triton_fp8_gemm_1x128_128x(1|128)_kernel", "global memory out of bounds"): FOUND,
    ("linghe", "embedding_(forward|backward)_kernel", "global memory out of bounds"): FOLLOWS,
    ("flag_gems", "_gather_flaggems_jit_function", "global memory out of bounds"): (
        "The project passes a view whose strides are changed, and the kernel reads beyond the view's last element, in "
        "the same tensor. What lies beyond an argument is not read, so the result is wrong here."
    ),
    (".*", ".*", "proxy fence missing after cp.async"): FOUND,
}

TF32 = (
    "a GPU multiplies fp32 in TF32, and the test allows only the errors of fp32: it passes with "
    "TRITON_F32_DEFAULT=ieee"
)
# Tests whose results are wrong here for a known reason, by project and pattern.
WRONG: dict[str, dict[str, str]] = {
    "liger": {r"(neighborhood_attention|fused_moe)-float32": TF32},
    "fla-core": {
        r"chunk_simple_gla|parallel_attn": TF32,
        r"chunk_gated_delta_rule": "a GPU multiplies fp32 in TF32, as above; with TRITON_F32_DEFAULT=ieee it has no "
        "result within the limit, so this is not shown",
    },
    "flag_gems": {r"\[gather\]": "reads beyond a view, see above"},
    "linghe": {r"test_embedding.py": "follows addresses, see above"},
}

# By pattern of a test's message: why its kernels did not run on the emulated GPU.
NOT_RUN = {
    r"OutOfResources|out of resource": "it needs more shared memory than the target has",
    r"fp8e4nv|not supported in this architecture|type fp8": "the target does not have its format",
    r"num_ctas|clusters": "clusters of blocks (num_ctas above 1) are not emulated",
    r"no result within": "slow: no result within the limit",
}

HEADER = """\
# Kernels of other projects on emulated GPUs

See which kernels of public projects, and of Triton's tutorials, give the right result when [`emulate`](emulate.md)
executes them as a GPU would, and which hazards it finds in them. All figures are *emulated*. Two commands repeat them,
in `loom/`:

```bash
python -m conformance run --emulate sm_90   # install, run the tests with every access checked
python -m conformance table --emulate       # write this page, with every target that was run
```
"""
TERMS = """\
Stock Triton compiles each kernel for the GPU. Results are judged as in [conformance.md](conformance.md), by the
project's own tests or the drivers in `loom/conformance/cases`. Suites that have not been run are not counted: the
tables have these drivers, Loom's tests of Liger, and the tests of gn-kernels and torchao.

- **kernels**: those that a test asked for. **ran**: launched on the emulated GPU, to the end.
- **right**: a test that ran it passed, and none that ran it failed.
- **findings**: kernels in which a hazard was found. Each was looked into; the list below each table says what it is.
- **mended**: kernels in which something was found that ptxas puts right, at a cost of time ([hopper.md](hopper.md)).
- **not run**: the others, with the reason below.
"""


def examined(project: Project, finding: dict[str, Any]) -> str | None:
    """Return the explanation of a finding, or None if it was not examined."""
    return matching(EXAMINED, project.name, finding["kernel"], finding["kind"])


def explain(project: Project, test: str) -> str | None:
    """Return why a test fails, if a reason is known that is not the emulation's fault."""
    reasons = WRONG.get(project.name, {})
    return next((why for pattern, why in reasons.items() if re.search(pattern, test)), project.explain(test))


def unexplained(project: Project, results: Results) -> list[str]:
    """Return wrong results and findings that nobody has examined. Kernels that cannot run on a target do not count: the
    table lists them."""
    wrong = [
        f"{project.name}: {test}: {reason}"
        for test, reason in failures(results)
        if results[test]["outcome"] == "failed" and not explain(project, test)
    ]
    findings = {
        f"{project.name}: {finding['kind']} in {finding['kernel']}, line {finding['line']}"
        for result in results.values()
        for finding in result["findings"]
        if not finding["mended"] and not examined(project, finding)
    }
    return [*wrong, *sorted(findings)]


def table_of(projects: Iterable[tuple[Project, Results]]) -> str:
    """Return a row for each project, the findings, and why kernels did not run."""
    lines = [
        "| project | version | kernels | ran | right | findings | mended | not run |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    total, found, not_run = Counter[str](), [], []
    for project, results in projects:
        if not results:
            continue
        each = kernels(results, {}, lambda test, project=project: explain(project, test))  # type: ignore[misc]
        hazards, mended = _findings(results)
        counts = {
            "kernels": len(each),
            "ran": sum(kernel.ran for kernel in each),
            "right": sum(kernel.right for kernel in each),
            "findings": len({finding["kernel"] for finding in hazards}),
            "mended": len({finding["kernel"] for finding in mended}),
            "not run": sum(not kernel.ran for kernel in each),
        }
        total.update(counts)
        lines.append(f"| {' | '.join(map(str, (project.name, project.version, *counts.values())))} |")
        found += _found(project, hazards)
        not_run += _not_run(project, each)
    lines.append(f"| all | | {' | '.join(f'**{total[name]}**' for name in counts)} |" if total else "")
    if found:
        lines += ["", "Found:", "", *found]
    if not_run:
        lines += ["", "Not run, or not right:", "", *not_run]
    return "\n".join(lines)


def _findings(results: Results) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the hazards, and the findings that ptxas repairs."""
    every = [finding for result in results.values() for finding in result["findings"]]
    return [each for each in every if not each["mended"]], [each for each in every if each["mended"]]


def _found(project: Project, hazards: list[dict[str, Any]]) -> list[str]:
    lines_of: dict[tuple[str, str, str], set[int]] = {}
    for finding in hazards:
        explanation = examined(project, finding) or "not looked into"
        lines_of.setdefault((finding["kernel"], finding["kind"], explanation), set()).add(finding["line"])
    return [
        f"- {project.name}, `{kernel}`, line {', '.join(map(str, sorted(lines)))}: {kind}. {explanation}"
        for (kernel, kind, explanation), lines in sorted(lines_of.items())
    ]


def _not_run(project: Project, each: list[Kernel]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for kernel in each:
        if not kernel.right:
            message = kernel.why_not
            why = next((text for pattern, text in NOT_RUN.items() if re.search(pattern, message)), message)
            reasons.setdefault(why, []).append(f"`{kernel.name.rpartition(':')[2]}`")
    return [f"- {project.name}, {', '.join(names)}: {why}" for why, names in sorted(reasons.items())]


def results_on(target: str, projects: Iterable[Project]) -> list[tuple[Project, Results]]:
    """Return the saved results of earlier runs."""
    return [(project, load(project, f".{target}.json")) for project in projects]


def write() -> None:
    """Write docs/emulated.md, for every target with results."""
    import torch
    import triton
    import triton_loom

    tools = f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Loom {triton_loom.__version__}."
    targets = sorted({file.name.split(".")[-2] for file in RESULTS.glob("*.sm_*.json")})
    parts = [f"## {target}\n\n{table_of(results_on(target, PROJECTS))}\n" for target in targets]
    (DOCS / "emulated.md").write_text("\n".join([HEADER, tools, "", TERMS, *parts]))
