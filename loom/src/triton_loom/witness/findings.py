"""What a finding says: a record of witness.h, in the words of the kernel and of its arguments."""

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
from .watched import Broken, PointerArgument, Seen, Watched


def findings_of(watched: Watched, broken: Iterable[Broken], launch: int) -> list[Finding]:
    """The findings of a launch that is over, those of one kind at one line and argument taken together."""
    merged: dict[Any, Finding] = {}
    for finding in (*_promises(watched, broken, launch), *_accesses(watched, launch)):
        key = (finding.kind, finding.file, finding.line, finding.argument)
        first = merged.get(key, finding)
        merged[key] = first if first is finding else replace(first, count=first.count + finding.count)
    return list(merged.values())


def _promises(watched: Watched, broken: Iterable[Broken], launch: int) -> Iterator[Finding]:
    for promise in broken:
        file, line = _place(promise.location or watched.kernel.location)
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
    for seen in watched.seen():
        file, line = _place(seen.site["location"])
        detail = detail_of(seen)
        if seen.site["called"] != seen.site["location"]:
            detail = f"{detail}; called at {seen.site['called']}"
        yield Finding(
            kind=seen.kind,
            kernel=watched.kernel.name,
            file=file,
            line=line,
            program=seen.program,
            argument=seen.argument.name if seen.argument else None,
            index=seen.argument.index(seen.record.address) if seen.argument else None,
            launch=launch,
            launched_from=caller(),
            count=seen.record.count,
            detail=detail,
            reason=reason_for(seen),
        )


def _place(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return file, int(line or 0)


def detail_of(seen: Seen) -> str:
    """What happened, in a sentence."""
    value = seen.record.value
    if seen.kind == "offset overflow" and seen.site["what"] == "loop":
        return (
            f"the loop's counter would be {value} after this step, which an int32 can't hold: it would wrap around and "
            "the loop go on"
        )
    if seen.kind == "offset overflow":
        integer = seen.site["integer"]
        return f"the exact result is {value}, which {'an' if integer[0] == 'i' else 'a'} {integer} can't hold"
    if seen.kind == "broken promise":
        return f"the value {value} is not what tl.multiple_of, max_contiguous or max_constancy says"
    if seen.kind == "undefined value":
        return _undefined(seen)
    if seen.argument is None:
        return f"address {seen.record.address:#x} is in none of the tensor arguments"
    element = _element(seen.argument, seen.record.address)
    if seen.kind == "race":
        return _race(seen, element)
    if seen.kind == "uninitialised read":
        return f"nobody has written {element} since it was allocated"
    return f"there is no {element}"


def _element(argument: PointerArgument, address: int) -> str:
    index = argument.index(address)
    if index is not None:
        return f"element {index} of {argument.describe()}"
    offset = argument.distance(address) / argument.tensor.element_size()
    return f"element {offset:g} places from the first one of {argument.describe()}"


def _undefined(seen: Seen) -> str:
    file = seen.site["location"].rpartition(":")[0]
    loads = [
        load.rpartition(":")[2] if load.rpartition(":")[0] == file else load for load in seen.site["loads"]
    ]
    lines = f"line{'s' if len(loads) > 1 else ''} {', '.join(loads)}"
    return f"{seen.site['use']} what the load at {lines} leaves undefined: its mask is off there and it has no `other`"


def _race(seen: Seen, element: str) -> str:
    did = {"load": "reads", "store": "writes", "atomic": "atomically updates"}[seen.site["what"]]
    done = "written" if did == "reads" else "touched"
    other = seen.record.other
    who = f"program {seen.watched.program(other)} has" if other >= 0 else "several programs have"
    scope = ' with scope="cta", which is one program' if seen.site["scope"] == "cta" else ""
    return f"{did} {element}{scope}, which {who} {done}; nothing orders the two"


def caller() -> str:
    """ "file:line" of the innermost frame that is neither Triton's nor Loom's."""
    own = tuple(
        f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(triton.__file__).parent)
    )
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(own) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
