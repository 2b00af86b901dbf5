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
        ("weft", {"*.py", "py.typed", "ops/*/choices.json"}),
        ("triton_loom", {"*.py", "py.typed", "include/*.h", "include/gpu/*.h", "include/gpu/*.cpp"}),
    ],
)
def test_a_package_ships_its_sources_and_nothing_else(name: str, kinds: set[str]) -> None:
    """A wheel takes every file in the package, so generated files must not be there."""
    package = Path(str(importlib.import_module(name).__file__)).parent
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    shipped = {kind: {path for path in files if path.relative_to(package).match(kind)} for kind in kinds}
    assert all(shipped.values())
    assert files - set().union(*shipped.values()) == set()


# Hides NumPy from all finders, as if it were not installed.
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
    """torch warns at import that NumPy is missing; users of Weft did not ask for NumPy."""
    said, warned = printed(WITHOUT_NUMPY + USE + "print('used')" + DOCTOR)
    assert said.startswith("used\n")
    assert warned == ""


def test_benchmarks_and_bundles_for_gpus_need_neither_numpy_nor_loom() -> None:
    """They import all workloads, which lie beside references that need both."""
    without_both = WITHOUT_NUMPY.replace('== "numpy"', 'in ("numpy", "triton_loom")')
    imported = "weft.lab.bench, weft.lab.commands.ahead, weft.lab.commands.chosen"
    assert printed(f"{without_both}\nimport {imported}") == ("", "")


def test_importing_weft_imports_neither_triton_nor_kernels() -> None:
    """Importing them takes a second; the first call that launches a kernel does so."""
    program = """
import sys, torch, weft
def late():
    return [m for m in sys.modules if m in ("triton", "weft.lab") or m.startswith("weft.tiles")]
print(late())
weft.rms_norm(torch.ones(2, 8))
print("triton" in late(), "weft.tiles" in late(), "weft.lab" in late())
"""
    assert printed(program)[0] == "[]\nTrue True False\n"


def test_a_triton_in_a_package_of_another_name_is_used() -> None:
    """ROCm's wheels have such a package."""
    program = """
import importlib.metadata as metadata
version = metadata.version
def missing(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = missing
from weft import language
print(language.TRITON, language.usable())
"""
    assert printed(program)[0] == "True True\n"


def test_a_broken_numpy_is_reported() -> None:
    broken = """
        if name == "numpy":
            raise ModuleNotFoundError("No module named 'numpy._core'")
    """
    program = WITHOUT_NUMPY.replace("        return None", broken.rstrip() + "\n        return None")
    assert "Failed to initialize NumPy: No module named 'numpy._core'" in printed(program + "import weft")[1]


def test_an_old_torch_is_refused_with_a_reason() -> None:
    """The check precedes any use of features that an old torch may lack."""
    for installed, wrong in (("2.11.0+cu126", True), ("2.12.0a0+git1234", False), ("3.0.0", False)):
        program = f"import torch\ntorch.__version__ = {installed!r}\nimport weft"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == int(wrong), done.stderr
        if wrong:
            last = done.stderr.splitlines()[-1]
            assert last.startswith("ImportError: Weft needs PyTorch 2.12 or later")
            assert "found 2.11.0+cu126: pip install --upgrade torch" in last


def test_an_old_triton_is_not_used() -> None:
    """Triton 3.3 has no `knobs`, which must not make the import of Weft fail."""
    program = """
import sys, types, warnings
for name in ("triton", "triton.language"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["triton"].language = sys.modules["triton.language"]
import torch, weft
warnings.simplefilter("ignore")
print(round(weft.rms_norm(torch.ones(2, 8)).sum().item()))
"""
    assert printed(program)[0] == "16\n"
