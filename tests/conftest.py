from triton_loom.testing.fixtures import (
    fixed_seeds,
    poisoned_allocations,
    poisoned_scratch,
    pytest_report_header,
    restored_threads,
)

__all__ = [
    "fixed_seeds",
    "poisoned_allocations",
    "poisoned_scratch",
    "pytest_report_header",
    "restored_threads",
]
