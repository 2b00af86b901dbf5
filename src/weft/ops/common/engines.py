"""Engines of products and attention, Weft's kernels or another library's: recording which one ran, and rejecting a
requested one that cannot."""

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
    """Return whether any `record_engines` block is active."""
    return bool(_recorded)


def note_engine(used: Any) -> None:
    """Add an entry to every active record."""
    for record in _recorded:
        record.append(used)


def require_engine(
    engine: str, engines: tuple[str, ...], unsupported_reason: Callable[[], str | None]
) -> None:
    """Raise an error unless `engine` is one of `engines` and, if it is a library's, can compute the call."""
    if engine not in engines:
        names = ", ".join(map(repr, engines[:-1]))
        raise ValueError(f"engine must be {names} or {engines[-1]!r}; got {engine!r}")
    if engine not in ("auto", "weft"):
        # The compiler cannot look inside a QTensor: unsupported codes are only found when the graph runs.
        missing = unsupported_reason()
        if missing is not None:
            raise ValueError(f"engine={engine!r} lacks {missing}: leave out engine=, or take 'weft'")
