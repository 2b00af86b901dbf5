"""`python -m triton_loom prove script.py`: run a script unchanged, then prove its kernels for other sizes.

Where a kernel is not proven, the smallest sizes for which it breaks are printed.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from .. import active
from ..report import redirected
from . import prove
from .recording import described, generalized, recorded


def run(script: str, arguments: Sequence[str], device: str | None = None) -> int:
    """Run a script, print the proofs of its kernels, and return an exit code: 0 if everything is proven."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with active(), recorded() as launches, redirected() if device == "cpu" else nullcontext():
        runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    if not launches:
        print("no Triton kernel was launched")
        return 1
    proven = True
    for launch in launches:
        contract = generalized(launch)
        report = prove(launch.kernel, contract)
        proven = proven and report.verdict == "proven"
        print(f"\n{launch.kernel.__name__}, as if launched with\n{described(contract)}\n{report}")
        if smallest := report.smallest:
            print(f"  it breaks from {', '.join(f'{name} = {value}' for name, value in smallest.items())} on")
    return 0 if proven else 1
