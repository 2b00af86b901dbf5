"""What a person types: `weft doctor`, or `python -m weft doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import __version__
from ..runtime import catalogue
from .interrupt import EXIT_CODE, promptly
from .names import public_ops
from .screen import Refused, complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 if it was refused, 130 if it was interrupted."""
    with promptly() as interrupt:
        try:
            args, rest = parser().parse_known_args(argv)
            if rest:
                raise _unrecognized(rest, takes_op="op" in args)
            return int(args.run(args))
        except Refused as error:
            complain(str(error))
            return 2
        except KeyboardInterrupt:
            interrupt.tell()
            return EXIT_CODE


def _unrecognized(rest: Sequence[str], takes_op: bool) -> Refused:
    """Return the refusal of arguments that a command does not know; the name of an op without its option is easy to
    recognize."""
    known = {*public_ops(), *catalogue}
    hint = f": ops are named by `--op {rest[0]}`" if takes_op and rest[0] in known else ""
    return Refused(f"unrecognized arguments: {' '.join(rest)}{hint}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
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
