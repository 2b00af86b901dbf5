"""Kernels compiled for GPUs on a machine without one: their binaries, and what these must hold."""

from .offline import Binary, CompileError, compile_all, ttgir_of, ttir_of

__all__ = ["Binary", "CompileError", "compile_all", "ttgir_of", "ttir_of"]
