"""Run scripts in their own processes without paying for slow imports each time.

Each is forked from one process that has imported some modules but started no thread, since forks would miss it:

    with Forks("torch", "triton", flags=("-W", "error")) as forks:
        done = forks.run("script.py", "argument", VARIABLE="value")

is equivalent to `VARIABLE=value python -W error script.py argument`. Modules read the environment of `Forks` when
they are imported.
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
    """Process to fork from, started by the first script.

    It imports `modules`, runs with the Python flags `flags` and adds `environment` to this process's variables.
    """

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
        """Run `python script ...` or `python -m module ...`; return its exit code and output."""
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
            output_files = [Path(directory) / name for name in ("stdout", "stderr")]
            for file in output_files:
                file.touch()
            argv = [str(argument) for argument in arguments]
            job = {
                "argv": argv,
                "cwd": str(cwd or Path.cwd()),
                "environment": {**os.environ, **self.environment, **environment},
                "printed": [str(file) for file in output_files],
            }
            print(json.dumps(job), file=server.stdin, flush=True)
            if not select.select([server.stdout], [], [], seconds)[0]:
                server.kill()
                self._server = None
                raise subprocess.TimeoutExpired(argv, seconds, *(file.read_text() for file in output_files))
            answer = server.stdout.readline()
            assert answer, "the process to fork from has ended"
            return subprocess.CompletedProcess(
                argv, int(answer), *(file.read_text() for file in output_files)
            )


def _fork_for_each_job() -> dict[str, Any] | None:
    """Fork a child for each job on stdin. Return the job in the child, None in the parent when stdin ends."""
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
    del sys.path[0]  # this file's directory, whose modules would shadow others of the same name
    for module in sys.argv[1:]:
        importlib.import_module(module)
    sys.path.insert(0, "")
    if os.path.isdir("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, which forks would miss"
    if job := _fork_for_each_job():
        _become(job)
