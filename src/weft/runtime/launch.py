"""Kernel launches: a variant is compiled once and then looked up by a short key.

A kernel's code depends on its constants, its launch configuration, the dtypes of its arguments, whether every
pointer is a multiple of 16 bytes, and whether integers have 32 or 64 bits. The key holds nothing else: no size, no
stride. A kernel that needs to know that a size is a multiple of 16 has a constant for it, chosen by the op.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .. import language
from . import bundle, devices
from .arguments import Flat, Parameters, generated
from .capabilities import Capabilities
from .catalogue import catalogue
from .choices import VARIABLE
from .environment import is_on
from .memory import scratch
from .notice import NOTICE
from .variant import Variant, build

# Kernels see fp8 tensors as bytes: sm_80 does not have the type, not even behind a pointer.
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*u8",
    torch.float8_e5m2: "*u8",
    torch.float8_e8m0fnu: "*u8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

# Smaller integers are 32 bits wide in a kernel. The sum of two of them, or of one and a tile (as when a loop counter
# takes its last step), then fits 32 bits too. Products of sizes are computed in 64 bits everywhere.
WIDE = 2**30


class Kernel:
    """`@triton.jit` function as ops use it: `@kernel`, then `Launch(kernel, constants…)`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn  # Triton's JITFunction
        self.name: str = fn.__name__
        self.module: str = fn.__module__
        self.parameters: tuple[str, ...] = tuple(fn.arg_names)
        self.constants = frozenset(p.name for p in fn.params if p.is_constexpr)
        self.variants: dict[tuple[Variant, str], Any] = {}  # (variant, target) -> compiled, in this process
        self._lock = threading.Lock()

    @functools.cached_property
    def arguments(self) -> Callable[..., Flat]:
        """Function from the arguments by name, including structs, to the pointers, integers and floats of a launch:
        `launch(grid, *kernel.arguments(x=..., count=...))`."""
        return self.layout.maker("arguments", Tensor, int, float)

    @functools.cached_property
    def integers(self) -> Callable[..., tuple[int, ...]]:
        """Function from the integers alone, by name, to the tuple that `Launch.bind` takes."""
        return self.layout.maker("integers", int)

    @functools.cached_property
    def tensors(self) -> Callable[..., tuple[tuple[Tensor | None, ...], tuple[float, ...]]]:
        """Function from tensors and floats to the arguments of a bound launch: `bound(*kernel.tensors(x_ptr=...))`."""
        return self.layout.maker("tensors", Tensor, float)

    @functools.cached_property
    def layout(self) -> Parameters:
        """Parameters other than constants, with annotations resolved in the kernel's module."""
        hints = get_type_hints(self.fn.fn)
        return Parameters(self.name, {p: hints.get(p) for p in self.parameters if p not in self.constants})

    def compiled(self, variant: Variant, driver: Any, index: int | None) -> Any:
        """Return the binary for a device of this driver, loaded on it."""
        with _on_device(index):
            return self._compiled(variant, driver, index)

    def _compiled(self, variant: Variant, driver: Any, index: int | None) -> Any:
        target = driver.get_current_target()
        key = (variant, f"{target}/{index}")
        with self._lock:
            if key not in self.variants:
                compiled = bundle.find(self.fn, variant, target)
                if compiled is None and is_on("WEFT_NO_JIT"):
                    raise RuntimeError(self._missing(variant, target, index))
                with ExitStack() as stack:
                    if compiled is None:
                        building = functools.partial(stack.enter_context, NOTICE.building())
                        compiled = build(self.fn, variant, target, building)
                    compiled._init_handles()
                self.variants[key] = compiled
            return self.variants[key]

    def _missing(self, variant: Variant, target: Any, index: int | None) -> str:
        """Return the error for a kernel that may not be compiled: which one is missing, and the command that builds
        it."""
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        tuned = capabilities_of(device).tuned.path
        tiles = "" if tuned is None else f"{VARIABLE}={tuned} "  # tuned choices decide what is launched
        dtypes = dict.fromkeys(
            leaf.kind.lstrip("*") for leaf in variant.leaves() if leaf.kind.startswith("*")
        )
        ops = self._ops()
        name = bundle.name_of(target)
        command = " ".join(
            [f"{tiles}weft aot build --target {name}", *(f"--op {op}" for op in ops), "--out FILE"]
        )
        return (
            f"{self.name}{f' of {ops[0]}' if len(ops) == 1 else ''} is not compiled for {name} with these options and "
            f"dtypes ({', '.join(dtypes)}), and WEFT_NO_JIT forbids compiling it. `{command}` compiles what the "
            f"workloads of its ops launch, and WEFT_BUNDLE=FILE loads that; for other calls see `help(weft.aot)`. The "
            f"variant is {bundle.key_of(variant)[:16]}"
        )

    def _ops(self) -> list[str]:
        """Return the ops of the kernel's family; none for a kernel that families share."""
        folders = self.module.split(".")
        family = ".".join(folders[:3]) if folders[:2] == ["weft", "ops"] else self.module
        return [name for name, op in catalogue.items() if f"{op.launch.__module__}.".startswith(f"{family}.")]


def _on_device(index: int | None) -> Any:
    """Return a context in which the GPU with this index is the current device; the CPU has no index."""
    return nullcontext() if index is None else torch.cuda.device(index)


def kernel(fn: Any) -> Any:
    """Decorate a Triton kernel: `@kernel` replaces `@triton.jit`."""
    triton = language.triton  # determines whether Triton can be imported
    return Kernel(triton.jit(fn)) if language.TRITON else fn


@functools.cache
def _reader(count: int) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], int]]:
    """Return a function of `count` tensors (or None) that returns their dtypes, their addresses, and the bits set in
    any address. It is generated without a loop, since it runs on every launch."""
    numbers = range(count)
    lines = [f"def read({', '.join(f't{i}' for i in numbers)}):"]
    lines.append(f"    {''.join(f'd{i} = a{i} = ' for i in numbers)}None; bits = 0")
    lines += [
        f"    if t{i} is not None: d{i} = t{i}.dtype; a{i} = t{i}.data_ptr(); bits |= a{i}" for i in numbers
    ]
    dtypes, addresses = ("".join(f"{letter}{i}, " for i in numbers) for letter in "da")
    lines.append(f"    return ({dtypes}), ({addresses}), bits")
    return generated("\n".join(lines), "read")


class Launch:
    """Kernel with its constants and launch configuration chosen. Calling it launches.

    `Launch.of` returns the same object for the same constants, so that a call does not have to inspect them all. A
    kernel's constants are its last parameters. The others are passed as pointers, integers and floats, in this order;
    `kernel.arguments(...)` sorts them, which is simplest with structs.
    """

    __slots__ = ("_cache", "constants", "kernel", "num_stages", "num_warps", "read")

    def __init__(self, kernel: Any, *, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
        if set(constants) != kernel.constants:
            wrong = sorted(set(constants) ^ kernel.constants)
            raise TypeError(f"{kernel.name} and its launch disagree about the constants {', '.join(wrong)}")
        self.kernel, self.num_warps, self.num_stages = kernel, num_warps, num_stages
        self.constants = constants
        self.read = _reader(sum(leaf.kind is Tensor for leaf in kernel.layout.leaves))
        self._cache: dict[Any, _Prepared] = {}

    @staticmethod
    @functools.cache
    def of(kernel: Any, *, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> Launch:
        return Launch(kernel, num_warps=num_warps, num_stages=num_stages, **constants)

    def bind(self, grid: tuple[int, int, int], **integers: Any) -> BoundLaunch:
        """Bind the grid and the integers, by name. A struct is passed as a tuple of its integers, or as its one member
        that has them."""
        return BoundLaunch(self, grid, self.kernel.integers(**integers))

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor | None, ...],
        integers: tuple[int, ...],
        floats: tuple[float, ...] = (),
        *,
        reached: Sequence[Tensor] = (),
    ) -> None:
        """Launch `grid` programs. A pointer that is None is a constant of the compiled code; the first pointer is never
        None. `reached` are tensors whose addresses the kernel reads from memory, which a sanitizer must know."""
        if _observer is not None and not _observer(self, grid, pointers, integers, floats):
            return
        wide = max(integers) >= WIDE
        dtypes, addresses, low_bits = self.read(*pointers)
        driver, index = language.driver.active, pointers[0].device.index  # type: ignore[union-attr]
        identity = (driver, index, low_bits % 16 == 0, wide, dtypes)
        prepared = self._cache.get(identity)
        if prepared is None:
            prepared = self.prepare(identity, pointers, len(integers))
        if prepared.takes_tensors:
            addresses = pointers
            if reached:
                prepared = prepared._replace(run=prepared.run.reaching(reached))
        _start(prepared, driver, index, grid, (*addresses, *integers, *floats))

    def variant(self, pointers: tuple[Tensor | None, ...], wide: bool, integers: int) -> Variant:
        """Return the variant to compile for these arguments. All integers have 64 bits if `wide`, else 32."""
        kinds = ["constexpr" if tensor is None else _POINTERS[tensor.dtype] for tensor in pointers]
        kinds += ["i64" if wide else "i32"] * integers
        layout = self.kernel.layout
        floats = len(layout.leaves) - len(kinds)
        if floats < 0:
            raise TypeError(f"{self.kernel.name} takes {-floats} fewer arguments than it was launched with")
        kinds += ["fp32"] * floats
        leaves = {leaf.name: kind for leaf, kind in zip(layout.leaves, kinds, strict=True)}
        absent = {name: None for name, kind in leaves.items() if kind == "constexpr"}
        signature = layout.nested(leaves) | dict.fromkeys(self.constants, "constexpr")
        addresses = [tensor.data_ptr() for tensor in pointers if tensor is not None]
        return Variant(
            module=self.kernel.module,
            kernel=self.kernel.name,
            signature=tuple((name, signature[name]) for name in self.kernel.parameters),
            constants=tuple((absent | self.constants).items()),
            aligned=all(address % 16 == 0 for address in addresses),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def prepare(self, identity: Any, pointers: tuple[Tensor | None, ...], integers: int) -> _Prepared:
        """Return the compiled kernel for a call with such arguments, loaded and cached. `identity` is all that selects
        it: driver, device index, whether pointers are aligned and integers wide, dtypes."""
        prepared = self._cache.get(identity)
        if prepared is None:
            driver, index, _, wide, _ = identity
            compiled = self.kernel.compiled(self.variant(pointers, wide, integers), driver, index)
            run = compiled.run
            if index is not None and getattr(compiled.metadata, "global_scratch_size", 0) > 0:
                run = _with_scratch(run, index)
            # Loom's sanitizer and counters need the tensors; other launchers are faster with addresses.
            takes_tensors = getattr(run, "takes_tensors", False)
            nested = run if self.kernel.layout.is_flat else self.kernel.layout.nesting(run)
            constants = tuple(
                self.constants[name] for name in self.kernel.parameters if name in self.constants
            )
            prepared = _Prepared(
                self.kernel.name,
                nested,
                run,
                compiled.function,
                compiled.packed_metadata,
                constants,
                takes_tensors,
            )
            self._cache[identity] = prepared
        return prepared


class BoundLaunch:
    """Launch whose grid and integers are bound as well: a call passes only its tensors and floats.

    An op that caches one per layout of its arguments does not inspect their sizes and strides again.
    """

    __slots__ = ("_cache", "_rest", "_wide", "grid", "integers", "launch")

    def __init__(self, launch: Launch, grid: tuple[int, int, int], integers: tuple[int, ...]) -> None:
        self.launch, self.grid, self.integers = launch, grid, integers
        # Compare each with a constant: comparing symbolic sizes with each other would split cases.
        self._wide = any(integer >= WIDE or integer < -WIDE for integer in integers)
        # With structs, the integers are bound into the launcher.
        self._rest = integers if launch.kernel.layout.is_flat else ()
        self._cache: dict[Any, _Prepared] = {}

    def __call__(self, pointers: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        if _observer is not None and not _observer(self.launch, self.grid, pointers, self.integers, floats):
            return
        dtypes, addresses, low_bits = self.launch.read(*pointers)
        driver, index = language.driver.active, pointers[0].device.index  # type: ignore[union-attr]
        identity = (driver, index, low_bits % 16 == 0, self._wide, dtypes)
        prepared = self._cache.get(identity)
        if prepared is None:
            prepared = self.launch.prepare(identity, pointers, len(self.integers))
            if not self._rest:
                prepared = prepared._replace(
                    run=self.launch.kernel.layout.binder(prepared.nested_run, *self.integers)
                )
            self._cache[identity] = prepared
        _, run, _, function, metadata, constants, takes_tensors = prepared
        if takes_tensors:
            addresses = pointers
        if _is_watched(index):
            _start(prepared, driver, index, self.grid, (*addresses, *self._rest, *floats))
            return
        # What `_start` does, without making a tuple of the arguments first.
        stream = driver.get_current_stream(index)
        run(
            *self.grid,
            stream,
            function,
            metadata,
            None,
            None,
            None,
            *addresses,
            *self._rest,
            *floats,
            *constants,
        )


class _Prepared(NamedTuple):
    """Compiled kernel, ready to be launched."""

    name: str
    run: Any  # the launcher, which takes flat arguments
    nested_run: Any  # Triton's own launcher, which takes structs as tuples
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    takes_tensors: bool  # rather than their addresses


def _start(
    kernel: _Prepared, driver: Any, index: int | None, grid: tuple[int, int, int], arguments: tuple[Any, ...]
) -> None:
    _, run, _, function, metadata, constants, _ = kernel
    if not _is_watched(index):
        stream = driver.get_current_stream(index)
        run(*grid, stream, function, metadata, None, None, None, *arguments, *constants)
        return
    hooks = language.knobs.runtime
    with _on_device(index):
        stream = driver.get_current_stream(index)
        info = {"name": kernel.name, "function": function, "stream": stream}
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        run(*grid, stream, function, metadata, info, enter, leave, *arguments, *constants)


def _is_watched(index: int | None) -> bool:
    """Return whether a launch on this device must call hooks, or change the current device first."""
    enter = language.knobs.runtime.launch_enter_hook
    return bool(getattr(enter, "calls", enter)) or (
        index is not None and index != torch.cuda.current_device()
    )


def _with_scratch(run: Any, index: int) -> Any:
    """Wrap a launcher for a kernel that keeps tensor descriptors in global memory. Triton requests that memory from an
    allocator, which is set only during the call."""
    from triton.runtime._allocation import _allocator

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        # Once freed, only later work on the stream reuses the memory.
        memory = scratch((size + alignment,), torch.uint8, torch.device("cuda", index))
        start = -memory.data_ptr() % alignment
        return memory[start : start + size]

    def launch(*args: Any) -> None:
        token = _allocator.set(allocate)
        try:
            run(*args)
        finally:
            _allocator.reset(token)

    return launch


# ---- observing launches ---------------------------------------------------------------------------------

# Takes the launch, its grid, pointers, integers and floats; returns whether the launch takes place.
_Observer = Callable[
    ["Launch", tuple[int, int, int], tuple[Tensor | None, ...], tuple[int, ...], tuple[float, ...]], bool
]

_observer: _Observer | None = None
_is_recording = False
_chosen_target: Capabilities | None = None


@contextmanager
def observing(note: Callable[..., object]) -> Iterator[None]:
    """Call `note(launch, grid, pointers, integers, floats)` before every launch of a kernel, on any thread."""
    outer = _observer

    def observer(*call: Any) -> bool:
        note(*call)
        return outer is None or outer(*call)

    with _observed_by(observer):
        yield


@contextmanager
def skipping_launches() -> Iterator[None]:
    """Skip this thread's launches, without compiling their kernels."""
    thread, outer = threading.get_ident(), _observer

    def observer(*call: Any) -> bool:
        return threading.get_ident() != thread and (outer is None or outer(*call))

    with _observed_by(observer):
        yield


@contextmanager
def _observed_by(observer: _Observer) -> Iterator[None]:
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


@contextmanager
def recording(target: str) -> Iterator[list[Variant]]:
    """Collect the variants that ops would launch on `target`, instead of launching them.

    Inputs may be meta tensors; outputs hold nothing. This is how kernels are built and inspected for GPUs that the
    machine does not have. Only one thread may record at a time.

    >>> import torch, weft
    >>> with recording("sm_90") as variants:
    ...     _ = weft.rms_norm(torch.empty(8, 128, device="meta"))
    >>> [v.kernel for v in variants]
    ['norm_kernel']
    """
    variants: list[Variant] = []

    def record(launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        variants.append(launch.variant(pointers, max(integers) >= WIDE, len(integers)))

    with recorded_by(record, target):
        yield variants


@contextmanager
def recorded_by(note: Callable[..., object], target: str) -> Iterator[None]:
    """Call `note(launch, grid, pointers, integers, floats)` instead of launching, with what ops would launch on
    `target`."""
    global _is_recording

    def observer(*call: Any) -> bool:
        note(*call)
        return False

    previous, _is_recording = _is_recording, True
    try:
        with choosing_for(target), _observed_by(observer):
            yield
    finally:
        _is_recording = previous


@contextmanager
def choosing_for(target: str | Capabilities) -> Iterator[None]:
    """Launch on this machine's device what ops would launch on `target`: the same tiles and conversions."""
    global _chosen_target
    chosen = devices.of_target(target) if isinstance(target, str) else target
    previous, _chosen_target = _chosen_target, chosen
    try:
        yield
    finally:
        _chosen_target = previous


def is_recording() -> bool:
    return _is_recording


def capabilities_of(device: torch.device) -> Capabilities:
    """Return the capabilities of a call's device: of the target of `choosing_for` if there is one, else of the GPU that
    Triton's driver emulates (`triton_loom.emulate`), else of the device itself."""
    if _chosen_target is not None:
        return _chosen_target
    if (
        torch.compiler.is_compiling()
    ):  # which needs only the facts, and cannot trace the search for a tuned file
        return devices.facts_of(device)
    emulated = getattr(language.driver._active, "emulates", None) if language.TRITON else None
    return devices.of_device(device) if emulated is None else devices.of_target(emulated)
