"""Capabilities of GPUs (and the CPU) on which the choice of kernels depends."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Fact = int | str | bool | None
Key = tuple[str, tuple[Fact, ...]]  # name of a choice, and its facts


class Tuned:
    """Tuned choices of a device: by name and facts, the config fields that differ. Part of the device's `Capabilities`,
    so that whatever is cached for those is cached for these choices."""

    def __init__(
        self, entries: Mapping[Key, Mapping[str, int]] | None = None, path: Path | None = None
    ) -> None:
        self.entries = dict(entries or {})
        self.path = path  # the file that they come from

    def find(self, name: str, facts: tuple[Fact, ...]) -> Mapping[str, int] | None:
        return self.entries.get((name, facts))


NOTHING_TUNED = Tuned()


@dataclass(frozen=True, eq=False)
class Capabilities:
    """Facts about one target, derived from what Triton 3.7 compiles for it. Equal devices share one object: caches look
    targets up by identity, which costs a launch nothing.

    - `fp8_cast`: hardware converts fp32 to e4m3 or e5m2 with one rounding to nearest even. Without it (sm_80 has no
      such type, sm_89 rounds twice, gfx942 emulates it) kernels encode with integer arithmetic, which gives the same
      bytes.
    - `fp8_saturates`: that conversion also clamps to the largest finite value and has one code for NaN.
    - `fp8_dot`, `mx_dot`, `nvfp4_dot`: matrix instructions take these operands.
    - `descriptors`: tensor descriptors compile to bulk copies.
    - `multiprocessors`: the device's number; for a named target, that of a typical product.
    - `family`: the target whose launch choices hold, which is one that every change compiles. A device newer than the
      table keeps the family of the row that stands for it.
    - `tuned`: the tuned launch choices of this device (`choices.py`).
    """

    target: str
    family: str
    backend: str  # Triton's name: cuda, hip or cpu
    fp8_cast: bool
    fp8_saturates: bool
    fp8_dot: bool
    mx_dot: bool
    nvfp4_dot: bool
    descriptors: bool
    multiprocessors: int
    warp_size: int = 32
    shared_bytes: int = 101_376
    tuned: Tuned = field(default=NOTHING_TUNED, repr=False)

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    @functools.cached_property
    def untuned(self) -> Capabilities:
        """These capabilities with the shipped choices."""
        return replace(self, tuned=NOTHING_TUNED)

    @staticmethod
    def of(target: str) -> Capabilities:
        """Return the capabilities of a named target.

        >>> Capabilities.of("sm_90").fp8_cast, Capabilities.of("sm_89").fp8_cast
        (True, False)
        """
        try:
            return TABLE[target]
        except KeyError:
            raise ValueError(f"unknown target {target!r}; known: {', '.join(TABLE)}") from None


def warp_size_of(target: str) -> int:
    """Return the number of threads in a warp, or in a wave on AMD."""
    return 64 if target.startswith("gfx") else 1 if target == "cpu" else 32


def _row(
    target: str,
    *,
    cast: bool,
    saturates: bool = False,
    dot: bool = False,
    mx: bool = False,
    nvfp4: bool = False,
    descriptors: bool = False,
    multiprocessors: int,
    shared_bytes: int,
    family: str | None = None,
) -> Capabilities:
    backend = "hip" if target.startswith("gfx") else "cpu" if target == "cpu" else "cuda"
    return Capabilities(
        target,
        family or target,
        backend,
        cast,
        saturates,
        dot,
        mx,
        nvfp4,
        descriptors,
        multiprocessors,
        warp_size_of(target),
        shared_bytes,
    )


_HOPPER: dict[str, Any] = {"cast": True, "saturates": True, "dot": True, "descriptors": True}
_BLACKWELL = _HOPPER | {"mx": True, "nvfp4": True}

TABLE = {
    row.target: row
    for row in (
        _row("sm_80", cast=False, multiprocessors=108, shared_bytes=166_912),
        _row("sm_86", cast=False, multiprocessors=84, shared_bytes=101_376, family="sm_80"),
        _row("sm_89", cast=False, dot=True, multiprocessors=142, shared_bytes=101_376),
        _row("sm_90", **_HOPPER, multiprocessors=132, shared_bytes=232_448),
        _row("sm_100", **_BLACKWELL, multiprocessors=148, shared_bytes=232_448),
        _row("sm_103", **_BLACKWELL, multiprocessors=148, shared_bytes=232_448, family="sm_100"),
        # Jetson Thor: the matrix unit and tensor memory of sm_100 on a robot's chip. CUDA 12 called it sm_101.
        _row("sm_110", **_BLACKWELL, multiprocessors=20, shared_bytes=232_448, family="sm_100"),
        _row("sm_120", **_BLACKWELL, multiprocessors=170, shared_bytes=101_376),
        _row("gfx942", cast=False, multiprocessors=304, shared_bytes=65_536),
        _row("gfx950", cast=True, dot=True, mx=True, multiprocessors=256, shared_bytes=163_840),
        # Loom: casts are vector code that rounds once, and every dot runs. The number of programs of a launch must not
        # depend on the number of threads, or sums over programs would.
        _row("cpu", **_BLACKWELL | {"descriptors": False}, multiprocessors=16, shared_bytes=1 << 30),
    )
}

GPUS = tuple(target for target in TABLE if target != "cpu")
