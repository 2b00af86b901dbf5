"""Which implementation serves a call: Triton where its active driver launches on the tensor's device, else the
reference in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from ..language import TRITON
from . import loom
from .launch import is_recording

if TRITON:
    from triton.runtime import driver as drivers

Backend = Literal["auto", "triton", "reference"]

_chosen: ContextVar[Backend] = ContextVar("weft_backend", default="auto")
_device_types: dict[object, str] = {}  # a Triton driver -> the type of device it launches on
_without_driver = False


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose the implementation of Weft's ops inside a `with` block.

    `"reference"` runs plain PyTorch: put it around parts of a model to find which op changes a result.
    `"triton"` makes a missing driver an error instead of a detour. `"auto"` is the default.

    >>> import torch, weft
    >>> x = torch.randn(4, 64)
    >>> with weft.backend("reference"):
    ...     y = weft.rms_norm(x)
    """
    if name not in ("auto", "triton", "reference"):
        raise ValueError(f"backend must be 'auto', 'triton' or 'reference'; got {name!r}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def launch_device() -> str | None:
    """The type of device that Triton launches on now: cuda (also for AMD), cpu with Loom if it can build, or None."""
    global _without_driver
    if not TRITON or (_without_driver and drivers._active is None):
        return None
    try:
        driver = drivers.active
    except RuntimeError:  # no driver, or several that want to be it
        _without_driver = True
        return None
    found = _device_types.get(driver)
    if found is None:
        if type(driver).__module__.startswith("triton_loom.") and (reason := loom.obstacle()):
            loom.warn_of(reason)
            return None
        found = _device_types[driver] = driver.get_active_torch_device().type
    return found


def serves(device: torch.device) -> bool:
    """Whether Triton serves a call on `device`, as things stand and as the caller chose."""
    chosen = _chosen.get()
    if chosen == "reference":
        return False
    if launch_device() == device.type or is_recording():
        return True
    if chosen == "triton":
        raise RuntimeError(
            f"backend('triton') was asked for, but no Triton driver launches on {device.type!r}: "
            + (loom.what_is_missing() if device.type == "cpu" else "run `weft doctor` to see what is missing")
        )
    return False
