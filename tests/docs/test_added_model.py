"""Follow "Add a model": write its files next to each other and run the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ADDING, blocks, run_text


@pytest.mark.slow
def test_the_model_of_the_page_is_fused_calibrated_and_captured(tmp_path: Path) -> None:
    *modules, script = blocks(ADDING, "python")
    for block in modules:
        name = block.text.partition("\n")[0].removeprefix("# ")
        assert name.endswith(".py"), f"{block}: the first line names the file"
        (tmp_path / name).write_text(block.text)
    printed = run_text(script.text, tmp_path, None)
    promised = blocks(ADDING, "text")[0].text.splitlines()
    for line in promised:
        if line != "...":
            assert line in printed, f"promised {line!r}, printed was\n{printed}"
