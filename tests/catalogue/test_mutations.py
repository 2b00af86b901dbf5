"""Mutation tests: every kernel is broken in many ways, and a test must notice each of them.

`pytest -m mutation` runs the tests named for each mutant against a copy of Weft that contains it. The checks of the
list itself always run: it must fit the sources, and a new kernel needs mutants of its own.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from tests.ops.norm.mutants import MUTANTS
from tests.support.mutation import PACKAGE, Mutant, Server, Verdict, function_at
from weft.runtime import Kernel

TESTS = Path(__file__).parents[1]
AT_LEAST = 10  # mutants per kernel


def kernels() -> set[str]:
    """Return the names of the package's kernels. Integrations have none, and need their frameworks."""
    names = set()
    for module in pkgutil.walk_packages(weft.__path__, "weft."):
        if not module.name.endswith("__main__") and not module.name.startswith("weft.integrations."):
            values = vars(importlib.import_module(module.name)).values()
            names |= {value.name for value in values if isinstance(value, Kernel)}
    return names


def test_every_kernel_has_mutants() -> None:
    assert len(kernels()) > 5
    counted = Counter(mutant.kernel for mutant in MUTANTS)
    assert set(counted) == kernels()
    few = {name: count for name, count in counted.items() if count < AT_LEAST}
    assert not few, f"fewer than {AT_LEAST} mutants: {few}"
    names = Counter(map(str, MUTANTS))
    assert names.most_common(1)[0][1] == 1, f"two mutants have one name: {names.most_common(1)}"


@pytest.mark.parametrize("kernel", sorted(kernels()))
def test_mutants_fit_the_sources(kernel: str) -> None:
    """A mutant's text occurs once; the result is still Python, with as many lines."""
    for mutant in MUTANTS:
        if mutant.kernel == kernel:
            before, after = (PACKAGE / mutant.file).read_text(), mutant.text()
            assert before != after, f"{mutant} changes nothing"
            begin, end = function_at(before, mutant.inside)
            ast.parse(textwrap.dedent(after[begin : end + len(after) - len(before)]))
            assert before.count("\n") == after.count("\n"), f"{mutant} moves the kernels below it"


def test_named_tests_exist() -> None:
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (TESTS / file).read_text(), f"there is no {test}"


def test_a_dead_server_is_reported() -> None:
    server = Server()
    server.process.kill()
    with pytest.raises(RuntimeError, match="exit code -9"):
        server.run(["tests/ops"])
    server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[tuple[Mutant, Verdict]]]:
    """Collect verdicts of the tests, and print them at the end."""
    rows: list[tuple[Mutant, Verdict]] = []
    yield rows
    if not rows:
        return
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for mutant, verdict in rows:
            by = verdict.test.removeprefix("tests/") + f" ({verdict.why})" if verdict.caught else "NOTHING"
            print(f"{mutant.kernel:24} {mutant.what:52} {verdict.seconds:6.1f} s  {by}")
        for kernel, count in Counter(mutant.kernel for mutant, _ in rows).items():
            caught = sum(v.caught for m, v in rows if m.kernel == kernel)
            print(f"{kernel:24} {caught} of {count} caught")
        seconds = sum(verdict.seconds for _, verdict in rows)
        print(f"{sum(v.caught for _, v in rows)} of {len(rows)} mutants caught in {seconds:.0f} s")


@pytest.mark.mutation
def test_named_tests_pass_without_a_mutant(server: Server) -> None:
    named = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)
    verdict = server.run(list(named), timeout=1800)
    assert verdict.outcome == "passed", f"{verdict.outcome}: {verdict.test}\n{verdict.log}"


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, server: Server, report: list[tuple[Mutant, Verdict]]) -> None:
    verdict = server.run(mutant.tests, mutant)
    report.append((mutant, verdict))
    assert verdict.outcome != "invalid", f"{mutant}: the tests could not judge\n{verdict.log}"
    assert verdict.caught, (
        f"{', '.join(mutant.tests)} do not notice {mutant}: fix one of them, or name another"
    )
    if verdict.outcome == "failed":
        assert mutant.kernel in verdict.kernels, f"{verdict.test} failed without launching {mutant.kernel}"
