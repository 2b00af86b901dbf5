"""What every test of both packages runs under: poisoned allocations, fixed seeds, a known number of threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton

SEED = int(os.environ.get("LOOM_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return (
        f"triton {triton.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"LOOM_TEST_SEED={SEED}, TRITON_CACHE_DIR={os.environ.get('TRITON_CACHE_DIR', '(default)')}"
    )


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with 0xFF: NaN in every float type but the fnuz ones, -1 in signed integers."""
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            torch.tensor([], dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).fill_(0xFF)
    return tensor


@pytest.fixture(scope="session", autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` and its relatives return poison, so an output that a kernel leaves unwritten shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return poison(allocate(*args, **kwargs))

        return allocate_poisoned

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ]:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
