"""Installation of projects: packages by pip, without their dependencies, and checkouts from GitHub.

Everything is in one directory, CONFORMANCE_FIELD or ~/.cache/triton-loom-conformance. What exists is used unchanged, so
a checkout can also be put there by hand, as `<name>-<version>`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .projects import Project

FIELD = Path(os.environ.get("CONFORMANCE_FIELD", "~/.cache/triton-loom-conformance")).expanduser().resolve()


def bring(project: Project) -> list[Path]:
    """Install a project and its needs; return the directories to import them from, the project's own first."""
    own = FIELD / f"{project.name}-{project.version}"
    if project.pip:
        install(f"{project.pip}=={project.version}", own)
    else:
        check_out(f"{project.github}@{project.version}", own)
    for package in project.needs:
        install(package, FIELD / package)
    return [own, *(FIELD / package for package in project.needs)]


def tests_of(project: Project) -> Path:
    """Return the directory of a project's own tests."""
    if project.tests is None:
        return bring(project)[0]
    target = FIELD / f"{project.name}-tests-{project.tests.partition('@')[2]}"
    check_out(project.tests, target)
    return target


def install(requirement: str, target: Path) -> None:
    """Install a package without its dependencies, so that no other torch comes along."""
    if target.exists():
        return
    part = target.with_name(target.name + ".part")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--target",
        str(part),
        requirement,
    ]
    _run_then_rename(command, part, target)


def check_out(repository: str, target: Path) -> None:
    """Check out a GitHub repository, given as owner/name@version."""
    if target.exists():
        return
    name, _, version = repository.partition("@")
    url = f"https://github.com/{name}"
    part = target.with_name(target.name + ".part")
    steps = [
        f"git init -q {part}",
        f"cd {part}",
        f"git fetch -q --depth 1 {url} {version}",
        "git checkout -q FETCH_HEAD",
    ]
    _run_then_rename(["sh", "-c", " && ".join(steps)], part, target)


def _run_then_rename(command: list[str], part: Path, target: Path) -> None:
    """Run a command that creates `part`, then rename it, so that whatever is at `target` is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run(command, check=True)
    part.rename(target)
