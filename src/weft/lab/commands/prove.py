"""`weft prove`: prove that kernels stay inside their tensors for all sizes, or find sizes for which they do not."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from ... import __version__
from ...cli.arguments import add_op, add_workers, add_workload, at_least, output_file
from ...cli.figures import Figures
from ...cli.interrupt import deaf_children, die_with_parent, kill_children
from ...cli.needs import require
from ...cli.screen import Refused, Steps
from ...runtime import GPUS
from ..families import OPS, WORKLOADS, Workload
from .chosen import workloads_named
from .reports import read_report

if TYPE_CHECKING:
    from ..symbolic.proofs import Proof, Proven

SCHEMA = 1  # of the JSON; incremented when the meaning of a field changes


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prove",
        help="prove launches memory-safe for whole regions of sizes",
        description="Run the host code of ops with symbols for sizes, and have a solver prove that every launch stays "
        "inside its tensors, for all sizes that take the same branches (a region), region by region. Nothing "
        "runs on a GPU. The exit code is 0 if there is no counterexample, or with `--against` if nothing is worse "
        "than in that report.",
    )
    add_op(parser)
    add_workload(parser)
    parser.add_argument("--target", default="sm_90", choices=GPUS, help="(%(default)s)")
    parser.add_argument(
        "--regions",
        type=at_least(1),
        default=64,
        metavar="N",
        help="examine at most so many paths through the host code of a workload (%(default)s)",
    )
    add_workers(parser, "processes")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="an earlier report of `--out`: fail if something proven in it no longer is, or is newly refuted",
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write all answers as JSON")
    parser.add_argument(
        "--into",
        type=output_file,
        metavar="FILE",
        help="add the answers to a report of `--out`, replacing its own for the same workloads",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if there is a counterexample or, compared with an earlier report, less is proven."""
    require("weft prove")
    before = read_report(args.against, ("weft prove",), SCHEMA) if args.against else None
    report = read_report(args.into, ("weft prove",), SCHEMA) if args.into else None
    settings = {"weft": __version__, "target": args.target, "regions": args.regions}
    for name, value in settings.items():
        if report and report[name] != value:
            raise Refused(
                f"{args.into} has {name} {report[name]}, this run has {value}: the answers cannot be merged"
            )
    begin = time.perf_counter()
    records = _prove([str(workload) for workload in workloads(args)], args)
    if before:
        records = _retried(before, records, args)
    document = {
        "report": "weft prove",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **settings,
        "seconds": round(time.perf_counter() - begin, 1),
        "workloads": records,
    }
    Console().print(render(document))
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    if report:
        args.into.write_text(json.dumps(merged(report, document), indent=1) + "\n")
    regressions = list(lost(before, document)) if before else []
    for line in regressions:
        Console().print(Text(f"worse than in {args.against}: {line}", "red"))
    if args.against:
        return int(bool(regressions))
    return int(any(each["verdict"] == "counterexample" for each in records))


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Return workloads that together launch every kernel of the ops: sizes are symbols, so one stands for many."""
    from ..selection import by_kernels

    if args.workload:
        return workloads_named(args.workload, args.op)
    return [workload for op in args.op or OPS for workload in by_kernels(op, args.target)]


def _prove(names: Sequence[str], args: argparse.Namespace, effort: int = 1) -> list[dict[str, Any]]:
    """Return a record for each workload, in their order."""
    records: dict[str, dict[str, Any]] = {}
    with Steps(len(names), "reading kernels") as steps:
        for each in _records(names, args, effort):
            records[each["workload"]] = each
            steps.say(f"{each['workload']}: {each['verdict']}")
            steps.advance()
    return [records[name] for name in names]


def _retried(
    before: dict[str, Any], records: list[dict[str, Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the records, with regressed ones remade with more effort. A question near the solver's limit is decided in
    one run and not in the next."""
    settings = {"target": args.target, "regions": args.regions}
    names = [
        each["workload"] for each in records if any(lost(before, {**before, **settings, "workloads": [each]}))
    ]
    retried = {each["workload"]: each for each in _prove(names, args, effort=4)} if names else {}
    return [retried.get(each["workload"], each) for each in records]


def _records(names: Sequence[str], args: argparse.Namespace, effort: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each workload, as they are done. Each is proven in its own process: earlier questions may
    change a solver's answers at its limit, and the solver does not stop for Ctrl-C."""
    with ThreadPoolExecutor(args.workers) as pool:
        try:
            with deaf_children():
                pending = [
                    pool.submit(_prove_in_child, name, args.target, args.regions, effort) for name in names
                ]
            yield from (done.result() for done in as_completed(pending))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_children()  # leaving the pool would wait for the children
            raise


def _prove_in_child(*args: Any) -> dict[str, Any]:
    """Run `prove_workload` in a new process, forked from one that has imported everything and asked nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.lab.symbolic.proofs"])
    with ProcessPoolExecutor(1, context, die_with_parent) as process:
        return process.submit(prove_workload, *args).result()


def prove_workload(name: str, target: str, regions: int, effort: int = 1) -> dict[str, Any]:
    """Return the record of a workload, with `effort` times the usual effort of the solver."""
    from ..symbolic.proofs import EFFORT, proven

    workload = next(w for w in WORKLOADS if str(w) == name)
    return record(workload, proven(workload, target, regions=regions, effort=effort * EFFORT))


# ---- records and reports --------------------------------------------------------------------------------


def record(workload: Workload, result: Proven) -> dict[str, Any]:
    """Return everything that was proven about a workload, for JSON."""
    contracts = result.contracts
    return {
        "op": workload.op,
        "workload": str(workload),
        "verdict": result.verdict,
        "sizes": [size.name for size in contracts.sizes],
        "fixed": contracts.fixed,
        "regions": contracts.regions,
        "complete": contracts.complete,
        "gaps": contracts.gaps,
        "refused": contracts.refused,
        "skipped": result.skipped,
        "launches": [_launch(proof) for proof in result.proofs],
        "seconds": round(contracts.seconds + sum(proof.report.seconds for proof in result.proofs), 1),
    }


def _launch(proof: Proof) -> dict[str, Any]:
    outputs = proof.outputs
    answers = [
        *proof.answers,
        *proof.races,
        *(answer for answers_of_output in outputs.values() for answer in answers_of_output),
    ]
    return {
        "kernel": proof.case.variant.kernel,
        "regions": len(proof.case.regions),
        "verdict": proof.verdict,
        "accesses": sum(answer.kind == "bounds" for answer in proof.answers),
        "memory": dict(Counter(answer.verdict for answer in proof.answers)),
        "races": dict(Counter(answer.verdict for answer in proof.races)),
        "outputs": {
            name: _worst([answer.verdict for answer in answers_of_output])
            for name, answers_of_output in outputs.items()
        },
        "assumed": list(proof.report.assumed),
        "launched": list(proof.report.certificates),
        "open": [
            {
                "kind": answer.kind,
                "what": answer.what,
                "place": _relative(answer.place),
                "verdict": answer.verdict,
                "why": answer.why,
                "example": str(answer.example) if answer.example else "",
            }
            for answer in answers
            if answer.verdict != "proven"
        ],
    }


def _worst(verdicts: Sequence[str]) -> str:
    """Return the verdict on an output: proven, refuted or unknown. No question asked means no proof."""
    if "counterexample" in verdicts:
        return "counterexample"
    return "proven" if verdicts and set(verdicts) == {"proven"} else "unknown"


def _relative(location: str) -> str:
    """Return a source location relative to the package."""
    root = f"{Path(__file__).parents[2]}/"
    return location.removeprefix(root)


def merged(report: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the answers of a newer one replacing its own for the same workloads, new ones last."""
    answers = {each["workload"]: each for each in (*report["workloads"], *newer["workloads"])}
    seconds = round(sum(each["seconds"] for each in answers.values()), 1)
    return {**newer, "seconds": seconds, "workloads": list(answers.values())}


def lost(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield what an earlier report of the same workloads had proven and this one has not, and new counterexamples. New
    obligations were not proven before, but must not be refuted either."""
    earlier = {each["workload"]: each for each in before["workloads"]}
    for each in now["workloads"]:
        previous = earlier.get(each["workload"], {"launches": [], "complete": False})
        refuted = _open(each, "counterexample") - _open(previous, "counterexample")
        for kernel, kind, what in refuted:
            yield f"{each['workload']}: {kernel}: {kind} of {what} has a counterexample"
        if before["target"] != now["target"]:
            continue
        kernels = {launch["kernel"] for launch in previous["launches"]}
        for kernel in sorted(kernels - {launch["kernel"] for launch in each["launches"]}):
            yield f"{each['workload']}: {kernel}, which has no contract or is not read"
        for (kernel, kind, what), count in (_open(each) - _open(previous) - refuted).items():
            if kernel in kernels:
                yield f"{each['workload']}: {kernel}: {kind} of {what}{f', {count} times' if count > 1 else ''}"
        for kernel, output in _no_longer_covered(previous, each):
            yield f"{each['workload']}: {kernel}: that all of {output} is written"
        if previous["complete"] and not each["complete"] and before["regions"] <= now["regions"]:
            yield f"{each['workload']}: that these are all sizes"


def _open(workload: dict[str, Any], verdict: str = "") -> Counter[tuple[str, str, str]]:
    """Return a workload's obligations on memory and races that are not proven, or that have this verdict."""
    from ..symbolic.proofs import OUTPUTS

    return Counter(
        (launch["kernel"], answer["kind"], answer["what"])
        for launch in workload["launches"]
        for answer in launch["open"]
        if verdict in ("", answer["verdict"]) and answer["kind"] not in OUTPUTS
    )


def _no_longer_covered(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the kernels and outputs whose proof of being written entirely is lost. That is so if it now fails in more
    launches than before, or is not attempted. An op may leave an element undefined: an output without any proof cannot
    regress. Older reports lack outputs."""
    kernels = {launch["kernel"] for launch in now["launches"]}
    earlier, later = _outputs(before), _outputs(now)
    regressions = []
    for (kernel, output), verdicts in earlier.items():
        counts = later.get((kernel, output), Counter())
        fewer = counts.total() - counts["proven"] > verdicts.total() - verdicts["proven"]
        if verdicts["proven"] and kernel in kernels and (fewer or not counts):
            regressions.append((kernel, output))
    return sorted(regressions)


def _outputs(workload: dict[str, Any]) -> dict[tuple[str, str], Counter[str]]:
    """Count the verdicts on each output of each kernel, over its launches."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for launch in workload["launches"]:
        for output, verdict in launch.get("outputs", {}).items():
            counts.setdefault((launch["kernel"], output), Counter())[verdict] += 1
    return counts


def summary(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each op: how many kernels, launches and accesses it has, and the verdicts on them."""
    rows = []
    for op in dict.fromkeys(each["op"] for each in report["workloads"]):
        selected = [each for each in report["workloads"] if each["op"] == op]
        launches = [launch for each in selected for launch in each["launches"]]
        memory: Counter[str] = sum((Counter(launch["memory"]) for launch in launches), Counter())
        races: Counter[str] = sum((Counter(launch["races"]) for launch in launches), Counter())
        outputs = Counter(verdict for launch in launches for verdict in launch.get("outputs", {}).values())
        rows.append(
            {
                "op": op,
                "kernels": len({launch["kernel"] for launch in launches}),
                "launches": len(launches),
                "accesses": sum(launch["accesses"] for launch in launches),
                "proven": memory["proven"],
                "counterexample": memory["counterexample"],
                "unknown": memory["unknown"] + sum(len(each["skipped"]) for each in selected),
                "races": f"{races['proven']} of {races.total()}",
                "outputs": f"{outputs['proven']} of {outputs.total()}",
                "assumed": len({assumption for launch in launches for assumption in launch["assumed"]}),
                "complete": f"{sum(each['complete'] for each in selected)} of {len(selected)}",
                "seconds": round(sum(each["seconds"] for each in selected)),
            }
        )
    return rows


HEADINGS = {
    "op": "op",
    "kernels": "kernels",
    "launches": "launches",
    "accesses": "accesses",
    "proven": "proven",
    "counterexample": "refuted",
    "unknown": "unknown",
    "races": "no races",
    "outputs": "written",
    "assumed": "assumed",
    "complete": "all sizes",
    "seconds": "s",
}


def render(report: dict[str, Any]) -> Group:
    """Return a row for each op, and below them everything that is not proven."""
    lines: list[list[str | Text]] = [[*HEADINGS.values()]]
    for row in summary(report):
        style = "red" if row["counterexample"] else "yellow" if row["unknown"] else "green"
        lines.append([Text(str(row[name]), style if name == "op" else "") for name in HEADINGS])
    parts: list[Any] = [Text(f"Weft for {report['target']}", "bold"), Figures(lines), Text()]
    for each in report["workloads"]:
        notes = [f"not looked at: {gap}" for gap in each["gaps"]]
        notes += [f"not read: {skipped}" for skipped in each["skipped"]]
        for launch in each["launches"]:
            for answer in launch["open"]:
                about = answer["example"] or answer["why"]
                where = f"{launch['kernel']}, {answer['what']} at {answer['place']}"
                notes.append(f"{answer['verdict']}: {answer['kind']} of {where}: {about}")
        if notes:
            parts += [Text(each["workload"], "bold"), *(Text(f"  {line}") for line in dict.fromkeys(notes))]
    return Group(*parts)
