"""A device that compiles for a GPU and launches nothing: what is left of a call is its time on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class NoopLauncher:
    """In place of the C launcher, which takes the same arguments."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False

    def __call__(self, *args: Any) -> None:
        pass


class _Utils:
    """Loading a binary gives handles that nobody uses."""

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
    """A GPU of this target, an sm_90 unless told otherwise, on which every launch returns at once. Its tensors are the
    CPU's."""

    launcher_cls = NoopLauncher

    def __init__(self, target: GPUTarget | None = None) -> None:
        self.target = target or GPUTarget("cuda", 90, 32)
        self.utils = _Utils()

    @property
    def emulates(self) -> str:
        """The target by its name: libraries that ask what they run on are told of the GPU, not of the CPU."""
        return f"sm_{self.target.arch}" if isinstance(self.target.arch, int) else str(self.target.arch)

    @classmethod
    def is_active(cls) -> bool:
        """Only when it is made so."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nobody compiles a launcher."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: Any) -> int:
        """The only one."""
        return 0

    def get_device_interface(self) -> Any:
        """What waits for the device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """There is nothing to measure."""
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        """There is nothing to measure."""
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        """There is none."""


@contextmanager
def launching_nothing(target: GPUTarget | None = None) -> Iterator[None]:
    """Inside a `with` block, kernels are compiled for the target and launches return at once."""
    from ..driver import activated

    with activated(NoopDriver(target)):
        yield
