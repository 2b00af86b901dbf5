"""Command line: `weft doctor`, or `python -m weft doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..runtime import catalogue
from .interrupt import EXIT_CODE, promptly
from .names import public_ops
from .screen import Refused, complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 if it was refused, 130 if it was interrupted."""
    with promptly() as interrupt:
        try:
            words = sys.argv[1:] if argv is None else argv
            args, rest = parser(words[0] if words else None).parse_known_args(words)
            if rest:
                raise _unrecognized(rest, takes_op="op" in args)
            return int(args.run(args))
        except Refused as error:
            complain(str(error))
            return 2
        except KeyboardInterrupt:
            interrupt.report()
            return EXIT_CODE


def _unrecognized(rest: Sequence[str], takes_op: bool) -> Refused:
    """Return the refusal of arguments that a command does not know, with a hint for an op named without its option."""
    known = {*public_ops(), *catalogue}
    hint = f": select an op with `--op {rest[0]}`" if takes_op and rest[0] in known else ""
    return Refused(f"unrecognized arguments: {' '.join(rest)}{hint}")


# The library's own commands are in this package, the laboratory's in `weft.lab`. A command is loaded only when chosen:
# `weft doctor` does not load the code that inspects binaries.
COMMANDS = {
    "doctor": "weft.cli.doctor",
    "verify": "weft.lab.commands.verify",
    "prove": "weft.lab.commands.prove",
    "bench": "weft.lab.bench",
    "audit": "weft.lab.commands.audit",
    "tune": "weft.lab.commands.tune",
    "aot": "weft.cli.aot",
    "report": "weft.lab.commands.report",
}


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of one command, or of all if the chosen one is not known."""
    result = argparse.ArgumentParser(
        prog="weft", description="Fused Triton kernels, proven before they meet a GPU."
    )
    result.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in [chosen] if chosen in COMMANDS else COMMANDS:
        import_module(COMMANDS[name]).add_command(commands)
    return result
