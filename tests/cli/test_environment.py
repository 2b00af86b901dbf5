"""Mistakes in the environment of a command: each is reported with a reason, before any work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import weft
from weft.cli import doctor, main
from weft.ops.glu.kernels import glu_kernel
from weft.runtime import launch
from weft.runtime.environment import VARIABLES

SOURCES = Path(weft.__file__).parent

COMPILING = {
    "verify": ["verify", "--op", "row_map"],
    "traffic": ["report", "traffic", "row_map"],
    "published": ["report", "published", "1"],
    "audit": ["audit", "--op", "row_map"],
    "tune": ["tune", "--op", "row_map"],
    "bench": ["bench", "--op", "row_map"],
    "aot build": ["aot", "build", "--target", "sm_90", "--op", "row_map", "--out", "/dev/null"],
}


@pytest.fixture
def no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache directory that even root cannot write to: it is a file."""
    file = tmp_path / "cache"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file))
    return file


@pytest.mark.parametrize("command", COMPILING)
def test_an_unwritable_cache_is_refused_before_the_work(
    command: str, no_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message replaces failures of every check and tracebacks of Triton."""
    assert main(COMPILING[command]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"Triton cannot write to its cache {no_directory}: Not a directory" in said
    assert "export TRITON_CACHE_DIR=" in said


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a new process: `glu` is not compiled yet."""
    monkeypatch.setattr(glu_kernel, "variants", {})
    launch.Launch.of.cache_clear()


@pytest.mark.usefixtures("not_compiled")
def test_an_op_reports_an_unwritable_cache(no_directory: Path) -> None:
    """The message replaces a bare NotADirectoryError with a name of 52 letters."""
    with pytest.raises(
        RuntimeError, match=rf"cannot write to its cache {no_directory}.*Set TRITON_CACHE_DIR"
    ):
        weft.glu(torch.randn(3, 34, dtype=torch.float16))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "gpu"])
def test_an_unknown_device_is_refused_with_those_of_weft(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's own error lists twenty devices that Weft does not run on."""
    assert main(["verify", "--op", "row_map", "--device", device]) == 2
    assert capsys.readouterr().err == f"{device!r} is not a device: use cpu, cuda or cuda:0\n"


def test_the_list_of_variables_matches_the_sources() -> None:
    texts = [path.read_text() for path in SOURCES.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(WEFT_[A-Z_]+)"', text)}
    assert named - {"WEFT_EXAMPLE", "WEFT_NOTHING"} == set(VARIABLES)


def test_the_doctor_reports_variables_that_weft_does_not_read() -> None:
    """A misspelled WEFT_BACKNED=reference changes nothing, so the doctor must say so."""
    report = doctor.Report(environment={"WEFT_BACKNED": "reference", "WEFT_QUIET": "1", "TRITON_ANY": "1"})
    doctor._environment(report)
    (advice,) = [each for each in report.advice if "does not read the variable" in each.what]
    assert advice.what == "Weft does not read the variable WEFT_BACKNED; did you mean WEFT_BACKEND?"
    assert advice.command == "unset WEFT_BACKNED"
    assert not advice.broken


@pytest.mark.usefixtures("not_compiled")
def test_bench_without_a_time_of_weft_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing bundle must not yield a table of dashes with exit code 0."""

    def missing(*_: object) -> None:
        raise launch.bundle.BundleError("x.weft is not a bundle of Weft")

    monkeypatch.setattr(launch.bundle, "find", missing)
    assert main(["bench", "--op", "glu", "--most", "1", "--rounds", "2", "--against", "eager"]) == 1
    assert "x.weft is not a bundle" in " ".join(capsys.readouterr().out.split())
