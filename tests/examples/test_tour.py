"""Execute the cells of examples/tour.ipynb in order, as Jupyter would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_loom.testing import Forks

from tests.support import IMPORTED

NOTEBOOK = Path(__file__).parents[2] / "examples/tour.ipynb"


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    script = tmp_path / "tour.py"
    script.write_text(
        "\n".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    )
    with Forks(*IMPORTED) as forks:
        done = forks.run(str(script))
    assert done.returncode == 0, done.stderr
    assert "out-of-bounds store" in done.stdout


def test_the_tour_has_no_outputs() -> None:
    """Outputs in the repository would be of an older version."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
