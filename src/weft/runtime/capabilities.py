"""What a GPU (or the CPU) can do, as far as the choice of kernels depends on it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .choices import NOTHING_TUNED, Tuned, tuned_for


@dataclass(frozen=True, eq=False)
class Capabilities:
    """Facts about one target, taken from what Triton 3.7 compiles for it. There is one object for devices that are
    alike: what is kept for a target is found by identity, which costs a launch nothing.

    - `fp8_cast`: an fp32 number becomes e4m3 or e5m2 in hardware with one rounding to nearest even. Without it
      (sm_80 has no such type, sm_89 rounds twice, gfx942 emulates it) kernels encode with integer arithmetic:
      the same bytes.
    - `fp8_saturates`: that conversion also clamps to the largest number and has one code for NaN.
    - `fp8_dot`, `mx_dot`, `nvfp4_dot`: matrix instructions that take these operands.
    - `descriptors`: tensor descriptors become bulk copies.
    - `multiprocessors`: how many the device has; for a named target, how many a typical product has.
    - `tuned`: the launch choices that are made otherwise on this device (`choices.py`).
    """

    target: str
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
        """The same with all choices as they are shipped."""
        return replace(self, tuned=NOTHING_TUNED)

    @staticmethod
    def of(target: str) -> Capabilities:
        """The capabilities of a named target.

        >>> Capabilities.of("sm_90").fp8_cast, Capabilities.of("sm_89").fp8_cast
        (True, False)
        """
        try:
            return _TARGETS[target]
        except KeyError:
            raise ValueError(f"unknown target {target!r}; known: {', '.join(_TARGETS)}") from None


def warp_size_of(target: str) -> int:
    """How many threads a warp has, or a wave on AMD."""
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
) -> Capabilities:
    backend = "hip" if target.startswith("gfx") else "cpu" if target == "cpu" else "cuda"
    return Capabilities(
        target,
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


_HOPPER = {"cast": True, "saturates": True, "dot": True, "descriptors": True}
_BLACKWELL = _HOPPER | {"mx": True, "nvfp4": True}

_TARGETS = {
    row.target: row
    for row in (
        _row("sm_80", cast=False, multiprocessors=108, shared_bytes=166_912),
        _row("sm_86", cast=False, multiprocessors=84, shared_bytes=101_376),
        _row("sm_89", cast=False, dot=True, multiprocessors=142, shared_bytes=101_376),
        _row("sm_90", **_HOPPER, multiprocessors=132, shared_bytes=232_448),
        _row("sm_100", **_BLACKWELL, multiprocessors=148, shared_bytes=232_448),
        _row("sm_103", **_BLACKWELL, multiprocessors=148, shared_bytes=232_448),
        _row("sm_120", **_BLACKWELL, multiprocessors=170, shared_bytes=101_376),
        _row("gfx942", cast=False, multiprocessors=304, shared_bytes=65_536),
        _row("gfx950", cast=True, dot=True, mx=True, multiprocessors=256, shared_bytes=163_840),
        # Loom: casts are vector code that rounds once, and every dot runs. The number of programs of a launch
        # must not depend on the number of threads, or sums over programs would.
        _row("cpu", **_BLACKWELL | {"descriptors": False}, multiprocessors=16, shared_bytes=1 << 30),
    )
}


@functools.cache
def facts_of(device: torch.device) -> Capabilities:
    """The capabilities of a device of this machine without what was tuned for it, by what PyTorch says about it. A
    device that is newer than the table is taken for the nearest older one."""
    if device.type == "cpu":
        return Capabilities.of("cpu")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        target = properties.gcnArchName.split(":")[0]
        known = _TARGETS.get(target, _TARGETS["gfx942"])
    else:
        number = 10 * properties.major + properties.minor
        older = [t for t in _TARGETS if t.startswith("sm_") and int(t[3:]) <= number]
        if not older:
            raise RuntimeError(f"{properties.name} is an sm_{number}; Weft's kernels need sm_80 or later")
        target, known = f"sm_{number}", _TARGETS[max(older, key=lambda t: int(t[3:]))]
    return _of_size(known, target, properties.multi_processor_count)


@functools.cache
def of_device(device: torch.device) -> Capabilities:
    """The capabilities of a device of this machine."""
    known = facts_of(device)
    return _with(known, tuned_for(known.target, device_name(device)))


@functools.cache
def _of_size(known: Capabilities, target: str, multiprocessors: int) -> Capabilities:
    return replace(known, target=target, multiprocessors=multiprocessors)


@functools.cache
def _with(known: Capabilities, tuned: Tuned) -> Capabilities:
    return known if tuned is NOTHING_TUNED else replace(known, tuned=tuned)


@functools.cache
def of_target(target: str) -> Capabilities:
    """The capabilities of a named target with what was tuned for it, if `WEFT_TILES` names a file; the CPU is that of
    this machine."""
    if target == "cpu":
        return of_device(torch.device("cpu"))
    return _with(Capabilities.of(target), tuned_for(target))


@functools.cache
def device_name(device: torch.device) -> str:
    """What a device of this machine is called, by which its tuned choices are found."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    about = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", about.read_text()) if about.exists() else None
    return f"cpu {found[1].strip() if found else ''}".strip()
