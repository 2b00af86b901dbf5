"""`python -m triton_loom report|prove [--device cpu] script.py [arguments]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m triton_loom")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in {
        "report": "run a script under the sanitizer and the counters",
        "prove": "run a script and prove its kernels for other sizes",
    }.items():
        command = commands.add_parser(name, help=summary)
        command.add_argument(
            "--device",
            choices=["cpu"],
            help="put tensors on the CPU where the script puts them on a GPU",
        )
        command.add_argument("script")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    if options.command == "prove":
        from .prove.command import run
    else:
        from .report import run

    return run(options.script, options.arguments, options.device)


if __name__ == "__main__":
    sys.exit(main())
