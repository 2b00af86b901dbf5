"""What every op stands on; the only code that knows `torch.library` and Triton's driver."""

from .backend import backend, launch_device, serves, set_backend
from .capabilities import Capabilities
from .launch import Kernel, Launch, capabilities_of, choosing_for, kernel, recording
from .offline import TARGETS, Binary, CompileError, Variant, compile_all
from .ops import Op, apply, catalogue, define_op, is_readable

__all__ = [
    "TARGETS",
    "Binary",
    "Capabilities",
    "CompileError",
    "Kernel",
    "Launch",
    "Op",
    "Variant",
    "apply",
    "backend",
    "capabilities_of",
    "catalogue",
    "choosing_for",
    "compile_all",
    "define_op",
    "is_readable",
    "kernel",
    "launch_device",
    "recording",
    "serves",
    "set_backend",
]
