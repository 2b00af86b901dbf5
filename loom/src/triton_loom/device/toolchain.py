"""The system's C++ compiler: find it, name it in cache keys, build kernels with it, load them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import storage

INCLUDE = Path(__file__).parents[1] / "include"

# Triton's promises to its kernels: integers wrap, pointers alias, and floats round once per operation.
SEMANTICS = """
    -std=c++17 -fwrapv -fno-strict-aliasing -ffp-contract=off -fno-math-errno -fno-trapping-math
    -fno-exceptions -fno-rtti
"""
PRODUCT = "-w -pipe -fPIC -fvisibility=hidden"
# No C++ library and no start-up files to read: saves a third of the time of a small build.
LINKING = "-shared -nostdlib"
LIBRARIES = "-lm -lc -lgcc"

# Allocates registers for the whole function at once: builds faster, and the code is no slower.
ONE_REGION = "-fira-region=one"
# Passes of -Og that take a sixth of its time for little gain: a kernel's text already consists of single operations,
# with few branches.
LITTLE_TO_DO = """
    -fno-tree-forwprop -fno-forward-propagate -fno-tree-ccp -fno-tree-copy-prop -fno-thread-jumps
    -fno-guess-branch-probability
"""

NO_COMPILER = """\
Loom turns Triton kernels into C++ and found no compiler for it. Install one:
    Debian, Ubuntu   apt install g++
    Fedora, RHEL     dnf install gcc-c++
    conda            conda install cxx-compiler
    macOS            xcode-select --install
or set CXX to a C++17 compiler (GCC or Clang)."""


class BuildError(RuntimeError):
    """Error: there is no C++ compiler, or it rejected a generated kernel."""


# ---- the compiler, and what its output depends on ------------------------------------------------------


@functools.lru_cache
def compiler() -> tuple[str, ...]:
    """Return the command that starts the C++ compiler: CXX, the C++ sibling of CC, or the first one on the PATH.

    A CXX that is not a program is an error, as in make and CMake: whoever chose a compiler would not want another.
    """
    if override := shlex.split(os.environ.get("CXX", "")):
        if path := shutil.which(override[0]):
            return (path, *override[1:])
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
    """Return the compiler's flags for `arch`: "native", or any name that its -march knows."""
    if platform.machine() in ("x86_64", "AMD64"):
        # Compilers default to 256-bit vectors on processors that have 512-bit ones.
        return f"-march={arch} -mprefer-vector-width=512"
    return "-mcpu=native" if arch == "native" else f"-march={arch}"


@functools.lru_cache
def identity() -> str:
    """Return a key that changes with the compiler or the processor; it costs file look-ups, not a process."""
    command = compiler()
    binaries = {os.path.realpath(path) for word in command if (path := shutil.which(word))}
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(command[0])))
    for directory in ("lib", "libexec"):
        binaries.update(glob.glob(f"{prefix}/{directory}/gcc/*/*/cc1plus"))
    stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted(binaries)]
    return repr((command, stamps, processor()))


def processor() -> str:
    """Return the instruction sets of this machine, as the kernel lists them."""
    prefixes = ("vendor_id", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            first = cpuinfo.read(1 << 14).split("\n\n")[0]  # one processor's paragraph, not all 256
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.startswith(prefixes))


# ---- from C++ text to a function ------------------------------------------------------------------------


@functools.lru_cache
def is_gcc() -> bool:
    """Return whether the compiler knows GCC's names of single optimizations: by its own name, else by asking it."""
    name = os.path.basename(os.path.realpath(compiler()[0]))
    if "clang" in name or "g++" in name:
        return "clang" not in name
    command = [*compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    return "__GNUC__" in macros and "__clang__" not in macros


def optimization(source: str, quick: bool) -> str:
    """Return the compiler's options for an optimized kernel, or for a `quick` build.

    A quick build takes half the time; its kernel is 10 to 30 % slower and gives the same bits. Kernels with dots get
    -O1 even then, because their inner loop is worthless unless its tile stays in registers.
    """
    level = "-O2" if not quick else "-O1" if '#include "dot.h"' in source else "-Og"
    if not is_gcc():
        return level
    return f"{level} {ONE_REGION} {LITTLE_TO_DO if level == '-Og' else ''}"


@functools.lru_cache(maxsize=128)  # for caches that cannot be written
def build(source: str, arch: str = "native", quick: bool = False) -> bytes:
    """Return the shared object of a kernel's C++ text.

    It is cached by the compiler's inputs: kernels whose options differ only in what a CPU ignores have the same text,
    and so have most kernels under another release of Triton, or after a change to Loom that does not concern them.
    """
    options = f"{SEMANTICS} {flags(arch)} {optimization(source, quick)} {PRODUCT}".split()
    inputs = (source, options, _headers(), identity())
    file = hashlib.sha256(repr(inputs).encode()).hexdigest() + ".so"
    directory = storage.room("loom-build")
    if cached := storage.recall(directory, file):
        return cached
    binary = _compile(source, options)
    with contextlib.suppress(OSError):  # a cache that cannot be written
        storage.keep(binary, directory, file)
    return binary


@functools.lru_cache(maxsize=128)
def build_library(source: str, *further_options: str) -> bytes:
    """Return the shared object of C++ text that is not a kernel: a part of the emulated GPU (include/gpu)."""
    level = "-O2 -ftree-vectorize -fvect-cost-model=dynamic" if is_gcc() else "-O2"
    options = [*f"{SEMANTICS} {flags('native')} {level} {PRODUCT}".split(), *further_options]
    inputs = (source, options, _headers("gpu/*"), _headers(), identity())
    file = hashlib.sha256(repr(inputs).encode()).hexdigest() + ".so"
    directory = storage.room("loom-build")
    if cached := storage.recall(directory, file):
        return cached
    binary = _compile(source, options, prepare=False)
    with contextlib.suppress(OSError):
        storage.keep(binary, directory, file)
    return binary


def _compile(source: str, options: list[str], prepare: bool = True) -> bytes:
    with tempfile.TemporaryDirectory(prefix="loom-") as directory:
        text, product = Path(directory, "kernel.cpp"), Path(directory, "kernel.so")
        text.write_text(source)
        files = ["-x", "c++", str(text), "-o", str(product)]
        command = [*compiler(), *options, *LINKING.split(), f"-I{INCLUDE}"]

        def run(prepared: list[str]) -> subprocess.CompletedProcess[str]:
            call = [*command, *prepared, *files, *LIBRARIES.split()]
            return subprocess.run(call, capture_output=True, text=True, errors="replace")

        prepared = _prepared(source, options) if prepare else []
        completed = run(prepared or UNPREPARED)
        if completed.returncode and prepared:
            completed = run(
                UNPREPARED
            )  # Clang refuses precompiled headers in cases where GCC would read the headers themselves
        if completed.returncode and "internal compiler error" in completed.stderr and "-O1" not in options:
            # An optimizer bug: GCC 12 has one that big kernels trigger.
            fallback = [*(word for word in options if not word.startswith("-O")), "-O1"]
            return _compile(source, fallback, prepare)
        if completed.returncode or not product.exists():
            text.write_text("")
            reason = (
                "the C++ compiler does not work: it rejects an empty file"
                if run([]).returncode or not product.exists()
                else "a generated kernel does not compile"
            )
            call = shlex.join([*command, *UNPREPARED, *files, *LIBRARIES.split()])
            raise BuildError(f"{reason}\n{call}\n{completed.stderr or completed.stdout}".rstrip())
        return product.read_bytes()


# ---- work shared by kernels, done once ----------------------------------------------------------------------

# Without precompiled headers, an instrumented kernel has all of the witness in its own text.
UNPREPARED = ["-DLOOM_WITNESS_INSIDE"]


@functools.lru_cache
def _headers(pattern: str = "*.h") -> str:
    """Return a hash of Loom's headers."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(INCLUDE.glob(pattern)))).hexdigest()


def _prepared(source: str, options: list[str]) -> list[str]:
    """Return arguments that reuse precompiled headers; none if there are none yet.

    A kernel's text begins with one of a dozen lists of headers. The first kernel with a list records it, and the second
    one precompiles it: somebody who runs a single kernel does not wait for what would only serve the next. The witness
    of instrumented kernels is compiled then as well.
    """
    first_lines = re.match(r"(?:#(?:define|include) .*\n)*", source)
    assert first_lines is not None
    directory = storage.room("loom-build")

    def path(inputs: str, ending: str) -> str:
        key = repr((inputs, options, _headers(), str(INCLUDE), identity()))
        return os.path.join(directory, hashlib.sha256(key.encode()).hexdigest() + ending)

    text = path(first_lines[0], ".h")
    try:
        if not os.path.exists(text):
            storage.keep(first_lines[0].encode(), directory, os.path.basename(text))
            return []
        for checked in (directory, text):
            storage.check_trusted(checked)
        _make_once(f"{text}.gch", [*options, "-x", "c++-header", text])
        prepared = ["-include", text]
        if witness := re.search(r"#define (LOOM_WITNESS) (\d)", first_lines[0]):
            object_ = path(witness[0], ".o")
            define = f"-D{witness[1]}={witness[2]}"
            _make_once(object_, [*options, define, "-c", "-x", "c++", str(INCLUDE / "witness_runtime.h")])
            prepared.append(object_)
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # a cache that cannot be written; headers that cannot be precompiled
        return []
    return prepared


def _make_once(product: str, arguments: list[str]) -> None:
    """Have the compiler make a file, unless it exists."""
    if not os.path.exists(product):
        with tempfile.TemporaryDirectory(dir=os.path.dirname(product)) as directory:
            output = os.path.join(directory, "product")
            call = [*compiler(), f"-I{INCLUDE}", *arguments, "-o", output]
            subprocess.run(call, capture_output=True, check=True)
            os.replace(output, product)
    storage.check_trusted(product)


# ---- from a shared object to a function ------------------------------------------------------------------


def load(binary: bytes, name: str) -> ctypes.CDLL:
    """Map a shared object into the process, from a file that only this user can have written.

    Triton passes bytes from its cache; they are stored once more, keyed by content, because a debugger or profiler
    wants a file to look at.
    """
    file = f"{name[:100]}-{hashlib.sha256(binary).hexdigest()[:32]}.so"
    directory = storage.room("loom")
    try:
        path = storage.keep(binary, directory, file)
    except OSError:  # a read-only cache
        path = storage.keep(binary, storage.process_directory().name, file)
    storage.check_trusted(os.path.dirname(directory))
    return ctypes.CDLL(path)
