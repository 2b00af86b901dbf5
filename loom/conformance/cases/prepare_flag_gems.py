"""What FlagGems is told before its tests.

It registers its operators for CUDA tensors and asks for such where it checks arguments; here both are the CPU's. And
its launcher, which passes a kernel's compile-time arguments on for Triton 3.3 to 3.6 alone, takes this Triton for a
3.6: see docs/found.md.
"""

import sys

import flag_gems

flag_gems.runtime.device.dispatch_key = "CPU"
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "flag_gems" and getattr(module, "device", None) == "cuda":
        module.device = "cpu"  # type: ignore[attr-defined]
# Not by its name in the package, which is that of a function in the module.
sys.modules["flag_gems.utils.libentry"].minor_version = 6  # type: ignore[attr-defined]
