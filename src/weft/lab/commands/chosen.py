"""Select the workloads that a person names. Unknown names are refused with the nearest known one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...cli.names import made_of, nearest, public_ops, wrapped
from ...cli.screen import Refused
from ..families import OPS, WORKLOADS, Workload, for_op

# Help of `--workload` where `one_each` selects.
INSTEAD = "all workloads with this in their name, instead of one per op; may be repeated"


def workloads_named(texts: Sequence[str], ops: Sequence[str] = ()) -> list[Workload]:
    """Return the workloads of these ops (default: all ops) that any of the texts selects, or all if there is none.

    A text selects the workload whose full name it is, else those that have it in their name, else, if it is a public
    function, those of its ops. A text that selects nothing is refused."""
    candidates = [workload for workload in WORKLOADS if not ops or workload.op in ops]
    if not texts:
        return candidates
    chosen: set[str] = set()
    for text in texts:
        matches = [str(workload) for workload in candidates if text == str(workload)]
        matches = matches or [str(workload) for workload in candidates if text in str(workload)]
        if not matches and text in public_ops():
            matches = [str(workload) for workload in candidates if workload.op in made_of(text)]
        if not matches:
            raise _no_workload(text, candidates, ops)
        chosen.update(matches)
    return [workload for workload in candidates if str(workload) in chosen]


def _no_workload(text: str, candidates: Sequence[Workload], ops: Sequence[str]) -> Refused:
    parts = {part: None for w in candidates for part in (*str(w).split(":"), *w.name.split("/"))}
    models = dict.fromkeys(workload.name.partition("/")[0] for workload in candidates)
    names = f". A name is op:model/place:options:rows, as {candidates[0]}; models are {', '.join(models)}"
    of = f" of {', '.join(ops)}" if ops else ""
    return Refused(wrapped(f"no workload{of} has {text!r} in its name{nearest(text, parts) or names}"))


def one_each(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads that `--workload` selects, or by default the first one of each op."""
    if args.workload:
        return workloads_named(args.workload, args.op)
    return [for_op(op)[0] for op in args.op or OPS]
