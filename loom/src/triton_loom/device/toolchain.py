"""The system's C++ compiler: finding it, naming it in cache keys, building kernels with it, loading them."""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

INCLUDE = Path(__file__).parents[1] / "include"

# Integers wrap, pointers alias, and floats round once per operation: what Triton promises its kernels.
SEMANTICS = """
    -std=c++17 -fwrapv -fno-strict-aliasing -ffp-contract=off -fno-math-errno -fno-trapping-math
    -fno-exceptions -fno-rtti
"""
# No C++ library and no start-up files to read: a third off the time of a small build.
PRODUCT = "-w -pipe -x c++ -shared -fPIC -fvisibility=hidden -nostdlib"
LIBRARIES = "-lm -lc -lgcc"

NO_COMPILER = """\
Loom turns Triton kernels into C++ and found no compiler for it. Install one:
    Debian, Ubuntu   apt install g++
    Fedora, RHEL     dnf install gcc-c++
    conda            conda install cxx-compiler
    macOS            xcode-select --install
or set CXX to a C++17 compiler (GCC or Clang)."""


class BuildError(RuntimeError):
    """There is no C++ compiler, or it rejected a generated kernel."""


# ---- the compiler, and what its output depends on ------------------------------------------------------


@functools.lru_cache
def compiler() -> tuple[str, ...]:
    """The command that starts the C++ compiler: CXX, the C++ sibling of CC, or the first one on the PATH.

    A CXX that is no program is an error, as it is to make and CMake: whoever chose a compiler would not want another.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if path := shutil.which(chosen[0]):
            return (path, *chosen[1:])
        raise BuildError(
            f"CXX={os.environ['CXX']} names no program that can be run: unset it, or set it to a C++17 compiler (GCC "
            "or Clang)"
        )
    candidates = [["g++"], ["clang++"], ["c++"]]
    if cc := shlex.split(os.environ.get("CC", "")):
        directory, name = os.path.split(cc[0])
        sibling = name.replace("gcc", "g++") if "gcc" in name else name.replace("clang", "clang++")
        if sibling != name:
            candidates.insert(0, [os.path.join(directory, sibling), *cc[1:]])
    for command in candidates:
        if path := shutil.which(command[0]):
            return (path, *command[1:])
    raise BuildError(NO_COMPILER)


def flags(arch: str) -> str:
    """Code generation for `arch`: "native", or any name the compiler's -march knows."""
    if platform.machine() in ("x86_64", "AMD64"):
        # Compilers default to 256-bit vectors on processors that have 512-bit ones.
        return f"-march={arch} -mprefer-vector-width=512"
    return "-mcpu=native" if arch == "native" else f"-march={arch}"


@functools.lru_cache
def identity() -> str:
    """Changes when the compiler or the processor does; costs file look-ups rather than a process."""
    command = compiler()
    binaries = {os.path.realpath(path) for word in command if (path := shutil.which(word))}
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(command[0])))
    for directory in ("lib", "libexec"):
        binaries.update(glob.glob(f"{prefix}/{directory}/gcc/*/*/cc1plus"))
    stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted(binaries)]
    return repr((command, stamps, processor()))


def processor() -> str:
    """The instruction sets of this machine, as the kernel lists them."""
    telling = ("vendor_id", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            first = cpuinfo.read(1 << 14).split("\n\n")[0]  # one processor's paragraph, not all 256
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.startswith(telling))


# ---- from C++ text to a function ------------------------------------------------------------------------


@functools.lru_cache(maxsize=128)  # autotuned configurations often differ only in options a CPU ignores
def build(source: str, arch: str = "native", optimize: str = "-O2") -> bytes:
    """The shared object of a kernel's C++ text."""
    with tempfile.TemporaryDirectory(prefix="loom-") as directory:
        text, product = Path(directory, "kernel.cpp"), Path(directory, "kernel.so")
        text.write_text(source)
        files = [f"-I{INCLUDE}", str(text), "-o", str(product)]
        options = f"{SEMANTICS} {flags(arch)} {optimize} {PRODUCT}".split()
        command = [*compiler(), *options, *files, *LIBRARIES.split()]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if run.returncode and "internal compiler error" in run.stderr and optimize != "-O1":
            return build(
                source, arch, "-O1"
            )  # a bug of an optimisation: GCC 12 has one that big kernels meet
        if run.returncode:
            text.write_text("")
            again = subprocess.run(command, capture_output=True, text=True, errors="replace")
            what = (
                "the C++ compiler does not work: it rejects an empty file"
                if again.returncode
                else "a generated kernel does not compile"
            )
            raise BuildError(f"{what}\n{shlex.join(command)}\n{run.stderr or run.stdout}".rstrip())
        return product.read_bytes()


def load(binary: bytes, name: str) -> ctypes.CDLL:
    """Map a shared object into the process, from a file that only this user can have written.

    Triton hands over bytes from its cache; they are kept once more, by content, in a directory of mode 0700
    inside it, since a debugger or profiler wants a file to look at.
    """
    from triton import knobs

    file = f"{name[:100]}-{hashlib.sha256(binary).hexdigest()[:32]}.so"
    try:
        path = _keep(binary, os.path.join(knobs.cache.dir, "loom"), file)
    except OSError:  # a read-only cache
        path = _keep(binary, _process_directory().name, file)
    check_trusted(knobs.cache.dir)
    return ctypes.CDLL(path)


def _keep(binary: bytes, directory: str, file: str) -> str:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    check_trusted(directory)
    path = os.path.join(directory, file)
    if not (os.path.exists(path) and Path(path).read_bytes() == binary):
        # Many processes may do this at once: each writes a file of its own and renames it into place.
        handle, own = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as stream:
            stream.write(binary)
        os.replace(own, path)
    check_trusted(path)
    return path


@functools.lru_cache
def _process_directory() -> tempfile.TemporaryDirectory[str]:
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
