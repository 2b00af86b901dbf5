"""A Triton driver for the emulated GPU. It is Triton's own NVIDIA driver, whose calls to CUDA end in the stand-in for
libcuda (see `libcuda`); what it would ask PyTorch about the GPU is answered here.
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
    """An NVIDIA GPU on this machine's CPU, for CPU tensors. There is one for each target: see `driver_of`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.library = libcuda.load(scope.receive)
        with _linked_with(self.library), self.library.emulating(device):
            super().__init__()
        self.launcher_cls = EmulatedLauncher
        # The number of a device decides which of its caches Triton uses: no GPU has such a number, nor has Loom.
        self.get_current_device = lambda: device.capability
        self.set_current_device = lambda number: None
        self.get_current_stream = lambda number=None: 0
        self.get_device_capability = lambda number=None: divmod(device.capability, 10)

    @property
    def emulates(self) -> str:
        """The target that kernels and their tiles are chosen for, although tensors are the CPU's."""
        return self.device.target

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return GPUTarget("cuda", self.device.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> type[LoomInterface]:
        """What waits for the device: launches are over when they return."""
        return LoomInterface

    def get_benchmarker(self) -> Callable[..., Any]:
        """The emulation has no notion of time. An autotuner launches each of its configurations once, all of them
        checked, and takes the first."""

        def launch_once(call: Callable[[], object], *, quantiles: Sequence[float] = (), **_: object) -> Any:
            call()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return launch_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """There is no cache to be emptied."""
        return torch.empty(0, dtype=torch.int8)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """There is none."""


@functools.cache
def driver_of(device: Device) -> EmulatedDriver:
    """The driver of a GPU. There is one, since callers keep what they have compiled by driver."""
    return EmulatedDriver(device)


@contextmanager
def _linked_with(library: libcuda.Library) -> Iterator[None]:
    """Triton compiles the C part of its driver against a libcuda.so.1 that it looks for; here it is this one."""

    def forget() -> None:
        for remembered in (nvidia.libcuda_dirs, nvidia.library_dirs):
            remembered.cache_clear()

    forget()
    with knobs.nvidia.scope():
        knobs.nvidia.libcuda_path = str(Path(library.path).parent)
        try:
            yield
        finally:
            forget()


# ---- launches ------------------------------------------------------------------------------------------------------


class EmulatedLauncher(nvidia.CudaLauncher):
    """Triton's launcher, which is told what memory a launch may touch and gives it scratch memory."""

    takes_tensors = True  # a caller that has tensors gives those, not their addresses

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.name = metadata.name
        self.pointers = [field for field in fields(src.signature) if field.code == "P"]
        self.file = src.fn.fn.__code__.co_filename if isinstance(src, ASTSource) else None

    def reaching(self, tensors: Sequence[torch.Tensor]) -> Callable[..., None]:
        """The launcher for a launch that finds the addresses of these tensors in memory."""
        return functools.partial(self, reached=tensors)

    def __call__(self, *args: Any, reached: Sequence[torch.Tensor] = ()) -> None:
        gpu = scope.current()
        # Grid, stream, function, metadata and hooks come before the kernel's own.
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
        known, bare = [], []
        for field in self.pointers:
            tensor, address = tensor_and_address(value_at(values, field.path))
            if tensor is not None:
                known.append(memory_of(tensor, field.name))
            elif address:
                bare.append((field.name, address))
        for name, address in bare:
            if not gpu.knows(address, [*known, *reached]):
                raise ValueError(
                    f"{self.name}: {name} is the bare address {address:#x}, of which nobody knows what lies there: "
                    "pass the tensor, or name it by `gpu.allow(tensor)`"
                )
        return known


def _scratch(size: int, alignment: int) -> torch.Tensor:
    """Memory that has no useful content, as that of a GPU. Filled by NumPy: PyTorch may have been told to fill tensors
    by a kernel."""
    memory = torch.from_numpy(np.full(size + alignment, 0xCB, np.uint8))
    skipped = -memory.data_ptr() % alignment
    return memory[skipped : skipped + size]


# ---- compilation ---------------------------------------------------------------------------------------------------


class PtxIsTheModule:
    """Triton's hook into the stages of a compilation: in place of ptxas' binary, the module is the PTX.

    Kernels keep their own place in Triton's caches. The hook is Triton's own way to do this, so that the backend, its
    target and its options are those of a real GPU; it does nothing for other drivers, and hands on to a hook that was
    there before.
    """

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before

    def __call__(self, *stages_of: Any) -> Any:
        given = self.before(*stages_of) if self.before is not None else ("", "")
        emulated = isinstance(drivers._active, EmulatedDriver)
        if not stages_of:  # what it adds to the keys of caches
            own = "the module is the PTX" * emulated
            return tuple(f"{part}{own}" for part in given)
        _, stages, *_ = stages_of
        if emulated and "cubin" in stages:
            stages["cubin"] = lambda ptx, metadata: ptx.encode()
        return given

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[None]:
        """Inside a `with` block."""
        before = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = cls(before)
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = before


@contextmanager
def emulating(gpu: Gpu) -> Iterator[None]:
    """Makes this GPU the device of all launches inside a `with` block."""
    driver = driver_of(gpu.device)
    hooked = isinstance(knobs.runtime.add_stages_inspection_hook, PtxIsTheModule)
    with (
        scope.opened(gpu),
        driver.library.emulating(gpu.device),
        nullcontext() if hooked else PtxIsTheModule.installed(),
        activated(driver),
    ):
        yield
