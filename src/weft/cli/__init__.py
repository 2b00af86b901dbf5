"""What a person types: `weft doctor`, or `python -m weft doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parser().parse_args(argv)
    return int(args.run(args))


def parser() -> argparse.ArgumentParser:
    """That of all commands."""
    from . import aot, audit, bench, doctor, evidence, prove, published, traffic, tune, verify

    made = argparse.ArgumentParser(
        prog="weft", description="Fused Triton kernels, proven before they meet a GPU."
    )
    made.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor.add_command(commands)
    verify.add_command(commands)
    prove.add_command(commands)
    bench.add_command(commands)
    audit.add_command(commands)
    tune.add_command(commands)
    aot.add_command(commands)
    traffic.add_command(commands)
    published.add_command(commands)
    evidence.add_command(commands)
    return made
