"""The documentation of proofs shows what really happens."""

from __future__ import annotations

import re
from pathlib import Path

from processes import run_python

DOCUMENT = (Path(__file__).parents[2] / "docs" / "prove.md").read_text()


def test_the_example_prints_the_documented_output(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    printed = re.findall(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)[0]
    script = tmp_path / "script.py"
    script.write_text(code)
    run = run_python(script)
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


def test_a_script_is_proven_for_other_sizes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    kernel = code[: code.index("n = symbol")]
    script = tmp_path / "script.py"
    launch = (
        "import torch\nx = torch.zeros(1000)\ny = torch.zeros(1000)\ndouble[(4,)](x, y, 1000, BLOCK=256)\n"
    )
    script.write_text(kernel + launch)
    run = run_python("-m", "triton_loom", "prove", script)
    assert run.returncode == 1, run.stderr
    assert (
        "double, as if launched with\n  sizes: 1 <= n <= 2147483647\n  grid: ((n + 256 - 1)/256, 1, 1)"
        in run.stdout
    )
    assert "it breaks from n = 1 on" in run.stdout

    script.write_text(kernel.replace("<= n", "< n") + launch)
    run = run_python("-m", "triton_loom", "prove", script)
    assert run.returncode == 0, run.stdout
    assert "double: proven" in run.stdout
