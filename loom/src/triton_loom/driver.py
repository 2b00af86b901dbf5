"""Triton's runtime interface: when the CPU is the current device, and its properties as a device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .features import COUNT, EXPLAIN, HARDWARE_DOT, SANITIZE, switched_on

if TYPE_CHECKING:
    from .device.launcher import LoomLauncher

# Not a CUDA ordinal, so that a kernel launched on both devices in one process keeps two sets of binaries.
CPU = -1
# Instrumented kernels run on devices of their own, for the same reason.
INSTRUMENTED = {(SANITIZE,): -2, (COUNT,): -3, (SANITIZE, COUNT): -4}
# So do kernels that use the processor's bf16 dots: each device above has a twin, four further down. Kernels that
# time their nests are another eight below.
_TWIN = 4
_EXPLAINED = 8


class LoomDriver(DriverBase):
    """The CPU as a Triton device. Any number of instances may exist.

    `witness` names what kernels do at each memory access (see `witness`); None reads it from the environment.
    TRITON_LOOM_HARDWARE_DOT=1, read when the device is created, selects the processor's bf16 dots. With `explain`, or
    TRITON_LOOM_EXPLAIN=1, kernels that are not instrumented time their nests.
    """

    def __init__(self, witness: tuple[str, ...] | None = None, explain: bool | None = None) -> None:
        super().__init__()
        self.witness = _open_scopes() if witness is None else witness
        self.explain = (_explain() if explain is None else explain) and not self.witness
        self.hardware_dot = switched_on("TRITON_LOOM_HARDWARE_DOT")
        self.utils = LoomUtils()
        self.launcher_cls = _launcher(bool(self.witness), self.explain)

    @classmethod
    def is_active(cls) -> bool:
        """Return True if no other backend has a device, or if the CPU was selected by name."""
        if os.environ.get("TRITON_DEFAULT_BACKEND") == "cpu":
            return True
        if getattr(_asking, "others", False):
            return False  # another backend that also defers to all others is asking: it may go first
        from triton.backends import backends

        _asking.others = True
        try:
            return not any(other.driver.is_active() for other in backends.values() if other.driver is not cls)
        finally:
            _asking.others = False

    def get_current_target(self) -> GPUTarget:
        features = (*self.witness, *[EXPLAIN] * self.explain, *[HARDWARE_DOT] * self.hardware_dot)
        return GPUTarget("cpu", "+".join(("native", *features)), 1)

    def get_current_device(self) -> int:
        twins = _TWIN * self.hardware_dot + _EXPLAINED * self.explain
        return INSTRUMENTED.get(self.witness, CPU) - twins

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        from .device.arguments import SCALARS

        return "void*" if ty.startswith("*") else SCALARS[ty][1]

    # ---- triton.testing ----

    def get_benchmarker(self) -> Callable[..., Any]:
        from triton.testing import do_bench

        return do_bench  # type: ignore[no-any-return]

    def get_device_interface(self) -> type[LoomInterface]:
        return LoomInterface

    def get_empty_cache_for_benchmark(self) -> Any:
        """Allocate enough to evict inputs from every core's private caches; a server's shared cache may be 10x that."""
        import torch

        return torch.empty(32 << 20, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()


_asking = threading.local()


@contextmanager
def activated(device: DriverBase) -> Iterator[None]:
    """Launch on this device inside a `with` block."""
    from triton.runtime import driver

    # Not the public `driver.active`: reading that would start the default device's runtime.
    previous = driver._active
    driver.set_active(device)
    try:
        yield
    finally:
        driver.set_active(previous)


def instrumented() -> AbstractContextManager[None]:
    """Launch on the CPU, instrumented for all open scopes, inside a `with` block."""
    from .witness.scopes import SCOPES

    return activated(LoomDriver(SCOPES.modes))


def _launcher(watched: bool, explained: bool) -> type[LoomLauncher]:
    if watched:
        from .witness.launcher import WatchedLauncher

        return WatchedLauncher
    if explained:
        from .explained import ExplainedLauncher

        return ExplainedLauncher
    from .device.launcher import LoomLauncher

    return LoomLauncher


def _open_scopes() -> tuple[str, ...]:
    """Return the modes that the open scopes need, among them the process-wide sanitizer.

    TRITON_LOOM_SANITIZE=1: every launch is checked and the first finding raised; =collect: findings are printed at
    the end.
    """
    from .witness.scopes import SCOPES

    value = os.environ.get("TRITON_LOOM_SANITIZE", "0")
    if value in ("", "0"):
        return SCOPES.modes
    if value not in ("1", "collect"):
        raise ValueError(f"TRITON_LOOM_SANITIZE must be 0, 1 or collect; got {value!r}")
    from .witness import sanitizer

    sanitizer.sanitize_process(collect=value == "collect")
    return SCOPES.modes


def _explain() -> bool:
    """Read TRITON_LOOM_EXPLAIN; if it is 1, print the nests of all kernels and their time when the process ends."""
    enabled = switched_on("TRITON_LOOM_EXPLAIN")
    if enabled:
        from . import explained

        explained.explain_process()
    return enabled


class LoomInterface:
    """The part of `torch.cuda` that `triton.testing` uses, for a device that has finished when a launch returns."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.seconds = 0.0

        def record(self, stream: Any = None) -> None:
            self.seconds = time.perf_counter()

        def elapsed_time(self, end: LoomInterface.Event) -> float:
            return (end.seconds - self.seconds) * 1e3

        def synchronize(self) -> None:
            pass

    @staticmethod
    def synchronize(device: Any = None) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return CPU

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class LoomUtils:
    """The functions that Triton calls in a device's driver library."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spills, and the maximum number of threads of a program."""
        from .device import launcher

        return (*launcher.load(binary, name), 1, 0, 1 << 30)

    def unload_module(self, module: Any) -> None:
        """Keep the code mapped: it is small, and a launch on another thread may still be executing it."""

    def get_device_properties(self, device: int | None = None) -> dict[str, Any]:
        """Return the values by which kernels size their grids; none of them limits a launch."""
        import torch

        return {
            "max_shared_mem": 2**31 - 1,
            "max_num_regs": 2**16,
            "multiprocessor_count": torch.get_num_threads(),
            "warpSize": 1,
        }

    def set_printf_fifo_size(self, size: int) -> None:
        pass
