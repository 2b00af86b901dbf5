"""The launch of an instrumented kernel."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..device.arguments import address, fields, problem
from ..device.launcher import THREAD, LoomLauncher
from ..errors import DeviceAssertion
from ..features import COUNT
from .scopes import SCOPES
from .watched import ARENA, Watched


class WatchedLauncher(LoomLauncher):
    """Launches an instrumented kernel and hands what it saw to the scopes that are open (see `scopes`)."""

    takes_tensors = True  # a caller that has tensors gives those, not their addresses
    poisoned = True

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.counted = COUNT in metadata.witness
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
        hidden, args = rest[:6], rest[6:]  # stream, function, metadata and hooks; then the kernel's own
        if len(args) < len(self.names) and (wrong := problem(self.signature, args)):
            raise TypeError(f"{self.name}: {wrong}")
        pointers = [(field.name, _at(args, field.path)) for field in self.pointers]
        watched = Watched(
            self.name,
            self.told,
            pointers=pointers,
            grid=(grid_x, grid_y, grid_z),
            reached=reached,
            sanitizer=SCOPES.sanitizer,
            counters=SCOPES.counters,
            counted=self.counted,
        )
        broken = list(self.broken_promises(args))
        # Arguments that are reached through memory come after the pointers.
        for field, argument in zip(self.pointers, watched.arguments, strict=False):
            if argument.is_meta:
                args = _with(args, field.path, argument.address)  # nothing is there: the launch is dry
        status = THREAD.memory.status
        with ARENA.lock:
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
