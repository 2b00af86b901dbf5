"""Kernels broken on purpose: a test that passes with one of them does not test what it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import CompilationError, JITFunction


def mutant(kernel: JITFunction[Any], old: str, new: str) -> JITFunction[Any]:
    """Return a copy of a kernel with `old`, which must occur exactly once in its source, replaced by `new`."""
    count = kernel.src.count(old)
    if count != 1:
        raise ValueError(f"{old!r} is {count} times in {kernel.__name__}, not once")
    broken = JITFunction(kernel.fn)
    broken._unsafe_update_src(kernel.src.replace(old, new))  # Triton's own way to change the source
    return broken


def assert_caught(
    test: Callable[[JITFunction[Any]], None], kernel: JITFunction[Any], *changes: tuple[str, str]
) -> None:
    """Assert that the test, a function of the kernel, passes as is and fails with each `old` replaced by its `new`.

    Any exception counts as a failure but one: a mutant that does not compile is no mutant.
    """
    test(kernel)
    for old, new in changes:
        broken = mutant(kernel, old, new)
        try:
            test(broken)
        except CompilationError as error:
            raise ValueError(f"{kernel.__name__} does not compile with {new!r} for {old!r}") from error
        except Exception:
            continue
        raise AssertionError(f"the test passes with {new!r} for {old!r} in {kernel.__name__}")
