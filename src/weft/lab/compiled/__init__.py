"""GPU binaries compiled on a machine without a GPU, and the checks on them."""

from .offline import Binary, CompileError, compile_all, ttgir_of, ttir_of

__all__ = ["Binary", "CompileError", "compile_all", "ttgir_of", "ttir_of"]
