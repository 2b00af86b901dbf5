"""First five minutes with a framework, following `docs/integrations.md`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/integrations.md"


def section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def run_script(title: str, prelude: str = "") -> str:
    """Run the Python script of a section with the variables set before it, and return its output. The prelude is what
    the framework needs on a machine without GPUs."""
    script = re.search(r"^((?:\w+=\w+ )*)python - <<'PYTHON'\n(.*?)^PYTHON$", section(title), re.M | re.S)
    assert script, f"no script in the section {title!r}"
    variables = dict(pair.split("=") for pair in script[1].split())
    done = subprocess.run(
        [sys.executable, "-c", prelude + script[2]],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        cwd=PAGE.parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
