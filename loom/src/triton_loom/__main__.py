"""`python -m triton_loom report script.py [arguments]`."""

from __future__ import annotations

import argparse
import runpy
import sys

from . import count, sanitize


def main() -> int:
    """The command line; its exit code."""
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
    return 1 if run(given.script, given.arguments) else 0


def run(script: str, args: list[str]) -> int:
    """Runs the script as if by itself and reports; the number of findings."""
    from .witness.report import report

    sys.argv = [script, *args]
    with sanitize(collect=True) as seen, count() as counted:
        runpy.run_path(script, run_name="__main__")
    report(counted, seen)
    return len(seen.findings)


if __name__ == "__main__":
    sys.exit(main())
