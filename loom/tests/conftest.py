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

# A shell starts what it runs in the background with Ctrl-C ignored, and Python then leaves it so: tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Here kernels are built as users have them: random programs, and the loops that depend on the optimiser most.
OPTIMISED = ("test_fuzz.py", "test_dot.py", "test_dot_hardware.py", "test_memory.py")


@pytest.fixture(scope="module", autouse=True)
def quick_builds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels run on little data here, so that building them is most of the work. The bits are the same either way;
    TRITON_LOOM_QUICK_BUILD=0 tests all of it optimised."""
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_LOOM_QUICK_BUILD" not in os.environ and request.path.name not in OPTIMISED:
            patch.setenv("TRITON_LOOM_QUICK_BUILD", "1")
        yield
