"""The workloads that a person names. Unknown names are refused with the nearest known one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...cli.names import made_of, nearest, public_ops, wrapped
from ...cli.screen import Refused
from ...runtime import catalogue
from ..families import WORKLOADS, Workload, for_op

INSTEAD = "all whose name has this in it, instead of one for each op; may be repeated"  # help, for `one_each`


def workloads_named(texts: Sequence[str], ops: Sequence[str] = ()) -> list[Workload]:
    """Return the workloads of these ops, or of all, that one of the texts selects; all of them if there is no text.

    A text selects the workload whose whole name it is, else those that have it in their name, else, if it is a public
    function, those of its ops. A text that selects nothing is refused."""
    among = [workload for workload in WORKLOADS if not ops or workload.op in ops]
    if not texts:
        return among
    chosen: set[str] = set()
    for text in texts:
        found = [str(workload) for workload in among if text == str(workload)]
        found = found or [str(workload) for workload in among if text in str(workload)]
        if not found and text in public_ops():
            found = [str(workload) for workload in among if workload.op in made_of(text)]
        if not found:
            raise _no_workload(text, among, ops)
        chosen.update(found)
    return [workload for workload in among if str(workload) in chosen]


def _no_workload(text: str, among: Sequence[Workload], ops: Sequence[str]) -> Refused:
    parts = {part: None for w in among for part in (*str(w).split(":"), *w.name.split("/"))}
    models = dict.fromkeys(workload.name.partition("/")[0] for workload in among)
    names = f". A name is op:model/place:options:rows, as {among[0]}; models are {', '.join(models)}"
    of = f" of {', '.join(ops)}" if ops else ""
    return Refused(wrapped(f"no workload{of} has {text!r} in its name{nearest(text, parts) or names}"))


def one_each(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads that `--workload` selects, or without it the first one of each op."""
    if args.workload:
        return workloads_named(args.workload, args.op)
    return [for_op(op)[0] for op in args.op or catalogue]
