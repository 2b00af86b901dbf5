"""`weft aot`: kernels compiled ahead of time into a file, and what such a file holds."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import aot
from ..runtime import TARGETS
from ..runtime.bundle import Bundle, BundleError
from ..workloads import WORKLOADS
from .screen import complain, no_such_op, plain_table, progress_bar


def add_command(commands: Any) -> None:
    parser = commands.add_parser("aot", help="compile kernels ahead of time into a bundle; no GPU is needed")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="compile what workloads launch on a target")
    build.add_argument("--target", required=True, choices=("cpu", *TARGETS))
    build.add_argument("--workload", default="", help="only workloads whose name has this in it: deepseek-v3")
    build.add_argument(
        "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated"
    )
    build.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="compilers at once (%(default)s)"
    )
    build.add_argument("--out", type=Path, required=True, metavar="FILE")
    build.set_defaults(run=run_build)
    inspect = actions.add_parser("inspect", help="what a bundle holds")
    inspect.add_argument("file", type=Path)
    inspect.set_defaults(run=run_inspect)


def run_build(args: argparse.Namespace) -> int:
    if problem := no_such_op(args.op):
        complain(problem)
        return 2
    chosen = [w for w in WORKLOADS if (not args.op or w.op in args.op) and args.workload in str(w)]
    if not chosen:
        complain("no workload has that name; `weft traffic` lists all of them")
        return 2
    variants = aot.variants_of(aot.calls_of(chosen, args.target), args.target)
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(variants))
        bundle = aot.build(
            args.out,
            args.target,
            variants,
            workers=args.workers,
            progress=lambda done, total: bar.update(task, completed=done),
        )
    show(bundle)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    try:
        show(Bundle.open(args.file))
    except BundleError as error:
        complain(str(error))
        return 1
    return 0


def show(bundle: Bundle) -> None:
    manifest = bundle.manifest
    table = plain_table(f"{bundle.path}: {bundle.path.stat().st_size / 1e6:.1f} MB for {manifest['target']}")
    table.add_column("kernel")
    table.add_column("variants", justify="right")
    for kernel, count in Counter(entry["kernel"] for entry in manifest["kernels"].values()).most_common():
        table.add_row(kernel, str(count))
    table.caption = (
        f"Weft {manifest['weft']}, Triton {manifest['triton']}, {len(manifest['kernels'])} variants"
    )
    Console().print(table)
