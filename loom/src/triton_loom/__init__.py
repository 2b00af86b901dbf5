"""Loom runs Triton kernels natively on the CPU.

Installed, it is a backend of stock Triton named `cpu`. Without a GPU it serves every launch; next to a GPU it
stays out of the way until asked, by `TRITON_DEFAULT_BACKEND=cpu` for a process or by `active()` for a block.

Triton imports this package while it is itself being imported, so nothing here or at the top of `compiler.py`
and `driver.py` may import torch, numpy or `triton.language`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from .errors import DeviceAssertion, Finding, Reason, SanitizerError, SpinError

if TYPE_CHECKING:
    from .emulator.findings import HazardError
    from .emulator.scope import Gpu
    from .explained import Explained
    from .witness.counters import Counter
    from .witness.sanitizer import Sanitizer

__version__ = "0.1.0"
__all__ = [
    "DeviceAssertion",
    "Finding",
    "HazardError",
    "Reason",
    "SanitizerError",
    "SpinError",
    "active",
    "count",
    "emulate",
    "explain",
    "obstacle",
    "sanitize",
]


@contextmanager
def active() -> Iterator[None]:
    """Launch Triton kernels on the CPU inside a `with` block, whatever the machine's default device is.

    The current device is Triton's own global state: the change holds for every thread of the process.
    """
    driver = _driver()
    with driver.activated(driver.LoomDriver()):
        yield


def obstacle() -> str | None:
    """Return why kernels cannot be built on this machine and how to fix it; None if no obstacle is known.

    It looks for a C++ compiler without running it: the answer costs a few file look-ups.
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
    allocated, races with itself, lets an offset overflow, breaks a promise made to the compiler or uses lanes that a
    load has left undefined raises `SanitizerError`; with `collect=True` it continues and the scope lists the findings.

    With `dry=True` launches evaluate addresses only: nothing is stored, loads return zeros, and a large grid runs only
    a sample of its programs. Tensors are never touched and may then be as large as can be declared.

        with triton_loom.sanitize(collect=True) as seen:
            kernel[grid](x, y)
        print(*seen.findings, sep="\\n")

    `seen.verdicts` tells for every launch whether it was clean, or why it was not checked.
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

    `triton_loom.witness.counters.Traffic` defines the counts; `counted.verdicts` tells for every launch whether it was
    counted, or why not.
    """
    driver = _driver()
    from .witness import counters

    with counters.count() as scope, driver.instrumented():
        yield scope


@contextmanager
def explain() -> Iterator[Explained]:
    """Show which loop nests kernels became, and where launches inside a `with` block spend their time.

        with triton_loom.explain() as explained:
            kernel[grid](x, y)
        print(explained)

    Kernels are recompiled to time each of their loop nests by the processor's own clock. This does not work inside
    `sanitize()` or `count()`, whose kernels spend their time on checks.
    """
    driver = _driver()
    from . import explained

    with explained.explain() as scope, driver.activated(driver.LoomDriver((), explain=True)):
        yield scope


@contextmanager
def emulate(
    target: str = "sm_90",
    *,
    checks: bool = True,
    raises: bool = True,
    delivery: Literal["late", "early"] = "late",
    counters: bool = False,
    ignore: Collection[str] = (),
    limit: float | None = None,
    strict: bool = False,
) -> Iterator[Gpu]:
    """Emulate an NVIDIA GPU inside a `with` block, on CPU tensors.

    Stock Triton compiles kernels for the GPU, and their PTX is executed on this machine.

        with triton_loom.emulate("sm_90") as gpu:
            kernel[grid](x, y, n, BLOCK=1024)
        print(gpu.report())

    A launch with findings (racing threads, accesses to memory that is not the kernel's) raises `HazardError` when it
    is over; with `raises=False` it continues, and `gpu.findings` lists them. Without `checks`, only addresses are
    checked. `ignore` names kinds of findings that are not reported; `strict` also reports what PTX requires and Triton
    always omits (fences after mbarriers are initialized). Asynchronous copies arrive as late as they may, or at once
    with `delivery="early"`.

    A block that runs for more than `limit` seconds ends the launch with a finding that names its current line.
    The limit defaults to 60 seconds, or to the environment variable TRITON_LOOM_EMULATE_LIMIT; `math.inf` means none.

    `gpu.counters` counts the instructions by class, barriers and matrix products of each kernel and line. With
    `counters=True` it also counts transactions of global and shared memory, beside the minimum for the same bytes;
    `gpu.report(lines=True)` prints all of it.

    Targets are sm_80, sm_86, sm_89, sm_90, sm_100 and sm_120. The choice holds for every thread of the process, and a
    process in which a GPU was emulated cannot use a real one.
    """
    _driver()
    from .emulator import driver
    from .emulator.devices import device_of
    from .emulator.machine import Options
    from .emulator.scope import Gpu, seconds

    options = Options(checks=checks, delivery=delivery, counters=counters, limit=seconds(limit))
    gpu = Gpu(device_of(target), options, raises, ignore, strict)
    with driver.emulating(gpu):
        yield gpu


def __getattr__(name: str) -> object:
    """Import `HazardError` on first use."""
    if name == "HazardError":
        from .emulator.findings import HazardError

        return HazardError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _driver() -> ModuleType:
    """Import Triton before the driver: Triton itself looks for backends and would find one half imported."""
    import triton  # noqa: F401

    from . import driver

    return driver
