import os

from triton_loom.testing.fixtures import (
    fixed_seeds,
    poisoned_allocations,
    poisoned_scratch,
    pytest_collection_finish,
    pytest_report_header,
    restored_threads,
)

# Kernels run on little data here, so that building them is most of the work. The bits are the same either way;
# TRITON_LOOM_QUICK_BUILD=0 tests what users run.
os.environ.setdefault("TRITON_LOOM_QUICK_BUILD", "1")

__all__ = [
    "fixed_seeds",
    "poisoned_allocations",
    "poisoned_scratch",
    "pytest_collection_finish",
    "pytest_report_header",
    "restored_threads",
]
