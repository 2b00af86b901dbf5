"""Command line. `weft doctor` runs on machines derived from this one, each lacking one thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import torch
from rich.console import Console
from triton_loom.device import toolchain
from triton_loom.testing import Forks

import weft
from tests.support import IMPORTED
from tests.support.absent import without
from weft import Capabilities
from weft.cli import doctor, main
from weft.lab.commands.published import widths
from weft.lab.published import PUBLISHED, Published
from weft.runtime import loom
from weft.runtime.backend import chosen


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*IMPORTED, flags=("-W", "error")) as forks:
        yield forks


@pytest.fixture(autouse=True)
def default_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)


def doctor_without(
    *missing: str,
    argv: tuple[str, ...] = ("doctor", "--json"),
    forks: Forks | None = None,
    **environment: str,
) -> Any:
    """Run the doctor in a process of its own; in a fork if nothing differs while Weft is imported."""
    if forks is not None:
        assert not missing
        return forks.run("-m", "weft", *argv, **environment)
    code = without(missing, f"from weft.cli import main\nraise SystemExit(main({list(argv)!r}))\n")
    env = os.environ | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def report_without(
    *missing: str, forks: Forks | None = None, **environment: str
) -> tuple[int, dict[str, Any]]:
    done = doctor_without(*missing, forks=forks, **environment)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["healthy"] == (done.returncode == 0)
    return done.returncode, report


def facts(report: dict[str, Any]) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in report["facts"]}


def to_do(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the advice that is not optional; optional packages differ between machines."""
    return [advice for advice in report["advice"] if not advice["optional"]]


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report
    assert report["weft"] == weft.__version__
    assert report["devices"][0]["name"] == "cpu"
    assert len(report["checks"]) == 2 * len(report["devices"])
    assert all(check["ok"] and check["first_ms"] > 0 and check["second_ms"] > 0 for check in report["checks"])
    if not torch.cuda.device_count():
        assert report["devices"][0]["runs"] == "Triton (Loom)"
        assert report["devices"][0]["fp8"] == "conversion"
        assert {"torch", "Triton", "Loom", "C++ compiler", "Triton driver", "Triton cache"} < set(
            facts(report)
        )


def test_module_and_script_agree(forks: Forks) -> None:
    command = [sys.executable, "-m", "weft", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == f"weft {weft.__version__}\n"
    )
    # A command is required, and an unknown one is refused.
    assert forks.run("-m", "weft").returncode == 2


def test_a_machine_without_triton_is_healthy() -> None:
    code, report = report_without("triton", "triton_loom")
    assert code == 0
    assert facts(report)["Triton"] == "not installed"
    assert report["devices"][0]["runs"] == "reference (PyTorch)"
    assert [advice["command"] for advice in to_do(report)] == ["pip install 'triton>=3.7,<3.10'"]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="Triton has a GPU's driver")
def test_a_machine_without_loom_is_healthy() -> None:
    code, report = report_without("triton_loom")
    assert code == 0
    assert facts(report)["Loom"] == "not installed"
    assert facts(report)["Triton driver"] == "none"
    assert report["devices"][0]["runs"] == "reference (PyTorch)"
    (advice,) = to_do(report)
    assert advice["command"] == f"pip install -e {Path(weft.__file__).parents[2] / 'loom'}"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="Triton has a GPU's driver")
def test_a_missing_compiler_is_reported(tmp_path: Path, forks: Forks) -> None:
    """Ops run in plain PyTorch, and the doctor says so; Loom is present but does not work."""
    code, report = report_without(forks=forks, PATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert code == 1
    assert facts(report)["C++ compiler"] == toolchain.NO_COMPILER
    assert to_do(report) == [
        {
            "what": "Loom found no C++ compiler, so ops on CPU tensors run in plain PyTorch",
            "command": "conda install cxx-compiler",  # the PATH has no package manager either
            "broken": True,
            "optional": False,
        }
    ]
    assert report["devices"][0]["runs"] == "reference (PyTorch)"
    assert all(check["ok"] for check in report["checks"])


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="Triton has a GPU's driver")
def test_a_wrong_cxx_is_reported(forks: Forks) -> None:
    code, report = report_without(forks=forks, CXX="/nonexistent/c++ -O1")
    assert code == 1
    assert facts(report)["C++ compiler"].startswith("CXX=/nonexistent/c++ -O1 names no program")
    assert [advice["command"] for advice in to_do(report)] == ["unset CXX"]
    assert report["devices"][0]["runs"] == "reference (PyTorch)"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="Triton has a GPU's driver")
def test_a_failing_compiler_is_reported_with_its_output(tmp_path: Path, forks: Forks) -> None:
    """All of its output is shown, even on a narrow screen."""
    broken = tmp_path / "my-compiler"
    broken.write_text(
        "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo line $i of 9: no license >&2; done; exit 1\n"
    )
    broken.chmod(0o755)
    environment = {"CXX": str(broken), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "80"}
    code, report = report_without(forks=forks, **environment)
    assert code == 1
    for check in report["checks"]:
        assert check["error"].startswith(
            "BuildError: the C++ compiler does not work: it rejects an empty file\n"
        )
        assert "-std=c++17" in check["error"]
        assert check["error"].endswith("line 8 of 9: no license\nline 9 of 9: no license")
    (advice,) = to_do(report)
    assert advice["what"].startswith("The C++ compiler does not build kernels")
    shown = doctor_without(argv=("doctor",), forks=forks, **environment).stdout
    assert all(f"line {i} of 9: no license" in shown for i in range(1, 10))


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'weft[cpu]'"),
        ({"url": "https://example.com/weft.whl", "archive_info": {}}, "pip install 'weft[cpu]'"),
        ({"url": "file://{}", "dir_info": {}}, "pip install '{}/loom'"),
        ({"url": "file:///nowhere", "dir_info": {}}, "pip install 'weft[cpu]'"),
        (
            {"url": "https://example.com/weft.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'triton-loom @ git+https://example.com/weft.git@abc#subdirectory=loom'",
        ),
    ],
    ids=["index", "wheel", "directory", "directory-gone", "git"],
)
def test_loom_is_installed_from_the_source_of_weft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: dict[str, Any] | None, command: str
) -> None:
    """The source is where Weft came from, as pip recorded it."""
    checkout = tmp_path / "a checkout"
    (checkout / "loom").mkdir(parents=True)
    (checkout / "loom" / "pyproject.toml").touch()
    direct_url = json.dumps(origin).replace('{}"', f'{quote(str(checkout))}"') if origin else None
    distribution = SimpleNamespace(read_text=lambda name: direct_url if name == "direct_url.json" else None)
    monkeypatch.setattr(loom.metadata, "distribution", lambda name: distribution)
    monkeypatch.setattr(loom, "__file__", str(tmp_path / "site-packages" / "weft" / "runtime" / "loom.py"))
    assert loom.install_command() == command.format(checkout)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="Triton has a GPU's driver")
def test_an_unwritable_cache_is_reported(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "file").touch()  # a directory without permission would not stop root
    code, report = report_without(forks=forks, TRITON_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert code == 1
    assert not report["cache"]["writable"]
    assert "TRITON_CACHE_DIR" in to_do(report)[0]["command"]


def test_a_cache_that_others_can_write_is_reported(tmp_path: Path, forks: Forks) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    code, report = report_without(forks=forks, TRITON_CACHE_DIR=str(cache))
    assert code == 1
    assert [advice["command"] for advice in to_do(report)] == [f"chmod go-w {cache}"]


def test_forbidden_compilation_is_explained(forks: Forks) -> None:
    code, report = report_without(forks=forks, WEFT_NO_JIT="1")
    if report["devices"][0]["runs"].startswith("Triton"):
        assert code == 1
        assert "unset WEFT_NO_JIT" in [advice["command"] for advice in to_do(report)]
    assert report["environment"]["WEFT_NO_JIT"] == "1"


def test_the_interpreter_is_explained() -> None:
    code, report = report_without(TRITON_INTERPRET="1")
    assert code == 0
    assert report["devices"][0]["runs"] == "reference (PyTorch)"
    assert [advice["command"] for advice in to_do(report)] == ["unset TRITON_INTERPRET"]


def test_only_relevant_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("CXX", "g++")
    environment = doctor.examine().environment
    assert environment["CXX"] == "g++"
    assert "hunter2" not in environment.values()


def test_a_failing_question_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(report: doctor.Report) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_cache", fail)
    report = doctor.examine()
    assert not report.healthy
    assert "could not be examined: RuntimeError: no such thing" in [fact.value for fact in report.facts]
    assert report.devices
    assert report.checks


@pytest.mark.parametrize("op", ["rms_norm", "quantize"])
def test_the_self_test_detects_a_wrong_result(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    original = getattr(doctor, op)

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        changed = x.clone()
        changed[100, 200] *= 1.25
        is_kernel = doctor.launch_device() == "cpu"  # the reference stays correct
        return original(changed if is_kernel and chosen() != "reference" else x, *args, **kwargs)

    monkeypatch.setattr(doctor, op, wrong)
    report = doctor.examine()
    if report.devices[0].runs.startswith("Triton"):
        assert [check.ok for check in report.checks if check.device == "cpu"] == [
            op != "rms_norm",
            op != "quantize",
        ]
        assert not report.healthy


def test_gpus_are_shown_with_their_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are simulated: the self-tests on them must fail, not raise."""
    names = {0: "NVIDIA H100 80GB HBM3", 1: "NVIDIA L4", 2: "Tesla T4"}
    targets = {0: "sm_90", 1: "sm_89"}

    def properties(index: int) -> Any:
        return SimpleNamespace(name=names[index], total_memory=80 << 30)

    def capabilities(device: torch.device) -> Capabilities:
        if device.index == 2:
            raise RuntimeError("Tesla T4 is an sm_75; Weft's kernels need sm_80 or later")
        return Capabilities.of(targets[device.index])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(doctor, "launch_device", lambda: "cuda")
    monkeypatch.setattr(doctor, "capabilities_of", capabilities)
    report = doctor.examine()
    _, h100, l4, t4 = report.devices
    assert (h100.runs, h100.fp8) == ("Triton (sm_90)", "conversion")
    assert (l4.runs, l4.fp8) == ("Triton (sm_89)", "integer")
    assert t4.runs == "nothing"
    assert any("sm_75" in advice.what for advice in report.advice)
    assert not report.healthy
    if torch.version.cuda is None:
        assert {c.device: c.ok for c in report.checks} == {"cpu": True, "cuda:0": False, "cuda:1": False}
    text = shown(report, 100)
    assert "NVIDIA H100 80GB HBM3" in text
    assert "multiprocessors" in text
    assert "attention by" in text
    assert "flash_attn_interface" in h100.attention
    assert (l4.attention, t4.attention) == ("weft", "reference")


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_screen(width: int) -> None:
    text = shown(doctor.examine(), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 40
    for title in ("This machine", "What runs where", "Self-test", "To do"):
        assert title in text


def shown(report: doctor.Report, width: int) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(doctor.render(report))
    return capture.get()


# ---- published rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.number}")
def test_a_published_row_matches_its_workload(row: Published) -> None:
    """The workload moves the bytes of the published shapes; expert lists are shorter than the original map."""
    minimum_mb = row.find().least_bytes() / 1e6
    assert 0.95 * row.megabytes < minimum_mb < 1.01 * row.megabytes


def test_published_prints_counted_and_compiled_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "published", "router product, b", "--most", "4", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["number"] == 5
    assert row["workload"].startswith("router_linear_backward:linghe")
    assert 1 <= row["launches"] <= 2
    assert row["rows"] < 8192
    assert 3.9 < row["least, MB"] <= row["per launch"] <= row["per program"]
    assert row["ratio"] == pytest.approx(row["modelled"] / row["least, MB"], abs=0.01)
    assert 0 < row["registers"] <= 255
    assert row["spilled, B"] == 0
    assert "x128" in row["loads, bits"]
    assert "x128" in row["stores, bits"]
    assert row["limit, us"] == 12.8
    assert row["times the limit"] == pytest.approx(78.1 / 12.8, rel=0.01)
    assert main(["report", "published", "router product, b", "--most", "4"]) == 0
    printed = capsys.readouterr().out
    assert "none was measured on a GPU" in " ".join(printed.split())


def test_widths_are_counted() -> None:
    assert widths([{32: 1, 128: 4}, {128: 2}, {}]) == "6x128 1x32"
