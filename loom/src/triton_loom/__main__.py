"""`python -m triton_loom report|prove [--device cpu] script.py [arguments]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m triton_loom")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in {
        "report": "run a script under the sanitizer and the counters",
        "prove": "run a script, and prove its kernels for other sizes",
    }.items():
        command = commands.add_parser(name, help=does)
        command.add_argument(
            "--device",
            choices=["cpu"],
            help="put the tensors that the script puts on a GPU on the CPU instead",
        )
        command.add_argument("script")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args()
    if not Path(given.script).is_file():
        parser.error(f"there is no file {given.script}")
    if given.command == "prove":
        from .prove.command import run
    else:
        from .report import run

    return run(given.script, given.arguments, given.device)


if __name__ == "__main__":
    sys.exit(main())
