"""The scopes that are open: who hears of launches, and what these are instrumented for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

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
        scopes.append(scope)
        try:
            yield
        finally:
            scopes[:] = [other for other in scopes if other is not scope]


SCOPES = Scopes()
