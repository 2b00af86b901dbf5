"""The stand-in for libcuda.so.1 (include/gpu/libcuda.cpp): its build, its loading, and its Python side."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..device import storage, toolchain
from ..ptx.text import Kernel, read
from .devices import DEVICES, Device

FILE = "libcuda.so.1"
SUCCESS, INVALID_PTX, NOT_FOUND, LAUNCH_FAILED = 0, 218, 500, 719  # of CUresult


class RealDriver(RuntimeError):
    """Error: a real GPU's driver is in this process, or may be needed later."""


@dataclass(frozen=True)
class Arrived:
    """A checked launch as it arrives at the driver."""

    ptx: str
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # dynamic
    cooperative: bool
    overlapping: bool  # it may begin before the previous launch has ended
    parameters: bytes  # of the .param space


# ---- the structures of libcuda.cpp -----------------------------------------------------------------------------

_i32, _u32, _u64, _text, _address = (
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_char_p,
    ctypes.c_void_p,
)


class _Device(ctypes.Structure):
    _fields_ = [
        *[(name, _i32) for name in ("capability", "multiprocessors", "shared_per_block")],
        *[(f"{name}_per_multiprocessor", _i32) for name in ("shared", "threads", "blocks")],
        *[(name, _i32) for name in ("registers", "clock", "memory_clock", "memory_bits")],
    ]

    @classmethod
    def of(cls, device: Device) -> _Device:
        properties = asdict(device)
        result = cls(**{field[0]: properties[field[0]] for field in cls._fields_})
        result.clock *= 1000  # kHz, as CUDA has them
        result.memory_clock *= 1000
        return result


class _Parameter(ctypes.Structure):
    _fields_ = [("offset", _u32), ("bytes", _u32)]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", _text),
        ("parameters", ctypes.POINTER(_Parameter)),
        *[(name, _u32) for name in ("parameter_count", "parameter_bytes")],
        *[(name, _i32) for name in ("capability", "for_no_other")],
        ("threads", _i32 * 3),
        *[(name, _i32) for name in ("static_shared", "dynamic_shared", "registers", "any_cluster_size")],
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", _address),
        *[(name, _u32 * 3) for name in ("grid", "block", "cluster")],
        ("shared", _u32),
        *[(name, _i32) for name in ("cooperative", "overlapping")],
        ("parameter_bytes", _u32),
        ("parameters", _address),
    ]


_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, _text, ctypes.POINTER(_u64))
_FIND = ctypes.CFUNCTYPE(ctypes.c_int, _u64, _text, ctypes.POINTER(_address))
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


class _Host(ctypes.Structure):
    _fields_ = [("load", _LOAD), ("find", _FIND), ("launch", _LAUNCH)]


# ---- the library -------------------------------------------------------------------------------------------------


class Library:
    """The library in this process, with the modules that were loaded into it. Modules stay loaded until the process
    ends, as long as Triton keeps its compiled kernels."""

    def __init__(self, path: str, receive: Callable[[Arrived], None]) -> None:
        self.path, self._receive = path, receive
        self._library = ctypes.CDLL(path)
        self._modules: list[tuple[str, Kernel]] = []
        self._kernels: dict[int, tuple[str, Kernel, _Kernel]] = {}  # by address: Triton's function
        self._failed = threading.local()
        self._devices = (_Device * len(DEVICES))(*map(_Device.of, DEVICES.values()))
        self._host = _Host(_LOAD(self._load), _FIND(self._find), _LAUNCH(self._launch))
        self._library.loom_cuda_connect(ctypes.byref(self._host), self._devices, len(self._devices))

    @contextlib.contextmanager
    def emulating(self, device: Device) -> Iterator[None]:
        """Make this the device of all calls inside a `with` block. Outside all blocks there is none."""
        outer = self._library.loom_cuda_emulate(device.capability)
        try:
            yield
        finally:
            self._library.loom_cuda_emulate(outer)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise, inside a `with` block, the exception that failed on the Python side instead of Triton's error for the
        failed call."""
        self._failed.exception = None
        try:
            yield
        except RuntimeError:
            failed, self._failed.exception = self._failed.exception, None
            if failed is None:
                raise
            raise failed from None

    # -- callbacks of the library; an exception cannot pass through C --

    def _load(self, text: bytes, module: Any) -> int:
        def load() -> None:
            ptx = text.decode()
            self._modules.append((ptx, read(ptx)))
            module[0] = len(self._modules)

        return self._guarded(INVALID_PTX, load)

    def _find(self, module: int, name: bytes, function: Any) -> int:
        def find() -> None:
            ptx, kernel = self._modules[module - 1]
            if name.decode() != kernel.name:
                raise LookupError(f"the module has no kernel {name.decode()!r}; it has {kernel.name!r}")
            c_kernel = _c_kernel(ptx, kernel)
            function[0] = ctypes.addressof(c_kernel)
            self._kernels[ctypes.addressof(c_kernel)] = ptx, kernel, c_kernel

        return self._guarded(NOT_FOUND, find)

    def _launch(self, launch: Any) -> int:
        def receive() -> None:
            arrived = launch.contents
            ptx, kernel, _ = self._kernels[arrived.kernel]
            self._receive(
                Arrived(
                    ptx,
                    kernel,
                    grid=tuple(arrived.grid),
                    block=tuple(arrived.block),
                    cluster=tuple(arrived.cluster),
                    shared_bytes=arrived.shared,
                    cooperative=bool(arrived.cooperative),
                    overlapping=bool(arrived.overlapping),
                    parameters=ctypes.string_at(arrived.parameters, arrived.parameter_bytes),
                )
            )

        return self._guarded(LAUNCH_FAILED, receive)

    def _guarded(self, code: int, call: Callable[[], None]) -> int:
        try:
            call()
        except BaseException as exception:
            self._failed.exception = exception
            self._library.loom_cuda_explain(code, f"{type(exception).__name__}: {exception}".encode())
            return code
        return SUCCESS


def _c_kernel(ptx: str, kernel: Kernel) -> _Kernel:
    target = re.search(r"^\.target\s+sm_(\d+)([af]?)", ptx, re.M)
    if target is None:
        raise ValueError("the module's text has no .target")
    register_limit = re.search(r"^\.maxnreg\s+(\d+)", ptx, re.M)
    parameters = [_Parameter(each.offset, each.size) for each in kernel.parameters.values()]
    return _Kernel(
        name=kernel.name.encode(),
        parameters=(_Parameter * len(parameters))(*parameters),
        parameter_count=len(parameters),
        parameter_bytes=kernel.parameter_bytes,
        capability=int(target[1]),
        for_no_other=bool(target[2]),
        threads=(_i32 * 3)(kernel.threads, 1, 1),
        static_shared=kernel.shared_bytes,
        dynamic_shared=max(48 * 1024 - kernel.shared_bytes, 0),
        registers=int(register_limit[1]) if register_limit else 0,
    )


# ---- loading it ----------------------------------------------------------------------------------------------------


@functools.cache
def load(receive: Callable[[Arrived], None]) -> Library:
    """Load the library into this process; return it. It passes launches to `receive`.

    Anything that loads libcuda.so.1 afterwards, by whatever path, gets this one, because a process has one library per
    name. So Triton's driver finds it without being told, and no real GPU can be used beside it.
    """
    refuse_beside_a_gpu()
    return Library(_built(), receive)


def refuse_beside_a_gpu(devices: str = "/dev", loaded: str = FILE) -> None:
    """Raise `RealDriver` if NVIDIA's library is in this process, or if there is a GPU that PyTorch might use later."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(loaded, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        if not hasattr(library, "loom_cuda_connect"):
            raise RealDriver(
                "a real GPU's driver (libcuda.so.1) is loaded in this process, next to which none can be emulated: "
                "emulate in a process that has not touched CUDA, started with CUDA_VISIBLE_DEVICES= (empty)"
            )
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    gpus = [name for name in ("nvidiactl", "dxg") if os.path.exists(os.path.join(devices, name))]
    if gpus and torch.version.cuda is not None and not hidden:
        raise RealDriver(
            f"this machine has a GPU ({devices}/{gpus[0]}), which this process could no longer use once one is "
            "emulated in it: start the process with CUDA_VISIBLE_DEVICES= (empty)"
        )


def _built() -> str:
    """Build the library in a directory of its own; return its path."""
    from triton.backends import nvidia

    headers = Path(str(nvidia.__file__)).parent / "include"
    if not (headers / "cuda.h").exists():
        raise toolchain.BuildError(f"this Triton has no {headers}/cuda.h, which the library is built from")
    cuda = hashlib.sha256((headers / "cuda.h").read_bytes()).hexdigest()
    binary = toolchain.build_library(
        f'#include "gpu/libcuda.cpp"  // with a cuda.h whose hash is {cuda}\n',
        f"-I{headers}",
        "-fvisibility=default",
        f"-Wl,-soname,{FILE}",
    )
    own = f"cuda-{hashlib.sha256(binary).hexdigest()[:32]}"
    try:
        return storage.keep(binary, os.path.join(storage.room("loom"), own), FILE)
    except OSError:  # a cache that cannot be written
        return storage.keep(binary, os.path.join(storage.process_directory().name, own), FILE)
