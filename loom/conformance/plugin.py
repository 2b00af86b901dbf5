"""Pytest plugin of a child process: runs a selection of a project's tests and reports the kernels that each launched.

The file that CONFORMANCE_ORDER names has its `Order` as JSON. The plugin writes a line of JSON for every event to the
file that the order names.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Order:
    """Instructions for a child process."""

    project: str  # its name
    events: str  # the file to write to
    roots: list[str]  # kernels in these directories are the project's
    each: int  # at most so many sets of parameters for a test
    at_most: int | None  # a cap for the default numbers of a test
    skip: list[str]  # patterns of tests that are not run
    done: list[str]  # tests that an earlier child has run
    only: list[str] | None  # the tests to run, if not all
    sanitize: bool
    capability: list[int]  # of the GPU that the project is told of
    prepare: str | None  # a module that is imported before the tests are
    by_text: bool = True  # parameters that are text distinguish tests
    emulate: str | None = None  # the GPU that kernels are launched on, if not the CPU
    prove: bool = False  # prove every kernel for all sizes
    proofs: tuple[str, ...] = ()  # kernels that an earlier child has tried to prove


ORDER = Order(**json.loads(Path(os.environ["CONFORMANCE_ORDER"]).read_text()))


def tell(**event: Any) -> None:
    with open(ORDER.events, "a") as file:
        file.write(json.dumps(event) + "\n")


def _prepare() -> tuple[Any, Any]:
    """Return the recorder of launches, and the emulated GPU or None.

    The GPU must exist before a test is imported, because projects query it on import."""
    import triton_loom

    from . import redirect
    from .observe import Launches

    launcher_class: Any
    if ORDER.emulate:
        gpu = SCOPES.enter_context(triton_loom.emulate(ORDER.emulate, raises=False))
        from triton_loom.emulator.driver import EmulatedLauncher as launcher_class
    else:
        gpu = None
        from triton_loom.device.launcher import LoomLauncher as launcher_class
    redirect.take_first_configuration(launcher_class)
    redirect.redirect((ORDER.capability[0], ORDER.capability[1]))
    launches = Launches([Path(root) for root in ORDER.roots])
    launches.watch(launcher_class)
    if ORDER.prepare:
        importlib.import_module(ORDER.prepare)
    return launches, gpu


SCOPES = ExitStack()  # until the process ends
LAUNCHES, GPU = _prepare()


def variant(item: Any) -> tuple[str, ...]:
    """Return the test and those of its parameters that are text."""
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters and ORDER.by_text else ()
    texts = [value for value in values if isinstance(value, str)]
    return (item.nodeid.split("[")[0], *texts)


LAST = 1e9  # a negative number often means a special case, which is not the simplest one


def work(item: Any) -> tuple[float, int, str]:
    """Return a sort key for the work of a test: the product of its numeric parameters, then the flags that are on."""
    parameters = getattr(item, "callspec", None)
    values = list(flat(list(parameters.params.values()))) if parameters else []
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return (
        math.prod(max(number, 1) if number >= 0 else LAST for number in numbers),
        sum(value is True for value in values),
        item.nodeid,
    )


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    else:
        yield value


UNREADABLE: dict[str, str] = {}  # files of tests that could not be imported, and why


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        UNREADABLE[report.nodeid] = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Select the smallest sets of parameters of each variant of a test."""
    if ORDER.only is not None:
        requested = set(ORDER.only)
        items[:] = [item for item in items if item.nodeid in requested]
    else:
        sets: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        for item in items:
            if not any(re.search(pattern, item.nodeid) for pattern in ORDER.skip):
                sets[variant(item)].append(item)
        selected = {item.nodeid for each in sets.values() for item in sorted(each, key=work)[: ORDER.each]}
        items[:] = [item for item in items if item.nodeid in selected]
    if ORDER.at_most is not None:
        for function in {item.function for item in items}:
            defaults = function.__defaults__ or ()
            function.__defaults__ = tuple(
                min(value, ORDER.at_most) if type(value) is int else value for value in defaults
            )
    tell(event="selected", tests=[item.nodeid for item in items], unreadable=UNREADABLE)
    done = set(ORDER.done)
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    import torch

    LAUNCHES.clear()
    torch.manual_seed(0)
    random.seed(0)
    tell(event="start", test=item.nodeid)
    item.conformance = {"outcome": "passed", "reason": "", "findings": [], "seconds": -time.time()}
    item.launches = []
    result = yield
    if GPU is not None:
        item.conformance["findings"] = [emulated(finding) for finding in GPU.findings]
        GPU.launches.clear()
    item.conformance["seconds"] = round(item.conformance["seconds"] + time.time(), 1)
    asked, ran = sorted(LAUNCHES.asked), sorted(LAUNCHES.ran)
    prove(item)
    tell(event="end", test=item.nodeid, asked=asked, ran=ran, **item.conformance)
    return result


ASKED = set(ORDER.proofs)  # kernels that the prover was asked about


def prove(item: Any) -> None:
    """Prove the kernels that a test was the first to launch."""
    for launch in item.launches:
        kernel = LAUNCHES.name(launch.kernel)
        if kernel is not None and kernel not in ASKED:
            from .proven import proof_of

            ASKED.add(kernel)
            tell(event="proving", kernel=kernel)
            tell(event="proof", kernel=kernel, **proof_of(ORDER.project, kernel, launch, item.nodeid))


def emulated(finding: Any) -> dict[str, Any]:
    """Return a finding of the emulated GPU as an event."""
    place = finding.by.place
    return {
        "kind": finding.kind,
        "kernel": finding.kernel,
        "file": place.file,
        "line": place.line,
        "text": str(finding),
        "mended": finding.is_mended,
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if report.outcome != "passed" and item.conformance["outcome"] == "passed":
        error = call.excinfo.value
        item.conformance["outcome"] = report.outcome
        wrong = _compared(error)
        if report.outcome == "failed" and not wrong:
            item.conformance["outcome"] = "error"
        item.conformance["reason"] = _short(error)
    return report


def _compared(error: BaseException) -> bool:
    """Return whether the error is a failed comparison, not a project's check of its arguments."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(frame.filename)
    own = any(file.is_relative_to(root) for root in ORDER.roots) and not file.name.startswith("test_")
    comparing = re.search("assert|check|close", frame.name) is not None
    return (isinstance(error, AssertionError) and not own) or comparing


def _short(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[-1:] if "Error" in lines[-1] else lines[:3])
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    location = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return f"{type(error).__name__}: {text[:300]}{location}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Run a test: with the sanitizer, in a scope that collects findings; for proofs, in one that records launches."""
    with ExitStack() as stack:
        if ORDER.prove:
            from triton_loom.prove.recording import recorded

            item.launches = stack.enter_context(recorded())
        if not ORDER.sanitize:
            return (yield)
        import triton_loom

        seen = stack.enter_context(triton_loom.sanitize(collect=True))
        try:
            return (yield)
        finally:
            for finding in seen.findings:
                item.conformance["findings"].append(
                    {
                        "kind": finding.kind,
                        "kernel": finding.kernel,
                        "file": finding.file,
                        "line": finding.line,
                        "text": str(finding),
                    }
                )
