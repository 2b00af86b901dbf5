"""For pytest: `--loom-sanitize` checks the launches of every test, the fixture `loom_sanitizer` those of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .witness.sanitizer import Sanitizer


def pytest_addoption(parser: Any) -> None:
    """Adds `--loom-sanitize`."""
    parser.getgroup("triton-loom").addoption(
        "--loom-sanitize",
        action="store_true",
        help="check the memory accesses of every Triton kernel launched",
    )


@pytest.fixture
def loom_sanitizer() -> Iterator[Sanitizer]:
    """Checks the launches of a test, which fails at the first finding."""
    from . import sanitize

    with sanitize() as sanitizer:
        yield sanitizer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """With `--loom-sanitize`, a test runs in a scope of its own."""
    if not item.config.getoption("--loom-sanitize") or "loom_sanitizer" in item.fixturenames:
        return (yield)
    from . import sanitize

    with sanitize():
        return (yield)
