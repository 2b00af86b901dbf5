"""`weft prove`: that kernels stay inside of their tensors, for all sizes at once, or sizes for which they do not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from .. import __version__
from ..runtime import TARGETS, catalogue
from ..runtime.loom import pip
from ..workloads import WORKLOADS, Workload
from .screen import complain, no_such_op, plain_table, progress_bar

if TYPE_CHECKING:
    from ..proof.proofs import Proof, Proven

SCHEMA = 1  # of the JSON; raised when a field changes its meaning


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prove",
        help="prove kernels memory-safe for all sizes",
        description="Run the host code of ops with symbols for sizes, and have a solver prove for all of them that "
        "what is launched stays inside of its tensors. Nothing is run on a GPU. The exit code is 0 if there is no "
        "counterexample, or with `--against` if nothing is worse than in that report.",
    )
    parser.add_argument(
        "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated"
    )
    parser.add_argument("--workload", default="", help="only workloads whose name has this in it")
    parser.add_argument("--target", default="sm_90", choices=TARGETS, help="(%(default)s)")
    parser.add_argument(
        "--regions",
        type=int,
        default=64,
        metavar="N",
        help="look at no more than so many ways through the host code of a workload (%(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes at once (%(default)s)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a report of `--out`: fail where something was proven in it and is not now, or is newly refuted",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all answers as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if there is a counterexample or, beside an earlier report, less is proven than in it; 2 if nothing could be."""
    problem = _problem(args)
    if problem:
        complain(problem)
        return 2
    begin = time.perf_counter()
    chosen = workloads(args)
    if not chosen:
        complain("no workload has that name; `weft traffic` lists all of them")
        return 2
    told = _prove(chosen, args)
    made = {
        "report": "weft prove",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weft": __version__,
        "target": args.target,
        "regions": args.regions,
        "seconds": round(time.perf_counter() - begin, 1),
        "workloads": told,
    }
    Console().print(render(made))
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    gone = list(lost(json.loads(args.against.read_text()), made)) if args.against else []
    for line in gone:
        Console().print(Text(f"worse than in {args.against}: {line}", "red"))
    if args.against:
        return int(bool(gone))
    return int(any(each["verdict"] == "counterexample" for each in told))


def _problem(args: argparse.Namespace) -> str:
    """Why nothing can be proven, and what to do about it."""
    for needed in ("triton_loom", "z3"):
        if importlib.util.find_spec(needed) is None:
            return f"`weft prove` needs Loom and the solver z3: {pip()} install 'weft[prove]'"
    if problem := no_such_op(args.op):
        return problem
    if args.against and not _is_report(args.against):
        return f"{args.against} is no report of `weft prove --out`"
    return ""


def _is_report(file: Path) -> bool:
    try:
        read = json.loads(file.read_text())
        return bool(read["report"] == "weft prove" and read["schema"] == SCHEMA)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Those that together launch every kernel of the ops: sizes are symbols, so that one stands for many."""
    from ..proof.selection import by_kernels

    ops = args.op or list(catalogue)
    if args.workload:
        return [w for w in WORKLOADS if w.op in ops and args.workload in str(w)]
    return [workload for op in ops for workload in by_kernels(op, args.target)]


def _prove(chosen: Sequence[Workload], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each workload, in their order."""
    told: dict[str, dict[str, Any]] = {}
    with progress_bar() as progress:
        bar = progress.add_task("", total=len(chosen))
        for each in _records([str(workload) for workload in chosen], args):
            told[each["workload"]] = each
            progress.update(bar, description=f"{each['workload']}: {each['verdict']}")
            progress.advance(bar)
    return [told[str(workload)] for workload in chosen]


def _records(names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each workload, as they are done."""
    if len(names) == 1 or args.workers == 1:
        yield from (prove_workload(name, args.target, args.regions) for name in names)
        return
    # A process that was forked would share the solver's state with its parent.
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        doing = [pool.submit(prove_workload, name, args.target, args.regions) for name in names]
        yield from (done.result() for done in as_completed(doing))


def prove_workload(name: str, target: str, regions: int) -> dict[str, Any]:
    """All that is found out about a workload, for JSON."""
    from ..proof.proofs import proven

    workload = next(w for w in WORKLOADS if str(w) == name)
    return record(workload, proven(workload, target, regions=regions))


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
    root = f"{Path(__file__).parents[1]}/"
    return place.removeprefix(root)


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
    from ..proof.proofs import OUTPUTS

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
    table = plain_table()
    table.padding = (0, 1, 0, 0)
    for name, heading in HEADINGS.items():
        table.add_column(heading, justify="left" if name == "op" else "right", no_wrap=name == "op")
    for row in summary(report):
        style = "red" if row["counterexample"] else "yellow" if row["unknown"] else "green"
        table.add_row(*(Text(str(row[name]), style if name == "op" else "") for name in HEADINGS))
    parts: list[Any] = [Text(f"Weft for {report['target']}", "bold"), table, Text()]
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
