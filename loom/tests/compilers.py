"""The compilers and instruction sets that Loom's headers are tested with, and how they are called."""

from __future__ import annotations

import platform
import shutil

from triton_loom.device.toolchain import INCLUDE, SEMANTICS

COMPILERS = [name for name in ("g++", "clang++-16") if shutil.which(name)]
TARGETS = ["native", "x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else ["native"]
FLAGS = [
    *SEMANTICS.split(), "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function",
    f"-I{INCLUDE}",
]  # fmt: skip
