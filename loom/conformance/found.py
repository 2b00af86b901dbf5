"""Runner of the reproductions in docs/found.md: each begins with a comment that names a project of the table, and
asserts what the text says."""

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
    """Return the project and the program of every reproduction."""
    blocks = re.findall(r"```python\n(.*?)```", FOUND.read_text(), re.DOTALL)
    named = [(re.match(r"# (\S+) (\S+)\n", block), block) for block in blocks]
    for name, block in named:
        is_listed = name and any((p.name, p.version) == name.groups() for p in PROJECTS)
        assert is_listed, f"a reproduction must begin with the name and version of a project: {block[:80]}"
    return [(name.group(1), block) for name, block in named if name]


def check(ci: bool, jobs: int = 2) -> list[str]:
    """Run the reproductions, `jobs` at a time, and return those that fail; with `ci`, only those of projects that
    continuous integration runs."""
    selected = [
        (project, program)
        for name, program in snippets()
        for project in PROJECTS
        if project.name == name and (not ci or any(suite.ci for suite in project.suites))
    ]
    for project, _ in selected:
        bring(project)
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for (project, _), error in zip(
            selected, pool.map(lambda pair: error_of(*pair), selected), strict=True
        ):
            print(f"found.md, {project.name}: {error or 'as written'}", flush=True)
            failed += [f"found.md, {project.name}"] if error else []
    return failed


def error_of(project: Project, program: str) -> str:
    """Run a reproduction; return its error output if it failed, else ""."""
    path = [LOOM, LOOM / "src", *(directory / part for directory in bring(project) for part in project.path)]
    environment = {
        **os.environ,
        **project.environment,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_DEFAULT_BACKEND": "cpu",
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.py"  # Triton reads the kernels in it
        file.write_text(program)
        completed = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    return completed.stderr or f"ended with {completed.returncode}" if completed.returncode else ""
