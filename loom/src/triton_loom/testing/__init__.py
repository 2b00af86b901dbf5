"""What tests of kernels need, whoever's kernels they are. Both packages of this repository use it.

- `accuracy`: error budgets against float64, each with the proof that it can fail.
- `comparison`: tensors equal bit for bit.
- `memory`: memory that shows what was left unwritten and what was touched outside of a tensor.
- `ranks`: a script run by each rank of a group on this machine.
- `fixtures`: fixtures of pytest for a `conftest.py`; the only module here that imports pytest.
"""

from .accuracy import EPS32, assert_not_worse, assert_rounded_once, check, ulp
from .comparison import assert_same, words
from .memory import NAN, Fenced, Guarded, guarded_allocations, poisoned_allocations
from .ranks import Results, results_of

__all__ = [
    "EPS32",
    "NAN",
    "Fenced",
    "Guarded",
    "Results",
    "assert_not_worse",
    "assert_rounded_once",
    "assert_same",
    "check",
    "guarded_allocations",
    "poisoned_allocations",
    "results_of",
    "ulp",
    "words",
]
