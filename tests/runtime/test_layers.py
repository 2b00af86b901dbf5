"""Layering of the package: imports point down the list of layers, without cycles, including imports in functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import weft

# From bottom to top. A module belongs to the longest prefix of its name; "weft" is the package itself.
LAYERS = (
    "weft.language",
    "weft.tiles",
    "weft.runtime",
    "weft.quant",
    "weft.ops.common",
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
    "weft.testing",
    "weft.__main__",
)
# `weft aot build` asks the laboratory which calls the workloads make.
ALLOWED = {("weft.cli.aot", "weft.lab")}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
ROOT = Path(weft.__file__).parent
OPS = frozenset(weft.catalogue)  # without those that tests define
MODULES = {
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
}


def imported(module: str, file: Path, known: Container[str] = MODULES) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a module imports from the package at run time; imports for type checkers are
    excluded."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    pending = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                matches = [name for name in (f"{base}.{alias.name}", base) if name in known]
                yield from ((name, alias.name) for name in matches[:1])


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    own = LAYERS.index(layer_of(module))
    for name, _ in imported(module, MODULES[module]):
        allowed = LAYERS.index(layer_of(name)) <= own or (module, layer_of(name)) in ALLOWED
        assert allowed, f"{module} imports {name}, which is above it"


def test_imports_have_no_cycles() -> None:
    graph = {
        module: {
            name
            for name, _ in imported(module, file)
            if name != module and (module, layer_of(name)) not in ALLOWED
        }
        for module, file in MODULES.items()
    }
    assert sum(map(len, graph.values())) > 500, "too few imports were found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_private_name_crosses_a_file() -> None:
    crossing = [
        f"{module}: {name} of {other}"
        for module, file in MODULES.items()
        for other, name in imported(module, file)
        if name.startswith("_") and not name.startswith("__")
    ]
    assert not crossing


def test_lower_layers_name_no_op() -> None:
    """Neither the runtime nor the number formats name an op: ops register what others need from them."""
    for module, file in MODULES.items():
        if layer_of(module) in ("weft.runtime", "weft.quant", "weft.tiles"):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            strings = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            used = set(strings)
            if layer_of(module) == "weft.runtime":
                documented = {ast.get_docstring(n, clean=False) for n in nodes if isinstance(n, DOCUMENTED)}
                used = {word for text in strings - documented for word in text.split()}
                used |= {n.id for n in nodes if isinstance(n, ast.Name)}
            named = used & OPS
            assert not named, f"{module} names {', '.join(sorted(named))}"


def test_the_library_does_not_load_the_laboratory() -> None:
    """Look up every public name and load the library's own commands."""
    script = (
        "import sys, weft, weft.nn, weft.aot, weft.cli.doctor, weft.cli.aot\n"
        "[getattr(weft, name) for name in weft.__all__]\n"
        "print([name for name in sys.modules if name.startswith('weft.lab')])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_imports_in_functions_and_of_types_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def later():\n    from .b import x\n")
    (tmp_path / "b.py").write_text("from . import a\nif TYPE_CHECKING:\n    from .c import y\n")
    known = {f"p.{file.stem}": file for file in tmp_path.iterdir()} | {"p.c": tmp_path / "c.py"}
    assert list(imported("p.a", known["p.a"], known)) == [("p.b", "x")]
    assert list(imported("p.b", known["p.b"], known)) == [("p.a", "a")]
    assert layer_of("weft.ops.norm.launch") == "weft.ops"
    assert layer_of("weft") == "weft"
