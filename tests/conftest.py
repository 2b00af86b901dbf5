import os
from collections.abc import Iterator

import pytest
import torch
from triton_loom.testing.fixtures import (
    fixed_seeds,
    poisoned_allocations,
    poisoned_scratch,
    pytest_collection_finish,
    pytest_report_header,
    restored_threads,
)

from weft.lab.calls import under

# Kernels run on little data here, so most of the time goes into building them: build quickly. The bits are the same
# either way; TRITON_LOOM_QUICK_BUILD=0 tests the optimized kernels that users get.
os.environ.setdefault("TRITON_LOOM_QUICK_BUILD", "1")
# Test the default launch choices, not those tuned on this machine.
os.environ.setdefault("WEFT_CHOICES", "")

__all__ = [
    "device_under_test",
    "fixed_seeds",
    "poisoned_allocations",
    "poisoned_scratch",
    "pytest_collection_finish",
    "pytest_report_header",
    "restored_threads",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="run the catalogue's checks on this device: cpu, cuda, cuda:1, ..."
    )


@pytest.fixture(scope="session", autouse=True)
def device_under_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the device on which the checks of `weft.lab` compute; tests that make tensors themselves choose their own."""
    with under(device=torch.device(request.config.getoption("--device"))):
        yield
