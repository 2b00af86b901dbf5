"""`torch.autocast`: which tensors it converts, and where it must not apply.

Autocast acts on PyTorch's own operations. An op of Weft is a single operation from outside: the functions that
multiply convert their operands with `autocasted`, as `torch.nn.functional.linear` converts its own, and nothing inside
an op is converted.
"""

from __future__ import annotations

import torch
from torch import Tensor

any_autocast = torch._C._is_any_autocast_enabled
without_autocast = torch._C._DisableAutocast


def autocasted(x: Tensor) -> Tensor:
    """Return an operand of a product in the dtype of the enclosing `torch.autocast` block for x's device. Outside such
    a block, and in float64, x is unchanged. Its gradient has x's own dtype."""
    if not any_autocast():
        return x
    kind = x.device.type
    if x.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
