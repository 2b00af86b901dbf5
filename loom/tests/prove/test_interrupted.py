"""Ctrl-C while the solver is running: an interrupted question has no answer, not even "unknown"."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import z3
from triton_loom.prove.solver import ask


def test_an_interrupted_question_is_not_answered_unknown() -> None:
    """z3's own handler would turn Ctrl-C into an answer and leave the prover running."""
    a, b = z3.BitVecs("a b", 64)
    facts = [
        a * b == 0x9000000000000007,
        *(z3.UGT(x, 3) for x in (a, b)),
        *(z3.ULT(x, 2**33) for x in (a, b)),
    ]
    # Background jobs of a shell ignore the signal.
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            assert ask(facts, a * a * b == a + b, 2_000_000).verdict == "unknown", (
                "too easy to be interrupted"
            )
    finally:
        signal.signal(signal.SIGINT, previous_handler)
