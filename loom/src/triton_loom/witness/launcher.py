"""Launcher of instrumented kernels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..device.arguments import address, fields, problem, value_at
from ..device.launcher import THREAD, LoomLauncher
from ..errors import DeviceAssertion, SpinError
from ..features import COUNT, SANITIZE
from .descriptors import misaligned
from .scopes import SCOPES
from .watched import ARENA, BrokenPromise, Kernel, Watched


class WatchedLauncher(LoomLauncher):
    """Launcher of an instrumented kernel; hands what it observed to the open scopes (see `scopes`)."""

    takes_tensors = True  # callers pass tensors instead of addresses, if they have them
    poisoned = True
    watched = True

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.names = list(src.signature)
        self.constants = getattr(src, "constants", {})
        witnessed = metadata.witnessed
        relocate = self.moved = _relocator(witnessed["location"], src)
        self.described = getattr(metadata, "described", "")  # kernels compiled from TTIR have none
        sites = [
            {
                **site,
                **{name: relocate(site[name]) for name in ("location", "called")},
                "loads": [relocate(load) for load in site["loads"]],
            }
            for site in witnessed["sites"]
        ]
        self.kernel = Kernel(
            name=self.name,
            modes=metadata.witness,
            metadata=witnessed,
            location=relocate(witnessed["location"]),
            sites=sites,
            fields=list(fields(src.signature)),
            constants={self.names[p[0]]: v for p, v in self.constants.items() if _is_argument(p)},
            ttir=functools.partial(_cached_text, metadata.hash, src.name),
        )

    def reaching(self, tensors: Sequence[Any]) -> Callable[..., None]:
        """Return the launcher for a launch that reads the addresses of these tensors from memory."""
        return functools.partial(self, reached=tensors)

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, *rest: Any, reached: Sequence[Any] = ()
    ) -> None:
        hidden, args = rest[:6], rest[6:]  # stream, function, metadata and hooks; then the kernel's own
        if len(args) < len(self.names) and (reason := problem(self.signature, args)):
            raise TypeError(f"{self.name}: {reason}")
        modes = self.kernel.modes
        values = [value_at(args, field.path) for field in self.kernel.fields]
        watched = Watched(
            self.kernel,
            values,
            grid=(grid_x, grid_y, grid_z),
            reached=reached,
            sanitizer=SCOPES.sanitizer if SANITIZE in modes else None,
            counters=SCOPES.counters if COUNT in modes else (),
        )
        broken_promises = list(self.broken_promises(values, args))
        if self.described and watched.sanitizer is not None:
            broken_promises += [
                replace(promise, location=self.moved(promise.location))
                for promise in misaligned(watched, self.described)
            ]
        # Arguments that are reached through memory come after the pointers.
        pointers = (field for field in self.kernel.fields if field.code == "P")
        for field, argument in zip(pointers, watched.arguments, strict=False):
            if argument.is_meta:
                args = _replace_at(
                    args, field.path, argument.address
                )  # no memory behind it: the launch is dry
        status = THREAD.memory.status
        with ARENA.lock:
            watched.prepare(self.threads(grid_x * grid_y * grid_z))
            status.witness = watched.address
            try:
                super().__call__(grid_x, grid_y, grid_z, *hidden, *args)
            except DeviceAssertion as error:
                limit = isinstance(error, SpinError)
                watched.ended_early = f"{'the limit of a loop' if limit else 'an assertion'} ended it early"
                self.report(watched, broken_promises)  # perhaps the cause
                raise
            finally:
                status.witness = None
                watched.done()
        self.report(watched, broken_promises)

    def report(self, watched: Watched, broken_promises: list[BrokenPromise]) -> None:
        """Report to the open scopes, first to those that the kernel was not compiled for."""
        missing = [mode for mode in SCOPES.modes if mode not in self.kernel.modes]
        SCOPES.miss(self.name, f"it was compiled for {self.kernel.modes[0]}() alone", missing)
        watched.report(broken_promises)

    def broken_promises(self, values: list[Any], args: tuple[Any, ...]) -> Iterator[BrokenPromise]:
        """Yield the arguments that violate what the kernel was compiled for: a caller may reuse a compiled kernel."""
        for field, value, divisor in zip(
            self.kernel.fields, values, self.kernel.metadata["divisible"], strict=True
        ):
            name = field.name
            value = (
                address(value, name) if field.code == "P" and not getattr(value, "is_meta", False) else value
            )
            if divisor > 1 and isinstance(value, int) and value % divisor:
                yield BrokenPromise(
                    name, f"{name} is {value}, but the kernel was compiled for multiples of {divisor}"
                )
        for path, constant in self.constants.items():
            value = value_at(args, path) if isinstance(path, tuple) and path[0] < len(args) else constant
            if isinstance(constant, int) and isinstance(value, int) and value != constant:
                name = str(self.names[path[0]])
                yield BrokenPromise(name, f"{name} is {value}, but the kernel was compiled for {constant}")


def _relocator(location: str, src: Any) -> Callable[[str], str]:
    """Return a function that maps locations to the kernel's current file.

    Triton's cache identifies kernels by their text, wherever it was.
    """
    compiled_file = location.rpartition(":")[0]
    code = getattr(getattr(getattr(src, "fn", None), "fn", None), "__code__", None)
    current_file = code.co_filename if code is not None else compiled_file

    def relocate(location: str) -> str:
        file, _, line = location.rpartition(":")
        return f"{current_file}:{line}" if file == compiled_file else location

    return relocate


def _is_argument(path: Any) -> bool:
    """Return whether a path is an entire argument, not a part of one."""
    return isinstance(path, tuple) and len(path) == 1


def _cached_text(key: str, name: str) -> str | None:
    """Read the kernel's TTIR from Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(key).get_file(f"{name[:150]}.ttir")
    return Path(path).read_text() if path else None


def _replace_at(args: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested arguments with the value at one path replaced."""
    step, *rest = path
    inner = _replace_at(value_at(args, (step,)), tuple(rest), value) if rest else value
    if isinstance(step, str):
        args = copy.copy(args)
        setattr(args, step, inner)
        return args
    return (*args[:step], inner, *args[step + 1 :])
