"""Imports point down: what a layer of the package may know of the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent

# A layer and those below it that it may import. A family of ops may import another one, a file at a time.
LAYERS: dict[str, tuple[str, ...]] = {
    "language": (),
    "tiles": ("language",),
    "runtime": ("language",),
    "quant": ("language", "tiles", "runtime"),
    "ops/common": ("language", "tiles", "runtime", "quant"),
    "ops": ("language", "tiles", "runtime", "quant", "ops/common"),
    "workloads": ("language", "tiles", "runtime", "quant", "ops/common", "ops"),
    "report": (),
    "nn": ("language", "tiles", "runtime", "quant", "ops/common", "ops", "report"),
    "integrations": ("language", "tiles", "runtime", "quant", "ops/common", "ops", "report", "nn"),
    "cli": ("language", "tiles", "runtime", "quant", "ops/common", "ops", "workloads"),
}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.parent != ROOT)


def layer_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return "ops/common" if parts[:2] == ("ops", "common") else parts[0]


def imports(path: Path) -> Iterator[tuple[Path, str]]:
    """(module, name) of everything that a file imports from the package, also inside of functions, but not what is for
    annotations alone."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1]
            for alias in node.names:
                target = base / (node.module or "").replace(".", "/")
                whole = target / alias.name
                is_module = (ROOT / whole).with_suffix(".py").exists() or (ROOT / whole).is_dir()
                yield (whole if is_module else target), alias.name


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(path)
    for module, name in imports(path):
        if module == Path("."):
            continue
        other = layer_of(module)
        assert other == own or other in LAYERS[own], f"{path} ({own}) imports {name} from {module} ({other})"


def test_no_private_name_crosses_a_file() -> None:
    crossing = [
        f"{path}: {name} of {module}"
        for path in FILES
        for module, name in imports(path)
        if name.startswith("_") and not name.startswith("__")
    ]
    assert not crossing


def test_lower_layers_name_no_op() -> None:
    """Neither the runtime nor the number formats know an op by its name: ops register what others need of them."""
    for path in FILES:
        if layer_of(path) in ("runtime", "quant", "tiles"):
            strings = {
                node.value
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            named = strings & weft.catalogue.keys()
            assert not named, f"{path} names {', '.join(sorted(named))}"
