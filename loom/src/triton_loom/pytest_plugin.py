"""pytest plugin: `--loom-sanitize` checks the launches of all tests, the fixture `loom_sanitizer` those of one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .witness.sanitizer import Sanitizer

_PROPERTY = "loom_verdicts"


def pytest_addoption(parser: Any) -> None:
    """Add `--loom-sanitize`."""
    parser.getgroup("triton-loom").addoption(
        "--loom-sanitize",
        action="store_true",
        help="check the memory accesses of every Triton kernel launched",
    )


@pytest.fixture
def loom_sanitizer(request: pytest.FixtureRequest) -> Iterator[Sanitizer]:
    """Check the launches of a test, which fails at the first finding."""
    with _checked(request.node) as sanitizer:
        yield sanitizer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Run each test in its own sanitizer scope if `--loom-sanitize` is set."""
    if not item.config.getoption("--loom-sanitize") or "loom_sanitizer" in item.fixturenames:
        return (yield)
    with _checked(item):
        return (yield)


@contextmanager
def _checked(item: Any) -> Iterator[Sanitizer]:
    """Open a scope and store its verdicts with the test, so that pytest-xdist workers return them as well."""
    from . import sanitize

    with sanitize() as sanitizer:
        try:
            yield sanitizer
        finally:
            verdicts = [(verdict.kernel, verdict.outcome, verdict.reason) for verdict in sanitizer.verdicts]
            item.user_properties.append((_PROPERTY, verdicts))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Summarize the verdicts of all checked launches, and list the tests that launched nothing."""
    from .witness.verdicts import Verdict, summary

    verdicts, idle = [], []
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for recorded in (recorded for name, recorded in report.user_properties if name == _PROPERTY):
                verdicts += [Verdict(*fields) for fields in recorded]
                idle += [] if recorded else [report.nodeid]
    if verdicts or idle:
        terminalreporter.section("launches checked by triton_loom.sanitize")
        terminalreporter.line(summary(verdicts))
    if idle:
        terminalreporter.line(f"not checked, as they launched nothing: {', '.join(idle)}")
