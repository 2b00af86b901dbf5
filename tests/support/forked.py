"""Scripts in processes of their own that do not pay for imports: each is forked from a process that has imported
PyTorch and Weft, and has computed nothing yet, so that no thread of it would be missing.

    with Forks() as forks:
        done = forks.run("script.py", "argument")

As `python -W error script.py argument` does, but for the imports.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Forks:
    """The process to fork from, started by the first script; `environment` is what it has besides this one's."""

    def __init__(self, **environment: str) -> None:
        self.environment = environment
        self.server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *failure: Any) -> None:
        if self.server is not None:
            self.server.communicate()

    def run(
        self, script: str | Path, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """What a script returned and printed. It finds `environment` in place of those variables of this process, but
        what is imported has read them before."""
        if self.server is None:
            self.server = subprocess.Popen(
                [sys.executable, "-W", "error", __file__],
                env={
                    **os.environ,
                    **self.environment,
                    "OPENBLAS_NUM_THREADS": "1",
                },  # NumPy starts no threads
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with tempfile.TemporaryDirectory() as directory:
            printed = [Path(directory) / name for name in ("stdout", "stderr")]
            job = {
                "argv": [str(script), *arguments],
                "cwd": str(cwd or Path.cwd()),
                "environment": {**os.environ, **self.environment, **environment},
                "printed": list(map(str, printed)),
            }
            print(json.dumps(job), file=self.server.stdin, flush=True)
            answer = self.server.stdout.readline()
            assert answer, "the process to fork from has ended"
            return subprocess.CompletedProcess(
                job["argv"], int(answer), *(path.read_text() for path in printed)
            )


def forked_for_a_job() -> dict[str, Any] | None:
    """In each process that is forked, its job; in the process they are forked from nothing, when no more are wanted."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return dict(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """Run the script of a job, or the module after -m, as Python does."""
    for number, path in enumerate([os.devnull, *job["printed"]]):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
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
    import torch._dynamo  # noqa: F401
    import triton_loom.testing  # noqa: F401

    import weft.cli
    import weft.workloads  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in what is forked"
    if job := forked_for_a_job():
        become(job)
