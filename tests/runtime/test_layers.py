"""Imports point one way: down the list of layers, and in no circle, imports inside of functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import triton_loom

import weft

# From the bottom to the top. A module belongs to the longest name that it begins with; "weft" is the package itself.
LAYERS = (
    "weft.language",
    "weft.runtime",
    "weft.tiles",
    "weft.quant",
    "weft.ops",
    "weft.interop",
    "weft.graphs",
    "weft.report",
    "weft",
    "weft.nn",
    "weft.integrations",
    "weft.aot",
    "weft.cli",
    "weft.lab",
    "weft.__main__",
)
# `weft aot build` asks the laboratory which calls the workloads make.
ALLOWED = {("weft.cli.aot", "weft.lab")}

PACKAGES = {package.__name__: Path(package.__file__ or "").parent for package in (weft, triton_loom)}


def modules(package: str) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    root = PACKAGES[package].parent
    files = {file: file.relative_to(root).with_suffix("").parts for file in PACKAGES[package].rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): file for file, parts in files.items()}


def imported(module: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a module imports when it runs; imports for type checkers are left out."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    unread = [ast.parse(file.read_text())]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            unread += node.orelse
            continue
        unread += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [name for name in (f"{base}.{alias.name}", base) if name in known][:1]


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")), key=len)


def test_every_module_imports_from_its_layer_or_below() -> None:
    known = modules("weft")
    upward = [
        f"{module} imports {name}"
        for module, file in known.items()
        for name in imported(module, file, known)
        if LAYERS.index(layer_of(name)) > LAYERS.index(layer_of(module))
        and (module, layer_of(name)) not in ALLOWED
    ]
    assert not upward


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_in_a_circle(package: str) -> None:
    known = modules(package)
    graph = {module: set(imported(module, file, known)) - {module} for module, file in known.items()}
    for module, layer in ALLOWED:
        graph[module] = {name for name in graph.get(module, ()) if not name.startswith(layer)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_library_does_not_load_the_laboratory() -> None:
    """Every public name is looked up, and the commands of the library are loaded."""
    script = (
        "import sys, weft, weft.nn, weft.aot, weft.cli.doctor, weft.cli.aot\n"
        "[getattr(weft, name) for name in weft.__all__]\n"
        "print([name for name in sys.modules if name.startswith('weft.lab')])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_a_circle_and_an_import_from_above_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def later():\n    from .b import x\n")
    (tmp_path / "b.py").write_text("from . import a\nif TYPE_CHECKING:\n    from .c import y\n")
    known = {f"p.{file.stem}": file for file in tmp_path.iterdir()} | {"p.c": tmp_path / "c.py"}
    assert list(imported("p.a", known["p.a"], known)) == ["p.b"]
    assert list(imported("p.b", known["p.b"], known)) == ["p.a"]
    assert layer_of("weft.ops.norm.launch") == "weft.ops"
    assert layer_of("weft") == "weft"
