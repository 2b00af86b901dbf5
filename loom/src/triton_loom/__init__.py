"""Loom runs Triton kernels natively on the CPU.

Installed, it is a backend of stock Triton named `cpu`. Without a GPU it serves every launch; next to a GPU it
stays out of the way until asked, by `TRITON_DEFAULT_BACKEND=cpu` for a process or by `active()` for a block.

Triton imports this package while it is itself being imported, so nothing here or at the top of `compiler.py`
and `driver.py` may import torch, numpy or `triton.language`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import DeviceAssertion, Finding, Reason, SanitizerError

if TYPE_CHECKING:
    from .explained import Explained
    from .witness.counters import Counter
    from .witness.sanitizer import Sanitizer

__version__ = "0.1.0"
__all__ = [
    "DeviceAssertion",
    "Finding",
    "Reason",
    "SanitizerError",
    "active",
    "count",
    "explain",
    "obstacle",
    "sanitize",
]


@contextmanager
def active() -> Iterator[None]:
    """Launch Triton kernels on the CPU inside a `with` block, whatever the machine's default device is.

    The choice of a device is Triton's own global state: it holds for every thread of the process.
    """
    driver = _driver()
    with driver.activated(driver.LoomDriver()):
        yield


def obstacle() -> str | None:
    """Why kernels cannot be built on this machine and what to do about it; None if nothing is known to be in the way.

    It looks for a C++ compiler and does not run it: the answer costs a few look-ups of files.
    """
    from .device import toolchain

    try:
        toolchain.compiler()
    except toolchain.BuildError as error:
        return str(error)
    return None


@contextmanager
def sanitize(*, collect: bool = False, dry: bool = False) -> Iterator[Sanitizer]:
    """Check every memory access of the launches inside a `with` block.

    A launch that reads or writes outside of its tensor arguments, reads memory that nobody has written since it was
    allocated, races with itself, lets a 32-bit offset overflow or breaks a promise made to the compiler raises
    `SanitizerError`; with `collect=True` it goes on and the findings are listed in the scope.

    With `dry=True` launches evaluate addresses only: nothing is loaded (a load gives zeros) or stored, and of a large
    grid a sample of programs runs. Tensors may then be as large as can be declared, without being touched.

        with triton_loom.sanitize(collect=True) as seen:
            kernel[grid](x, y)
        print(*seen.findings, sep="\\n")

    `seen.verdicts` says of every launch whether it was clean, or why it was not checked.
    """
    driver = _driver()
    from .witness import sanitizer

    with sanitizer.sanitize(collect=collect, dry=dry) as scope, driver.instrumented():
        yield scope


@contextmanager
def count() -> Iterator[Counter]:
    """Count what the launches inside a `with` block load, store and multiply: bytes for each tensor argument.

        with triton_loom.count() as counted:
            kernel[grid](x, y)
        print(counted.launches[0].arguments["x_ptr"].loads.distinct)

    What is counted is explained at `triton_loom.witness.counters.Traffic`; `counted.verdicts` says of every launch
    whether it was, or why not.
    """
    driver = _driver()
    from .witness import counters

    with counters.count() as scope, driver.instrumented():
        yield scope


@contextmanager
def explain() -> Iterator[Explained]:
    """Say what kernels became, and where the time of the launches inside a `with` block goes.

        with triton_loom.explain() as explained:
            kernel[grid](x, y)
        print(explained)

    Kernels are compiled anew to take the time of each of their loop nests, by the processor's own clock. Not inside
    `sanitize()` or `count()`, whose kernels spend their time on checks.
    """
    driver = _driver()
    from . import explained

    with explained.explain() as scope, driver.activated(driver.LoomDriver((), explain=True)):
        yield scope


def _driver() -> ModuleType:
    """Triton goes first: while it is being imported it looks for a backend, and would find one half imported."""
    import triton  # noqa: F401

    from . import driver

    return driver
