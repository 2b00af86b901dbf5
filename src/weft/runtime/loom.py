"""Loom, which launches kernels on the CPU: why it cannot on this machine, and how to install it."""

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

from .. import language


def is_installed() -> bool:
    return importlib.util.find_spec("triton_loom") is not None


@functools.cache
def obstacle() -> str | None:
    """Return the reason an installed Loom cannot build kernels here; None if it can. It is determined once, so that a
    process never switches implementation by itself."""
    import triton_loom

    return triton_loom.obstacle()


DETOUR = r"Weft's ops on \w+ tensors run in plain PyTorch"  # a pattern for the beginning of the warning


@functools.cache
def warn_of_detour(device: str) -> None:
    """Warn once that ops on such a device run in plain PyTorch without having been asked to; name what is missing."""
    reason = what_is_missing() if device == "cpu" else "`weft doctor` says what is missing"
    warnings.warn(
        f"Weft's ops on {device} tensors run in plain PyTorch (WEFT_BACKEND=reference does so without this "
        f"warning). For kernels: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def what_is_missing() -> str:
    """Return why no kernel runs on the CPU, and what to do about it."""
    if language.INTERPRETED:
        return "TRITON_INTERPRET=1 disables kernels; unset it"
    if not language.TRITON:
        return "Triton is missing or does not import; `weft doctor` says what to install"
    if not is_installed():
        return f"install Loom, `{install_command()}`, and a C++ compiler"
    return obstacle() or "Triton's driver is another device's; select Loom's by `with triton_loom.active():`"


def install_command() -> str:
    """Return the shell command that installs Loom from the same source as Weft: a checkout, the directory, repository
    or wheel that pip installed, or the package index."""
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
        repository = f"{vcs['vcs']}+{url}@{vcs['commit_id']}#subdirectory=loom"
        return f"{pip()} install {shlex.quote(f'triton-loom @ {repository}')}"
    source = Path(unquote(urlsplit(url).path))
    if url.startswith("file:") and _has_loom(source):
        return f"{pip()} install {shlex.quote(str(source / 'loom'))}"
    if url.startswith("file:") and (wheels := sorted(source.parent.glob("triton_loom-*.whl"))):
        return f"{pip()} install {shlex.quote(str(wheels[-1]))}"
    return f"{pip()} install 'weft[cpu]'"


def _has_loom(directory: Path) -> bool:
    return (directory / "loom" / "pyproject.toml").exists()


def pip() -> str:
    return "pip" if shutil.which("pip") else f"{shlex.quote(sys.executable)} -m pip"
