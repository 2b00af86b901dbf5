"""Arguments that several commands share, checked before a command begins its work."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .names import ops_named
from .screen import Refused

PICTURES = (".pdf", ".png", ".svg")


def add_op(parser: Any) -> None:
    """Add `--op`; the value is a list of names in `weft.catalogue`."""
    parser.add_argument(
        "--op",
        action="extend",
        type=ops_named,
        default=[],
        metavar="OP",
        help="only this op, or the ops of this public function (norm, rms_norm); may be repeated",
    )


def add_workload(parser: Any, help: str = "only workloads whose name contains this; may be repeated") -> None:
    """Add `--workload`; the value is a list of texts for `weft.lab.commands.chosen.workloads_named`."""
    parser.add_argument("--workload", action="append", default=[], metavar="TEXT", help=help)


def add_workers(parser: Any, what: str) -> None:
    parser.add_argument(
        "--workers",
        type=at_least(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help=f"{what} at once (%(default)s)",
    )


def add_most(parser: Any, default: float) -> None:
    parser.add_argument(
        "--most",
        type=positive,
        default=default,
        metavar="MB",
        help="shrink workloads that move more than this many MB (%(default)s)",
    )


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type for integers of at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}; got {value}")
        return value

    return integer


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite; got {text}")
    return value


def output_file(text: str) -> Path:
    """Return the path of a writable file, so that a command fails before its work, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"directory {path.parent} does not exist; create it first")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from None
    return path


def picture_file(text: str) -> Path:
    """Return the path of a picture that can be written."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"a picture must end in {', '.join(PICTURES)}; got {path}")
    return path


def usable_device(name: str) -> torch.device:
    """Return the device of that name if tensors can be allocated on it, or refuse it."""
    try:
        try:
            device = torch.device(name)
        except RuntimeError:  # whose message lists devices that Weft does not run on
            raise Refused(f"{name!r} is not a device: use cpu, cuda or cuda:0") from None
        if device.type not in ("cpu", "cuda"):
            raise Refused(f"Weft has no kernels for {device}: use cpu or cuda")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Refused("PyTorch sees no GPU here; `weft doctor` shows what this machine has")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(str(error).splitlines()[0]) from None
    return device
