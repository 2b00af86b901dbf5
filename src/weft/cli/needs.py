"""Packages that commands need besides Weft's own dependencies: their purpose and how to install them."""

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
    """Package that some commands need."""

    module: str
    name: str
    commands: tuple[str, ...]
    install: Callable[[], str]
    optional: bool = False  # only needed by commands that installation instructions do not mention

    @property
    def is_missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None

    @property
    def purpose(self) -> str:
        *others, last = (f"`{command}`" for command in self.commands)
        return f"{', '.join(others)} and {last} need {self.name}" if others else f"{last} needs {self.name}"


# `--plot` is an option of two commands, and `weft report` plots as well.
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
    """Refuse a command that lacks packages, naming the commands that install them, or one that compiles if Triton's
    cache is not writable."""
    absent = [package for package in missing() if command in package.commands]
    if absent:
        names = " and ".join(package.name for package in absent)
        raise Refused(f"`{command}` needs {names}: {' && '.join(package.install() for package in absent)}")
    if command != PLOT:
        require_cache()


def require_cache() -> None:
    """Refuse to compile if Triton's cache is not writable."""
    if language.TRITON:
        from triton import knobs

        try:
            try_to_write(str(knobs.cache.dir))
        except OSError as error:
            raise Refused(
                f"Triton cannot write to its cache {knobs.cache.dir}: {error.strerror}. Choose a writable "
                f"directory: export TRITON_CACHE_DIR=$(mktemp -d)"
            ) from None


def try_to_write(path: str) -> None:
    """Raise OSError if files cannot be created in a directory, or the directory itself cannot."""
    directory = Path(path)
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    with tempfile.TemporaryFile(dir=directory):
        pass
