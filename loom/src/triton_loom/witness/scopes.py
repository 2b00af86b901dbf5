"""Open scopes, which observe launches, and the instruments that kernels need for them."""

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
    """Scopes that observe a launch. They hold for every thread, as the current device does."""

    def __init__(self) -> None:
        self.sanitizers: list[Checker] = []
        self.counters: list[Listener] = []

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the instruments that a kernel launched now needs."""
        return (SANITIZE,) * bool(self.sanitizers) + (COUNT,) * bool(self.counters)

    @property
    def sanitizer(self) -> Checker | None:
        """Return the innermost sanitizer, the only one that checks a launch."""
        return self.sanitizers[-1] if self.sanitizers else None

    @contextmanager
    def opened(self, scopes: list[Scope], scope: Scope) -> Iterator[None]:
        """Add a scope to the sanitizers or to the counters for a `with` block.

        Launches are instrumented for it on a device created while it is open.
        """
        self.open(scopes, scope)
        try:
            yield
        finally:
            scopes[:] = [other for other in scopes if other is not scope]
            if not self.modes:
                launcher.UNWATCHED.remove(self.miss_plain)
                knobs.runtime.launch_enter_hook.remove(self.miss_elsewhere)

    def open(self, scopes: list[Scope], scope: Scope, outermost: bool = False) -> None:
        """Add a scope for the rest of the process."""
        if not self.modes:
            launcher.UNWATCHED.append(self.miss_plain)
            knobs.runtime.launch_enter_hook.add(self.miss_elsewhere)
        scopes.insert(0 if outermost else len(scopes), scope)

    # -- launches that no scope observes --

    def miss(self, kernel: str, reason: str, modes: Collection[str] = (SANITIZE, COUNT)) -> None:
        """Report a missed launch to the scopes that work in these modes."""
        if SANITIZE in modes and self.sanitizer is not None:
            self.sanitizer.miss(kernel, reason)
        if COUNT in modes:
            for counter in self.counters:
                counter.miss(kernel, reason)

    def miss_plain(self, kernel: str) -> None:
        """Report a launch on the CPU whose kernel is not instrumented."""
        self.miss(
            kernel, "it was compiled without instruments, before the scope was opened or on another device"
        )

    def miss_elsewhere(self, launch_metadata: Any) -> None:
        """Report a launch on another device.

        Triton calls this for every launch; Loom's launchers report theirs themselves.
        """
        target = driver.active.get_current_target()
        if target.backend != "cpu":
            self.miss(launch_metadata.data["name"], f"it was launched on {target.backend}")


SCOPES = Scopes()
