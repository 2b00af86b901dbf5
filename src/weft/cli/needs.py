"""Packages that commands need besides Weft's own dependencies: which, for what, and how each is installed."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import language
from ..runtime import loom
from .screen import Refused


@dataclass(frozen=True)
class Package:
    """A package that some commands need."""

    module: str
    name: str
    commands: tuple[str, ...]
    install: Callable[[], str]
    optional: bool = False  # only commands need it that nobody is told to run after installing

    @property
    def is_missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None

    @property
    def purpose(self) -> str:
        *others, last = (f"`{command}`" for command in self.commands)
        return f"{', '.join(others)} and {last} need {self.name}" if others else f"{last} needs {self.name}"


# The plot of a report is a command of its own, and an option of two.
PLOT = "weft ... --plot"

PACKAGES = (
    Package(
        "triton_loom",
        "Loom",
        ("weft verify", "weft prove", "weft audit", "weft tune", "weft report traffic", "weft report published",
         "weft aot build --target cpu"),
        loom.install_command,
    ),
    Package(
        "numpy",
        "NumPy",
        ("weft verify", "weft prove", "weft audit", "weft tune"),
        lambda: f"{loom.pip()} install numpy",
    ),
    Package(
        "z3", "the solver z3", ("weft prove",), lambda: f"{loom.pip()} install 'z3-solver>=4.13,<6'", optional=True
    ),
    Package(
        "matplotlib", "matplotlib", (PLOT,), lambda: f"{loom.pip()} install 'matplotlib>=3.7'", optional=True
    ),
)  # fmt: skip


def missing() -> Iterator[Package]:
    """Yield the packages that some command needs and that are not installed."""
    yield from (package for package in PACKAGES if package.is_missing)


def require(command: str) -> None:
    """Refuse a command that needs packages which are not installed, and say how to install all of them; or one that
    compiles, where Triton's cache cannot be written."""
    absent = [package for package in missing() if command in package.commands]
    if absent:
        names = " and ".join(package.name for package in absent)
        raise Refused(f"`{command}` needs {names}: {' && '.join(package.install() for package in absent)}")
    if command != PLOT:
        require_cache()


def require_cache() -> None:
    """Refuse to compile where Triton's cache cannot be written."""
    if language.TRITON:
        from triton import knobs

        try:
            try_to_write(str(knobs.cache.dir))
        except OSError as error:
            raise Refused(
                f"Triton cannot write to its cache {knobs.cache.dir}: {error.strerror}. Choose a directory that can be "
                f"written: export TRITON_CACHE_DIR=$(mktemp -d)"
            ) from None


def try_to_write(path: str) -> None:
    """Raise OSError if files cannot be made in a directory, or the directory itself cannot."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    with tempfile.TemporaryFile(dir=place):
        pass
