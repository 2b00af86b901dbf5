"""Launches: their memory, their threads, and the call itself."""

from __future__ import annotations

import ctypes
import functools
import glob
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DeviceAssertion, SpinError
from . import toolchain
from .arguments import argument_packer, problem


def load(binary: bytes, name: str) -> tuple[ctypes.CDLL, Any]:
    """Load a kernel's shared object; return it and its function that launches the kernel."""
    library = toolchain.load(binary, name)
    function: Any = library.loom_launch
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    function.argtypes = [ctypes.c_char_p, i32, i32, i32, i32, pointer, pointer, pointer]
    function.restype = i32
    function.library = library  # for callers that need other symbols
    return library, function


UNWATCHED: list[
    Callable[[str], None]
] = []  # callbacks for uninstrumented launches, called with the kernel's name


class LoomLauncher:
    """Launcher of one compiled kernel. Triton makes one per kernel and calls it once per launch."""

    poisoned = False  # every program begins with scratch memory filled with 0xFF
    watched = False  # the kernel is instrumented

    def __init__(self, src: Any, metadata: Any) -> None:
        from torch import get_num_threads

        self.signature = src.signature
        self.pack = argument_packer(src.signature)
        self.threads = _threads(metadata, get_num_threads)
        self.scratch_bytes = -(-metadata.scratch_bytes // 64) * 64
        self.spin_limit = metadata.spin_limit if metadata.spins else None
        self.gomp_parallel = find_gomp_parallel()
        self.name = metadata.name

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: Any,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *args: Any,
    ) -> None:
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if UNWATCHED and not self.watched:
            for callback in UNWATCHED:
                callback(self.name)
        failed = 0
        programs = grid_x * grid_y * grid_z
        if programs >= 2**31 or grid_x < 0 or grid_y < 0 or grid_z < 0 or isinstance(programs, float):
            check_extents(grid_x, grid_y, grid_z)
        if programs:
            memory, threads = THREAD.memory, self.threads(programs)
            memory.status.poisoned = self.poisoned or _poisoned
            if self.spin_limit is not None:
                memory.status.spin_limit = self.spin_limit if _spin_limit is None else _spin_limit
            try:
                packed = self.pack(args)
            except (TypeError, AttributeError, IndexError, struct.error) as error:
                raise TypeError(f"{self.name}: {problem(self.signature, args) or error}") from error
            failed = function(
                packed,
                grid_x,
                grid_y,
                grid_z,
                threads,
                self.gomp_parallel,
                memory.scratch(threads * self.scratch_bytes),
                memory.status_address,
            )
        if exit_hook is not None:
            exit_hook(launch_metadata)
        if failed:
            memory.raise_failure(self.name)


def _threads(metadata: Any, available: Callable[[], int]) -> Callable[[int], int]:
    """Return a function from a launch's number of programs to its number of threads."""
    if metadata.launch_cooperative_grid:  # programs wait for each other, so all must run at once
        if find_gomp_parallel() is None:
            raise RuntimeError("launch_cooperative_grid needs an OpenMP runtime, and torch has loaded none")
        return lambda programs: programs
    if metadata.serial:
        return lambda programs: 1
    return lambda programs: min(programs, available())


def check_extents(*grid: int) -> None:
    """Raise unless each extent of the grid is a Triton int32; the number of programs may need 64 bits."""
    if any(isinstance(extent, float) for extent in grid):
        raise TypeError(
            f"each extent of a grid must be an integer, as `//` and triton.cdiv give them: {grid}"
        )
    if any(not 0 <= extent < 2**31 for extent in grid):
        raise ValueError(f"each extent of a grid must lie between 0 and 2**31 - 1: {grid}")


class Status(ctypes.Structure):
    """Mirror of `Status` in launch.h."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("program", ctypes.c_int32 * 3),
        ("message", ctypes.c_char * 496),
        ("witness", ctypes.c_void_p),
        ("poisoned", ctypes.c_int32),
        ("spin_limit", ctypes.c_double),
        ("interrupts", ctypes.c_void_p),
    ]


_INTERRUPTS = ctypes.create_string_buffer(512)  # `Interrupts` of spin.h, for all threads
_ERRORS: dict[int, type[BaseException]] = {1: DeviceAssertion, 2: SpinError, 3: KeyboardInterrupt}


class ThreadMemory:
    """Memory that launches from one caller's thread write to besides their outputs."""

    def __init__(self) -> None:
        self.status = Status(interrupts=ctypes.addressof(_INTERRUPTS))
        self.status_address = ctypes.addressof(self.status)
        self.size = 0
        self.address: int | None = None
        self.arena: ctypes.c_char

    def scratch(self, size: int) -> int | None:
        if size > self.size:
            self.size = max(size, 2 * self.size)
            self.arena = ctypes.c_char.from_buffer(mmap.mmap(-1, self.size))
            self.address = ctypes.addressof(self.arena)
        return self.address

    def raise_failure(self, kernel: str) -> None:
        program, message = tuple(self.status.program), self.status.message.decode(errors="replace")
        if self.status.code == 2:
            message += f" of {self.status.spin_limit:g} s (TRITON_LOOM_SPIN_LIMIT or the launch's spin_limit; 0: none)"
        raise _ERRORS[self.status.code](f"{message} (in program {program} of {kernel})")


_spin_limit: float | None = None


@contextmanager
def spin_limit(seconds: float) -> Iterator[None]:
    """Limit `while` loops of programs to so many seconds inside a `with` block, whatever their kernels were compiled
    with."""
    global _spin_limit
    outer, _spin_limit = _spin_limit, seconds
    try:
        yield
    finally:
        _spin_limit = outer


_poisoned = False


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Fill scratch memory with 0xFF before every program of every launch inside a `with` block.

    A kernel that reads scratch memory that it has not written gives NaN, or -1, whatever ran before it."""
    global _poisoned
    outer, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = outer


class _Thread(threading.local):
    def __init__(self) -> None:
        self.memory = ThreadMemory()


THREAD = _Thread()  # of the caller's thread


@functools.lru_cache
def find_gomp_parallel() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses: one pool of threads for both.

    Two runtimes would each keep a thread per core spinning between their parallel regions.
    """
    import torch

    bundled = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line[line.index("/") : -1] for line in maps if re.search(r"/lib(g|i)?omp[^/]*$", line)}
    except OSError:
        mapped = set()
    candidates = sorted(mapped, key=lambda path: not path.startswith(bundled))
    candidates += [*glob.glob(f"{bundled}/lib*omp*"), "libgomp.so.1", "libomp.so", "libomp.so.5"]
    for candidate in candidates:
        try:
            return ctypes.cast(ctypes.CDLL(candidate).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
