"""Loom's layers: which module may import which, how long a file may be, and that public names are documented.

Every import counts, also inside a function or for annotations only: both can create a cycle.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import triton_loom
from triton_loom import testing

ROOT = Path(triton_loom.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
HEADERS = sorted(path.relative_to(ROOT) for path in (ROOT / "include").rglob("*.*") if path.is_file())
LONGEST = 600

# From the bottom to the top: a package, or a file of its own, imports only from the rows below.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "features", "options", "libdevice", "tables"),
    ("ir",),
    (
        "codegen",
        "device",
    ),  # independent of each other: a kernel is text to the one, a shared object to the other
    ("witness", "explained"),
    ("driver",),
    ("ptx",),
    ("emulator",),
    ("__init__",),  # what users import
    ("compiler", "testing", "pytest_plugin", "report"),
    ("prove",),
    ("__main__",),
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    """Return the module name: `ir/ttir.py` is "ir/ttir", and a package is its `__init__`."""
    return path.with_suffix("").as_posix()


def layer_of(module: str) -> str:
    return module.split("/")[0]


MODULES = {module_of(path) for path in FILES}


def imports_in(source: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that a file imports from Loom."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            dotted = node.module or ""
            if node.level:
                base = path.parents[node.level - 1]
            elif dotted.split(".")[0] == "triton_loom":
                base, dotted = Path("."), dotted.removeprefix("triton_loom").removeprefix(".")
            else:
                continue
            target = base / dotted.replace(".", "/")
            for alias in node.names:
                candidates = [
                    target / alias.name,
                    target / alias.name / "__init__",
                    target,
                    target / "__init__",
                ]
                yield next(name for c in candidates if (name := c.as_posix()) in MODULES), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "triton_loom":
                    yield (
                        alias.name.removeprefix("triton_loom").removeprefix(".").replace(".", "/")
                        or "__init__",
                        "",
                    )


def imports(path: Path) -> list[tuple[str, str]]:
    return list(imports_in((ROOT / path).read_text(), path))


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_imports_have_no_cycle() -> None:
    graph = {module_of(path): {module for module, _ in imports(path)} for path in FILES}
    assert sum(map(len, graph.values())) > 100  # imports are detected
    assert find_cycle(graph) is None


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(module_of(path))
    for module, name in imports(path):
        other = layer_of(module)
        assert other == own or HEIGHT[other] < HEIGHT[own], f"{path} imports {name or module} from {other}"


def test_no_private_name_crosses_a_file() -> None:
    crossing = [
        f"{path}: {name} of {module}"
        for path in FILES
        for module, name in imports(path)
        if name.startswith("_") and not name.startswith("__")
    ]
    assert not crossing


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_private_attribute_of_another_module(path: Path) -> None:
    """Check modules that are imported as such (`from . import abi`)."""
    modules = {name for module, name in imports(path) if name == module.split("/")[-1]}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert not node.attr.startswith("_"), f"{path}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", [*FILES, *HEADERS], ids=str)
def test_files_are_short(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= LONGEST


# ---- public names are documented -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=str)
def test_modules_classes_and_functions_have_a_docstring(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert ast.get_docstring(tree), "the module"
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    public = [node for node in defined if not node.name.startswith("_")]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def members(owner: Any) -> Iterator[str]:
    """Yield the names of the methods and properties that a class defines itself."""
    for name, value in vars(owner).items():
        if not name.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property | classmethod)
        ):
            yield name


def public_classes() -> list[Any]:
    """Return the classes that users get: the exported ones, and those of returned objects."""
    exported = [getattr(package, name) for package in (triton_loom, testing) for name in package.__all__]
    counters, sanitizer, verdicts = (
        importlib.import_module(f"triton_loom.witness.{name}")
        for name in ("counters", "sanitizer", "verdicts")
    )
    returned = [
        counters.Counter,
        counters.LaunchCount,
        counters.ArgumentCount,
        counters.Traffic,
        sanitizer.Sanitizer,
        verdicts.Verdict,
    ]
    return [*(value for value in exported if inspect.isclass(value)), *returned]


@pytest.mark.parametrize("owner", public_classes(), ids=lambda owner: owner.__name__)
def test_methods_that_users_call_have_a_docstring(owner: Any) -> None:
    assert [name for name in members(owner) if not inspect.getdoc(getattr(owner, name))] == []


# ---- the helpers of these tests ---------------------------------------------------------------------------------


def test_all_kinds_of_imports_are_detected() -> None:
    source = """
from . import frame
from .forms import Form
from ..ir.ttir import Op, Value
import triton_loom.driver

if TYPE_CHECKING:
    from ..device import toolchain

def late():
    from triton_loom import count
    from triton_loom.witness import scopes
"""
    assert set(imports_in(source, Path("codegen/nest.py"))) == {
        ("codegen/frame", "frame"),
        ("codegen/forms", "Form"),
        ("ir/ttir", "Op"),
        ("ir/ttir", "Value"),
        ("driver", ""),
        ("device/toolchain", "toolchain"),
        ("__init__", "count"),
        ("witness/scopes", "scopes"),
    }


def test_a_cycle_is_found() -> None:
    cycle = find_cycle({"nest": {"frame"}, "frame": {"accesses"}, "accesses": {"nest"}, "emit": {"nest"}})
    assert cycle is not None
    assert set(cycle) == {"nest", "frame", "accesses"}
