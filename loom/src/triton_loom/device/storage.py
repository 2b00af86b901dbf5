"""Loom's files in Triton's cache directory, and checks of who may have written them.

loom/        kernels that were loaded, keyed by content: a debugger or profiler wants a file to look at
loom-build/  the compiler's output, keyed by all of its inputs
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


def room(name: str) -> str:
    """Return one of Loom's directories in Triton's cache (TRITON_CACHE_DIR, or ~/.triton/cache); it may not exist."""
    from triton import knobs

    return os.path.join(knobs.cache.dir, name)


def keep(content: bytes, directory: str, file: str) -> str:
    """Write a file with this content, which only this user can write, unless it exists; return its path."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    check_trusted(directory)
    path = os.path.join(directory, file)
    if not (os.path.exists(path) and Path(path).read_bytes() == content):
        # Many processes may do this at once: each writes a file of its own and renames it into place.
        handle, temporary = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    check_trusted(path)
    return path


def recall(directory: str, file: str) -> bytes | None:
    """Return the content of a cached file, or None. Raise `UntrustedCache` if others can write to it."""
    path = os.path.join(directory, file)
    if not os.path.exists(path):
        return None
    for checked in (os.path.dirname(directory), directory, path):
        check_trusted(checked)
    return Path(path).read_bytes()


@functools.lru_cache
def process_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory that lasts as long as the process, for caches that cannot be written."""
    return tempfile.TemporaryDirectory(prefix="loom-")


class UntrustedCache(RuntimeError):
    """Error: somebody else can write to the directory that compiled kernels are loaded from."""


def check_trusted(path: str) -> None:
    """Raise `UntrustedCache` if another user could have put code at this path, or could replace it."""
    status, user = os.stat(path), os.geteuid()
    if status.st_uid not in (user, 0):
        reason = f"belongs to user {status.st_uid} and you are user {user}"
    elif status.st_mode & 0o002:
        reason = "can be written by every user"
    elif status.st_mode & 0o020 and not _is_private_group(status.st_gid):
        reason = f"can be written by all of group {status.st_gid}"
    else:
        return
    raise UntrustedCache(
        f"{path} {reason}, so Loom runs no code from it: "
        f"`chmod go-w {path}`, or set TRITON_CACHE_DIR to a directory of your own"
    )


@functools.lru_cache
def _is_private_group(group: int) -> bool:
    """Return whether a group is the user's own: many systems give each user one, with a umask that lets it write."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
