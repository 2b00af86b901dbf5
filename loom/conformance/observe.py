"""Recording of Triton kernel launches, through Loom or on an emulated GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Launches:
    """Names of the kernels that were requested and of those that ran to their end, since `clear`.

    A kernel is a function under `@triton.jit`. It is requested where its project launches it and has run when all of
    its programs have. These are two events, because a project may keep compiled kernels and launch those.
    """

    def __init__(self, roots: list[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self.asked: set[str] = set()
        self.ran: set[str] = set()

    def clear(self) -> None:
        self.asked.clear()
        self.ran.clear()

    def name(self, function: Any) -> str | None:
        """Return the kernel's file in its project and its name; None for a kernel from elsewhere.

        A kernel that the project generates counts once, for however many dimensions it was generated."""
        file = Path(function.fn.__code__.co_filename).resolve()
        for root in self.roots:
            if file.is_relative_to(root):
                if root.name == "generated":
                    return "generated:" + re.sub(r"_rank_\d+", "", function.fn.__name__)
                return f"{file.relative_to(root)}:{function.fn.__name__}"
        return None

    def watch(self, launcher_class: Any) -> None:
        """Record every launch from now on by launchers of this class."""
        from triton.runtime.jit import JITFunction

        self._around(JITFunction, "run", before=lambda function: self._note(self.asked, function))
        prepare, launch = launcher_class.__init__, launcher_class.__call__

        def prepared(launcher: Any, src: Any, metadata: Any) -> None:
            prepare(launcher, src, metadata)
            launcher.of = getattr(src, "fn", None)

        def launched(launcher: Any, *args: Any, **kwargs: Any) -> None:
            launch(launcher, *args, **kwargs)
            self._note(self.asked, launcher.of)
            self._note(self.ran, launcher.of)

        launcher_class.__init__, launcher_class.__call__ = prepared, launched

    def _note(self, kernels: set[str], function: Any) -> None:
        name = self.name(function) if function is not None else None
        if name is not None:
            kernels.add(name)

    @staticmethod
    def _around(owner: type, method: str, before: Callable[[Any], None]) -> None:
        original = getattr(owner, method)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            before(self)
            return original(self, *args, **kwargs)

        setattr(owner, method, wrapped)
