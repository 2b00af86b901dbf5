"""A launch: the arguments as C sees them, the memory and the threads it gets, and the call itself."""

from __future__ import annotations

import copy
import ctypes
import functools
import glob
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import DeviceAssertion, toolchain


def load(binary: bytes, name: str) -> tuple[ctypes.CDLL, Any]:
    """A kernel's shared object, and the function in it that launches the kernel."""
    library = toolchain.load(binary, name)
    function = library.loom_launch
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    function.argtypes = [ctypes.c_char_p, i32, i32, i32, i32, pointer, pointer, pointer]
    function.restype = i32
    return library, function


class LoomLauncher:
    """Launches one compiled kernel. Triton makes one per kernel and calls it once per launch."""

    poisoned = False  # every program begins with scratch memory that is full of 0xFF

    def __init__(self, src: Any, metadata: Any) -> None:
        from torch import get_num_threads

        self.pack = argument_packer(src.signature)
        self.threads = _threads(metadata, get_num_threads)
        self.scratch_bytes = -(-metadata.scratch_bytes // 64) * 64
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
        failed = 0
        programs = grid_x * grid_y * grid_z
        if programs >= 2**31 or grid_x < 0 or grid_y < 0 or grid_z < 0:
            check_extents(grid_x, grid_y, grid_z)
        if programs:
            own, threads = _own.memory, self.threads(programs)
            own.status.poisoned = self.poisoned or _poisoned
            failed = function(
                self.pack(args),
                grid_x,
                grid_y,
                grid_z,
                threads,
                self.gomp_parallel,
                own.scratch(threads * self.scratch_bytes),
                own.status_address,
            )
        if exit_hook is not None:
            exit_hook(launch_metadata)
        if failed:
            own.raise_failure(self.name)


class WatchedLauncher(LoomLauncher):
    """Launches an instrumented kernel and hands what it saw to the scopes that are open (see `witness`)."""

    takes_tensors = True  # a caller that has tensors gives those, not their addresses
    poisoned = True

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.told = _moved(metadata.witnessed, src)
        self.fields = list(fields(src.signature))
        self.pointers = [field for field in self.fields if field.code == "P"]
        self.names = list(src.signature)
        self.constants = getattr(src, "constants", {})

    def reaching(self, tensors: Sequence[Any]) -> Callable[..., None]:
        """The launcher for a launch that finds the addresses of these tensors in memory."""
        return functools.partial(self, reached=tensors)

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, *rest: Any, reached: Sequence[Any] = ()
    ) -> None:
        from . import witness

        hidden, args = rest[:6], rest[6:]  # stream, function, metadata and hooks; then the kernel's own
        pointers = [(field.name, _at(args, field.path)) for field in self.pointers]
        watched = witness.Watched(self.name, self.told, pointers, (grid_x, grid_y, grid_z), reached)
        broken = list(self.broken_promises(args))
        for field, argument in zip(
            self.pointers, watched.arguments, strict=False
        ):  # those reached through memory come after them
            if argument.is_meta:
                args = _with(args, field.path, argument.address)  # nothing is there: the launch is dry
        status = _own.memory.status
        with witness.ARENA.lock:
            watched.prepare(self.threads(grid_x * grid_y * grid_z))
            status.witness = watched.address
            try:
                super().__call__(grid_x, grid_y, grid_z, *hidden, *args)
            except DeviceAssertion:
                watched.tell(broken)  # what tripped it, perhaps
                raise
            finally:
                status.witness = None
                watched.done()
        watched.tell(broken)

    def broken_promises(self, args: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
        """Arguments that the kernel was compiled for and that are others now: a caller may reuse a compiled kernel."""
        for field, divisor in zip(self.fields, self.told["divisible"], strict=True):
            name, value = field.name, _at(args, field.path)
            value = (
                address(value, name) if field.code == "P" and not getattr(value, "is_meta", False) else value
            )
            if divisor > 1 and isinstance(value, int) and value % divisor:
                yield name, f"{name} is {value}, but the kernel was compiled for multiples of {divisor}"
        for path, constant in self.constants.items():
            value = _at(args, path) if isinstance(path, tuple) and path[0] < len(args) else constant
            if isinstance(constant, int) and isinstance(value, int) and value != constant:
                name = str(self.names[path[0]])
                yield name, f"{name} is {value}, but the kernel was compiled for {constant}"


def _moved(told: dict[str, Any], src: Any) -> dict[str, Any]:
    """With the file that the kernel is in now: Triton's cache finds kernels by their text, wherever that was."""
    was = told["location"].rpartition(":")[0]
    now = getattr(getattr(getattr(src, "fn", None), "fn", None), "__code__", None)
    if now is None or now.co_filename == was:
        return told

    def moved(location: str) -> str:
        file, _, line = location.rpartition(":")
        return f"{now.co_filename}:{line}" if file == was else location

    sites = [{**s, "location": moved(s["location"]), "called": moved(s["called"])} for s in told["sites"]]
    return {**told, "location": moved(told["location"]), "sites": sites}


def _at(args: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        args = getattr(args, step) if isinstance(step, str) else args[step]
    return args


def _with(args: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested arguments with another value in one place."""
    step, *rest = path
    inner = _with(_at(args, (step,)), tuple(rest), value) if rest else value
    if isinstance(step, str):
        args = copy.copy(args)
        setattr(args, step, inner)
        return args
    return (*args[:step], inner, *args[step + 1 :])


def _threads(metadata: Any, available: Callable[[], int]) -> Callable[[int], int]:
    """How many threads run a launch, from its number of programs."""
    if metadata.launch_cooperative_grid:  # programs wait for each other, so all must be under way
        if find_gomp_parallel() is None:
            raise RuntimeError("launch_cooperative_grid needs an OpenMP runtime, and torch has loaded none")
        return lambda programs: programs
    if metadata.serial:
        return lambda programs: 1
    return lambda programs: min(programs, available())


def check_extents(*grid: int) -> None:
    """The number of programs has 64 bits; each extent of the grid is a Triton int32."""
    if any(not 0 <= extent < 2**31 for extent in grid):
        raise ValueError(f"each extent of a grid must lie between 0 and 2**31 - 1: {grid}")


class Status(ctypes.Structure):
    """`Status` of launch.h."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("program", ctypes.c_int32 * 3),
        ("message", ctypes.c_char * 496),
        ("witness", ctypes.c_void_p),
        ("poisoned", ctypes.c_int32),
    ]


class ThreadMemory:
    """What launches made by one thread of the caller write to besides their outputs."""

    def __init__(self) -> None:
        self.status = Status()
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
        self.status.code = 0
        raise DeviceAssertion(f"{message} (in program {program} of {kernel})")


_poisoned = False


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Inside a `with` block, every program of every launch begins with scratch memory that is full of 0xFF. A kernel
    that reads there what it has not written gives NaN, or -1, whatever ran before it."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before


class _Own(threading.local):
    def __init__(self) -> None:
        self.memory = ThreadMemory()


_own = _Own()


@functools.lru_cache
def find_gomp_parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses: one pool of threads for both.

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


# ---- arguments ------------------------------------------------------------------------------------------

# Triton's name of a type: its format in the `struct` module, its name in C++.
SCALARS = {
    "i1": ("?", "bool"),
    "u1": ("?", "bool"),
    "i8": ("b", "int8_t"),
    "u8": ("B", "uint8_t"),
    "i16": ("h", "int16_t"),
    "u16": ("H", "uint16_t"),
    "i32": ("i", "int32_t"),
    "u32": ("I", "uint32_t"),
    "i64": ("q", "int64_t"),
    "u64": ("Q", "uint64_t"),
    "fp16": ("e", "uint16_t"),
    "bf16": ("H", "uint16_t"),
    "fp32": ("f", "float"),
    "f32": ("f", "float"),
    "fp64": ("d", "double"),
    "f64": ("d", "double"),
}


def argument_packer(signature: dict[str, Any]) -> Callable[[tuple[Any, ...]], bytes]:
    """A function from a launch's arguments to the bytes of the kernel's `struct Args`.

    It is one expression made for the signature: `pack(address(args[0], 'x_ptr'), args[1])`.
    """
    members = list(fields(signature))
    layout = struct.Struct("@" + "".join(field.code for field in members))
    text = f"lambda args: pack({', '.join(field.expression for field in members)})"
    functions = {"address": address, "single": single, "brain": brain, "is_nan": is_nan}
    packer: Callable[[tuple[Any, ...]], bytes] = eval(text, {"pack": layout.pack, **functions})
    return packer


class Field(NamedTuple):
    """A member of `struct Args`, which is an argument of the kernel in TTIR."""

    name: str  # of the argument in Python that it comes from
    code: str  # its format in the `struct` module
    path: tuple[int | str, ...]  # where its value is among the launch's arguments
    convert: str = ""  # a function of the value

    @property
    def expression(self) -> str:
        value = "args" + "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in self.path)
        if self.code == "P":
            return f"address({value}, {self.name!r})"
        return f"{self.convert}({value})" if self.convert else value


def fields(signature: dict[str, Any]) -> Iterator[Field]:
    for position, (name, kind) in enumerate(signature.items()):
        yield from _fields(kind, (position,), str(name))


def _fields(kind: Any, path: tuple[int | str, ...], name: str) -> Iterator[Field]:
    if isinstance(kind, tuple):
        labels = getattr(kind, "_fields", None)  # of a NamedTuple
        for position, inner in enumerate(kind):
            label = f".{labels[position]}" if labels else f"[{position}]"
            yield from _fields(inner, (*path, position), name + label)
    elif kind.startswith("*"):
        yield Field(name, "P", path)
    elif kind.startswith("tensordesc"):
        # The compiler turns a descriptor into base, shape, strides and two flags, and keeps the shape and
        # strides that the front end had put beside it.
        shape, strides = (
            [(*path, what, d) for d in range(_descriptor_rank(kind))] for what in ("shape", "strides")
        )
        yield Field(name, "P", (*path, "base"))
        yield from (Field(name, "q", place) for place in shape + strides)
        yield Field(name, "?", (*path, "padding"), "is_nan")
        yield Field(name, "?", (*path, "round_f32_to_tf32"))
        yield from (Field(name, "i", extent) for extent in shape)
        yield from (Field(name, "q", stride) for stride in strides)
    elif kind != "constexpr":
        convert = {"fp32": "single", "f32": "single", "bf16": "brain"}.get(kind, "")
        yield Field(name, SCALARS[kind][0], path, convert)


def _descriptor_rank(kind: str) -> int:
    if explicit := re.search(r"input_rank=(\d+)", kind):
        return int(explicit[1])
    block = re.search(r"\[([^]]*)\]", kind)
    assert block is not None, kind
    return block[1].count(",") + 1


def address(argument: Any, name: str) -> int:
    """Where a pointer argument points; refuses memory that the CPU can't reach."""
    try:
        if argument.is_cpu:
            return argument.data_ptr()  # type: ignore[no-any-return]
    except AttributeError:  # a plain address, or a tensor of `triton.reinterpret` or of another library
        if argument is None or isinstance(argument, int):
            return argument or 0
        if getattr(getattr(argument, "device", None), "type", "cpu") == "cpu":
            return argument.data_ptr()  # type: ignore[no-any-return]
    raise ValueError(
        f"argument {name!r} is a tensor on {argument.device}, but the kernel is launched on the CPU: pass a "
        "CPU tensor, or launch on that device (not in triton_loom.active() or TRITON_DEFAULT_BACKEND=cpu)"
    )


def single(value: float) -> float:
    """To float32, where too large a value is infinite (`struct` would refuse it)."""
    return ctypes.c_float(value).value


def is_nan(padding: str) -> bool:
    """What a descriptor pads with."""
    return padding == "nan"


def brain(value: float) -> int:
    """The bits of a bfloat16; cut off rather than rounded, as the GPU drivers do."""
    return int.from_bytes(struct.pack("<f", single(value)), "little") >> 16
