"""Run tests against a copy of Weft in which a piece of text is replaced by a wrong one.

A server imports PyTorch, Triton and pytest once. For each mutant it forks; the child makes the copy, imports Weft from
there and runs the tests named to it. The server itself never runs a kernel nor a parallel loop: threads do not survive
a fork.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "weft"

# Failures that do not count: the mutant's text is at fault, or its code does not compile.
NOT_A_VERDICT = ("CompilationError", "CompileTimeAssertionFailure", "SyntaxError", "NameError", "UsageError")


@dataclass(frozen=True)
class Mutant:
    """A way to break a kernel: in its own text, or in that of what it calls or what launches it.

    - `kernel`: its name. A test that catches the mutant must launch it.
    - `what`: what is wrong now.
    - `file`, `inside`: the file, relative to the package, and the function in it (or "Class.method") where `old` is
      replaced by `new`: its only occurrence there, or with `nth` that one of `of`, counted from 1.
    - `tests`: node ids that are expected to catch it, relative to `tests`, the quickest first.
    """

    kernel: str
    what: str
    file: str
    inside: str
    old: str
    new: str
    tests: tuple[str, ...]
    nth: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what}"

    def text(self) -> str:
        """Return the file's text with the replacement made."""
        text = (PACKAGE / self.file).read_text()
        begin, end = function_at(text, self.inside)
        count = text.count(self.old, begin, end)
        if count != self.of:
            raise ValueError(
                f"{self}: found {count} times in {self.inside} of {self.file}, not {self.of} times: {self.old!r}"
            )
        position = begin - 1
        for _ in range(self.nth):
            position = text.index(self.old, position + 1)
        return text[:position] + self.new + text[position + len(self.old) :]


@functools.cache
def function_at(text: str, name: str) -> tuple[int, int]:
    """Return where a function or "Class.method" begins and ends in a module's text."""
    body: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        matches = [
            node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        if len(matches) != 1:
            raise ValueError(f"{name} is defined {len(matches)} times")
        body = matches[0].body
    lines = text.splitlines(keepends=True)
    first, last = matches[0].lineno - 1, matches[0].end_lineno
    return sum(map(len, lines[:first])), sum(map(len, lines[:last]))


@dataclass(frozen=True)
class Verdict:
    """Outcome of tests: "passed", "failed", "crashed", "hung", or "invalid" if they could not judge."""

    outcome: str
    test: str = ""
    why: str = ""
    kernels: tuple[str, ...] = ()
    seconds: float = 0.0
    log: str = ""

    @property
    def caught(self) -> bool:
        return self.outcome in ("failed", "crashed", "hung")


class Server:
    """The process that forks. It handles one request at a time."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weft-mutants-"))
        # Caches unchanged kernels, and no other test shares it.
        cache = os.environ.get("WEFT_MUTATION_CACHE") or str(self.directory / "cache")
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )

    def run(self, tests: Sequence[str], mutant: Mutant | None = None, timeout: float = 300.0) -> Verdict:
        change = None if mutant is None else (mutant.file, mutant.text())
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"change": change, "tests": list(tests), "timeout": timeout}
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of mutants ended with exit code {self.process.wait()}")
        reply = json.loads(line)
        return Verdict(**{**reply, "kernels": tuple(reply["kernels"])})

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead server has not read its request
            self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


# ---- the server's side ------------------------------------------------------------------------------------


def serve(directory: Path) -> None:
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.library
    import torch.utils._python_dispatch  # noqa: F401
    import triton  # noqa: F401

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep printed output out of the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        replies.write(json.dumps(asdict(_judge(directory, request))) + "\n")
        replies.flush()


def _judge(directory: Path, request: Any) -> Verdict:
    begin = time.monotonic()
    read, write = os.pipe()
    log = directory / "log"
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 70
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = _child(directory, request, write)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    events, hung = _events(read, child, begin + request["timeout"])
    _, status = os.waitpid(child, 0)
    facts: dict[str, Any] = {"test": "", "why": "", "kernels": ()}
    for event in events:
        if event.get("why") or not facts["why"]:  # the first failure, or the test that was running
            facts |= event
    if hung:
        outcome = "hung"
    elif os.WIFSIGNALED(status):
        outcome = "crashed"
        facts["why"] = signal.Signals(os.WTERMSIG(status)).name
    else:
        code = os.WEXITSTATUS(status)
        verdict = code == 1 and facts["why"] and facts["why"] not in NOT_A_VERDICT
        outcome = "passed" if code == 0 else "failed" if verdict else "invalid"
    tail = "" if outcome == "passed" else log.read_text(errors="replace")[-6000:]
    return Verdict(outcome, **facts, seconds=time.monotonic() - begin, log=tail)


def _events(read: int, child: int, deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Return the child's events until it closes the pipe, and whether it had to be killed."""
    data = b""
    hung = False
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            hung = True
            break
        chunk = os.read(read, 65536)
        if not chunk:
            break
        data += chunk
    os.close(read)
    complete = data.split(b"\n")[:-1]
    return [json.loads(line) for line in complete], hung


class _Reporter:
    """A pytest plugin that reports which test runs, which kernels it launched, and how it failed."""

    def __init__(self, pipe: int, launched: set[str]) -> None:
        self.pipe, self.launched = pipe, launched

    def send(self, **event: Any) -> None:
        os.write(self.pipe, json.dumps(event).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.launched.clear()
        self.send(test=nodeid)

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        kind = call.excinfo.type
        while kind.__module__.startswith("triton") and "Error" not in kind.__name__ and kind.__base__:
            kind = kind.__base__
        self.send(test=node.nodeid, why=kind.__name__, kernels=sorted(self.launched))


def _child(directory: Path, request: Any, pipe: int) -> int:
    import pytest

    sources = PACKAGE.parent
    if request["change"] is not None:
        sources = directory / "src"
        shutil.rmtree(sources, ignore_errors=True)
        shutil.copytree(PACKAGE, sources / "weft")
        file = sources / "weft" / request["change"][0]
        for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            cached.unlink()
        file.write_text(request["change"][1])
    sys.path.insert(0, str(sources))
    import weft
    from weft.runtime import observing

    assert Path(weft.__file__).parent == sources / "weft"
    launched: set[str] = set()
    tests = [f"tests/{test}" for test in request["tests"]]
    plugins = ("cacheprovider", "xdist", "hypothesispytest")  # not needed, and one is slow to import
    options = ["-x", "-q", "--tb=short", f"--rootdir={ROOT}", *(f"-pno:{name}" for name in plugins)]
    options += ["-m", ""]  # include slow tests: they are named explicitly
    with observing(lambda launch, *call: launched.add(launch.kernel.name)):
        return int(pytest.main([*options, *tests], plugins=[_Reporter(pipe, launched)]))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
