"""The launch of an instrumented kernel."""

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
from .watched import ARENA, Broken, Kernel, Watched


class WatchedLauncher(LoomLauncher):
    """Launches an instrumented kernel and hands what it saw to the scopes that are open (see `scopes`)."""

    takes_tensors = True  # a caller that has tensors gives those, not their addresses
    poisoned = True
    watched = True

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.names = list(src.signature)
        self.constants = getattr(src, "constants", {})
        told = metadata.witnessed
        moved = self.moved = _mover(told["location"], src)
        self.described = getattr(metadata, "described", "")  # TTIR was compiled without it
        sites = [
            {
                **site,
                **{name: moved(site[name]) for name in ("location", "called")},
                "loads": [moved(load) for load in site["loads"]],
            }
            for site in told["sites"]
        ]
        self.kernel = Kernel(
            name=self.name,
            modes=metadata.witness,
            told=told,
            location=moved(told["location"]),
            sites=sites,
            fields=list(fields(src.signature)),
            constants={self.names[p[0]]: v for p, v in self.constants.items() if _is_whole(p)},
            ttir=functools.partial(_text_in_cache, metadata.hash, src.name),
        )

    def reaching(self, tensors: Sequence[Any]) -> Callable[..., None]:
        """The launcher for a launch that finds the addresses of these tensors in memory."""
        return functools.partial(self, reached=tensors)

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, *rest: Any, reached: Sequence[Any] = ()
    ) -> None:
        hidden, args = rest[:6], rest[6:]  # stream, function, metadata and hooks; then the kernel's own
        if len(args) < len(self.names) and (wrong := problem(self.signature, args)):
            raise TypeError(f"{self.name}: {wrong}")
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
        broken = list(self.broken_promises(values, args))
        if self.described and watched.sanitizer is not None:
            broken += [
                replace(found, location=self.moved(found.location))
                for found in misaligned(watched, self.described)
            ]
        # Arguments that are reached through memory come after the pointers.
        pointers = (field for field in self.kernel.fields if field.code == "P")
        for field, argument in zip(pointers, watched.arguments, strict=False):
            if argument.is_meta:
                args = _with(args, field.path, argument.address)  # nothing is there: the launch is dry
        status = THREAD.memory.status
        with ARENA.lock:
            watched.prepare(self.threads(grid_x * grid_y * grid_z))
            status.witness = watched.address
            try:
                super().__call__(grid_x, grid_y, grid_z, *hidden, *args)
            except DeviceAssertion as error:
                limit = isinstance(error, SpinError)
                watched.ended_early = f"{'the limit of a loop' if limit else 'an assertion'} ended it early"
                self.tell(watched, broken)  # what tripped it, perhaps
                raise
            finally:
                status.witness = None
                watched.done()
        self.tell(watched, broken)

    def tell(self, watched: Watched, broken: list[Broken]) -> None:
        """Tells the scopes that are open, those first that the kernel was not compiled for."""
        others = [mode for mode in SCOPES.modes if mode not in self.kernel.modes]
        SCOPES.miss(self.name, f"it was compiled for {self.kernel.modes[0]}() alone", others)
        watched.tell(broken)

    def broken_promises(self, values: list[Any], args: tuple[Any, ...]) -> Iterator[Broken]:
        """Arguments that the kernel was compiled for and that are others now: a caller may reuse a compiled kernel."""
        for field, value, divisor in zip(
            self.kernel.fields, values, self.kernel.told["divisible"], strict=True
        ):
            name = field.name
            value = (
                address(value, name) if field.code == "P" and not getattr(value, "is_meta", False) else value
            )
            if divisor > 1 and isinstance(value, int) and value % divisor:
                yield Broken(
                    name, f"{name} is {value}, but the kernel was compiled for multiples of {divisor}"
                )
        for path, constant in self.constants.items():
            value = value_at(args, path) if isinstance(path, tuple) and path[0] < len(args) else constant
            if isinstance(constant, int) and isinstance(value, int) and value != constant:
                name = str(self.names[path[0]])
                yield Broken(name, f"{name} is {value}, but the kernel was compiled for {constant}")


def _mover(location: str, src: Any) -> Callable[[str], str]:
    """To the file that the kernel is in now: Triton's cache finds kernels by their text, wherever that was."""
    was = location.rpartition(":")[0]
    code = getattr(getattr(getattr(src, "fn", None), "fn", None), "__code__", None)
    now = code.co_filename if code is not None else was

    def moved(location: str) -> str:
        file, _, line = location.rpartition(":")
        return f"{now}:{line}" if file == was else location

    return moved


def _is_whole(path: Any) -> bool:
    """A constant that is an argument, not a part of one."""
    return isinstance(path, tuple) and len(path) == 1


def _text_in_cache(key: str, name: str) -> str | None:
    """The kernel's TTIR, where Triton has put it when it was compiled."""
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(key).get_file(f"{name[:150]}.ttir")
    return Path(path).read_text() if path else None


def _with(args: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested arguments with another value in one place."""
    step, *rest = path
    inner = _with(value_at(args, (step,)), tuple(rest), value) if rest else value
    if isinstance(step, str):
        args = copy.copy(args)
        setattr(args, step, inner)
        return args
    return (*args[:step], inner, *args[step + 1 :])
