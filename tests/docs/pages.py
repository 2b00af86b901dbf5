"""Read the blocks of the documents, and run their code and commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from triton_loom.testing import Forks

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
WRITING = ROOT / "docs/writing_an_op.md"  # its Python blocks are parts of files
ADDING = ROOT / "docs/adding_a_model.md"  # its Python blocks are files

# Warnings are errors, except for two of PyTorch's own: one when it imports Inductor on a CPU, one when Dynamo traces an
# autograd function. Dynamo instantiates `torch.autograd.Function`, which warns, and drops the recorded warning; with
# warnings as errors, that becomes an internal error of Dynamo.
WARNINGS = (
    "-W",
    "error",
    "-W",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "-W",
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
)


class Block(NamedTuple):
    language: str
    text: str
    location: str

    def __str__(self) -> str:
        return self.location


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text()
    result = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert match[1], f"a block of {document.name} without a language:\n{match[2]}"
        line = text[: match.start()].count("\n") + 2
        result.append(Block(match[1], match[2], f"{document.relative_to(ROOT)}:{line}"))
    return [block for block in result if block.language == language]


def lines(document: Path) -> list[tuple[str, str]]:
    """Return (command, location) for every line of the bash blocks, split at &&, without comments."""
    return [
        (command.strip(), block.location)
        for block in blocks(document, "bash")
        for line in block.text.splitlines()
        for command in re.sub(r"\s+#.*", "", line).split("&&")
        if command.strip()
    ]


def run(*command: str, forks: Forks | None = None, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command in a checkout, in one of `forks` if it is a Python script, and return its output."""
    if forks is not None:
        done = forks.run(*command, cwd=cwd, **environment)
    else:
        env = os.environ | environment
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def program_of(name: str) -> str:
    """Return the script of that name that belongs to this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(name, path=path)
    assert program is not None
    return program


def run_text(text: str, directory: Path, forks: Forks | None) -> str:
    """Return the output of a Python script, with warnings as errors. Kernels must be defined in a file."""
    script = directory / "script.py"
    script.write_text(text)
    python = [] if forks is not None else [sys.executable, *WARNINGS]
    return run(*python, str(script), forks=forks)


def guide() -> list[str]:
    """Return the commands of "Writing an op", in order. They run in a checkout that contains the op."""
    return [command for command, _ in lines(WRITING) if not command.startswith("pip ")]
