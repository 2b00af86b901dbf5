"""Test environment of both packages: poisoned allocations and scratch memory, fixed seeds, a known number of threads.

A `conftest.py` imports the fixtures and hooks that it wants; all of them are autouse.
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
    """Print what a failure depends on besides the code: versions, threads, the seed, the cache."""
    return (
        f"triton {triton.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"LOOM_TEST_SEED={SEED}, TRITON_CACHE_DIR={os.environ.get('TRITON_CACHE_DIR', '(default)')}"
    )


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects, which live until the end.

    Otherwise Python's garbage collector would scan them thousands of times while kernels are compiled.
    """
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """Make `torch.empty` and its relatives return poison, so that an output left unwritten shows."""
    with memory.poisoned_allocations():
        yield


@pytest.fixture(scope="session", autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Poison the scratch memory before each program, so that a kernel that reads another program's leftovers shows."""
    with launcher.poisoned_scratch():
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed the random generators, so that a test draws the same numbers whatever ran before it."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(SEED)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Restore the number of threads after a test, which may change it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
