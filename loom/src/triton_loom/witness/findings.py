"""Findings in words: records of witness.h in terms of the kernel and its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from ..errors import Finding
from .reasons import reason_for
from .watched import BrokenPromise, PointerArgument, Violation, Watched


def findings_of(watched: Watched, broken_promises: Iterable[BrokenPromise], launch: int) -> list[Finding]:
    """Return the findings of a finished launch, merging those of one kind at one line and argument."""
    merged: dict[Any, Finding] = {}
    for finding in (*_promises(watched, broken_promises, launch), *_accesses(watched, launch)):
        key = (finding.kind, finding.file, finding.line, finding.argument)
        first = merged.get(key, finding)
        merged[key] = first if first is finding else replace(first, count=first.count + finding.count)
    return list(merged.values())


def _promises(watched: Watched, broken_promises: Iterable[BrokenPromise], launch: int) -> Iterator[Finding]:
    for promise in broken_promises:
        file, line = _split_location(promise.location or watched.kernel.location)
        yield Finding(
            kind="broken promise",
            kernel=watched.kernel.name,
            file=file,
            line=line,
            program=promise.program,
            argument=promise.argument,
            launch=launch,
            launched_from=caller(),
            detail=promise.detail,
        )


def _accesses(watched: Watched, launch: int) -> Iterator[Finding]:
    for violation in watched.violations():
        file, line = _split_location(violation.site["location"])
        detail = detail_of(violation)
        if violation.site["called"] != violation.site["location"]:
            detail = f"{detail}; called at {violation.site['called']}"
        yield Finding(
            kind=violation.kind,
            kernel=watched.kernel.name,
            file=file,
            line=line,
            program=violation.program,
            argument=violation.argument.name if violation.argument else None,
            index=violation.argument.index(violation.record.address) if violation.argument else None,
            launch=launch,
            launched_from=caller(),
            count=violation.record.count,
            detail=detail,
            reason=reason_for(violation),
        )


def _split_location(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return file, int(line or 0)


def detail_of(violation: Violation) -> str:
    """Describe what happened, in a sentence."""
    value = violation.record.value
    if violation.kind == "offset overflow" and violation.site["what"] == "loop":
        return (
            f"the loop's counter would be {value} after this step, which an int32 can't hold: it would wrap around and "
            "the loop would not end"
        )
    if violation.kind == "offset overflow":
        integer = violation.site["integer"]
        return f"the exact result is {value}, which {'an' if integer[0] == 'i' else 'a'} {integer} can't hold"
    if violation.kind == "broken promise":
        return f"the value {value} is not what tl.multiple_of, max_contiguous or max_constancy says"
    if violation.kind == "undefined value":
        return _undefined(violation)
    if violation.argument is None:
        return f"address {violation.record.address:#x} is in none of the tensor arguments"
    element = _element(violation.argument, violation.record.address)
    if violation.kind == "race":
        return _race(violation, element)
    if violation.kind == "uninitialized read":
        return f"nobody has written {element} since it was allocated"
    return f"there is no {element}"


def _element(argument: PointerArgument, address: int) -> str:
    index = argument.index(address)
    if index is not None:
        return f"element {index} of {argument.describe()}"
    offset = argument.distance(address) / argument.tensor.element_size()
    return f"element {offset:g} places from the first one of {argument.describe()}"


def _undefined(violation: Violation) -> str:
    file = violation.site["location"].rpartition(":")[0]
    loads = [
        load.rpartition(":")[2] if load.rpartition(":")[0] == file else load
        for load in violation.site["loads"]
    ]
    lines = f"line{'s' if len(loads) > 1 else ''} {', '.join(loads)}"
    return (
        f"{violation.site['use']} what the load at {lines} leaves undefined: "
        "its mask is off there and it has no `other`"
    )


def _race(violation: Violation, element: str) -> str:
    action = {"load": "reads", "store": "writes", "atomic": "atomically updates"}[violation.site["what"]]
    participle = "written" if action == "reads" else "touched"
    other = violation.record.other
    culprit = f"program {violation.watched.program(other)} has" if other >= 0 else "several programs have"
    scope = ' with scope="cta", which is one program' if violation.site["scope"] == "cta" else ""
    return f"{action} {element}{scope}, which {culprit} {participle}; nothing orders the two"


def caller() -> str:
    """Return "file:line" of the innermost frame outside of Triton and Loom."""
    own = tuple(
        f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(triton.__file__).parent)
    )
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(own) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
