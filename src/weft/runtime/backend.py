"""Dispatch between implementations: Triton if its active driver launches on the tensor's device, else the reference in
plain PyTorch.

The choice is made for a block of code (`backend`), for the process (`set_backend`) or before it starts (the variable
`WEFT_BACKEND`); the innermost one wins. Autograd may run the backward of an op later, elsewhere and on another
thread: it uses the choice that was in force when the op ran.
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import ContextDecorator
from typing import Literal, get_args

import torch

from .. import language
from . import loom
from .launch import is_recording

Backend = Literal["auto", "triton", "reference"]

_device_types: dict[object, str] = {}  # Triton driver -> the type of device it launches on
_without_driver = False


# ---- the choice -----------------------------------------------------------------------------------------


def _checked(name: str, what: str = "backend") -> Backend:
    if name not in get_args(Backend):
        raise ValueError(f"{what} must be 'auto', 'triton' or 'reference'; got {name!r}")
    return name  # type: ignore[return-value]


class _Block(threading.local):
    """Choice of a thread's innermost block. Not a ContextVar, because torch.compile could not trace one."""

    choice: Backend | None = None


_block = _Block()
_process: Backend = _checked(os.environ.get("WEFT_BACKEND") or "auto", "the variable WEFT_BACKEND")


def chosen() -> Backend:
    """Return the choice in force for this thread."""
    return _block.choice or _process


def set_backend(name: Backend) -> None:
    """Choose the implementation of Weft's ops for the whole process, all threads. `weft.backend` overrides it for a
    block of code; the environment variable `WEFT_BACKEND` sets it before the process starts.

    >>> import weft
    >>> weft.set_backend("reference")
    >>> weft.set_backend("auto")
    """
    global _process
    _process = _checked(name)


class backend(ContextDecorator):
    """Choose the implementation of Weft's ops inside a `with` block, for this thread.

    `"reference"` runs plain PyTorch: put it around parts of a model to find which op changes a result.
    `"triton"` makes a missing driver an error instead of a fallback. `"auto"` is the default.

    The gradients of what ran in the block are computed by the same implementation, even if `backward` is called outside
    it. Ops that ran under "auto" take the choice in force where `backward` is called. Activation checkpointing reruns
    the forward outside the block: use `weft.set_backend` there.

    >>> import torch, weft
    >>> x = torch.randn(4, 64)
    >>> with weft.backend("reference"):
    ...     y = weft.rms_norm(x)
    """

    def __init__(self, name: Backend) -> None:
        self.name = _checked(name)
        self._outer: list[Backend | None] = []  # a block may be reentered
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        self._outer.append(_block.choice)
        _block.choice = self.name

    def __exit__(self, *exception: object) -> None:
        _block.choice = self._outer.pop()

    def _recreate_cm(self) -> backend:
        return backend(self.name)  # a decorated function may run on several threads at once

    def __call__(self, function):  # type: ignore[no-untyped-def]
        self._used = True
        return super().__call__(function)

    def __del__(self) -> None:
        if not getattr(self, "_used", True):
            warnings.warn(
                f"weft.backend({self.name!r}) changes nothing by itself: write `with weft.backend({self.name!r}):`, or "
                f"call weft.set_backend({self.name!r}) for the whole process",
                RuntimeWarning,
                stacklevel=2,
            )


# ---- which implementation serves ------------------------------------------------------------------------


def launch_device() -> str | None:
    """Return the type of device that Triton launches on: cuda (also for AMD), cpu with Loom if it can build, or
    None."""
    global _without_driver
    if not language.TRITON or (_without_driver and language.driver._active is None):
        return None
    try:
        driver = language.driver.active
    except RuntimeError:  # no driver, or more than one active
        _without_driver = True
        return None
    device_type = _device_types.get(driver)
    if device_type is None:
        if type(driver).__module__.startswith("triton_loom.") and loom.obstacle():
            return None
        device_type = _device_types[driver] = driver.get_active_torch_device().type
    return device_type


def serves(device: torch.device) -> bool:
    """Return whether Triton serves a call on `device`, given the active driver and the caller's choice."""
    choice = _block.choice or _process
    if choice == "auto" and language.TRITON and _device_types.get(language.driver._active) == device.type:
        return True  # the most common answer first: every call asks
    if choice == "reference":
        return False
    if launch_device() == device.type or is_recording():
        return True
    if choice == "triton":
        raise RuntimeError(
            f"backend('triton') was asked for, but no Triton driver launches on {device.type!r}: "
            + (loom.what_is_missing() if device.type == "cpu" else "run `weft doctor` to see what is missing")
        )
    # Meta tensors are never computed with, and CPU tensors beside a GPU driver run in plain PyTorch by design.
    if device.type != "meta" and (device.type != "cpu" or launch_device() is None):
        loom.warn_of_detour(device.type)
    return False
