"""Device that compiles for a GPU and launches nothing: what remains of a call is its host time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class NoopLauncher:
    """Replacement for the C launcher, with the same arguments."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False

    def __call__(self, *args: Any) -> None:
        pass


class _Utils:
    """Driver functions that return handles nobody uses."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232_448,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65_536,
        }

    def unload_module(self, module: int) -> None:
        pass


class NoopDriver(DriverBase):  # type: ignore[misc]
    """GPU of the given target, sm_90 by default, on which every launch returns at once. Its tensors live on the CPU."""

    launcher_cls = NoopLauncher

    def __init__(self, target: GPUTarget | None = None) -> None:
        self.target = target or GPUTarget("cuda", 90, 32)
        self.utils = _Utils()

    @property
    def emulates(self) -> str:
        """Return the target's name: libraries that query the device see the GPU, not the CPU."""
        return f"sm_{self.target.arch}" if isinstance(self.target.arch, int) else str(self.target.arch)

    @classmethod
    def is_active(cls) -> bool:
        """Return True: the driver is only active when activated explicitly."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type unchanged: no launcher is compiled."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: Any) -> int:
        """Return the only stream."""
        return 0

    def get_device_interface(self) -> Any:
        """Return the interface that waits for the device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Raise NotImplementedError: there is nothing to measure."""
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        """Raise NotImplementedError: there is nothing to measure."""
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        """Do nothing: there is no cache."""


@contextmanager
def launching_nothing(target: GPUTarget | None = None) -> Iterator[None]:
    """Compile kernels for the target inside a `with` block, and return from launches at once."""
    from ..driver import activated

    with activated(NoopDriver(target)):
        yield
