"""`weft tune`: try launch choices near the defaults, measured on a device, or modelled for an absent GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text

from ...cli.arguments import add_most, add_op, add_workers, add_workload, output_file, usable_device
from ...cli.needs import require
from ...cli.screen import Refused, Steps
from ...runtime import Capabilities, capabilities_of
from ...runtime.capabilities import Key
from ...runtime.choices import TilesError, choices, path_for, write
from ...runtime.devices import device_name
from ..bench.clocks import Times, clock_of, timed
from ..bench.showing import NOISE, verdict
from ..compiled import compile_all
from ..families import Call, Workload
from ..model import USUAL
from ..problem import moved
from ..traffic import rows_within
from .chosen import INSTEAD, one_each

ROUNDS = 20
STEPS = 3  # at most, each from a config to a better neighbor


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure other tiles on a device and keep the better ones",
        description="Try configs near the default one for every launch choice that workloads make: judge them first "
        "(bits where they are promised, else accuracy), then time them in turn with the default. Configs that are "
        "faster by more than the noise are written to a file that later runs read. With --target nothing is measured: "
        "candidates are compiled, those that spill are dropped, and a model ranks the rest; written only with --out.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument(
        "--target", choices=USUAL, help="model a GPU of this kind instead; it need not be here"
    )
    add_op(parser)
    add_workload(parser, INSTEAD)
    add_most(parser, 64.0)
    add_workers(parser, "compilers")
    parser.add_argument(
        "--out", type=output_file, metavar="FILE", help="write there instead of to the device's own file"
    )
    parser.set_defaults(run=run)


@dataclass
class Row:
    """Outcome for one choice."""

    key: Key
    workload: str
    default: dict[str, int]
    best: dict[str, int]
    gain: float = 1.0  # speedup of the best over the default, or of the fastest candidate if none is better
    milliseconds: tuple[float, float] | None = None  # of default and best; modelled with --target
    tried: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # candidates, and why

    @property
    def is_better(self) -> bool:
        return self.best != self.default

    def entry(self, how: str) -> dict[str, Any] | None:
        """Return the entry for the file; None if the default is best."""
        if not self.is_better:
            return None
        return {
            "config": self.best,
            "instead_of": self.default,
            "workload": self.workload,
            "gain": round(self.gain, 3),
            "how": how,
        }


def run(args: argparse.Namespace) -> int:
    """Tune, or refuse what cannot be tuned."""
    require("weft tune")
    chosen = one_each(args)
    _check(args)
    if args.target:
        chosen = [w for w in chosen if w.runs_on(args.target)]
        if not chosen:
            raise Refused(f"none of these workloads runs on {args.target}")
    rows: list[Row] = []
    with Steps(len(chosen)) as steps:
        done: set[Key] = set()
        for workload in chosen:

            def say(text: str, op: str = workload.op) -> None:
                steps.say(f"{op}: {text}")

            outcomes = (
                _modelled(workload, args, done, say) if args.target else _measured(workload, args, done, say)
            )
            rows += outcomes
            steps.advance()
    device = "" if args.target else device_name(torch.device(args.device))
    Console().print(rendered(rows, f"modelled for {args.target}" if args.target else f"measured on {device}"))
    _save(rows, args, device)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be tuned, and a file that could not be written afterwards."""
    if args.target:
        if args.device != "cpu":
            raise Refused("give --device, which is measured, or --target, which is modelled")
        return
    device = usable_device(args.device)
    if args.out is not None:
        return
    try:
        path = path_for(device_name(device))
        path.parent.mkdir(parents=True, exist_ok=True)
        output_file(str(path))
    except (TilesError, OSError, argparse.ArgumentTypeError) as error:
        raise Refused(f"{error}; --out FILE writes elsewhere") from None


def _save(rows: Sequence[Row], args: argparse.Namespace, device: str) -> None:
    """Save better choices. A model's preferences are saved only with `--out`."""
    if args.target and args.out is None:
        Console().print("Nothing is written: save these with --out FILE and use them with WEFT_CHOICES=FILE.")
        return
    target = args.target or capabilities_of(torch.device(args.device)).target
    path = args.out or path_for(device)
    how = "modelled" if args.target else "measured"
    write(path, target, device, {row.key: row.entry(how) for row in rows})
    Console().print(f"{sum(row.is_better for row in rows)} of {len(rows)} choices are changed by {path}")


# ---- measured ---------------------------------------------------------------------------------------------


def _measured(
    workload: Workload, args: argparse.Namespace, done: set[Key], say: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the outcomes for the choices of a workload that no earlier one has made."""
    from ..calls import returned
    from ..checks import CPU
    from ..tuning import asked, default_of

    device = torch.device(args.device)
    target = capabilities_of(device)
    call = workload.make(rows=rows_within(workload, int(args.most * 1e6))).to(device)
    for key in asked(call, target):
        if key not in done:
            done.add(key)
            wanted = moved(default_of(key, target).running(lambda: returned(call))(), CPU)
            yield _climb(workload, call, key, wanted, target, say)


def _climb(
    workload: Workload, call: Call, key: Key, wanted: dict[str, Any], target: Capabilities,
    say: Callable[[str], None],
) -> Row:  # fmt: skip
    """Move from the default to its fastest neighbor, and on while that is faster by more than the noise."""
    from ..tuning import Candidate, default_of, failed_check, why_not

    default = best = default_of(key, target)
    row = Row(key, str(workload), default.fields, default.fields)
    seen = {default.config}
    for _ in range(STEPS):
        accepted = []
        for config in best.choice.near(best.config, target):
            if config in seen:
                continue
            seen.add(config)
            candidate = Candidate.of(key, config, target)
            say(f"{key[0]} {_short(candidate.fields)}")
            reason = why_not(candidate, workload, call, wanted)
            if reason:
                row.refused[_short(candidate.fields)] = reason
            else:
                accepted.append(candidate)
        if not accepted:
            break
        say(f"{key[0]}, {len(accepted)} candidates in turn")
        times = _times([best, *accepted], call)
        first, *others = times
        fastest = min(range(len(accepted)), key=lambda number: others[number].p50)
        if best is default:
            row.gain = first.p50 / others[fastest].p50
        if verdict(first, others[fastest]) != "faster":
            break
        best = accepted[fastest]
    row.tried = len(seen) - 1
    if best is default:
        return row
    # The fastest of many is partly luck: it must win again, against the default alone.
    before, after = _times([default, best], call)
    if verdict(before, after) != "faster":
        return row
    wrong = failed_check(best, workload, call.device)
    if wrong:
        row.refused[_short(best.fields)] = wrong
        return row
    row.best, row.gain, row.milliseconds = best.fields, before.p50 / after.p50, (before.p50, after.p50)
    return row


def _times(candidates: Sequence[Any], call: Call) -> list[Times]:
    """Return the times of each candidate, called in turn."""
    contenders = {str(number): [each.running(call)] for number, each in enumerate(candidates)}
    times, _ = timed(clock_of(call.device), contenders, ROUNDS)
    return list(times.values())


# ---- modelled ---------------------------------------------------------------------------------------------


def _modelled(
    workload: Workload, args: argparse.Namespace, done: set[Key], say: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the outcomes for the choices of a workload at its real size, each with the configs near the default."""
    from ...runtime import recording
    from ..tuning import Candidate, asked, default_of, modelled, started

    target = Capabilities.of(args.target)
    with recording(args.target):
        call = workload.make("meta")
        keys = [key for key in asked(call, target) if key not in done]
    done.update(keys)
    for key in keys:
        default = default_of(key, target)
        near = default.choice.near(default.config, target)
        candidates = [default, *(Candidate.of(key, config, target) for config in near)]
        launches = [started(candidate, workload) for candidate in candidates]
        every = [{launch.variant for launch in each} for each in launches]
        changed = every[0].union(*every) - every[0].intersection(*every)
        say(f"{key[0]}, {len(changed)} kernels compiled")
        jobs = list(changed)
        binaries = dict(
            zip(jobs, compile_all([(v, args.target) for v in jobs], workers=args.workers), strict=True)
        )
        estimates = [
            modelled(candidate, workload, each, binaries, changed)
            for candidate, each in zip(candidates, launches, strict=True)
        ]
        row = Row(key, str(workload), default.fields, default.fields, tried=len(candidates) - 1)
        row.refused = {
            _short(c.fields): why for c, (_, why) in zip(candidates, estimates, strict=True) if why
        }
        seconds = [each for each, _ in estimates]
        best = min(range(len(estimates)), key=lambda number: seconds[number])
        row.gain = seconds[0] / seconds[best]
        if row.gain > 1 + NOISE:
            row.best = candidates[best].fields
            row.milliseconds = (1e3 * seconds[0], 1e3 * seconds[best])
        yield row


# ---- output -----------------------------------------------------------------------------------------------


def _short(fields: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def rendered(rows: Sequence[Row], how: str) -> Group:
    """Return a block for each choice: configs are too long for columns."""
    parts = [Text(f"Launch choices, {how}"), Text()]
    for row in rows:
        name, facts = row.key
        condition = " ".join(
            f"{fact}={value}" for fact, value in zip(choices[name].facts, facts, strict=True)
        )
        better = {field: value for field, value in row.best.items() if value != row.default[field]}
        tried = f"of {row.tried} tried" + (f", {len(row.refused)} refused" if row.refused else "")
        gain = f"{row.gain:.2f} times as fast" if row.is_better else f"none better, {row.gain:.2f} at most"
        parts += [
            Text(f"{name} {condition}", "bold"),
            Text(f"  workload  {row.workload}"),
            Text(f"  default   {_short(row.default)}"),
            Text(f"  better    {_short(better) or '-'} ({gain}, {tried})"),
        ]
    return Group(*parts)
