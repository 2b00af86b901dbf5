"""Check the README and the reference page against the code: the table of operations, and the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run_python
from triton_loom.codegen import operations
from triton_loom.codegen.tiles import FunctionEmitter
from triton_loom.ir.undefined import UNDEFINED

LOOM = Path(__file__).parent.parent
README, REFERENCE = LOOM / "README.md", LOOM / "docs" / "reference.md"


def section(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", REFERENCE.read_text(), re.DOTALL)
    assert match, f"{REFERENCE} has no section between <!-- {name} --> markers"
    return match[1].strip()


def test_the_operation_table_matches_the_code() -> None:
    assert section("operations") == operations.support_table()


def test_every_listed_operation_has_a_handler_and_vice_versa() -> None:
    listed = {*operations.ROOTS, *operations.EFFECTS, *operations.CONTROL} - {"scf.yield", "scf.condition"}
    handlers = {name.removeprefix("on_") for name in dir(FunctionEmitter) if name.startswith("on_")}
    assert {re.sub(r"\W", "_", name) for name in listed} <= handlers
    own = ("tt.map_elementwise.return", UNDEFINED)  # not of a kernel's text
    listed_names = {re.sub(r"\W", "_", name) for name in (*listed, *operations.SHAPES, *own)}
    assert handlers <= listed_names


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


def output_of_first_block(page: Path, directory: Path) -> str:
    """Run the first Python block of a page as a script and return what it prints."""
    block = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert block
    script = directory / "script.py"
    script.write_text(block[1])
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(script), "script.py")


def test_the_readmes_example_prints_what_it_says(tmp_path: Path) -> None:
    printed = output_of_first_block(README, tmp_path)
    shown = re.search(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown
    assert printed.split() == shown[1].split()


@pytest.mark.compat
def test_the_references_example_prints_its_cpp(tmp_path: Path) -> None:
    printed = output_of_first_block(REFERENCE, tmp_path)
    assert printed.startswith("tensor(2000.)\n")
    assert "LOOM_KERNEL(double" in printed
