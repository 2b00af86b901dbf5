"""`weft prove`: that kernels stay inside of their tensors, for all sizes at once, or sizes for which they do not."""

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
from ...cli.interrupt import deaf_children, kill_children
from ...cli.needs import require
from ...cli.screen import Refused, Steps
from ...runtime import TARGETS, catalogue
from ..families import WORKLOADS, Workload
from .chosen import workloads_named
from .reports import read_report

if TYPE_CHECKING:
    from ..symbolic.proofs import Proof, Proven

SCHEMA = 1  # of the JSON; raised when a field changes its meaning


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prove",
        help="prove launches memory-safe for whole regions of sizes",
        description="Run the host code of ops with symbols for sizes, and have a solver prove that what is launched "
        "stays inside of its tensors, for all sizes that take the same branches (a region), region by region. Nothing "
        "is run on a GPU. The exit code is 0 if there is no counterexample, or with `--against` if nothing is worse "
        "than in that report.",
    )
    add_op(parser)
    add_workload(parser)
    parser.add_argument("--target", default="sm_90", choices=TARGETS, help="(%(default)s)")
    parser.add_argument(
        "--regions",
        type=at_least(1),
        default=64,
        metavar="N",
        help="look at no more than so many ways through the host code of a workload (%(default)s)",
    )
    add_workers(parser, "processes")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a report of `--out`: fail where something was proven in it and is not now, or is newly refuted",
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write all answers as JSON")
    parser.add_argument(
        "--into",
        type=output_file,
        metavar="FILE",
        help="add the answers to a report of `--out`, in place of its own for the same workloads",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if there is a counterexample or, beside an earlier report, less is proven than in it."""
    require("weft prove")
    before = read_report(args.against, ("weft prove",), SCHEMA) if args.against else None
    report = read_report(args.into, ("weft prove",), SCHEMA) if args.into else None
    asked = {"weft": __version__, "target": args.target, "regions": args.regions}
    for name, value in asked.items():
        if report and report[name] != value:
            raise Refused(
                f"{args.into} has {name} {report[name]}, this run {value}: the answers do not go together"
            )
    begin = time.perf_counter()
    told = _prove([str(workload) for workload in workloads(args)], args)
    if before:
        told = _again(before, told, args)
    made = {
        "report": "weft prove",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **asked,
        "seconds": round(time.perf_counter() - begin, 1),
        "workloads": told,
    }
    Console().print(render(made))
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    if report:
        args.into.write_text(json.dumps(merged(report, made), indent=1) + "\n")
    gone = list(lost(before, made)) if before else []
    for line in gone:
        Console().print(Text(f"worse than in {args.against}: {line}", "red"))
    if args.against:
        return int(bool(gone))
    return int(any(each["verdict"] == "counterexample" for each in told))


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Those that together launch every kernel of the ops: sizes are symbols, so that one stands for many."""
    from ..selection import by_kernels

    if args.workload:
        return workloads_named(args.workload, args.op)
    return [workload for op in args.op or catalogue for workload in by_kernels(op, args.target)]


def _prove(names: Sequence[str], args: argparse.Namespace, effort: int = 1) -> list[dict[str, Any]]:
    """A record for each workload, in their order."""
    told: dict[str, dict[str, Any]] = {}
    with Steps(len(names), "reading kernels") as steps:
        for each in _records(names, args, effort):
            told[each["workload"]] = each
            steps.say(f"{each['workload']}: {each['verdict']}")
            steps.advance()
    return [told[name] for name in names]


def _again(
    before: dict[str, Any], told: list[dict[str, Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The records, those that have lost something made again with more effort: a question near the solver's limit is
    decided in one run and not in the next."""
    asked = {"target": args.target, "regions": args.regions}
    names = [each["workload"] for each in told if any(lost(before, {**before, **asked, "workloads": [each]}))]
    found = {each["workload"]: each for each in _prove(names, args, effort=4)} if names else {}
    return [found.get(each["workload"], each) for each in told]


def _records(names: Sequence[str], args: argparse.Namespace, effort: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each workload, as they are done. Each is proven in a process of its own: what a solver was
    asked before may change what it answers at its limit, and it does not stop for Ctrl-C."""
    with ThreadPoolExecutor(args.workers) as pool:
        try:
            with deaf_children():
                doing = [pool.submit(_prove_apart, name, args.target, args.regions, effort) for name in names]
            yield from (done.result() for done in as_completed(doing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_children()  # leaving the pool would wait for them
            raise


def _prove_apart(*args: Any) -> dict[str, Any]:
    """`prove_workload` in a new process, forked from one that has imported all and asked nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.lab.symbolic.proofs"])
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(prove_workload, *args).result()


def prove_workload(name: str, target: str, regions: int, effort: int = 1) -> dict[str, Any]:
    """All that is found out about a workload, for JSON, with so many times the usual effort."""
    from ..symbolic.proofs import EFFORT, proven

    workload = next(w for w in WORKLOADS if str(w) == name)
    return record(workload, proven(workload, target, regions=regions, effort=effort * EFFORT))


# ---- what is told ---------------------------------------------------------------------------------------


def record(workload: Workload, found: Proven) -> dict[str, Any]:
    """All that was found out about a workload, for JSON."""
    contracts = found.contracts
    return {
        "op": workload.op,
        "workload": str(workload),
        "verdict": found.verdict,
        "sizes": [size.name for size in contracts.sizes],
        "fixed": contracts.fixed,
        "regions": contracts.regions,
        "complete": contracts.complete,
        "gaps": contracts.gaps,
        "refused": contracts.refused,
        "skipped": found.skipped,
        "launches": [_launch(proof) for proof in found.proofs],
        "seconds": round(contracts.seconds + sum(proof.report.seconds for proof in found.proofs), 1),
    }


def _launch(proof: Proof) -> dict[str, Any]:
    outputs = proof.outputs
    answers = [*proof.answers, *proof.races, *(answer for found in outputs.values() for answer in found)]
    return {
        "kernel": proof.case.variant.kernel,
        "regions": len(proof.case.regions),
        "verdict": proof.verdict,
        "accesses": sum(answer.kind == "bounds" for answer in proof.answers),
        "memory": dict(Counter(answer.verdict for answer in proof.answers)),
        "races": dict(Counter(answer.verdict for answer in proof.races)),
        "outputs": {name: _worst([answer.verdict for answer in found]) for name, found in outputs.items()},
        "assumed": list(proof.report.assumed),
        "launched": list(proof.report.certificates),
        "open": [
            {
                "kind": answer.kind,
                "what": answer.what,
                "place": _place(answer.place),
                "verdict": answer.verdict,
                "why": answer.why,
                "example": str(answer.example) if answer.example else "",
            }
            for answer in answers
            if answer.verdict != "proven"
        ],
    }


def _worst(verdicts: Sequence[str]) -> str:
    """What is known of an output: all, something wrong, or not enough. Nothing that was asked is no proof."""
    if "counterexample" in verdicts:
        return "counterexample"
    return "proven" if verdicts and set(verdicts) == {"proven"} else "unknown"


def _place(place: str) -> str:
    """A line of the package."""
    root = f"{Path(__file__).parents[2]}/"
    return place.removeprefix(root)


def merged(report: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the answers of a newer one in place of its own for the same workloads, new ones last."""
    answers = {each["workload"]: each for each in (*report["workloads"], *newer["workloads"])}
    seconds = round(sum(each["seconds"] for each in answers.values()), 1)
    return {**newer, "seconds": seconds, "workloads": list(answers.values())}


def lost(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What was proven in an earlier report of the same workloads and is not now, and counterexamples that it does not
    have. What is new was not proven before, but must not be refuted either."""
    earlier = {each["workload"]: each for each in before["workloads"]}
    for each in now["workloads"]:
        known = earlier.get(each["workload"], {"launches": [], "complete": False})
        refuted = _open(each, "counterexample") - _open(known, "counterexample")
        for kernel, kind, what in refuted:
            yield f"{each['workload']}: {kernel}: {kind} of {what} has a counterexample"
        if before["target"] != now["target"]:
            continue
        kernels = {launch["kernel"] for launch in known["launches"]}
        for kernel in sorted(kernels - {launch["kernel"] for launch in each["launches"]}):
            yield f"{each['workload']}: {kernel}, which has no contract or is not read"
        for (kernel, kind, what), count in (_open(each) - _open(known) - refuted).items():
            if kernel in kernels:
                yield f"{each['workload']}: {kernel}: {kind} of {what}{f', {count} times' if count > 1 else ''}"
        for kernel, output in _no_longer_whole(known, each):
            yield f"{each['workload']}: {kernel}: that all of {output} is written"
        if known["complete"] and not each["complete"] and before["regions"] <= now["regions"]:
            yield f"{each['workload']}: that these are all sizes"


def _open(workload: dict[str, Any], verdict: str = "") -> Counter[tuple[str, str, str]]:
    """What is not proven of the kernels of a workload, or what has this verdict; outputs are looked at apart."""
    from ..symbolic.proofs import OUTPUTS

    return Counter(
        (launch["kernel"], answer["kind"], answer["what"])
        for launch in workload["launches"]
        for answer in launch["open"]
        if verdict in ("", answer["verdict"]) and answer["kind"] not in OUTPUTS
    )


def _no_longer_whole(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    """The kernels and outputs that were proven to be written whole, and are not in more launches than before, or are
    not asked about any more. An element that nobody writes may be one that the op leaves undefined: where nothing was
    proven of an output, no answer is worse than none. Older reports know nothing of outputs."""
    kernels = {launch["kernel"] for launch in now["launches"]}
    once, again = _outputs(before), _outputs(now)
    found = []
    for (kernel, output), verdicts in once.items():
        said = again.get((kernel, output), Counter())
        less = said.total() - said["proven"] > verdicts.total() - verdicts["proven"]
        if verdicts["proven"] and kernel in kernels and (less or not said):
            found.append((kernel, output))
    return sorted(found)


def _outputs(workload: dict[str, Any]) -> dict[tuple[str, str], Counter[str]]:
    """What is known of each output of each kernel, by how many launches."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for launch in workload["launches"]:
        for output, verdict in launch.get("outputs", {}).items():
            found.setdefault((launch["kernel"], output), Counter())[verdict] += 1
    return found


def summary(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each op: how many of its kernels, launches and accesses there are, and what is known of them."""
    rows = []
    for op in dict.fromkeys(each["op"] for each in report["workloads"]):
        found = [each for each in report["workloads"] if each["op"] == op]
        launches = [launch for each in found for launch in each["launches"]]
        memory: Counter[str] = sum((Counter(launch["memory"]) for launch in launches), Counter())
        races: Counter[str] = sum((Counter(launch["races"]) for launch in launches), Counter())
        whole = Counter(verdict for launch in launches for verdict in launch.get("outputs", {}).values())
        rows.append(
            {
                "op": op,
                "kernels": len({launch["kernel"] for launch in launches}),
                "launches": len(launches),
                "accesses": sum(launch["accesses"] for launch in launches),
                "proven": memory["proven"],
                "counterexample": memory["counterexample"],
                "unknown": memory["unknown"] + sum(len(each["skipped"]) for each in found),
                "races": f"{races['proven']} of {races.total()}",
                "outputs": f"{whole['proven']} of {whole.total()}",
                "assumed": len({said for launch in launches for said in launch["assumed"]}),
                "complete": f"{sum(each['complete'] for each in found)} of {len(found)}",
                "seconds": round(sum(each["seconds"] for each in found)),
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
    """A row for each op, and below what is not proven."""
    lines: list[list[str | Text]] = [[*HEADINGS.values()]]
    for row in summary(report):
        style = "red" if row["counterexample"] else "yellow" if row["unknown"] else "green"
        lines.append([Text(str(row[name]), style if name == "op" else "") for name in HEADINGS])
    parts: list[Any] = [Text(f"Weft for {report['target']}", "bold"), Figures(lines), Text()]
    for each in report["workloads"]:
        said = [f"not looked at: {gap}" for gap in each["gaps"]]
        said += [f"not read: {skipped}" for skipped in each["skipped"]]
        for launch in each["launches"]:
            for answer in launch["open"]:
                about = answer["example"] or answer["why"]
                where = f"{launch['kernel']}, {answer['what']} at {answer['place']}"
                said.append(f"{answer['verdict']}: {answer['kind']} of {where}: {about}")
        if said:
            parts += [Text(each["workload"], "bold"), *(Text(f"  {line}") for line in dict.fromkeys(said))]
    return Group(*parts)
