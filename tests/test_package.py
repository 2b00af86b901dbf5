import importlib
from importlib.metadata import version
from pathlib import Path

import pytest

import weft


def test_version_is_the_installed_one() -> None:
    assert weft.__version__ == version("weft")


def test_package_is_typed() -> None:
    assert (Path(weft.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("name", "kinds"), [("weft", {"*.py", "py.typed"}), ("triton_loom", {"*.py", "py.typed", "include/*.h"})]
)
def test_a_package_ships_its_sources_and_nothing_else(name: str, kinds: set[str]) -> None:
    """A wheel takes every file that lies in the package, so what is generated must not."""
    package = Path(str(importlib.import_module(name).__file__)).parent
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    shipped = {kind: {path for path in files if path.relative_to(package).match(kind)} for kind in kinds}
    assert all(shipped.values())
    assert files - set().union(*shipped.values()) == set()
