"""`python -m triton_loom report [--device cpu] script.py [arguments]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m triton_loom")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="run a script under the sanitizer and the counters")
    report.add_argument(
        "--device", choices=["cpu"], help="put the tensors that the script puts on a GPU on the CPU instead"
    )
    report.add_argument("script")
    report.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args()
    if not Path(given.script).is_file():
        parser.error(f"there is no file {given.script}")
    from .report import run

    return run(given.script, given.arguments, given.device)


if __name__ == "__main__":
    sys.exit(main())
