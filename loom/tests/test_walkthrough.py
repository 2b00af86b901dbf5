"""Run the scripts of docs/walkthrough.md and compare what they print with the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run_python

PAGE = Path(__file__).parent.parent / "docs/walkthrough.md"
STEPS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("script", "shown"), STEPS, ids=["sanitized", "refuted", "proven"])
def test_a_step_prints_what_the_page_shows(script: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    done = run_python(file)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.replace(f"{tmp_path}/", "").split())
    for part in shown.split("\n\n"):
        assert " ".join(part.split()) in printed
