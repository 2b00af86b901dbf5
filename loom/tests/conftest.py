import os
import signal
from collections.abc import Iterator

import pytest
from triton_loom.testing.fixtures import (
    fixed_seeds,
    poisoned_allocations,
    poisoned_scratch,
    pytest_collection_finish,
    pytest_report_header,
    restored_threads,
)

__all__ = [
    "fixed_seeds",
    "poisoned_allocations",
    "poisoned_scratch",
    "pytest_collection_finish",
    "pytest_report_header",
    "quick_builds",
    "restored_threads",
]

# A shell starts background jobs with Ctrl-C ignored, and Python keeps that setting; tests need interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests with optimized kernels, as users get them: random programs, and the loops that depend on the optimizer most.
OPTIMIZED = ("test_fuzz.py", "test_dot.py", "test_dot_hardware.py", "test_memory.py")


@pytest.fixture(scope="module", autouse=True)
def quick_builds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use quick builds: kernels run on little data here, so building them is most of the work. The bits are the same
    either way; TRITON_LOOM_QUICK_BUILD=0 tests everything optimized."""
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_LOOM_QUICK_BUILD" not in os.environ and request.path.name not in OPTIMIZED:
            patch.setenv("TRITON_LOOM_QUICK_BUILD", "1")
        yield
