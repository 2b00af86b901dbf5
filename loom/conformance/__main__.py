"""Command line of the suite; see the package."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .judge import cover, failures
from .projects import PROJECTS, Project, Suite
from .run import Run
from .sources import FIELD, bring


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the kernels of projects")
    run.add_argument("projects", nargs="*", help="names of projects (default: all)")
    run.add_argument("--ci", action="store_true", help="only the suites that continuous integration runs")
    run.add_argument("--suite", help="only the suite of this name")
    run.add_argument(
        "--sanitize", action="store_true", help="repeat the tests that passed, with every access checked"
    )
    run.add_argument(
        "--emulate", metavar="TARGET", help="run on an emulated GPU, such as sm_90, instead of the CPU"
    )
    run.add_argument("--prove", action="store_true", help="prove each kernel for all sizes")
    run.add_argument(
        "--limit",
        type=float,
        default=120,
        help="time limit in seconds for a test, or for the proof of a kernel",
    )
    run.add_argument("--jobs", type=int, default=2, help="number of parallel child processes")
    table = commands.add_parser("table", help="write docs/conformance.md from the results so far")
    table.add_argument(
        "--emulate", action="store_true", help="write docs/emulated.md, the results on emulated GPUs"
    )
    table.add_argument("--prove", action="store_true", help="write docs/proven.md, the proofs for all sizes")
    found = commands.add_parser("found", help="run the reproductions in docs/found.md")
    found.add_argument(
        "--ci", action="store_true", help="only those of projects that continuous integration runs"
    )
    args = parser.parse_args()
    if args.command == "found":
        from .found import check

        return bool(check(args.ci))
    if args.command == "table":
        from . import emulated, proven, report

        (emulated if args.emulate else proven if args.prove else report).write()
        return 0
    projects = [project for project in PROJECTS if not args.projects or project.name in args.projects]
    suites = [(project, suite) for project in projects for suite in project.suites]
    suites = [(p, s) for p, s in suites if (not args.ci or s.ci) and args.suite in (None, s.name)]
    for project in {project.name: project for project, _ in suites}.values():
        bring(project)
    with ThreadPoolExecutor(args.jobs) as pool:
        unexplained = [
            line
            for lines in pool.map(lambda item: run_suite(item[0], item[1], args), suites)
            for line in lines
        ]
    if args.emulate:
        from .emulated import results_on, table_of

        print(table_of(results_on(args.emulate, {project.name: project for project, _ in suites}.values())))
    print(*unexplained, f"{len(unexplained)} failures that are not known", sep="\n")
    return bool(unexplained)


def run_suite(project: Project, suite: Suite, args: Any) -> list[str]:
    """Run a suite and save its results; return the failures without a known reason."""

    def results(ending: str) -> Path:
        return FIELD / "results" / f"{project.name}.{suite.name}{ending}"

    results("").parent.mkdir(exist_ok=True)
    mode = "sanitized" if args.sanitize else "proven" if args.prove else args.emulate
    file = results(f".{mode}.json" if mode else ".json")
    repeated = args.sanitize or (args.emulate and results(".json").exists())
    only = cover(json.loads(results(".json").read_text())["tests"]) if repeated else None
    run = Run(
        project,
        suite,
        bring(project),
        limit=args.limit,
        sanitize=args.sanitize,
        emulate=args.emulate,
        prove=args.prove,
        only=only,
    )
    for line in run.events():
        print(line[:400], flush=True)
        proofs = {"proofs": run.proofs} if args.prove else {}
        file.write_text(json.dumps({"version": project.version, "tests": run.results, **proofs}, indent=1))
    if not run.complete:
        return [f"{project.name}: the tests of {suite.name} did not come to their end"]
    if args.emulate:
        from .emulated import unexplained

        return unexplained(project, run.results)
    failed = [
        f"{project.name}: {test}: {reason}"
        for test, reason in failures(run.results)
        if not project.explain(test)
    ]
    if args.prove:
        from . import proven

        return [*failed, *proven.unexplained(project, run.proofs)]
    return failed


if __name__ == "__main__":
    sys.exit(main())
