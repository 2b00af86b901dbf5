"""`torch.autocast`: which tensors it converts, and where it must not reach.

Autocast acts on PyTorch's own operations. An op of Weft is one operation to the outside: the functions that multiply
convert their operands by `autocasted`, as `torch.nn.functional.linear` converts its own, and inside of an op nothing is
converted any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

any_autocast = torch._C._is_any_autocast_enabled
without_autocast = torch._C._DisableAutocast


def autocasted(x: Tensor) -> Tensor:
    """An operand of a product in the dtype of the `torch.autocast` block around the call, for x's device. Outside of
    such a block, and in float64, it stays as it is. Its gradient has x's own dtype."""
    if not any_autocast():
        return x
    kind = x.device.type
    if x.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
