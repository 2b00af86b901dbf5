"""Triton driver for the emulated GPU: Triton's own NVIDIA driver, whose CUDA calls go to the stand-in for libcuda (see
`libcuda`); its questions to PyTorch about the GPU are answered here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import _allocation
from triton.runtime import driver as drivers

from ..device.arguments import fields, value_at
from ..driver import LoomInterface, activated
from ..witness.watched import tensor_and_address
from . import libcuda, scope
from .devices import Device
from .machine import MemoryRange
from .scope import Gpu, memory_of


class EmulatedDriver(nvidia.CudaDriver):
    """Driver of an NVIDIA GPU emulated on this machine's CPU, for CPU tensors. One per target: see `driver_of`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.library = libcuda.load(scope.receive)
        with _linked_with(self.library), self.library.emulating(device):
            super().__init__()
        self.launcher_cls = EmulatedLauncher
        # Triton keys its caches by device number: no GPU has such a number, nor has Loom.
        self.get_current_device = lambda: device.capability
        self.set_current_device = lambda number: None
        self.get_current_stream = lambda number=None: 0
        self.get_device_capability = lambda number=None: divmod(device.capability, 10)

    @property
    def emulates(self) -> str:
        """Target that kernels and their tiles are chosen for, although tensors are on the CPU."""
        return self.device.target

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return GPUTarget("cuda", self.device.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def get_device_interface(self) -> type[LoomInterface]:
        """Return the interface that synchronizes the device: launches have completed when they return."""
        return LoomInterface

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmarker without times, which the emulation does not have. An autotuner launches, and so checks,
        each of its configurations once, and takes the first."""

        def launch_once(call: Callable[[], object], *, quantiles: Sequence[float] = (), **_: object) -> Any:
            call()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return launch_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return an empty tensor: there is no cache to flush."""
        return torch.empty(0, dtype=torch.int8)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: there is no cache."""


@functools.cache
def driver_of(device: Device) -> EmulatedDriver:
    """Return the driver of a GPU, always the same one because callers cache compiled kernels by driver."""
    return EmulatedDriver(device)


@contextmanager
def _linked_with(library: libcuda.Library) -> Iterator[None]:
    """Let Triton find this library inside a `with` block when it compiles the C part of its driver against libcuda."""

    def forget() -> None:
        for cached in (nvidia.libcuda_dirs, nvidia.library_dirs):
            cached.cache_clear()

    forget()
    with knobs.nvidia.scope():
        knobs.nvidia.libcuda_path = str(Path(library.path).parent)
        try:
            yield
        finally:
            forget()


# ---- launches ------------------------------------------------------------------------------------------------------


class EmulatedLauncher(nvidia.CudaLauncher):
    """Triton's launcher, extended by the memory that a launch may touch and its scratch memory."""

    takes_tensors = True  # callers pass tensors, not their addresses

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.name = metadata.name
        self.pointers = [field for field in fields(src.signature) if field.code == "P"]
        self.file = src.fn.fn.__code__.co_filename if isinstance(src, ASTSource) else None

    def reaching(self, tensors: Sequence[torch.Tensor]) -> Callable[..., None]:
        """Return the launcher for a launch that finds the addresses of these tensors in memory."""
        return functools.partial(self, reached=tensors)

    def __call__(self, *args: Any, reached: Sequence[torch.Tensor] = ()) -> None:
        gpu = scope.current()
        # Grid, stream, function, metadata and hooks come before the kernel's own arguments.
        hidden, values = args[:9], args[9:]
        memory = [memory_of(tensor, f"reached[{number}]") for number, tensor in enumerate(reached)]
        memory += self._arguments(gpu, values, memory)

        def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
            scratch = _scratch(size, alignment)
            memory.append(memory_of(scratch, "scratch memory"))
            return scratch

        token = _allocation._allocator.set(allocate)
        try:
            with gpu.launching(memory, self.file), driver_of(gpu.device).library.raising():
                super().__call__(*hidden, *values)
        finally:
            _allocation._allocator.reset(token)

    def _arguments(self, gpu: Gpu, values: Any, reached: Sequence[MemoryRange]) -> list[MemoryRange]:
        ranges, bare_addresses = [], []
        for field in self.pointers:
            tensor, address = tensor_and_address(value_at(values, field.path))
            if tensor is not None:
                ranges.append(memory_of(tensor, field.name))
            elif address:
                bare_addresses.append((field.name, address))
        for name, address in bare_addresses:
            if not gpu.knows(address, [*ranges, *reached]):
                raise ValueError(
                    f"{self.name}: {name} is the bare address {address:#x} of unknown memory: "
                    "pass the tensor, or name it by `gpu.allow(tensor)`"
                )
        return ranges


def _scratch(size: int, alignment: int) -> torch.Tensor:
    """Return memory with no useful content, as on a GPU. NumPy fills it, because PyTorch may be set up to fill tensors
    by a kernel."""
    memory = torch.from_numpy(np.full(size + alignment, 0xCB, np.uint8))
    skipped = -memory.data_ptr() % alignment
    return memory[skipped : skipped + size]


# ---- compilation ---------------------------------------------------------------------------------------------------


class PtxIsTheModule:
    """Hook into Triton's compilation stages that makes the PTX the module, instead of ptxas' binary.

    Such kernels have their own keys in Triton's caches. With this hook of Triton's, the backend, its target and its
    options are those of a real GPU. It does nothing for other drivers, and calls a previously installed hook.
    """

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before

    def __call__(self, *stages_of: Any) -> Any:
        result = self.before(*stages_of) if self.before is not None else ("", "")
        emulated = isinstance(drivers._active, EmulatedDriver)
        if not stages_of:  # asks for the additions to cache keys
            suffix = "the module is the PTX" * emulated
            return tuple(f"{part}{suffix}" for part in result)
        _, stages, *_ = stages_of
        if emulated and "cubin" in stages:
            stages["cubin"] = lambda ptx, metadata: ptx.encode()
        return result

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[None]:
        """Install the hook inside a `with` block."""
        before = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = cls(before)
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = before


@contextmanager
def emulating(gpu: Gpu) -> Iterator[None]:
    """Make this GPU the device of all launches inside a `with` block."""
    driver = driver_of(gpu.device)
    hooked = isinstance(knobs.runtime.add_stages_inspection_hook, PtxIsTheModule)
    with (
        scope.opened(gpu),
        driver.library.emulating(gpu.device),
        nullcontext() if hooked else PtxIsTheModule.installed(),
        activated(driver),
    ):
        yield
