"""`weft verify`: judge the ops on a device of this machine by the checks that every change to Weft must pass."""

from __future__ import annotations

import argparse
import json
import shlex
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.text import Text

from ...cli import doctor
from ...cli.arguments import add_op, add_workload, output_file, usable_device
from ...cli.figures import Figures
from ...cli.names import check_names
from ...cli.needs import require
from ...cli.screen import Refused, Steps
from ...runtime import capabilities_of, loom
from ..families import OPS, Workload, distinct, for_op
from .chosen import workloads_named

SCHEMA = 1  # of the JSON; incremented when the meaning of a field changes

Outcome = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check of one workload."""

    op: str
    workload: str
    check: str
    seed: int
    outcome: Outcome
    seconds: float
    message: str = ""  # what is wrong, or why there was nothing to check
    repeat: str = ""  # the command that repeats a failure


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="run every op on a device and judge the results",
        description="Run every op on a device and judge its results: against float64, against the bytes of an "
        "independent quantizer, in memory full of NaN, from run to run. The exit code is 0 if nothing failed.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument(
        "--emulate",
        metavar="TARGET",
        help="run on a GPU emulated in software instead: sm_80, sm_90 (needs no GPU)",
    )
    add_op(parser)
    parser.add_argument(
        "--check", action="append", default=[], metavar="CHECK", help="only this check; may be repeated"
    )
    add_workload(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="run each kernel once, instead of each set of options"
    )
    size.add_argument("--full", action="store_true", help="run every workload, with three seeds")
    parser.add_argument("--seed", type=int, help="draw the inputs from this seed (0)")
    parser.add_argument(
        "--out", type=output_file, metavar="FILE", help="write a JSON report to attach to a bug report"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if a check failed."""
    require("weft verify")
    _check(args)
    workloads = chosen(args)
    begin = time.perf_counter()
    verdicts = _verify(workloads, args)
    seconds = time.perf_counter() - begin
    Console().print(render(verdicts, _subject(args), seconds))
    if args.out:
        args.out.write_text(json.dumps(report(args, verdicts, seconds), indent=1) + "\n")
    return int(any(verdict.outcome == "failed" for verdict in verdicts))


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be verified."""
    from ..checks import CHECKS

    check_names("check", args.check, list(CHECKS))
    if not args.emulate:
        device = usable_device(args.device)
        reason = loom.obstacle() if device.type == "cpu" else None
        if reason:
            raise Refused(f"kernels cannot be built on this machine: {reason}")
        return
    if args.device != "cpu":
        raise Refused("--emulate runs in software on the CPU: leave out --device")
    from triton_loom.emulator.devices import device_of

    try:
        device_of(args.emulate)
    except ValueError as error:
        raise Refused(str(error)) from None


def _subject(args: argparse.Namespace) -> str:
    """Return the name of what is verified, as shown."""
    if args.emulate:
        return f"{args.emulate}, emulated"
    device = torch.device(args.device)
    return str(device) if device.type == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


# ---- workloads and checks ---------------------------------------------------------------------------------


def chosen(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads to verify: one for each kernel (`--quick`), for each set of options, or (`--full`) all."""
    from ..selection import by_kernels, by_options

    ops = args.op or OPS
    if args.workload:
        return workloads_named(args.workload, args.op)
    if args.full:
        return [w for op in ops for w in distinct(for_op(op))]
    target = args.emulate or capabilities_of(torch.device(args.device)).target
    if args.quick:
        return [w for op in ops for w in by_kernels(op, target)]
    return [w for op in ops for w in by_options(op) if w.runs_on(target)]


def _verify(workloads: Sequence[Workload], args: argparse.Namespace) -> list[Verdict]:
    from ..checks import CHECKS

    first = args.seed or 0
    seeds = range(first, first + (3 if args.full and args.seed is None else 1))
    tasks = [
        (workload, check, seed)
        for workload in workloads
        for check in args.check or list(CHECKS)
        for seed in seeds
    ]
    verdicts: list[Verdict] = []
    with Steps(len(tasks)) as steps:
        for workload, check, seed in tasks:
            failed = sum(verdict.outcome == "failed" for verdict in verdicts)
            trouble = f"[red]{failed} failed[/], " if failed else ""
            steps.say(f"{trouble}{workload.op}: {check.replace('_', ' ')}")
            verdicts.append(judge(workload, check, seed, args.device, args.emulate))
            steps.advance()
    return verdicts


def judge(workload: Workload, check: str, seed: int, device: str, emulated: str | None) -> Verdict:
    """Run one check of one workload. Whatever it raises is a failure of the op."""
    from ..calls import under
    from ..checks import CHECKS, NotApplicable

    begin = time.perf_counter()
    outcome: Outcome = "passed"
    message = repeat = ""
    try:
        with _device(emulated), under(device=torch.device(device), seed=seed):
            CHECKS[check](workload)
    except NotApplicable as reason:
        outcome, message = "not applicable", str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = f"--emulate {emulated}" if emulated else f"--device {device}"
        name = shlex.quote(str(workload))
        outcome, message = "failed", _message_of(error)
        repeat = f"weft verify {where} --workload {name} --check {check} --seed {seed}"
    return Verdict(
        workload.op, str(workload), check, seed, outcome, time.perf_counter() - begin, message, repeat
    )


def _device(emulated: str | None) -> AbstractContextManager[Any]:
    if not emulated:
        return nullcontext()
    import triton_loom

    from ..selection import KNOWN

    return triton_loom.emulate(emulated, ignore=KNOWN)


def _message_of(error: BaseException) -> str:
    """Return what an error says: the message of a check's verdict, the whole traceback of any other error."""
    if isinstance(error, AssertionError):
        return str(error) or traceback.format_exc(limit=-1)
    return "".join(traceback.format_exception(error))


# ---- output -----------------------------------------------------------------------------------------------


def render(verdicts: Sequence[Verdict], subject: str, seconds: float) -> Group:
    """Return a row for each op, a column for each check that applied, and the failures below."""
    checks = list(dict.fromkeys(v.check for v in verdicts if v.outcome != "not applicable"))
    lines: list[list[str | Text]] = [["op", *(check.rpartition("_")[2] for check in checks)]]
    for op in dict.fromkeys(verdict.op for verdict in verdicts):
        cells = [[v for v in verdicts if v.op == op and v.check == check] for check in checks]
        lines.append([op, *map(_cell, cells)])
    failures = [verdict for verdict in verdicts if verdict.outcome == "failed"]
    passed = sum(verdict.outcome == "passed" for verdict in verdicts)
    parts: list[Any] = [Text(f"Weft on {subject}", "bold"), Figures(lines), Text()]
    for failure in failures:
        parts += [
            Text(f"{failure.workload}: {failure.check.replace('_', ' ')}, seed {failure.seed}", "bold red"),
            Text(failure.message.rstrip()),
            Text(failure.repeat, "bold", no_wrap=True, overflow="ignore"),  # meant to be copied
            Text(),
        ]
    parts.append(
        Text(
            f"{passed} checks passed, {len(failures)} failed, {seconds:.0f} s", "red" if failures else "green"
        )
    )
    return Group(*parts)


def _cell(verdicts: Sequence[Verdict]) -> Text:
    failed = sum(verdict.outcome == "failed" for verdict in verdicts)
    passed = sum(verdict.outcome == "passed" for verdict in verdicts)
    if failed:
        return Text(f"{failed} of {failed + passed} failed", "red")
    return Text(str(passed), "green") if passed else Text("-", "dim")


def report(args: argparse.Namespace, verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """Return what a bug report needs: the machine, the settings, and every verdict."""
    machine = doctor.examine()
    outcomes = [verdict.outcome for verdict in verdicts]
    return {
        "report": "weft verify",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "subject": _subject(args),
        "machine": {
            "weft": machine.weft,
            "facts": {fact.name: fact.value for fact in machine.facts},
            "devices": [asdict(device) for device in machine.devices],
            "environment": machine.environment,
        },
        "passed": outcomes.count("passed"),
        "failed": outcomes.count("failed"),
        "seconds": round(seconds, 1),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
