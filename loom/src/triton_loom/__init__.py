"""Loom runs Triton kernels natively on the CPU.

Installed, it is a backend of stock Triton named `cpu`. Without a GPU it serves every launch; next to a GPU it
stays out of the way until asked, by `TRITON_DEFAULT_BACKEND=cpu` for a process or by `active()` for a block.

Triton imports this package while it is itself being imported, so nothing here or at the top of `compiler.py`
and `driver.py` may import torch, numpy or `triton.language`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .counters import Counter
    from .sanitizer import Finding, Sanitizer

__version__ = "0.1.0"
__all__ = ["DeviceAssertion", "SanitizerError", "active", "count", "obstacle", "sanitize"]


class DeviceAssertion(RuntimeError):
    """A program of a launch failed a `tl.device_assert`."""


class SanitizerError(RuntimeError):
    """A launch inside `sanitize()` did what it must not; `findings` says what."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


@contextmanager
def active() -> Iterator[None]:
    """Launch Triton kernels on the CPU inside a `with` block, whatever the machine's default device is.

    The choice of a device is Triton's own global state: it holds for every thread of the process.
    """
    from triton.runtime import driver

    from .driver import LoomDriver

    # Not the public `driver.active`: reading that would start the default device's runtime.
    previous = driver._active
    driver.set_active(LoomDriver())
    try:
        yield
    finally:
        driver.set_active(previous)


def obstacle() -> str | None:
    """Why kernels cannot be built on this machine and what to do about it; None if nothing is known to be in the way.

    It looks for a C++ compiler and does not run it: the answer costs a few look-ups of files.
    """
    from . import toolchain

    try:
        toolchain.compiler()
    except toolchain.BuildError as error:
        return str(error)
    return None


def sanitize(*, collect: bool = False, dry: bool = False) -> AbstractContextManager[Sanitizer]:
    """Check every memory access of the launches inside a `with` block.

    A launch that reads or writes outside of its tensor arguments, reads memory that nobody has written since it was
    allocated, races with itself, lets a 32-bit offset overflow or breaks a promise made to the compiler raises
    `SanitizerError`; with `collect=True` it goes on and the findings are listed in the scope.

    With `dry=True` launches evaluate addresses only: nothing is loaded (a load gives zeros) or stored, and of a large
    grid a sample of programs runs. Tensors may then be as large as can be declared, without being touched.

        with triton_loom.sanitize(collect=True) as seen:
            kernel[grid](x, y)
        print(*seen.findings, sep="\\n")
    """
    from . import sanitizer

    return sanitizer.sanitize(collect, dry)


def count() -> AbstractContextManager[Counter]:
    """Count what the launches inside a `with` block load, store and multiply: bytes for each tensor argument.

        with triton_loom.count() as counted:
            kernel[grid](x, y)
        print(counted.launches[0].arguments["x_ptr"].loads.distinct)

    What is counted is explained at `triton_loom.counters.Traffic`.
    """
    from . import counters

    return counters.count()
