"""`weft aot`: compile kernels ahead of time into a bundle, and inspect bundles."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import aot
from ..runtime import GPUS
from ..runtime.bundle import Bundle, BundleError
from .arguments import add_op, add_workers, add_workload, output_file
from .figures import Figures
from .needs import require, require_cache
from .screen import Refused, Steps, complain


def add_command(commands: Any) -> None:
    parser = commands.add_parser("aot", help="compile kernels ahead of time into a bundle; no GPU is needed")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="compile the kernels that workloads launch on a target")
    build.add_argument("--target", required=True, choices=("cpu", *GPUS))
    add_workload(build, "only workloads whose name contains this: deepseek-v3; may be repeated")
    add_op(build)
    add_workers(build, "compilers")
    build.add_argument("--out", type=output_file, required=True, metavar="FILE")
    build.set_defaults(run=run_build)
    inspect = actions.add_parser("inspect", help="list the kernels of a bundle")
    inspect.add_argument("file", type=Path)
    inspect.set_defaults(run=run_inspect)


def run_build(args: argparse.Namespace) -> int:
    if args.target == "cpu":
        require("weft aot build --target cpu")
    require_cache()
    # The one library command that needs the laboratory, which knows the calls of a model.
    from ..lab.commands.ahead import calls_of, compile_in_children
    from ..lab.commands.chosen import workloads_named

    chosen = workloads_named(args.workload, args.op)
    variants = aot.variants_of(calls_of(chosen, args.target), args.target)
    if not variants:
        raise Refused(f"these workloads launch nothing on {args.target}")
    with Steps(len(variants), "compiling") as steps:
        if args.target == "cpu":
            bundle = aot.build(args.out, args.target, variants, progress=steps.reach)
        else:
            compile_in_children(variants, args.target, workers=args.workers, progress=steps.reach)
            bundle = aot.build(args.out, args.target, variants)
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
    kernels = Counter(entry["kernel"] for entry in manifest["kernels"].values())
    figures = Figures(
        [["kernel", "variants"], *([kernel, str(count)] for kernel, count in kernels.most_common())],
        title=f"{bundle.path}: {bundle.path.stat().st_size / 1e6:.1f} MB for {manifest['target']}",
        caption=f"Weft {manifest['weft']}, Triton {manifest['triton']}, {len(manifest['kernels'])} variants",
    )
    Console().print(figures)
