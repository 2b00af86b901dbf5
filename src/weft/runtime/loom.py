"""Loom, which launches kernels on the CPU: why it cannot do so on this machine, and how it is installed."""

from __future__ import annotations

import functools
import importlib.util
import json
import shlex
import shutil
import sys
import warnings
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..language import TRITON


def is_installed() -> bool:
    return importlib.util.find_spec("triton_loom") is not None


@functools.cache
def obstacle() -> str | None:
    """Why Loom, which is installed, cannot build kernels here; None if it can. It is found out once, so that a
    process does not change from one implementation to another by itself."""
    import triton_loom

    return triton_loom.obstacle()


@functools.cache
def warn_of(reason: str) -> None:
    """Warn once that kernels are not used although Loom is installed."""
    warnings.warn(
        f"{DETOUR}, since Loom cannot build kernels here. {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


DETOUR = "Weft's ops on CPU tensors run in plain PyTorch"  # the beginning of the warning


def what_is_missing() -> str:
    """Why no kernel runs on the CPU, and what to do about it."""
    if not TRITON:
        return "run `weft doctor` to see why Triton is not used"
    if not is_installed():
        return f"install Loom, `{install_command()}`, and a C++ compiler"
    return (
        obstacle() or "Triton's driver is another device's; Loom's is chosen by `with triton_loom.active():`"
    )


def install_command() -> str:
    """The shell command that installs Loom from the same source as Weft: a checkout, the directory or repository that
    pip installed it from, or the package index."""
    checkout = Path(__file__).parents[3]
    if _has_loom(checkout):
        return f"{pip()} install -e {shlex.quote(str(checkout / 'loom'))}"
    try:
        origin = json.loads(metadata.distribution("weft").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        source = f"{vcs['vcs']}+{url}@{vcs['commit_id']}#subdirectory=loom"
        return f"{pip()} install {shlex.quote(f'triton-loom @ {source}')}"
    directory = Path(unquote(urlsplit(url).path))
    if url.startswith("file:") and _has_loom(directory):
        return f"{pip()} install {shlex.quote(str(directory / 'loom'))}"
    return f"{pip()} install 'weft[cpu]'"


def _has_loom(directory: Path) -> bool:
    return (directory / "loom" / "pyproject.toml").exists()


def pip() -> str:
    return "pip" if shutil.which("pip") else f"{shlex.quote(sys.executable)} -m pip"
