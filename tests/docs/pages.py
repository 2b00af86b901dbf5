"""Read the blocks of the documents, and run what they say."""

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

# A warning is an error, but for two of PyTorch's own: one when it imports its Inductor on a CPU, and one when Dynamo
# traces an autograd function. It instantiates `torch.autograd.Function`, which warns, and records the warning to drop
# it; where warnings are errors, that becomes an internal error of Dynamo.
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
    place: str

    def __str__(self) -> str:
        return self.place


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text()
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert match[1], f"a block of {document.name} without a language:\n{match[2]}"
        line = text[: match.start()].count("\n") + 2
        found.append(Block(match[1], match[2], f"{document.relative_to(ROOT)}:{line}"))
    return [block for block in found if block.language == language]


def lines(document: Path) -> list[tuple[str, str]]:
    """(command, place) of every line of the bash blocks, split at &&, without comments."""
    return [
        (command.strip(), block.place)
        for block in blocks(document, "bash")
        for line in block.text.splitlines()
        for command in re.sub(r"\s+#.*", "", line).split("&&")
        if command.strip()
    ]


def run(*command: str, forks: Forks | None = None, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command in a checkout, in one of `forks` if it is a Python script, and return what it prints."""
    if forks is not None:
        done = forks.run(*command, cwd=cwd, **environment)
    else:
        env = os.environ | environment
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def program_of(name: str) -> str:
    """The script of that name that belongs to this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    assert found is not None
    return found


def run_text(text: str, directory: Path, forks: Forks | None) -> str:
    """What a Python script prints, in which a warning is an error. Kernels have to be defined in a file."""
    script = directory / "script.py"
    script.write_text(text)
    python = [] if forks is not None else [sys.executable, *WARNINGS]
    return run(*python, str(script), forks=forks)


def guide() -> list[str]:
    """Return the commands of "Adding an op", in order. They are for a checkout that has the op."""
    text = CONTRIBUTING.read_text()
    first, last = (text[: text.index(h)].count("\n") for h in ("## Adding an op", "### An op whose result"))
    return [c for c, place in lines(CONTRIBUTING) if first < int(place.rpartition(":")[2]) < last]
