"""Runs the reproductions in docs/found.md: each begins with a comment that names a project of the table, and asserts
what the text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .projects import PROJECTS, Project
from .run import LOOM
from .sources import bring

FOUND = LOOM / "docs" / "found.md"


def snippets() -> list[tuple[str, str]]:
    """The project and the program of every reproduction."""
    blocks = re.findall(r"```python\n(.*?)```", FOUND.read_text(), re.DOTALL)
    named = [(re.match(r"# (\S+) (\S+)\n", block), block) for block in blocks]
    for name, block in named:
        known = name and any((p.name, p.version) == name.groups() for p in PROJECTS)
        assert known, f"a reproduction has to begin with the name and version of a project: {block[:80]}"
    return [(name.group(1), block) for name, block in named if name]


def check(ci: bool, jobs: int = 2) -> list[str]:
    """The reproductions that do not show what they say, of which `jobs` run at a time; with `ci`, of projects that are
    run there."""
    chosen = [
        (project, program)
        for name, program in snippets()
        for project in PROJECTS
        if project.name == name and (not ci or any(suite.ci for suite in project.suites))
    ]
    for project, _ in chosen:
        bring(project)
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for (project, _), said in zip(chosen, pool.map(lambda piece: said_by(*piece), chosen), strict=True):
            print(f"found.md, {project.name}: {said or 'as written'}", flush=True)
            failed += [f"found.md, {project.name}"] if said else []
    return failed


def said_by(project: Project, program: str) -> str:
    """Nothing, or what a reproduction that failed said."""
    path = [LOOM, LOOM / "src", *(where / part for where in bring(project) for part in project.path)]
    environment = {
        **os.environ,
        **project.environment,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_DEFAULT_BACKEND": "cpu",
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.py"  # Triton reads the kernels in it
        file.write_text(program)
        ended = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    return ended.stderr or f"ended with {ended.returncode}" if ended.returncode else ""
