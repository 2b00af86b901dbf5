"""What the README says is so: its table is the code's, its examples run, what it lists has its code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_loom.codegen import operations
from triton_loom.codegen.tiles import FunctionEmitter
from triton_loom.ir.undefined import UNDEFINED

README = Path(__file__).parent.parent / "README.md"


def section(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README.read_text(), re.DOTALL)
    assert match, f"README has no section between <!-- {name} --> markers"
    return match[1].strip()


def test_the_operation_table_is_the_codes_own() -> None:
    assert section("operations") == operations.support_table()


def test_every_listed_operation_has_a_handler_and_the_other_way_round() -> None:
    listed = {*operations.ROOTS, *operations.EFFECTS, *operations.CONTROL} - {"scf.yield", "scf.condition"}
    handlers = {name.removeprefix("on_") for name in dir(FunctionEmitter) if name.startswith("on_")}
    assert {re.sub(r"\W", "_", name) for name in listed} <= handlers
    own = ("tt.map_elementwise.return", UNDEFINED)  # not of a kernel's text
    known = {re.sub(r"\W", "_", name) for name in (*listed, *operations.SHAPES, *own)}
    assert handlers <= known


def test_no_operation_is_listed_twice() -> None:
    tables = (
        operations.ELEMENTWISE,
        operations.SHAPES,
        operations.ROOTS,
        operations.EFFECTS,
        operations.CONTROL,
        operations.IGNORED,
    )
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


@pytest.mark.compat
def test_the_first_python_block_of_the_readme_runs(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block
    script = tmp_path / "readme.py"
    script.write_text(block[1])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor(2000.)\n")
    assert "LOOM_KERNEL(double" in done.stdout
