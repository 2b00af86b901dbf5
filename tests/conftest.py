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

# Kernels run on little data here, so that building them is most of the work. The bits are the same either way;
# TRITON_LOOM_QUICK_BUILD=0 tests what users run.
os.environ.setdefault("TRITON_LOOM_QUICK_BUILD", "1")
# What somebody has tuned on this machine is not what is tested.
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
        "--device", default="cpu", help="where the catalogue's checks run: cpu, cuda, cuda:1, ..."
    )


@pytest.fixture(scope="session", autouse=True)
def device_under_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """The checks of `weft.lab` compute there; tests that make tensors themselves say where."""
    with under(device=torch.device(request.config.getoption("--device"))):
        yield
