from importlib.metadata import version
from pathlib import Path

import weft


def test_version_is_the_installed_one() -> None:
    assert weft.__version__ == version("weft")


def test_package_is_typed() -> None:
    assert (Path(weft.__file__).parent / "py.typed").exists()
