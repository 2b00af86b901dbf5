"""The devices of this machine: their capabilities, and the launch choices that were tuned for them."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import torch

from .capabilities import NOTHING_TUNED, TABLE, Capabilities, Tuned
from .choices import tuned_for


@functools.cache
def facts_of(device: torch.device) -> Capabilities:
    """The capabilities of a device of this machine without what was tuned for it, by what PyTorch says about it. A
    device that is newer than the table is taken for the nearest older one."""
    if device.type == "cpu":
        return Capabilities.of("cpu")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        target = properties.gcnArchName.split(":")[0]
        known = TABLE.get(target, TABLE["gfx942"])
    else:
        number = 10 * properties.major + properties.minor
        older = [t for t in TABLE if t.startswith("sm_") and int(t[3:]) <= number]
        if not older:
            raise RuntimeError(f"{properties.name} is an sm_{number}; Weft's kernels need sm_80 or later")
        target, known = f"sm_{number}", TABLE[max(older, key=lambda t: int(t[3:]))]
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
    """The capabilities of a named target with what was tuned for it, if `WEFT_CHOICES` names a file; the CPU is that of
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
