"""The scopes that are open: who hears of launches, and what these are instrumented for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from triton import knobs
from triton.runtime import driver

from ..device import launcher
from ..features import COUNT, SANITIZE
from .watched import Checker, Listener

Scope = TypeVar("Scope", bound=Listener)


class Scopes:
    """The scopes that see a launch. As the choice of a device is, they are the same for every thread."""

    def __init__(self) -> None:
        self.sanitizers: list[Checker] = []
        self.counters: list[Listener] = []

    @property
    def modes(self) -> tuple[str, ...]:
        """What a kernel that is launched now has to do at each access."""
        return (SANITIZE,) * bool(self.sanitizers) + (COUNT,) * bool(self.counters)

    @property
    def sanitizer(self) -> Checker | None:
        """The innermost one, which is the only one that checks a launch."""
        return self.sanitizers[-1] if self.sanitizers else None

    @contextmanager
    def opened(self, scopes: list[Scope], scope: Scope) -> Iterator[None]:
        """Adds a scope to the sanitizers or to the counters. Launches are instrumented for it on a device that is made
        while it is open."""
        self.open(scopes, scope)
        try:
            yield
        finally:
            scopes[:] = [other for other in scopes if other is not scope]
            if not self.modes:
                launcher.UNWATCHED.remove(self.miss_plain)
                knobs.runtime.launch_enter_hook.remove(self.miss_elsewhere)

    def open(self, scopes: list[Scope], scope: Scope, outermost: bool = False) -> None:
        """The same for good."""
        if not self.modes:
            launcher.UNWATCHED.append(self.miss_plain)
            knobs.runtime.launch_enter_hook.add(self.miss_elsewhere)
        scopes.insert(0 if outermost else len(scopes), scope)

    # -- launches that no scope sees --

    def miss(self, kernel: str, reason: str, modes: Collection[str] = (SANITIZE, COUNT)) -> None:
        """Tells the scopes that work in these modes of a launch that they have missed."""
        if SANITIZE in modes and self.sanitizer is not None:
            self.sanitizer.miss(kernel, reason)
        if COUNT in modes:
            for counter in self.counters:
                counter.miss(kernel, reason)

    def miss_plain(self, kernel: str) -> None:
        """Hears of a launch on the CPU without instruments."""
        self.miss(
            kernel, "it was compiled without instruments, before the scope was opened or on another device"
        )

    def miss_elsewhere(self, launch_metadata: Any) -> None:
        """Hears of every launch that Triton makes. Loom's launchers speak for themselves; a GPU's do not."""
        target = driver.active.get_current_target()
        if target.backend != "cpu":
            self.miss(launch_metadata.data["name"], f"it was launched on {target.backend}")


SCOPES = Scopes()
