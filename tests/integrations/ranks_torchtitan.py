"""Program of each rank in `test_the_head_is_gathered_from_two_ranks`: prints how far gradients are from one rank's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integrations.test_torchtitan import sharded

if __name__ == "__main__":
    dist.init_process_group("gloo")
    # torchtitan's experts multiply in bf16 whatever dtype the model has, which would hide smaller differences.
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]
    for apart_from_norm in (False, True):
        distances = sharded("debugmodel_moe", apart_from_norm=apart_from_norm)
        if dist.get_rank() == 0:
            print(*distances, flush=True)
    dist.destroy_process_group()
