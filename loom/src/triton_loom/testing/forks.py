"""Scripts in processes of their own that do not pay for imports, which take longer than what a test wants of them.

Each is forked from one process that has imported some modules and computed nothing, so that no thread of it is missing:

    with Forks("torch", "triton", flags=("-W", "error")) as forks:
        done = forks.run("script.py", "argument", VARIABLE="value")

does what `VARIABLE=value python -W error script.py argument` does. What the modules read from the environment when they
are imported is that of `Forks`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Forks:
    """The process to fork from, started by the first script. `modules` are imported in it, `flags` are those of Python,
    and `environment` is what it has besides this process's."""

    def __init__(self, *modules: str, flags: tuple[str, ...] = (), **environment: str) -> None:
        self.command = [sys.executable, *flags, __file__, *modules]
        self.environment = environment
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._server is not None:
            self._server.communicate()

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, seconds: float = 600, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """What `python script ...` or `python -m module ...` returned and printed."""
        if self._server is None:
            self._server = subprocess.Popen(
                self.command,
                env={
                    **os.environ,
                    **self.environment,
                    "OPENBLAS_NUM_THREADS": "1",
                },  # NumPy starts no threads
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as directory:
            printed = [Path(directory) / name for name in ("stdout", "stderr")]
            for file in printed:
                file.touch()
            argv = [str(argument) for argument in arguments]
            job = {
                "argv": argv,
                "cwd": str(cwd or Path.cwd()),
                "environment": {**os.environ, **self.environment, **environment},
                "printed": [str(file) for file in printed],
            }
            print(json.dumps(job), file=server.stdin, flush=True)
            if not select.select([server.stdout], [], [], seconds)[0]:
                server.kill()
                self._server = None
                raise subprocess.TimeoutExpired(argv, seconds, *(file.read_text() for file in printed))
            answer = server.stdout.readline()
            assert answer, "the process to fork from has ended"
            return subprocess.CompletedProcess(argv, int(answer), *(file.read_text() for file in printed))


def _forked_for_a_job() -> dict[str, Any] | None:
    """In each process that is forked, its job; in the process they are forked from nothing, when no more are wanted."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return dict(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(job: dict[str, Any]) -> None:
    """Run the script of a job, or the module after -m, as Python does."""
    for number, path in enumerate([os.devnull, *job["printed"]]):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = job["cwd"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent.resolve())
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules would hide others of their names
    for module in sys.argv[1:]:
        importlib.import_module(module)
    sys.path.insert(0, "")
    if os.path.isdir("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in what is forked"
    if job := _forked_for_a_job():
        _become(job)
