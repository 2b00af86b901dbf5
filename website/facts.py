"""What is known of each op, by asking the package: which ops of the catalogue a public function is made of, and on
which workloads, in which formats they are judged. The figures come from the tables in docs/, which tests keep true."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft
from weft.cli.names import made_of, public_ops
from weft.lab.families import WORKLOADS, Workload, distinct
from weft.lab.problem import run_op
from weft.quant import Format, QTensor

ROOT = Path(__file__).parents[1]


def family(thing: Callable[..., Any]) -> str:
    """The package or file in `weft.ops` that a function is in."""
    return thing.__module__.split(".")[2]


# ---- which ops of the catalogue a function calls -------------------------------------------------------------


@functools.cache
def called_by(workload: Workload) -> str:
    """The function that a workload calls."""
    function: Any = call_of(workload).function
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", function))


@functools.cache
def call_of(workload: Workload) -> Any:
    return workload.make("meta")


@functools.cache
def owners(op: str) -> tuple[str, ...]:
    """The public functions on whose pages an op of the catalogue is described: those that its workloads call or whose
    name it has; if there are none, or workloads that call the op itself, those of its family that are made of it."""
    public = public_ops()
    callers = {called_by(workload) for workload in WORKLOADS if workload.op == op}
    called = callers & public.keys()
    named = [name for name in public if f"{op}_".startswith(name + "_") and op in made_of(name)]
    if not called and named:
        called = {max(named, key=len)}
    if not called or (callers - called and not named):
        home = _family_of_op(op)
        called |= {name for name in public if op in made_of(name) and family(public[name]) == home}
    return tuple(name for name in public if name in called)


def _family_of_op(op: str) -> str:
    return str(weft.catalogue[op].arguments.cls.__module__.split(".")[2])


def described_on(name: str) -> tuple[str, ...]:
    """The ops of the catalogue that a public function's page describes."""
    found = [op for op in weft.catalogue if name in owners(op)]
    return tuple(sorted(found, key=lambda op: (op.endswith("_backward"), found.index(op))))


# ---- what they are judged on ---------------------------------------------------------------------------------


@dataclass
class Judged:
    """An op of the catalogue, as far as one public function is concerned."""

    op: str
    workloads: tuple[Workload, ...]
    formats: list[str] = field(default_factory=list)


def judged(name: str, op: str) -> Judged:
    """The workloads of an op that a function's page lists: those that call the function or the op itself, or if none
    does, all."""
    every = distinct(tuple(workload for workload in WORKLOADS if workload.op == op))
    callers = (name, run_op.__name__)
    own = tuple(workload for workload in every if called_by(workload) in callers) or every
    formats: dict[str, None] = {}
    for workload in own:
        for value in call_of(workload).kwargs.values():
            formats.update(dict.fromkeys(_formats(value)))
    return Judged(op, own, list(formats))


def _formats(value: Any) -> Iterator[str]:
    if isinstance(value, QTensor):
        yield str(value.format)
    elif isinstance(value, Format):
        yield str(value)
    elif isinstance(value, str):
        try:
            yield str(Format.of(value))
        except ValueError:
            return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _formats(item)


# ---- figures of the documents ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A line of docs/traffic.md."""

    least: str  # MB
    ratio: float
    reason: str


@functools.cache
def traffic() -> dict[str, Moved]:
    found = {}
    for line in (ROOT / "docs/traffic.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 10:
            found[cells[0].strip("`")] = Moved(cells[3], float(cells[8]), cells[9])
    return found


@dataclass(frozen=True)
class Emulated:
    """A line of the table of docs/proof.md."""

    options: int
    same: int
    differs: str
    why: str


@functools.cache
def emulated() -> tuple[str, dict[str, Emulated]]:
    """The target, and the lines by op."""
    text = (ROOT / "docs/proof.md").read_text()
    target = re.search(r"<summary>(\w+):", text)
    assert target is not None
    found = {}
    for line in text[target.start() :].split("</details>")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 7:
            found[cells[0].strip("`")] = Emulated(int(cells[1]), int(cells[2]), cells[3], cells[4])
    return target[1], found
