"""Every recorded mistake is reported with its kind and location; its correction is not reported, and is right."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_loom
from mistakes import MISTAKES, ORIGINS, Mistake
from triton.runtime import JITFunction
from triton_loom import Finding

every_mistake = pytest.mark.parametrize("case", MISTAKES, ids=str)


@dataclass(frozen=True)
class Launch:
    grid: tuple[int, ...]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.fixture
def launches(case: Mistake, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the launches of a case in order, with the arguments of the kernel that the case is about."""
    seen: list[Launch] = []
    getitem = JITFunction.__getitem__

    def note_grid(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Any:
        seen.append(Launch((*grid, 1, 1)[:3]))
        return getitem(kernel, grid)

    def note_tensors(*args: Any, **_: Any) -> None:
        if seen:
            named = zip(case.kernel.arg_names, args, strict=False)
            seen[-1].tensors.update((name, value) for name, value in named if isinstance(value, torch.Tensor))

    monkeypatch.setattr(JITFunction, "__getitem__", note_grid)
    monkeypatch.setattr(case.kernel, "pre_run_hooks", [note_tensors])
    return seen


def check_where(finding: Finding, case: Mistake) -> None:
    """Assert that the finding names the kernel, its file and the line of Python that launched it."""
    assert finding.kernel == case.kernel.fn.__name__
    assert Path(finding.file).name == Path(case.kernel.fn.__code__.co_filename).name
    launched_file, launched_line = finding.launched_from.rsplit(":", 1)
    source = Path(case.launch.__code__.co_filename)
    assert Path(launched_file).name == source.name
    assert "[(" in linecache.getline(str(source), int(launched_line)), finding.launched_from


def check_example(finding: Finding, launch: Launch) -> None:
    """Assert that the program is in the grid, and the index outside the tensor if that is reported, else inside."""
    assert finding.program is not None
    assert all(0 <= p < size for p, size in zip(finding.program, launch.grid, strict=True)), finding.program
    if finding.kind in ("offset overflow", "broken promise", "undefined value"):
        return
    assert finding.argument is not None
    tensor = launch.tensors[finding.argument]
    if finding.index is None:  # between elements
        assert "places from the first one" in finding.detail
        return
    inside = all(0 <= i < size for i, size in zip(finding.index, tensor.shape, strict=True))
    if finding.kind.startswith("out-of-bounds"):
        # any index into an expanded dimension leads to its single element
        assert not inside or 0 in tensor.stride(), finding.index
    else:
        assert inside, finding.index


@every_mistake
def test_the_mistake_is_reported(case: Mistake, launches: list[Launch]) -> None:
    caught, follows = case.lines(), case.lines("follows")
    assert caught, "no line is marked"
    with triton_loom.sanitize(collect=True, dry=case.dry) as seen:
        case.run(fixed=False, dry=case.dry)
    assert seen.findings, "nothing was reported"
    consequences = 0
    for finding in seen.findings:
        if finding.kind in case.also:
            consequences += 1
            assert finding.line in caught | follows, f"beside the mistake: {finding}"
        else:
            assert finding.kind == case.kind, f"not the mistake: {finding}"
            assert finding.line in caught, f"beside the mistake: {finding}"
            assert finding.argument == case.argument or case.argument is None, f"another argument: {finding}"
        assert finding.count >= 1
        assert finding.kernel in str(finding)
        assert str(finding.line) in str(finding)
        check_where(finding, case)
        if launches:
            check_example(finding, launches[finding.launch])
    assert consequences < len(seen.findings), f"only consequences: {seen.findings}"


@every_mistake
def test_the_correction_is_not_reported(case: Mistake) -> None:
    with triton_loom.sanitize(collect=True, dry=case.dry) as seen:
        got, want = case.run(fixed=True, dry=case.dry)
    assert not seen.findings, "\n".join(map(str, seen.findings))
    if not case.dry:
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@every_mistake
def test_the_correction_is_right(case: Mistake) -> None:
    torch.testing.assert_close(*case.run(fixed=True))


@every_mistake
def test_the_launch_raises(case: Mistake) -> None:
    with pytest.raises(triton_loom.SanitizerError) as raised, triton_loom.sanitize(dry=case.dry):
        case.run(fixed=False, dry=case.dry)
    message = str(raised.value)
    assert case.kernel.fn.__name__ in message
    assert any(f":{line}" in message or f"line {line}" in message for line in case.lines()), message


def test_every_origin_has_a_mistake() -> None:
    assert {case.row for case in MISTAKES} == set(ORIGINS)
