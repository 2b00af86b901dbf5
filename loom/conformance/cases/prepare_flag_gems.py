"""What FlagGems is told before its tests.

It registers its operators for CUDA tensors and asks for such where it checks arguments; here both are the CPU's. And
its launcher, which passes a kernel's compile-time arguments on for Triton 3.3 to 3.6 alone, takes this Triton for a
3.6: see docs/found.md. Its views of tensors, which kernels take for tensors, say which tensor they are of, as those of
`triton.reinterpret` do: an emulated GPU wants to know.
"""

import sys

import flag_gems
import triton
from flag_gems.utils.tensor_wrapper import StridedBuffer

flag_gems.runtime.device.dispatch_key = "CPU"
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "flag_gems" and getattr(module, "device", None) == "cuda":
        module.device = "cpu"  # type: ignore[attr-defined]
# Not by its name in the package, which is that of a function in the module.
sys.modules["flag_gems.utils.libentry"].minor_version = 6  # type: ignore[attr-defined]
if triton.runtime.driver.active.get_current_target().backend == "cuda":
    StridedBuffer.base = property(lambda view: view._base)
