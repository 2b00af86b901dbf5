"""Brings projects onto the machine: packages by pip, without their dependencies, and checkouts from GitHub.

Everything is kept in one directory, CONFORMANCE_FIELD or ~/.cache/triton-loom-conformance. What is there already is
used as it is: a checkout may as well be put there by hand, as `<name>-<version>`.
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
    """The directories to import a project and what it needs from, the project's own first."""
    own = FIELD / f"{project.name}-{project.version}"
    if project.pip:
        install(f"{project.pip}=={project.version}", own)
    else:
        check_out(f"{project.github}@{project.version}", own)
    for package in project.needs:
        install(package, FIELD / package)
    return [own, *(FIELD / package for package in project.needs)]


def tests_of(project: Project) -> Path:
    """The directory that a project's own tests are in."""
    if project.tests is None:
        return bring(project)[0]
    where = FIELD / f"{project.name}-tests-{project.tests.partition('@')[2]}"
    check_out(project.tests, where)
    return where


def install(requirement: str, where: Path) -> None:
    """Without dependencies: no other torch may come along."""
    if where.exists():
        return
    begun = where.with_name(where.name + ".part")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--target",
        str(begun),
        requirement,
    ]
    _whole(command, begun, where)


def check_out(repository: str, where: Path) -> None:
    """Of a repository on GitHub, owner/name@version."""
    if where.exists():
        return
    name, _, version = repository.partition("@")
    url = f"https://github.com/{name}"
    begun = where.with_name(where.name + ".part")
    steps = [
        f"git init -q {begun}",
        f"cd {begun}",
        f"git fetch -q --depth 1 {url} {version}",
        "git checkout -q FETCH_HEAD",
    ]
    _whole(["sh", "-c", " && ".join(steps)], begun, where)


def _whole(command: list[str], begun: Path, where: Path) -> None:
    """What is in place is complete: it gets its name at the end."""
    where.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(begun, ignore_errors=True)
    subprocess.run(command, check=True)
    begun.rename(where)
