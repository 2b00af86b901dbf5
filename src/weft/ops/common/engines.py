"""What products and attention share of engines, Weft's own kernels or those of other libraries: a record of which one
computed, and the refusal of one that lacks something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_recorded: list[list[Any]] = []


@contextmanager
def record_engines() -> Iterator[list[Any]]:
    """Collect which engine computed each product and each attention inside the block, on any thread: a `Used` or an
    `Attended`, whose `engine` is a name that `engine=` takes.

    >>> import torch, weft
    >>> x = weft.quantize(torch.randn(4, 256), "1x128")
    >>> with weft.record_engines() as used:
    ...     y = weft.matmul(x, weft.quantize(torch.randn(8, 256), "128x128").T)
    >>> used
    [Used(engine='weft', pair='fp8 1x128 x 128x128', m=4, n=8, k=256)]
    """
    used: list[Any] = []
    _recorded.append(used)
    try:
        yield used
    finally:
        # By identity: two empty lists are equal.
        _recorded[:] = [other for other in _recorded if other is not used]


def is_recorded() -> bool:
    """Whether somebody wants to know."""
    return bool(_recorded)


def note_engine(used: Any) -> None:
    """Tell those who record."""
    for record in _recorded:
        record.append(used)


def insist(engine: str, known: tuple[str, ...], speaks_against: Callable[[], str | None]) -> None:
    """Raise an error unless an engine is known and, where a call insists on that of a library, can compute it."""
    if engine not in known:
        names = ", ".join(map(repr, known[:-1]))
        raise ValueError(f"engine must be {names} or {known[-1]!r}; got {engine!r}")
    if engine not in ("auto", "weft"):
        # The compiler cannot look inside a QTensor: what speaks against its codes shows when the graph runs.
        missing = speaks_against()
        if missing is not None:
            raise ValueError(f"engine={engine!r} lacks {missing}: leave out engine=, or take 'weft'")
