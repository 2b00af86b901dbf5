"""Everything around the code: versions, workflows, forms, the release. Each has one source, and the rest agrees."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import triton_loom
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

import weft
from website.versions import ROLES, supported, table
from weft.cli.doctor import SUPPORTED_TRITON
from weft.language import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
RUN = ROOT / ".ci" / "run"
GITHUB = ROOT / ".github"
VERSIONS = supported()
PROJECTS = [tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in (".", "loom")]


# ---- versions ----------------------------------------------------------------------------------------------


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def bounds(allowed: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low, _, high = allowed.partition(",")
    return number(low.removeprefix(">=")), number(high.removeprefix("<") or "9999")


def test_packages_require_the_versions_of_the_table() -> None:
    for project in PROJECTS:
        assert project["requires-python"] == VERSIONS["python"].allowed
        for name in ("torch", "triton"):
            assert name + VERSIONS[name].allowed in project["dependencies"]
        (tested,) = [c for c in project["classifiers"] if re.search(r"Python :: 3\.", c)]
        assert tested.endswith(f" {VERSIONS['python'].tested['main']}")
    extras = PROJECTS[0]["optional-dependencies"]
    frameworks = [row for row in VERSIONS.values() if row.name not in ("python", "torch", "triton")]
    assert frameworks
    for row in frameworks:
        assert extras[row.name] == [row.package + row.allowed]
        assert (ROOT / "tests" / "integrations" / f"test_{row.name}.py").exists()


def test_tested_versions_are_allowed() -> None:
    for row in VERSIONS.values():
        low, high = bounds(row.allowed)
        assert row.tested, row
        for role, version in row.tested.items():
            assert role in ROLES
            assert low <= number(version) < high, row
        if floor := row.tested.get("floor") or row.tested.get("oldest"):
            assert number(floor)[: len(low)] == low, f"the oldest allowed {row.name} is not tested"


def test_doctor_and_documents_agree_with_the_table() -> None:
    assert VERSIONS["triton"].allowed == f">={SUPPORTED_TRITON[0]},<{SUPPORTED_TRITON[1]}"
    torch, triton = VERSIONS["torch"], VERSIONS["triton"]
    assert number(torch.allowed.removeprefix(">=")) == OLDEST_TORCH
    readme, contributing, developing = (
        (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "docs/developing.md")
    )
    floor = torch.allowed.removeprefix(">=")
    assert f"PyTorch {floor} or later, the first that comes with Triton {SUPPORTED_TRITON[0]}" in readme
    assert f"Python {VERSIONS['python'].allowed.removeprefix('>=')} or later" in readme
    assert table() in developing
    pair = f"PyTorch {torch.tested['floor']} and Triton {triton.tested['floor']}"
    assert pair in " ".join(developing.split())
    assert f"pip install torch=={torch.tested['main']} " in contributing
    assert f"pip install triton=={triton.tested['main']}\n" in contributing
    integrations = (ROOT / "docs" / "integrations.md").read_text()
    for row in VERSIONS.values():
        if row.name not in ("python", "torch", "triton"):
            (line,) = re.findall(rf"^\| {row.package} \|.*$", integrations, re.MULTILINE | re.IGNORECASE)
            assert set(row.tested.values()) <= set(re.findall(r"\d+(?:\.\d+)+", line)), line


def test_run_reads_the_table() -> None:
    """The function in `.ci/run` reads what Python reads, and the script contains no versions of its own."""
    text = RUN.read_text()
    (function,) = re.findall(r"^version\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    asked = sorted(set(re.findall(r"\$\(version (\w+) (\w+)\)", text)))
    assert len(asked) >= 6
    for name, role in asked:
        script = f"{function}; version {name} {role}"
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == VERSIONS[name].tested[role] + "\n"
    assert not re.findall(r"\b\d+\.\d+\.\d+\b", text)


# ---- workflows and forms -----------------------------------------------------------------------------------


def parts_of_run() -> set[str]:
    (line,) = re.findall(r'^  "" \| (.*)\) ;;$', RUN.read_text(), re.MULTILINE)
    return set(line.split(" | "))


def workflow(name: str) -> dict:  # type: ignore[type-arg]
    return yaml.safe_load((GITHUB / "workflows" / name).read_text())  # type: ignore[no-any-return]


def test_run_refuses_unknown_parts() -> None:
    done = subprocess.run([RUN, "slwo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(part in done.stderr for part in parts_of_run())
    assert os.access(ROOT / ".ci" / "release", os.X_OK)


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml"])
def test_workflows_call_what_exists(name: str) -> None:
    for job in workflow(name)["jobs"].values():
        assert job["timeout-minutes"] <= 360
        pythons = [s["with"]["python-version"] for s in job["steps"] if "setup-python" in s.get("uses", "")]
        assert pythons == [VERSIONS["python"].tested["main"]]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            program, *arguments = command.replace("${{ matrix.part }}", "matrix").split()
            assert program == ".ci/run"
            parts = job["strategy"]["matrix"]["part"] if arguments == ["matrix"] else arguments
            assert set(parts) <= parts_of_run()


def test_every_part_runs_in_some_workflow_and_is_documented() -> None:
    nightly = set(workflow("nightly.yml")["jobs"]["run"]["strategy"]["matrix"]["part"])
    assert nightly == parts_of_run() - {"site"}  # every run builds it
    developing = (ROOT / "docs/developing.md").read_text()
    assert all(f"\n.ci/run {part} " in developing for part in nightly)


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_forms_are_well_formed(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert set(form) == {"name", "description", "labels", "body"}
    names = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(names) == len(set(names)) > 1
    for item in form["body"]:
        assert item["type"] in ("markdown", "textarea", "input", "dropdown")
        assert item["attributes"].get("label") or item["type"] == "markdown"


def test_forms_ask_for_reports_that_exist() -> None:
    from weft.cli import main

    for form, command, option in (("bug", "doctor", "--json"), ("wrong_result", "verify", "--out")):
        text = (GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()
        assert f"weft {command} " in text
        assert option in text
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0


# ---- the release -------------------------------------------------------------------------------------------


def home() -> str:
    lines = (ROOT / ".ci" / "home").read_text().splitlines()
    return "".join(line.strip() for line in lines if not line.startswith("#"))


def test_citation_and_addresses_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == weft.__version__
    assert citation["license"] == PROJECTS[0]["license"]
    stated = {citation.get("repository-code")}
    for project in PROJECTS:
        stated.add(project.get("urls", {}).get("Repository"))
    assert stated == {home() or None}, "the project's address is that of .ci/home, everywhere"


def release() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("release", str(ROOT / ".ci" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_release_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = release()
    for _, version in script.PACKAGES.values():
        (tmp_path / version).parent.mkdir(parents=True)
        (tmp_path / version).write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## weft, unreleased\n\n- Later.\n\n## weft, 0.2.0 (2026-12-01)\n\n- An op.\n- More.\n\n"
        "## triton-loom, 0.1.0 (2026-11-30)\n\n- A backend.\n"
    )
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.notes("weft", "0.2.0") == "- An op.\n- More."
    assert script.notes("triton-loom", "0.1.0") == "- A backend."
    assert script.notes("weft", "0.1.0") == ""
    assert script.problems("weft", "0.2.0") == []
    assert len(script.problems("weft", "0.2")) == 3  # not a version, not the package's, not in the changelog
    (wrong,) = script.problems("triton-loom", "0.2.0")
    assert "CHANGELOG.md has no section '## triton-loom, 0.2.0" in wrong
    (wrong,) = script.problems("triton-loom", "0.1.0")
    assert "has version 0.2.0, not 0.1.0" in wrong


def test_versions_of_the_packages_agree() -> None:
    script = release()
    for name, module in (("weft", weft), ("triton-loom", triton_loom)):
        path = ROOT / script.PACKAGES[name][1]
        assert f'__version__ = "{module.__version__}"\n' in path.read_text()
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    for heading in headings:
        assert re.fullmatch(r"(weft|triton-loom), (unreleased|\d+\.\d+\.\d+\S* \(\d{4}-\d\d-\d\d\))", heading)


@pytest.mark.slow
def test_release_in_a_clone(tmp_path: Path) -> None:
    """A dirty tree is refused, and tagged once the changelog has the version. The wheels work in empty environments."""
    clone = tmp_path / "weft"
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "clone", "-q", ROOT, clone], check=True)
    shutil.copy(ROOT / ".ci" / "release", clone / ".ci" / "release")
    changelog, version = clone / "CHANGELOG.md", weft.__version__

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, clone / ".ci" / "release", *arguments, "--out", tmp_path / "dist"]
        env = os.environ | {"GIT_COMMITTER_NAME": "test", "GIT_COMMITTER_EMAIL": "test@localhost"}
        return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)

    changelog.write_text(changelog.read_text() + "\n")
    refused = run("--tag", version)
    assert refused.returncode == 1
    assert "the tree is not clean" in refused.stdout
    assert "CHANGELOG.md has no section" in refused.stdout
    assert "built" not in refused.stdout
    changelog.write_text(changelog.read_text().replace(", unreleased", f", {version} (2026-12-01)"))
    subprocess.run([*git, "commit", "-qam", "Release"], cwd=clone, check=True)
    done = run("--tag", version)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "dist").iterdir()) == [
        "triton_loom",
        "weft",
    ]
    assert done.stdout.count("works: ") == 3
    tags = subprocess.run([*git, "tag"], cwd=clone, capture_output=True, text=True, check=True).stdout.split()
    assert tags[-2:] == [f"triton-loom-{version}", f"weft-{version}"]
