"""Loom runs Triton kernels natively on the CPU.

Installed, it is a backend of stock Triton named `cpu`. Without a GPU it serves every launch; next to a GPU it
stays out of the way until asked, by `TRITON_DEFAULT_BACKEND=cpu` for a process or by `active()` for a block.

Triton imports this package while it is itself being imported, so nothing here or at the top of `compiler.py`
and `driver.py` may import torch, numpy or `triton.language`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__version__ = "0.1.0"
__all__ = ["DeviceAssertion", "active"]


class DeviceAssertion(RuntimeError):
    """A program of a launch failed a `tl.device_assert`."""


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
