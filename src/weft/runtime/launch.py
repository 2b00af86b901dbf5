"""Launching kernels: a variant is compiled once and then found again by a short key.

A kernel's code depends on its constants, its launch configuration, the dtypes of its arguments, whether every
pointer is a multiple of 16 bytes, and whether an integer needs 64 bits. Nothing else is in the key: no size, no
stride. Where a kernel wants to know that a size is a multiple of 16, that is a constant of its own, chosen by
the op.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..language import TRITON
from . import capabilities
from .capabilities import Capabilities
from .offline import Variant

if TRITON:
    from triton import knobs
    from triton.compiler import ASTSource, compile
    from triton.runtime import driver as drivers

# fp8 tensors are bytes to a kernel: on sm_80 the type does not exist, not even behind a pointer.
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
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Kernel:
    """A `@triton.jit` function as ops use it: `@kernel`, then `Launch(kernel, constants…)`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn  # Triton's JITFunction
        self.name: str = fn.__name__
        self.module: str = fn.__module__
        self.parameters: tuple[str, ...] = tuple(fn.arg_names)
        self.constants = frozenset(p.name for p in fn.params if p.is_constexpr)
        self.variants: dict[tuple[Variant, str], Any] = {}  # (variant, target) -> compiled, in this process
        self._lock = threading.Lock()

    def compiled(self, variant: Variant, driver: Any, index: int) -> Any:
        target = driver.get_current_target()
        key = (variant, f"{target}/{index}")
        with self._lock:
            if key not in self.variants:
                if os.environ.get("WEFT_NO_JIT") == "1":
                    raise RuntimeError(
                        f"{self.name} has no compiled variant for this call, and WEFT_NO_JIT=1 forbids compiling "
                        f"one: {variant}"
                    )
                options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
                self.variants[key] = compile(source(self.fn, variant), target=target, options=options)
            return self.variants[key]


def kernel(fn: Any) -> Any:
    """Decorates a Triton kernel; put it above nothing, `@kernel` stands for `@triton.jit` as well."""
    if not TRITON:
        return fn
    from triton import jit

    return Kernel(jit(fn))


def source(fn: Any, variant: Variant) -> Any:
    pointers = [i for i, (_, kind) in enumerate(variant.signature) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if variant.aligned else {}
    return ASTSource(
        fn=fn, signature=dict(variant.signature), constexprs=dict(variant.constants), attrs=attributes
    )


class Launch:
    """A kernel with its constants and its launch configuration chosen; calling it with a grid and the arguments
    launches it. Ops keep these in a cache of their own, so the constants are hashed once and not per call.
    """

    __slots__ = ("_known", "constants", "kernel", "num_stages", "num_warps")

    def __init__(self, kernel: Any, *, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
        if TRITON and set(constants) != kernel.constants:
            wrong = sorted(set(constants) ^ kernel.constants)
            raise TypeError(f"{kernel.name} and its launch disagree about the constants {', '.join(wrong)}")
        self.kernel, self.num_warps, self.num_stages = kernel, num_warps, num_stages
        self.constants = constants
        self._known: dict[Any, tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """`args` are the kernel's parameters before its constants, in order: tensors, ints, floats or None."""
        if _recorder is not None:
            _recorder.append(self.variant(args))
            return
        key: list[Any] = []
        values: list[Any] = []
        low_bits = 0
        device = None
        for arg in args:
            kind = type(arg)
            if kind is int:
                key.append(arg < 2147483648)
                values.append(arg)
            elif arg is None or kind is float:
                key.append(kind)
                values.append(arg)
            else:
                if device is None:
                    device = arg.device
                address = arg.data_ptr()
                low_bits |= address
                key.append(arg.dtype)
                values.append(address)
        driver = drivers.active
        index = device.index  # type: ignore[union-attr]
        identity = (driver, index, low_bits & 15 == 0, *key)
        found = self._known.get(identity)
        if found is None:
            found = self._prepare(identity, driver, index, args)
        run, function, metadata, constants = found
        enter = knobs.runtime.launch_enter_hook
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._run(found, grid, driver.get_current_stream(index), values)
        if enter is not None:
            return self._run(found, grid, driver.get_current_stream(index), values)
        run(
            grid[0],
            grid[1],
            grid[2],
            driver.get_current_stream(index),
            function,
            metadata,
            None,
            None,
            None,
            *values,
            *constants,
        )

    def _run(self, found: Any, grid: tuple[int, int, int], stream: Any, values: list[Any]) -> None:
        """The uncommon launch: on another device than the current one, or watched by a profiler."""
        run, function, metadata, constants = found
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        described = (
            None if enter is None else {"name": self.kernel.name, "function": function, "stream": stream}
        )
        run(*grid, stream, function, metadata, described, enter, leave, *values, *constants)

    def variant(self, args: tuple[Any, ...]) -> Variant:
        """What is compiled for these arguments."""
        signature: list[tuple[str, str]] = []
        constants = dict(self.constants)
        low_bits = 0
        for name, arg in zip(self.kernel.parameters, args, strict=False):
            if arg is None:
                signature.append((name, "constexpr"))
                constants[name] = None
            elif isinstance(arg, int):
                signature.append((name, "i32" if arg < 2**31 else "i64"))
            elif isinstance(arg, float):
                signature.append((name, "fp32"))
            else:
                signature.append((name, _POINTERS[arg.dtype]))
                low_bits |= arg.data_ptr()
        signature += [(name, "constexpr") for name in self.kernel.parameters[len(args) :]]
        missing = [name for name, kind in signature if kind == "constexpr" and name not in constants]
        if missing:
            raise TypeError(f"{self.kernel.name} was launched without {', '.join(missing)}")
        return Variant(
            module=self.kernel.module,
            kernel=self.kernel.name,
            signature=tuple(signature),
            constants=tuple(constants.items()),
            aligned=low_bits % 16 == 0,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def _prepare(self, identity: Any, driver: Any, index: int | None, args: tuple[Any, ...]) -> Any:
        variant = self.variant(args)
        compiled = self.kernel.compiled(variant, driver, -1 if index is None else index)
        run = compiled.run  # loads the binary on the current device
        constants = tuple(self.constants[name] for name in self.kernel.parameters[len(args) :])
        found = (run, compiled.function, compiled.packed_metadata, constants)
        self._known[identity] = found
        return found


# ---- recording: which variants would run, without compiling or launching any -----------------------------

_recorder: list[Variant] | None = None
_recorded_target: Capabilities | None = None


@contextmanager
def recording(target: str) -> Iterator[list[Variant]]:
    """Collect the variants that ops would launch on `target`, instead of launching them.

    Inputs may be meta tensors; outputs hold nothing. It is how kernels are built and inspected for GPUs that the
    machine does not have. One thread at a time.

    >>> import torch, weft
    >>> with recording("sm_90") as variants:
    ...     _ = weft.rms_norm(torch.empty(8, 128, device="meta"))
    >>> [v.kernel for v in variants]
    ['_norm_kernel']
    """
    global _recorder, _recorded_target
    previous = _recorder, _recorded_target
    _recorder, _recorded_target = [], Capabilities.of(target)
    try:
        yield _recorder
    finally:
        _recorder, _recorded_target = previous


def is_recording() -> bool:
    return _recorder is not None


def capabilities_of(device: torch.device) -> Capabilities:
    """What the device of a call can do: that of the target being recorded, if one is."""
    return _recorded_target or capabilities.of_device(device)
