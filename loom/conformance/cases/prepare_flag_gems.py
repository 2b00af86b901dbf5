"""Preparation of FlagGems before its tests.

FlagGems registers its operators for CUDA tensors and requires such tensors where it checks arguments; here both become
the CPU's. Its launcher, which passes a kernel's compile-time arguments only for Triton 3.3 to 3.6, is told that this is
Triton 3.6: see docs/found.md. Its views of tensors, which kernels treat as tensors, get a `base` like those of
`triton.reinterpret`, because an emulated GPU needs it.
"""

import sys

import flag_gems
import triton
from flag_gems.utils.tensor_wrapper import StridedBuffer

flag_gems.runtime.device.dispatch_key = "CPU"
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "flag_gems" and getattr(module, "device", None) == "cuda":
        module.device = "cpu"  # type: ignore[attr-defined]
# Not as an attribute of the package: that name is a function of the module.
sys.modules["flag_gems.utils.libentry"].minor_version = 6  # type: ignore[attr-defined]
if triton.runtime.driver.active.get_current_target().backend == "cuda":
    StridedBuffer.base = property(lambda view: view._base)
