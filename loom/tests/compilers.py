"""The compilers and instruction sets that Loom's headers are tested with, and how they are called."""

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
    """What a compiler, called with these options and FLAGS, makes of C++ text.

    It is kept in Triton's cache: processes that share the work of one run need not build it each for themselves.
    """
    command = [*compiler, *FLAGS]
    program = os.stat(os.path.realpath(shutil.which(compiler[0]) or compiler[0]))
    headers = [file.read_bytes() for file in sorted(INCLUDE.glob("*.h"))]
    made_from = (command, source, headers, program.st_size, program.st_mtime_ns, toolchain.processor())
    product = Path(storage.room("loom-tests"), hashlib.sha256(repr(made_from).encode()).hexdigest() + ".so")
    if not product.exists():
        product.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=product.parent) as own:
            text, made = Path(own, "text.cpp"), Path(own, "made.so")
            text.write_text(source)
            subprocess.run([*command, str(text), "-o", str(made), "-lm"], check=True)
            made.replace(product)
    return ctypes.CDLL(str(product))
