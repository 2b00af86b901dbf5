"""Redirection of projects that ask for a GPU to the CPU.

Kernels and their launches stay unchanged. Only torch's answers about devices change, and an autotuner takes the first
of its configurations instead of timing all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode

GPU = ("cuda", "xpu", "npu")


def to_cpu(device: Any) -> Any:
    """Return the device to use in place of the requested one."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, str) and device.split(":")[0] in GPU:
        return "cpu"
    if isinstance(device, torch.device) and device.type in GPU:
        return torch.device("cpu")
    return device


class OnCpu(TorchFunctionMode):
    """Function mode that creates tensors on the CPU if they are requested on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": to_cpu(kwargs["device"])}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1:
            args = (
                args[0],
                to_cpu(args[1]) if isinstance(args[1], str | torch.device) else args[1],
                *args[2:],
            )
        return function(*args, **kwargs)


class Generator(torch.Generator):
    """Generator that is created on the CPU if it is requested on a GPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, to_cpu(device))  # type: ignore[call-arg]


class GpuGenerator:
    """State of a GPU's generator, two 64-bit integers: projects read the seed and the offset from it."""

    def __init__(self) -> None:
        self.state = [0, 0]

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.state).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.view(torch.int64).tolist()

    def initial_seed(self) -> int:
        return self.state[0]


def redirect(capability: tuple[int, int] = (9, 0)) -> None:
    """Make torch report one GPU of this capability from now on, and serve it with the CPU."""
    properties = SimpleNamespace(
        name="Loom",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=8,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
    )

    class Stream:
        cuda_stream = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: Any) -> None: ...
        def wait_stream(self, other: Any) -> None: ...
        def synchronize(self) -> None: ...

    class Device(Stream): ...

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "Loom",
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (64 << 30, 80 << 30),
        "_lazy_init": lambda: None,
        "Stream": Stream,
        "stream": lambda stream: Stream(),
        "device": Device,
        "device_of": Device,
        "_DeviceGuard": Device,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "13.0"
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    torch.Tensor.get_device = lambda tensor: 0  # type: ignore[assignment, method-assign]
    torch.cuda.default_generators = (GpuGenerator(),)  # type: ignore[assignment]
    torch.Generator = Generator  # type: ignore[misc]
    torch.nn.Module.cuda = lambda module, device=None: module  # type: ignore[assignment, method-assign]
    OnCpu().__enter__()  # type: ignore[no-untyped-call]


def take_first_configuration(launcher_class: type) -> None:
    """Make autotuners take the first configuration that builds, without launching it (by a launcher of this class) to
    time it."""
    autotuner = triton.runtime.autotuner.Autotuner
    time = autotuner._bench

    def build(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if getattr(self, "built_for", None) is self.nargs:  # an earlier one has been built for this launch
            return [math.inf] * 3
        self._do_bench = lambda launch, quantiles: launch() or [1.0, 1.0, 1.0]
        with mock.patch.object(launcher_class, "__call__", return_value=None):
            times: list[float] = time(self, *args, config=config, **meta)
        if times[0] != math.inf:
            self.built_for = self.nargs
        return times

    autotuner._bench = build
