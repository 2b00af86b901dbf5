"""Packages that commands need: without one a command is refused in one line, and `weft doctor` agrees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.absent import without
from weft.cli import doctor, main
from weft.cli.needs import PACKAGES, Package

# The smallest request to each command.
COMMANDS = {
    "weft verify": ["verify", "--op", "dequantize", "--quick"],
    "weft prove": ["prove", "--op", "dequantize"],
    "weft audit": ["audit", "--op", "dequantize", "--target", "sm_90"],
    "weft tune": ["tune", "--op", "dequantize", "--most", "0.05", "--out", "{}/tuned.json"],
    "weft tune --target": ["tune", "--op", "dequantize", "--target", "sm_90"],
    "weft report traffic": ["report", "traffic", "dequantize:linghe", "--most", "1"],
    "weft report published": ["report", "published", "router product, b", "--most", "1"],
    "weft aot build --target cpu": ["aot", "build", "--target", "cpu", "--op", "dequantize", "--out", "{}/out"],
    "weft aot build": ["aot", "build", "--target", "sm_90", "--op", "dequantize", "--out", "{}/out"],
    "weft bench": ["bench", "--op", "dequantize", "--most", "1", "--rounds", "2", "--against", "eager"],
    "weft audit --plot": ["audit", "--op", "dequantize", "--plot", "{}/a.svg"],
    "weft bench --plot": ["bench", "--op", "dequantize", "--most", "1", "--rounds", "2", "--plot", "{}/b.svg"],
    "weft doctor": ["doctor"],
}  # fmt: skip
PLOTS = ("weft audit --plot", "weft bench --plot")
NEEDED = [
    (package, command)
    for package in PACKAGES
    for name in package.commands
    for command in (PLOTS if name.endswith("--plot") else (name,))
]


@pytest.mark.parametrize(("package", "command"), NEEDED, ids=lambda value: getattr(value, "module", value))
def test_a_command_without_a_package_that_it_needs_is_refused_in_one_line(
    package: Package,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, p=None: None if name == package.module else real(name, p)
    )
    assert main([argument.format(tmp_path) for argument in COMMANDS[command]]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert package.name in said
    assert package.install() in said
    # If a command refuses to run without a package, the doctor advises installing it, in the same words.
    (advice,) = [each for each in doctor.examine().advice if each.command == package.install()]
    assert package.name in advice.what
    assert not advice.broken


def test_every_command_that_needs_a_package_is_tried() -> None:
    assert {name for package in PACKAGES for name in package.commands} <= {*COMMANDS, "weft ... --plot"}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["triton_loom", "numpy", "z3", "matplotlib"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_package_works_or_is_refused(command: str, module: str, tmp_path: Path) -> None:
    """No command ends in a traceback: the list of what commands need is complete."""
    argv = [argument.format(tmp_path) for argument in COMMANDS[command]]
    code = without((module,), f"from weft.cli import main\nraise SystemExit(main({argv!r}))\n")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 2)
    if done.returncode == 2:
        lacking = [package for package in PACKAGES if package.module == module or package.is_missing]
        assert any(package.install() in done.stderr for package in lacking)
