"""`python -m triton_loom report script.py [arguments]`."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m triton_loom")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="run a script under the sanitizer and the counters")
    report.add_argument("script")
    report.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args()
    try:
        import rich  # noqa: F401
    except ImportError:
        parser.error("the report is a table of rich: pip install 'triton-loom[report]'")
    from .report import report as run

    return 1 if run(given.script, given.arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
