import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import weft


def test_version_is_the_installed_one() -> None:
    assert weft.__version__ == version("weft")


def test_package_is_typed() -> None:
    assert (Path(weft.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("weft", {"*.py", "py.typed", "ops/*/tiles.json"}),
        ("triton_loom", {"*.py", "py.typed", "include/*.h", "include/gpu/*.h", "include/gpu/*.cpp"}),
    ],
)
def test_a_package_ships_its_sources_and_nothing_else(name: str, kinds: set[str]) -> None:
    """A wheel takes every file that lies in the package, so what is generated must not."""
    package = Path(str(importlib.import_module(name).__file__)).parent
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    shipped = {kind: {path for path in files if path.relative_to(package).match(kind)} for kind in kinds}
    assert all(shipped.values())
    assert files - set().union(*shipped.values()) == set()


# As where NumPy is not installed: no finder knows it.
WITHOUT_NUMPY = """
import sys
from importlib.machinery import PathFinder


class WithoutNumPy(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "numpy" else super().find_spec(name, path, target)


sys.meta_path[:] = [WithoutNumPy if finder is PathFinder else finder for finder in sys.meta_path]
"""
USE = """
import weft, torch

x = torch.ones(4, 256, requires_grad=True)
weft.rms_norm(x).sum().backward()
weft.quantize(x.detach(), "1x128").dequantize()
assert "numpy" not in sys.modules
"""
DOCTOR = """
from weft.cli import main

assert main(["doctor"]) == 0
assert "numpy" not in sys.modules
"""


def printed(program: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_nothing_is_printed_without_numpy() -> None:
    """torch warns that it is missing when it is imported; whoever imports weft did not ask for it."""
    said, warned = printed(WITHOUT_NUMPY + USE + "print('used')" + DOCTOR)
    assert said.startswith("used\n")
    assert warned == ""


def test_a_numpy_that_does_not_work_is_reported() -> None:
    broken = """
        if name == "numpy":
            raise ModuleNotFoundError("No module named 'numpy._core'")
    """
    program = WITHOUT_NUMPY.replace("        return None", broken.rstrip() + "\n        return None")
    assert "Failed to initialize NumPy: No module named 'numpy._core'" in printed(program + "import weft")[1]
