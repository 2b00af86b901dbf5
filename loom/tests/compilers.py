"""The compilers and instruction sets that Loom's headers are tested with, and their command lines."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from triton_loom.device import storage, toolchain
from triton_loom.device.toolchain import INCLUDE, SEMANTICS

COMPILERS = [name for name in ("g++", "clang++-16") if shutil.which(name)]
TARGETS = ["native", "x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else ["native"]
FLAGS = [
    *SEMANTICS.split(), "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function",
    f"-I{INCLUDE}",
]  # fmt: skip


def library(source: str, *compiler: str) -> ctypes.CDLL:
    """Compile C++ text with these options and FLAGS; return the library.

    It is kept in Triton's cache, so that processes that share one test run build it only once.
    """
    command = [*compiler, *FLAGS]
    program = os.stat(os.path.realpath(shutil.which(compiler[0]) or compiler[0]))
    headers = [file.read_bytes() for file in sorted(INCLUDE.glob("*.h"))]
    inputs = (command, source, headers, program.st_size, program.st_mtime_ns, toolchain.processor())
    product = Path(storage.room("loom-tests"), hashlib.sha256(repr(inputs).encode()).hexdigest() + ".so")
    if not product.exists():
        product.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=product.parent) as own:
            text, output = Path(own, "text.cpp"), Path(own, "made.so")
            text.write_text(source)
            subprocess.run([*command, str(text), "-o", str(output), "-lm"], check=True)
            output.replace(product)
    return ctypes.CDLL(str(product))
