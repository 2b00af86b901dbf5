"""The files that Loom keeps in Triton's cache directory, and who may have written them.

loom/        kernels that were loaded, by their content: a debugger or profiler wants a file to look at
loom-build/  what the compiler made, by everything that it was made from
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


def room(name: str) -> str:
    """A directory of Loom's own in Triton's cache (TRITON_CACHE_DIR, or ~/.triton/cache); it may not exist yet."""
    from triton import knobs

    return os.path.join(knobs.cache.dir, name)


def keep(content: bytes, directory: str, file: str) -> str:
    """The path of a file with this content, which only this user can write."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    check_trusted(directory)
    path = os.path.join(directory, file)
    if not (os.path.exists(path) and Path(path).read_bytes() == content):
        # Many processes may do this at once: each writes a file of its own and renames it into place.
        handle, own = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(own, path)
    check_trusted(path)
    return path


def recall(directory: str, file: str) -> bytes | None:
    """What was kept under this name, if anything was. Code comes from no place that others can write."""
    path = os.path.join(directory, file)
    if not os.path.exists(path):
        return None
    for place in (os.path.dirname(directory), directory, path):
        check_trusted(place)
    return Path(path).read_bytes()


@functools.lru_cache
def process_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory that lasts as long as the process, for caches that cannot be written."""
    return tempfile.TemporaryDirectory(prefix="loom-")


class UntrustedCache(RuntimeError):
    """Somebody else can write to the place that compiled kernels are loaded from."""


def check_trusted(path: str) -> None:
    """Raises `UntrustedCache` where another user could have put code, or could exchange it."""
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
    """Many systems give each user a group of their own and a umask that lets it write."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
