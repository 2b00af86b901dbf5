"""Devices of this machine: their capabilities and the launch choices tuned for them."""

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
    """Return the capabilities that PyTorch reports for a device of this machine, without tuned choices. A device newer
    than the table is treated as the nearest older one."""
    if device.type == "cpu":
        return Capabilities.of("cpu")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        target = properties.gcnArchName.split(":")[0]
        capabilities = TABLE.get(target, TABLE["gfx942"])
    else:
        compute_capability = 10 * properties.major + properties.minor
        older = [t for t in TABLE if t.startswith("sm_") and int(t[3:]) <= compute_capability]
        if not older:
            raise RuntimeError(
                f"{properties.name} is an sm_{compute_capability}; Weft's kernels need sm_80 or later"
            )
        target, capabilities = f"sm_{compute_capability}", TABLE[max(older, key=lambda t: int(t[3:]))]
    return _of_size(capabilities, target, properties.multi_processor_count)


@functools.cache
def of_device(device: torch.device) -> Capabilities:
    """Return the capabilities of a device of this machine."""
    capabilities = facts_of(device)
    return _with(capabilities, tuned_for(capabilities.target, device_name(device)))


@functools.cache
def _of_size(capabilities: Capabilities, target: str, multiprocessors: int) -> Capabilities:
    return replace(capabilities, target=target, multiprocessors=multiprocessors)


@functools.cache
def _with(capabilities: Capabilities, tuned: Tuned) -> Capabilities:
    return capabilities if tuned is NOTHING_TUNED else replace(capabilities, tuned=tuned)


@functools.cache
def of_target(target: str) -> Capabilities:
    """Return the capabilities of a named target, with tuned choices if `WEFT_CHOICES` names a file; "cpu" is this
    machine's CPU."""
    if target == "cpu":
        return of_device(torch.device("cpu"))
    return _with(Capabilities.of(target), tuned_for(target))


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of a device of this machine, under which its tuned choices are filed."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"cpu {model[1].strip() if model else ''}".strip()
