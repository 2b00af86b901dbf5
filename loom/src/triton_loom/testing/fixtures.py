"""What every test of both packages runs under: poisoned allocations and scratch memory, fixed seeds, a known number of
threads.

A `conftest.py` imports the fixtures and hooks that it wants; all of them are used without being asked for.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
import triton

from ..device import launcher
from . import memory

SEED = int(os.environ.get("LOOM_TEST_SEED", "0"))


def pytest_report_header() -> str:
    """What a failure depends on besides the code: versions, threads, the seed, the cache."""
    return (
        f"triton {triton.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"LOOM_TEST_SEED={SEED}, TRITON_CACHE_DIR={os.environ.get('TRITON_CACHE_DIR', '(default)')}"
    )


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end. Python need not look through it for garbage, which
    compiling kernels would have it do thousands of times."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` and its relatives return poison, so an output that a kernel leaves unwritten shows."""
    with memory.poisoned_allocations():
        yield


@pytest.fixture(scope="session", autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Programs begin with poison in their scratch memory, so a kernel that reads what another one left there shows."""
    with launcher.poisoned_scratch():
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(SEED)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A test may choose its number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
