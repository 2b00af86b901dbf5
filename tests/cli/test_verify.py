"""`weft verify`: sound ops pass, broken kernels are named, and a report repeats a failure."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from triton_loom.testing import Forks

import weft
from tests.support import IMPORTED
from weft.cli import main
from weft.lab.calls import assert_same, results, run, small, under
from weft.lab.checks import CHECKS
from weft.lab.families import for_op


def test_a_sound_op_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["verify", "--op", "dequantize", "--quick", "--out", str(out)]) == 0
    assert " 0 failed" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["failed"] == 0
    assert report["passed"] >= 3
    assert {verdict["check"] for verdict in report["verdicts"]} == set(CHECKS)
    assert report["machine"]["weft"] == weft.__version__


BREAK = """
import sys
from triton_loom.testing import mutant
from weft.cli import main
from weft.ops.quantize.kernels import dequantize_kernel as kernel

kernel.fn = mutant(kernel.fn, "values.to(out_ptr", "(2 * values).to(out_ptr")
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_broken_kernel_is_named_and_its_report_repeats_the_failure(tmp_path: Path) -> None:
    (script := tmp_path / "broken.py").write_text(BREAK)
    out = tmp_path / "report.json"
    forks = Forks(*IMPORTED)
    first = forks.run(script, "verify", "--op", "dequantize", "--quick", "--out", out)
    assert first.returncode == 1, first.stderr
    failures = [v for v in json.loads(out.read_text())["verdicts"] if v["outcome"] == "failed"]
    assert failures
    for failure in failures:
        assert failure["op"] == "dequantize"
        assert failure["workload"] in first.stdout.replace("\n", "")
        assert f"seed {failure['seed']}" in first.stdout
    program, *arguments = shlex.split(failures[0]["repeat"])
    assert program == "weft"
    again = forks.run(script, *arguments, "--out", out)
    assert again.returncode == 1, again.stderr
    (verdict,) = json.loads(out.read_text())["verdicts"]
    assert {**verdict, "seconds": 0} == {**failures[0], "seconds": 0}
    assert main(arguments) == 0, "the intact kernel passes"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "rmsnorm"], "there is no op 'rmsnorm'. Did you mean 'rms_norm'"),
        (["--check", "speed"], "there is no check 'speed'; there are accuracy"),
        (["--device", "cuda"], "PyTorch sees no GPU here"),
        (["--device", "mps"], "Weft has no kernels for mps"),
        (["--device", "gpu"], "gpu"),
        (["--emulate", "sm_70"], "no 'sm_70' can be emulated; there are sm_80"),
        (["--emulate", "gfx942"], "no 'gfx942' can be emulated"),
        (["--emulate", "sm_90", "--device", "cuda"], "leave out --device"),
        (["--workload", "no such model"], "no workload has 'no such model' in its name"),
    ],
)
def test_arguments_that_cannot_be_verified_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_emulated_gpu_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    """Stock Triton's own launcher and PTX are used."""
    arguments = [
        "verify",
        "--emulate",
        "sm_80",
        "--op",
        "dequantize",
        "--quick",
        "--check",
        "same_bits_as_the_cpu",
    ]
    assert main(arguments) == 0
    assert "sm_80, emulated" in capsys.readouterr().out


def test_tensors_go_to_the_device_and_come_back() -> None:
    """Results, gradients, and quantized results under inference_mode are moved: to PyTorch "cpu:0" is another device
    than "cpu", so every tensor moves."""
    for workload in (for_op("norm")[0], next(w for w in for_op("norm") if "mx" in w.options)):
        call = small(workload)
        wanted = run(call)
        with under(device=torch.device("cpu", 0)):
            assert_same(run(call), wanted, "moved")
            with torch.inference_mode():
                forward = results(call)
        assert_same(forward, {name: wanted[name] for name in forward}, "moved under inference_mode")
