"""The same tests on emulated GPUs: the table of what came out of them, and what is known of what was found.

A kernel that is right everywhere else and in which something is found here is either wrong or accused in error. So
every finding is looked into, and what it turned out to be stands in `EXAMINED`; one that is not there is a failure.
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

FOUND = "True: see [found.md](found.md)."
FOLLOWS = "The kernel is given addresses as numbers, and the test does not say which memory they are of."

# By project, kernel and kind of finding, each a pattern: what it is.
EXAMINED: dict[tuple[str, ...], str] = {
    ("fla-core", "fused_recurrent_bwd_kernel", "lanes disagree"): FOUND,
    ("tutorials", "_layer_norm_bwd_dx_fused", "global memory race"): FOUND,
    ("liger", "_moe_router_histogram_kernel", "global memory race"): FOUND,
    ("torchao", "triton_fp8_gemm_1x128_128x(1|128)_kernel", "global memory out of bounds"): FOUND,
    ("linghe", "embedding_(forward|backward)_kernel", "global memory out of bounds"): FOLLOWS,
    ("flag_gems", "_gather_flaggems_jit_function", "global memory out of bounds"): (
        "The project passes a view whose strides are changed, and the kernel reads beyond the view's last element, in "
        "the same tensor. What lies beyond an argument is not read, so that the result is wrong here."
    ),
    (".*", ".*", "proxy fence missing after cp.async"): FOUND,
}

TF32 = (
    "products of fp32 are those of TF32 on a GPU, and the test allows the errors of fp32: it passes with "
    "TRITON_F32_DEFAULT=ieee"
)
# Tests whose results are wrong here for a known reason, by project and pattern.
WRONG: dict[str, dict[str, str]] = {
    "liger": {r"(neighborhood_attention|fused_moe)-float32": TF32},
    "fla-core": {
        r"chunk_simple_gla|parallel_attn": TF32,
        r"chunk_gated_delta_rule": "products of fp32 are those of TF32 on a GPU, as above; it has no result within "
        "the limit with TRITON_F32_DEFAULT=ieee, so that it is not shown",
    },
    "flag_gems": {r"\[gather\]": "reads beyond a view, see above"},
    "linghe": {r"test_embedding.py": "follows addresses, see above"},
}

# By pattern of what a test says: why its kernels did not run on the emulated GPU.
NOT_RUN = {
    r"OutOfResources|out of resource": "it wants more shared memory than the target has",
    r"fp8e4nv|not supported in this architecture|type fp8": "its format is not one of the target's",
    r"num_ctas|clusters": "clusters of blocks (num_ctas above 1) are not emulated",
    r"no result within": "slow: no result within the limit",
}

HEADER = """\
# The field's kernels on emulated GPUs

The kernels of [conformance.md](conformance.md), and those of Triton's tutorials, compiled by stock Triton for a GPU and
executed by [`emulate`](emulate.md) with every access checked. Results are judged as there, by the project's own
tests or the drivers in `conformance/cases`. All figures are *emulated*. Written by `python -m conformance table
--emulate` of what `python -m conformance run --emulate TARGET` has left.

- **kernels**: those that a test asked for. **ran**: launched on the emulated GPU, to the end.
- **right**: a test that ran it passed and none that ran it failed.
- **findings**: kernels in which a hazard was found. Each was looked into; below is what it is.
- **mended**: kernels in which something was found that ptxas puts right, at a cost of time ([hopper.md](hopper.md)).
- **not run**: the others, with the reason below.

Suites that have not been run are not counted. In this table are the drivers in `conformance/cases`, Loom's tests of
Liger, and the tests of gn-kernels and torchao.
"""


def examined(project: Project, finding: dict[str, Any]) -> str | None:
    """What a finding is, if it was looked into."""
    return matching(EXAMINED, project.name, finding["kernel"], finding["kind"])


def explain(project: Project, test: str) -> str | None:
    """Why a test fails, if that is known and says nothing against the emulation."""
    here = WRONG.get(project.name, {})
    return next((why for pattern, why in here.items() if re.search(pattern, test)), project.explain(test))


def unexplained(project: Project, results: Results) -> list[str]:
    """Results that are wrong, and findings that nobody has looked into. A kernel that cannot run on a target is none:
    the table has it."""
    wrong = [
        f"{project.name}: {test}: {reason}"
        for test, reason in failures(results)
        if results[test]["outcome"] == "failed" and not explain(project, test)
    ]
    found = {
        f"{project.name}: {finding['kind']} in {finding['kernel']}, line {finding['line']}"
        for result in results.values()
        for finding in result["findings"]
        if not finding["mended"] and not examined(project, finding)
    }
    return [*wrong, *sorted(found)]


def table_of(projects: Iterable[tuple[Project, Results]]) -> str:
    """A row for each project, what was found, and why kernels did not run."""
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
    """The hazards, and what ptxas mends."""
    every = [finding for result in results.values() for finding in result["findings"]]
    return [each for each in every if not each["mended"]], [each for each in every if each["mended"]]


def _found(project: Project, hazards: list[dict[str, Any]]) -> list[str]:
    places: dict[tuple[str, str, str], set[int]] = {}
    for finding in hazards:
        what = examined(project, finding) or "not looked into"
        places.setdefault((finding["kernel"], finding["kind"], what), set()).add(finding["line"])
    return [
        f"- {project.name}, `{kernel}`, line {', '.join(map(str, sorted(lines)))}: {kind}. {what}"
        for (kernel, kind, what), lines in sorted(places.items())
    ]


def _not_run(project: Project, each: list[Kernel]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for kernel in each:
        if not kernel.right:
            said = kernel.why_not
            why = next((text for pattern, text in NOT_RUN.items() if re.search(pattern, said)), said)
            reasons.setdefault(why, []).append(f"`{kernel.name.rpartition(':')[2]}`")
    return [f"- {project.name}, {', '.join(names)}: {why}" for why, names in sorted(reasons.items())]


def results_on(target: str, projects: Iterable[Project]) -> list[tuple[Project, Results]]:
    """What is kept of earlier runs."""
    return [(project, load(project, f".{target}.json")) for project in projects]


def write() -> None:
    """docs/emulated.md, for every target that there are results of."""
    import torch
    import triton
    import triton_loom

    made = f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Loom {triton_loom.__version__}."
    targets = sorted({file.name.split(".")[-2] for file in RESULTS.glob("*.sm_*.json")})
    parts = [f"## {target}\n\n{table_of(results_on(target, PROJECTS))}\n" for target in targets]
    (DOCS / "emulated.md").write_text("\n".join([HEADER, made, "", *parts]))
