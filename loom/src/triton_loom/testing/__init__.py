"""Tools for testing kernels, yours or ours. Both packages of this repository use them.

- `accuracy`: error budgets against float64, each with a proof that it can fail.
- `comparison`: bitwise equality of tensors.
- `memory`: memory that reveals unwritten outputs and accesses outside of a tensor.
- `mutation`: kernels broken on purpose, which a test has to notice.
- `noop`: a device that compiles for a GPU and launches nothing.
- `forks`: scripts in processes that have already imported slow modules.
- `ranks`: a script run by each rank of a group on this machine.
- `fixtures`: pytest fixtures for a `conftest.py`; the only module here that imports pytest.
"""

from .accuracy import EPS32, assert_not_worse, assert_rounded_once, check, ulp
from .comparison import assert_same, words
from .forks import Forks
from .memory import NAN, Fenced, Guarded, guarded_allocations, poisoned_allocations
from .mutation import assert_caught, mutant
from .noop import NoopDriver, NoopLauncher, launching_nothing
from .ranks import Results, results_of

__all__ = [
    "EPS32",
    "NAN",
    "Fenced",
    "Forks",
    "Guarded",
    "NoopDriver",
    "NoopLauncher",
    "Results",
    "assert_caught",
    "assert_not_worse",
    "assert_rounded_once",
    "assert_same",
    "check",
    "guarded_allocations",
    "launching_nothing",
    "mutant",
    "poisoned_allocations",
    "results_of",
    "ulp",
    "words",
]
